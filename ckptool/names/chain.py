"""The operations of rules, as they are written: what becomes of tensors between their old names and their new ones.

`KINDS` has them all; most have an inverse. `transforms/translate/operations.py` carries them out. `JOIN_WAYS` has those
that join ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckptool.errors import UsageError
from ckptool.names.arithmetic import Arithmetic, parse_arithmetic


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a rule: `split 0 [h, kv]`, with its numbers, its lists of numbers and its other words.

    over: the variable whose numbers it stacks or unstacks.  parts: of how many names, where that counts.
    of: the size that the dimension has before it, with which it can be undone.
    """

    name: str
    numbers: tuple[Arithmetic, ...] = ()
    lists: tuple[tuple[Arithmetic, ...], ...] = ()
    over: str = ""
    words: str = ""
    parts: int = 0
    of: Arithmetic | None = None

    @property
    def kind(self) -> OperationKind:
        return KINDS[self.name]

    @property
    def arithmetic(self) -> tuple[Arithmetic, ...]:
        """All of its numbers."""
        return *self.numbers, *(each for given in self.lists for each in given), *([self.of] if self.of else [])

    def inverse(self) -> Operation | None:
        """The operation that undoes it; None where none does."""
        found = self.kind.inverse
        return replace(self, name=found, parts=0) if isinstance(found, str) else found(self) if found else None

    def __str__(self) -> str:
        lists = [f"[{', '.join(value.text for value in values)}]" for values in self.lists]
        lists = [" from ".join(lists)] if self.name == "reshape" else lists
        if self.name == "slice":
            lists = [":".join(value.text for value in self.lists[0])]
        over = [f"over {self.over}"] if self.over else [f"of {self.of.text}"] if self.of else []
        return " ".join(
            [self.name, *(value.text for value in self.numbers), *lists, *over, *filter(None, [self.words])]
        )


@dataclass(frozen=True, slots=True)
class OperationKind:
    """A kind of operation. words: an expression for what follows its name, in any order: an f for `from`, an l for each
    list, an n for each number, an r for a range.  inverse: its name, or a function.

    each: it acts on each tensor by itself.  over: it may be `over` a variable.  of: it may be `of` a size.
    free: other words follow, which are read by who carries it out.
    """

    usage: str
    words: str = "n"
    inverse: str | Callable[[Operation], Operation | None] | None = None
    each: bool = True
    over: bool = False
    free: bool = False
    of: bool = False


def parse_operation(text: str) -> Operation:
    """The operation in a text: `split 0 [h, kv, kv]`. Raises `UsageError`."""
    name, *words = _words(text) or [""]
    if name not in KINDS:
        what = f"unknown operation {name!r}" if name else "no operation after the colon"
        raise UsageError(what, f"Available: {', '.join(KINDS)}.", "For example: 'a => b : transpose'")
    kind, over, of, rest = KINDS[name], "", None, list[str]()
    if kind.over and words[-2:-1] == ["over"] and re.fullmatch(r"\w+", words[-1]):
        over, words = words[-1], words[:-2]
    if kind.of and words[-2:-1] == ["of"]:
        of, words = parse_arithmetic(words[-1]), words[:-2]
    if kind.free:
        words, rest = words[: len(kind.words)], words[len(kind.words) :]
    kinds = [_kind(word) for word in words]
    if not re.fullmatch(kind.words, "".join(sorted(kinds))) or kind.free != bool(rest):
        raise UsageError(f"{text!r} is not how {name} is written", f"It is written: {kind.usage}")
    lists, numbers = (
        [word for word, of_kind in zip(words, kinds, strict=True) if of_kind in some] for some in ("lr", "n")
    )
    return Operation(name, tuple(map(parse_arithmetic, numbers)), tuple(map(_list, lists)), over, " ".join(rest), of=of)


def _kind(word: str) -> str:
    """The letter for a word in `OperationKind.words`."""
    if word.startswith("["):
        return "l"
    if ":" in word:
        return "r"
    return "f" if word == "from" else "n"


def _words(text: str) -> list[str]:
    """The words of a text, those in brackets as one."""
    depth, found, word = 0, list[str](), ""
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if not letter.isspace() or depth > 0:
            word += letter
        elif word:
            found.append(word)
            word = ""
    return [*found, word] if word else found


END = Arithmetic("", frozenset(), None)  # of a slice: to the end of the dimension


def _list(text: str) -> tuple[Arithmetic, ...]:
    """The expressions of `[a, b]`, or the begin and end of `a:b`."""
    if not text.startswith("["):
        begin, _, end = text.partition(":")
        return parse_arithmetic(begin or "0"), parse_arithmetic(end) if end else END
    if not text.endswith("]") or not text[1:-1].strip():
        raise UsageError(f"{text!r} is not a list", "For example: [heads, kv_heads]")
    return tuple(parse_arithmetic(part) for part in text[1:-1].split(","))


# Inverses ----


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


def _subtract(op: Operation) -> Operation:
    return replace(op, numbers=(parse_arithmetic(f"-({op.numbers[0].text})"),))


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
    "repeat": OperationKind("repeat AXIS TIMES", "nn", inverse="unrepeat"),
    "unrepeat": OperationKind("unrepeat AXIS TIMES", "nn", inverse="repeat"),
    "add": OperationKind("add NUMBER", inverse=_subtract),
    "resize": OperationKind("resize [SIZE, …] bicubic(cls=1) | rows(mean) | …", "l", free=True),
    "cast": OperationKind("cast DTYPE", "", free=True),
}


# How ranks are joined ------------------------------------------------------------------------------------------------

Numbers = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class JoinWay:
    """A way in which tensor-parallel ranks divide a tensor, as rules of `join` name it.

    numbers: the names of those that a rule gives; `like` is the name of a tensor instead.
    axis: that is divided; None where each rank has all of it.  parts: the sizes, in proportion, of the blocks of a
    rank's share that lie apart in the whole.  rows: of the whole, if the numbers say it.  rows_are: what those are;
    empty where a share may have more, which is padding.
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
