"""The tables of a DCP folder: `.metadata` for all ranks, or `__R.metadata` of each (`use_collectives=False`).

Source: torch/distributed/checkpoint (metadata.py, filesystem.py), torch 2.0 to 2.13; megatron_core 0.15 and 0.16
(dist_checkpointing/strategies/torch.py), whose `Metadata` has another name. A rank's own table has the full size of
every tensor and the chunks of that rank alone; nothing says how many ranks there were.

There may be 400,000 chunks: each is one small object from the pickle on, and nothing is said of it twice.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, ClassVar

from ckptool.checkpoint.dtypes import BY_TORCH, DType
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import Global, Object
from ckptool.commands import other_program
from ckptool.errors import Ambiguous, Corrupt, LimitExceeded, NotACheckpoint, counted
from ckptool.facts import dataclass, field
from ckptool.formats.distributed import sizes_of
from ckptool.formats.folder import another_run, lacks, missing_ranks
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.pieces import Box
from ckptool.pickles.calls import is_inert
from ckptool.pickles.decode import decode_all, no_storage
from ckptool.pickles.torch_objects import TakesState

METADATA = ".metadata"
OF_A_RANK = re.compile(r"__(?P<rank>\d{1,7})\.metadata")
_UNFINISHED = re.compile(r"__(?P<rank>\d{1,7})\.metadata\.tmp")
RANK_FILE = re.compile(r".*?__(\d{1,7})_")
MAX_METADATA = 256 << 20
MANY_NUMBERS = 1 << 16

# The rows ------------------------------------------------------------------------------------------------------------


class TableRow(TakesState):
    """An object of the tables' classes, kept as the values of its fields; one that it lacks is None.

    odd: the states of a table's rows that hold more than the fields.  numbers: those of its places, each once, up to
    some tens of thousands; ranks have the same.
    """

    __slots__ = ()
    fields: ClassVar[tuple[str, ...]] = ()
    odd: ClassVar[list[Any]]
    numbers: ClassVar[dict[int, int]]

    def __init__(self, *values: Any) -> None:
        for name, value in zip_longest(self.fields, values):
            setattr(self, name, value)

    def fill(self, state: Any) -> None:
        if type(state) is dict:
            for name in self.fields:
                setattr(self, name, state.pop(name, None))
        if state or type(state) is not dict:
            self.odd.append(state)
        else:
            state.clear()  # `pop` frees no room, and the pickle's memo may keep the state to its end


class Place(TableRow):
    """The place of a chunk or an object: a file of the folder, and the range of its bytes.

    transform_descriptors: of the bytes, by extensions of the writer: compression.
    """

    __slots__ = fields = ("relative_path", "offset", "length", "transform_descriptors")
    relative_path: Any
    offset: Any
    length: Any
    transform_descriptors: Any

    def fill(self, state: Any) -> None:
        super().fill(state)
        share = self.numbers.setdefault if len(self.numbers) < MANY_NUMBERS else self.numbers.get
        if type(self.offset) is type(self.length) is int:
            self.offset, self.length = share(self.offset, self.offset), share(self.length, self.length)

    @property
    def is_damaged(self) -> bool:
        packed = self.transform_descriptors or ()
        fits = type(self.relative_path) is str and type(self.offset) is type(self.length) is int
        return not (fits and isinstance(packed, (list, tuple)) and all(type(extension) is str for extension in packed))


class _Block(TableRow):
    """The place of a chunk in its tensor."""

    __slots__ = fields = ("offsets", "sizes")
    offsets: Any
    sizes: Any


class _Index(TableRow):
    """What a place is of: a name, and the offsets of a chunk, None for an object."""

    __slots__ = fields = ("fqn", "offset")
    fqn: Any
    offset: Any

    def fill(self, state: Any) -> None:
        number = state.pop("index", None) if type(state) is dict else None  # a hint, which nothing needs
        super().fill(state)
        if type(number) not in (int, type(None)):
            self.fqn = None


class _Tensor(TableRow):
    __slots__ = fields = ("chunks", "properties", "size")
    chunks: Any
    properties: Any
    size: Any


class _Object(TableRow):
    __slots__ = ()


_ROWS = {
    "BytesStorageMetadata": _Object,
    "ChunkStorageMetadata": _Block,
    "MetadataIndex": _Index,
    "TensorStorageMetadata": _Tensor,
    "_StorageInfo": Place,
}
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def _builders(odd: list[Any]) -> dict[Global, Any]:
    """The builders for a table. odd: collects the states that hold more than the fields of a row."""

    def new_row(row: type[TableRow], args: tuple[Any, ...]) -> Any:
        return NotImplemented if args else row()

    def size(args: tuple[Any, ...]) -> Any:
        return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else NotImplemented

    numbers: dict[int, int] = {}
    rows = {name: type(name, (row,), {"__slots__": (), "odd": odd, "numbers": numbers}) for name, row in _ROWS.items()}
    builders = {Global(module, name): partial(new_row, row) for module in _MODULES for name, row in rows.items()}
    return {**BUILDERS, Global("torch", "Size"): size, **builders}


# The tables ----------------------------------------------------------------------------------------------------------


@lru_cache(1 << 10)
def owner_of(file: str) -> str:
    """Who saved a file, for people."""
    match = RANK_FILE.match(file)
    return f"rank {int(match[1])} ({file})" if match else file


@dataclass(slots=True, eq=False)
class Chunk:
    """A block of a tensor, and where it is; an object has no offsets and sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes


@dataclass(slots=True, eq=False)
class Saved:
    """A value as a table describes it. chunks: of a tensor its blocks; of an object (without a dtype) one for each rank
    that saved it."""

    shape: tuple[int, ...] = ()
    dtype: DType | None = None
    requires_grad: bool = False
    chunks: list[Chunk] = field(default_factory=list)

    def __str__(self) -> str:
        return "an object" if self.dtype is None else f"{self.dtype}{list(self.shape)}"


@dataclass(slots=True, eq=False)
class Tables:
    """What the tables of a folder say together. unused: names that have data and are not described.

    paths: for every name its path in the nested dictionaries that were saved, unchecked.
    files: how many chunks and objects are in each file.
    """

    folder: Folder
    names: list[str]
    values: dict[str, Saved] = field(default_factory=dict)
    paths: dict[Any, Any] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    discarded: list[Any] = field(default_factory=list)
    files: Counter[str] = field(default_factory=Counter)

    def damaged(self, what: str, name: str = "") -> Corrupt:
        return Corrupt(f"{self.folder}: its {name or self.names[0]} {what}", "The table is damaged or malicious.")

    def add(self, name: str) -> None:
        """Reads a table, and adds what it says to what the others say."""
        source, odd = self.folder.open(name), list[Any]()
        if source.size > MAX_METADATA:
            raise LimitExceeded(f"{source} has {source.size:,} bytes", f"ckptool reads at most {MAX_METADATA:,}.")
        data = source.read(0, source.size)
        decoded = decode_all(data, no_storage, _builders(odd), name=str(source), file_bytes=source.size)
        if _class_name(decoded.root) not in ("Metadata", "MCoreMetadata"):
            what = f"{self.folder} is a folder, but its {name} is not that of torch.distributed.checkpoint"
            raise NotACheckpoint(what, fix=f"Name the file: {other_program('ls', self.folder.path)}")
        self.discarded += [*decoded.aside(), *(state for state in odd if not is_inert(state))]
        facts: dict[Any, Any] = decoded.root.attributes
        del data, decoded  # there may be 400,000 chunks to come
        described = facts.pop("state_dict_metadata", None)
        if not isinstance(described, dict) or not all(type(key) is str for key in described):
            raise self.damaged("has no table of names", name)
        table = facts.pop("storage_data", None)
        if not isinstance(table, dict):
            raise self.damaged("does not say where its values are", name)
        places: dict[str, dict[Any, Place]] = {}  # of every chunk, by name and offsets; of an object, those are None
        for number, (index, place) in enumerate(table.items()):
            is_valid = isinstance(index, _Index) and isinstance(place, Place) and not place.is_damaged
            offsets = sizes_of(index.offset) if is_valid and index.offset is not None else None
            if not is_valid or type(index.fqn) is not str or (index.offset is None) != (offsets is None):
                raise self.damaged(f"has an entry {number:,} without a place", name)
            of_name = places.setdefault(index.fqn, {})
            if offsets in of_name:
                raise Ambiguous(f"{self.folder}: its {name} has two places for {index.fqn}")
            of_name[offsets] = place
        table.clear()
        files = {place.relative_path for of_name in places.values() for place in of_name.values()}
        if missing := self.folder.missing(files):
            raise lacks(self.folder, f"{len(missing):,} of its files", missing)
        for key in [*described]:  # each row is dropped once it is read
            self._add_value(name, key, described.pop(key), places.get(key, {}))
        self.unused.update(key for key, unread in places.items() if unread)
        paths = facts.get("planner_data")
        if isinstance(paths, dict):
            self.paths = {**paths, **self.paths}
        if type(version := facts.get("version")) is str:
            self.versions.add(version)

    def _add_value(self, table: str, name: str, row: Any, places: dict[Any, Place]) -> None:
        """Adds the description of a value; takes what it names out of `places`."""
        if isinstance(row, _Tensor):
            shape, blocks, properties = sizes_of(row.size), row.chunks, row.properties
            state = properties.state if _class_name(properties) == "TensorProperties" else None
            if type(state) is tuple and len(state) == 5:
                state = {"dtype": state[0], "requires_grad": state[2]}
            kind, grad = (state.get("dtype"), state.get("requires_grad")) if type(state) is dict else (None, None)
            dtype = BY_TORCH.get(kind.name) if type(kind) is Global and kind.module == "torch" else None
            if not is_inert(properties):
                self.discarded.append(properties)
            if shape is None or dtype is None:
                raise self.damaged(f"says nothing of the shape or type of {name}", table)
            value = Saved(shape, dtype, grad is True)
        elif isinstance(row, _Object):
            value, blocks = Saved(), [_Block((), ())]
        else:
            raise self.damaged(f"describes {name} as {_class_name(row) or type(row).__name__}", table)
        saved = self.values.setdefault(name, value)
        if (saved.shape, saved.dtype) != (value.shape, value.dtype):
            raise another_run(self.folder, f"{name} is {saved} in one of its tables, but {value} in {table}")
        seen: set[Box] = set()
        for block in blocks if isinstance(blocks, list) else [None]:
            box = (block.offsets, block.sizes) if isinstance(block, _Block) else (None, None)
            begin, sizes = map(sizes_of, box)
            if begin is None or sizes is None or not len(begin) == len(sizes) == len(value.shape):
                raise self.damaged(f"has chunks of {name} without offsets and sizes", table)
            if (begin, sizes) in seen:  # an empty block may be listed repeatedly
                if 0 in sizes:
                    continue
                raise self.damaged(f"has a chunk of {name} at {list(begin)} twice: they overlap", table)
            seen.add((begin, sizes))
            place = places.pop(begin if value.dtype else None, None)
            if 0 in sizes and 0 not in value.shape:  # the share of a rank that has none of it
                continue
            if place is None:
                what = name if value.dtype is None else f"the chunk of {name} at {list(begin)}"
                raise self.damaged(f"does not say where {what} is", table)
            self.files[place.relative_path] += 1
            saved.chunks.append(Chunk(begin, sizes, place))


def table_names(folder: Folder) -> list[str]:
    """The tables that count: the one for all ranks, or those of the ranks, by number. Raises `Corrupt` where one of a
    rank is missing among them.
    """
    if METADATA in folder:
        return [METADATA]
    ranks = {int(match["rank"]): name for name in folder.names if (match := OF_A_RANK.fullmatch(name))}
    stopped = [int(match["rank"]) for name in folder.names if (match := _UNFINISHED.fullmatch(name)) and ranks]
    if missing := missing_ranks(ranks, max([*ranks, *stopped], default=-1) + 1):
        names = [f"__{rank}{METADATA}" for rank in missing]
        raise lacks(folder, f"the tables of {counted(len(missing), 'rank')}", names)
    return [name for _, name in sorted(ranks.items())]


def _class_name(node: Any) -> str:
    """The name of the class of torch.distributed or Megatron that an object is of; empty for anything else."""
    fn = node.fn if isinstance(node, Object) else None
    is_known = type(fn) is Global and fn.module.startswith(("torch.distributed.", "megatron.core."))
    return fn.name if is_known and isinstance(fn, Global) else ""
