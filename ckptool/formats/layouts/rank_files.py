"""`rank-files`: a folder of files that each rank of a run saved for itself with `torch.save`, all of one checkpoint.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py and SkyRL (`model_world_size_W_rank_R.pt`, `optim_…`,
`extra_state_…`), accelerate/utils/fsdp_utils.py 1.15 with `use_dcp=False` (`pytorch_model_fsdp_0_rankR.bin`,
`optimizer_0_rankR.bin`). The tree has an entry for each set: `model`, `optim`, `extra_state`; `model`, `optimizer`.

FSDP1's flat parameters (LOCAL_STATE_DICT) are taken apart by the shapes of the model. Every rank has a part of one
vector for each wrapped module. `MODULE._flat_param` is a ShardedTensor of the module's parameters one after the other,
in the order of the model and without those of wrapped modules below it. With `use_orig_params` each begins at a
multiple of 16 bytes, and under its name is what a rank has of it, as a vector. Names (but for those) and shapes are not
in the files: another description of the model has them. Source: torch/distributed/fsdp/_flat_param.py and
_state_dict_utils.py, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.files import Folder, Input
from ckptool.commands import OUT, Slot, arg, command
from ckptool.errors import Conflict, Unsupported, counted, listed
from ckptool.formats.distributed import distributed
from ckptool.formats.folder import FSDP_RANKS, OF_WORLD, is_flat_parameter, lacks, missing_names, mixed, without_copies
from ckptool.formats.pieces import Joiner, Piece, overlap
from ckptool.formats.placements import RankFile, joined_trees

NAME = "rank-files"
MODEL = "model"
ALIGNED = (4, 8, 2)  # elements to which flat parameters may be aligned: 16 bytes of the type used in computing

Shapes = Mapping[str, tuple[int, ...]]


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and any(OF_WORLD.fullmatch(n) or FSDP_RANKS.fullmatch(n) for n in source.names)


def read(source: Folder) -> Checkpoint:
    """The checkpoint of all ranks. Reads their pickles and directories, no tensor data.

    Tensors that the ranks hold together are whole, plain ones are those of the first rank, compared with the others'.
    A set (other than the model's) that differs and does not say how it is divided stays as it is, each rank's by
    itself. Raises `Conflict` for files of several runs or steps, `Corrupt` for missing files and parts, and
    `Unsupported` for a model that cannot be put together.
    """
    ranks, tree = RankSets(source), dict[str, Any]()
    for name in ranks.sets:
        files, trees = ranks.open(name)
        if any(is_flat_parameter(key) for key in (trees[0] if isinstance(trees[0], dict) else ())):
            what = f"{source} holds FSDP's flat parameters (LOCAL_STATE_DICT), without the names and shapes in them"
            line = command("convert", source.path, against=Slot("SPEC"), out=OUT)
            raise Unsupported(what, fix=f"Take these from a spec or another checkpoint of the model: {line}")
        apart = name.startswith(("optim", "extra"))
        tree[name] = joined_trees(ranks.joiner, name, files, trees, apart=apart)
    engine = "accelerate, FSDP with use_dcp=False" if ranks.is_accelerate else "FSDP, one file per rank"
    return ranks.joiner.checkpoint(NAME, tree, engine, ranks.world)


class RankSets:
    """The files of a folder by set and rank. Raises `Conflict` for files of several world sizes, `Corrupt` where some
    are missing."""

    def __init__(self, folder: Folder) -> None:
        self.joiner = Joiner(folder)
        self.is_accelerate = False
        self._tables: dict[tuple[int, ...], tuple[int, ...]] = {}
        sets: dict[str, dict[int, str]] = {}
        worlds: dict[int, str] = {}
        for name in without_copies(folder.names):
            if match := OF_WORLD.fullmatch(name):
                worlds.setdefault(int(match["world"]), name)
                kind = match["set"].partition("_world_size_")[0]
            elif match := FSDP_RANKS.fullmatch(name):
                self.is_accelerate = True
                stem, _, number = match["set"].removesuffix("_rank").rpartition("_")
                kind = "optimizer" if stem == "optimizer" else "model"
                kind += "" if number in ("0", "fsdp") else f"_{number}"
            else:
                continue
            if (other := sets.setdefault(kind, {}).setdefault(int(match["rank"]), name)) != name:
                raise mixed(folder, name, other, "both belong to one rank")
        if len(worlds) > 1:
            one, other, *_ = worlds.values()
            raise mixed(folder, one, other, "their world sizes differ")
        self.sets = dict(sorted(sets.items(), key=lambda item: not item[0].startswith("model")))
        self.world = max([0, *worlds, *(max(files) + 1 for files in sets.values())])
        names = [*chain(*(files.values() for files in self.sets.values()))]
        missing = [file for pattern in (OF_WORLD, FSDP_RANKS) for file in missing_names(names, pattern, self.world)]
        if missing:
            raise lacks(folder, f"{counted(len(missing), 'file')} of {counted(self.world, 'rank')}", missing)

    def open(self, name: str) -> tuple[list[RankFile], list[Any]]:
        """The files of a set in the order of their ranks, and the tree in each."""
        ranks, folder = sorted(self.sets[name].items()), str(self.joiner.folder)
        files = [RankFile(folder, file, rank, self.world, self._tables) for rank, file in ranks]
        return files, [self.joiner.open(file).tree for _, file in ranks]


# Flat parameters -----------------------------------------------------------------------------------------------------


def of_flat_parameters(folder: Folder, shapes: Shapes, ties: Mapping[str, str], *, ordered: bool = True) -> Checkpoint:
    """The model in a folder of flat parameters, as `{"model": {name: tensor}}`.

    shapes: those of its parameters and buffers in the order of the model, each tensor once.  ties: other names of
    them.  ordered: false where `shapes` are of a container that sorts its names. Raises `Conflict` where they do not
    add up with the vectors or are in no model's order, `Unsupported` for a folder that has none.
    """
    ranks = RankSets(folder)
    files, trees = ranks.open(MODEL) if MODEL in ranks.sets else ([], [])
    flat = [key for key in (trees[0] if trees and isinstance(trees[0], dict) else ()) if is_flat_parameter(key)]
    if not flat or not all(isinstance(tree, dict) and set(flat) <= tree.keys() for tree in trees):
        what = f"{folder} has no flat parameters (LOCAL_STATE_DICT) of FSDP"
        raise Unsupported(what, fix=f"Leave out {arg('against')}.")
    if unknown := [str(name) for name in trees[0] if name not in shapes and name not in ties and name not in flat]:
        what = f"the files have tensors that the description lacks: {listed(unknown, 3)}"
        raise _conflict(folder, what, "The description belongs to a different model.")
    joiner = ranks.joiner
    tensors: dict[str, TensorEntry] = {}
    for name, shape in shapes.items():  # a buffer is whole on every rank; of a parameter each has a piece or nothing
        entries = [entry for tree in trees if isinstance(entry := tree.get(name), TensorEntry) and entry.shape == shape]
        if len(entries) == len(trees) and (len(trees) > 1 or len(shape) != 1):
            copies = [Piece(entry, (0,) * len(shape), f"rank {rank}") for rank, entry in enumerate(entries)]
            tensors[name] = joiner.replicated(name, copies)
    prefixes = {key: key[: key.rindex(key.rpartition(".")[2])] for key in flat}
    for key, prefix in prefixes.items():
        inner = tuple(other for other in prefixes.values() if other.startswith(prefix) and other != prefix)
        names = [n for n in shapes if n.startswith(prefix) and n not in tensors and not n.startswith(inner)]
        if all(name in tree for tree in trees for name in names):
            names = [name for name in trees[0] if name in names]
        elif (not ordered and names == sorted(names)) or _is_sorted(names):
            what = f"the parameters of {key} are in the order of their names, not of the model"
            raise _conflict(folder, what, "The vector has them in the model's order, which safetensors files lose.")
        shares = []
        for file, tree in zip(files, trees, strict=True):
            vector = distributed(tree[key])
            if vector is None or vector.is_dtensor:
                raise _conflict(folder, f"{key} is not a ShardedTensor", "A different version of FSDP wrote it.")
            shares.append(file.share(key, vector))
        chunks = [chunk for share in shares for chunk in share.readings[0] or ()]
        (size,) = shares[0].shape
        for name, place in _parameter_places(folder, key, size, {name: shapes[name] for name in names}, trees, chunks):
            pieces = [piece for piece in _pieces(chunks, place, prod(shapes[name])) if piece]
            if not prod(shapes[name]):
                pieces = [replace(chunks[0], tensor=chunks[0].entry.narrow(0, 0, 0), offsets=(0,))]
            tensors[name] = joiner.flat(name, shapes[name], pieces)
    if lacking := [name for name in shapes if name not in tensors]:
        shown = listed(lacking, 3)
        what = f"{counted(len(lacking), 'tensor is', 'tensors are')} in no file: {shown}"
        raise _conflict(folder, what, "The description belongs to a different model.")
    model: dict[Any, Any] = {name: tensors[name] for name in shapes}
    model |= {name: replace(model[source]) for name, source in ties.items()}
    return joiner.checkpoint(NAME, {MODEL: model}, "FSDP1, flat parameters", ranks.world)


def _conflict(folder: Folder, what: str, why: str) -> Conflict:
    return Conflict(
        f"{folder}: {what}", why, f"Give {arg('against')} a .pt file or its spec, of the very model that was saved."
    )


def _is_sorted(names: list[str]) -> bool:
    """True for names sorted as no module has them: torch's own modules have their weight before their bias."""
    place = {name: index for index, name in enumerate(names)}
    biases = {name: place.get(f"{name.removesuffix('weight')}bias") for name in names if name.endswith("weight")}
    return names == sorted(names) and any(at is not None and at < place[name] for name, at in biases.items())


def _parameter_places(
    folder: Folder, key: str, size: int, shapes: Shapes, trees: Sequence[dict[Any, Any]], chunks: Sequence[Piece]
) -> Iterator[tuple[str, int]]:
    """Where each parameter begins in a vector of this size."""
    recorded = [name for name in shapes if all(isinstance(tree.get(name), TensorEntry) for tree in trees)]
    for align in ALIGNED if recorded else (1,):
        places, at = {}, 0
        for name, shape in shapes.items():
            places[name] = at = -(-at // align) * align
            at += prod(shape)
        pieces_fit = all(
            [piece.entry.numel if piece else 0 for piece in _pieces(chunks, places[name], prod(shapes[name]))]
            == [tree[name].numel for tree in trees]
            for name in recorded
        ) or len(chunks) != len(trees)
        if at <= size < at + max(len(trees), 1) and pieces_fit:
            return iter(places.items())
    count = sum(map(prod, shapes.values()))
    what = f"{key} has {counted(size, 'element')}, but its parameters have {count:,}"
    why = f"They are {counted(len(shapes), 'parameter')}: {listed([*shapes], 3)}. Nothing was written."
    raise _conflict(folder, what, why)


def _pieces(chunks: Sequence[Piece], begin: int, count: int) -> list[Piece | None]:
    """What each chunk of a vector holds of a range of it (None: nothing)."""
    common = [(chunk, overlap(((begin,), (count,)), chunk.box)) for chunk in chunks]
    return [box and Piece(chunk.part(box), (box[0][0] - begin,), chunk.owner) for chunk, box in common]
