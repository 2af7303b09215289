"""Rules that change tensors: `OLD[, OLD …] => NEW[, NEW …] [: OPERATION [| OPERATION …]]`, and the files of them.

rules:                                   # the first that matches a key counts
  - 'blocks.{n}.attn.qkv.{p} => layers.{n}.attn.{q,k,v}_proj.{p} : split 0'
  - 'experts.{e}.w1.weight => experts.w1 : stack 0 over e'
variables: {heads: num_attention_heads}  # by --set, else of these, else of config.json beside the file
ranges: {l: layers_per_block}            # how many values a variable has, where arithmetic in names has to be solved
drop: ['*.rotary_emb.inv_freq']          # keys that are left out
tied: {lm_head.weight: wte.weight}       # second names of the old side's tensors, which the new side's files leave out
fill: ['h.{n}.ln.bias => zeros [d0] like h.{n}.ln.weight']   # tensors that only the new side has
optional: ['head.{p} => classifier.{p}', [RULE, RULE]]       # rules that may match nothing; in a list, all or none

Reversed, the sides are exchanged and the inverse operations come in inverse order. `NAME beside KEY`, behind the new
names, chooses among several rules on the way back: the first whose KEY is present.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ckptool.checkpoint.patterns import Matcher, matcher
from ckptool.commands import FILE, OUT, Slot, arg, command
from ckptool.errors import CkptoolError, NoMatch, UsageError, counted, listed
from ckptool.names.arithmetic import Arithmetic, parse_arithmetic
from ckptool.names.chain import Operation, parse_operation
from ckptool.names.joining import JOIN_SECTIONS, JoinRules, join_sections
from ckptool.names.pattern import Name, parse_expressions, parse_name, split_names
from ckptool.names.rule_files import line_of, rules_tree, scalar_text

LOOK = "A file of them: rules: ['blocks.{n}.attn.qkv.{p} => layers.{n}.attn.{q,k,v}_proj.{p} : split 0']"
FUNCTIONS = ("size", "count", "root")
TAKEN_BEFORE = "no key, or only keys that an earlier rule takes"
WHOLE_KEY = "Rules match whole keys; `*` also matches dots."
_ARROW = re.compile(r"\s*=>\s*")
_BESIDE = re.compile(r"\s+beside\s+")
_CHAIN = re.compile(r"(?<!\\)\s:\s+")


@dataclass(frozen=True)
class Rule:
    """A rule. `text`: as given; `place`: where it was read (`rules.yaml, line 3`).  `reverses`: it was turned round.

    group: the number of the optional rules with which it matches, or none of them does; 0 where it has to match.
    beside: a key that has to be there as well, on the old side and on the new one.
    """

    text: str
    place: str
    old: tuple[Name, ...]
    new: tuple[Name, ...]
    chain: tuple[Operation, ...] = ()
    reverses: bool = False
    group: int = 0
    beside: tuple[Name | None, Name | None] = (None, None)

    def __call__(self, key: str) -> str | None:
        """The new key by a rule that only renames; None where it does not match.

        Raises `UsageError` where a number would be negative.
        """
        begin, end = self.old[0].ends
        groups = self.old[0].match(key) if key.startswith(begin) and key.endswith(end) else None
        if groups is None:
            return None
        try:
            return self.new[0].fill(groups)
        except UsageError as error:
            raise error.within(key) from None

    @property
    def only_renames(self) -> bool:
        return len(self.old) == len(self.new) == 1 and not self.chain and not self.beside[1]

    @cached_property
    def over(self) -> frozenset[str]:
        """The variables of the old names whose numbers become one tensor."""
        return frozenset(op.over for op in self.chain if op.over and op.name == "stack")

    def reversed(self) -> Rule:
        """The rule that undoes it. Raises `UsageError` where none does."""
        inverse = [op.inverse() for op in reversed(self.chain)]
        if any(name.expression for name in self.old) or None in inverse:
            lost = next((str(op) for op in self.chain if op.inverse() is None), "re:")
            raise self.error(f"it cannot be reversed: {lost} cannot be undone", "Write the rule for the way back.")
        chain = tuple(op for op in inverse if op is not None)
        turned = replace(self, old=self.new, new=self.old, chain=chain, beside=self.beside[::-1])
        return checked(replace(turned, reverses=not self.reverses))

    def error(self, what: str, why: str = "", fix: str = "", *, kind: type[CkptoolError] = UsageError) -> CkptoolError:
        """An error that points at the rule."""
        return kind(f"{self._where}: {what}", why, fix)

    @property
    def origin(self) -> tuple[str, str]:
        """The same for the rules that one text stands for."""
        return self.place, self.text

    @property
    def _where(self) -> str:
        return f"{self.place}: " * bool(self.place) + f"the rule {self.text!r}"

    def within(self, error: CkptoolError, keys: Sequence[str] = ()) -> CkptoolError:
        """An error that came up while the rule was applied to keys, which then points at it."""
        if error.what.startswith(self._where):
            return error
        of = f" for {listed(keys, 2)}" if keys else ""
        return type(error)(f"{self._where}{of}: {error.what}", error.why, error.fix)

    @cached_property
    def names(self) -> list[str]:
        """The names in the arithmetic of its operations."""
        return sorted({name for op in self.chain for each in op.arithmetic for name in each.names})

    @cached_property
    def operations(self) -> str:
        return " | ".join(map(str, self.chain))


@dataclass(frozen=True, slots=True)
class ZeroFill:
    """A tensor of zeros that is made under a new name where the new side has one and the old has not.

    like: the old name of the tensor whose type it has, and whose sizes are `d0`, `d1`, … in its shape.
    """

    text: str
    place: str
    name: Name
    like: Name
    shape: tuple[Arithmetic, ...]


@dataclass(frozen=True, slots=True)
class DropPattern:
    """A pattern of keys that are left out."""

    pattern: str
    place: str
    matches: Matcher


@dataclass(frozen=True, slots=True)
class Translation:
    """Rules, and what goes with them. drop: of the old side.  drop_new: of the new one, when it is reversed.

    tied: names of the old side for tensors that it has under other names: left out, and made again on the way back.
    tied_new: such names of the new side, whose files may lack them: left out on the way back.
    complete: what the rules have names for has to be there, for each block alike.
    """

    rules: tuple[Rule, ...]
    variables: dict[str, Arithmetic] = field(default_factory=dict)
    ranges: dict[str, Arithmetic] = field(default_factory=dict)
    drop: tuple[DropPattern, ...] = ()
    drop_new: tuple[DropPattern, ...] = ()
    fill: tuple[ZeroFill, ...] = ()
    unfill: tuple[ZeroFill, ...] = ()
    join: JoinRules | None = None
    tied: tuple[tuple[str, str], ...] = ()
    tied_new: tuple[tuple[str, str], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    complete: bool = False

    @property
    def only_renames(self) -> bool:
        return all(rule.only_renames for rule in self.rules) and replace(self, rules=()) == Translation(())

    def reversed(self) -> Translation:
        """The translation back. Raises `UsageError` for a rule that cannot be undone."""
        back = replace(
            self, rules=tuple(rule.reversed() for rule in self.rules), drop=self.drop_new, drop_new=self.drop
        )
        return replace(back, fill=(), unfill=self.fill, tied=self.tied_new, ties=self.tied, join=None)


# Rules ---------------------------------------------------------------------------------------------------------------


def parse_rules(text: str, place: str = "") -> list[Rule]:
    """The rules that a text stands for: as many as names, where each name has its own on the other side.

    Raises `UsageError` for one that cannot work, with its place.
    """
    before, *chain = _CHAIN.split(text.strip(), maxsplit=1)
    before, *beside = _BESIDE.split(before, maxsplit=1)
    sides = _ARROW.split(before)
    if len(sides) != 2 or not all(sides):
        cut = not place and text.rstrip().endswith("=")
        raise UsageError(
            f"{f'{place}: ' if place else ''}{text!r} is not a rule",
            "A rule is OLD => NEW, both for the whole key."
            + " In a shell it needs quotes: without them > sends the output into a file." * cut,
            "For example: 'blocks.{n}.* => layers.{n}.*'",
        )
    try:
        operations = tuple(parse_operation(each) for each in (chain[0].split("|") if chain else ()))
        if sides[0].startswith("re:"):
            old, new = ([name] for name in parse_expressions(sides[0][3:], sides[1]))
        else:
            old, new = ([parse_name(name) for name in split_names(side)] for side in sides)
        other = (None, parse_name(beside[0]) if beside else None)
    except UsageError as error:
        what = f"{f'{place}: ' if place else ''}the rule {text!r} is invalid: {error.what}"
        raise UsageError(what, error.why or "Every variable on the right must be bound.", error.fix) from None
    rule = Rule(text, place, tuple(old), tuple(new), operations, beside=other)
    each = len(old) == len(new) > 1 and all(op.kind.each for op in operations)
    pairs = zip(old, new, strict=True) if each else ()
    return [checked(replace(rule, old=(one,), new=(two,))) for one, two in pairs] or [checked(rule)]


def checked(rule: Rule) -> Rule:
    """The rule, with the number of parts of each `split`, and the variables that are numbers. Raises `UsageError` where
    names and operations do not fit."""
    variables = [frozenset(name.variables) for name in rule.old]
    if any(each != variables[0] for each in variables):
        raise rule.error("the names on its left side have different variables", "They are taken together for each.")
    bound, count, chain = {group[2:] for group in variables[0] if group.startswith("v_")}, len(rule.old), []
    bound |= {name for each in rule.old for sum_ in each.sums for name in sum_.names}
    for place, op in enumerate(rule.chain):
        last = not any(after.name in ("split", "unstack") and not after.over for after in rule.chain[place + 1 :])
        count, op = _counted(rule, op, count, bound, len(rule.new) if last else 0)
        chain.append(op)
    if count != len(rule.new):
        made = counted(count, "tensor comes", "tensors come")
        what = f"{made} out of it, and its right side has {counted(len(rule.new), 'name')}"
        raise rule.error(what, "Each tensor has one name, in the same order.")
    stars = {group for name in rule.new for group in name.variables if group.startswith("star")}
    if stars - variables[0]:
        few = sum(group.startswith("star") for group in variables[0])
        raise rule.error(f"the right side has more * than the left ({few})", "Every one on the right must be bound.")
    if not rule.over <= {group[2:] for group in variables[0]}:
        raise rule.error("`stack … over` a variable that is not on the left side")
    digits = frozenset(name for each in (*rule.old, *rule.new) for sum_ in each.sums for name in sum_.names)
    digits |= {op.over for op in chain if op.over}
    return replace(rule, chain=tuple(chain), old=tuple(replace(name, digits=digits) for name in rule.old))


def _counted(rule: Rule, op: Operation, count: int, bound: set[str], names: int) -> tuple[int, Operation]:
    """The number of tensors after an operation, and the operation with the number of its parts; `bound` is kept up."""
    if op.kind.each:
        return count, op
    if op.over:
        if (op.over in bound) != (op.name == "stack"):
            side = "left" if op.name == "stack" else "right"
            raise rule.error(
                f"`{op}` is over a variable that is on the {side} side alone", "It is stacked or unstacked."
            )
        (bound.discard if op.name == "stack" else bound.add)(op.over)
        return count, op
    if op.name in ("cat", "stack"):
        if op.lists and len(op.lists[0]) != count:
            raise rule.error(f"`{op}` names {counted(len(op.lists[0]), 'size')} for {counted(count, 'tensor')}")
        return 1, op
    if count != 1:
        raise rule.error(f"`{op}` takes one tensor, not {count}")
    parts = len(op.lists[0]) if op.lists else names
    return parts, replace(op, parts=parts)


def all_rules(texts: Iterable[str], path: str | None = None) -> Translation:
    """The rules in texts, then those of a file with what goes with them."""
    translation = Translation(()) if path is None else read_rules(path)
    return replace(translation, rules=(*(rule for text in texts for rule in parse_rules(text)), *translation.rules))


def renaming(texts: Iterable[str], path: str | None = None) -> tuple[Rule, ...]:
    """The rules in texts, then those of a file, that give keys other names and leave the tensors as they are.

    Raises `UsageError` for one that does more, or that has a variable on the right side alone.
    """
    translation = all_rules(texts, path)
    for rule in translation.rules:
        if not rule.only_renames:
            raise rule.error("it changes tensors", "Here rules only rename.", _TRANSLATE)
        (old,), (new,) = rule.old, rule.new
        known = {*old.variables.values()} | {f"{{{name}}}" for each in old.sums for name in each.names}
        wanted = [*new.variables.values(), *(f"{{{name}}}" for each in new.sums for name in sorted(each.names))]
        if unbound := [each for each in wanted if each not in known]:
            raise rule.error(f"{unbound[0]} is not on the left side", "Every variable on the right must be bound.")
    if not translation.only_renames:
        raise UsageError(f"{path} has more than rules that rename", "Here rules only rename.", _TRANSLATE)
    return translation.rules


_TRANSLATE = f"Change tensors: {command('translate', FILE, rules_file=Slot('RULES'), out=OUT)}"


def first_match(rules: Iterable[Rule], key: str) -> tuple[Rule | None, str]:
    """The first of rules that rename which takes a key, and the key's new name."""
    found = ((rule, new) for rule in rules if (new := rule(key)) is not None)
    return next(found, (None, key))


def refuse_idle(idle: Iterable[Rule], matches: str, why: str) -> None:
    """Raises `NoMatch` for the first of rules that match no key."""
    for rule in idle:
        place = f" ({rule.place})" if rule.place else ""
        raise NoMatch(
            f"the rule {rule.text!r}{place} matches {matches}",
            why,
            f"See the keys: {command('inspect', FILE, all=True)}",
        )


# Files ---------------------------------------------------------------------------------------------------------------


def read_rules(path: str) -> Translation:
    """The rules of a YAML file, also a plain list of them, or a mapping of OLD to NEW. Raises `UsageError` that points
    at the line, `FileProblem`."""
    node = rules_tree(path, LOOK)
    pairs = node.value if getattr(node, "id", "") == "mapping" else []
    if pairs and scalar_text(pairs[0][0]) not in (*_SECTIONS, *JOIN_SECTIONS):
        return Translation(_rules(node, path))
    return translation_of(node, path)


def translation_of(node: Any, path: str, other: Sequence[str] = ()) -> Translation:
    """The rules in a YAML tree. other: sections that are someone else's."""
    known = (*_SECTIONS, *JOIN_SECTIONS, *other)
    if getattr(node, "id", "") == "sequence":
        return Translation(_rules(node, path))
    if getattr(node, "id", "") != "mapping":
        raise UsageError(f"{path}, line 1: no rules", "A file of rules is a list, or has `rules:`.", LOOK)
    sections: dict[str, Any] = {}
    for key, value in node.value:
        name = scalar_text(key)
        if name not in known or name in sections:
            what = "stands there twice" if name in sections else f"is none of {listed([*_SECTIONS, *JOIN_SECTIONS])}"
            raise UsageError(f"{line_of(key, path)}: {name!r} {what}", "", LOOK)
        sections[name] = value
    parts = {name: _SECTIONS[name](value, path) for name, value in sections.items() if name in _SECTIONS}
    join = {name: value for name, value in sections.items() if name in JOIN_SECTIONS}
    parts |= {"join": join_sections(join, path)} if join else {}
    parts["rules"] = (*parts.get("rules", ()), *parts.pop("optional", ()))
    return Translation(**parts)


def items(node: Any, path: str, kind: str) -> list[Any]:
    """What is in a list or mapping of a YAML file. Raises `UsageError` for something else in its place."""
    if getattr(node, "id", "") != kind:
        raise UsageError(f"{line_of(node, path)}: not a {'list' if kind == 'sequence' else 'mapping'}", "", LOOK)
    return list(node.value)


def _rules(node: Any, path: str) -> tuple[Rule, ...]:
    """The rules of a list, or of a mapping of OLD to NEW."""
    if getattr(node, "id", "") == "mapping":
        texts = [(f"{scalar_text(old)} => {scalar_text(new)}", line_of(old, path)) for old, new in node.value]
    else:
        texts = [(_rule_text(each), line_of(each, path)) for each in items(node, path, "sequence")]
    return tuple(rule for text, place in texts for rule in parse_rules(text, place))


def _rule_text(node: Any) -> str:
    if getattr(node, "id", "") == "mapping" and len(node.value) == 1:  # `- a => b : transpose`, without quotes
        return " : ".join(scalar_text(each) for each in node.value[0])
    return scalar_text(node)


def _optional(node: Any, path: str) -> tuple[Rule, ...]:
    found: list[list[Rule]] = []
    for each in items(node, path, "sequence"):
        is_group = getattr(each, "id", "") == "sequence"
        rules = _rules(each, path) if is_group else parse_rules(_rule_text(each), line_of(each, path))
        found += [[*rules]] if is_group else [[rule] for rule in rules]
    return tuple(replace(rule, group=group) for group, rules in enumerate(found, start=1) for rule in rules)


def _expressions(functions: tuple[str, ...]) -> Callable[[Any, str], dict[str, Arithmetic]]:
    def read(node: Any, path: str) -> dict[str, Arithmetic]:
        found = {}
        for key, value in items(node, path, "mapping"):
            try:
                found[scalar_text(key)] = parse_arithmetic(scalar_text(value), functions)
            except UsageError as error:
                raise error.within(line_of(key, path)) from None
        return found

    return read


def _patterns(node: Any, path: str) -> tuple[DropPattern, ...]:
    texts = [(scalar_text(each), line_of(each, path)) for each in items(node, path, "sequence")]
    return tuple(dropped(text, place) for text, place in texts)


def dropped(pattern: str, place: str) -> DropPattern:
    """A pattern of keys that are left out. Raises `UsageError` for an invalid expression."""
    return DropPattern(pattern, place, matcher(pattern))


def _ties(node: Any, path: str) -> tuple[tuple[str, str], ...]:
    return tuple((scalar_text(name), scalar_text(other)) for name, other in items(node, path, "mapping"))


_FILL = re.compile(r"(\S+)\s+=>\s+zeros\s+\[([^\]]*)\]\s+like\s+(\S+)")


def _fills(node: Any, path: str) -> tuple[ZeroFill, ...]:
    found = []
    for each in items(node, path, "sequence"):
        match, place = _FILL.fullmatch(text := scalar_text(each)), line_of(each, path)
        if match is None:
            what = f"{place}: {text!r} is not of the form NEW => zeros [SIZE, …] like OLD"
            raise UsageError(what, "d0, d1, … are the sizes of the old tensor.", LOOK)
        new, sizes, old = match.groups()
        try:
            shape = tuple(parse_arithmetic(size) for size in sizes.split(",") if size.strip())
            found += [ZeroFill(text, place, parse_name(name), parse_name(old), shape) for name in split_names(new)]
        except UsageError as error:
            raise error.within(place) from None
    return tuple(found)


_SECTIONS: dict[str, Callable[[Any, str], Any]] = {
    "rules": _rules,
    "optional": _optional,
    "variables": _expressions(FUNCTIONS),
    "ranges": _expressions(FUNCTIONS),
    "drop": _patterns,
    "drop_new": _patterns,
    "tied": _ties,
    "tied_new": _ties,
    "fill": _fills,
}


def parse_setting(text: str) -> tuple[str, int]:
    """The name and number of `--set heads=12`. Raises `UsageError`."""
    name, _, number = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_]\w*", name.strip()) or not re.fullmatch(r"\s*-?[0-9]{1,15}\s*", number):
        raise UsageError(f"{text!r} is not of the form NAME=NUMBER", "", f"For example: {arg(set='heads=12')}")
    return name.strip(), int(number)
