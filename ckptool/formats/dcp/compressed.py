"""Payloads of a DCP folder that a stream extension of torch's writer compressed: `stream.zstd`.

Source: torch/distributed/checkpoint/_extension.py (`ZStandard`), torch 2.13. The whole torch zip of a chunk is one
stream, with its directory behind everything: a chunk is inflated into a file without a name when its values are asked
for. The last ones stay, as the chunks of a tensor may be read in turns.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

from ckptool.checkpoint import Checkpoint, Computed, FileRange, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.blocks import verify
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Part, Source
from ckptool.checkpoint.paths import file_problem
from ckptool.checkpoint.tree import map_storages
from ckptool.errors import Corrupt, LimitExceeded, MissingExtra, Truncated, Unsupported, listed
from ckptool.formats import torch_zip

ZSTD = "stream.zstd/1"
BLOCK = 1 << 18
MOST_BESIDE = 1 << 16  # bytes of a chunk's zip that are not its values
MOST_WINDOW = 1 << 23  # bytes that a decompressor keeps
MOST_KEPT = 1 << 30  # bytes of files without a name, beside the last one


@dataclass(slots=True, eq=False)
class Chunks:
    """The compressed chunks that were inflated last, by the part of the file that each is."""

    kept: OrderedDict[Part, TensorEntry] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def entry(self, part: Part, shape: tuple[int, ...], dtype: DType, name: str) -> TensorEntry:
        """The chunk of `name`, which must be of this shape and type, and match its checksum."""
        with self.lock:
            if part in self.kept:
                self.kept.move_to_end(part)
                return self.kept[part]
            entry = inflated(part, prod(shape) * dtype.itemsize + MOST_BESIDE).tree
            if not isinstance(entry, TensorEntry) or (entry.shape, entry.dtype) != (shape, dtype):
                what = f"{part}: the chunk of {name} should be {dtype}{list(shape)}, its file has {entry!r:.100}"
                raise Corrupt(what, "The files are of two checkpoints, or one of them was damaged.")
            verify(entry)
            self.kept[part] = entry
            while len(self.kept) > 1 and sum(each.storage.nbytes for each in self.kept.values()) > MOST_KEPT:
                self.kept.popitem(last=False)
            return entry


def inflated(part: Part, most: int) -> Checkpoint:
    """The torch zip that a part of a file inflates to, in a file without a name. Raises as `torch_zip.read`, and
    `LimitExceeded` for more than `most` bytes."""
    import tempfile

    import zstandard

    made = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    reader = made.stream_reader(cast(Any, _Packed(part)), read_size=1 << 16, read_across_frames=True)
    try:
        with tempfile.TemporaryFile() as file:
            while data := reader.read(BLOCK):
                if file.tell() + len(data) > most:
                    what = f"{part} inflates to more than {most:,} bytes"
                    raise LimitExceeded(what, "That is more than its tensor can take; the file is probably malicious.")
                file.write(data)
            file.flush()
            source = Source(str(part), os.dup(file.fileno()))
    except zstandard.ZstdError as error:
        what = f"{part} cannot be inflated: {error!s}"
        raise Corrupt(what, "It was damaged, or is not compressed with zstd as torch does it.") from None
    except OSError as error:
        raise file_problem(error, tempfile.gettempdir(), "write") from error
    try:
        return torch_zip.read(source)
    except Truncated as error:
        error.cut_archive = None  # no part of it can be recovered
        raise


class _Packed:
    """The compressed bytes, for a decompressor."""

    def __init__(self, part: Part) -> None:
        self.part, self.taken = part, 0

    def read(self, size: int) -> bytes:
        data = self.part.read(self.taken, min(size, self.part.size - self.taken))
        self.taken += len(data)
        return data


def refuse_unknown(transforms: Sequence[str], what: str) -> None:
    """Raises `Unsupported` for other extensions than zstd, `MissingExtra` where that is not installed."""
    if [*transforms] != [ZSTD]:
        why = "An extension of torch's writer did that; only it can undo it."
        fix = "With torch: load it with the same extension, and save it without."
        raise Unsupported(f"{what} is packed by {listed(transforms)}", why, fix)
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        why = "torch's writer compressed it (stream.zstd)."
        fix = "pip install 'ckptool[zstd]'"
        raise MissingExtra(f"{what} needs the package zstandard, which is not installed", why, fix) from error


def compressed_object(part: Part) -> tuple[Any, tuple[Any, ...]]:
    """An object in a compressed zip, and what of its pickle is not inert and not in it."""

    def computed(storage: Storage) -> Storage:  # there are no such bytes in a file that has a name
        data = storage.data
        made = Computed(data.length, data.read) if isinstance(data, FileRange) else data
        return Storage(made, storage.location, storage.crc)

    checkpoint = inflated(part, torch_zip.inflated_limit(part.size))
    return map_storages(checkpoint.tree, computed), checkpoint.discarded


def compressed_tensor(part: Part, chunks: Chunks, shape: tuple[int, ...], dtype: DType, name: str) -> TensorEntry:
    """A chunk in a compressed zip, of this shape and type by the table; it is inflated, and checked, when it is read.

    Its storage has a checksum from then on, if the zip has one.
    """
    length = prod(shape) * dtype.itemsize

    def read(offset: int, count: int) -> bytes:
        entry = chunks.entry(part, shape, dtype, name)
        if entry.is_contiguous and not entry.offset and entry.nbytes == entry.storage.nbytes:
            storage.crc, storage.intact = entry.storage.crc, entry.storage.intact
        return entry.row_major().read(offset, count)

    storage = Storage(Computed(length, read, checks=True) if length else InlineBytes(b""))
    return TensorEntry(storage, dtype, shape, row_major_strides(shape))
