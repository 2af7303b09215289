"""The plan of a folder for `torch.distributed.checkpoint`: what each rank would have saved, and the table of it all.

Every tensor, or block of one, is a torch zip by itself, of which all but the bytes and their checksum is known from
its shape, and made once for each shape; objects come first in a file, as in torch's own. The pickle of the table is
written opcode by opcode: there may be 400,000 chunks, so no tree of objects is made of them first.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`), torch 2.13.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from io import BytesIO
from struct import pack
from typing import Any, NamedTuple, cast

from ckptool.checkpoint import Checkpoint, Computed, Data, InlineBytes, Note, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.blocks import Checksummed, Crc, Deferred, Plan, Segment
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.strided import in_storage_order, row_major, subrange
from ckptool.checkpoint.tree import storages
from ckptool.commands import arg
from ckptool.errors import LimitExceeded, Unsupported, UsageError, listed
from ckptool.facts import dataclass, field
from ckptool.formats import torch_zip
from ckptool.formats.boxes import Box
from ckptool.formats.checksums import checksummed
from ckptool.formats.dcp import tree_pickle
from ckptool.formats.dcp.tables import MAX_METADATA, METADATA, Chunk, Place
from ckptool.formats.dcp.tree_pickle import FlatNames, flat_names
from ckptool.formats.whole_tree import KEPT, as_bytes
from ckptool.pickles.calls import refuse_unknown
from ckptool.pickles.encode import integer

MAX_RANKS = 16_384
VERSION = "1.0.0"
_MODULE = "torch.distributed.checkpoint.metadata"
_Field = str | int | tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class RankDivision:
    """The ranks that a new folder is divided for, each tensor by a dimension, in ceil-sized blocks as FSDP2 does.

    Raises `UsageError` for numbers that are none.
    """

    ranks: int = 1
    dim: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            what = f"{self.ranks:,} is not a number of ranks"
            raise UsageError(what, f"From 1 to {MAX_RANKS:,}.", f"For example: {arg(ranks=8)}")
        if self.dim < 0:
            raise UsageError(f"{self.dim} is not a dimension", "They count from 0.", f"For example: {arg(shard_dim=0)}")

    def of(self, entry: TensorEntry) -> tuple[int, int]:
        """How many ranks have a block of the tensor, and how many of its indices in the dimension are in each; the last
        block may be shorter, or empty.

        One block, all of it, of a tensor that has no such dimension, no elements, or repeats what is stored.
        """
        size = entry.shape[self.dim] if self.dim < len(entry.shape) else 0
        if self.ranks == 1 or not size or not entry.numel or entry.nbytes > entry.storage.nbytes:
            return 1, size
        step = -(-size // self.ranks)
        full = -(-size // step)
        return full + (full < self.ranks), step  # all ranks past the end save the same, so it is there once


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a folder; `RankDivision` as the origin says for how many ranks, else one.

    What torch's format cannot say goes into a tensor that only ckptool reads (`tree_pickle`), and is noted. Raises
    `Unsupported` for what is no dictionary and for two values of one name, `Conflict` for a dictionary in itself,
    `UnsafeObject` for unknown calls unless `keep_unknown`.
    """
    refuse_unknown(checkpoint, keep_unknown)
    flat = flat_names(checkpoint.tree)
    division = checkpoint.origin if isinstance(checkpoint.origin, RankDivision) else RankDivision()
    saving = _Saving(flat, division)
    for name, value in flat.values.items():
        if not isinstance(value, TensorEntry):
            saving.add_object(name, value)
    for name, value in flat.values.items():
        if isinstance(value, TensorEntry):
            saving.add_tensor(name, value)
    lost = tree_pickle.lost_in_table(flat)
    if saving.strides_lost:
        lost.setdefault(tree_pickle.STRIDES, saving.strides_lost)
    own = [
        name for name in flat.values if name == tree_pickle.NAME or (lost and name.startswith(f"{tree_pickle.NAME}."))
    ]
    if own:
        raise Unsupported(
            f"{own[0]} is a name of ckptool's own in a .dcp folder", "It would be lost.", "Rename it first."
        )
    notes: tuple[Note, ...] = ()
    if lost:
        content, raw = tree_pickle.pickled(checkpoint, saving.homes)
        for number, storage in enumerate([Storage(InlineBytes(content)), *raw]):
            name = f"{tree_pickle.NAME}.{number - 1}" if number else tree_pickle.NAME
            flat.add((name,), (name,), as_bytes(storage))
            saving.add_whole(name, flat.values[name])
        kept = listed([f"{what} ({where or 'the top'})" for what, where in lost.items()], len(lost))
        keeps = f"the tensor {tree_pickle.NAME} keeps, for readers of ckptool, what torch cannot say here"
        notes = (Note(KEPT, f"{keeps}: {kept}"),)
    files = saving.lay_out()
    table = table_pickle({name: saving.values[name] for name in flat.values})
    if (size := sum(part.length for part in table)) > MAX_METADATA:
        what = f"the table would have {size:,} bytes"
        raise LimitExceeded(what, f"At most {MAX_METADATA:,} are read.", f"Write it for fewer ranks: {arg('ranks')}")
    files[METADATA] = table
    return Plan(files, saving.checks, notes=notes)


# What is saved -------------------------------------------------------------------------------------------------------


class _Zip:
    """The zip of a tensor but for the bytes of its storage, of which it is the beginning: what is before them, and
    after, given their checksum."""

    __slots__ = ("_after", "_crc", "head", "size", "tail_length")

    def __init__(
        self, dtype: DType, shape: tuple[int, ...], stride: tuple[int, ...], location: str, nbytes: int
    ) -> None:
        storage = Storage(Computed(nbytes, lambda offset, length: b""), location)
        entry = TensorEntry(storage, dtype, shape, stride)
        (segments,) = torch_zip.write(Checkpoint(entry, torch_zip.NAME)).files.values()
        parts = list(segments)
        at = next((number for number, part in enumerate(parts) if isinstance(part, Checksummed)), 0)
        bytes_ = parts[at] if nbytes else None
        self.head = _joined(parts[:at])
        self._crc = bytes_.crc if isinstance(bytes_, Checksummed) else Crc()
        self._after = parts[at + (bytes_ is not None) :]
        self.tail_length = sum(part.length for part in self._after)
        self.size = len(self.head) + nbytes + self.tail_length

    def tail(self, crc: Crc) -> bytes:
        self._crc.value = crc.value
        return _joined(self._after)


def _joined(parts: list[Segment]) -> bytes:
    """The bytes of segments that are all in memory."""
    return b"".join(part.make() if isinstance(part, Deferred) else cast(InlineBytes, part).content for part in parts)


_zip_of = lru_cache(1024)(_Zip)


def _zipped(name: str, entry: TensorEntry, data: Data, crc: int | None = None) -> Iterator[Segment]:
    """The zip of a tensor whose storage is this data. crc: the checksum of that, where it is known."""
    around, sum_ = _around(entry, data.length), Crc(expected=crc, name=name)
    yield InlineBytes(around.head)
    if data.length:
        yield from checksummed(data, sum_)
    yield Deferred(around.tail_length, partial(around.tail, sum_))


def _around(entry: TensorEntry, nbytes: int) -> _Zip:
    return _zip_of(entry.dtype, entry.shape, entry.stride, entry.location, nbytes)


@dataclass(slots=True, eq=False)
class _Zips:
    """The zips of a value, by number: one of an object or a whole tensor; of a divided tensor one for each rank.

    make: the segments of one, made in passing, as there may be 400,000 of them.  box: its place in the tensor.
    lengths, offsets: in the ranks' files, in bytes.  first: the rank that has the first of them.
    """

    make: Callable[[int], Iterable[Segment]]
    box: Callable[[int], Box]
    lengths: array[int]
    offsets: array[int] = field(init=False)
    first: int = 0

    def __post_init__(self) -> None:
        self.offsets = array("Q", bytes(8 * len(self.lengths)))

    def __iter__(self) -> Iterator[Chunk]:
        """As the table has them."""
        for number, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            yield Chunk(*self.box(number), Place(_file_of(self.first + number), offset, length))


@dataclass(slots=True, eq=False)
class _RankFile:
    """The segments of a file: of objects, of blocks, of whole tensors, in this order. numbers: those in `zips` of which
    one is here."""

    rank: int
    zips: list[_Zips]
    numbers: array[int] = field(default_factory=partial(array, "I"))
    size: int = 0

    def add(self, number: int) -> None:
        zips = self.zips[number]
        zips.offsets[self.rank - zips.first] = self.size
        self.size += zips.lengths[self.rank - zips.first]
        self.numbers.append(number)

    def __iter__(self) -> Iterator[Segment]:
        for zips in map(self.zips.__getitem__, self.numbers):
            yield from zips.make(self.rank - zips.first)


@lru_cache(1024)
def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


class _Described(NamedTuple):
    """A value as the table describes it. dtype: None for an object.  path: in the nested dictionaries."""

    shape: tuple[int, ...]
    dtype: DType | None
    requires_grad: bool
    chunks: Iterable[Chunk]
    path: tuple[str | int, ...]


class _Saving:
    """What every rank saves. values: as the table describes them.  zips: of all of them.  free: those that may go to
    any rank.  homes: where a storage is in the new folder, by its id.

    strides_lost: the first name of a tensor whose strides its blocks do not have.
    """

    def __init__(self, flat: FlatNames, division: RankDivision) -> None:
        self.flat, self.division = flat, division
        self.values: dict[str, _Described] = {}
        self.zips: list[_Zips] = []
        self.files = [_RankFile(rank, self.zips) for rank in range(division.ranks)]
        self.free: list[int] = []
        self.homes: dict[int, tree_pickle.Home] = {}
        self.views: dict[Any, str] = {}  # of tensors that are saved -> the first name
        self.checks: list[Storage] = []
        self.strides_lost = ""

    def add_object(self, name: str, value: Any) -> None:
        plan = torch_zip.write(Checkpoint(value, torch_zip.NAME), keep_unknown=True)  # what is unknown was asked for
        (made,) = plan.files.values()
        segments = list(made)
        if all(isinstance(part, (InlineBytes, Deferred)) for part in segments):
            segments = [InlineBytes(_joined(segments))]
        self.checks += plan.checks
        self.zips.append(item := _Zips(lambda _: segments, lambda _: ((), ()), array("Q", [plan.nbytes])))
        self.files[0].add(len(self.zips) - 1)
        self.values[name] = _Described((), None, False, item, self.flat.paths[name])
        for number, storage in enumerate(storages(value)):
            self.homes[id(storage)] = tree_pickle.Home(f"{name}#{number}", 0, storage.nbytes)

    def add_tensor(self, name: str, entry: TensorEntry) -> None:
        if (first := self.views.setdefault(entry.view, name)) != name:
            self._describe(name, entry, self.values[first].chunks)  # in one place, so that they are one tensor again
            return
        ranks, step = self.division.of(entry)
        if ranks == 1:
            self.add_whole(name, entry)
            return
        dim, shape = self.division.dim, entry.shape
        sizes = [max(0, min(step, shape[dim] - rank * step)) for rank in range(ranks)]

        def box(rank: int) -> Box:
            before, behind = shape[:dim], shape[dim + 1 :]
            begin = min(rank * step, shape[dim])
            return (*(0 for _ in before), begin, *(0 for _ in behind)), (*before, sizes[rank], *behind)

        def block(rank: int) -> TensorEntry:
            return entry.narrow(dim, min(rank * step, shape[dim]), sizes[rank])

        def make(rank: int) -> Iterator[Segment]:
            return _zipped(name, _plain(block(rank)), row_major(resolved(block(rank))))

        lengths = dict(zip(sizes, range(ranks), strict=True))  # one rank for each of the few sizes there are
        for size, rank in lengths.items():
            lengths[size] = _around(_plain(block(rank)), block(rank).nbytes).size
        self.zips.append(item := _Zips(make, box, array("Q", map(lengths.__getitem__, sizes))))
        for file in self.files[:ranks]:
            file.add(len(self.zips) - 1)
        self._describe(name, entry, item)
        if entry.storage.crc is not None or isinstance(entry.storage.data, Computed):
            self.checks.append(entry.storage)
        # Blocks in row-major order keep of a storage what the tensor covers, if it does so without gaps.
        start, stop = entry.span()
        lazy = entry.flags.conj or entry.flags.neg
        if not entry.is_contiguous:
            self.strides_lost = self.strides_lost or name
        if not lazy and entry.is_contiguous:
            self._settle(entry.storage, tree_pickle.Home(name, start, stop))
        elif not lazy and in_storage_order(entry) and (start, stop) == (0, entry.storage.nbytes):
            axes = sorted(range(len(shape)), key=lambda axis: (-entry.stride[axis], -shape[axis], axis))
            self._settle(entry.storage, tree_pickle.Home(name, start, stop, axes))

    def add_whole(self, name: str, entry: TensorEntry) -> None:
        """The part of its storage that it touches, with its strides; where it has gaps, its values, as torch does."""
        start, stop = entry.span()
        storage, has_gaps = entry.storage, stop - start > entry.nbytes
        self.strides_lost = self.strides_lost or (name if has_gaps else "")
        zipped: tuple[TensorEntry, Data, int | None]
        if entry.flags.conj or entry.flags.neg or start % entry.dtype.itemsize or has_gaps:
            zipped = _plain(entry), row_major(resolved(entry)), None
        else:
            self._settle(storage, tree_pickle.Home(name, start, stop))
            data = subrange(storage.data, start, stop - start)
            if data is not storage.data and (storage.crc is not None or isinstance(storage.data, Computed)):
                self.checks.append(storage)
            zipped = entry, data, storage.crc if data is storage.data else None
        length, box = _around(zipped[0], zipped[1].length).size, ((0,) * len(entry.shape), entry.shape)
        self.zips.append(item := _Zips(lambda _: _zipped(name, *zipped), lambda _: box, array("Q", [length])))
        self.free.append(len(self.zips) - 1)
        self._describe(name, entry, item)

    def _describe(self, name: str, entry: TensorEntry, chunks: Iterable[Chunk]) -> None:
        trained = entry.flags.requires_grad
        self.values[name] = _Described(entry.shape, entry.dtype, trained, chunks, self.flat.paths[name])

    def _settle(self, storage: Storage, home: tree_pickle.Home) -> None:
        known = self.homes.setdefault(id(storage), home)
        if home.stop - home.start > known.stop - known.start:
            self.homes[id(storage)] = home

    def lay_out(self) -> dict[str, Any]:
        """The files of the ranks. What is not divided goes to the rank that has least by then."""
        heap = [(file.size, rank) for rank, file in enumerate(self.files)]
        heapq.heapify(heap)
        for number in self.free:
            rank = self.zips[number].first = heap[0][1]
            self.files[rank].add(number)
            heapq.heapreplace(heap, (self.files[rank].size, rank))
        return {_file_of(file.rank): file for file in self.files if file.size}


def _plain(entry: TensorEntry) -> TensorEntry:
    strides = row_major_strides(entry.shape)
    return TensorEntry(entry.storage, entry.dtype, entry.shape, strides, entry.offset, entry.flags)


# The table -----------------------------------------------------------------------------------------------------------


def table_pickle(values: Mapping[str, _Described]) -> list[InlineBytes]:
    """The pickle of a `Metadata` of these values, by their flat names; in parts, as one that grows is copied."""
    out = _Pickle()
    out.begin("Metadata")
    out.value("state_dict_metadata")
    out.write(b"}")
    for name, value in values.items():
        out.value(name)
        if value.dtype is None:
            out.new("BytesStorageMetadata")
        else:
            out.begin("TensorStorageMetadata")
            out.value("properties")
            out.properties(value.dtype, value.requires_grad)
            out.value("size")
            out.value(value.shape)
            out.value("chunks")
            out.write(b"](")
            for chunk in value.chunks:
                out.new("ChunkStorageMetadata", offsets=chunk.offsets, sizes=chunk.sizes)
            out.write(b"eub")
        out.write(b"s")
        out.end_part()
    out.value("planner_data")
    out.write(b"}")
    for name, value in values.items():
        out.value(name)
        out.write(b"(")
        for key in value.path:
            out.value(key)
        out.write(b"ts")
    out.value("storage_data")
    out.write(b"}")
    for name, value in values.items():
        for number, chunk in enumerate(value.chunks):
            if value.dtype is None:
                out.new("MetadataIndex", fqn=name, index=None)
            else:
                out.new("MetadataIndex", fqn=name, offset=chunk.offsets, index=number)
            at, module = chunk.place, "torch.distributed.checkpoint.filesystem"
            out.new("_StorageInfo", module, relative_path=at.relative_path, offset=at.offset, length=at.length)
            out.write(b"s")
        out.end_part()
    out.value("storage_meta")
    # What says nothing of the values: torch's own has a random number of the writer, and the path of the folder.
    out.begin("StorageMeta")
    for key in ("checkpoint_id", "save_id", "load_id"):
        out.value(key)
        out.value(None)
    out.value("modules")
    out.write(b"]ub")
    out.value("version")
    out.value(VERSION)
    out.write(b"ub.")
    out.end_part(least=0)
    return out.parts


class _Pickle:
    """A pickle of protocol 2 in the making; what is said again is recalled."""

    def __init__(self) -> None:
        self.parts: list[InlineBytes] = []
        self.recalls: dict[object, bytes] = {}
        self._begin_part()
        self.write(b"\x80\x02")

    def _begin_part(self) -> None:
        self.raw = BytesIO()  # which gives its bytes without a copy
        self.write = self.raw.write

    def end_part(self, least: int = 1 << 20) -> None:
        """Begins another part if this one has so many bytes."""
        if self.raw.tell() >= least:
            self.parts.append(InlineBytes(self.raw.getvalue()))
            self._begin_part()

    def recall(self, key: object) -> bool:
        found = self.recalls.get(key)
        if found is not None:
            self.write(found)
        return found is not None

    def keep(self, key: object) -> None:
        """Memoizes what is on top of the stack under `key`."""
        number = pack("<I", len(self.recalls))
        self.write(b"r" + number)
        self.recalls[key] = b"j" + number

    def name(self, module: str, name: str) -> None:
        if not self.recall((module, name)):
            self.write(f"c{module}\n{name}\n".encode())
            self.keep((module, name))

    def begin(self, name: str, module: str = _MODULE) -> None:
        """An object made without arguments, and the beginning of its fields, which `ub` ends."""
        self.name(module, name)
        self.write(b")\x81}(")

    def new(self, name: str, module: str = _MODULE, **fields: _Field) -> None:
        """An object made without arguments, with these fields; without any, it gets no state."""
        self.name(module, name)
        self.write(b")\x81")
        if fields:
            self.write(b"}(")
            for key, value in fields.items():
                self.value(key)
                self.value(value)
            self.write(b"ub")

    def value(self, value: _Field) -> None:
        """A text, a number, None, or a tuple as a `torch.Size`."""
        if value is None:
            self.write(b"N")
        elif isinstance(value, int):
            self.write(integer(value))
        elif not self.recall(key := value if isinstance(value, str) else ("size", *value)):
            if isinstance(value, str):
                encoded = value.encode("utf-8", "surrogatepass")
                self.write(b"X" + pack("<I", len(encoded)) + encoded)
            else:
                self.name("torch", "Size")
                self.write(b"(" + b"".join(map(integer, value)) + b"t\x85R")
            self.keep(key)

    def properties(self, dtype: DType, requires_grad: bool) -> None:
        """The `TensorProperties`: dtype, layout, requires_grad, memory format, pinned."""
        if self.recall(key := ("properties", dtype.name, requires_grad)):
            return
        self.new("TensorProperties")
        self.write(b"(")
        self.name("torch", dtype.torch)
        self.name("torch.serialization", "_get_layout")
        self.value("torch.strided")
        self.write(b"\x85R" + (b"\x88" if requires_grad else b"\x89"))
        self.name(_MODULE, "_MEM_FORMAT_ENCODING")
        self.write(b"K\x00\x85R\x89tb")
        self.keep(key)
