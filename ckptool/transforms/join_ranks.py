"""Joins the files of tensor- and pipeline-parallel ranks into one model, by rules that say how each tensor is divided.

A tensor in a rank's file becomes pieces of the whole one; nothing is read before it is written. What is not a weight
(optimizer, random states, arguments) stays as each rank saved it, under `ranks`.

Source: megatron/training/checkpointing.py (`mp_rank_TT_PPP`, `model0` of virtual stages), llama/generation.py
(`consolidated.XX.pth`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ckptool import formats
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.files import Folder, folder_at, open_input
from ckptool.checkpoint.nodes import Object
from ckptool.commands import command
from ckptool.errors import (
    CkptoolError,
    Conflict,
    Corrupt,
    OnlyAPart,
    Truncated,
    Unsupported,
    UsageError,
    counted,
    listed,
    quoted,
)
from ckptool.formats import Opened, PathLike, changeable, open_file, split
from ckptool.formats.folder import CONSOLIDATED, MODEL_PARALLEL, mixed
from ckptool.formats.layouts import megatron
from ckptool.formats.model_folder import configuration
from ckptool.formats.other_ranks import ranks_in
from ckptool.formats.pieces import Joiner, Piece
from ckptool.names.pattern import Lookup
from ckptool.names.rule_files import JOIN_LOOK
from ckptool.names.rules import JOIN_WAYS, TAKEN_BEFORE, WHOLE_KEY, Rule, Translation, refuse_idle
from ckptool.names.steps import Scope, steps_of

WEIGHTS = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt", "model.pt")  # Megatron's, NeMo 1's, verl's
OPTIMIZER = "distrib_optim.pt"
_CHUNK = re.compile(r"model([0-9]{1,3})?")


class _Rank(NamedTuple):
    """A file's rank in tensor and pipeline parallelism, and its tree. name: that of its folder or file."""

    name: str
    tensor: int
    stage: int
    tree: dict[Any, Any]


Shares = list[tuple[int, Piece]]
"""The files' shares of a tensor, each with its tensor-parallel rank."""


def open_joined(
    file: PathLike,
    rules: Translation,
    at: str | None = None,
    *,
    given: Mapping[str, int] = {},
    like: PathLike | None = None,
) -> Opened:
    """Opens a folder whose ranks' files are joined by rules; with a layout's rules, anything else as it is.

    given: numbers for the rules, beside those of the configuration, which is that of the folder `like` where none is
    beside the files.
    Raises what `joined` raises, and `UsageError` for rules about ranks where there are none.
    """
    name, place = split(file)
    checkpoint = joined(name, rules, given, like)
    if checkpoint is None and not rules.of_layout:
        what = f"{name} has no files named after model-parallel ranks, as Megatron's (mp_rank_XX) and Llama's are"
        raise UsageError(what, "translate changes whole tensors.", f"See what it is: {command('inspect', name)}")
    if checkpoint is None:
        checkpoint = changeable(open_file(name)).checkpoint
        if checkpoint.part is not None:
            what = f"{name} is only a part of a checkpoint: {checkpoint.part.label}"
            above, leaf = os.path.split(os.path.dirname(name))
            folder = quoted((above if MODEL_PARALLEL.fullmatch(leaf) else os.path.join(above, leaf)) or ".")
            raise OnlyAPart(what, "The rules join the files of all ranks.", f"Name the folder of all of them: {folder}")
    return Opened(checkpoint, at if at is not None else place, name)


def joined(path: str, rules: Translation, given: Mapping[str, int], like: PathLike | None = None) -> Checkpoint | None:
    """The whole model in a folder of ranks' files; None for anything else. Opens each file, reads no tensor data.

    Raises `UsageError` for tensors that no rule matches, or that do not fit their rule; `NoMatch` for a rule without
    tensors; `Truncated` for missing ranks; `Conflict` for replicas that differ, and files of two iterations.
    """
    source = open_input(path)
    if not isinstance(source, Folder):
        return None
    source = megatron.latest(source) if megatron.is_run(source) else source
    names = list[tuple[tuple[int, ...], str]]()  # the ranks' files, with the numbers in their names
    for name in source.names:
        if match := CONSOLIDATED.fullmatch(name):
            names.append(((int(match["rank"]),), name))
        elif MODEL_PARALLEL.fullmatch(name) and folder_at(inside := os.path.join(source.path, name)):
            members = [member for member in (*WEIGHTS, OPTIMIZER) if member in Folder(inside)]
            if not set(members) & set(WEIGHTS):
                what = f"{source}: {name} has none of {listed(WEIGHTS, 4)}"
                raise Truncated(
                    what, "The weights are in one of them: it is missing, or was renamed.", "Copy all files."
                )
            names += [(tuple(map(int, name.split("_")[2:])), f"{name}/{member}") for member in members]
    names = names or [(numbers, name) for name, numbers in ranks_in(source).items()]
    if not names:
        return None
    joiner, ranks, optimizers = Joiner(source), list[_Rank](), dict[str, Any]()
    sizes, steps = [1, 1], dict[int, str]()
    for numbers, file in names:
        above, _, last = file.rpartition("/")
        opened = Folder(os.path.join(source.path, above)).open(last)
        source.adopt(file, opened)
        rank_file = formats.read_alone(opened)
        joiner.notes = [*({note.code: note for note in (*joiner.notes, *rank_file.notes)}).values()]
        joiner.discarded += rank_file.discarded
        owner, tree = file.partition("/")[0], rank_file.tree
        if last == OPTIMIZER:
            optimizers[owner] = tree
            continue
        if not isinstance(tree, dict):
            raise Corrupt(f"{source}: {file} is not a dictionary", "It is not one rank's file of a model.")
        args = tree["args"].attributes if isinstance(tree.get("args"), Object) else {}
        declared: list[Any] = [args.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")]
        if len(numbers) > 2 or (type(declared[2]) is int and declared[2] > 1):
            what = f"{source}: {file} has expert parallelism, which shards the experts"
            raise Unsupported(what, "Rules join tensor and pipeline parallelism only.", "Save it as torch_dist.")
        for axis, number in enumerate((*numbers, 0)[:2]):
            size = declared[axis] if type(declared[axis]) is int and declared[axis] < 1 << 20 else 1
            sizes[axis] = max(sizes[axis], number + 1, size)
        if type(iteration := tree.get("iteration")) is int:
            steps.setdefault(iteration, owner)
        model = tree if any(map(_is_chunk, tree)) else {"model": tree}  # all of the file
        ranks.append(_Rank(owner, numbers[0], numbers[1] if len(numbers) > 1 else 0, model))
    if len(ranks) != prod(sizes):  # every stage has every rank, as many as the arguments say
        world = f"{counted(prod(sizes), 'rank')}, {sizes[0]:,} tensor x {sizes[1]:,} pipeline parallel"
        what = f"{source} has {counted(len(ranks), 'file')} of {world}"
        raise Truncated(what, f"There are {listed([rank.name for rank in ranks], 4)}.", "Copy all of them.")
    if len(steps) > 1:
        (one, first), (other, second) = sorted(steps.items())[:2]
        raise mixed(source, first, second, f"one is of iteration {one:,}, the other of {other:,}")
    megatron.step_of(source, next(iter(steps), None))
    scope = Scope(given, rules.variables, configuration(Checkpoint({}, "", source=source), like), {})
    model_tree = _joined_model(joiner, ranks, rules, scope.lookup)
    beside = {rank.name: {key: value for key, value in rank.tree.items() if not _is_chunk(key)} for rank in ranks}
    for owner, tree in optimizers.items():
        beside[owner][OPTIMIZER] = tree
    tree = {"model": model_tree, "ranks": beside} if any(beside.values()) else model_tree
    return joiner.checkpoint("model-parallel", tree, "model-parallel ranks, joined by rules", len(ranks))


def _is_chunk(key: Any) -> bool:
    return isinstance(key, str) and _CHUNK.fullmatch(key) is not None


# The tensors ---------------------------------------------------------------------------------------------------------


def _joined_model(joiner: Joiner, ranks: list[_Rank], rules: Translation, lookup: Lookup) -> dict[str, Any]:
    model: dict[str, Any] = {}
    shares: dict[str, Shares] = {}
    for name, rank, value in _named_values(ranks, rules.layers):
        if isinstance(value, TensorEntry):
            share = Piece(value, (0,) * len(value.shape), rank.name)
            shares.setdefault(name, []).append((rank.tensor, share))
        else:
            model.setdefault(name, value)
    steps, unmatched = steps_of(rules.join, shares)
    if unmatched:
        what = f"{rules.path} has no rule for {counted(len(unmatched), 'tensor')}: {listed(unmatched, 4)}"
        raise UsageError(
            what, "Each tensor needs one, even if only `replicated` or `skip`. Nothing was written.", JOIN_LOOK
        )
    if not rules.of_layout:
        used = {step.rule.origin for step in steps}
        refuse_idle((rule for rule in rules.join if rule.origin not in used), TAKEN_BEFORE, WHOLE_KEY)
    world = max(rank.tensor for rank in ranks) + 1
    for step in steps:
        (name,), rule, (op,) = step.keys, step.rule, step.rule.chain
        if op.name == "skip":
            continue
        like = shares[op.like][0][1].entry.shape if op.like in shares else ()
        try:
            values = [expression.value(lookup) for expression in op.numbers]
        except UsageError as error:
            raise rule.within(error) from None
        numbers = dict(zip(JOIN_WAYS[op.name].numbers, values, strict=False))
        if any(number < 1 for number in values):
            raise rule.error(f"it has {numbers}", "Each is a whole number above zero.", JOIN_LOOK)
        model[name] = _join_shares(joiner, name, rule, numbers, shares[name], world, like)
        if name in joiner.different and op.name != "first":
            what, why = f"{joiner.where}: {name}: {joiner.different[name]}", "By that rule they should be the same."
            fix = "If each rank has a part, give the way it is sharded; if any rank's will do: first."
            raise rule.error(what, why, fix, kind=Conflict)
    return model


def _named_values(ranks: Sequence[_Rank], layers: tuple[str, ...]) -> Iterator[tuple[str, _Rank, Any]]:
    """Every value of the ranks' models by its name in the whole model, with layers counted through all stages.

    Virtual stages (`model0`, `model1`) go round the pipeline: the first of every stage, then the second of every one.
    """
    before = dict.fromkeys(layers, 0)
    chunks = sorted({(int(key[5:] or 0), rank.stage, key) for rank in ranks for key in rank.tree if _is_chunk(key)})
    for _, stage, chunk in chunks:
        counts = dict.fromkeys(layers, 0)
        for rank in ranks:
            if rank.stage != stage or chunk not in rank.tree:
                continue
            for name, value in _flat_items(rank.tree[chunk]):
                for prefix in layers:
                    number, dot, rest = name.removeprefix(f"{prefix}.").partition(".")
                    if name.startswith(f"{prefix}.") and re.fullmatch("[0-9]{1,6}", number):
                        counts[prefix] = max(counts[prefix], int(number) + 1)
                        name = f"{prefix}.{int(number) + before[prefix]}{dot}{rest}"
                yield name, rank, value
        before = {prefix: before[prefix] + counts[prefix] for prefix in layers}


def _flat_items(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries by their dotted names."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict) and value:
            yield from _flat_items(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _join_shares(
    joiner: Joiner, name: str, rule: Rule, how: dict[str, int], shares: Shares, world: int, like: tuple[int, ...]
) -> TensorEntry:
    """The whole tensor, joined in the way that a rule names. how: the rule's numbers.  world: how many ranks there are.
    like: the shape of the tensor that the rule names.

    Raises `UsageError` where the shares do not fit the rule, and what `Joiner.tensor` raises.
    """

    def unfit(what: str) -> CkptoolError:
        return rule.error(f"{joiner.where}: {name} {what}", "That does not fit the rule.", JOIN_LOOK)

    (op,), (_, first) = rule.chain, shares[0]
    way, shape, dtype = JOIN_WAYS[op.name], first.entry.shape, first.entry.dtype
    if way.axis is None:
        pieces = [share for _, share in shares]
        return joiner.replicated(name, pieces) if op.name == "first" else joiner.tensor(name, shape, dtype, pieces)
    axis, copies = way.axis, 1
    if op.name == "heads" and world > how["heads"]:  # neighbouring ranks have the same rows
        if world % how["heads"]:
            raise unfit(f"is in {counted(world, 'rank')}, which {counted(how['heads'], 'head')} cannot be divided over")
        copies = world // how["heads"]
    if op.name == "width":  # along the dimension that makes the rows as long as `like`
        widths = {rank: sum(share.entry.shape[-1:]) for rank, share in shares}
        if like not in [(sum(shape[-1:]),), (sum(widths.values()),)]:
            shown = f"is {list(shape)} in {counted(world, 'file')}, and {op.like} is {list(like)}"
            raise unfit(f"{shown}: a file may be missing")
        axis = int(like != shape[-1:])
    if len(shape) <= axis:
        raise unfit(f"has {counted(len(shape), 'dimension')}")
    lengths_of = {rank // copies: sum(share.entry.shape[axis : axis + 1]) for rank, share in shares}
    if lacking := [str(rank) for rank in range(world // copies) if rank not in lengths_of]:
        raise unfit(f"is not in the files of tensor rank {listed(lacking, 4)}")
    lengths = [lengths_of[rank] for rank in range(world // copies)]
    total = sum(lengths)
    rows, parts = way.rows(how) if way.rows else total, way.parts(how)
    if total < rows or (way.rows_are and total != rows):
        would = f", and {rows:,} would be {way.rows_are}" if way.rows_are else ""
        raise unfit(f"has {counted(total, 'row')} in all{would}")
    if any(length % sum(parts) for length in lengths):
        raise unfit(f"has {listed(sorted(map(str, set(lengths))))} rows, not a multiple of {sum(parts)}")
    pieces = []
    for number, share in shares:
        rank = number // copies
        if share.entry.shape[axis : axis + 1] != (lengths[rank],):
            raise unfit(f"is {list(share.entry.shape)} in {share.owner}, a different shape than elsewhere")
        unit = lengths[rank] // sum(parts)
        for before, part in zip(accumulate(parts, initial=0), parts, strict=False):
            begin = (total * before + sum(lengths[:rank]) * part) // sum(parts)
            entry = share.entry.narrow(axis, unit * before, max(0, min(unit * part, rows - begin)))  # padding is last
            offsets = [0] * len(entry.shape)
            offsets[axis] = min(begin, rows)
            pieces.append(Piece(entry, tuple(offsets), share.owner))
    return joiner.tensor(name, (*shape[:axis], rows, *shape[axis + 1 :]), dtype, pieces)
