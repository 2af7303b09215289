"""The tables of a DCP folder: `.metadata` for all ranks, or `__R.metadata` of each (`use_collectives=False`).

Source: torch/distributed/checkpoint (metadata.py, filesystem.py), torch 2.0 to 2.13; megatron_core 0.15 and 0.16
(dist_checkpointing/strategies/torch.py), whose classes are the same by other names. A rank's own table has the full
size of every tensor and the chunks of that rank alone; nothing says how many ranks there were.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ckptool.checkpoint.dtypes import BY_TORCH, DType
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import Global, Object
from ckptool.commands import other_program
from ckptool.errors import (
    Ambiguous,
    Conflict,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    counted,
)
from ckptool.formats.folder import lacks, missing_ranks
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.pieces import Box
from ckptool.formats.placements import sizes_of
from ckptool.pickles.calls import is_inert
from ckptool.pickles.decode import decode, no_storage
from ckptool.pickles.torch_objects import TakesState

METADATA = ".metadata"
OF_A_RANK = re.compile(r"__(?P<rank>\d{1,7})\.metadata")
_UNFINISHED = re.compile(r"__(?P<rank>\d{1,7})\.metadata\.tmp")
MAX_METADATA = 256 << 20

Key = tuple[str, tuple[int, ...] | None]  # a name, and the offsets of a chunk; None for an object
Path = tuple[str | int, ...]


class Place(NamedTuple):
    """The place of a chunk or an object: a file of the folder, and the range of its bytes."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()  # of the bytes, by extensions of the writer: compression


@dataclass(slots=True, eq=False)
class Saved:
    """A value as a table describes it. chunks: of a tensor, where each of its blocks is; of an object (without a
    dtype), where each rank that has one saved it.  path: in the nested dictionaries that were saved, where it is known.
    """

    shape: tuple[int, ...] = ()
    dtype: DType | None = None
    requires_grad: bool = False
    chunks: list[tuple[Box, Place]] = field(default_factory=list)
    path: Path = ()

    def __str__(self) -> str:
        return "an object" if self.dtype is None else f"{self.dtype}{list(self.shape)}"


@dataclass(slots=True, eq=False)
class Tables:
    """What the tables of a folder say together. unused: names that have data and are not described.

    paths: for every name its path in the nested dictionaries that were saved, unchecked.
    files: those that values are in, and how many are in each.
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
        """Reads a table, and adds what it says to that of the others."""
        facts = self._fields(name)
        described = facts.get("state_dict_metadata")
        if not isinstance(described, dict) or not all(type(key) is str for key in described):
            raise self.damaged("has no table of names", name)
        places = self._places(name, facts.pop("storage_data", None))
        for key, node in described.items():
            self._add_value(name, key, node, places)
        self.unused.update(key for key, _ in places)
        paths = facts.get("planner_data")
        if isinstance(paths, dict):
            self.paths = {**paths, **self.paths}
        if type(version := facts.get("version")) is str:
            self.versions.add(version)

    def _fields(self, name: str) -> dict[Any, Any]:
        """The fields of the `Metadata` that a table is a pickle of."""
        source = self.folder.open(name)
        if source.size > MAX_METADATA:
            raise LimitExceeded(f"{source} has {source.size:,} bytes", f"At most {MAX_METADATA:,} are read.")
        data = source.read(0, source.size)
        odd: list[Any] = []
        entries = {fn: partial(_entry, kind, odd) for fn, kind in _ENTRIES.items()}
        decoded = decode(data, no_storage, {**_BUILDERS, **entries}, name=str(source), file_bytes=source.size)
        if decoded.end != len(data):
            raise Ambiguous(
                f"{source} has {len(data) - decoded.end:,} bytes after its end", "Another pickle may be hidden there."
            )
        if _class(decoded.root) != "Metadata":
            what = f"{self.folder} is a folder, and its {name} is not that of torch.distributed.checkpoint"
            why = "Another program wrote it."
            raise NotACheckpoint(what, why, f"Name the file: {other_program('ls', self.folder.path)}")
        self.discarded += [*decoded.aside(), *(state for state in odd if not is_inert(state))]
        fields: dict[Any, Any] = decoded.root.attributes
        return fields

    def _places(self, name: str, table: Any) -> dict[Key, Place]:
        """The place of every chunk and object, by name and offsets."""
        if not isinstance(table, dict):
            raise self.damaged("does not say where its values are", name)
        places: dict[Key, Place] = {}
        for index, info in table.items():
            key, place = _read(index, "MetadataIndex"), _read(info, "_StorageInfo")
            if key is None or place is None:
                raise self.damaged(f"has an entry {len(places):,} without a place", name)
            if key in places:
                raise Ambiguous(
                    f"{self.folder}: its {name} has two places for {key[0]}", "Readers disagree about which one counts."
                )
            places[key] = place
        table.clear()
        if missing := self.folder.missing({place.file for place in places.values()}):
            raise lacks(self.folder, f"{len(missing):,} of its files", missing)
        return places

    def _add_value(self, table: str, name: str, node: Any, places: dict[Key, Place]) -> None:
        """Adds the description of a value; takes what it names out of `places`."""
        kind = _class(node)
        value = Saved()
        if kind == "TensorStorageMetadata":
            shape = sizes_of(node.attributes.get("size"))
            dtype, trained = _properties(node.attributes.get("properties"))
            if shape is None or dtype is None:
                raise self.damaged(f"says nothing of the shape or type of {name}", table)
            value = Saved(shape, dtype, trained)
        elif kind != "BytesStorageMetadata":
            raise self.damaged(f"says of {name} that it is a {kind or type(node).__name__}", table)
        known = self.values.setdefault(name, value)
        if (known.shape, known.dtype) != (value.shape, value.dtype):
            raise Conflict(
                f"{self.folder}: {name} is {known} in one of its tables, and {value} in {table}",
                "The tables are of two checkpoints.",
                "Copy the folder again, or take another checkpoint.",
            )
        if value.dtype is None:
            boxes: dict[Box, None] = {((), ()): None}
        else:
            boxes = self._boxes(table, name, node.attributes.get("chunks"), len(value.shape))
        for box in boxes:
            begin, sizes = box
            place = places.pop((name, begin if value.dtype else None), None)
            if 0 in sizes and 0 not in value.shape:  # the share of a rank that has none of it
                continue
            if place is None:
                what = name if value.dtype is None else f"the chunk of {name} at {list(begin)}"
                raise self.damaged(f"does not say where {what} is", table)
            self.files[place.file] += 1
            known.chunks.append((box, place))

    def _boxes(self, table: str, name: str, chunks: Any, rank: int) -> dict[Box, None]:
        """The offsets and the sizes of each chunk; what no rank has an element of may stand there repeatedly."""
        boxes: dict[Box, None] = {}
        for chunk in chunks if isinstance(chunks, list) else ():
            box = _read(chunk, "ChunkStorageMetadata")
            if box is None or len(box[0]) != rank or len(box[1]) != rank:
                raise self.damaged(f"has chunks of {name} without offsets and sizes", table)
            if box in boxes and 0 not in box[1]:
                raise self.damaged(f"has a chunk of {name} at {list(box[0])} twice: they overlap", table)
            boxes[box] = None
        return boxes


def table_names(folder: Folder) -> list[str]:
    """The tables that count: the one for all ranks, or those of the ranks, by number. Raises `Corrupt` where one of a
    rank is missing among them.
    """
    if METADATA in folder:
        return [METADATA]
    ranks = {int(found["rank"]): name for name in folder.names if (found := OF_A_RANK.fullmatch(name))}
    stopped = [int(found["rank"]) for name in folder.names if (found := _UNFINISHED.fullmatch(name)) and ranks]
    if missing := missing_ranks(ranks, max([*ranks, *stopped], default=-1) + 1):
        names = [f"__{rank}{METADATA}" for rank in missing]
        raise lacks(folder, f"the tables of {counted(len(missing), 'rank')}", names)
    return [name for _, name in sorted(ranks.items())]


# The classes ---------------------------------------------------------------------------------------------------------


def _size(args: tuple[Any, ...]) -> Any:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else NotImplemented


_BUILDERS = {**BUILDERS, Global("torch", "Size"): _size}


def _class(node: Any) -> str:
    """The name of the class of torch.distributed that an object is of; empty for anything else."""
    if not isinstance(node, Object) or type(node.fn) is not Global:
        return ""
    module, name = node.fn.module, node.fn.name
    if module.startswith("megatron.core."):
        return name.removeprefix("MCore")
    return name if module.startswith("torch.distributed.") else ""


def _key(fields: dict[Any, Any]) -> Key | None:
    name, offset = fields.get("fqn"), fields.get("offset")
    offsets = None if offset is None else sizes_of(offset)
    if type(name) is not str or type(fields.get("index")) not in (int, type(None)):
        return None
    return (name, offsets) if (offset is None) == (offsets is None) else None


def _place(fields: dict[Any, Any]) -> Place | None:
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    transforms = fields.get("transform_descriptors") or ()
    if type(file) is not str or type(offset) is not int or type(length) is not int:
        return None
    if not isinstance(transforms, (list, tuple)) or not all(type(each) is str for each in transforms):
        return None
    return Place(file, offset, length, tuple(transforms))


def _box(fields: dict[Any, Any]) -> Box | None:
    begin, sizes = sizes_of(fields.get("offsets")), sizes_of(fields.get("sizes"))
    return None if begin is None or sizes is None else (begin, sizes)


class _Kind(NamedTuple):
    """A class of which a table has hundreds of thousands. read: what its fields say, None for damage.
    plain: the names of the fields in which nothing is left then.
    """

    name: str
    read: Callable[[dict[Any, Any]], Any]
    plain: frozenset[str]


_KINDS = {
    "MetadataIndex": _Kind("MetadataIndex", _key, frozenset({"fqn", "offset", "index"})),
    "_StorageInfo": _Kind(
        "_StorageInfo", _place, frozenset({"relative_path", "offset", "length", "transform_descriptors"})
    ),
    "ChunkStorageMetadata": _Kind("ChunkStorageMetadata", _box, frozenset({"offsets", "sizes"})),
}
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_ENTRIES = {Global(module, name): kind for module in _MODULES for name, kind in _KINDS.items()}


class _Entry(TakesState):
    """An object of one of these classes, kept as what was read of it. odd: gets the states in which more is."""

    __slots__ = ("kind", "odd", "value")

    def __init__(self, kind: _Kind, odd: list[Any]) -> None:
        self.kind, self.odd, self.value = kind, odd, None

    def fill(self, state: Any) -> None:
        self.value = self.kind.read(state) if type(state) is dict else None
        if self.value is None or not self.kind.plain.issuperset(state):
            self.odd.append(state)
        else:
            state.clear()  # the pickle may remember it to its end


def _entry(kind: _Kind, odd: list[Any], args: tuple[Any, ...]) -> Any:
    return NotImplemented if args else _Entry(kind, odd)


def _read(node: Any, name: str) -> Any:
    """What an object of that class says; None where it is of another, or damaged."""
    if type(node) is _Entry:
        return node.value if node.kind.name == name else None
    return _KINDS[name].read(node.attributes) if _class(node) == name else None


def _properties(node: Any) -> tuple[DType | None, bool]:
    """The type of a tensor, and whether it requires a gradient."""
    state = node.state if _class(node) == "TensorProperties" else None
    if type(state) is tuple and len(state) == 5:
        dtype, trained = state[0], state[2]
    elif isinstance(state, dict):
        dtype, trained = state.get("dtype"), state.get("requires_grad")
    else:
        return None, False
    known = type(dtype) is Global and dtype.module == "torch"
    return BY_TORCH.get(dtype.name) if known else None, trained is True
