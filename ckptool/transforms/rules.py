"""Rules for new keys: `OLD => NEW`, both for the whole key, from the command line or a YAML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ckptool.checkpoint.patterns import match_within_limit
from ckptool.commands import FILE, command
from ckptool.errors import NoMatch, UsageError
from ckptool.transforms.key_names import KeyName, parse_name

MAX_RULES = 16 << 20  # bytes of a file of them
RULES_LOOK = "A line of one: - 'blocks.{n}.* => layers.{n}.*'"
TAKEN_BEFORE = "no key, or only keys that an earlier rule takes"
WHOLE_KEY = "Rules match whole keys; `*` also matches dots."
_ARROW = re.compile(r"\s*=>\s*")


@dataclass(frozen=True, slots=True)
class Rule:
    """`old => new` for whole keys. `text`: the rule as given; `place`: where it was read (`rules.yaml, line 3`).

    expand: the new key for a match of `pattern`.
    """

    text: str
    pattern: re.Pattern[str]
    expand: Callable[[re.Match[str]], str]
    place: str = ""

    def __call__(self, key: str) -> str | None:
        """The new key, or None if the rule does not match. Raises `UsageError` where a number would be negative."""
        match = match_within_limit(self.pattern.fullmatch, key, self.pattern)
        if match is None:
            return None
        try:
            return self.expand(match)
        except UsageError as error:
            raise error.within(key) from None


class WrittenRule(Protocol):
    """A rule of any kind, as it was given, and where it was read."""

    @property
    def text(self) -> str: ...

    @property
    def place(self) -> str: ...


def refuse_idle(idle: Iterable[WrittenRule], matches: str, why: str) -> None:
    """Raises `NoMatch` for the first of rules that match no key."""
    for rule in idle:
        place = f" ({rule.place})" if rule.place else ""
        raise NoMatch(
            f"the rule {rule.text!r}{place} matches {matches}",
            why,
            f"See the keys: {command('inspect', FILE, all=True)}",
        )


def parse_rule(text: str, place: str = "") -> Rule:
    """A rule from its text: `'blocks.{n}.attn.* => layers.{n}.self_attn.*'`, or `'re:^enc\\.(.*)$ => encoder.\\1'`.

    `*` stands for anything, dots included; `{name}` for something without a dot. `{n+1}` on the right is arithmetic;
    `{n}` is then digits. Raises `UsageError` for a rule without `=>`, with a variable on the right that the left does
    not have, with a brace that is no variable (`\\{` is a brace), or an invalid regular expression.
    """
    old, new = sides(text, place)
    try:
        pattern, expand = (
            _expression(old[3:], new) if old.startswith("re:") else _glob(parse_name(old), parse_name(new))
        )
    except (re.error, IndexError, UsageError) as error:
        raise invalid(text, place, error) from None
    return Rule(text, pattern, expand, place)


def sides(text: str, place: str = "") -> tuple[str, str]:
    """The two sides of a rule. Raises `UsageError` where there are not two."""
    found = _ARROW.split(text.strip())
    if len(found) != 2 or not found[0] or not found[1]:
        cut = not place and text.rstrip().endswith("=")
        raise UsageError(
            f"{f'{place}: ' if place else ''}{text!r} is not a rule",
            "A rule is OLD => NEW, both for the whole key."
            + " In a shell it needs quotes: without them > sends the output into a file." * cut,
            "For example: 'blocks.{n}.* => layers.{n}.*'",
        )
    return found[0], found[1]


def invalid(text: str, place: str, error: Exception) -> UsageError:
    """The error for a rule that cannot work, at its place."""
    reason = error.what if isinstance(error, UsageError) else str(error)
    why = error.why if isinstance(error, UsageError) and error.why else "Every variable on the right must be bound."
    what = f"{f'{place}: ' if place else ''}the rule {text!r} is invalid: {reason}"
    return UsageError(what, why, getattr(error, "fix", ""))


def _expression(old: str, new: str) -> tuple[re.Pattern[str], Callable[[re.Match[str]], str]]:
    """A regular expression, and its template. Raises `UsageError` for a variable in that, which would become text."""
    if found := re.search(r"(?<!\\)\{\w+\s*([+-]\s*\w+\s*)?\}", new):
        raise UsageError(f"{found[0]} is for rules without re:; what a regular expression matched is \\1 or \\g<name>")
    pattern = re.compile(old)
    probe = re.compile(f"{pattern.pattern}\n|", pattern.flags).fullmatch("")  # the line break ends a comment of (?x)
    if probe is not None:
        probe.expand(new)
    return pattern, lambda match: match.expand(new)


def _glob(old: KeyName, new: KeyName) -> tuple[re.Pattern[str], Callable[[re.Match[str]], str]]:
    """The pattern of the left side, and what makes the right one of its match."""
    if old.expressions:
        raise UsageError(f"{{{old.expressions[0].text}}} is a sum, which belongs on the right side")
    refuse_unbound(new, old.variables)
    pattern = old.pattern({name for each in new.expressions for name in each.names})
    return pattern, lambda match: new.fill(match.groupdict())


def refuse_unbound(new: KeyName, groups: Collection[str]) -> None:
    """Raises `UsageError` for a variable of a name that is not among the groups of the other side."""
    for group, text in new.variables.items():
        if group not in groups and text == "*":
            stars = sum(each.startswith("star") for each in groups)
            raise UsageError(f"the right side has more * than the left ({stars})")
        if group not in groups:
            raise UsageError(f"{text} is not on the left side")
    for name in (name for each in new.expressions for name in sorted(each.names)):
        if f"v_{name}" not in groups:
            raise UsageError(f"{{{name}}} is not on the left side")


def read_rules(path: str) -> list[Rule]:
    """The rules of a YAML file: a list of `OLD => NEW` texts, a mapping of OLD to NEW, or either under `rules:`.

    Raises `UsageError` that points at the line, `FileProblem` if the file cannot be read.
    """
    import yaml

    node = yaml_node(path, MAX_RULES, RULES_LOOK)
    if isinstance(node, yaml.MappingNode) and len(node.value) == 1 and node.value[0][0].value == "rules":
        node = node.value[0][1]
    if isinstance(node, yaml.MappingNode):
        pairs = [(f"{scalar_text(old)} => {scalar_text(new)}", old) for old, new in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(scalar_text(item), item) for item in node.value]
    else:
        raise UsageError(
            f"{path}, line 1: no rules",
            "A rules file is a list of 'OLD => NEW' or a mapping of OLD to NEW.",
            RULES_LOOK,
        )
    return [parse_rule(text, f"{path}, line {item.start_mark.line + 1}") for text, item in pairs]


def yaml_node(path: str, most: int, look: str) -> Any:
    """The tree of a YAML file of at most so many bytes, with its lines; nothing is constructed. look: a file of them.

    Raises `UsageError` that points at the line, `FileProblem` if the file cannot be read.
    """
    import yaml

    from ckptool.checkpoint.files import read_small_text

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # with which a few lines stand for millions
                what = "an alias (names that begin with * are in quotes)"
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(None, None, what, mark)
            return super().compose_node(parent, index)

    text = read_small_text(path, "a file of rules", most)
    try:
        return yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        line, problem = _place_in(text, error)
        raise UsageError(f"{path}, line {line}: {problem}", "The rules file is not valid YAML.", look) from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deep", "Rules are not nested like this.", look) from None


def _place_in(text: str, error: Any) -> tuple[int, str]:
    """The line of a YAML error and the problem; for an invalid character, PyYAML gives the offset only."""
    if (mark := getattr(error, "problem_mark", None)) is not None:
        return mark.line + 1, str(error.problem)
    if isinstance(at := getattr(error, "position", None), int):
        return text.count("\n", 0, at) + 1, f"the character {text[at : at + 1]!r} cannot be in YAML"
    return 1, str(error)


def scalar_text(node: Any) -> str:
    """The text of a YAML scalar as it was written; nothing for a list or mapping, which no rule can be."""
    return node.value if isinstance(node.value, str) else ""
