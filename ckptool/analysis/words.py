"""How a value of a checkpoint is written: in a line for people, and in JSON; and many keys in few lines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache, cached_property
from itertools import groupby, product
from typing import TYPE_CHECKING, Annotated, Any

from ckptool.checkpoint import Composite, Tensor, TensorEntry
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.tree import Path, segment_text
from ckptool.errors import printable
from ckptool.facts import Unit, dataclass
from ckptool.pickles.plain import plain, summary, to_json

if TYPE_CHECKING:
    from ckptool.analysis.inspect import PartSummary

Json = dict[str, Any]
FEW = 1_000  # elements up to which all of a tensor is read


def shape_text(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else str(list(shape))


def tensor_text(tensor: Tensor, part: PartSummary | None = None) -> str:
    """`f32 [64, 3, 7, 7]`, with what is unusual about it."""
    kind = "" if isinstance(tensor, TensorEntry) else f"{printable(tensor.kind)} "
    is_unusual = tensor.location != "cpu" and (part is None or len(part.locations) > 1)
    text = f"{kind}{tensor.dtype.name if tensor.dtype else '?'} {shape_text(tensor.shape)}".rstrip()
    return text + (f", {printable(tensor.location)}" if is_unusual else "")


def value_text(value: Any, width: int | None = 60) -> str:
    """A value of a file in one line. Small dictionaries are written out."""
    if value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() < 1024):
        return str(value)
    if isinstance(value, Object):
        value = plain(value)
    if width is not None and isinstance(value, dict) and 0 < len(value) <= 8:
        text = ", ".join(f"{printable(segment_text(key))}: {summary(item, 24)}" for key, item in value.items())
        if len(text) <= width:
            return f"{{{text}}}"
    return summary(value, width or 1_000_000)


def array_text(values: Any, width: int | None, is_cut: bool) -> str:
    """An array as numpy prints it.  is_cut: it is the corners of a larger one."""
    import numpy

    from ckptool.checkpoint.strided import EDGE

    limit, edge = 0 if is_cut else values.size + 1, EDGE if values.ndim <= 2 else 2
    return numpy.array2string(values, threshold=limit, edgeitems=edge, max_line_width=width or 120, separator=", ")


def entry_text(value: Any) -> str:
    """A tensor or another value in one line."""
    return tensor_text(value) if isinstance(value, (TensorEntry, Composite)) else value_text(value)


def type_name(value: Any) -> str:
    """The kind of value of an entry: `int`, `dict`, `argparse.Namespace`."""
    return printable(value.name) if isinstance(value, Object) else type(value).__name__


def path_json(path: Path) -> list[Any]:
    """A path as a list: texts and integers as they are, other keys as texts."""
    return [segment if type(segment) in (str, int) else summary(segment, 1_000) for segment in path]


def tensor_json(tensor: Tensor, storage: int | None = None) -> Json:
    """One tensor: shape, stride and offset count elements; a composite has a `kind` and no stride."""
    fact: Json = {
        "dtype": tensor.dtype.name if tensor.dtype else None,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "stride": list(tensor.stride) if isinstance(tensor, TensorEntry) else None,
        "offset": tensor.offset if isinstance(tensor, TensorEntry) else None,
        "location": tensor.location,
        "storage": storage,
        "nbytes": tensor.nbytes,
    }
    if not isinstance(tensor, TensorEntry):
        return fact | {"kind": tensor.kind}
    fact |= {name: True for name, value in tensor.flags._asdict().items() if value} if any(tensor.flags) else {}
    return fact


def optional(schema: Json) -> Json:
    """The schema of what may be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def several(schema: Json) -> Json:
    """The schema of a list."""
    return {"type": "array", "items": schema}


def fields(required: Json, extra: Json | None = None) -> Json:
    """The schema of an object.  extra: of fields that may be missing."""
    return {"type": "object", "properties": required | (extra or {}), "required": list(required)}


INTEGER, TEXT, TRUE = {"type": "integer"}, {"type": "string"}, {"const": True}
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
PATH = several({"anyOf": [TEXT, INTEGER]})
SAID = "plain; bytes, tensors, objects and what is too large are objects with `base64`, `tensor`, `object`, `...`"
VALUE = {"description": SAID}
TENSOR = {
    "dtype": optional(TEXT),
    "shape": optional(several(INTEGER)),
    "stride": optional(several(INTEGER)) | {"description": "in elements; null for what has parts, and a `kind`"},
    "offset": optional(INTEGER) | {"description": "in elements"},
    "location": TEXT | {"description": "device tag"},
    "storage": optional(INTEGER) | {"description": "number of its storage; tied tensors have the same"},
    "nbytes": INTEGER,
}
TENSOR_ALSO = {"kind": TEXT, "conj": TRUE, "neg": TRUE, "requires_grad": TRUE, "parameter": TRUE}
PathFact = Annotated[Path, Unit(json=path_json, schema=PATH)]
Value = Annotated[Any, Unit(json=to_json, schema={}, about=SAID)]


_LAST_NUMBER = re.compile(r"(.*?)(?<!\d)(0|[1-9][0-9]{0,17})([^0-9]*)", re.DOTALL)  # 007 is a name
_DIGITS = re.compile(r"([0-9]+)")
DEEP = 32  # pieces of a key; one with more is a group of its own
NAMES = 8  # alternatives that are names and fit into one pair of braces; of numbers there can be any number


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys under one text. `keys` are all that the text stands for, in its order."""

    text: str
    keys: tuple[str, ...]


@dataclass(eq=False)
class _NamePiece:
    """The alternatives of one piece of keys: `before`, one of `middles`, `after`. Equal ones are one object.
    numbers: all middles are numbers."""

    before: str
    middles: tuple[str, ...]
    after: str
    numbers: bool

    @cached_property
    def choices(self) -> tuple[str, ...]:
        return tuple([self.before + middle + self.after for middle in self.middles])

    @cached_property
    def text(self) -> str:
        if len(self.middles) == 1:
            return _escaped(self.choices[0])
        part = self.middles[0][: self.middles[0].rfind("/") + 1]  # of the file
        begin = len(part) if all(name.startswith(part) for name in self.middles) else 0
        alternatives = [] if self.numbers else [_escaped(name[begin:], r"\\{},") for name in self.middles]
        numbers = self.middles if self.numbers else ()
        for _, run in groupby(enumerate(numbers), key=lambda item: int(item[1]) - item[0]):
            texts = [text for _, text in run]  # which follow each other
            alternatives += [f"{texts[0]}..{texts[-1]}"] if len(texts) >= 3 else texts
        return f"{_escaped(self.before + part[:begin])}{{{', '.join(alternatives)}}}{_escaped(self.after)}"


_Row = tuple[_NamePiece, ...]


def grouped(keys: Iterable[str]) -> list[KeyGroup]:
    """The keys in groups, each the keys that its text stands for, in natural order: `layer.2` before `layer.10`.
    `layer.{0..11}.attn.{weight, bias}` stands for those 24 keys and no others. Keys are taken apart at their dots; what
    differs in one piece only becomes one group, from the last piece to the first. Three or more numbers that follow
    each other are a range: `{0..3, 7}`; names stay in the order in which they were given. A brace or backslash of a
    name's own is written with a backslash, a comma only where it could be taken for the end of an alternative.
    A key that is given twice counts once. The time is proportional to the number of keys."""
    piece = cache(_NamePiece)

    @cache
    def single(text: str) -> _NamePiece:
        match = _LAST_NUMBER.fullmatch(text)
        return piece(match[1], (match[2],), match[3], True) if match else piece("", (text,), "", False)

    def merged(rows: list[_Row], at: int, numbers: bool) -> list[_Row]:
        """The rows, with those merged that differ only in the piece at `at`: there in a number, or in a name."""
        if not any(row[at].numbers is numbers for row in rows):
            return rows
        mergeable = defaultdict[tuple[object, ...], list[_Row]](list)
        for row in rows:
            common = row[at] if row[at].numbers is not numbers else (row[at].before, row[at].after)
            mergeable[(*row[:at], common, *row[at + 1 :])].append(row)
        joined: list[_Row] = []
        for members in mergeable.values():
            first = members[0]
            if len(members) == 1 or (not numbers and len(members) > NAMES):
                joined += members
                continue
            middles = [middle for row in members for middle in row[at].middles]
            middles = sorted(middles, key=int) if numbers else middles
            joint = piece(first[at].before, tuple(middles), first[at].after, numbers)
            joined.append((*first[:at], joint, *first[at + 1 :]))
        return joined

    groups, by_depth = list[KeyGroup](), defaultdict[int, list[_Row]](list)
    for key in dict.fromkeys(keys):
        pieces = key.split(".", DEEP)
        if len(pieces) > DEEP:
            groups.append(KeyGroup(_escaped(key), (key,)))
        else:
            by_depth[len(pieces)].append(tuple(map(single, pieces)))
    for depth, rows in by_depth.items():
        for at in reversed(range(depth)):
            rows = merged(merged(rows, at, True), at, False)
        for row in rows:
            choices = product(*[part.choices for part in row])
            groups.append(KeyGroup(".".join([part.text for part in row]), tuple(map(".".join, choices))))

    @cache
    def natural(text: str) -> tuple[str | int, ...]:
        """Text and numbers in turn, text first. A number of more than 18 digits sorts by its length: int() is slow."""
        split: list[str | int] = list(_DIGITS.split(text))
        split[1::2] = [int(digits) if len(str(digits)) < 19 else 10**18 + len(str(digits)) for digits in split[1::2]]
        return tuple(split)

    return sorted(groups, key=lambda group: [natural(text) for text in group.keys[0].split(".")])


def _escaped(text: str, special: str = r"\\{}") -> str:
    return re.sub(f"([{special}])", r"\\\1", text) if any(map(text.__contains__, "\\{},")) else text
