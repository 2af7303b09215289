"""`show`: the values of one tensor, or any other entry."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any

from ckptool.analysis import words
from ckptool.analysis.inspect import listing
from ckptool.analysis.outline import LINES as SCREEN
from ckptool.analysis.words import FEW, Value, array_text, tensor_text, type_name, value_text
from ckptool.checkpoint import Checkpoint, Composite, Tensor, TensorEntry
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.nodes import Object, Set
from ckptool.checkpoint.numpy_arrays import Array, array_entry
from ckptool.checkpoint.strided import corners, to_numpy
from ckptool.checkpoint.tree import Path, address, children, find, segment_text, walk
from ckptool.commands import arg, command, option, verb
from ckptool.errors import UsageError, counted, listed
from ckptool.facts import LIVE, Report, Told, Unit, Verbatim, bold, dataclass, replace, size
from ckptool.formats import open_file
from ckptool.pickles.plain import is_one_line, plain
from ckptool.verbs._options import At, File

LINES = 1_000
ALIKE, FEWEST = 3, 8  # entries for a parameter, items of a list
WIDEST, WIDE = 10_000, 1_000  # characters of one value below the one that is shown, and of one among very many
_TENSOR = words.fields(words.TENSOR, words.TENSOR_ALSO)
_SPAN = re.compile(r" *([0-9]{0,18}) *: *([0-9]{0,18}) *")


def _values_json(values: Any) -> Any:
    """A numpy array as nested lists; complex numbers as [real, imaginary], bf16 and float8 as numbers."""
    import numpy

    from ckptool.render.json import finite

    kind = values.dtype.kind
    values = numpy.stack([values.real, values.imag], axis=-1) if kind == "c" else values
    return finite((values.astype("f4") if kind == "V" else values).tolist())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Shown(Report):
    """One tensor with its values, or another value.
    values: all of a tensor, as nested lists, complex numbers as [real, imaginary]; null where only corners were read.
    whole: the checkpoint, of which an outline is told where an entry has more lines than a screen.
    corners: in their place the first and the last along every axis, and between them one that printing leaves out."""

    schema = "show/2"

    file: str
    address: str
    entry: Annotated[Any, LIVE]
    slice: str | None = None
    values: Annotated[Any, Unit(json=_values_json, schema={})] = None
    corners: Annotated[Any, LIVE] = None
    whole: Annotated[Checkpoint | None, LIVE] = None

    @property
    def truncated(self) -> bool:
        """True where only corners were read."""
        return self.corners is not None

    @property
    def tensor(self) -> Annotated[Tensor | None, Unit(json=words.tensor_json, schema=words.optional(_TENSOR))]:
        return self.entry if isinstance(self.entry, (TensorEntry, Composite)) else None

    @property
    def type(self) -> str | None:
        return type_name(self.entry) if self.tensor is None else None

    @property
    def value(self) -> Value:
        return self.entry if self.tensor is None else None

    def told(self, *, all: bool = False) -> Told:
        if self.tensor is None:
            lines = list(_value_lines(self.entry, None if all else LINES))
            is_long = not all and len(lines) > SCREEN  # then an outline of sets of weights, the state of few parameters
            outline = listing(self.whole, self.address) if self.whole is not None and is_long else None
            if outline is not None and any(part.root.is_model for part in outline.parts):
                yield from (*replace(outline, notes=()).told(), "")
                first = command("show", f"{self.file}#{outline.tensors[0].address}")
                yield f"every entry: {arg(all=True)}; values: {first}"
            else:
                yield from _value_lines(self.entry, LINES, sibling_limit=ALIKE) if is_long else lines
            return
        part = f"[{self.slice}]" if self.slice else ""
        yield bold(self.address or self.file), f"{part}: {tensor_text(self.tensor)}, {size(self.tensor.nbytes)}"
        values = self.corners if self.truncated else self.values
        yield (lambda width: [Verbatim(array_text(values, width, self.truncated))]) if values is not None else None
        yield f"… stands for values that were not read; {arg(all=True)} reads them" if self.truncated else None


def _value_lines(value: Any, limit: int | None, sibling_limit: int | None = None) -> Told:
    """A plain value, with everything below it; with a limit, that many lines, and of a text of many lines its size.
    sibling_limit: how many siblings with tensors are shown, such as an optimizer's states; for more than a screen."""
    value = plain(value)
    if isinstance(value, str):
        yield Verbatim(value)
        return
    if not isinstance(value, (dict, list, tuple, Set, Object)) or not value:
        yield value_text(value, None)
        if isinstance(value, Array) and (items := value.values(limit)) is not None:
            hidden = value.size - len(items)
            yield ", ".join(value_text(item, None) for item in items) + (f" and {hidden:,} more" if hidden else "")
        return
    flat: Path | None = None  # the place of what is written in one line, or left out
    count, lengths, counts = 0, dict[int, int](), Counter[Path]()
    for path, node in walk(value):
        if flat is not None and path[: len(flat)] == flat:
            continue
        count += 1
        if limit is not None and count > limit + 1:
            yield f"… and more ({arg(all=True)})"
            return
        lengths[len(path)] = len(node) if isinstance(node, (dict, list, tuple)) else 0
        if not path:
            yield value_text(node, WIDE) if isinstance(node, Object) else None
            continue
        if sibling_limit and any(isinstance(child, TensorEntry) for _, child in children(node)):
            flat = path[:-1]
            counts[flat] += 1
            if counts[flat] > sibling_limit:
                yield f"{'  ' * len(flat)}… {lengths[len(flat)] - sibling_limit:,} more ({arg(all=True)})"
                continue
        is_short = isinstance(node, (list, tuple)) and (len(node) <= FEWEST or sibling_limit)
        flat = path if is_short and all(isinstance(item, (str, int, float, type(None))) for item in node) else None
        flat = path if is_one_line(node) else flat  # in an object that is unknown
        label = "  " * (len(path) - 1) + (segment_text(path[-1]) or "''")
        if is_short and flat is not None and len(node) > FEWEST:
            yield f"{label}: {listed([value_text(item, 40) for item in node], FEWEST)}"
        elif isinstance(node, (dict, list, tuple)) and node and flat is None:
            yield f"{label}:"
        elif isinstance(node, str) and limit is not None and node.count("\n") > 3:
            yield f"{label}: a string of {counted(node.count(chr(10)), 'line')}"
        else:
            yield f"{label}: {value_text(node, None if limit is None else WIDEST if sibling_limit is None else WIDE)}"


@verb(
    ("ckptool show model.pt#epoch", "a value"),
    ("ckptool show model.pt#optimizer/param_groups", "the settings of an optimizer, such as its learning rate"),
    ("ckptool show model.pt#state_dict/module.fc.weight --slice '0:2,:5'", "a part of a tensor"),
)
def show(
    file: File,
    *,
    at: At = None,
    slice: Annotated[str | None, option("--slice SLICE", "Show only this slice of a tensor: '0:4,:'.")] = None,
    all: Annotated[bool, option("--all", "Show all of it, however large.")] = False,
) -> Shown:
    """The entry at an address of `file`: a tensor with its values (or a slice, `'0:4,:'`), a plain value, a dictionary.

    Of a tensor with more than 1,000 elements only the corners are read, unless `all`. Raises `UsageError` for an
    address that leads nowhere, a slice that does not fit, or a slice of something else.
    """
    opened = open_file(file, at)
    name, extras = (opened.at or "").strip("/").partition("/")[0], opened.checkpoint.extras
    # An address may lead to something beside the tree: the code of a program.
    path, node = find({name: extras[name]()} if name in extras else opened.checkpoint.tree, opened.at or "")
    array = array_entry(node)
    if array is not None and (slice is not None or array.numel > FEW):
        node = array  # where there are few values, all are shown as they are
    if not isinstance(node, TensorEntry):
        if slice is not None:
            kind = "a composite tensor" if isinstance(node, Composite) else f"of type {type(node).__name__}"
            raise UsageError(f"{address(path) or 'the whole file'} cannot be sliced: it is {kind}")
        return Shown(opened.name, address(path), node, whole=None if name in extras else opened.checkpoint)
    view = node
    if slice is not None:  # dimensions that are missing at the end are whole; nothing is read
        parts, dimensions = slice.split(","), len(node.shape)
        spans = [match for part in parts if (match := _SPAN.fullmatch(part))]
        if len(spans) < len(parts) or len(parts) > dimensions:
            why = "A part is FIRST:END, counted from 0; either may be left out."
            if len(parts) > dimensions:
                why = f"It has {counted(len(parts), 'part')} for {counted(dimensions, 'dimension')}."
            what = f"the slice '{slice}' does not fit the shape {list(node.shape)}"
            raise UsageError(what, why, "Write one part for each dimension, as in '0:4,:'.")
        for axis, (span, length) in enumerate(zip(spans, node.shape, strict=False)):
            first, end = int(span[1] or 0), min(int(span[2] or length), length)
            view = view.narrow(axis, first, end - first) if first < end else view.narrow(axis, 0, 0)
    with unchanged(opened.checkpoint.source):
        if not all and view.numel > FEW:
            return Shown(opened.name, address(path), node, slice, corners=corners(view))
        return Shown(opened.name, address(path), node, slice, to_numpy(view))
