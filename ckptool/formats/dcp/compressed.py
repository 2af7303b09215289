"""Payloads of a DCP folder that a stream extension of torch's writer compressed: `stream.zstd`.

Source: torch/distributed/checkpoint/_extension.py (`ZStandard`), torch 2.13. The whole torch zip of a chunk is one
stream, so that its directory is behind everything: a chunk is inflated when its values are asked for, not to be opened.
"""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

from ckptool.checkpoint import (
    Checkpoint,
    Computed,
    Data,
    FileRange,
    InlineBytes,
    Storage,
    TensorEntry,
    row_major_strides,
)
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Part, Source
from ckptool.checkpoint.tree import map_storages
from ckptool.errors import Corrupt, LimitExceeded, MissingExtra, Truncated, Unsupported, listed
from ckptool.formats import torch_zip
from ckptool.formats.checksums import crc_combine

ZSTD = "stream.zstd/1"
BLOCK = 1 << 18
HEAD, TAIL = 1 << 16, 1 << 17  # bytes that are kept of what a stream inflates to
MOST_BESIDE = 1 << 16  # bytes of a chunk's zip that are not its values
USUAL_WINDOW, MOST_WINDOW = 1 << 21, 1 << 23  # bytes that a decompressor keeps
MOST_KEPT = 3 << 23  # bytes of the windows of streams that are kept open
_FRAME_HEADER = 18


@dataclass(slots=True, eq=False)
class Streams:
    """The streams that were read up to some place, the last ones used: who goes on there does not begin anew."""

    idle: list[_Stream] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, part: Part, offset: int, length: int) -> bytes:
        """The bytes that `part` inflates to from `offset`."""
        stream = self._taken(part, offset)
        while stream.at < offset and stream.next(min(BLOCK, offset - stream.at)):
            pass
        parts = []
        while length and (data := stream.next(length)):
            parts.append(data)
            length -= len(data)
        with self.lock:
            self.idle.append(stream)
            while len(self.idle) > 1 and sum(each.window for each in self.idle) > MOST_KEPT:
                self.idle.pop(0)
        return b"".join(parts)

    def _taken(self, part: Part, offset: int) -> _Stream:
        with self.lock:
            fitting = [stream for stream in self.idle if stream.part is part and stream.at <= offset]
            if not fitting:
                return _Stream(part)
            best = max(fitting, key=lambda stream: stream.at)
            self.idle.remove(best)
            return best


class _Stream:
    """What a part of a file inflates to, front to back. `at`: the place of the next byte.  window: bytes that it
    keeps."""

    def __init__(self, part: Part) -> None:
        import zstandard

        self.part, self.at = part, 0
        self.error = zstandard.ZstdError
        try:
            first = zstandard.get_frame_parameters(part.read(0, min(part.size, _FRAME_HEADER))).window_size
        except self.error:  # reading says so
            first = 0
        self.window = min(max(first, USUAL_WINDOW), MOST_WINDOW)  # of its further frames as well
        made = zstandard.ZstdDecompressor(max_window_size=self.window)
        self.reader = made.stream_reader(cast(Any, _Packed(part)), read_size=1 << 16, read_across_frames=True)

    def next(self, most: int) -> bytes:
        try:
            data: bytes = self.reader.read(min(most, BLOCK))
        except self.error as error:
            what = f"{self.part} cannot be inflated: {error!s}"
            raise Corrupt(what, "It was damaged, or is not compressed with zstd as torch does it.") from None
        self.at += len(data)
        return data


class _Packed:
    """The compressed bytes, for a decompressor. Not its stream: in a circle, its memory would be kept for long."""

    def __init__(self, part: Part) -> None:
        self.part, self.taken = part, 0

    def read(self, size: int) -> bytes:
        data = self.part.read(self.taken, min(size, self.part.size - self.taken))
        self.taken += len(data)
        return data


class Inflated(Part):
    """What a part of a file inflates to, readable as a file. Making one inflates all of it; head and tail are kept."""

    __slots__ = ("crc", "head", "part", "streams", "tail")

    def __init__(self, part: Part, streams: Streams, most: int) -> None:
        self.part, self.streams = part, streams
        self.head = self.tail = b""
        self.crc = size = 0
        while data := streams.read(part, size, BLOCK):
            size += len(data)
            if size > most:
                what = f"{part} inflates to more than {most:,} bytes"
                raise LimitExceeded(what, "That is more than its tensor can take; the file is probably malicious.")
            self.crc = zlib.crc32(data, self.crc)
            self.head = self.head if len(self.head) >= HEAD else (self.head + data)[:HEAD]
            self.tail = (self.tail + data)[-TAIL:]
        super().__init__(cast(Source, self), 0, size)

    def __str__(self) -> str:
        return str(self.part)

    def read(self, offset: int, length: int) -> bytes:
        if length < 0 or offset < 0 or offset + length > self.size:
            return super().read(offset, length)  # which says so
        if offset + length <= len(self.head):
            return self.head[offset : offset + length]
        if (at := offset - self.size + len(self.tail)) >= 0:
            return self.tail[at : at + length]
        return self.streams.read(self.part, offset, length)

    @property
    def path(self) -> str:
        return self.part.file.path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def zip(self) -> Checkpoint:
        """The torch zip that it is. Raises as `torch_zip.read`; no part of one that was cut off can be recovered."""
        try:
            return torch_zip.read(self)
        except Truncated as error:
            error.cut_archive = None
            raise

    def confirm(self, storage: Storage) -> None:
        """Raises `Corrupt` where a storage in it does not match its checksum, as the sum of everything shows."""
        data = storage.data
        if storage.crc is None or not isinstance(data, FileRange):
            return
        rest = self.size - data.offset - data.length
        if data.offset > len(self.head) or rest > len(self.tail):
            raise Corrupt(f"{self}: its zip is not laid out as torch does it", "It may have been made by hand.")
        summed = crc_combine(zlib.crc32(self.head[: data.offset]), storage.crc, data.length)
        if crc_combine(summed, zlib.crc32(self.tail[len(self.tail) - rest :]), rest) != self.crc:
            raise Corrupt(f"{self}: the values do not match their checksum", "The file was damaged.")


def refuse_unknown(transforms: tuple[str, ...], what: str) -> None:
    """Raises `Unsupported` for other extensions than zstd, `MissingExtra` where that is not installed."""
    if transforms != (ZSTD,):
        why = "An extension of torch's writer did that; only it can undo it."
        fix = "With torch: load it with the same extension, and save it without."
        raise Unsupported(f"{what} is packed by {listed(transforms)}", why, fix)
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        why = "torch's writer compressed it (stream.zstd)."
        fix = "pip install 'ckptool[zstd]'"
        raise MissingExtra(f"{what} needs the package zstandard, which is not installed", why, fix) from error


def compressed_object(part: Part, streams: Streams) -> tuple[Any, tuple[Any, ...]]:
    """An object in a compressed zip, and what of its pickle is not inert and not in it."""
    inflated = Inflated(part, streams, torch_zip.inflated_limit(part.size))
    checkpoint = inflated.zip()
    return map_storages(checkpoint.tree, _computed), checkpoint.discarded


def _computed(storage: Storage) -> Storage:
    """The storage without its place in a file: there are no such bytes on a disk."""
    data = storage.data
    made = Computed(data.length, data.read) if isinstance(data, FileRange) else data
    return Storage(made, storage.location, storage.crc)


def compressed_tensor(part: Part, streams: Streams, shape: tuple[int, ...], dtype: DType, name: str) -> TensorEntry:
    """A chunk in a compressed zip, of this shape and type by the table; it is inflated, and checked, when it is read.

    Its storage has a checksum from then on, if the zip has one.
    """
    length = prod(shape) * dtype.itemsize
    opened: list[Data] = []

    def read(offset: int, count: int) -> bytes:
        if not opened:
            entry = _values(part, streams, shape, dtype, name)
            opened.append(entry.row_major())
            if entry.is_contiguous and not entry.offset and entry.nbytes == entry.storage.nbytes:
                storage.crc, storage.intact = entry.storage.crc, entry.storage.crc is not None
        return opened[0].read(offset, count)

    storage = Storage(Computed(length, read, checks=True) if length else InlineBytes(b""))
    return TensorEntry(storage, dtype, shape, row_major_strides(shape))


def _values(part: Part, streams: Streams, shape: tuple[int, ...], dtype: DType, name: str) -> TensorEntry:
    inflated = Inflated(part, streams, prod(shape) * dtype.itemsize + MOST_BESIDE)
    entry = inflated.zip().tree
    if not isinstance(entry, TensorEntry) or (entry.shape, entry.dtype) != (shape, dtype):
        what = f"{part}: the chunk of {name} should be {dtype}{list(shape)}, its file has {entry!r:.100}"
        raise Corrupt(what, "The files are of two checkpoints, or one of them was damaged.")
    inflated.confirm(entry.storage)
    return entry.with_storage(_computed(entry.storage))
