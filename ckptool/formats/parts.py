"""Whether a checkpoint is whole, or a part of something larger: a rank's share, one shard of several, placeholders.

Decided here and nowhere else, from the tree (tensors that several ranks share, DeepSpeed's and Megatron's entries), the name of the file
and those beside it. Names alone are believed where only one program writes them; an ordinary file is never called a part for its name.

Source: torch/distributed/tensor and _shard/sharded_tensor (what their pickles hold), deepspeed/runtime/engine.py (names of files, and
`param_shapes`), megatron/training/checkpointing.py (`mp_rank_TT_PPP`), huggingface_hub/serialization (names of shards), verl and accelerate
(`_world_size_W_rank_R`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Note, PartOf, TensorEntry
from ckptool.checkpoint.commands import command
from ckptool.checkpoint.files import Folder, Input, absolute, read_small
from ckptool.checkpoint.nodes import Global, Object, Set
from ckptool.errors import CkptoolError, OnlyAPart, counted, listed, printable
from ckptool.formats import members
from ckptool.formats.members import LAYER, MODEL_PARALLEL, MODEL_STATES, OF_WORLD, PIECES, STATES
from ckptool.formats.sharded.writing import INDEX, NUMBERED

RANK, SHARD, PLACEHOLDERS = "rank", "shard", "placeholders"
CODE = "part"

MAX_NAMES = 20_000  # in a folder, that are looked at beside a file
MAX_INDEX = 16 << 20

_RANK_IN_NAME = re.compile(r"(?:^|[-_.])rank[-_]?(?P<rank>\d{1,6})(?!\d)", re.IGNORECASE)
_CONSOLIDATED = re.compile(r"consolidated\.(?P<rank>\d\d)\.(?:pth|pt|safetensors)")

_DISTRIBUTED = ("DTensor", "ShardedTensor")
_WEIGHT_NAMES = ("weight", "bias")
_NOTHING = (0,)
_FLAT = "flat_param"
_SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None), TensorEntry, Global})


def with_part(checkpoint: Checkpoint, opened: Input) -> Checkpoint:
    """The checkpoint, saying of what it is a part if it is one, with a note of it. opened: what was named, a file or a folder."""
    part = checkpoint.part or part_of(checkpoint)
    if part is None and isinstance(opened, Folder) and (found := members.state_of(Folder(opened.path))) is not None:
        layout, part = found
        if part.is_complete:
            shown = listed([printable(name) for name in layout.names], 4)
            note = Note(members.MEMBERS, f"{part.label} are whole: the weights, {shown}")
            return replace(checkpoint, notes=(*checkpoint.notes, note))
    if part is None:
        return checkpoint
    fix = command("inspect", part.whole) if part.whole and part.kind != members.MEMBERS else ()
    note = Note(CODE, f"{part.label}: {part.meaning}", fix)
    return replace(checkpoint, part=part, notes=(*checkpoint.notes, note))


def part_of(checkpoint: Checkpoint) -> PartOf | None:
    """Of what a file is a part, by its tree, its name and what lies beside it; None for a whole checkpoint."""
    facts = _facts_of(checkpoint.tree)
    source = checkpoint.source
    path = (source.shown if isinstance(source, Folder) else source.path) if source is not None else ""
    if isinstance(source, Folder):
        path = ""  # its files were put together by its index or table
    beside = _Beside(path)
    return (
        _share(facts, beside)
        or _of_zero(checkpoint.tree, facts, beside)
        or _of_model_parallel(checkpoint.tree, beside)
        or _piece(checkpoint, beside)
        or _shard(checkpoint.tree, beside)
        or _placeholders(facts, beside)
    )


@dataclass(slots=True)
class _Beside:
    """A file's name, and the names beside it, which are only looked up when they are asked for."""

    path: str
    _names: list[str] | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    @property
    def parent(self) -> str:
        return os.path.basename(os.path.dirname(absolute(self.path))) if self.path else ""

    @property
    def here(self) -> str:
        """The folder that the file is in, as a path that can be typed."""
        return self.folder or "."

    def names(self) -> list[str]:
        if self._names is None:
            self._names = _names_in(self.folder or ".") if self.path else []
        return self._names

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        return [name for name in self.names() if pattern.fullmatch(name)]


def _names_in(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for _, entry in zip(range(MAX_NAMES), entries, strict=False))
    except OSError:
        return []


# What the tree says ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Facts:
    """Counts of a tree. shared: tensors of which only a rank's share is there; tensors: of those kinds in all."""

    shared: int = 0
    tensors: int = 0
    rank: int | None = None
    world: int | None = None
    flat: bool = False
    empty: int = 0
    named: int = 0
    seen: set[int] = field(default_factory=set)


def _facts_of(tree: Any) -> _Facts:
    facts = _Facts()
    stack = [tree]
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind in _SCALARS:
            continue
        if kind is Composite:
            _distributed(node, facts)
            continue
        if id(node) in facts.seen or not isinstance(node, (dict, list, tuple, Object, Set)):
            continue
        facts.seen.add(id(node))
        if isinstance(node, dict):
            stack += _of_dictionary(node, facts)
        else:
            stack.extend(part for part in _inside(node) if type(part) not in _SCALARS)
    return facts


def _inside(node: Any) -> Iterable[Any]:
    if isinstance(node, Object):
        return (node.args, node.items, node.elements, node.state)
    return node.items if isinstance(node, Set) else node


def _of_dictionary(node: dict[Any, Any], facts: _Facts) -> list[Any]:
    """The values of a dictionary that have parts. Counts its weights where some of them are there by name only."""
    below, empty = [], 0
    for key, value in node.items():
        if type(value) is TensorEntry:
            empty += value.shape == _NOTHING and _is_weight(key)
            if type(key) is str and _FLAT in key and key.rpartition(".")[2].lstrip("_").startswith(_FLAT):
                facts.flat = True
        elif type(value) not in _SCALARS:
            below.append(value)
    if empty > facts.empty:
        facts.empty = empty
        facts.named = sum(1 for key, value in node.items() if type(value) is TensorEntry and _is_weight(key))
    return below


def _is_weight(key: Any) -> bool:
    return type(key) is str and key.rpartition(".")[2] in _WEIGHT_NAMES


def _distributed(tensor: Composite, facts: _Facts) -> None:
    """Counts a tensor of torch.distributed, and whether all of it is there."""
    kind, args = _rebuilt_as(tensor)
    if kind == "DTensor":
        whole = _dtensor_is_whole(tensor, args, facts)
    elif kind == "ShardedTensor":
        whole = _sharded_is_whole(tensor, args, facts)
    else:
        return
    facts.tensors += 1
    facts.shared += not whole


def _rebuilt_as(tensor: Composite) -> tuple[str, Any]:
    """The class of torch.distributed that a tensor is of, and the state that it is made with."""
    made = tensor.made
    for _ in range(4):  # a Parameter of it
        args = made.args
        if type(args) is tuple and args and isinstance(args[0], Composite):
            made = args[0].made
        else:
            break
    args = made.args
    if type(args) is not tuple or len(args) < 4 or type(args[1]) is not Global:
        return "", None
    cls = args[1]
    known = cls.module.startswith("torch.distributed") and cls.name in _DISTRIBUTED
    return (cls.name, args[3]) if known else ("", None)


def _dtensor_is_whole(tensor: Composite, state: Any, facts: _Facts) -> bool:
    fields: dict[Any, Any] = {}
    for each in state if isinstance(state, tuple) else (state,):  # its dictionary, and its slots
        fields |= each if isinstance(each, dict) else {}
    if not isinstance(fields.get("_spec"), Object):
        return False
    spec, local = fields["_spec"].attributes, fields.get("_local_tensor")
    mesh = spec["mesh"].attributes if isinstance(spec.get("mesh"), Object) else {}
    _note_ranks(facts, mesh.get("_rank"), _size_of_mesh(mesh))
    placements = spec.get("placements") or ()
    partial = any(
        isinstance(each, Object) and each.name.rpartition(".")[2].endswith("Partial") for each in _inside_of(placements)
    )
    return not partial and isinstance(local, (TensorEntry, Composite)) and local.shape == tensor.shape


def _inside_of(node: Any) -> Iterable[Any]:
    return node if isinstance(node, (list, tuple)) else ()


def _size_of_mesh(mesh: dict[Any, Any]) -> int | None:
    """How many devices a mesh has: torch calls its table of them differently from version to version."""
    for name in ("_flatten_rank_map", "mesh", "_rank_map"):
        table = mesh.get(name)
        if isinstance(table, TensorEntry):
            return table.numel
        if isinstance(table, (tuple, list)):
            return len(table)
    return None


def _sharded_is_whole(tensor: Composite, state: Any, facts: _Facts) -> bool:
    """A `ShardedTensor`: its state is the local shards, a table of all of them, and the ranks of the process group."""
    if not isinstance(state, (tuple, list)) or len(state) < 2:
        return False
    group = state[2].attributes if len(state) > 2 and isinstance(state[2], Object) else {}
    _note_ranks(facts, group.get("global_rank"), group.get("global_world_size"))
    here = 0
    for shard in _inside_of(state[0]):
        local = shard.attributes.get("tensor") if isinstance(shard, Object) else None
        here += local.numel if isinstance(local, TensorEntry) else 0
    return tensor.shape is not None and here >= prod(tensor.shape)


def _note_ranks(facts: _Facts, rank: Any, world: Any) -> None:
    if facts.rank is None and type(rank) is int and rank >= 0:
        facts.rank = rank
    if facts.world is None and type(world) is int and world > 0:
        facts.world = world


# The kinds -------------------------------------------------------------------------------------------------------------


def _share(facts: _Facts, beside: _Beside) -> PartOf | None:
    """One rank's share of tensors that several ranks hold."""
    named = OF_WORLD.fullmatch(beside.name)
    found = named or _RANK_IN_NAME.search(os.path.splitext(beside.name)[0])
    rank = int(found["rank"]) if found else facts.rank
    world = int(named["world"]) if named else facts.world
    if facts.shared:
        which = "all of its tensors are" if facts.shared == facts.tensors else f"{facts.shared:,} of its tensors are"
        meaning = (
            f"{which} shared with other ranks, and only this rank's values are here; shapes are those of the whole"
        )
    elif facts.flat:
        meaning = "its parameters are flattened as FSDP keeps them, and those of the other ranks are not here"
    elif named and world is not None and world > 1:
        meaning = "the other ranks have files of their own"
    else:
        return None
    return _ranked(rank, world, meaning)


def _ranked(rank: int | None, world: int | None, meaning: str) -> PartOf:
    if rank is None:
        label = f"one rank of {world:,}" if world is not None else "what one rank saved"
    else:
        label = f"rank {rank:,}" + (f" of {world:,}" if world is not None else "")
    return PartOf(RANK, label, meaning, rank, world)


def _of_zero(tree: Any, facts: _Facts, beside: _Beside) -> PartOf | None:
    """A file of DeepSpeed's: a rank's share of the optimizer, or weights whose values are in those."""
    top = tree if isinstance(tree, dict) else {}
    named = STATES.fullmatch(beside.name)
    optimizer = top.get("optimizer_state_dict")
    if (named and "optim" in named["rest"]) or (isinstance(optimizer, dict) and "partition_count" in optimizer):
        count = optimizer.get("partition_count") if isinstance(optimizer, dict) else None
        world = _most(count)
        meaning = "a share of the optimizer's state and of the weights in f32, as ZeRO divides them; the model is in the files together"
        return _ranked(int(named["rank"]) if named else None, world, meaning)
    if "param_shapes" in top and facts.empty:
        rank, world = int(named["rank"]) if named else None, top.get("dp_world_size")
        label = _ranked(rank, world if type(world) is int else None, "").label if named else "weights without values"
        meaning = f"{facts.empty:,} of its weights are placeholders (shape [0]): their values are in the *_optim_states.pt files"
        return PartOf(PLACEHOLDERS, label, meaning, rank, world if type(world) is int else None)
    if named:
        return _ranked(int(named["rank"]), None, "one of the files of a ZeRO checkpoint, which is all of them together")
    if layer := LAYER.fullmatch(beside.name):
        label = f"layer {int(layer['layer'])}" + (f", expert {int(layer['expert'])}" if layer["expert"] else "")
        return PartOf(SHARD, label, "DeepSpeed saves each layer of a pipeline, and each expert, to a file of its own")
    return None


def _most(count: Any) -> int | None:
    """The number of partitions, which DeepSpeed gives for each group of parameters."""
    counts = [each for each in (count if isinstance(count, (list, tuple)) else [count]) if type(each) is int]
    return max(counts, default=None)


def _of_model_parallel(tree: Any, beside: _Beside) -> PartOf | None:
    """One of the files over which tensor and pipeline parallelism divide a model (Megatron, DeepSpeed, Llama)."""
    top = tree if isinstance(tree, dict) else {}
    if found := MODEL_STATES.fullmatch(beside.name):
        return _one_of(found["rank"], beside.matching(MODEL_STATES), top.get("mp_world_size"))
    if found := _CONSOLIDATED.fullmatch(beside.name):
        return _one_of(found["rank"], beside.matching(_CONSOLIDATED), None)
    found, world = MODEL_PARALLEL.fullmatch(beside.parent), _megatron_world(top)
    if found is None:
        meaning = "model parallelism divides the weights over several files, and this is one of them"
        return _ranked(None, world, meaning) if world is not None and world > 1 else None
    above = os.path.dirname(absolute(beside.path))
    others = [name for name in _names_in(os.path.dirname(above)) if MODEL_PARALLEL.fullmatch(name)]
    return _one_of(found["rank"] + found["rest"], others, world)


def _one_of(rank: str, others: list[str], world: Any) -> PartOf | None:
    number = int(rank) if "_" not in rank else None
    count = max(len(others), world if type(world) is int else 1, (number or 0) + 1)
    if count < 2:
        return None
    meaning = "model parallelism divides the weights over several files, and this is one of them"
    label = f"rank {number} of {count:,}" if number is not None else f"rank {rank.replace('_', '/')} of {count:,}"
    return PartOf(RANK, label, meaning, number, count)


def _megatron_world(top: dict[Any, Any]) -> int | None:
    """Over how many files the arguments in a Megatron checkpoint divide its model."""
    args = top.get("args")
    if not isinstance(args, Object) or "model" not in top:
        return None
    sizes = [args.attributes.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    return prod(size for size in sizes if type(size) is int and size > 0)


def _piece(checkpoint: Checkpoint, beside: _Beside) -> PartOf | None:
    """A rank's pieces of tensors, as `HuggingFaceStorageWriter(save_distributed=True)` writes them."""
    if "DCP_SHARDING_INFO" not in checkpoint.metadata:
        return None
    named = PIECES.fullmatch(beside.name)
    ranks = {found["rank"] for name in beside.matching(PIECES) if (found := PIECES.fullmatch(name))}
    meaning = "its tensors are pieces of larger ones, whose other pieces are in the files of the other ranks"
    return _ranked(int(named["rank"]) - 1 if named else None, len(ranks) or None, meaning)


def _shard(tree: Any, beside: _Beside) -> PartOf | None:
    """One of the files that an index puts together; without the index, one whose name numbers it among several."""
    if not _holds_only_tensors(tree):
        return None
    index, files = _index_of(beside)
    numbered = NUMBERED.fullmatch(beside.name)
    if index:
        number, count = files.index(beside.name) + 1, len(files)
    elif numbered and 1 <= int(numbered["number"]) <= int(numbered["count"]):
        number, count = int(numbered["number"]), int(numbered["count"])
    else:
        return None
    if count < 2:
        return None
    whole = beside.here if index else ""
    where = f"{printable(index)} says which tensors are in which" if index else "the index of the set is not beside it"
    meaning = f"it holds some of the model's tensors, the other files the rest; {where}"
    return PartOf(SHARD, f"shard {number:,} of {count:,}", meaning, number, count, whole, index)


def _holds_only_tensors(tree: Any) -> bool:
    return isinstance(tree, dict) and all(isinstance(value, (TensorEntry, Composite)) for value in tree.values())


def _index_of(beside: _Beside) -> tuple[str, list[str]]:
    """The name of the index beside a file that names it, and the files that this names, in order."""
    for name in beside.matching(INDEX):
        files = _files_of(os.path.join(beside.folder, name))
        if beside.name in files:
            return name, files
    return "", []


def _files_of(index: str) -> list[str]:
    try:
        table = json.loads(read_small(index, "an index", MAX_INDEX)).get("weight_map")
    except (CkptoolError, ValueError, AttributeError, RecursionError):
        return []
    return sorted({file for file in table.values() if type(file) is str}) if isinstance(table, dict) else []


def _placeholders(facts: _Facts, beside: _Beside) -> PartOf | None:
    """A state dict most of whose weights are empty: what ZeRO stage 3 leaves where a script saves it without gathering them."""
    if facts.empty < 2 or 2 * facts.empty < facts.named:
        return None
    meaning = f"{facts.empty:,} of {counted(facts.named, 'weight')} are placeholders (shape [0]), as ZeRO stage 3 has them ungathered"
    return PartOf(PLACEHOLDERS, "weights without values", meaning)


def refuse_placeholders(checkpoint: Checkpoint, names: Iterable[tuple[str, Any]]) -> None:
    """Raises `OnlyAPart` where tensors that are to be written by themselves are there by name only: their values are in other files."""
    part = checkpoint.part
    joined = part is not None and part.kind == members.MEMBERS and checkpoint.container != members.NAME
    if part is None or part.kind == SHARD or joined:
        return
    empty = [printable(name) for name, value in names if isinstance(value, TensorEntry) and value.shape == (0,)]
    if empty:
        raise OnlyAPart(
            f"{checkpoint.source or 'the checkpoint'}: {len(empty):,} of the tensors have no values here: {listed(empty, 3)}",
            f"It is {part.label}; written by themselves, empty tensors would pass for weights. Nothing was written.",
            "Leave them out: --exclude NAME",
        )
