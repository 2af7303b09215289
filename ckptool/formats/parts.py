"""Parts of something larger that are taken for a checkpoint: a rank's share, one shard of several, placeholders.

Decided here, from the tree (tensors that several ranks share, DeepSpeed's and Megatron's entries), the name of the file
and those beside it. Names alone are believed where only one program writes them; an ordinary file is never called a
part for its name.

Source: torch/distributed/tensor and _shard/sharded_tensor (what their pickles hold), deepspeed/runtime/engine.py (names
of files, and `param_shapes`), megatron/training/checkpointing.py (`mp_rank_TT_PPP`), huggingface_hub/serialization
(names of shards), verl and accelerate (`_world_size_W_rank_R`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Note, PartKind, PartOf, TensorEntry
from ckptool.checkpoint.files import Folder, Input, json_or_none
from ckptool.checkpoint.graph import structural_parts
from ckptool.checkpoint.nodes import Global, Object, fields, items
from ckptool.checkpoint.paths import absolute, is_url
from ckptool.commands import NAME, arg, command
from ckptool.errors import OnlyAPart, counted, listed, printable
from ckptool.formats.folder import (
    CONSOLIDATED,
    INDEX,
    LAYER,
    MODEL_PARALLEL,
    MODEL_STATES,
    NUMBERED,
    OF_WORLD,
    PIECES,
    STATES,
    NamePattern,
    names_in,
)

CODE, MEMBERS = "part", "members"  # of the notes
FOLDER = "folder"  # of `Checkpoint.kept`: the path of the folder that was named
MAX_INDEX = 16 << 20


_RANK_IN_NAME = NamePattern("rank", r"(?s)(?:.*?[-_.])?rank[-_]?(?P<rank>\d{1,6})(?!\d).*")
_NUMBERS = re.compile(r"\d+")

_SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None), TensorEntry, Global})
_ONE_OF_SEVERAL = "model parallelism divides the weights over several files, and this is one of them"


def with_part(checkpoint: Checkpoint, opened: Input) -> Checkpoint:
    """The checkpoint with its `part` and a note of it, if it is one. opened: the file or folder that was named."""
    part = checkpoint.part or part_of(checkpoint)
    if part is None and isinstance(opened, Folder):
        from ckptool.formats.members import NAME, with_members

        if checkpoint.container != NAME:
            checkpoint = with_members(checkpoint, Folder(opened.path))
            part = checkpoint.part
    if part is not None:
        fix = command("inspect", part.whole) if part.whole and part.kind is not PartKind.MEMBERS else ()
        note = Note(CODE, f"{part.label}: {part.meaning}", fix)
        checkpoint = replace(checkpoint, part=part, notes=(*checkpoint.notes, note))
    if isinstance(opened, Folder):
        checkpoint.kept[FOLDER] = opened.path  # whose other files are judged where it is asked what would run
    return checkpoint


def part_of(checkpoint: Checkpoint) -> PartOf | None:
    """Of what a file is a part, by its tree, its name and what lies beside it; None for a whole checkpoint."""
    source, tree = checkpoint.source, checkpoint.tree
    # Of a folder, the files were put together by its index or table; an index or table by itself stands for its folder.
    path = "" if source is None or isinstance(source, Folder) else source.path
    facts, top = _facts_of(tree), tree if isinstance(tree, dict) else {}
    if found := _share(facts, path) or _of_zero(top, facts, os.path.basename(path)) or _of_model_parallel(top, path):
        return found
    if "DCP_SHARDING_INFO" in checkpoint.metadata:  # as `HuggingFaceStorageWriter(save_distributed=True)` writes it
        piece = PIECES.fullmatch(os.path.basename(path))
        ranks = {each["rank"] for each in map(PIECES.fullmatch, _beside(path)) if each}
        what = "its tensors are pieces of larger ones, whose other pieces are in the files of the other ranks"
        return _ranked(int(piece["rank"]) - 1 if piece else None, len(ranks) or None, what)
    if found := _shard(tree, path):
        return found
    if facts.empty < 2 or 2 * facts.empty < facts.named:
        return None
    what = f"{facts.empty:,} of {counted(facts.named, 'weight')} are placeholders (shape [0])"
    return PartOf(PartKind.PLACEHOLDERS, "weights without values", f"{what}, as ZeRO stage 3 has them ungathered")


def _beside(path: str) -> list[str]:
    """The names in the folder of a file; none for an empty path."""
    return names_in(os.path.dirname(path) or ".") if path else []


# What the tree says --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Facts:
    """Counts of a tree.

    tensors: those of torch.distributed; shared: those of them of which only a rank's share is there.  rank, world: as
    they say. flat: parameters are flattened.  empty: weights of the dictionary with most that are empty; named: all of
    its weights.
    """

    tensors: int = 0
    shared: int = 0
    rank: int | None = None
    world: int | None = None
    flat: bool = False
    empty: int = 0
    named: int = 0


def _facts_of(tree: Any) -> _Facts:
    facts, stack, seen = _Facts(), [tree], set[int]()
    while stack:
        node = stack.pop()
        if type(node) is Composite:
            from ckptool.formats.placements import distributed  # which few files need

            if (found := distributed(node)) is not None:
                rank, world = found.ranks
                facts.tensors += 1
                facts.shared += not found.is_whole
                facts.rank = rank if facts.rank is None and type(rank) is int and rank >= 0 else facts.rank
                facts.world = world if facts.world is None and type(world) is int and world > 0 else facts.world
        elif type(node) in _SCALARS or id(node) in seen:
            continue
        elif isinstance(node, dict):
            seen.add(id(node))
            weights = empty = 0
            for key, value in node.items():
                if type(value) is not TensorEntry:
                    stack += [value] if type(value) not in _SCALARS else []
                elif type(key) is str:
                    last = key.rpartition(".")[2]
                    weights += last in ("weight", "bias")
                    empty += last in ("weight", "bias") and value.shape == (0,)
                    facts.flat |= last.lstrip("_").startswith("flat_param")
            if empty > facts.empty:
                facts.empty, facts.named = empty, weights
        else:
            seen.add(id(node))
            is_object = isinstance(node, Object)
            stack += (node.args, node.items, node.elements, node.state) if is_object else structural_parts(node)
    return facts


# The kinds -----------------------------------------------------------------------------------------------------------


def _ranked(rank: int | None, world: int | None, meaning: str, kind: PartKind = PartKind.RANK) -> PartOf:
    label = "one rank" if rank is None else f"rank {rank:,}"
    label = label + f" of {world:,}" if world is not None else label if rank is not None else "what one rank saved"
    return PartOf(kind, label, meaning, rank, world)


def _share(facts: _Facts, path: str) -> PartOf | None:
    """A rank's share of tensors that several ranks hold."""
    folder, name = os.path.split(path)
    named = OF_WORLD.fullmatch(name)
    found = named or _RANK_IN_NAME.fullmatch(os.path.splitext(name)[0].lower())
    rank = int(found["rank"]) if found else facts.rank
    world = int(named["world"]) if named else facts.world
    if facts.shared:
        which = "all of its tensors are" if facts.shared == facts.tensors else f"{facts.shared:,} of its tensors are"
        what = "shared with other ranks, and only this rank's values are here; shapes are those of the whole"
        part = _ranked(rank, world, f"{which} {what}")
        alike = [_NUMBERS.sub("#", each) for each in _beside(path)].count(_NUMBERS.sub("#", name))
        return replace(part, whole=folder or ".") if found and world and alike >= world else part
    if facts.flat:
        what = "its parameters are flattened as FSDP keeps them, and those of the other ranks are not here"
        return _ranked(rank, world, what)
    is_one = named is not None and world is not None and world > 1
    return _ranked(rank, world, "the other ranks have files of their own") if is_one else None


def _of_zero(top: dict[Any, Any], facts: _Facts, name: str) -> PartOf | None:
    """A file of DeepSpeed's: a rank's share of the optimizer, or weights whose values are in those."""
    named = STATES.fullmatch(name)
    rank = int(named["rank"]) if named else None
    optimizer = fields(top.get("optimizer_state_dict"))
    if (named and "optim" in named["rest"]) or "partition_count" in optimizer:
        count = optimizer.get("partition_count")  # the number of partitions, or those for each group of parameters
        world = max((each for each in items(count) or [count] if type(each) is int), default=None)
        what = "a share of the optimizer's state and of the weights in f32, as ZeRO divides them"
        return _ranked(rank, world, f"{what}; the model is in the files together")
    if "param_shapes" in top and facts.empty:
        world = top["dp_world_size"] if type(top.get("dp_world_size")) is int else None
        what = f"{facts.empty:,} of its weights are placeholders (shape [0])"
        part = _ranked(rank, world, f"{what}: their values are in the *_optim_states.pt files", PartKind.PLACEHOLDERS)
        return part if named else replace(part, label="weights without values")
    if named:
        return _ranked(rank, None, "one of the files of a ZeRO checkpoint, which is all of them together")
    if layer := LAYER.fullmatch(name):
        label = f"layer {int(layer['layer'])}" + (f", expert {int(layer['expert'])}" if layer["expert"] else "")
        what = "DeepSpeed saves each layer of a pipeline, and each expert, to a file of its own"
        return PartOf(PartKind.SHARD, label, what)
    return None


def _of_model_parallel(top: dict[Any, Any], path: str) -> PartOf | None:
    """A file of those over which tensor and pipeline parallelism divide a model (Megatron, DeepSpeed, Llama)."""
    args = top.get("args") if "model" in top else None  # Megatron's say over how many files they divide it
    saved = args.attributes if isinstance(args, Object) else {}
    sizes = [saved.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    world: Any = prod(size for size in sizes if type(size) is int and size > 0)
    of_deepspeed = top.get("mp_world_size")
    inside = os.path.dirname(absolute(path)) if path else ""  # Megatron has a folder for each rank
    for pattern, place, known in (
        (MODEL_STATES, path, of_deepspeed),
        (CONSOLIDATED, path, None),
        (MODEL_PARALLEL, inside, world),
    ):
        if found := pattern.fullmatch(os.path.basename(place)):
            rank = found["rank"] + (found["rest"] if pattern is MODEL_PARALLEL else "")
            others = sum(pattern.fullmatch(name) is not None for name in _beside(place))
            number = int(rank) if "_" not in rank else None
            count = max(others, known if type(known) is int else 1, (number or 0) + 1)
            label = f"rank {rank.replace('_', '/') if number is None else number} of {count:,}"
            return PartOf(PartKind.RANK, label, _ONE_OF_SEVERAL, number, count) if count > 1 else None
    return _ranked(None, world, _ONE_OF_SEVERAL) if world > 1 else None


def _shard(tree: Any, path: str) -> PartOf | None:
    """A file that an index names; without the index, one whose name numbers it among several."""
    if not isinstance(tree, dict) or not all(isinstance(value, (TensorEntry, Composite)) for value in tree.values()):
        return None
    folder, name = os.path.split(path)
    numbered = NUMBERED.fullmatch(name)
    number, count = (int(numbered["number"]), int(numbered["count"])) if numbered else (0, 0)
    whole, where, index = "", "the index of the set is not beside it", ""
    others = _beside(path) if numbered or not is_url(path) else ()  # elsewhere, names are asked for
    for each in filter(INDEX.fullmatch, others):
        table = fields(json_or_none(os.path.join(folder, each), MAX_INDEX)).get("weight_map")
        files = sorted({file for file in fields(table).values() if type(file) is str})
        if name in files:
            number, count, whole, index = files.index(name) + 1, len(files), folder or ".", each
            where = f"{printable(index)} says which tensors are in which"
            break
    if count < 2 or not 1 <= number <= count:
        return None
    what = f"it holds some of the model's tensors, the other files the rest; {where}"
    return PartOf(PartKind.SHARD, f"shard {number:,} of {count:,}", what, number, count, whole, index)


def refuse_placeholders(checkpoint: Checkpoint, names: Iterable[tuple[str, Any]]) -> None:
    """Raises `OnlyAPart` for tensors to be written by themselves whose values are in other files."""
    part = checkpoint.part
    joined = part is not None and part.kind is PartKind.MEMBERS and checkpoint.container != "folder"
    if part is None or part.kind is PartKind.SHARD or joined:
        return
    empty = [name for name, value in names if isinstance(value, TensorEntry) and value.shape == (0,)]
    if empty:
        source, count = checkpoint.source or "the checkpoint", f"{len(empty):,} of the tensors"
        raise OnlyAPart(
            f"{source}: {count} have no values here: {listed(empty, 3)}",
            f"It is {part.label}; written by themselves, empty tensors would pass for weights. Nothing was written.",
            f"Leave them out: {arg(exclude=NAME)}",
        )
