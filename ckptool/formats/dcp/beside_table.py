"""`ckptool.json` in a DCP folder: what torch's tables cannot say of a tree, for ckptool alone; torch ignores the file.

    {"schema": "ckptool.sidecar/1", "table": sha256 of .metadata, "raw": [[file, offset, length], …], "tree": "{…}"}

The tree is a record as in a safetensors file (`tree_record`), as text and without values: tensors are views of what
the table names, and `{"d": name}` is an object that it has whole. `raw` are storages of which no tensor has all bytes,
as zips of bytes that the table does not name. The record counts only for the table that it was made with, and only
where both have the same names, types and shapes; else it is passed over, and that is noted.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, InlineBytes, Note, Storage, StorageRef, TensorEntry
from ckptool.checkpoint import tree as trees
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.graph import SCALARS, check_depth, structural_parts, visit
from ckptool.checkpoint.nodes import Object, OrderedDict, Set
from ckptool.checkpoint.strided import resolved, row_major
from ckptool.commands import arg
from ckptool.errors import CkptoolError, Conflict, LimitExceeded
from ckptool.formats import marks, sidecar
from ckptool.formats.dcp.flat_names import SHARED, FlatNames, flat_names
from ckptool.formats.dcp.tables import METADATA
from ckptool.formats.tree_record import SCHEMA
from ckptool.formats.tree_record.packing import Packer, axes_of
from ckptool.formats.tree_record.unpacking import Unpacker

IGNORED = "side-car-ignored"
MAX_COMPARED = 8 << 20  # bytes of values that are read to compare the record with the table
BEGINNING = 16 << 10  # of each tensor

VIEWS = "tensors that share memory as different views"
STRIDES = "strides of what is divided"
LAZY = "conjugate and negative views"

_HAVE_IDENTITY = (dict, list, tuple, Set, Object, Composite, TensorEntry, StorageRef, bytearray)


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where the bytes of a storage are in the folder: in a tensor or object of that name, those from start to stop.

    stop: None for all.  how: the order of a tensor that was divided in row-major order, as a record has it.
    """

    name: str
    start: int = 0
    stop: int | None = None
    how: list[Any] | None = None

    def holds(self, part: TensorEntry | StorageRef) -> bool:
        """True if all bytes that a view touches are there."""
        start, stop = part.span() if isinstance(part, TensorEntry) else (0, part.storage.nbytes)
        size = part.dtype.itemsize if part.dtype is not None else 1
        end = part.storage.nbytes if self.stop is None else self.stop
        return self.start <= start and stop <= end and self.start % size == 0

    def is_wider(self, other: Home | None) -> bool:
        if other is None or self.stop is None or other.stop is None:
            return other is None or self.stop is None
        return self.stop - self.start > other.stop - other.start


def name_in(name: str, number: int) -> str:
    """The name of a storage in an object."""
    return f"{name}#{number}"


def storages_in(value: Any) -> Iterator[Storage]:
    return trees.storages(value)


def as_bytes(storage: Storage) -> TensorEntry:
    return TensorEntry(storage, by_name("u8"), (storage.nbytes,), (1,))


def order_of(entry: TensorEntry) -> list[Any]:
    """How a storage is made of the row-major bytes of the tensor that covers it."""
    return [entry.dtype.name, list(entry.shape), axes_of(entry), 0, 0]


def lost_in_table(flat: FlatNames) -> dict[str, str]:
    """What the table would not say of a tree, each with an address or name where it is so; empty if it says all."""
    found = dict(flat.lost)
    entries: set[int] = set()
    views: dict[int, Any] = {}  # id of a storage -> the view, or the object, that it is in
    for name, value in flat.values.items():
        if isinstance(value, TensorEntry):
            if id(value) in entries:
                found.setdefault(SHARED, name)
            entries.add(id(value))
            if value.flags.conj or value.flags.neg:
                found.setdefault(LAZY, name)
            if views.setdefault(id(value.storage), value.view) != value.view:
                found.setdefault(VIEWS, name)
            continue
        for storage in storages_in(value):
            if views.setdefault(id(storage), name) != name:
                found.setdefault(VIEWS, name)
    if names := _entangled(flat):
        found.setdefault(SHARED, min(names, key=list(flat.values).index))
    return found


def _entangled(flat: FlatNames) -> set[str]:
    """The names of objects that have parts in common with something else."""
    owners: dict[int, str] = dict.fromkeys(flat.holders, "")
    found: set[str] = set()
    beside = [part for node in flat.holders.values() if isinstance(node, dict) for part in _beside_values(node)]
    for name, value in [*(("", part) for part in beside), *flat.values.items()]:
        for part in [value] if isinstance(value, TensorEntry) else visit(value):
            if not isinstance(part, _HAVE_IDENTITY) or part == ():
                continue
            keys = (id(part), id(part.storage)) if isinstance(part, (TensorEntry, StorageRef)) else (id(part),)
            for key in keys:
                if (other := owners.setdefault(key, name)) != name:
                    found |= {other, name}
    return {name for name in found if name and not isinstance(flat.values[name], TensorEntry)}


def _beside_values(node: dict[Any, Any]) -> Iterator[Any]:
    """The keys of a dictionary that are not text, and what is set on it."""
    yield from (key for key in node if type(key) is not str)
    if isinstance(node, OrderedDict):
        yield node.attributes


# Writing -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Packed:
    """The record of a tree. raw: storages whose bytes it needs beside what the table names."""

    tree: dict[str, Any]
    metadata: dict[str, Any]
    raw: list[Storage] = field(default_factory=list)

    def written(self, table: bytes, places: list[tuple[str, int, int]]) -> InlineBytes:
        """The side-car of this table. places: of `raw`. Raises `LimitExceeded` for one that would not be read."""
        tree = json.dumps(self.tree, separators=(",", ":"))
        facts = {"table": hashlib.sha256(table).hexdigest(), "raw": places, **self.metadata, "tree": tree}
        content = sidecar.written(facts)
        if content.length > sidecar.MAX_SIDECAR:
            what = f"{sidecar.NAME} would have {content.length:,} bytes"
            raise LimitExceeded(
                what, f"At most {sidecar.MAX_SIDECAR:,} are read.", f"Write a torch file: {arg(container='torch-zip')}"
            )
        return content


def pack(checkpoint: Checkpoint, flat: FlatNames, homes: dict[int, Home]) -> Packed:
    """The record of a tree whose values are saved under flat names. homes: of storages, by their id."""
    tangled = _entangled(flat)
    known = {
        id(value): name
        for name, value in reversed(flat.values.items())
        if name not in tangled and not isinstance(value, TensorEntry) and isinstance(value, (*_HAVE_IDENTITY, bytes))
    }
    packer = _Packer(checkpoint.tree, known, _homes_of_all(checkpoint.tree, homes))
    tree = packer.record()
    metadata = {key: mark for key, mark in checkpoint.metadata.items() if key == marks.RECOVERED}
    return Packed(tree, metadata, packer.raw)


def _homes_of_all(tree: Any, homes: dict[int, Home]) -> dict[int, Home]:
    """The homes of storages of which they hold every view."""
    away = {
        id(part.storage)
        for part in visit(tree)
        if isinstance(part, (TensorEntry, StorageRef))
        and (home := homes.get(id(part.storage))) is not None
        and not home.holds(part)
    }
    return {key: home for key, home in homes.items() if key not in away}


class _Packer(Packer):
    """Makes a record that names values where they are saved: objects (by id), and storages."""

    def __init__(self, tree: Any, objects: dict[int, str], homes: dict[int, Home]) -> None:
        super().__init__(tree, {}, {})
        self.objects, self.homes = objects, homes
        self.raw: list[Storage] = []

    def value(self, value: Any) -> Any:
        name = self.objects.get(id(value))
        return super().value(value) if name is None else {"d": name}

    def _tensor(self, entry: TensorEntry) -> int:
        is_new = id(entry) not in self.indices
        index = super()._tensor(entry)
        home = self.homes.get(id(entry.storage))
        if is_new and home is not None:
            self.tensors[index][-1] -= home.start // entry.dtype.itemsize
        return index

    def _as_bytes(self, storage: Storage, index: int) -> list[Any]:
        home = self.homes.get(id(storage))
        if home is not None:
            return [home.name, storage.location, home.how]
        self.raw.append(storage)
        return [len(self.raw) - 1, storage.location, None]


# Reading -------------------------------------------------------------------------------------------------------------

Opener = Callable[[str, int, int], Any]
"""Gives the value in the zip at a place: a file, an offset, a length."""


def restored(folder: Folder, values: dict[str, Any], opener: Opener) -> tuple[Any, dict[str, Any], list[Note]]:
    """The tree of the side-car, what it says beside that, and notes; None in place of the tree where there is none that
    fits.

    values: of the table, by their flat names.
    """
    if METADATA not in folder:
        return None, {}, []
    try:
        facts = sidecar.read(folder)
        if not facts:
            return None, {}, []
        table = folder.open(METADATA)
        if facts["table"] != hashlib.sha256(table.read(0, table.size)).hexdigest():
            raise Conflict(f"it belongs to another {METADATA}: the folder was written again since")
        tree = _unpacked(facts, values, opener)
        metadata = {key: mark for key, mark in facts.items() if key == marks.RECOVERED and type(mark) is str}
        return tree, metadata, list(marks.recovered_notes(metadata))
    except CkptoolError as error:
        why = error.what
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, struct.error) as error:
        why = f"it is damaged ({type(error).__name__})"
    what = f"{sidecar.NAME} was passed over, so types of keys, ties and the like are as torch sees them: {why}"
    return None, {}, [Note(IGNORED, what)]


def _unpacked(facts: dict[str, Any], values: dict[str, Any], opener: Opener) -> Any:
    record = json.loads(facts["tree"])
    if record["schema"] != SCHEMA:
        raise Conflict("it was written by another version")
    raw = [opener(str(file), int(begin), int(length)) for file, begin, length in facts["raw"]]
    unpacker = _Unpacker(record, values, raw)
    tree = unpacker.tree()
    check_depth(tree)
    found = flat_names(tree).values
    if list(found) != list(values):
        raise Conflict("it names other values than the table")
    left = [MAX_COMPARED]
    for name, value in values.items():
        if not _is_same(found[name], value, left):
            raise Conflict(f"it has another {name} than the table")
    return tree


def _is_same(found: Any, value: Any, left: list[int]) -> bool:
    """True unless a value of the record is seen to be another than that of the table.

    Of tensors that are other bytes (parts of one that is wider), the beginnings are compared. left: so many bytes of
    values may still be read for that.
    """
    if isinstance(found, TensorEntry) and isinstance(value, TensorEntry):
        alike = (found.dtype, found.shape) == (value.dtype, value.shape)
        if not alike or found.view == value.view:
            return alike and found.flags.lazy == value.flags.lazy
        pair = row_major(resolved(found)), row_major(value)  # the table's are no conjugate or negative views
        length = min(left[0], BEGINNING, pair[0].length)
        left[0] -= length
        return pair[0].read(0, length) == pair[1].read(0, length)
    return _is_same_object(found, value)


def _is_same_object(found: Any, value: Any) -> bool:
    """True for objects of the same types and plain values throughout, whatever their parts share; of tensors in them,
    types and shapes are compared."""
    pairs, seen = [(found, value)], set()
    while pairs:
        one, other = pairs.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        if type(one) is not type(other):
            return False
        if isinstance(one, TensorEntry):
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                return False
        elif type(one) in SCALARS or type(one) is bytes:
            if one != other and repr(one) != repr(other):  # NaN is the same as NaN
                return False
        else:
            parts = list(structural_parts(one)), list(structural_parts(other))
            if len(parts[0]) != len(parts[1]):
                return False
            pairs += zip(*parts, strict=True)
    return True


class _Unpacker(Unpacker):
    """Makes the tree of a record whose values are those of a table."""

    def __init__(self, record: dict[str, Any], values: dict[str, Any], raw: list[Any]) -> None:
        self.values = values
        super().__init__(sidecar.NAME, {f[0]: self._home(f[0], raw) for f in record["storages"]}, record)

    def _home(self, name: Any, raw: list[Any]) -> TensorEntry:
        if type(name) is int:
            found = raw[name] if name >= 0 else None
        elif name in self.values:
            found = self.values[name]
        else:
            holder, _, number = name.rpartition("#")
            found = as_bytes(list(storages_in(self.values[holder]))[int(number)])
        if not isinstance(found, TensorEntry):
            raise TypeError("a storage")
        return found

    def value(self, value: Any) -> Any:
        return self.values[value["d"]] if isinstance(value, dict) and "d" in value else super().value(value)
