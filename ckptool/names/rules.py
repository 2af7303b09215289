"""Rules that change tensors: `OLD[, OLD …] => NEW[, NEW …] [: OPERATION [| OPERATION …]]`.

Reversed, the sides are exchanged and the inverse operations come in reverse order. `NAME beside KEY`, after the new
names, chooses among several rules on the way back: the first whose KEY is present.

`KINDS` has all operations, most with an inverse; `transforms/translate/apply.py` carries them out. `JOIN_WAYS` has
those that join ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from ckptool.commands import FILE, arg, command
from ckptool.errors import CkptoolError, NoMatch, UsageError, counted, listed, quoted
from ckptool.facts import dataclass, field, replace
from ckptool.names.pattern import Arithmetic, Name, parse_arithmetic, parse_expressions, parse_name, split_names

LOOK = "A file of them: rules: ['blocks.{n}.attn.qkv.{p} => layers.{n}.attn.{q,k,v}_proj.{p} : split 0']"
TAKEN_BEFORE = "no key, or only keys that an earlier rule matched"
WHOLE_KEY = "Rules match whole keys; `*` also matches dots."
_ARROW = re.compile(r"\s*=>\s*")
_BESIDE = re.compile(r"\s+beside\s+")
_CHAIN = re.compile(r"(?<!\\)\s:\s+")


# Operations: what becomes of tensors between their old names and their new ones ------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a rule: `split 0 [h, kv]`, with its numbers and its lists of numbers.

    over: the variable whose numbers it stacks or unstacks.  like: a name, for the `width` of a join.
    parts: how many names it gives, where that counts.  of: the size of the dimension before it, by which it can be
    undone.
    """

    name: str
    numbers: tuple[Arithmetic, ...] = ()
    lists: tuple[tuple[Arithmetic, ...], ...] = ()
    over: str = ""
    like: str = ""
    parts: int = 0
    of: Arithmetic | None = None

    @property
    def kind(self) -> OperationKind:
        return KINDS[self.name]

    def inverse(self) -> Operation | None:
        """The operation that undoes it; None where none does."""
        inverse = self.kind.inverse
        return replace(self, name=inverse, parts=0) if isinstance(inverse, str) else inverse(self) if inverse else None

    def __str__(self) -> str:
        lists = [f"[{', '.join(value.text for value in values)}]" for values in self.lists]
        lists = [" from ".join(lists)] if self.name == "reshape" else lists
        if self.name == "slice":
            lists = [":".join(value.text for value in self.lists[0])]
        over = [f"over {self.over}"] if self.over else [f"of {self.of.text}"] if self.of else []
        return " ".join([self.name, *(value.text for value in self.numbers), *lists, *over])


class OperationKind(NamedTuple):
    """A kind of operation. words: an expression for what follows its name, in any order: an f for `from`, an l for each
    list, an n for each number, an r for a range.  inverse: its name, or a function.

    each: it acts on each tensor by itself.  over: it may be `over` a variable.  of: it may be `of` a size.
    """

    usage: str
    words: str = "n"
    inverse: str | Callable[[Operation], Operation | None] | None = None
    each: bool = True
    over: bool = False
    of: bool = False


def parse_operation(text: str) -> Operation:
    """The operation in a text: `split 0 [h, kv, kv]`. Raises `UsageError`."""
    name, *words = _words(text) or [""]
    if name not in KINDS:
        what = f"unknown operation {name!r}" if name else "no operation after the colon"
        raise UsageError(what, f"Available: {', '.join(KINDS)}.", "For example: 'a => b : transpose'")
    kind, over, of = KINDS[name], "", None
    if kind.over and words[-2:-1] == ["over"] and re.fullmatch(r"\w+", words[-1]):
        over, words = words[-1], words[:-2]
    if kind.of and words[-2:-1] == ["of"]:
        of, words = parse_arithmetic(words[-1]), words[:-2]
    kinds = [  # the letters of `OperationKind.words`
        "l" if word.startswith("[") else "r" if ":" in word else "f" if word == "from" else "n" for word in words
    ]
    if not re.fullmatch(kind.words, "".join(sorted(kinds))):
        raise UsageError(f"{text!r} is not valid for {name}", f"It is written: {kind.usage}")
    lists, numbers = (
        [word for word, of_kind in zip(words, kinds, strict=True) if of_kind in letters] for letters in ("lr", "n")
    )
    return Operation(name, tuple(map(parse_arithmetic, numbers)), tuple(map(_list, lists)), over, of=of)


def _words(text: str) -> list[str]:
    """The words of a text, those in brackets as one."""
    depth, words, word = 0, list[str](), ""
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if not letter.isspace() or depth > 0:
            word += letter
        elif word:
            words.append(word)
            word = ""
    return [*words, word] if word else words


END = Arithmetic("", frozenset(), None)  # of a slice: to the end of the dimension


def _list(text: str) -> tuple[Arithmetic, ...]:
    """The expressions of `[a, b]`, or the begin and end of `a:b`."""
    if not text.startswith("["):
        begin, _, end = text.partition(":")
        return parse_arithmetic(begin or "0"), parse_arithmetic(end) if end else END
    if not text.endswith("]") or not text[1:-1].strip():
        raise UsageError(f"{text!r} is not a list", "For example: [heads, kv_heads]")
    return tuple(parse_arithmetic(part) for part in text[1:-1].split(","))


def _unpermute(op: Operation) -> Operation | None:
    order = [int(axis.text) for axis in op.numbers if axis.text.isdigit()]
    if sorted(order) != list(range(len(op.numbers))):
        return None
    return replace(op, numbers=tuple(parse_arithmetic(str(order.index(axis))) for axis in range(len(order))))


def _unslice(op: Operation) -> Operation | None:
    begin, end = op.lists[0]
    if op.of is None or begin.text != "0" or end is END:
        return None
    return replace(op, name="pad", numbers=(*op.numbers, op.of), lists=(), of=end)


def _unpad(op: Operation) -> Operation | None:
    if op.of is None:
        return None
    return replace(op, name="slice", numbers=op.numbers[:1], lists=((parse_arithmetic("0"), op.of),), of=op.numbers[1])


KINDS: dict[str, OperationKind] = {
    "transpose": OperationKind("transpose [AXIS AXIS]", "(nn)?", inverse="transpose"),
    "permute": OperationKind("permute AXIS AXIS …", "n{1,32}", inverse=_unpermute),
    "reshape": OperationKind(
        "reshape [SIZE, …] [from [SIZE, …]]",
        "l|fll",
        lambda op: replace(op, lists=op.lists[::-1]) if len(op.lists) == 2 else None,
    ),
    "unflatten": OperationKind("unflatten AXIS [SIZE, …]", "ln", inverse="flatten"),
    "flatten": OperationKind("flatten AXIS [SIZE, …]", "ln", inverse="unflatten"),
    "unsqueeze": OperationKind("unsqueeze AXIS", inverse="squeeze"),
    "squeeze": OperationKind("squeeze AXIS", inverse="unsqueeze"),
    "interleave": OperationKind("interleave AXIS PARTS", "nn", inverse="deinterleave"),
    "deinterleave": OperationKind("deinterleave AXIS PARTS", "nn", inverse="interleave"),
    "rope": OperationKind("rope HEADS [SIZE]", "nn?", inverse="unrope"),
    "unrope": OperationKind("unrope HEADS [SIZE]", "nn?", inverse="rope"),
    "split": OperationKind("split AXIS [[SIZE, …]]", "l?n", inverse="cat", each=False),
    "cat": OperationKind("cat AXIS [[SIZE, …]]", "l?n", inverse="split", each=False),
    "stack": OperationKind("stack AXIS [over VARIABLE]", inverse="unstack", each=False, over=True),
    "unstack": OperationKind("unstack AXIS [over VARIABLE]", inverse="stack", each=False, over=True),
    "slice": OperationKind("slice AXIS BEGIN:END [of SIZE]", "nr|ln", inverse=_unslice, of=True),
    "pad": OperationKind("pad AXIS SIZE [of SIZE]", "nn", inverse=_unpad, of=True),
    "add": OperationKind(
        "add NUMBER", inverse=lambda op: replace(op, numbers=(parse_arithmetic(f"-({op.numbers[0].text})"),))
    ),
}


# How ranks are joined ------------------------------------------------------------------------------------------------

Numbers = Mapping[str, int]


class JoinWay(NamedTuple):
    """A way in which tensor-parallel ranks divide a tensor, as rules of `join` name it.

    numbers: the names of those that a rule gives; `like` is the name of a tensor instead.
    axis: the one that is divided; None where each rank has all of it.  parts: the relative sizes of the blocks of a
    rank's share that lie apart in the whole.  rows: how many the whole has, if the numbers tell.  rows_are: what those
    are; empty where a share may have more, which is padding.
    """

    numbers: tuple[str, ...] = ()
    axis: int | None = 0
    parts: Callable[[Numbers], tuple[int, ...]] = lambda numbers: (1,)
    rows: Callable[[Numbers], int] | None = None
    rows_are: str = ""


# Source: megatron/core/tensor_parallel/layers.py (rows and columns), transformer/mlp.py (halves of gated linear units),
# transformer/attention.py (groups of heads).
JOIN_WAYS: dict[str, JoinWay] = {
    "column": JoinWay(),
    "row": JoinWay(axis=1),
    "vocab": JoinWay(("rows",), rows=lambda of: of["rows"]),
    "glu": JoinWay(parts=lambda of: (1, 1)),
    "qkv": JoinWay(
        ("heads", "kv_heads", "head_dim"),
        rows=lambda of: (of["heads"] + 2 * of["kv_heads"]) * of["head_dim"],
        rows_are="queries, keys and values",
    ),
    "qkv_blocks": JoinWay(("heads", "kv_heads"), parts=lambda of: (of["heads"] // of["kv_heads"], 1, 1)),
    "heads": JoinWay(("heads",)),
    "width": JoinWay(("like",)),
    "replicated": JoinWay(axis=None),
    "first": JoinWay(axis=None),
    "skip": JoinWay(axis=None),
}


# Rules ---------------------------------------------------------------------------------------------------------------


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
        """The variables of the old names over which tensors become one."""
        return frozenset(op.over for op in self.chain if op.over and op.name == "stack")

    def reversed(self) -> Rule:
        """The rule that undoes it. Raises `UsageError` where none does."""
        inverse = [op.inverse() for op in reversed(self.chain)]
        if any(name.expression for name in self.old) or None in inverse:
            lost = next((str(op) for op in self.chain if op.inverse() is None), "re:")
            raise self.error(f"it cannot be reversed: {lost} cannot be undone", "Write the inverse rule yourself.")
        chain = tuple(op for op in inverse if op is not None)
        return checked(replace(self, old=self.new, new=self.old, chain=chain, beside=self.beside[::-1]))

    def error(self, what: str, why: str = "", fix: str = "", *, kind: type[CkptoolError] = UsageError) -> CkptoolError:
        """An error that points at the rule."""
        return kind(f"{self._where}: {what}", why, fix)

    @property
    def origin(self) -> tuple[str, str]:
        """Equal for all rules that one text stands for."""
        return self.place, self.text

    @property
    def _where(self) -> str:
        rule = f"the rule {self.text!r}"
        return f"{self.place}: {rule}" if self.place else rule

    def within(self, error: CkptoolError, keys: Sequence[str] = ()) -> CkptoolError:
        """The error from applying the rule to keys, made to point at the rule."""
        if error.what.startswith(self._where):
            return error
        of = f" for {listed(keys, 2)}" if keys else ""
        return type(error)(f"{self._where}{of}: {error.what}", error.why, error.fix)

    @cached_property
    def names(self) -> list[str]:
        """The names in the arithmetic of its operations."""
        names = set[str]()
        for op in self.chain:
            numbers = (*op.numbers, *(number for group in op.lists for number in group), *([op.of] if op.of else []))
            names.update(name for number in numbers for name in number.names)
        return sorted(names)

    @cached_property
    def operations(self) -> str:
        return " | ".join(map(str, self.chain))


@dataclass(frozen=True, slots=True)
class Translation:
    """Rules, and what goes with them. drop: of the old side.  drop_new: of the new one, when it is reversed.

    fill: make tensors of zeros that only the new side has, of the given shape and otherwise like those of an old name;
    in the shape, d0, d1, … are the sizes of the old tensor.  unfill: the same, reversed.
    tied: names of the old side for tensors that it has under other names: left out, and made again on the way back.
    tied_new: such names of the new side, whose files may lack them: left out on the way back.
    complete: what the rules have names for has to be there, for each block alike.
    join: how ranks are joined first, each by an operation of `JOIN_WAYS`.  layers: prefixes of names that the number of
    a layer follows.  of_layout: the rules need not match, as they are for any model of a kind.  path: where they were
    read.
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
    of_layout: bool = False
    path: str = field(default="", compare=False)

    @property
    def joins(self) -> bool:
        return bool(self.join or self.layers)

    @property
    def only_renames(self) -> bool:
        return all(rule.only_renames for rule in self.rules) and replace(self, rules=()) == Translation(())

    def reversed(self) -> Translation:
        """The translation back. Raises `UsageError` for a rule that cannot be undone."""
        back = tuple(rule.reversed() for rule in self.rules)
        turned = replace(self, rules=back, drop=self.drop_new, drop_new=self.drop, fill=(), unfill=self.fill)
        return replace(turned, tied=self.tied_new, ties=self.tied, join=(), layers=())


def parse_rules(text: str, place: str = "") -> list[Rule]:
    """The rules that a text stands for: one for each name, where each has its own on the other side, else one.

    Raises `UsageError`, with its place, for a rule that cannot work.
    """
    names, *chain = _CHAIN.split(text.strip(), maxsplit=1)
    names, *beside = _BESIDE.split(names, maxsplit=1)
    sides = _ARROW.split(names)
    if len(sides) != 2 or not all(sides):
        cut = not place and text.rstrip().endswith("=")
        raise UsageError(
            f"{f'{place}: ' if place else ''}{text!r} is not a rule",
            "A rule is OLD => NEW, each a whole key."
            + " In a shell it needs quotes: without them > sends the output into a file." * cut,
            "For example: 'blocks.{n}.* => layers.{n}.*'",
        )
    try:
        operations = tuple(parse_operation(part) for part in (chain[0].split("|") if chain else ()))
        if sides[0].startswith("re:"):
            old, new = ([name] for name in parse_expressions(sides[0][3:], sides[1]))
        else:
            old, new = ([parse_name(name) for name in split_names(side)] for side in sides)
        beside_names = (None, parse_name(beside[0]) if beside else None)
    except UsageError as error:
        what = f"{f'{place}: ' if place else ''}the rule {text!r} is invalid: {error.what}"
        raise UsageError(what, error.why or "Every variable on the right must be bound.", error.fix) from None
    rule = Rule(text, place, tuple(old), tuple(new), operations, beside=beside_names)
    one_to_one = len(old) == len(new) > 1 and all(op.kind.each for op in operations)
    pairs = zip(old, new, strict=True) if one_to_one else ()
    return [checked(replace(rule, old=(left,), new=(right,))) for left, right in pairs] or [checked(rule)]


def checked(rule: Rule) -> Rule:
    """The rule, with the number of parts of each `split`, and the variables that are numbers. Raises `UsageError` where
    names and operations do not fit."""
    variables = [frozenset(name.variables) for name in rule.old]
    if any(names != variables[0] for names in variables):
        raise rule.error("the names on its left side have different variables", "They are matched together.")
    bound, count, chain = {group[2:] for group in variables[0] if group.startswith("v_")}, len(rule.old), []
    bound |= {name for old in rule.old for sum_ in old.sums for name in sum_.names}
    for place, op in enumerate(rule.chain):
        is_last = not any(after.name in ("split", "unstack") and not after.over for after in rule.chain[place + 1 :])
        if op.over:
            if (op.over in bound) != (op.name == "stack"):
                side = "left" if op.name == "stack" else "right"
                what = f"`{op}` is over a variable that is only on the {side} side"
                raise rule.error(what, "It is stacked or unstacked.")
            bound ^= {op.over}
        elif op.name in ("cat", "stack"):
            if op.lists and len(op.lists[0]) != count:
                raise rule.error(f"`{op}` names {counted(len(op.lists[0]), 'size')} for {counted(count, 'tensor')}")
            count = 1
        elif not op.kind.each:
            if count != 1:
                raise rule.error(f"`{op}` takes one tensor, not {count}")
            count = len(op.lists[0]) if op.lists else len(rule.new) if is_last else 0
            op = replace(op, parts=count)
        chain.append(op)
    if count != len(rule.new):
        outputs = counted(count, "tensor comes", "tensors come")
        what = f"{outputs} out of it, and its right side has {counted(len(rule.new), 'name')}"
        raise rule.error(what, "Each tensor has one name, in the same order.")
    stars = {group for name in rule.new for group in name.variables if group.startswith("star")}
    if stars - variables[0]:
        left = sum(group.startswith("star") for group in variables[0])
        raise rule.error(f"the right side has more * than the left ({left})", "Every one on the right must be bound.")
    if not rule.over <= {group[2:] for group in variables[0]}:
        raise rule.error("`stack … over` a variable that is not on the left side")
    digits = frozenset(name for template in (*rule.old, *rule.new) for sum_ in template.sums for name in sum_.names)
    digits |= {op.over for op in chain if op.over}
    return replace(rule, chain=tuple(chain), old=tuple(replace(name, digits=digits) for name in rule.old))


def refuse_idle(idle: Iterable[Rule], matches: str, why: str, keys: Iterable[str] = ()) -> None:
    """Raises `NoMatch` for the first of these rules. keys: all keys, some of which the rule may be meant for."""
    for rule in idle:
        what = f"the rule {rule.text!r}{f' ({rule.place})' if rule.place else ''} matches {matches}"
        old, arrow, new = (part.strip() for part in rule.text.partition("=>"))
        if arrow and any(key.startswith(f"{old}.") for key in keys):
            raise NoMatch(what, why, f"For all keys below it: {quoted(f'{old}.* => {new}.*')}")
        inner = f"*.{old} => *.{new}"
        with suppress(UsageError):
            if arrow and any(name.match(key) is not None for name in parse_rules(inner)[0].old for key in keys):
                raise NoMatch(what, why, f"For keys that contain it: {quoted(inner)}")
        raise NoMatch(what, why, f"See the keys: {command('inspect', FILE, all=True)}")


def parse_setting(text: str) -> tuple[str, int]:
    """The name and number of `--set heads=12`. Raises `UsageError`."""
    name, _, number = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_]\w*", name.strip()) or not re.fullmatch(r"\s*-?[0-9]{1,15}\s*", number):
        raise UsageError(f"{text!r} is not of the form NAME=NUMBER", "", f"For example: {arg(set='heads=12')}")
    return name.strip(), int(number)
