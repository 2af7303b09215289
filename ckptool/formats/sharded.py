"""`sharded`: one checkpoint in several files, and an index that says which tensor is in which.

Source: huggingface_hub/serialization (`split_state_dict_into_shards_factory`, `save_torch_state_dict`) and what
transformers, diffusers and accelerate read: `{"metadata": {"total_size": n}, "weight_map": {name: file}}`, the shards
safetensors or torch files. Here index and shards must agree on every name. A folder with an index stands for it; one
with a single file of the usual names, for that file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, InlineBytes, Note, Storage, TensorEntry
from ckptool.checkpoint.blocks import Plan, Segment
from ckptool.checkpoint.files import Folder, Input, Source
from ckptool.checkpoint.nodes import OrderedDict, fields
from ckptool.checkpoint.tree import storages
from ckptool.commands import arg, command
from ckptool.errors import (
    Ambiguous,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    OnlyAPart,
    Unsupported,
    UsageError,
    counted,
    listed,
)
from ckptool.facts import dataclass, field, replace
from ckptool.formats import HEAD, marks, read_alone, safetensors, whole_tree
from ckptool.formats.folder import (
    ADAPTER,
    CONSOLIDATED,
    INDEX,
    MAX_TABLE,
    NUMBERED,
    STATE,
    another_run,
    json_in,
    lacks,
    plain_name,
)
from ckptool.formats.layouts import hf_pieces
from ckptool.formats.marks import noted
from ckptool.formats.strict_json import parse_object

NAME = "sharded"

# `model.safetensors.index.fp16.json` and `model.fp16.safetensors` are a variant beside, or in place of, the usual ones.
SINGLE = re.compile(
    r"(?:model|pytorch_model|adapter_model|diffusion_pytorch_model|pytorch_lora_weights|consolidated)"
    r"(?P<variant>\.[A-Za-z0-9_]+)?\.(?:safetensors|bin)|consolidated\.00\.pth"
)
# LLaVA's projector beside an adapter; the value heads of trl and LLaMA-Factory.
_TRAINED_BESIDE = re.compile(r"non_lora_trainables\.bin|value_head\.(?:bin|safetensors)")


def detect(head: bytes, source: Input) -> bool:
    if isinstance(source, Folder):
        return bool(candidates(source)) or any(map(_is_shard, source.names))
    start = head.lstrip()
    return start.startswith(b"{") and (_is_index(source.path) or b'"weight_map"' in head)


def checkpoints_in(folder: Folder) -> list[str]:
    """The files that each stand for a whole checkpoint; where there are several, one has to be named. Torch files of
    the same weights beside those of safetensors do not count: transformers and diffusers do not read them either."""
    names = candidates(folder)
    unread = {other for name in names for other in _torch_names(name)}
    names = [name for name in names if name not in unread]
    return [*names, ".metadata"] if names and ".metadata" in folder else names


def _torch_names(name: str) -> list[str]:
    """What a file or index of safetensors is called where the same library saves torch files; none for other files."""
    single, is_safe, variant = name.partition(".safetensors")
    if not is_safe:
        return []
    stem = re.sub("^model", "pytorch_model", single)
    return [f"{stem}.bin", f"{stem}.bin{variant or '.index.json'}"]


def candidates(folder: Folder) -> list[str]:
    """The names, one of which stands for a folder: its indexes, else its single files, else their variants.

    Single files beside an index do, too, unless it names them: transformers takes `model.safetensors` where diffusers
    takes the index. Mistral's `consolidated` has the same weights for another program.
    """
    indexes = [name for name in folder.names if _is_index(name)]
    usual = [name for name in indexes if name.endswith(".index.json")]
    singles = {name: match for name in folder.names if (match := SINGLE.fullmatch(name))}
    if any(map(CONSOLIDATED.fullmatch, {*folder.names} - singles.keys())):  # it is what one of several ranks has
        singles.pop("consolidated.00.pth", None)
    plain = [name for name, match in singles.items() if not match["variant"]]
    variants = indexes or list(singles)
    if usual and plain:
        named = _named_shards(folder, usual)
        usual += [name for name in plain if not name.startswith("consolidated") and name not in named]
    return usual or plain or ([] if ".metadata" in folder else variants)


def _named_shards(folder: Folder, indexes: Iterable[str]) -> set[str]:
    """The files that these indexes name as shards, however they are called."""
    tables = (json_in(folder.path, name).get("weight_map") for name in indexes)
    return {file for table in tables for file in fields(table).values() if type(file) is str}


def belonging(folder: Folder) -> set[str]:
    """The names in a folder that belong to what stands for it: its indexes and all shards, and its single files."""
    names = candidates(folder)
    indexes = [name for name in names if _is_index(name)]
    claimed = set(names)
    if indexes or not names:
        claimed |= {hf_pieces.BELOW} if hf_pieces.below(folder) else set()
        claimed |= _named_shards(folder, indexes)
        return claimed | {name for name in folder.names if _is_index(name) or _is_shard(name)}
    return {name for name in folder.names if SINGLE.fullmatch(name)}


def _is_index(path: str) -> bool:
    return INDEX.fullmatch(os.path.basename(path)) is not None


def _is_shard(name: str) -> bool:
    """True for a name that numbers it among several. `shard-` begins pieces of tensors, which are not joined here."""
    return NUMBERED.fullmatch(name) is not None and not plain_name(name).startswith("shard-")


def read(source: Input) -> Checkpoint:
    """The checkpoint that an index, or the one index in a folder, puts together. Reads the tables of all shards, no
    tensor data.

    Tensors are in the index's order, those of torch files in the order of the shards. Raises `Corrupt` for an index
    that leads outside its folder, to missing files or to itself, `Conflict` where index and shards disagree,
    `Ambiguous` for a folder of two checkpoints.
    """
    if isinstance(source, Source):
        return _read_index(Folder(os.path.dirname(source.path), shown=source.path), os.path.basename(source.path))
    names = checkpoints_in(source)
    if len(names) > 1:
        what = f"{source} holds {counted(len(names), 'checkpoint')}: {listed(names)}"
        raise Ambiguous(what, "They may differ.", f"Name one of them: {os.path.join(source.path, names[0])}")
    if names:
        checkpoint = _read_index(source, names[0]) if _is_index(names[0]) else read_alone(source.open(names[0]))
        beside = filter(_TRAINED_BESIDE.fullmatch, source.names)
        words = "file has", "files have", "weights that were trained with these and are not among them"
        notes = noted(marks.WEIGHTS_BESIDE, beside, *words)
        if ADAPTER in source and STATE not in source and not source.far:
            # PEFT writes the adapter called default into a folder, and each other into one of its name below it.
            adapters = (n for n in source.names if os.path.lexists(os.path.join(source.path, n, ADAPTER)))
            notes += noted(
                marks.OTHER_ADAPTERS, adapters, "folder in it has", "folders in it have", "adapters that were not read"
            )
        if others := [other for other in _torch_names(names[0]) if other in source]:
            libraries = f"transformers and diffusers take {names[0]}, too, where both are there"
            notes.append(Note("not-read", f"{listed(others)} was not read: {libraries}"))
        return replace(checkpoint, notes=(*checkpoint.notes, *notes))
    what = f"{source} holds shards but no index: {listed([name for name in source.names if _is_shard(name)], 2)}"
    why = "Only *.index.json records which tensors make up the checkpoint, and in which files they are."
    if pieces := hf_pieces.below(source):
        what += "; torch did not finish consolidating them"
        raise OnlyAPart(what, why, f"Read the pieces that they were made from: {command('inspect', pieces)}")
    raise OnlyAPart(what, why, "Copy the index too; or name one shard, which is read by itself.")


# The index -----------------------------------------------------------------------------------------------------------


def _read_index(folder: Folder, index_name: str) -> Checkpoint:
    index = os.path.join(folder.path, index_name)
    weight_map, metadata = _parse_index(folder.open(index_name))
    shards = _shards(folder, index, weight_map)
    pickled = any(shard.container != safetensors.NAME for shard in shards.values())
    items = {name: value for shard in shards.values() for name, value in shard.tree.items()}
    ordered = [shard.tree for shard in shards.values() if isinstance(shard.tree, OrderedDict)]
    tree: dict[Any, Any] = items
    if not pickled:  # its tensors stand in the order of the index, those of pickles in theirs, the model's
        tree = {name: shards[file].tree[name] for name, file in weight_map.items()} | items
    elif len(ordered) == len(shards):  # with all that is set on them (`_metadata`)
        attributes = {key: value for tree in ordered for key, value in (tree.attributes or {}).items()}
        tables = [tree.metadata for tree in ordered if isinstance(tree.metadata, dict)]
        if len(tables) > 1:
            attributes["_metadata"] = OrderedDict({name: facts for table in tables for name, facts in table.items()})
        tree = OrderedDict(items, attributes or None)
    ties: dict[str, str] = {}  # names left out: {dropped: kept} in the index (the hub's savers), or in a shard
    for place in (metadata, *(shard.metadata for shard in shards.values())):
        for dropped, kept in safetensors.ties_in(place, tree).items():
            if isinstance(tree[kept], TensorEntry) and ties.setdefault(dropped, kept) != kept:
                raise another_run(index, f"{dropped} is recorded as a tie of both {kept} and {ties[dropped]}")
    for dropped, kept in ties.items():
        tree[dropped] = replace(tree[kept])
    notes = _notes(index, folder, metadata.get("total_size"), tree, shards)
    discarded = [call for shard in shards.values() for call in shard.discarded]
    if (pickle := metadata.pop(whole_tree.KEY, None)) is not None and not pickled:
        tree, aside, is_whole = whole_tree.unpack(tree, pickle, index)
        discarded += aside
        if is_whole:
            what = f"{index} has the pickle of a whole tree"
            raise Unsupported(what, f"convert {arg(all=True)} writes one in a single file.")
    notes += noted("ties-recorded", ties, "name is", "names are", "stored as ties of names in other shards")
    if pieces := hf_pieces.below(folder):
        what = f"the pieces in {hf_pieces.BELOW}/ that torch made these files of are not read"
        notes.append(Note("pieces-not-read", what, command("diff", folder.path, pieces)))
    metadata = {key: value for key, value in metadata.items() if key not in ties}
    for shard in shards.values():
        metadata |= marks.recovered(shard.metadata, before=metadata)
    notes += marks.recovered_notes(metadata)
    stem = stem_of(shards)
    stem = "model" if pickled and stem == "pytorch_model" else stem
    division = Division(0, stem, index_name, shards, ties, pickled)
    untied = tuple(shards) if len(shards) > 1 else ()
    aside = tuple(discarded)
    return Checkpoint(
        tree, NAME, metadata, folder, division, tuple(notes), aside, tensors_only=not pickled, untied=untied
    )


def _shards(folder: Folder, index: str, weight_map: dict[str, str]) -> dict[str, Checkpoint]:
    """The shards that an index names, by their files. Raises `Conflict` unless they and it belong together, `Corrupt`
    for files that are missing or none of a checkpoint."""
    files = sorted(set(weight_map.values()))
    if missing := folder.missing(files):
        raise lacks(index, f"{len(missing):,} of its {counted(len(files), 'shard')}", missing)
    counts = {file: int(match["count"]) for file in files if (match := NUMBERED.fullmatch(file))}
    if counts and set(counts.values()) != {len(counts)}:
        stated = " and ".join(f"of {number:,}" for number in sorted(set(counts.values())))
        what = f"it names {counted(len(counts), 'shard')}, whose names say that they are {stated}"
        raise another_run(index, f"{what}: {listed(list(counts), 3)}")
    shards: dict[str, Checkpoint] = {}
    for file, source in zip(files, folder.each(files), strict=True):
        # An index is no shard: it may lead back to itself.
        shard = None if detect(source.read(0, min(HEAD, source.size)), source) else read_alone(source)
        if shard is None or not isinstance(shard.tree, dict):
            raise Corrupt(f"{index} names {source} as a shard", "It holds no dictionary of names and tensors.")
        if shard.container == safetensors.NAME and not shard.tensors_only:
            what = f"{source} holds a whole tree (convert {arg(all=True)}), and is a shard of {index}"
            raise Unsupported(what, "The two cannot be combined.")
        shards[file] = shard
    torchs = [file for file, shard in shards.items() if shard.container != safetensors.NAME]
    if 0 < len(torchs) < len(shards):
        raise another_run(index, f"it names shards of safetensors and of torch, as {torchs[0]}")
    trees = {file: shard.tree for file, shard in shards.items()}
    # Each name of the index is in its shard, and each tensor of a shard in the index; but names that are tied to others
    # of their shard may be missing there.
    mismatches = [f"{name} is not in {file}" for name, file in weight_map.items() if name not in trees[file]]
    for file, tree in trees.items():
        entries = {name: entry for name, entry in tree.items() if isinstance(entry, TensorEntry)}
        data_ids = {id(entry.storage.data) for name, entry in entries.items() if weight_map.get(name) == file}
        for name in tree:
            is_tied = name not in weight_map and name in entries and id(entries[name].storage.data) in data_ids
            if weight_map.get(name) != file and not is_tied:
                mismatches.append(f"{name!s} is in {file}, where the index does not list it")
    if mismatches:
        count = counted(len(mismatches), "name differs", "names differ")
        raise another_run(index, f"it and its shards do not belong together: {count} ({listed(mismatches, 3)})")
    return shards


def _parse_index(source: Source) -> tuple[dict[str, str], dict[str, Any]]:
    """The `weight_map` of an index, and its metadata."""
    if source.size > MAX_TABLE:
        raise LimitExceeded(f"{source} has {source.size:,} bytes", f"An index of at most {MAX_TABLE:,} is read.")
    index = parse_object(source.read(0, source.size), f"{source}: the index")
    if "param_groups" in (*index, *fields(index.get("metadata"))):
        what = f"{source} is the index of an optimizer's state, as ColossalAI divides it"
        raise Unsupported(what, "Its files are read one by one.")
    names, metadata = index.get("weight_map"), index.get("metadata", {})
    if names is None:
        what = f"{source} is a JSON file without a weight_map, no index of shards"
        raise NotACheckpoint(what, fix=f"See what it says: head -c 300 {source}")
    is_table = isinstance(names, dict) and all(type(file) is str for file in names.values())
    if is_table and not names:
        raise Corrupt(f"{source}: its weight_map names no tensor")
    if not is_table or not isinstance(metadata, dict):
        raise Corrupt(f"{source}: its weight_map or metadata is not that of an index", "It was damaged.")
    if len(names) > (limit := safetensors.MAX_TENSORS):
        raise LimitExceeded(f"{source}: {counted(len(names), 'tensor')}", f"ckptool reads at most {limit:,}.")
    return names, metadata


def _notes(index: str, folder: Folder, total_size: Any, tree: Any, shards: dict[str, Checkpoint]) -> list[Note]:
    """The notes of all shards, one of each kind; on files that are named as shards and not in the index; and on a
    `total_size` that the index gets wrong, as those of many writers do."""
    notes: list[Note] = []
    messages = [(note.code, f"{file}: {note.message}") for file, shard in shards.items() for note in shard.notes]
    for code in dict.fromkeys(code for code, _ in messages if code != marks.RECOVERED_NOTE):  # one note for all
        first, *others = [message for key, message in messages if key == code]
        notes.append(Note(code, first + (f" (and in {counted(len(others), 'other shard')})" if others else "")))
    stems = {match["stem"] for file in shards if (match := NUMBERED.fullmatch(file))}
    stems.add(os.path.splitext(os.path.basename(index).removesuffix(".index.json"))[0])
    numbered = {name: match["stem"] for name in folder.names if (match := NUMBERED.fullmatch(name))}
    stale = (name for name, stem in numbered.items() if stem in stems and name not in shards)
    about = "named like shards but not in the index, perhaps from another run"
    notes += noted("stale-shards", stale, "file is", "files are", about)
    entries = [value for value in tree.values() if isinstance(value, (TensorEntry, Composite))]
    sizes = {id(e.storage.data) if isinstance(e, TensorEntry) else id(e): e.nbytes for e in entries[::-1]}
    if total_size not in (None, sum(sizes.values()), sum(entry.nbytes for entry in entries)):
        shown = f"{total_size:,}" if type(total_size) in (int, float) else repr(total_size)[:40]
        what = f"by the index its tensors have {shown} bytes; they have {sum(sizes.values()):,}"
        notes.append(Note("total-size", what))
    return notes


# Writing -------------------------------------------------------------------------------------------------------------

DEFAULT_SIZE = 5_000_000_000  # of a shard, in bytes, as the hub's savers have it

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
LEAST_BARE = 1_000_000  # bytes, of a size without a unit


def size_in_bytes(size: int | str) -> int:
    """The number of bytes in a text like `5GB` (10^9), `5GiB` (2^30), `500MB` or `24B`. Raises `UsageError`.

    A number without a unit is at least a million: `5` was meant to be 5 GB.
    """
    match = re.fullmatch(r"([0-9]{1,15})(\.[0-9]{1,9})?\s*([kmgt]?)(i?)(b?)", str(size).strip().lower())
    if match is not None and (match[3] or not (match[2] or match[4])):
        scale: int = (1024 if match[4] else 1000) ** _UNITS[match[3]]
        count = int(match[1]) * scale + int(float(match[2] or 0) * scale)
        if count >= (1 if match[3] or match[5] else LEAST_BARE):
            return count
    what = f"{str(size)[:40]!r} is not a shard size"
    raise UsageError(what, f"Bytes without a unit: {LEAST_BARE:,} or more.", "For example: 5GB, 500MB, 2GiB")


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How a checkpoint is divided: as its shards were read, else anew, at most `limit` bytes of tensors to a shard.

    stem: the beginning of the names of new files.  index, shards: those that were read; ties: of their names, across
    shards, which are recorded anew when they are written.  pickled: they are torch's own files, which are only read.
    """

    limit: int = DEFAULT_SIZE
    stem: str = "model"
    index: str = ""
    shards: Mapping[str, Checkpoint] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    pickled: bool = False

    def files(self, stored: Mapping[str, TensorEntry], ties: Mapping[str, str]) -> dict[str, list[str]]:
        """The names of what is stored, by the file that it goes to. ties: for other names, the one that is stored.

        What came from a shard stays in it, by its storage, else by its name; what is new goes with what stands before
        it. Anew: in order, as many as fit; one that is too large has a shard of its own, as with the hub's savers.
        """
        groups: list[list[str]] = []
        if self.shards:
            by_name = {name: file for file, shard in self.shards.items() for name in shard.tree}
            for name, kept in ties.items():
                if name in by_name:
                    by_name.setdefault(kept, by_name[name])
            by_storage = {id(storage): file for file, shard in self.shards.items() for storage in storages(shard.tree)}
            by_file: dict[str, list[str]] = {file: [] for file in self.shards}
            file = next(iter(by_file))
            for name, entry in stored.items():
                file = by_storage.get(id(entry.storage)) or by_name.get(name, file)
                by_file[file].append(name)
            if not self.pickled and stem_of(self.shards) == self.stem and all(by_file.values()):
                return by_file
            groups = [*filter(None, by_file.values())] or [[]]
        else:
            current, size = list[str](), 0
            for name, entry in stored.items():
                if entry.nbytes > self.limit:
                    groups.append([name])
                    continue
                if size + entry.nbytes > self.limit:
                    groups.append(current)
                    current, size = [], 0
                current.append(name)
                size += entry.nbytes
            groups += [current] if current or not groups else []
        count = len(groups)
        if count == 1:
            return {f"{self.stem}.safetensors": groups[0]}
        return {f"{self.stem}-{n:05d}-of-{count:05d}.safetensors": names for n, names in enumerate(groups, 1)}


def stem_of(files: Iterable[str]) -> str:
    """The beginning of the names of shards."""
    match = next(filter(None, map(NUMBERED.fullmatch, files)), None)
    return match["stem"] if match else "model"


def divided(checkpoint: Checkpoint, shard_size: int | str | None, stem: str) -> Checkpoint:
    """The checkpoint, to be written in shards of at most this size, which counts the bytes of tensors.

    Without a size, a division that it was read from stays, under these names. Raises `UsageError` for what is no size.
    """
    if shard_size is None and isinstance(checkpoint.origin, Division):
        return replace(checkpoint, origin=replace(checkpoint.origin, stem=stem))
    return replace(checkpoint, origin=Division(DEFAULT_SIZE if shard_size is None else size_in_bytes(shard_size), stem))


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a folder: shards, and their index; of one shard, `model.safetensors` without an index.

    A checkpoint that was read from shards keeps its division; any other is divided in the order of its keys, at most
    5 GB of tensors to a shard (a single tensor may be larger). Ties stay together and are recorded. Raises
    `Unsupported` naming everything that cannot be kept.
    """
    if marks.PICKLE in checkpoint.metadata:
        what = f"a whole tree (convert {arg(all=True)}) is one safetensors file, never shards"
        raise Unsupported(what, fix=f"Write it as one: {arg(container='safetensors')}; or without {arg(all=True)}")
    division = checkpoint.origin if isinstance(checkpoint.origin, Division) else Division()
    stored, ties = safetensors.without_ties(safetensors.holdable(checkpoint))
    shards = division.files(stored, ties)
    file_of = {name: file for file, names in shards.items() for name in names}
    trees: dict[str, dict[str, Any]] = {file: {} for file in shards}
    for name, entry in checkpoint.tree.items():
        trees[file_of[ties.get(name, name)]][name] = entry
    first = next(iter(shards))
    numbered = NUMBERED.fullmatch(first)
    is_alone = len(shards) == 1 and not numbered
    set_on = whole_tree.set_on(checkpoint.tree)
    of_all = set_on | {key: mark for key, mark in checkpoint.metadata.items() if key == marks.RECOVERED}
    files: dict[str, Iterable[Segment]] = {}
    checks: list[Storage] = []
    for file, tree in trees.items():
        old_metadata = division.shards[file].metadata if file in division.shards and not division.pickled else {}
        metadata = {key: value for key, value in old_metadata.items() if key not in division.ties}
        metadata |= of_all if is_alone else {}
        plan = safetensors.write(Checkpoint(tree, safetensors.NAME, metadata, tensors_only=True))
        (files[file],) = plan.files.values()
        checks += plan.checks
    if not is_alone:
        index = division.index if first in division.shards else ""
        if not index and numbered:
            index = f"{numbered['stem']}{numbered['suffix']}.index.json"
        # The names that are really in the shards, in the tree's order; the others are recorded as ties of these.
        weight_map = {name: file_of[name] for name in checkpoint.tree if name in file_of}
        metadata = dict(checkpoint.metadata) if checkpoint.container == "sharded" else {}
        metadata |= of_all
        metadata["total_size"] = sum(entry.nbytes for entry in stored.values())
        if "total_parameters" in metadata:
            metadata["total_parameters"] = sum(stored[name].numel for name in weight_map)
        content = json.dumps(
            {"metadata": metadata, "weight_map": weight_map}, indent=2, ensure_ascii=False, allow_nan=False
        )
        files[index] = [InlineBytes(content.encode() + b"\n")]
    message = f"{whole_tree.KEY} keeps the _metadata of the state dict, and ckptool gives it back"
    return Plan(files, checks, notes=(Note(whole_tree.KEPT, message),) if set_on else ())
