"""`dcp`: a folder that `torch.distributed.checkpoint.save` wrote: `.metadata`, and what each rank saved, one thing
after the other.

Source: torch/distributed/checkpoint (metadata.py, filesystem.py, _nested_dict.py, _traverse.py), torch 2.0 to 2.13.
`.metadata` is a pickle of a `Metadata`: for every name the size and chunks of a tensor or nothing (an object), for
every chunk the bytes of a `.distcp` file where it is, and for every name its path in the nested dictionaries that were
saved. The bytes of each are a torch zip by themselves.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ckptool.checkpoint import Checkpoint, FileRange, Note, PartKind, PartOf, Storage, TensorEntry
from ckptool.checkpoint.commands import Advice, command, other_program
from ckptool.checkpoint.dtypes import BY_TORCH, DType
from ckptool.checkpoint.files import Folder, Input, Source
from ckptool.checkpoint.graph import MAX_DEPTH
from ckptool.checkpoint.nodes import Global, Object
from ckptool.errors import (
    Ambiguous,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    OnlyAPart,
    Truncated,
    Unsupported,
    counted,
    listed,
    printable,
)
from ckptool.formats import torch_zip
from ckptool.formats.boxes import Box, Chunk, assembled, covers
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import decode

NAME = "dcp"
METADATA = ".metadata"
SUFFIX = ".distcp"
MAX_METADATA = 256 << 20
MAX_RANK = 64
_TABLE = re.compile(r"__\d{1,7}\.metadata")
_RANK = re.compile(r"__(\d{1,7})_")

Key = tuple[str, tuple[int, ...] | None]  # a name, and the offsets of a chunk; None for an object


def detect(head: bytes, source: Input) -> bool:
    if isinstance(source, Source):
        return source.path.endswith(SUFFIX) or _is_table(source)
    return METADATA in source or any(name.endswith(SUFFIX) for name in source.names)


def _is_table(source: Source) -> bool:
    folder, name = os.path.split(source.path)
    return name == METADATA and any(name.endswith(SUFFIX) for name in Folder(folder).names)


def read(source: Input) -> Checkpoint:
    """The checkpoint in a folder of `torch.distributed.checkpoint`, or whose table this is; of a rank's file, what is
    in that.

    Reads the table and the directories of the zips, no tensor data. A tensor that several ranks share is one entry, put
    together when its bytes are asked for. The nesting of dictionaries and lists is as it was saved; without a record of
    it, names stay flat. Raises `Truncated`, `Corrupt`, `Ambiguous`, `Unsupported` or `LimitExceeded`.
    """
    folder = source if isinstance(source, Folder) else Folder(os.path.dirname(source.path), shown=source.path)
    if METADATA not in folder:
        if tables := [name for name in folder.names if _TABLE.fullmatch(name)]:
            raise _tables(folder, tables)
        if isinstance(source, Source):
            raise OnlyAPart(
                f"{folder} is what one rank saved, without the table that says what is in it",
                f"{METADATA} is not beside it: it was not copied along, or the run was stopped before it wrote it.",
                "Copy the whole folder.",
            )
        what = f"{folder} holds {SUFFIX} files and no {METADATA}"
        why = "It is written last: the run was stopped while it saved, or the file was not copied along."
        raise Truncated(what, why, "Copy the whole folder, or take an earlier checkpoint.")
    if isinstance(source, Source) and os.path.basename(source.path) != METADATA:
        return _of_a_rank(folder, os.path.basename(source.path))
    facts, aside = _metadata(folder)
    shelf = _Shelf(folder, _places(folder, facts.get("storage_data")), discarded=[*aside])
    described = facts.get("state_dict_metadata")
    if not isinstance(described, dict) or not all(type(name) is str for name in described):
        raise _damaged(folder, "has no table of names")
    values = {name: _value(folder, shelf, name, node) for name, node in described.items()}
    paths, notes = _paths(folder, facts.get("planner_data"), values)
    notes += _notes(folder, shelf)
    version = facts.get("version")
    metadata = {"version": version} if type(version) is str else {}
    return Checkpoint(
        _nested(folder, values, paths), NAME, metadata, folder, None, tuple(notes), tuple(shelf.discarded)
    )


def _tables(folder: Folder, tables: list[str]) -> Unsupported:
    return Unsupported(
        f"{folder} has a table for each of {counted(len(tables), 'rank')} "
        f"({listed([printable(name) for name in tables], 2)}), and none for all",
        "torch.distributed.checkpoint saved it with use_collectives=False; ckptool does not merge such tables.",
        "With torch: load it on as many ranks as saved it, and save it with use_collectives=True",
    )


def _of_a_rank(folder: Folder, name: str) -> Checkpoint:
    """The contents of one file: whole tensors, objects, and chunks, named by their tensor and their offsets in it."""
    facts, aside = _metadata(folder)
    places = _places(folder, facts.get("storage_data"))
    shelf = _Shelf(folder, places, discarded=[*aside])
    chunks = Counter(key[0] for key in places)
    held = {key: place for key, place in places.items() if place.file == name}
    if not held:
        what = f"{folder} is a file that no value of {METADATA} is in"
        why = "It may be left from another run; its tensors have no names."
        raise Unsupported(what, why, Advice("See the checkpoint beside it: ", command("inspect", folder.path)))
    tree: dict[Any, Any] = {}
    for key in held:
        label = key[0] if chunks[key[0]] == 1 else f"{key[0]}@{','.join(map(str, key[1] or ()))}"
        if label in tree:
            raise _damaged(folder, f"has two values called {printable(label)}")
        tree[label] = shelf.take(key)
    return Checkpoint(
        tree, NAME, {}, folder, None, (), tuple(shelf.discarded), part=_share_of(folder, name, len(held), places)
    )


def _share_of(folder: Folder, name: str, held: int, places: Mapping[Key, _Place]) -> PartOf:
    """The rank whose file it is, by its name, `__{rank}_{n}.distcp`, and those of the others."""
    ranks = {found[1] for place in places.values() if (found := _RANK.match(place.file))}
    named = _RANK.match(name)
    label = f"rank {int(named[1])} of {len(ranks):,}" if named else "what one rank saved"
    meaning = (
        f"{held:,} of the {counted(len(places), 'value')} and chunks that were saved; the folder is the checkpoint"
    )
    return PartOf(PartKind.RANK, label, meaning, int(named[1]) if named else None, len(ranks) or None, folder.path)


# The table -----------------------------------------------------------------------------------------------------------


def _metadata(folder: Folder) -> tuple[dict[Any, Any], tuple[Any, ...]]:
    """The fields of the `Metadata` that the folder's table is a pickle of, and what of that pickle is not inert."""
    source = folder.open(METADATA)
    if source.size > MAX_METADATA:
        raise LimitExceeded(f"{source} has {source.size:,} bytes", f"At most {MAX_METADATA:,} are read.")
    data = source.read(0, source.size)
    decoded = decode(data, _no_storage, BUILDERS, name=str(source), file_bytes=source.size)
    if decoded.end != len(data):
        raise Ambiguous(
            f"{source} has {len(data) - decoded.end:,} bytes after its end", "Another pickle may be hidden there."
        )
    if _class(decoded.root) != "Metadata":
        what = f"{folder} is a folder, and its {METADATA} is not that of torch.distributed.checkpoint"
        why = "Another program wrote it."
        raise NotACheckpoint(what, why, Advice("Name the file: ", other_program("ls", folder.path)))
    return decoded.root.attributes, decoded.aside()


def _no_storage(pid: Any) -> Any:
    raise Corrupt("a persistent id in a table that has no storages", "The file is of another kind.")


def _class(node: Any) -> str:
    """The name of the class of torch.distributed that an object is of; empty for anything else."""
    known = isinstance(node, Object) and type(node.fn) is Global and node.fn.module.startswith("torch.distributed.")
    return node.fn.name if known else ""


def _damaged(folder: Folder, what: str) -> Corrupt:
    return Corrupt(f"{folder}: its {METADATA} {what}", "The table is damaged or malicious.")


def _sizes(node: Any) -> tuple[int, ...] | None:
    """The numbers in a `torch.Size`, none of them negative; None where it is anything else."""
    if isinstance(node, Object) and str(node.fn) == "torch.Size" and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, (tuple, list)) or len(node) > MAX_RANK:
        return None
    return tuple(node) if all(type(n) is int and 0 <= n < 1 << 62 for n in node) else None


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a chunk or an object: a file of the folder, and the range of its bytes."""

    file: str
    offset: int
    length: int
    packed: tuple[str, ...] = ()  # how the bytes were packed by extensions of the writer


def _places(folder: Folder, table: Any) -> dict[Key, _Place]:
    """The place of every chunk and object, by name and offsets."""
    if not isinstance(table, dict):
        raise _damaged(folder, "does not say where its values are")
    places: dict[Key, _Place] = {}
    for index, info in table.items():
        key, place = _key(index), _place(info)
        if key is None or place is None:
            raise _damaged(folder, f"has an entry {len(places):,} without a place")
        if key in places:
            raise Ambiguous(
                f"{folder}: its {METADATA} has two places for {printable(key[0])}",
                "Readers disagree about which one counts.",
            )
        places[key] = place
    if missing := folder.missing(place.file for place in places.values()):
        what = f"{folder} lacks {len(missing):,} of its files: {listed([printable(name) for name in missing], 3)}"
        raise Corrupt(what, "What the ranks saved is only complete together.", "Copy the whole folder.")
    return places


def _key(index: Any) -> Key | None:
    if _class(index) != "MetadataIndex":
        return None
    fields = index.attributes
    name, offset = fields.get("fqn"), fields.get("offset")
    offsets = None if offset is None else _sizes(offset)
    return (name, offsets) if type(name) is str and (offset is None) == (offsets is None) else None


def _place(info: Any) -> _Place | None:
    if _class(info) != "_StorageInfo":
        return None
    fields = info.attributes
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    packed = fields.get("transform_descriptors") or ()
    if (
        type(file) is not str
        or type(offset) is not int
        or type(length) is not int
        or not isinstance(packed, (list, tuple))
    ):
        return None
    return _Place(file, offset, length, tuple(str(name) for name in packed))


# The values ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Shelf:
    """The zips in the files of the ranks, each opened once. `taken`: the names whose values were asked for."""

    folder: Folder
    places: dict[Key, _Place]
    opened: dict[_Place, Any] = field(default_factory=dict)
    taken: set[Key] = field(default_factory=set)
    discarded: list[Any] = field(default_factory=list)

    def take(self, key: Key) -> Any:
        """The value that was saved under this name; of a tensor, the chunk at these offsets."""
        place = self.places.get(key)
        if place is None:
            what = printable(key[0]) if key[1] is None else f"the chunk of {printable(key[0])} at {list(key[1])}"
            raise _damaged(self.folder, f"does not say where {what} is")
        self.taken.add(key)
        if place not in self.opened:
            self.opened[place] = self._open(key[0], place)
        return self.opened[place]

    def _open(self, name: str, place: _Place) -> Any:
        if place.packed:
            what = f"{self.folder}: {printable(name)} is packed by {printable(listed(place.packed))}"
            why = "An extension of torch's writer did that; only it can undo it."
            raise Unsupported(what, why, "With torch: load it with the same extension, and save it without.")
        part = self.folder.open(place.file).part(place.offset, place.length)
        if place.file.endswith(".safetensors"):
            what = f"{self.folder} was written by torch.distributed.checkpoint as safetensors"
            why = "Only folders of .distcp files are read here."
            raise Unsupported(what, why, "With torch: torch.distributed.checkpoint.HuggingFaceStorageReader")
        if not torch_zip.detect(part.read(0, min(4, part.size)), part.file):
            what = f"{part}: there is no torch zip where {printable(name)} should be"
            raise Corrupt(what, "The file or the table belongs to another checkpoint.")
        checkpoint = torch_zip.read(part)
        self.discarded.extend(checkpoint.discarded)
        return _settled(checkpoint.tree)


def _settled(value: Any) -> Any:
    """A tensor by itself without the directory of its zip, whose place in the file is confirmed; anything else as it
    is.

    There may be hundreds of thousands of them, each in a zip of its own.
    """
    if not isinstance(value, TensorEntry) or not isinstance(value.storage.data, FileRange):
        return value
    data = value.storage.data
    data.ready()
    place = FileRange(data.file, data.offset, data.length)
    return replace(value, storage=Storage(place, value.storage.location, value.storage.crc))


def _value(folder: Folder, shelf: _Shelf, name: str, node: Any) -> Any:
    kind = _class(node)
    if kind == "BytesStorageMetadata":
        return shelf.take((name, None))
    if kind != "TensorStorageMetadata":
        raise _damaged(folder, f"says of {printable(name)} that it is a {printable(kind or type(node).__name__)}")
    size, dtype, trained = _sizes(node.attributes.get("size")), *_properties(node.attributes.get("properties"))
    if size is None or dtype is None:
        raise _damaged(folder, f"says nothing of the shape or type of {printable(name)}")
    boxes = _boxes(node.attributes.get("chunks"), len(size))
    if boxes is None or not covers(size, boxes):
        raise _damaged(
            folder, f"has chunks of {printable(name)} that overlap, leave gaps or lie outside of its shape {list(size)}"
        )
    shelf.taken.update((name, box[0]) for box in boxes if _is_nothing(box, size))  # some ranks have none of it
    parts = [Chunk(_chunk(folder, shelf, name, dtype, box), box[0]) for box in boxes if not _is_nothing(box, size)]
    whole = parts[0].entry if len(parts) == 1 and parts[0].entry.shape == size else assembled(size, parts)
    return replace(whole, flags=whole.flags._replace(requires_grad=trained)) if trained else whole


def _is_nothing(box: Box, size: tuple[int, ...]) -> bool:
    """True for a rank's share that has no elements of a tensor which has some."""
    return 0 in box[1] and 0 not in size


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


def _boxes(chunks: Any, rank: int) -> list[Box] | None:
    """The offsets and the sizes of each chunk."""
    boxes = []
    for chunk in chunks if isinstance(chunks, list) else ():
        fields = chunk.attributes if _class(chunk) == "ChunkStorageMetadata" else {}
        begin, sizes = _sizes(fields.get("offsets")), _sizes(fields.get("sizes"))
        if begin is None or sizes is None or len(begin) != rank or len(sizes) != rank:
            return None
        boxes.append((begin, sizes))
    return boxes or None


def _chunk(folder: Folder, shelf: _Shelf, name: str, dtype: DType, box: Box) -> TensorEntry:
    value = shelf.take((name, box[0]))
    if isinstance(value, TensorEntry) and (value.shape, value.dtype) == (box[1], dtype):
        return value
    meant = f"the chunk of {printable(name)} at {list(box[0])} should be {dtype}{list(box[1])}"
    what = f"{folder}: {meant}, its file has {value!r:.100}"
    raise Corrupt(what, "The files are of two checkpoints, or one of them was damaged.")


# The tree ------------------------------------------------------------------------------------------------------------


def _paths(folder: Folder, table: Any, values: dict[str, Any]) -> tuple[dict[str, tuple[str | int, ...]], list[Note]]:
    """For every name its path in what was saved; and what is to be said of it."""
    if not isinstance(table, dict) or not table:
        note = Note("flat-names", "the nesting of the names is not recorded, so they stay as torch flattened them")
        return {}, [note] if any("." in name for name in values) else []
    paths: dict[str, tuple[str | int, ...]] = {}
    for name in values:
        path = table.get(name)
        if path is None:
            continue
        if not isinstance(path, (tuple, list)) or not path or type(path[0]) is not str:
            raise _damaged(folder, f"has no path for {printable(name)}")
        if len(path) > MAX_DEPTH:
            raise LimitExceeded(f"{folder}: {printable(name)[:80]} is nested {len(path):,} deep", "No checkpoint is.")
        if not all(type(part) in (str, int) for part in path):
            raise _damaged(folder, f"has a path for {printable(name)} that is not of names and numbers")
        paths[name] = tuple(path)
    return paths, []


class _List(dict[int, Any]):
    """A list of which the elements come in any order."""


def _nested(folder: Folder, values: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> dict[Any, Any]:
    """The dictionaries and lists that were saved; a number in a path is an index of a list, as in torch's own
    reader."""
    root: dict[Any, Any] = {}
    lists: list[tuple[dict[Any, Any], str | int]] = []
    made: set[int] = {id(root)}
    for name, value in values.items():
        path = paths.get(name, (name,))
        node = root
        for key, after in pairwise(path):
            if key not in node:
                below: dict[Any, Any] = _List() if type(after) is int else {}
                node[key] = below
                made.add(id(below))
                if isinstance(below, _List):
                    lists.append((node, key))
            node = node[key]
            if id(node) not in made or isinstance(node, _List) != (type(after) is int):
                raise _damaged(folder, f"has a path for {printable(name)} that goes through another value")
        if path[-1] in node:
            raise _damaged(folder, f"has one path for two values, {printable(name)} and another")
        node[path[-1]] = value
    for parent, key in reversed(lists):
        parent[key] = _as_list(folder, parent[key])
    return root


def _as_list(folder: Folder, parts: dict[int, Any]) -> list[Any]:
    """The elements in order; torch records no empty dictionaries, and reads None in their places."""
    last = max(parts)
    if min(parts) < 0 or last > 4 * len(parts) + 1_000:
        raise _damaged(folder, f"has a list with an element {last:,} and only {len(parts):,} in all")
    return [parts.get(i) for i in range(last + 1)]


def _notes(folder: Folder, shelf: _Shelf) -> list[Note]:
    notes = []
    unused = sorted({printable(name) for name, _ in shelf.places.keys() - shelf.taken})
    if unused:
        what = f"{counted(len(unused), 'name has', 'names have')} data that no tensor uses"
        notes.append(Note("unused-record", f"{what}: {listed(unused, 3)}"))
    named = {place.file for place in shelf.places.values()}
    stale = [name for name in folder.names if name.endswith(SUFFIX) and name not in named]
    if stale:
        shown = listed([printable(name) for name in stale], 3)
        what = f"{counted(len(stale), 'file is', 'files are')} of no value in {METADATA}"
        notes.append(Note("stale-shards", f"{what}, perhaps left from another run: {shown}"))
    return notes
