"""Rules that would make more of a checkpoint fit a target, as what one can pass back to `--rename` or `--rules`.

`links` finds which families of keys are which, by names and shapes; here they become few rules, each tried on all keys.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ckptool.analysis.warm_start import Suggestion
from ckptool.errors import CkptoolError, counted, form, printable
from ckptool.names.rules import parse_rules
from ckptool.names.steps import steps_of
from ckptool.transforms.suggest.families import Trait
from ckptool.transforms.suggest.groups import STACKED, fused
from ckptool.transforms.suggest.links import ORDERED, UNSAID, Goals, Link, Search

LONG = 500  # characters of a key: nothing is suggested for a longer one
MOST_WAYS = 40  # ambiguous findings that are shown
TRIES = 1_000_000  # of a rule on a key; reading a rule counts for `READING` of them
READING = 400
_PARTS = re.compile(r"\.(?![^{}]*\})")  # the dots of a name in a rule, but those within {a.b,c}


def suggest(
    source: Mapping[str, Trait], target: Mapping[str, Trait], placed: Mapping[str, str] | None = None
) -> list[Suggestion]:
    """Suggestions for keys of `source` without a counterpart in `target`: unambiguous ones first, then by gain.

    source: all keys as the rules will see them, with their shapes; None for what has none.  placed: names of the target
    that keys have already; by default those that are equal. All unambiguous suggestions together, in order, are valid
    rules, give no two keys one name and change no key that is placed; so is each of the others alone, given before
    them.
    """
    placed = {key: key for key in source if key in target} if placed is None else placed
    names = set(placed.values())
    ours = {key: source[key] for key in source if key not in placed and len(key) <= LONG}
    theirs = {key: target[key] for key in target if key not in names and key not in source and len(key) <= LONG}
    if not ours or not theirs:
        return []
    search = Search((ours, theirs))
    search.run()
    several = list(fused(*search.free))
    sure = [link for link in search.links if link.certain]
    ways: dict[tuple[str, ...], list[Link]] = defaultdict(list)
    for link in search.links:
        if not link.certain:
            ways[link.origin].append(link)
    writing = Writing(source, target, placed)
    found = list(writing.suggestions(sure, {}, True))
    kept = {key: goal for link in sure for key, goal in link.goals.items()}
    largest = sorted(ways.values(), key=lambda links: -sum(len(link.goals) for link in links))
    others = [each for links in largest[:MOST_WAYS] for each in writing.suggestions(links, kept, False)]
    others.sort(key=lambda each: -each.agree)
    return [*found, *others, *writing.suggestions(several, kept, False)]


@dataclass(slots=True)
class TriedRule:
    """A rule, the links that it is for, what it makes of keys that it is right for, and all that it takes."""

    text: str
    links: list[Link]
    right: set[tuple[str, ...]]
    takes: dict[str, str]
    over: int = 0  # keys that rules before it take
    after: set[int] = field(default_factory=set)  # which have to be tried before it


@dataclass(slots=True, eq=False)
class Writing:
    """The writing of rules for links. source, target: all keys.  placed: keys that have a place, with their names.

    left: how many tries are left; links without a rule by then get none.
    """

    source: Mapping[str, Trait]
    target: Mapping[str, Trait]
    placed: Mapping[str, str]
    left: int = TRIES

    def rules(self, links: Sequence[Link], kept: Collection[str] = ()) -> list[TriedRule]:
        """Rules in the order in which they are to be tried. kept: keys that other rules are for.

        What is special comes first: the fewer parts two names share at their end, the earlier. No rule takes a key
        that belongs to another, or gives a key without a counterpart a name that is somebody's.
        """
        goals: dict[str, tuple[str, ...]] = {key: goal for link in links for key, goal in link.goals.items()}
        taken = {*self.placed.values(), *(name for goal in goals.values() for name in goal[1:])}
        taken |= {key for key in self.source if key not in goals and key not in self.placed}
        owner: dict[str, int] = {}
        written: list[TriedRule] = []
        candidates = [(list(_candidates(link)), link) for link in links]
        for texts, link in sorted(candidates, key=lambda each: (not each[1].chain, len(each[0]))):
            if all(key in owner for key in link.goals):
                continue
            tried = [self._tried(text, goals, taken, kept, owner) for text in texts if self.left > 0]
            fitting = [rule for rule in tried if rule is not None and not rule.takes.keys().isdisjoint(link.goals)]
            if fitting:  # the most keys, less those that rules before it take, and few others
                rule = max(fitting, key=lambda rule: (len(rule.right) - rule.over, -len(rule.takes)))
                owner.update(dict.fromkeys(rule.takes, len(written)))
                written.append(rule)
        for number, rule in enumerate(written):
            rule.links = [link for link in links if any(owner.get(key) == number for key in link.goals)]
        return written

    def _tried(
        self, text: str, goals: Goals, taken: set[str], kept: Collection[str], owner: Mapping[str, int]
    ) -> TriedRule | None:
        """A rule and the keys that it takes; None if it would take one that it must not."""
        self.left -= READING + len(self.source)
        rule, given = TriedRule(text, [], set(), {}), set[str]()
        stack = {f"v_{STACKED}": f"{{{STACKED}}}"}  # whose number stays open
        try:
            steps, _ = steps_of(parse_rules(text), self.source)
            made = [
                (step.rule.operations, *(name.fill({**step.groups, **stack}) for name in step.rule.new))
                for step in steps
            ]
        except CkptoolError:  # a name with what no rule can say, or some of what belongs together
            return None
        for key, new in ((key, new) for step, new in zip(steps, made, strict=True) for key in step.keys):
            stays, fits = key in self.placed, new[1] in self.target and self.target[new[1]] == self.source[key]
            if key in owner:
                rule.over += 1
                rule.after |= {owner[key]}
            elif key in goals and new == goals[key]:
                rule.right.add(new)
                rule.takes[key] = new[1]
            elif key in goals or key in kept or (stays and new != ("", self.placed[key])):
                return None
            elif not stays and new != ("", key):
                if new[0] or new[1] in taken or new[1] in given or fits:
                    return None
                rule.takes[key] = new[1]
                given.add(new[1])
        return rule if rule.right else None

    def suggestions(self, links: Sequence[Link], kept: Collection[str], certain: bool) -> Iterator[Suggestion]:
        """Links as suggestions, the largest first: the rules of one origin, and those that depend on each other."""
        written = self.rules(links, kept)
        group = list(range(len(written)))
        first: dict[tuple[str, ...], int] = {}
        for number, rule in enumerate(written):
            for other in (first.setdefault(rule.links[0].origin, number), *rule.after):
                old, new = group[other], group[number]
                group = [new if each == old else each for each in group]
        parts = [[rule for rule, mine in zip(written, group, strict=True) if mine == each] for each in {*group}]
        for rules in sorted(parts, key=lambda rules: -sum(len(rule.right) for rule in rules)):
            whys = Counter(link.why for rule in rules for link in rule.links for _ in link.goals if link.why)
            if ORDERED in whys:
                del whys[UNSAID]  # which is less than the order says
            agree = sum(len(rule.right) for rule in rules)
            total = sum(len({*rule.takes.values()}) for rule in rules)  # several keys may become one
            why = "; ".join(why for why, _ in whys.most_common(2))
            yield Suggestion(tuple(rule.text for rule in rules), agree, total, certain, why)


def _candidates(link: Link) -> Iterator[str]:
    """Rules for a link, the most general first: with `*` for parts that both names share before their ends."""
    start = "\\" if link.old.startswith("re:") else ""  # it would begin like a regular expression
    chain = f" : {link.chain}" if link.chain else ""
    old, new = _PARTS.split(link.old), _PARTS.split(link.new)
    for mine, goal in ((0, 0), (1, 1), (1, 3), (3, 1)) if old[-1] != new[-1] else ((0, 0),):
        # So many parts are the leaf, which has another name: `weight_g`, `parametrizations.weight.original0`.
        stems = old[: len(old) - mine], new[: len(new) - goal]
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(*map(reversed, stems), strict=False))
        for length in range(sum(1 for _ in alike), 0, -1):
            ends = old[len(old) - mine :], new[len(new) - goal :]
            sides = (".".join([*stem[:-length], "*", *end]) for stem, end in zip(stems, ends, strict=True))
            yield f"{start}{' => '.join(sides)}{chain}"
    yield f"{start}{link.old} => {link.new}{chain}"


def rules_file(suggestions: Iterable[Suggestion]) -> str:
    """The suggestions as a YAML file for `rename --rules` and `warm-start --rules`; ambiguous ones as comments."""
    import yaml

    lines = ["# Rules OLD => NEW, tried in this order; the first that matches a key counts."]
    for suggestion in sorted(suggestions, key=lambda one: one.unambiguous):
        lines.append("")
        if suggestion.rules:
            total, agree = counted(suggestion.total, "shape"), form(suggestion.agree, "agrees", "agree")
            lines.append(f"# {suggestion.agree:,} of {total} {agree}")
        lines.append(f"# {printable(suggestion.why)}")
        if not suggestion.unambiguous and suggestion.rules:
            lines.append("# AMBIGUOUS: look before you take the # away")
        for rule in suggestion.rules:
            text = yaml.safe_dump([rule], default_style="'", width=1 << 30, allow_unicode=False).strip()
            lines.append(text if suggestion.unambiguous else f"# {text}")
    return "\n".join(lines) + "\n"
