"""The plan of a folder for `torch.distributed.checkpoint`: what each rank would have saved, and the table of it all.

Every tensor, or block of one, is a torch zip of its own. All of it but the values and their checksum follows from the
shape, and is made once for each shape; objects come first in a file, as in torch's own. The pickle of the table is
written opcode by opcode: there may be 400,000 chunks, so no tree of objects is made of them first.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`), torch 2.13.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from io import BytesIO
from itertools import chain
from struct import pack
from typing import Any, cast

from ckptool.checkpoint import Checkpoint, Computed, Data, InlineBytes, Note, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.blocks import Checksummed, Crc, Deferred, Plan, Segment
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.strided import in_storage_order, row_major, subrange
from ckptool.checkpoint.tree import storages
from ckptool.commands import arg
from ckptool.errors import LimitExceeded, Unsupported, UsageError, listed
from ckptool.facts import dataclass, field
from ckptool.formats import marks, torch_zip
from ckptool.formats.checksums import checksummed
from ckptool.formats.dcp import tree_pickle
from ckptool.formats.dcp.tables import MAX_METADATA, METADATA, Chunk, Place
from ckptool.formats.dcp.tree_pickle import FlatNames
from ckptool.formats.whole_tree import KEPT, as_bytes
from ckptool.pickles.calls import refuse_unknown
from ckptool.pickles.encode import integer

MAX_RANKS = 16_384
MAX_OBJECTS, REPEATED = 8 << 20, 16  # bytes of objects; beyond, as often as that the size of the same in one pickle
FRAME = 1_200  # bytes of the zip around an object
VERSION = "1.0.0"
_MODULE = "torch.distributed.checkpoint.metadata"
_Field = str | int | tuple[int, ...] | list[Any] | None


@dataclass(frozen=True, slots=True, eq=False)
class RankDivision:
    """The ranks for which a new folder is divided: each tensor along a dimension, in ceil-sized blocks as FSDP2 does.

    Raises `UsageError` for numbers out of range.
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

        A tensor that lacks the dimension, has no elements, or repeats what is stored is one block, whole.
        """
        size = entry.shape[self.dim] if self.dim < len(entry.shape) else 0
        if self.ranks == 1 or not size or not entry.numel or entry.nbytes > entry.storage.nbytes:
            return 1, size
        step = -(-size // self.ranks)
        full = -(-size // step)
        return full + (full < self.ranks), step  # all ranks past the end save the same, so it is there once


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a folder: for the ranks of the `RankDivision` that is the checkpoint's origin, else for one.

    What torch's format cannot say goes into a tensor that only ckptool reads (`tree_pickle`), and is noted. Raises
    `Unsupported` for what is no dictionary and for two values of one name, `Conflict` for a dictionary in itself,
    `UnsafeObject` for unknown calls unless `keep_unknown`, `LimitExceeded` for objects that too many entries share.
    """
    refuse_unknown(checkpoint, keep_unknown)
    flat = tree_pickle.flat_names(checkpoint)
    saving = _Saving(checkpoint.origin if isinstance(checkpoint.origin, RankDivision) else RankDivision())
    limit = MAX_OBJECTS
    for name, value in flat.values.items():
        if not isinstance(value, TensorEntry):
            saving.add_object(name, value)
            if (size := saving.files[0].size - FRAME * len(saving.files[0].objects)) > limit:
                limit = max(limit, REPEATED * torch_zip.write(checkpoint, keep_unknown=True).nbytes)
                if size > limit:
                    what = f"its entries share objects, which would be written more than {REPEATED} times"
                    raise LimitExceeded(what, "A .dcp folder has each entry by itself. Nothing was written.")
    for name, value in flat.values.items():
        if isinstance(value, TensorEntry):
            saving.add_tensor(name, value)
    lost = tree_pickle.lost_in_table(flat)
    if saving.strides_lost:
        lost.setdefault("strides of tensors that are sharded or have gaps", saving.strides_lost)
    if marks.RECOVERED in checkpoint.metadata:
        lost["the mark of a recovered file"] = ""
    key = tree_pickle.NAME
    if reserved := [name for name in flat.values if name == key or (lost and name.startswith(f"{key}."))]:
        raise Unsupported(f"{reserved[0]} is a name that ckptool reserves in a .dcp folder", fix="Rename it first.")
    notes: tuple[Note, ...] = ()
    if lost:
        content, raw = tree_pickle.pickled(checkpoint, saving.homes)
        for number, storage in enumerate([Storage(InlineBytes(content)), *raw]):
            name = f"{tree_pickle.NAME}.{number - 1}" if number else tree_pickle.NAME
            flat.add((name,), (name,), as_bytes(storage))
            saving.add_whole(name, flat.values[name])
        losses = listed([what + f" ({where})" * bool(where) for what, where in lost.items()], len(lost))
        lead = f"what torch cannot express here is kept in the tensor {tree_pickle.NAME}"
        notes = (Note(KEPT, f"{lead}: {losses}"),)
    # What is not divided goes to the rank that has least by then.
    heap = [(file.size, rank) for rank, file in enumerate(saving.files)]
    heapq.heapify(heap)
    for item in saving.free:
        file = saving.files[heap[0][1]]
        file.place(item)
        file.items.append(item)
        heapq.heapreplace(heap, (file.size, file.rank))
    files: dict[str, Any] = {_file_of(file.rank): file for file in saving.files if file.size}
    table = table_pickle(flat, saving.chunks)
    if (size := sum(part.length for part in table)) > MAX_METADATA:
        what = f"the table would have {size:,} bytes"
        raise LimitExceeded(what, f"The limit is {MAX_METADATA:,}.", f"Write it for fewer ranks:  {arg('ranks')}")
    files[METADATA] = table
    return Plan(files, saving.checks, notes=notes)


# What is saved -------------------------------------------------------------------------------------------------------


class _Zip:
    """The zip of a tensor that begins its storage, without the bytes of that: what precedes them, and what follows,
    given their checksum."""

    __slots__ = ("_after", "_crc", "head", "size", "tail_length")

    def __init__(
        self, dtype: DType, shape: tuple[int, ...], stride: tuple[int, ...], location: str, nbytes: int
    ) -> None:
        storage = Storage(Computed(nbytes, lambda offset, length: b""), location)
        entry = TensorEntry(storage, dtype, shape, stride)
        (layout,) = torch_zip.write(Checkpoint(entry, torch_zip.NAME)).files.values()
        segments = list(layout)
        at = next((number for number, segment in enumerate(segments) if isinstance(segment, Checksummed)), 0)
        payload = segments[at] if nbytes else None
        self.head = _bytes_of(segments[:at])
        self._crc = payload.crc if isinstance(payload, Checksummed) else Crc()
        self._after = segments[at + (payload is not None) :]
        self.tail_length = sum(segment.length for segment in self._after)
        self.size = len(self.head) + nbytes + self.tail_length

    def tail(self, crc: Crc) -> bytes:
        self._crc.value = crc.value
        return _bytes_of(self._after)


def _bytes_of(segments: list[Segment]) -> bytes:
    """The bytes of segments that are all in memory."""
    return b"".join(s.make() if isinstance(s, Deferred) else cast(InlineBytes, s).content for s in segments)


_zip_of = lru_cache(1024)(_Zip)


class _BlockZip(Place):
    """The zip of a tensor, or of a block of one, in the file of a rank. shape: all that it depends on beside the bytes.

    crc: the checksum of these, where it is known.
    """

    __slots__ = ("crc", "data", "name", "shape")

    def __init__(self, name: str, entry: TensorEntry, data: Data, crc: int | None = None) -> None:
        self.shape = (entry.dtype, entry.shape, entry.stride, entry.location, data.length)
        super().__init__(None, 0, _zip_of(*self.shape).size)
        self.name, self.data, self.crc = name, data, crc

    def __iter__(self) -> Iterator[Segment]:
        zip_ = _zip_of(*self.shape)
        yield InlineBytes(zip_.head)
        crc = Crc(expected=self.crc, name=self.name)
        if self.data.length:
            yield from checksummed(self.data, crc)
        yield Deferred(zip_.tail_length, partial(zip_.tail, crc))


class _Divided:
    """The zips of a tensor of which each rank has a block; made on the fly, as there may be 400,000 of them.

    lengths, offsets: of the zip in each rank's file, in bytes.
    """

    __slots__ = ("dim", "entry", "lengths", "name", "offsets", "step")

    def __init__(self, name: str, entry: TensorEntry, dim: int, ranks: int, step: int) -> None:
        self.name, self.entry, self.dim, self.step = name, entry, dim, step
        self.lengths, known = array("Q"), dict[tuple[int, ...], int]()
        for rank, (_, sizes) in enumerate(self._blocks(ranks)):
            if sizes not in known:
                known[sizes] = self.item(rank).length
            self.lengths.append(known[sizes])
        self.offsets = array("Q", bytes(8 * ranks))

    def _blocks(self, ranks: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Where each rank's block begins in the dimension, and its shape."""
        shape, dim = self.entry.shape, self.dim
        for begin in range(0, ranks * self.step, self.step):
            begin = min(begin, shape[dim])
            yield begin, (*shape[:dim], min(self.step, shape[dim] - begin), *shape[dim + 1 :])

    def item(self, rank: int) -> _BlockZip:
        begin = min(rank * self.step, size := self.entry.shape[self.dim])
        block = self.entry.narrow(self.dim, begin, min(self.step, size - begin))
        return _BlockZip(self.name, _row_major_entry(block), row_major(resolved(block)))

    def __iter__(self) -> Iterator[Chunk]:
        """As the table has them."""
        zeros = (0,) * len(self.entry.shape)
        for rank, (begin, sizes) in enumerate(self._blocks(len(self.lengths))):
            place = Place(_file_of(rank), self.offsets[rank], self.lengths[rank])
            yield Chunk((*zeros[: self.dim], begin, *zeros[self.dim + 1 :]), sizes, place)


@dataclass(slots=True, eq=False)
class _RankFile:
    """The segments of a file, made on the fly: of objects, of blocks, of whole tensors (`items`), in this order.

    numbers: of the tensors in `divided` of which a block is here.
    """

    rank: int
    divided: list[_Divided]
    numbers: array[int] = field(default_factory=partial(array, "I"))
    objects: list[Any] = field(default_factory=list)
    items: list[_BlockZip] = field(default_factory=list)
    size: int = 0

    def place(self, item: Place) -> None:
        """Gives the next item its place."""
        item.relative_path, item.offset = _file_of(self.rank), self.size
        self.size += item.length

    def __iter__(self) -> Iterator[Segment]:
        for value in self.objects:  # there may be one for each word of a vocabulary
            (layout,) = torch_zip.write(Checkpoint(value, torch_zip.NAME), keep_unknown=True).files.values()
            segments = list(layout)
            yield from segments if any(storages(value)) else [InlineBytes(_bytes_of(segments))]
        for item in chain((self.divided[number].item(self.rank) for number in self.numbers), self.items):
            yield from item


@lru_cache(1024)
def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


class _Saving:
    """What every rank saves. chunks: by name, each with its place.  divided: tensors of which each rank has a block.
    free: what may go to any rank.  homes: where a storage is in the new folder, by its id.

    strides_lost: the first name of a tensor whose strides its blocks do not have.
    """

    def __init__(self, division: RankDivision) -> None:
        self.division = division
        self.chunks: dict[str, Iterable[Chunk]] = {}
        self.divided: list[_Divided] = []
        self.files = [_RankFile(rank, self.divided) for rank in range(division.ranks)]
        self.free: list[_BlockZip] = []
        self.homes: dict[int, tree_pickle.Home] = {}
        self.views: dict[Any, str] = {}  # of tensors that are saved -> the first name
        self.checks: list[Storage] = []
        self.strides_lost = ""

    def add_object(self, name: str, value: Any) -> None:
        plan = torch_zip.write(Checkpoint(value, torch_zip.NAME), keep_unknown=True)  # `write` refuses unknown calls
        self.checks += plan.checks
        self.files[0].place(item := Place(None, 0, plan.nbytes))
        self.files[0].objects.append(value)
        self.chunks[name] = [Chunk((), (), item)]
        for number, storage in enumerate(storages(value)):
            self.homes[id(storage)] = tree_pickle.Home(f"{name}#{number}", 0, storage.nbytes)

    def add_tensor(self, name: str, entry: TensorEntry) -> None:
        if (first := self.views.setdefault(entry.view, name)) != name:
            self.chunks[name] = self.chunks[first]  # in one place, so that they are one tensor again
            return
        ranks, step = self.division.of(entry)
        if ranks == 1:
            self.add_whole(name, entry)
            return
        self.divided.append(item := _Divided(name, entry, self.division.dim, ranks, step))
        for file in self.files[:ranks]:
            item.offsets[file.rank] = file.size
            file.size += item.lengths[file.rank]
            file.numbers.append(len(self.divided) - 1)
        self.chunks[name] = item
        if entry.storage.crc is not None or isinstance(entry.storage.data, Computed):
            self.checks.append(entry.storage)
        # Row-major blocks keep the range of a storage that the tensor covers, if it covers it without gaps.
        start, stop = entry.span()
        lazy = entry.flags.conj or entry.flags.neg
        if not entry.is_contiguous:
            self.strides_lost = self.strides_lost or name
        if not lazy and entry.is_contiguous:
            self._settle(entry.storage, tree_pickle.Home(name, start, stop))
        elif not lazy and in_storage_order(entry) and (start, stop) == (0, entry.storage.nbytes):
            axes = sorted(range(len(entry.shape)), key=lambda axis: (-entry.stride[axis], -entry.shape[axis], axis))
            self._settle(entry.storage, tree_pickle.Home(name, start, stop, axes))

    def add_whole(self, name: str, entry: TensorEntry) -> None:
        """Saves the range of its storage that it touches, with its strides; if that has gaps, its values, as torch."""
        start, stop = entry.span()
        storage, has_gaps = entry.storage, stop - start > entry.nbytes
        self.strides_lost = self.strides_lost or (name if has_gaps else "")
        if entry.flags.conj or entry.flags.neg or start % entry.dtype.itemsize or has_gaps:
            item = _BlockZip(name, _row_major_entry(entry), row_major(resolved(entry)))
        else:
            self._settle(storage, tree_pickle.Home(name, start, stop))
            data = subrange(storage.data, start, stop - start)
            if data is not storage.data and (storage.crc is not None or isinstance(storage.data, Computed)):
                self.checks.append(storage)
            item = _BlockZip(name, entry, data, storage.crc if data is storage.data else None)
        self.free.append(item)
        self.chunks[name] = [Chunk((0,) * len(entry.shape), entry.shape, item)]

    def _settle(self, storage: Storage, home: tree_pickle.Home) -> None:
        earlier = self.homes.setdefault(id(storage), home)
        if home.stop - home.start > earlier.stop - earlier.start:
            self.homes[id(storage)] = home


def _row_major_entry(entry: TensorEntry) -> TensorEntry:
    strides = row_major_strides(entry.shape)
    return TensorEntry(entry.storage, entry.dtype, entry.shape, strides, entry.offset, entry.flags)


# The table -----------------------------------------------------------------------------------------------------------


def table_pickle(flat: FlatNames, chunks: Mapping[str, Iterable[Chunk]]) -> list[InlineBytes]:
    """The pickle of a `Metadata` of values by their flat names; in parts, as a growing one would be copied."""
    out = _Pickle()
    out.begin("Metadata")
    out.value("state_dict_metadata")
    out.write(b"}")
    for name, value in flat.values.items():
        out.value(name)
        if not isinstance(value, TensorEntry):
            out.new("BytesStorageMetadata")
        else:
            out.begin("TensorStorageMetadata")
            out.value("properties")
            out.properties(value.dtype, value.flags.requires_grad)
            out.value("size")
            out.value(value.shape)
            out.value("chunks")
            out.write(b"](")
            for chunk in chunks[name]:
                out.new("ChunkStorageMetadata", offsets=chunk.offsets, sizes=chunk.sizes)
            out.write(b"eub")
        out.write(b"s")
        out.end_part()
    out.value("planner_data")
    out.write(b"}")
    for name, path in flat.paths.items():
        out.value(name)
        out.write(b"(")
        for key in path:
            out.value(key)
        out.write(b"ts")
    out.value("storage_data")
    out.write(b"}")
    for name, value in flat.values.items():
        for number, chunk in enumerate(chunks[name]):
            if not isinstance(value, TensorEntry):
                out.new("MetadataIndex", fqn=name, index=None)
            else:
                out.new("MetadataIndex", fqn=name, offset=chunk.offsets, index=number)
            at, module = chunk.place, "torch.distributed.checkpoint.filesystem"
            out.new("_StorageInfo", module, relative_path=at.relative_path, offset=at.offset, length=at.length)
            out.write(b"s")
        out.end_part()
    out.value("storage_meta")
    # What says nothing of the values: torch's own has a random number of the writer, and the path of the folder.
    out.new("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[])
    out.value("version")
    out.value(VERSION)
    out.write(b"ub.")
    out.end_part(min_size=0)
    return out.parts


class _Pickle:
    """A pickle of protocol 2 in the making; what was written before is recalled from its memo."""

    def __init__(self) -> None:
        self.parts: list[InlineBytes] = []
        self.recalls: dict[object, bytes] = {}
        self._begin_part()
        self.write(b"\x80\x02")

    def _begin_part(self) -> None:
        self.raw = BytesIO()  # which gives its bytes without a copy
        self.write = self.raw.write

    def end_part(self, min_size: int = 1 << 20) -> None:
        """Begins another part if this one has `min_size` bytes."""
        if self.raw.tell() >= min_size:
            self.parts.append(InlineBytes(self.raw.getvalue()))
            self._begin_part()

    def recall(self, key: object) -> bool:
        opcode = self.recalls.get(key)
        if opcode is not None:
            self.write(opcode)
        return opcode is not None

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
        """A text, a number, None, an empty list, or a tuple as a `torch.Size`."""
        if value is None:
            self.write(b"N")
        elif isinstance(value, list):
            self.write(b"]")
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
