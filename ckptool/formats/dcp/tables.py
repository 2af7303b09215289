"""The tables of a DCP folder: `.metadata` for all ranks, or `__R.metadata` of each (`use_collectives=False`).

Source: torch/distributed/checkpoint (metadata.py, filesystem.py), torch 2.0 to 2.13; megatron_core 0.15 and 0.16
(dist_checkpointing/strategies/torch.py), whose classes are the same by other names. A rank's own table has the full
size of every tensor and the chunks of that rank alone; nothing says how many ranks there were.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

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
from ckptool.pickles.decode import decode, no_storage

METADATA = ".metadata"
OF_A_RANK = re.compile(r"__(?P<rank>\d{1,7})\.metadata")
_UNFINISHED = re.compile(r"__(?P<rank>\d{1,7})\.metadata\.tmp")
MAX_METADATA = 256 << 20

Key = tuple[str, tuple[int, ...] | None]  # a name, and the offsets of a chunk; None for an object
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a chunk or an object: a file of the folder, and the range of its bytes."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()  # of the bytes, by extensions of the writer: compression


@dataclass(slots=True, eq=False)
class Described:
    """A value as the tables describe it. chunks: of a tensor, where each of its blocks is; of an object (without a
    dtype), where each rank that has one saved it.
    """

    shape: tuple[int, ...] = ()
    dtype: DType | None = None
    requires_grad: bool = False
    chunks: list[tuple[Box, Place]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Tables:
    """What the tables of a folder say together. unused: names that have data and are not described.

    paths: for every name its path in the nested dictionaries that were saved, unchecked.
    """

    folder: Folder
    names: list[str]
    values: dict[str, Described] = field(default_factory=dict)
    paths: dict[Any, Any] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    discarded: list[Any] = field(default_factory=list)

    def damaged(self, what: str, name: str = "") -> Corrupt:
        return Corrupt(f"{self.folder}: its {name or self.names[0]} {what}", "The table is damaged or malicious.")

    @property
    def files(self) -> dict[str, int]:
        """The files that values are in, and how many are in each."""
        count: dict[str, int] = {}
        for value in self.values.values():
            for _, place in value.chunks:
                count[place.file] = count.get(place.file, 0) + 1
        return count

    def add(self, name: str) -> None:
        """Reads a table, and adds what it says to that of the others."""
        facts = self._fields(name)
        described = facts.get("state_dict_metadata")
        if not isinstance(described, dict) or not all(type(key) is str for key in described):
            raise self.damaged("has no table of names", name)
        places = self._places(name, facts.get("storage_data"))
        for key, node in described.items():
            self._add_value(name, key, node, places)
        self.unused.update(key for key, _ in places)
        paths = facts.get("planner_data")
        self.paths = {**paths, **self.paths} if isinstance(paths, dict) else self.paths
        if type(version := facts.get("version")) is str:
            self.versions.add(version)

    def _fields(self, name: str) -> dict[Any, Any]:
        """The fields of the `Metadata` that a table is a pickle of."""
        source = self.folder.open(name)
        if source.size > MAX_METADATA:
            raise LimitExceeded(f"{source} has {source.size:,} bytes", f"At most {MAX_METADATA:,} are read.")
        data = source.read(0, source.size)
        decoded = decode(data, no_storage, _BUILDERS, name=str(source), file_bytes=source.size)
        if decoded.end != len(data):
            raise Ambiguous(
                f"{source} has {len(data) - decoded.end:,} bytes after its end", "Another pickle may be hidden there."
            )
        if _class(decoded.root) != "Metadata":
            what = f"{self.folder} is a folder, and its {name} is not that of torch.distributed.checkpoint"
            why = "Another program wrote it."
            raise NotACheckpoint(what, why, f"Name the file: {other_program('ls', self.folder.path)}")
        self.discarded += decoded.aside()
        fields: dict[Any, Any] = decoded.root.attributes
        return fields

    def _places(self, name: str, table: Any) -> dict[Key, Place]:
        """The place of every chunk and object, by name and offsets."""
        if not isinstance(table, dict):
            raise self.damaged("does not say where its values are", name)
        places: dict[Key, Place] = {}
        files: dict[str, str] = {}
        for index, info in table.items():
            key, place = _key(index), _place(info, files)
            if key is None or place is None:
                raise self.damaged(f"has an entry {len(places):,} without a place", name)
            if key in places:
                raise Ambiguous(
                    f"{self.folder}: its {name} has two places for {key[0]}", "Readers disagree about which one counts."
                )
            places[key] = place
        if missing := self.folder.missing(files):
            raise lacks(self.folder, f"{len(missing):,} of its files", missing)
        return places

    def _add_value(self, table: str, name: str, node: Any, places: dict[Key, Place]) -> None:
        """Adds the description of a value; takes what it names out of `places`."""
        value = self._described(table, name, node)
        known = self.values.setdefault(name, value)
        if (known.shape, known.dtype) != (value.shape, value.dtype):
            raise Conflict(
                f"{self.folder}: {name} is {_kind(known)} in one of its tables, and {_kind(value)} in {table}",
                "The tables are of two checkpoints.",
                "Copy the folder again, or take another checkpoint.",
            )
        if value.dtype is None:
            known.chunks.append((((), ()), self._taken(table, (name, None), places)))
            return
        boxes = self._boxes(table, name, node.attributes.get("chunks"), len(value.shape))
        for begin, sizes in boxes:
            if 0 in sizes and 0 not in value.shape:  # the share of a rank that has none of it
                places.pop((name, begin), None)
            else:
                known.chunks.append(((begin, sizes), self._taken(table, (name, begin), places)))

    def _described(self, table: str, name: str, node: Any) -> Described:
        kind = _class(node)
        if kind == "BytesStorageMetadata":
            return Described()
        if kind != "TensorStorageMetadata":
            raise self.damaged(f"says of {name} that it is a {kind or type(node).__name__}", table)
        shape, (dtype, trained) = sizes_of(node.attributes.get("size")), _properties(node.attributes.get("properties"))
        if shape is None or dtype is None:
            raise self.damaged(f"says nothing of the shape or type of {name}", table)
        return Described(shape, dtype, trained)

    def _boxes(self, table: str, name: str, chunks: Any, rank: int) -> list[Box]:
        """The offsets and the sizes of each chunk; what no rank has an element of may stand there repeatedly."""
        boxes: dict[Box, None] = {}
        for chunk in chunks if isinstance(chunks, list) else ():
            fields = chunk.attributes if _class(chunk) == "ChunkStorageMetadata" else {}
            begin, sizes = sizes_of(fields.get("offsets")), sizes_of(fields.get("sizes"))
            if begin is None or sizes is None or len(begin) != rank or len(sizes) != rank:
                raise self.damaged(f"has chunks of {name} without offsets and sizes", table)
            if (begin, sizes) in boxes and 0 not in sizes:
                raise self.damaged(f"has a chunk of {name} at {list(begin)} twice: they overlap", table)
            boxes[begin, sizes] = None
        return list(boxes)

    def _taken(self, table: str, key: Key, places: dict[Key, Place]) -> Place:
        place = places.pop(key, None)
        if place is None:
            what = key[0] if key[1] is None else f"the chunk of {key[0]} at {list(key[1])}"
            raise self.damaged(f"does not say where {what} is", table)
        return place


def _kind(value: Described) -> str:
    return "an object" if value.dtype is None else f"{value.dtype}{list(value.shape)}"


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


def _key(index: Any) -> Key | None:
    if _class(index) != "MetadataIndex":
        return None
    fields = index.attributes
    name, offset = fields.get("fqn"), fields.get("offset")
    offsets = None if offset is None else sizes_of(offset)
    return (name, offsets) if type(name) is str and (offset is None) == (offsets is None) else None


def _place(info: Any, files: dict[str, str]) -> Place | None:
    """files: the names so far, of which each is kept once."""
    if _class(info) != "_StorageInfo":
        return None
    fields = info.attributes
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    transforms = fields.get("transform_descriptors") or ()
    if type(file) is not str or type(offset) is not int or type(length) is not int:
        return None
    if not isinstance(transforms, (list, tuple)):
        return None
    return Place(files.setdefault(file, file), offset, length, tuple(map(str, transforms)))


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
