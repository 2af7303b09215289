"""`dcp`: a folder that `torch.distributed.checkpoint.save` wrote: a table, or one of each rank, and what the ranks
saved, one thing after the other.

Source: torch/distributed/checkpoint (filesystem.py, _nested_dict.py, _traverse.py), torch 2.0 to 2.13. A table
(`tables`) has for every name the size and chunks of a tensor or nothing (an object), for every chunk the bytes of a
`.distcp` file where it is (`payloads`), and for every name its path in the nested dictionaries that were saved.
"""

from __future__ import annotations

import os
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, PartKind, PartOf
from ckptool.checkpoint.files import Folder, Input, Source, size_at
from ckptool.checkpoint.graph import MAX_DEPTH
from ckptool.commands import command
from ckptool.errors import CkptoolError, LimitExceeded, OnlyAPart, Truncated, counted
from ckptool.formats.dcp import tree_pickle
from ckptool.formats.dcp.payloads import Payloads
from ckptool.formats.dcp.save_plan import write as write
from ckptool.formats.dcp.tables import METADATA, OF_A_RANK, RANK_FILE, Tables, owner_of, table_names
from ckptool.formats.dcp.tree_pickle import with_optimizers
from ckptool.formats.folder import mixed, number_in
from ckptool.formats.marks import noted
from ckptool.formats.pieces import Joiner

NAME = "dcp"
SUFFIX = ".distcp"
MAX_STEPS = 256  # of one file, compared with those of the others
ENGINE = "torch.distributed.checkpoint"


def detect(head: bytes, source: Input) -> bool:
    if isinstance(source, Source):
        return source.path.endswith(SUFFIX) or _is_table(source)
    return METADATA in source or any(name.endswith(SUFFIX) or OF_A_RANK.fullmatch(name) for name in source.names)


def _is_table(source: Source) -> bool:
    folder, name = os.path.split(source.path)
    is_table = name == METADATA or OF_A_RANK.fullmatch(name) is not None
    return is_table and any(name.endswith(SUFFIX) for name in Folder(folder).names)


def read(source: Input) -> Checkpoint:
    """The checkpoint in a folder of `torch.distributed.checkpoint`, or whose table this is.

    Reads the tables and the directories of the zips, no tensor data. A tensor that several ranks share is one entry,
    put together when its bytes are asked for. The nesting of dictionaries and lists is as it was saved; without a
    record of it, names stay flat. Raises `Truncated`, `Corrupt`, `Ambiguous`, `Conflict`, `Unsupported` or
    `LimitExceeded`; `OnlyAPart` for the file of a rank.
    """
    folder = source if isinstance(source, Folder) else Folder(os.path.dirname(source.path), shown=source.path)
    names = table_names(folder)
    if not names or (isinstance(source, Source) and not _is_table(source)):
        raise _no_table(folder, isinstance(source, Source))
    tables = Tables(folder, names)
    for name in names:
        tables.add(name)
    payloads = Payloads(folder)
    joiner = Joiner(folder, "" if names == [METADATA] else f"{folder} (the tables of {counted(len(names), 'rank')})")
    pieces = payloads.pieces(tables.values)
    values: dict[str, Any] = {}
    payloads.expect(value.chunks[0].place for value in tables.values.values() if value.dtype is None and value.chunks)
    for name, value in tables.values.items():
        if value.dtype is None:
            first, *rest = (chunk.place for chunk in value.chunks)  # the others of other ranks
            others = ((owner_of(place.relative_path), payloads.same(first, place)) for place in rest)
            joiner.compare(name, owner_of(first.relative_path), others)
            values[name] = payloads.object(name, first)
            continue
        chunks = pieces.pop(name)
        if len(chunks) > 1 and all(piece.like.shape == value.shape for piece in chunks):  # as buffers
            tensor = joiner.replicated(name, chunks)
        else:
            tensor = joiner.tensor(name, value.shape, value.dtype, chunks)
        flags, grad = tensor.flags, value.requires_grad  # one object for all that are equal
        # Names that are tied are two tensors.
        values[name] = tensor.with_flags(flags if flags.requires_grad == grad else flags._replace(requires_grad=grad))
    joiner.refuse_other_runs()
    untied = _check_steps(tables, values)
    tree, mark, notes, aside = tree_pickle.restored(values)
    if tree is None:
        tree, restored = with_optimizers(_nested(tables, values))
        if not tables.paths and any("." in name for name in values):
            what = "the nesting of the names is not recorded, so they stay flattened"
            notes.append(Note("flat-names", what))
        notes += restored
    notes += joiner.notes_of_replicas()
    notes += noted("unused-record", sorted(tables.unused), "name has", "names have", "data that no tensor uses")
    ends = (SUFFIX, METADATA, METADATA + ".tmp")
    used = {*tables.files, *names}
    strays = [name for name in folder.names if name.endswith(ends) and name not in used]
    stale = (name for name in strays if size_at(os.path.join(folder.path, name))[0])  # an empty one has no values
    whose = METADATA if METADATA in names else "the ranks' tables"
    about = f"used by no value in {whose}, perhaps left over from another run"
    notes += noted("stale-shards", stale, "file is", "files are", about)
    part = None
    if any(name.rpartition(".")[2].startswith("_flat_param") for name in tables.values):  # whole as the vector may be
        meaning = "FSDP1 saved it with LOCAL_STATE_DICT: _flat_param has the parameters of all ranks in one vector, "
        meaning += "padded, and each other name only one rank's piece; only the model knows the shapes"
        part = PartOf(PartKind.RANK, "flattened parameters", meaning)
    facts: dict[str, Any] = {"version": max(tables.versions)} if tables.versions else {}
    facts |= {"engine": ENGINE, "ranks": len({match[1] for file in tables.files if (match := RANK_FILE.match(file))})}
    places = (tree, *(value for value in tree.values() if isinstance(value, dict)))
    steps = (place.get(name) for place in places for name in ("step", "global_step", "iteration"))
    if (step := next((step for step in steps if type(step) is int), None)) is not None:
        facts["step"] = step
    discarded = (*tables.discarded, *payloads.discarded, *aside)
    return Checkpoint(tree, NAME, facts | mark, folder, None, tuple(notes), discarded, part=part, untied=tuple(untied))


def _no_table(folder: Folder, is_file: bool) -> CkptoolError:
    """The error for files of ranks without the table that says what is in them."""
    if is_file:
        what = f"{folder} is what one rank saved of a checkpoint"
        why = f"Only the folder is one, with the table of the ranks' files ({METADATA})."
        return OnlyAPart(what, why, f"Name the folder: {command('inspect', folder.path)}")
    held = f"{METADATA}.tmp" if f"{METADATA}.tmp" in folder else f"{SUFFIX} files"
    what = f"{folder} holds {held} and no {METADATA}"
    why = "It is written last: the run was stopped while saving, or the file was not copied along."
    return Truncated(what, why, "Copy the whole folder, or take an earlier checkpoint.")


# The values ----------------------------------------------------------------------------------------------------------


def _check_steps(tables: Tables, values: dict[str, Any]) -> list[str]:
    """The files that do not say of which step they are, if there are several files. Elsewhere none does: values are
    read there where they are asked for.

    Raises `Conflict` where all parameters of a file are at an earlier step than the latest in other files; a single
    parameter may have been frozen for a while.
    """
    steps: dict[str, list[float]] = {}
    for name, value in tables.values.items():
        if name.endswith(".step") and len(value.chunks) == 1 and not tables.folder.far:
            earlier = steps.get(file := value.chunks[0].place.relative_path, [])
            if len(earlier) < MAX_STEPS and (step := number_in(values[name])) is not None:
                steps[file] = [*earlier, step]
    latest = max((max(taken) for taken in steps.values()), default=0)
    other = next((file for file, taken in steps.items() if max(taken) == latest), "")
    for file, taken in steps.items():
        if len(taken) > 1 and max(taken) == min(taken) < latest:
            raise mixed(tables.folder, other, file, f"one has the optimizer's step {latest:g}, the other {taken[0]:g}")
    return [file for file in tables.files if file not in steps or len(steps) < 2] if len(tables.files) > 1 else []


# The tree ------------------------------------------------------------------------------------------------------------


def _nested(tables: Tables, values: dict[str, Any]) -> dict[Any, Any]:
    """The dictionaries and lists that were saved; a number in a path is an index of a list, as in torch's own
    reader. Without a path, a name stays as it is."""
    root: dict[Any, Any] = {}
    holders: list[tuple[dict[Any, Any], str | int]] = []  # the parent of each, and its key there; parents first
    holder_ids = {id(root)}
    for name, value in values.items():
        path = tables.paths.get(name, (name,))
        if not isinstance(path, (tuple, list)) or not path or type(path[0]) is not str:
            raise tables.damaged(f"has no path for {name}")
        if len(path) > MAX_DEPTH:
            raise LimitExceeded(f"{tables.folder}: {name[:80]} is nested {len(path):,} deep", "No real checkpoint is.")
        if not all(type(key) in (str, int) for key in path) or ".".join(map(str, path)) != name:
            raise tables.damaged(f"has a path for {name} that is not made of the names and numbers in it")
        node = root
        for key in path[:-1]:
            if key not in node:
                node[key] = {}
                holder_ids.add(id(node[key]))
                holders.append((node, key))
            node = node[key]
            if id(node) not in holder_ids:
                raise tables.damaged(f"has a path for {name} that leads through another value")
        if path[-1] in node:
            raise tables.damaged(f"has one path for two values, {name} and another")
        node[path[-1]] = value
    for parent, key in reversed(holders):
        children = parent[key]
        numbers = sum(type(key) is int for key in children)
        if 0 < numbers < len(children):
            raise tables.damaged(f"has a path for {key} that leads through another value: names and numbers are in it")
        if numbers:  # the elements in order; torch records no empty dictionaries, and reads None in their places
            last = max(children)
            if min(children) < 0 or last > 4 * len(children) + 1_000:
                raise tables.damaged(f"has a list with an element {last:,} but only {len(children):,} in all")
            parent[key] = [children.get(i) for i in range(last + 1)]
    return root
