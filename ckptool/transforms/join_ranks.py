"""Joins the files of tensor- and pipeline-parallel ranks into one model, by rules that say how each tensor is divided.

A tensor in a rank's file becomes blocks of the whole one; nothing is read before it is written. What is no weight
(optimizer, random states, arguments) stays what each rank saved, under `ranks`.

Source: megatron/core/tensor_parallel/layers.py (rows and columns), transformer/mlp.py (halves of gated linear units),
transformer/attention.py (groups of heads), megatron/training/checkpointing.py (`mp_rank_TT_PPP`, `model0` of virtual
stages), llama/generation.py (`consolidated.XX.pth`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

from ckptool import formats
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.files import Folder, Source, open_input
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.tree import Path, address
from ckptool.commands import command
from ckptool.errors import (
    Conflict,
    Corrupt,
    NoMatch,
    OnlyAPart,
    Truncated,
    Unsupported,
    UsageError,
    counted,
    listed,
    quoted,
)
from ckptool.formats.folder import CONSOLIDATED, MODEL_PARALLEL
from ckptool.formats.layouts import megatron
from ckptool.formats.model_folder import configuration
from ckptool.formats.opening import Opened, PathLike, open_to_change, open_whole, split
from ckptool.formats.pieces import Joiner, Piece
from ckptool.names.arithmetic import Lookup
from ckptool.names.joining import JOIN_LOOK, JoinRule, JoinRules, read_join_rules

WEIGHTS = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER = "distrib_optim.pt"
_CHUNK = re.compile(r"model([0-9]{1,3})?")

Numbers = Callable[[dict[str, Any]], Lookup]
"""The numbers that names in rules stand for, by the model's configuration."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """The place of a file in tensor and pipeline parallelism, and what is in it. name: that of its folder or file."""

    name: str
    tensor: int
    stage: int
    tree: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor in the file of a rank."""

    entry: TensorEntry
    tensor: int
    owner: str


def open_by_rules(file: PathLike, path: PathLike, at: str | None = None, *, part: bool = False) -> Opened:
    """Opens a folder whose ranks' files are joined by the rules in `path`; of anything else, the layers are unstacked.

    Raises what `read_join_rules`, `joined` and `unstacked` raise, and `UsageError` for rules about ranks that are not
    there.
    """
    return open_joined(file, read_join_rules(os.fspath(path)), at, part=part)


def open_joined(
    file: PathLike, rules: JoinRules, at: str | None = None, *, part: bool = False, numbers: Numbers | None = None
) -> Opened:
    """The same by rules that were read."""
    name, place = split(file)
    found = joined(name, rules, numbers)
    if found is None and not rules.optional and (rules.join or rules.layers or not rules.unstack):
        what = f"{name} has no files of model-parallel ranks, as Megatron (mp_rank_XX) and Llama have them"
        look = f"See what it is: {command('inspect', name)}"
        raise UsageError(what, "`unstack` is the only rule for tensors that are whole.", look)
    whole = found if found is not None else _whole(name, rules, part)
    return Opened(unstacked(whole, rules.unstack, optional=rules.optional), at if at is not None else place, name)


def _whole(name: str, rules: JoinRules, part: bool) -> Checkpoint:
    """The checkpoint that is not in ranks' files. Raises `OnlyAPart` for one of those by itself."""
    if not rules.optional:
        return open_whole(name, part=part).checkpoint
    found = open_to_change(name).checkpoint
    if found.part is not None:
        what = f"{name} is only a part of a checkpoint: {found.part.label}"
        folder = quoted(os.path.dirname(name) or ".")
        raise OnlyAPart(what, "The rules join the files of all ranks.", f"Name the folder of all of them: {folder}")
    return found


def joined(path: str, rules: JoinRules, numbers: Numbers | None = None) -> Checkpoint | None:
    """The one model in a folder of ranks' files; None for anything else. Opens each file, and reads no tensor data.

    numbers: of names in the rules; by default those of the configuration beside the files.

    Raises `UsageError` for tensors that no rule matches, or that do not fit theirs; `NoMatch` for a rule without
    tensors; `Truncated` for missing ranks; `Conflict` for replicas that differ, and files of two iterations.
    """
    source = open_input(path)
    if isinstance(source, Folder) and megatron.is_run(source):
        source = megatron.latest(source)
    if not isinstance(source, Folder) or not (names := _files(source)):
        return None
    found = [(place, name, formats.read_alone(_opened(source, name))) for place, name in names]
    for _, name, each in found:
        if each.source is not None:
            source.adopt(name, each.source)
    ranks = [_rank(source, place, name, each.tree) for place, name, each in found if not name.endswith(OPTIMIZER)]
    _check_world(source, ranks)
    config = configuration(Checkpoint({}, "", source=source))
    model, joiner = _model(source, ranks, rules, config.get if numbers is None else numbers(config))
    beside = {rank.name: {key: value for key, value in rank.tree.items() if not _is_chunk(key)} for rank in ranks}
    for _, name, each in found:
        if name.endswith(OPTIMIZER):
            beside[name.partition("/")[0]][OPTIMIZER] = each.tree
    notes = {note.code: note for _, _, each in found for note in each.notes} | {n.code: n for n in joiner.notes()}
    tree = {"model": model, "ranks": beside} if any(beside.values()) else model
    facts = {"engine": "model-parallel ranks, joined by rules", "ranks": len(ranks)}
    discarded = tuple(call for _, _, each in found for call in each.discarded)
    return Checkpoint(tree, "model-parallel", facts, source, notes=tuple(notes.values()), discarded=discarded)


# The ranks -----------------------------------------------------------------------------------------------------------


def _files(folder: Folder) -> list[tuple[tuple[int, ...], str]]:
    """The files of ranks, with the numbers in their names."""
    found: list[tuple[tuple[int, ...], str]] = []
    for name in folder.names:
        if match := CONSOLIDATED.fullmatch(name):
            found.append(((int(match["rank"]),), name))
        elif MODEL_PARALLEL.fullmatch(name) and os.path.isdir(os.path.join(folder.path, name)):
            inside = [each for each in (*WEIGHTS, OPTIMIZER) if each in Folder(os.path.join(folder.path, name))]
            if not set(inside) & set(WEIGHTS):
                raise Truncated(f"{folder}: {name} has no {WEIGHTS[0]}", "It was not copied along.", "Copy all files.")
            found += [(tuple(map(int, name.split("_")[2:])), f"{name}/{each}") for each in inside]
    return found


def _opened(folder: Folder, name: str) -> Source:
    """A file of a rank; many of them may be open at once."""
    *above, last = name.split("/")
    return Folder(os.path.join(folder.path, *above)).open(last)


def _rank(folder: Folder, place: tuple[int, ...], name: str, tree: Any) -> _Rank:
    if not isinstance(tree, dict):
        raise Corrupt(f"{folder}: {name} is not a dictionary", "It is no rank's file of a model.")
    args = tree["args"].attributes if isinstance(tree.get("args"), Object) else {}
    experts = args.get("expert_model_parallel_size", 1)
    if len(place) > 2 or (type(experts) is int and experts > 1):
        what = f"{folder}: {name} is of expert parallelism, which divides the experts over ranks"
        raise Unsupported(what, "Rules join tensor and pipeline parallelism only.", "Save it as torch_dist.")
    if not any(map(_is_chunk, tree)):  # all of the file is the model
        tree = {"model": tree}
    return _Rank(name.partition("/")[0], place[0], place[1] if len(place) > 1 else 0, tree)


def _is_chunk(key: Any) -> bool:
    return isinstance(key, str) and _CHUNK.fullmatch(key) is not None


def _check_world(folder: Folder, ranks: list[_Rank]) -> None:
    """Raises `Truncated` unless each stage has each rank, as many as the arguments say; `Conflict` for two steps."""
    sizes = [max(rank.tensor for rank in ranks) + 1, max(rank.stage for rank in ranks) + 1]
    steps: dict[Any, str] = {}
    for rank in ranks:
        args = rank.tree["args"].attributes if isinstance(rank.tree.get("args"), Object) else {}
        for axis, kind in enumerate(("tensor", "pipeline")):
            size = args.get(f"{kind}_model_parallel_size")
            sizes[axis] = max(sizes[axis], size) if type(size) is int and size < 1 << 20 else sizes[axis]
        if type(iteration := rank.tree.get("iteration")) is int:
            steps.setdefault(iteration, rank.name)
    if len(ranks) != prod(sizes):
        world = f"{counted(prod(sizes), 'rank')}, {sizes[0]:,} tensor x {sizes[1]:,} pipeline parallel"
        what = f"{folder} has {counted(len(ranks), 'file')} of {world}"
        raise Truncated(what, f"There are {listed([rank.name for rank in ranks], 4)}.", "Copy all of them.")
    if len(steps) > 1:
        (one, first), (other, second) = sorted(steps.items())[:2]
        what = f"{folder}: {first} is of iteration {one:,}, {second} of {other:,}"
        raise Conflict(what, "They are of two checkpoints.", "Copy all files of one iteration again.")
    megatron.step_of(folder, next(iter(steps), None))


# The tensors ---------------------------------------------------------------------------------------------------------


def _model(folder: Folder, ranks: list[_Rank], rules: JoinRules, lookup: Lookup) -> tuple[dict[str, Any], Joiner]:
    joiner, model = Joiner(str(folder)), dict[str, Any]()
    pieces: dict[str, list[_Piece]] = {}
    for name, rank, value in _named(ranks, rules.layers):
        if isinstance(value, TensorEntry):
            pieces.setdefault(name, []).append(_Piece(value, rank.tensor, rank.name))
        else:
            model.setdefault(name, value)
    ruled = {name: next((rule for rule in rules.join if rule.matches(name)), None) for name in pieces}
    if lacking := [name for name, rule in ruled.items() if rule is None]:
        what = f"{rules.path} has no rule for {counted(len(lacking), 'tensor')}: {listed(lacking, 4)}"
        raise UsageError(what, "Each tensor needs one, if only `replicated` or `skip`. Nothing was written.", JOIN_LOOK)
    if not rules.optional and (idle := [rule for rule in rules.join if rule not in ruled.values()]):
        raise NoMatch(f"{idle[0]} matches no tensor that no rule before it does", "Patterns match whole names.")
    world = max(rank.tensor for rank in ranks) + 1
    for name, rule in ruled.items():
        assert rule is not None
        if rule.kind == "skip":
            continue
        like = pieces[rule.like][0].entry.shape if rule.like in pieces else ()
        fitting = _Fitting(joiner.where, name, rule.bound(lookup), pieces[name], world, like)
        model[name] = fitting.first(joiner) if rule.kind == "first" else fitting.join(joiner)
        if name in joiner.different and rule.kind != "first":
            raise Conflict(
                f"{joiner.where}: {name}: {joiner.different[name]}",
                f"By {rule}, they should be the same.",
                "If each has its own part, name the way in which it is divided; if one will do: first.",
            )
    return model, joiner


def _named(ranks: Sequence[_Rank], layers: tuple[str, ...]) -> Iterator[tuple[str, _Rank, Any]]:
    """Every value of the models by its name in the whole: layers counted through all stages.

    Virtual stages (`model0`, `model1`) go round the pipeline: the first of each stage, then the second of each.
    """
    before = dict.fromkeys(layers, 0)
    chunks = sorted({(int(key[5:] or 0), rank.stage, key) for rank in ranks for key in rank.tree if _is_chunk(key)})
    for _, stage, chunk in chunks:
        counts = dict.fromkeys(layers, 0)
        for rank in ranks:
            if rank.stage != stage or chunk not in rank.tree:
                continue
            for name, value in _flat(rank.tree[chunk]):
                for prefix in layers:
                    number, dot, rest = name.removeprefix(f"{prefix}.").partition(".")
                    if name.startswith(f"{prefix}.") and re.fullmatch("[0-9]{1,6}", number):
                        counts[prefix] = max(counts[prefix], int(number) + 1)
                        name = f"{prefix}.{int(number) + before[prefix]}{dot}{rest}"
                yield name, rank, value
        before = {prefix: before[prefix] + counts[prefix] for prefix in layers}


def _flat(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries by their dotted names."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@dataclass(frozen=True, slots=True)
class _Fitting:
    """The pieces of one tensor, and the rule that says how they fit. world: the number of tensor-parallel ranks.

    like: the shape of the tensor that the rule names.
    """

    where: str
    name: str
    rule: JoinRule
    pieces: list[_Piece]
    world: int
    like: tuple[int, ...] = ()

    def first(self, joiner: Joiner) -> TensorEntry:
        return joiner.replicated(self.name, [Piece(piece.entry, (), piece.owner) for piece in self.pieces])

    def join(self, joiner: Joiner) -> TensorEntry:
        """The whole tensor. Raises `UsageError` where the pieces do not fit, and what `Joiner.tensor` raises."""
        shape, dtype = self.pieces[0].entry.shape, self.pieces[0].entry.dtype
        if self.rule.kind == "replicated":
            chunks = [Piece(piece.entry, (0,) * len(piece.entry.shape), piece.owner) for piece in self.pieces]
            return joiner.tensor(self.name, shape, dtype, chunks)
        if self.rule.kind == "heads" and (same := self._ranks_of_a_head()) > 1:
            pieces = [replace(piece, tensor=piece.tensor // same) for piece in self.pieces]
            return replace(self, pieces=pieces, world=self.world // same).join(joiner)
        axis = self._axis()
        sizes = {piece.tensor: piece.entry.shape[axis : axis + 1] for piece in self.pieces}
        if len(shape) <= axis:
            raise self._unfit(f"has {counted(len(shape), 'dimension')}")
        if lacking := [str(rank) for rank in range(self.world) if rank not in sizes]:
            raise self._unfit(f"is not in the files of tensor rank {listed(lacking, 4)}")
        lengths = [sizes[rank][0] if sizes[rank] else 0 for rank in range(self.world)]
        total = self._checked(axis, lengths)
        chunks = [chunk for piece in self.pieces for chunk in self._blocks(piece, axis, lengths)]
        return joiner.tensor(self.name, (*shape[:axis], total, *shape[axis + 1 :]), dtype, chunks)

    def _ranks_of_a_head(self) -> int:
        """How many ranks in a row have the same rows, since there are fewer heads than ranks."""
        heads = self.rule.numbers["heads"]
        if self.world > heads and self.world % heads:
            raise self._unfit(
                f"is in {counted(self.world, 'rank')}, which {counted(heads, 'head')} cannot be divided over"
            )
        return max(1, self.world // heads)

    def _axis(self) -> int:
        """The dimension along which the pieces are divided: by `width`, that which makes the rows as long as `like`."""
        if self.rule.kind != "width":
            return int(self.rule.kind == "row")
        shape = self.pieces[0].entry.shape
        widths = {piece.tensor: sum(piece.entry.shape[-1:]) for piece in self.pieces}
        if self.like not in [(sum(shape[-1:]),), (sum(widths.values()),)]:
            given = f"is {list(shape)} in {counted(self.world, 'file')}"
            raise self._unfit(f"{given}, and {self.rule.like} is {list(self.like)}: a file may be missing")
        return int(self.like != shape[-1:])

    def _checked(self, axis: int, lengths: list[int]) -> int:
        """The length of the whole on the axis, if the numbers of the rule say the same."""
        total, numbers = sum(lengths), self.rule.numbers
        if self.rule.kind == "qkv":
            expected = (numbers["heads"] + 2 * numbers["kv_heads"]) * numbers["head_dim"]
            if total != expected:
                raise self._unfit(
                    f"has {counted(total, 'row')} in all, and {expected:,} would be queries, keys and values"
                )
        if self.rule.kind == "vocab" and total < numbers["rows"]:
            raise self._unfit(f"has {counted(total, 'row')} in all")
        return min(total, numbers.get("rows", total))

    def _blocks(self, piece: _Piece, axis: int, lengths: list[int]) -> Iterator[Piece]:
        """The parts of a rank's tensor that lie together in the whole one."""
        numbers = self.rule.numbers
        queries = numbers["heads"] // numbers["kv_heads"] if self.rule.kind == "qkv_blocks" else 1
        parts = {"glu": (1, 1), "qkv_blocks": (queries, 1, 1)}.get(self.rule.kind, (1,))
        if any(length % sum(parts) for length in lengths):
            raise self._unfit(f"has {listed(sorted(map(str, set(lengths))))} rows, not a multiple of {sum(parts)}")
        of_whole = numbers.get("rows", sum(lengths))
        for before, part in zip(accumulate(parts, initial=0), parts, strict=False):
            own = lengths[piece.tensor] // sum(parts)
            begin = (sum(lengths) * before + sum(lengths[: piece.tensor]) * part) // sum(parts)
            size = max(0, min(own * part, of_whole - begin))  # padding lies behind
            if piece.entry.shape[axis : axis + 1] == (lengths[piece.tensor],):
                entry = piece.entry.narrow(axis, own * before, size)
                at = tuple(min(begin, of_whole) * (each == axis) for each in range(len(entry.shape)))
                yield Piece(entry, at, piece.owner)
            else:
                raise self._unfit(f"is {list(piece.entry.shape)} in {piece.owner}, another shape than elsewhere")

    def _unfit(self, what: str) -> UsageError:
        return UsageError(f"{self.where}: {self.name} {what}", f"That does not fit {self.rule}.", JOIN_LOOK)


# Stacked layers ------------------------------------------------------------------------------------------------------


def unstacked(checkpoint: Checkpoint, prefixes: Iterable[str], *, optional: bool = False) -> Checkpoint:
    """The checkpoint with a tensor for each layer where one had all of them: `PREFIX.X` becomes `PREFIX.0.X`, …

    So do the optimizer's states of such tensors. Raises `NoMatch` for a prefix of none, `UsageError` for tensors of
    different numbers of layers.
    """
    tree = checkpoint.tree
    for prefix in prefixes:
        counts: dict[int, str] = {}
        tree = _unstack(tree, re.compile(re.escape(prefix) + r"\.(?![0-9]+(?:\.|$))(.+)", re.DOTALL), prefix, counts)
        if not counts and not optional:
            what = f"no tensor of stacked layers has a name that begins with {prefix}."
            raise NoMatch(what, "unstack takes the name up to the number of the layer.")
        if len(counts) > 1:
            (one, first), (other, second) = sorted(counts.items())[:2]
            what = f"{first} has {counted(one, 'layer')}, {second} has {other:,}"
            raise UsageError(what, "The tensors below a prefix have one axis of layers in front.", JOIN_LOOK)
    return replace(checkpoint, tree=tree)


def _unstack(node: Any, pattern: re.Pattern[str], prefix: str, counts: dict[int, str], path: Path = ()) -> Any:
    if isinstance(node, list) and path[-1:] == ("params",):
        count = next(iter(counts), 0)
        return [new for name in node for new in (_names(name, pattern, prefix, count) or [name])]
    if isinstance(node, list):
        return [_unstack(each, pattern, prefix, counts, (*path, i)) for i, each in enumerate(node)]
    if type(node) is not dict:
        return node
    found: dict[Any, Any] = {}
    for key, value in node.items():
        place = (*path, key)
        count = _layers(value) if _names(key, pattern, prefix, 1) else 0
        if count:
            counts.setdefault(count, address(place))
            parts = zip(_names(key, pattern, prefix, count), range(count), strict=True)
            found |= {name: _layer(value, number, count) for name, number in parts}
        else:
            found[key] = _unstack(value, pattern, prefix, counts, place)
    return found


def _names(key: Any, pattern: re.Pattern[str], prefix: str, count: int) -> list[str]:
    match = pattern.fullmatch(key) if isinstance(key, str) else None
    return [f"{prefix}.{number}.{match[1]}" for number in range(count)] if match else []


def _layers(value: Any) -> int:
    """The number of layers that a tensor is stacked of, or an optimizer's state for one; 0 for anything else."""
    if isinstance(value, dict):
        return max((_layers(slot) for slot in value.values() if not isinstance(slot, dict)), default=0)
    return value.shape[0] if isinstance(value, TensorEntry) and value.shape else 0


def _layer(value: Any, number: int, count: int) -> Any:
    if isinstance(value, dict):
        return {key: _layer(slot, number, count) for key, slot in value.items()}
    if not isinstance(value, TensorEntry) or value.shape[:1] != (count,):
        return value
    begin = value.offset + number * value.stride[0]
    return replace(value, shape=value.shape[1:], stride=value.stride[1:], offset=begin)
