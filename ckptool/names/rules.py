"""Rules that change tensors: `OLD[, OLD …] => NEW[, NEW …] [: OPERATION [| OPERATION …]]`.

Reversed, the sides are exchanged and the inverse operations come in inverse order. `NAME beside KEY`, behind the new
names, chooses among several rules on the way back: the first whose KEY is present.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ckptool.commands import FILE, arg, command
from ckptool.errors import CkptoolError, NoMatch, UsageError, counted, listed
from ckptool.names.arithmetic import Arithmetic
from ckptool.names.chain import Operation, parse_operation
from ckptool.names.pattern import Name, parse_expressions, parse_name, split_names

LOOK = "A file of them: rules: ['blocks.{n}.attn.qkv.{p} => layers.{n}.attn.{q,k,v}_proj.{p} : split 0']"
TAKEN_BEFORE = "no key, or only keys that an earlier rule takes"
WHOLE_KEY = "Rules match whole keys; `*` also matches dots."
_ARROW = re.compile(r"\s*=>\s*")
_BESIDE = re.compile(r"\s+beside\s+")
_CHAIN = re.compile(r"(?<!\\)\s:\s+")


@dataclass(frozen=True)
class Rule:
    """A rule. `text`: as given; `place`: where it was read (`rules.yaml, line 3`).

    group: the number of the optional rules with which it matches, or none of them does; 0 where it has to match.
    beside: a key that has to be there as well, on the old side and on the new one.
    """

    text: str
    place: str
    old: tuple[Name, ...]
    new: tuple[Name, ...]
    chain: tuple[Operation, ...] = ()
    group: int = 0
    beside: tuple[Name | None, Name | None] = (None, None)

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
        return checked(turned)

    def error(self, what: str, why: str = "", fix: str = "", *, kind: type[CkptoolError] = UsageError) -> CkptoolError:
        """An error that points at the rule."""
        return kind(f"{self._where}: {what}", why, fix)

    @property
    def origin(self) -> tuple[str, str]:
        """The same for the rules that one text stands for."""
        return self.place, self.text

    @property
    def _where(self) -> str:
        rule = f"the rule {self.text!r}"
        return f"{self.place}: {rule}" if self.place else rule

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
class Translation:
    """Rules, and what goes with them. drop: of the old side.  drop_new: of the new one, when it is reversed.

    fill: make tensors of zeros, as large as they say, like those of an old name, where the new side has them alone; in
    the shape of their operation d0, d1, … are the sizes of the old tensor.  unfill: the same, reversed.
    tied: names of the old side for tensors that it has under other names: left out, and made again on the way back.
    tied_new: such names of the new side, whose files may lack them: left out on the way back.
    complete: what the rules have names for has to be there, for each block alike.
    join: how ranks are joined before, each by an operation of `JOIN_WAYS`.  layers, unstack: prefixes of names, after
    which the number of a layer stands or is to stand.  of_layout: these need not match, as they are for any model of a
    kind.  path: where they were read.
    """

    rules: tuple[Rule, ...]
    variables: dict[str, Arithmetic] = field(default_factory=dict)
    ranges: dict[str, Arithmetic] = field(default_factory=dict)
    drop: tuple[Rule, ...] = ()
    drop_new: tuple[Rule, ...] = ()
    fill: tuple[Rule, ...] = ()
    unfill: tuple[Rule, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    tied_new: tuple[tuple[str, str], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    complete: bool = False
    join: tuple[Rule, ...] = ()
    layers: tuple[str, ...] = ()
    unstack: tuple[str, ...] = ()
    of_layout: bool = False
    path: str = field(default="", compare=False)

    @property
    def joins(self) -> bool:
        return bool(self.join or self.layers or self.unstack)

    @property
    def only_renames(self) -> bool:
        return all(rule.only_renames for rule in self.rules) and replace(self, rules=()) == Translation(())

    def reversed(self) -> Translation:
        """The translation back. Raises `UsageError` for a rule that cannot be undone."""
        back = tuple(rule.reversed() for rule in self.rules)
        turned = replace(self, rules=back, drop=self.drop_new, drop_new=self.drop, fill=(), unfill=self.fill)
        return replace(turned, tied=self.tied_new, ties=self.tied, join=(), layers=(), unstack=())


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


def refuse_idle(idle: Iterable[Rule], matches: str, why: str) -> None:
    """Raises `NoMatch` for the first of rules that match no key."""
    for rule in idle:
        place = f" ({rule.place})" if rule.place else ""
        raise NoMatch(
            f"the rule {rule.text!r}{place} matches {matches}",
            why,
            f"See the keys: {command('inspect', FILE, all=True)}",
        )


def parse_setting(text: str) -> tuple[str, int]:
    """The name and number of `--set heads=12`. Raises `UsageError`."""
    name, _, number = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_]\w*", name.strip()) or not re.fullmatch(r"\s*-?[0-9]{1,15}\s*", number):
        raise UsageError(f"{text!r} is not of the form NAME=NUMBER", "", f"For example: {arg(set='heads=12')}")
    return name.strip(), int(number)
