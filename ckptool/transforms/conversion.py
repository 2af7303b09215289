"""A tensor in the type, or as the part, that another place wants: what may become what, and what is lost on the way.

Floating types become each other as `cast` does it. Whole numbers and truths become larger or smaller ones, or f32 and f64; complex types
each other. Nothing else: a complex number that becomes a real one loses half of itself, as torch lets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ckptool.checkpoint import NO_FLAGS, Computed, Data, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.numeric import CHUNK, scratch
from ckptool.checkpoint.strided import fill, row_major
from ckptool.errors import Conflict
from ckptool.transforms.dtypes import CastTally, cast_storage

SAME, EXACT, LOSSY = "same", "exact", "lossy"

_WHOLE = ("int", "uint", "bool")
# Digits of the largest whole number up to which a floating type has every one, in bits.
_DIGITS = {"f64": 53, "f32": 24}
_ALSO_EXACT = {
    ("f16", "f8_e5m2"),
    ("f16", "f8_e4m3fn"),
    ("f16", "f8_e4m3fnuz"),
    ("f16", "f8_e5m2fnuz"),
    ("bf16", "f8_e5m2"),
    ("bf16", "f8_e4m3fn"),
    ("bf16", "f8_e4m3fnuz"),
    ("bf16", "f8_e5m2fnuz"),
    ("bf16", "f8_e8m0fnu"),
}


def conversion(old: DType | None, new: DType | None) -> str | None:
    """`same`, `exact` (each value of the old type is one of the new), `lossy`, or None where it is not done."""
    if old is new:
        return SAME
    if old is None or new is None:
        return None
    if old.is_float and new.is_float:
        wider = new.itemsize >= 4 and new.itemsize > old.itemsize
        return EXACT if wider or (new.name, old.name) in _ALSO_EXACT else LOSSY
    if old.kind in _WHOLE and (new.kind in _WHOLE or new.name in _DIGITS):
        return EXACT if _fits(old, new) else LOSSY
    if old.name in ("c64", "c128") and new.name in ("c64", "c128"):
        return EXACT if new.itemsize > old.itemsize else LOSSY
    return None


def _fits(old: DType, new: DType) -> bool:
    """True if a type of whole numbers has no value that the other lacks."""
    bits = 1 if old.kind == "bool" else 8 * old.itemsize - (old.kind == "int")
    if new.kind == "float":
        return bits <= _DIGITS[new.name]
    if new.kind == "bool" or (old.kind == "int" and new.kind == "uint"):
        return False
    return bits <= 8 * new.itemsize - (new.kind == "int")


def compact(entry: TensorEntry) -> TensorEntry:
    """The same values in row-major order over a storage that has nothing else; as it is where it is that already.

    Raises `Conflict` for an expanded view, which may stand for any number of values.
    """
    if entry.is_contiguous and entry.span() == (0, entry.storage.nbytes):
        return entry
    _refuse_expanded(entry)
    data = row_major(entry)
    made: Data = Computed(data.length, data.read, (entry.storage,)) if data.length else InlineBytes(b"")
    return replace(entry, storage=Storage(made, entry.location), stride=row_major_strides(entry.shape), offset=0)


def _refuse_expanded(entry: TensorEntry) -> None:
    if entry.nbytes > entry.storage.nbytes:
        raise Conflict(
            f"{entry!r} is an expanded view: {entry.nbytes:,} bytes of values, {entry.storage.nbytes:,} stored",
            "Every repeated value would be written out. Nothing was written.",
            "Leave it out: --exclude NAME",
        )


def converted(entry: TensorEntry, new: DType, tally: CastTally | None = None) -> TensorEntry:
    """The tensor as another type, computed when it is read. Only for pairs that `conversion` has a word for."""
    if entry.dtype is new:
        return entry
    whole = compact(entry)
    if entry.dtype.is_float and new.is_float:
        storage = cast_storage(whole.storage, entry.dtype, new, tally)
        negative = entry.flags.neg and new.name != "f8_e8m0fnu"
        return replace(whole, storage=storage, dtype=new, flags=entry.flags._replace(neg=negative))
    reader = _AsType(whole.storage.data, entry.dtype, new, tally)
    length = whole.numel * new.itemsize
    return replace(whole, storage=Storage(Computed(length, reader.read, (whole.storage,)), whole.location), dtype=new)


class _AsType:
    """The elements of `data` as numpy converts them, a chunk at a time."""

    __slots__ = ("data", "new", "old", "tally")

    def __init__(self, data: Data, old: DType, new: DType, tally: CastTally | None) -> None:
        self.data, self.old, self.new, self.tally = data, old, new, tally

    def read(self, offset: int, length: int) -> bytes:
        size, count = self.new.itemsize, self.data.length // self.old.itemsize
        stop = min(count, -(-(offset + length) // size))
        parts = [self._chunk(place, min(place + CHUNK, stop)) for place in range(offset // size, stop, CHUNK)]
        skip = offset % size
        return b"".join(parts)[skip : skip + length]

    def _chunk(self, start: int, stop: int) -> bytes:
        import numpy

        raw = scratch("convert raw", "u1", (stop - start) * self.old.itemsize)
        fill(self.data, start * self.old.itemsize, raw.data)
        before = numpy.not_equal(raw, 0) if self.old.kind == "bool" else raw.view(self.old.to_numpy())
        with numpy.errstate(all="ignore"):
            after = before.astype(self.new.to_numpy())
            if self.tally is not None:
                back = after.astype(before.dtype)
                self.tally.elements += len(before)
                self.tally.changed += int(numpy.count_nonzero((back != before) & (before == before)))
                self.tally.overflowed += int(numpy.count_nonzero(~numpy.isfinite(after) & numpy.isfinite(before)))
        return after.tobytes()


def losses(entry: TensorEntry, new: DType) -> CastTally:
    """What converting a tensor does to its values; reads all of them."""
    tally = CastTally()
    data = row_major(converted(compact(entry), new, tally))
    for place in range(0, data.length, CHUNK * new.itemsize):
        data.read(place, CHUNK * new.itemsize)
    return tally


# Parts -----------------------------------------------------------------------------------------------------------------


def first_part(entry: TensorEntry, shape: Sequence[int]) -> TensorEntry:
    """The corner of a tensor where every index is below `shape`."""
    return replace(entry, shape=tuple(shape))


def laid_over(base: TensorEntry, part: TensorEntry) -> TensorEntry:
    """`base` with its first corner replaced by `part`, of the same type and no larger in any dimension; computed when it is read.

    Raises `Conflict` for lazily conjugated or negated tensors, whose bytes do not say their values.
    """
    if base.flags[2:] != NO_FLAGS[2:] or part.flags[2:] != NO_FLAGS[2:]:
        raise Conflict("a conjugated or negated view cannot be laid over another tensor", "Its values are not stored.")
    _refuse_expanded(base)
    reader = _Laid(row_major(base), row_major(part), *_joined(base.shape, part.shape), base.dtype.itemsize)
    storage = Storage(Computed(base.nbytes, reader.read, (base.storage, part.storage)), base.location)
    return replace(base, storage=storage, stride=row_major_strides(base.shape), offset=0)


def _joined(whole: Sequence[int], part: Sequence[int]) -> tuple[list[int], list[int]]:
    """The two shapes in fewer dimensions: one in which the part is whole belongs to the one before it."""
    sizes, inner = [1], [1]
    for size, length in zip(whole, part, strict=True):
        if size == length:
            sizes[-1] *= size
            inner[-1] *= length
        else:
            sizes.append(size)
            inner.append(length)
    return sizes, inner


class _Laid:
    """The bytes of `base` (of `sizes`), those of `part` (of `inner`) in its first corner."""

    __slots__ = ("base", "inner", "itemsize", "part", "sizes")

    def __init__(self, base: Data, part: Data, sizes: list[int], inner: list[int], itemsize: int) -> None:
        self.base, self.part, self.sizes, self.inner, self.itemsize = base, part, sizes, inner, itemsize

    def read(self, offset: int, length: int) -> bytes:
        size, count = self.itemsize, self.base.length // self.itemsize
        stop = min(count, -(-(offset + length) // size))
        parts = [self._chunk(place, min(place + CHUNK, stop)) for place in range(offset // size, stop, CHUNK)]
        skip = offset % size
        return b"".join(parts)[skip : skip + length]

    def _chunk(self, start: int, stop: int) -> bytes:
        import numpy

        out = numpy.frombuffer(
            bytearray(self.base.read(start * self.itemsize, (stop - start) * self.itemsize)), f"V{self.itemsize}"
        )
        places = numpy.unravel_index(numpy.arange(start, stop), self.sizes)
        inside = numpy.ones(stop - start, bool)
        for index, limit in zip(places, self.inner, strict=True):
            inside &= index < limit
        count = int(numpy.count_nonzero(inside))
        if count:
            before = self._before(start) * self.itemsize
            out[inside] = numpy.frombuffer(self.part.read(before, count * self.itemsize), f"V{self.itemsize}")
        return out.tobytes()

    def _before(self, element: int) -> int:
        """How many elements of the part come before an element of the whole."""
        total = 0
        for axis, limit in enumerate(self.inner):
            index, element = divmod(element, prod(self.sizes[axis + 1 :]))
            below = prod(self.inner[axis + 1 :])
            if index >= limit:
                return total + limit * below
            total += index * below
        return total
