"""Casting: floating tensors in another floating type, with exactly the bits that torch's `tensor.to(dtype)` gives.

The reference is torch 2.13 on a CPU. Everything passes through f32, as in torch, so f64 to a type smaller than f32
rounds twice. NaN stays NaN, but its payload may change: torch's own vector and scalar code disagree about it.

What does not fit (`CastTally.overflowed` unless said otherwise):

    f16, bf16, f8_e5m2              infinity
    f8_e4m3fnuz, f8_e5m2fnuz        NaN, also for infinities (they have none); -0.0 becomes 0.0
    f8_e4m3fn                       the largest value, ±448, also for infinities; counts as a changed value
    f8_e8m0fnu                      powers of two only: the sign is dropped, 0 becomes 2**-127, infinities NaN
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptool.checkpoint import NO_FLAGS, Checkpoint, Composite, Storage, TensorEntry
from ckptool.checkpoint.arrays import elementwise, fold
from ckptool.checkpoint.dtypes import Array, DType, dtype_of, numbers, rounded, scratch
from ckptool.checkpoint.paths import literal, selected
from ckptool.checkpoint.strided import apart
from ckptool.checkpoint.tree import Path, address, children, rebuild, stored_parts, walk
from ckptool.commands import FILE, NAME, OUT, arg, command
from ckptool.conventions.state_dicts import StateDict, is_of_training
from ckptool.errors import Conflict, UsageError
from ckptool.facts import dataclass, replace, size


@dataclass(slots=True)
class CastTally:
    """The losses of a cast, over the values read so far; each element counts once, however often it is read.

    changed: the new type has no such value (NaN counts as equal to NaN).  overflowed: finite before, infinite or NaN
    now.  underflowed: not zero before, zero now.  The errors are the largest over elements that are finite before and
    after: absolute, and relative to the old value where that is not zero.
    """

    elements: int = 0
    changed: int = 0
    overflowed: int = 0
    underflowed: int = 0
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0


def cast_storage(storage: Storage, source: DType, target: DType, tally: CastTally | None = None) -> Storage:
    """The storage with every element in another floating type; shapes, strides and offsets of its views stay valid.

    Trailing bytes that are no whole element are dropped.
    """
    if source is target:
        return storage
    flat = TensorEntry(storage, source, (storage.nbytes // source.itemsize,), (1,))
    return elementwise(_Converted(source, target, tally), flat, dtype=target).storage


class _Converted:
    """Elements in another type. Each is counted once, however often it is read."""

    __slots__ = ("new", "old", "seen", "tally")

    def __init__(self, old: DType, new: DType, tally: CastTally | None) -> None:
        self.old, self.new, self.tally = old, new, tally
        self.seen: list[int] = []

    def __call__(self, start: int, raw: Array) -> Array:
        floats = self.old.is_float and self.new.is_float
        before = numbers(raw, self.old, "cast before")
        after = rounded(before, self.new) if floats else before.astype(self.new.to_numpy())
        if self.tally is not None:
            # `seen` holds the sorted bounds of the ranges counted so far: an even index is outside of every range.
            stop = start + len(before)
            first, last = bisect_left(self.seen, start), bisect_right(self.seen, stop)
            opening, closing = [start] if first % 2 == 0 else [], [stop] if last % 2 == 0 else []
            edges = [*opening, *self.seen[first:last], *closing]
            self.seen[first:last] = [*opening, *closing]
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                part = slice(begin - start, end - start)
                if begin < end:
                    _count(self.tally, before[part], after[part], self.new if floats else None)
        return after


def _count(tally: CastTally, before: Array, after: Array, new: DType | None) -> None:
    """Adds one block to the tally. new: the type of `after`, None where one of the two is no float."""
    import numpy

    tally.elements += len(before)
    if new and new.itemsize >= 4 and before.itemsize <= new.itemsize:
        return  # every value of the smaller types exists in f32, and every f32 in f64
    back = numbers(after.view(numpy.uint8), new, "cast back") if new else after.astype(before.dtype)
    if new and (before.itemsize > back.itemsize or new.name == "f8_e8m0fnu"):
        # Without a sign, the difference from a negative value may be too large for f32.
        before, back = before.astype("d"), back.astype("d")
    finite = numpy.isfinite(back, out=scratch("cast mask", "?", len(back)))
    if not (finite.all() and numpy.isfinite(before, out=finite).all()):
        finite = numpy.isfinite(before) & numpy.isfinite(back)
        lost = ~finite & (before != back) & (before == before)
        tally.changed += int(numpy.count_nonzero(lost))
        tally.overflowed += int(numpy.count_nonzero(lost & numpy.isfinite(before)))
        before, back = before[finite], back[finite]
    if new is None or not len(before):
        tally.changed += int(numpy.count_nonzero(before != back))
        return
    kind, count = before.dtype.str, len(before)
    error = numpy.subtract(before, back, out=scratch("cast error", kind, count))
    numpy.abs(error, out=error)
    mask = scratch("cast mask", "?", count)
    if not (changed := int(numpy.count_nonzero(numpy.not_equal(error, 0, out=mask)))):
        return
    tally.changed += changed
    if numpy.equal(back, 0, out=mask).any():
        tally.underflowed += int(numpy.count_nonzero(mask & (before != 0)))
    worst = int(error.argmax())
    tally.max_abs_error = max(tally.max_abs_error, abs(float(before[worst]) - float(back[worst])))
    ratio = numpy.abs(before, out=scratch("cast ratio", kind, count))
    largest = float(numpy.divide(error, ratio, out=ratio).max())
    if not numpy.isfinite(largest):  # over values that are not zero
        largest = float((error[before != 0].astype("d") / abs(before[before != 0])).max(initial=0))
    tally.max_rel_error = max(tally.max_rel_error, largest)


SAME, EXACT, LOSSY = "same", "exact", "lossy"

_WHOLE = ("int", "uint", "bool")


def conversion(old: DType | None, new: DType | None) -> str | None:
    """`same`, `exact` (the new type has every value of the old one), `lossy`, or None where it is not supported."""
    if old is new:
        return SAME
    if old is None or new is None:
        return None
    if old.is_float and new.is_float:
        is_exact = new.itemsize > old.itemsize and (old.name, new.name) != ("f8_e8m0fnu", "f16")
    elif old.kind in _WHOLE and (new.kind in _WHOLE or new.name in ("f32", "f64")):
        import numpy

        # numpy counts i64 as safe in f64, too.
        is_exact = numpy.can_cast(old.to_numpy(), new.to_numpy()) and (old.itemsize, new.name) != (8, "f64")
    elif {old.name, new.name} == {"c64", "c128"}:
        is_exact = new.name == "c128"
    else:
        return None
    return EXACT if is_exact else LOSSY


def compact(entry: TensorEntry) -> TensorEntry:
    """The same values in row-major order on a storage of their own; the entry itself where that is so already.

    Raises `Conflict` for an expanded view, which may stand for any number of values.
    """
    if entry.is_contiguous and entry.span() == (0, entry.storage.nbytes):
        return entry
    if entry.nbytes > entry.storage.nbytes:
        what = f"{entry!r} is an expanded view: {size(entry.nbytes)} of values, {size(entry.storage.nbytes)} stored"
        why = "Every repeated value would be written out. Nothing was written."
        raise Conflict(what, why, f"Leave it out: {arg(exclude=NAME)}")
    return apart(entry)


def recast(
    entry: TensorEntry, new: DType, tally: CastTally | None = None, storage: Storage | None = None
) -> TensorEntry:
    """The same view of its storage in another floating type. storage: the cast storage, where it exists already."""
    storage = storage or cast_storage(entry.storage, entry.dtype, new, tally)
    negative = entry.flags.neg and new.name != "f8_e8m0fnu"  # a type without sign
    return replace(entry, storage=storage, dtype=new, flags=entry.flags._replace(neg=negative))


def converted(entry: TensorEntry, new: DType, tally: CastTally | None = None) -> TensorEntry:
    """The tensor in another type, computed when it is read. Only for pairs that `conversion` supports."""
    if entry.dtype is new:
        return entry
    if entry.dtype.is_float and new.is_float:
        return recast(compact(entry), new, tally)
    result = elementwise(_Converted(entry.dtype, new, tally), compact(entry).with_flags(NO_FLAGS), dtype=new)
    return result.with_flags(entry.flags)


def cast_lazily(tensor: TensorEntry | Composite, new: DType) -> TensorEntry:
    """A tensor of any layout in another type, computed when it is read. Raises `UsageError` where that needs torch."""
    if not isinstance(tensor, TensorEntry) or conversion(tensor.dtype, new) is None:
        what = f"{tensor!r} is not cast to {new.name} without torch"
        raise UsageError(what, "", f"In memory: entry.torch().to(torch.{new.torch})")
    return recast(tensor, new) if tensor.dtype.is_float and new.is_float else converted(tensor, new)


def losses(entry: TensorEntry, new: DType) -> CastTally:
    """The losses of converting a tensor; reads all of its values."""
    tally = CastTally()
    fold(lambda *_: None, converted(compact(entry), new, tally))
    return tally


# State dicts ---------------------------------------------------------------------------------------------------------


class Cast(NamedTuple):
    """A cast: the checkpoint, and for each storage the name of its first tensor, its old type and a tally.

    tensors: how many, by their names; bytes_before, bytes_after: of their storages, each counted once.
    The tallies fill up as the values are read for the output.  skipped: floating tensors that were left as they are,
    and why.
    """

    checkpoint: Checkpoint
    target: DType
    tallies: tuple[tuple[str, DType, CastTally], ...]
    tensors: int
    bytes_before: int
    bytes_after: int
    skipped: tuple[tuple[str, str], ...]


def parse_dtype(value: object) -> DType:
    """The floating type that is meant (`bf16`, `float16`, `torch.bfloat16`, torch's and numpy's own); raises
    `UsageError` for another."""
    try:
        dtype = dtype_of(value)
    except UsageError:
        if not isinstance(value, str):
            raise
        dtype = None
    if dtype is None or not dtype.is_float:
        what = f"{value if isinstance(value, str) else repr(value)!r} is not a floating-point dtype"
        fix = "Available: f64, f32, f16, bf16, f8_e4m3fn, f8_e5m2, …"
        raise UsageError(what, "Casts are between floating-point dtypes.", fix)
    return dtype


def cast_roots(
    checkpoint: Checkpoint,
    roots: Sequence[StateDict],
    target: DType,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Cast:
    """Casts the floating tensors of `roots` whose keys match `only` and not `exclude`.

    Raises `NoMatch` for a pattern that matches nothing, `Conflict` where a storage is also seen by a tensor that is not
    cast, or as another type: both would change with it.
    """
    keys = selected([key for root in roots for key in root.names()], only, exclude)
    chosen: dict[int, TensorEntry] = {}
    slots: set[tuple[int, str]] = set()  # which entries of which dictionaries; one tensor may be in several
    names: dict[int, Path] = {}
    skipped: list[tuple[str, str]] = []
    for root in roots:
        for key, value in root.node.items():
            if key not in keys or not isinstance(value, (TensorEntry, Composite)) or value.dtype is None:
                continue
            place = (*root.base, *root.path, key)
            if isinstance(value, Composite):
                skipped += [(address(place), value.kind)] if value.dtype.kind in ("float", "quantized") else []
            elif value.dtype.is_float and value.dtype is not target:
                chosen[id(value)] = value
                slots.add((id(root.node), key))
                names.setdefault(id(value.storage), place)
    before: dict[int, TensorEntry] = {}
    for entry in chosen.values():
        if before.setdefault(id(entry.storage), entry).dtype is not entry.dtype:
            what = f"the storage of {address(names[id(entry.storage)])} is viewed as two dtypes"
            raise Conflict(what, "It is unclear which of the two its elements are.")
    for path, node in walk(checkpoint.tree):
        for segment, part in children(node):
            clashes = [stored for stored in stored_parts(part) if id(stored.storage) in names]
            if clashes and (id(node), segment) not in slots:
                place, other = names[id(clashes[0].storage)], address((*path, segment))
                what = f"{address(place)} shares its storage with {other}, which is not cast"
                fix = f"Leave it out too: {arg(exclude=literal(place[-1]))}"
                if is_of_training(entry := (*path, segment)[0]):  # an optimizer pickled as it is holds its parameters
                    fix += f"; or drop that first: {command('edit', FILE, drop=literal(entry), out=OUT)}"
                raise Conflict(what, "Both would change, or no longer be tied.", fix)
    tallies = {number: CastTally() for number in before}
    storages = {
        number: cast_storage(entry.storage, entry.dtype, target, tallies[number]) for number, entry in before.items()
    }

    def leaf(node: Any) -> Any:
        return recast(node, target, storage=storages[id(node.storage)]) if id(node) in chosen else node

    return Cast(
        replace(checkpoint, tree=rebuild(checkpoint.tree, leaf)),
        target,
        tuple((address(names[number]), before[number].dtype, tally) for number, tally in tallies.items()),
        len(slots),
        sum(entry.storage.nbytes for entry in before.values()),
        sum(storage.nbytes for storage in storages.values()),
        tuple(skipped),
    )
