"""Conjugated and negated views of tensors, as values: their sign bits turned while they are read."""

from __future__ import annotations

from ckptool.checkpoint import Computed, Data, Flags, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.strided import row_major
from ckptool.errors import Unsupported


def resolved(entry: TensorEntry) -> TensorEntry:
    """The tensor with its conjugate and negative bits applied to the values, row-major where there were any."""
    if not (entry.flags.conj or entry.flags.neg):
        return entry
    if entry.dtype.kind not in ("float", "complex"):
        raise Unsupported(f"a negated view of type {entry.dtype} cannot be resolved")
    data = flipped(row_major(entry), entry.dtype, entry.flags.conj, entry.flags.neg, entry.storage)
    flags = Flags(entry.flags.requires_grad, entry.flags.parameter)
    return TensorEntry(
        Storage(data, entry.location), entry.dtype, entry.shape, row_major_strides(entry.shape), 0, flags
    )


def flipped(data: Data, dtype: DType, conj: bool, neg: bool, storage: Storage) -> Computed:
    """The values conjugated or negated, by their sign bits: doing it twice gives the same bits again."""
    part = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    # `neg` flips every part of an element, `conj` the imaginary ones (the second of each pair).
    flips = [bool(neg) ^ (bool(conj) and dtype.kind == "complex" and i == 1) for i in range(dtype.itemsize // part)]

    def read(offset: int, length: int) -> bytes:
        raw = bytearray(data.read(offset, length))
        for i, flip in enumerate(flips):
            if flip:
                first = (i * part + part - 1 - offset) % dtype.itemsize
                raw[first :: dtype.itemsize] = bytes(raw[first :: dtype.itemsize]).translate(_SIGN)
        return bytes(raw)

    return Computed(data.length, read, (storage,))


_SIGN = bytes(byte ^ 0x80 for byte in range(256))
