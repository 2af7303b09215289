"""The flat vectors of ZeRO: what each rank has of them, as pieces of the tensors that lie in them.

Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`), bf16_optimizer.py, engine.py
(`_save_checkpoint`), utils/groups.py (which ranks share an expert). Stages 1 and 2 lay the parameters of a group one
after the other and divide that vector; the last ranks leave out its padding. Stage 3 divides every parameter by itself,
as many elements to each rank, the last filled up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, chain, repeat
from math import prod
from typing import Any

from ckptool.checkpoint import Composite, Note, TensorEntry
from ckptool.checkpoint.nodes import Global, Object, fields, inside, items
from ckptool.commands import OUT_SAFETENSORS, command
from ckptool.errors import Unsupported, counted
from ckptool.facts import replace
from ckptool.formats.distributed import sizes_of
from ckptool.formats.folder import complete, damaged, lacks, mixed, number_in
from ckptool.formats.pieces import Joiner, Piece, Vector, refuse_other
from ckptool.pickles.torch_objects import BUILDERS

STEPS = "steps-differ"  # of the note
_LOCAL_EXPERT = re.compile(r"(?P<module>.*\.deepspeed_experts\.)(?P<number>\d{1,9})(?P<rest>\..*)", re.DOTALL)
_VECTORS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_SUB_PARTITIONS = "local_sub_partitions_of_fp32_groups"
_STATES = ("base_optimizer_state", "optimizer_state_dict")
# What says how the vectors are laid out; of no use when they are joined.
_LAYOUT = (*_VECTORS, *_STATES, "param_slice_mappings", "group_paddings", "param_alignment_paddings")
_PLAIN = frozenset({int, float, bool, str, tuple, type(None)})

Shapes = dict[str, tuple[int, ...]]
"""The shapes of tensors by name, in the order in which they lie in a vector."""


class StageFiles:
    """What the ranks of one stage of a pipeline saved; without a pipeline, all of them. `models`, `optimizers`: their
    files by rank. Below stage 3 of ZeRO there are model states of the first rank alone. `file`: the first of them."""

    def __init__(self, joiner: Joiner, models: dict[int, str], optimizers: dict[int, str]) -> None:
        self.joiner, self.folder = joiner, joiner.folder
        self.models, self.optimizers = models, optimizers
        self.file = models[min(models)] if models else ""

    @cached_property
    def states(self) -> dict[str, Any]:
        """The first rank's model states."""
        return self.model(self.file)

    def model(self, file: str) -> dict[str, Any]:
        """A rank's model states; of a pipeline, `module` is None. Raises `Corrupt` for something else."""
        tree: dict[str, Any] = fields(self.joiner.open(file).tree)
        if not isinstance(tree.get("module", ()), (dict, type(None))):
            raise damaged(self.folder, f"{file} has no `module` with a model's weights")
        return tree

    @cached_property
    def shares(self) -> list[Share]:
        """What all ranks have of the optimizer. Raises `Conflict` for shares of several checkpoints, `Corrupt` where
        some are missing."""
        # With this option DeepSpeed's own record of the pieces has another order than its vectors.
        is_mapped = not inside(self.states, "ds_config.zero_optimization.round_robin_gradients")
        trees = {(rank, name): self.joiner.open(name).tree for rank, name in sorted(self.optimizers.items())}
        if any(_SUB_PARTITIONS in fields(fields(tree).get("optimizer_state_dict")) for tree in trees.values()):
            raise self._too_old("the f32 weights are in sub-partitions")
        shares = [Share(*rank_file, tree, is_mapped) for rank_file, tree in trees.items()]
        for other in shares[1:]:
            refuse_other(self.folder, (shares[0].file, shares[0].facts), (other.file, other.facts))
        if shares:
            complete(self.folder, self.optimizers, max(shares[0].counts), shares[0].file)
        return shares

    @cached_property
    def groups(self) -> list[dict[str, tuple[int, ...] | None]]:
        """The names and shapes of the parameters of each group; no shapes where only the order of their pieces is
        recorded."""
        if self.states.get("param_shapes") is not None or not self.shares:
            return [{**group} for group in self.shapes_in(self.states, self.file)]
        if not (groups := self.shares[0].placed):
            raise self._too_old(f"{self.file} has no param_shapes")
        return [{name: None for share in self.shares for name in share.placed.get(group, ())} for group in groups]

    def _too_old(self, what: str) -> Unsupported:
        line = command("convert", os.path.join(self.folder.path, self.file), out=OUT_SAFETENSORS)
        fix = f"Take the model's own weights, without the f32 ones: {line}"
        if len(self.models) > 1:  # of stage 3 they are in the vectors alone
            fix = "With the DeepSpeed that wrote it: load it, gather the weights, and torch.save them."
        why = (
            "Early versions of DeepSpeed saved it so, without a record of where each parameter is in the flat vectors."
        )
        return Unsupported(f"{self.folder}: {what}", why, fix)

    def shapes_in(self, states: dict[str, Any], file: str, key: str = "param_shapes") -> list[Shapes]:
        """The shapes that a file has by name, for each group. Raises `Corrupt` for what is no shape."""
        groups = states.get(key) or ()
        checked: list[Shapes] = []
        for group in groups if isinstance(groups, (list, tuple)) else (groups,):
            shapes = {name: sizes_of(value) for name, value in group.items()} if isinstance(group, dict) else {"": None}
            checked.append({name: shape for name, shape in shapes.items() if type(name) is str and shape is not None})
            if len(checked[-1]) < len(shapes):
                raise damaged(self.folder, f"{file} has {key} that are not names and shapes")
        return checked


# A rank's share ------------------------------------------------------------------------------------------------------


class Share:
    """The optimizer's file of one rank: its share of the flat vectors. Raises `Corrupt` for a file of another kind.

    weights: the f32 master values of each group (of stage 3: each sub-group).  states: the state of the base optimizer,
    by group.  groups: its parameter groups.  counts: over how many ranks each group is divided.  placed: by group,
    where pieces of names begin in this rank's vector, and their lengths; where that is known.  extra: what says nothing
    of the layout.  facts: what is the same on all ranks.  engine: the optimizer that wrote it, for people.
    """

    def __init__(self, rank: int, file: str, tree: Any, is_mapped: bool) -> None:
        state_dict = fields(fields(tree).get("optimizer_state_dict"))
        kind, vectors = next(((key, state_dict[key]) for key in _VECTORS if key in state_dict), ("", None))
        base = next((state_dict[key] for key in _STATES if key in state_dict), None)
        self.rank, self.file = rank, file
        weights = [*map(bare, items(vectors))]
        if vectors is None or not all(isinstance(entry, TensorEntry) and len(entry.shape) == 1 for entry in weights):
            raise damaged(file, "has no f32 weights in flat vectors")
        self.weights: list[TensorEntry] = weights
        states = base if isinstance(base, list) else fields(base).get("state")
        pairs = enumerate(states) if isinstance(states, list) else fields(states).items()
        self.states: dict[Any, dict[Any, Any]] = {group: fields(state) for group, state in pairs}
        self.groups = items(fields(base).get("param_groups"))
        # What is in it tells stage 3: Python 3.11.0 to 3.11.3 pickle the name of an enum's member, not its number.
        self.stage = 3 if kind == _VECTORS[1] else 2 if plain(state_dict.get("zero_stage")) in (2, "gradients") else 1
        self.counts = (*items(state_dict.get("partition_count")),) or (state_dict.get("partition_count"),)
        if not all(type(count) is int and 0 < count < 1 << 32 for count in self.counts):
            raise damaged(file, "does not say over how many ranks it is sharded")
        self.placed: dict[int, dict[str, tuple[int, int]]] = {}
        for group, mappings in enumerate(items(state_dict.get("param_slice_mappings")) if is_mapped else ()):
            self.placed[group] = {}
            for name, address in fields(mappings).items():
                begin, length = (fields(address).get(key) for key in ("start", "numel"))
                if type(name) is str and type(begin) is int and type(length) is int and min(begin, length) >= 0:
                    self.placed[group][name] = begin, length
        self.paddings = [*map(items, items(state_dict.get("param_alignment_paddings")))]
        self.extra = {str(key): plain(value) for key, value in state_dict.items() if key not in _LAYOUT}
        self.engine = f", ZeRO stage {self.stage}" if "zero_stage" in state_dict else ", BF16_Optimizer"
        settings = [{k: v for k, v in fields(group).items() if type(v) in _PLAIN} for group in self.groups]
        self.facts = {"ZeRO stage": self.stage, "division over ranks": self.counts, "number of groups": len(weights)}
        self.facts |= {"learning rate or another setting": settings}
        for key, value in self.extra.items():  # the loss scaler, which counts steps
            numbers = value.items() if isinstance(value, dict) else [("", value)]
            self.facts[key] = {name: number for name, number in numbers if type(number) in _PLAIN}
        if self.stage > 2:
            self.facts["length of vectors"] = [entry.shape[0] for entry in weights]
        for group in range(len(weights)):
            group_state = undivided(self.states.get(group))
            self.facts |= {f"{key} of group {group} of the optimizer": value for key, value in group_state.items()}

    def vector(self, group: int, key: str) -> tuple[TensorEntry, str]:
        """The master values of a group, or what the optimizer keeps for it under a key, cut to their length; whose."""
        weights = self.weights[group]
        entry = self.states.get(group, {}).get(key) if key else weights
        if not isinstance(entry, TensorEntry) or len(entry.shape) != 1 or entry.shape[0] < weights.shape[0]:
            raise damaged(self.file, f"has no {key} for all of group {group}, of which it has the weights")
        return replace(entry, shape=weights.shape), f"rank {self.rank:,}"


def bare(node: Any) -> Any:
    """The tensor in one with attributes (`ds_id`), as parameters of stage 3 have them; anything else as it is."""
    args: tuple[Any, ...] = node.made.args if isinstance(node, Composite) and "with attributes" in node.kind else ()
    if len(args) == 4 and isinstance(args[0], Global) and isinstance(args[2], tuple) and args[0] in BUILDERS:
        return BUILDERS[args[0]](args[2])
    return args[0] if args and isinstance(args[0], TensorEntry) else node


def undivided(state: Any) -> dict[str, Any]:
    """What an optimizer keeps once for a group (a `step`): a new tensor each time, as every parameter has its own."""
    return {
        key: value.alone() if isinstance(value, TensorEntry) else value
        for key, value in fields(state).items()
        if not (isinstance(value, TensorEntry) and value.shape)
    }


def plain(node: Any) -> Any:
    """An object of DeepSpeed's own (a loss scaler) as its attributes, a member of an enum (a stage) as its number, or
    its name where it was pickled by that."""
    if not isinstance(node, Object):
        return node
    value = node.args[-1] if type(node.args) is tuple and node.args else None
    return value if type(value) in (int, str) else dict(node.attributes)


def named_groups(groups: Any, names: Mapping[int, Iterable[str]]) -> list[dict[str, Any]]:
    """Parameter groups with names in place of the numbers of their vectors. names: those in each vector."""
    return [
        {**group, "params": [name for number in items(group.get("params")) for name in names.get(number, ())]}
        for group in items(groups)
        if isinstance(group, dict)
    ]


# The tensors in the vectors ------------------------------------------------------------------------------------------

_Placed = tuple[str, tuple[int, ...], int, int]  # a tensor of a group, and where it begins in its vectors
_Run = tuple[list[list["Share"]], Iterable[int], list[_Placed], int]
"""Tensors in a row: the ranks, in one team or each by itself, and the groups in whose vectors they lie, each divided
evenly over the team; the tensors; and the number of elements to a multiple of which the vectors are padded."""


def trained(stage: StageFiles, model: dict[Any, Any]) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Every parameter that the optimizer has, by name, and the optimizer's state. model: its own copies of them.

    Raises `Corrupt` where the parameters take more or less than the vectors have, `Conflict` where the optimizer has
    taken more steps than the model; fewer are noted (a restart).
    """
    states, share = stage.states, stage.shares[0]
    total, skipped = states.get("global_steps"), states.get("skipped_steps", 0)
    steps = [n for group in range(len(share.weights)) if (n := number_in(share.states.get(group, {}).get("step")))]
    if type(total) is int and type(skipped) is int and steps and max(steps) != total - skipped:
        what = f"the model is at step {total - skipped:,}, the optimizer at step {int(max(steps)):,}"
        if max(steps) > total - skipped + 1:  # DeepSpeed before 0.15 counts a first step that changes nothing
            raise mixed(stage.folder, stage.file, share.file, what)
        why = "either the optimizer was restarted, or its files are from another step; the files do not tell which"
        stage.joiner.notes.append(Note(STEPS, f"{what}: {why}"))
    weights: dict[str, TensorEntry] = {}
    state: dict[str, dict[str, Any]] = {}
    names: dict[int, list[str]] = {}
    sized = {name: entry.shape for name, entry in model.items() if isinstance(entry, TensorEntry)}
    if lacking := [n for group in stage.groups for n, shape in group.items() if shape is None and n not in sized]:
        raise lacks(stage.folder, "the file of the layer", lacking)
    shapes = [{n: sized[n] if shape is None else shape for n, shape in group.items()} for group in stage.groups]
    for teams, groups, layout, step in (_divided_each if share.stage > 2 else _whole_vectors)(stage, shapes):
        pairs = [slot for team in teams for s in team for group in groups for slot in s.states.get(group, {}).items()]
        keys = ["", *dict.fromkeys(key for key, value in pairs if isinstance(value, TensorEntry) and value.shape)]
        rows = {key: [Vector(s.vector(group, key) for s in team for group in groups) for team in teams] for key in keys}
        length = rows[""][0].length
        needed = max((begin + -(-prod(shape) // len(teams)) for _, shape, _, begin in layout), default=0)
        if -(-needed // step) != -(-length // step):
            what = f"the parameters of group {layout[0][2] if layout else 0} take {counted(needed, 'element')}"
            raise damaged(stage.folder, f"{what} of the ranks' vectors, which have {length:,}")
        for name, shape, group, begin in layout:
            if name in weights:
                raise damaged(stage.folder, f"{name} is in two groups of the optimizer")
            copy = model.get(name)  # the model's own, to which the optimizer's is compared; of stage 3 it is empty
            copy = copy if isinstance(copy, TensorEntry) and copy.numel else None
            if copy is not None and copy.shape != shape:
                what = f"{stage.file} has {name} as {list(copy.shape)}, and says that it is {list(shape)}"
                raise damaged(stage.folder, what)
            values = {
                key: stage.joiner.flat(f"{name} {key}".strip(), shape, pieces(row, shape, begin), None if key else copy)
                for key, row in rows.items()
            }
            weights[name] = values.pop("")
            if slots := values | undivided(share.states.get(group, {})):
                state[name] = slots
            names.setdefault(group, []).append(name)
    return weights, {"state": state, "param_groups": named_groups(share.groups, names)}


def pieces(vectors: list[Vector], shape: tuple[int, ...], begin: int = 0) -> Iterator[Piece]:
    """What each of the vectors has of a tensor that they divide evenly, without the padding of the last."""
    total = prod(shape)
    count = -(-total // len(vectors)) if vectors else 0
    for number, vector in enumerate(vectors):
        if number == 0 or number * count < total:
            yield from vector.cut(begin, min(count, total - number * count), number * count)


def _in_a_row(group: int, shapes: Shapes, world: int, begin: int = 0, paddings: Iterable[int] = ()) -> list[_Placed]:
    """Where tensors begin that lie one after the other, each divided over `world` vectors. paddings: behind them."""
    behind = chain(paddings, repeat(0))
    begins = accumulate((-(-prod(shape) // world) + next(behind) for shape in shapes.values()), initial=begin)
    return [(name, shape, group, at) for (name, shape), at in zip(shapes.items(), begins, strict=False)]


def _divided_each(stage: StageFiles, shapes: list[Shapes]) -> Iterator[_Run]:
    """Stage 3: every rank has as many elements of each parameter, one after the other in its vectors."""
    teams, world = [[share] for share in stage.shares], len(stage.shares)
    lengths = [entry.shape[0] for entry in stage.shares[0].weights]
    needed = [sum(-(-prod(shape) // world) for shape in group.values()) for group in shapes]
    begins = repeat(0) if needed == lengths else accumulate(needed, initial=0)
    rows = [_in_a_row(*numbered, world, begin) for numbered, begin in zip(enumerate(shapes), begins, strict=False)]
    if needed == lengths:
        yield from ((teams, [group], row, 1) for group, row in enumerate(rows))
    else:  # where a parameter is in two vectors, they are read as one
        yield teams, range(len(lengths)), [*chain(*rows)], 1


def _whole_vectors(stage: StageFiles, shapes: list[Shapes]) -> Iterator[_Run]:
    """Stages 1 and 2: each group is a vector, of which every rank of a team has a piece.

    Raises `Conflict` where ranks say that they lay the tensors out otherwise.
    """
    shares, share, config = stage.shares, stage.shares[0], fields(stage.states.get("ds_config"))
    if len(shapes) != len(share.weights):
        groups = f"one has {counted(len(shapes), 'group')}, the other {len(share.weights):,}"
        raise mixed(stage.folder, stage.file, share.file, groups)
    for group, group_shapes in enumerate(shapes):
        size = share.counts[group] if group < len(share.counts) else max(share.counts)
        size = len(shares) if size >= len(shares) or len(shares) % size else size
        teams = len(shares) // size  # several for experts, each with experts of its own
        row = _in_a_row(group, group_shapes, 1, paddings=share.paddings[group] if group < len(share.paddings) else ())
        ranges = {name: (at, prod(shape)) for name, shape, _, at in row}
        for number in range(teams):
            in_blocks = config.get("use_data_before_expert_parallelism")
            team = shares[number * size : (number + 1) * size] if in_blocks else shares[number::teams]
            high = 0
            for member in team:
                low, high = high, high + member.weights[group].shape[0]
                for name, place in member.placed.get(group, {}).items():  # a rank lists its own alone
                    at, count = ranges.get(name, (high, 0))
                    begin, end = max(at, low), min(at + count, high)
                    if begin < end and place != (begin - low, end - begin):
                        raise mixed(stage.folder, stage.file, member.file, f"{name} is elsewhere")
            tensors = [(_global_name(stage, t[0], number, group_shapes), *t[1:]) for t in row] if teams > 1 else row
            yield [team], [group], tensors, 2 * size


def _global_name(stage: StageFiles, name: str, team: int, names: Iterable[str]) -> str:
    """The name of an expert among all experts, by its name among those of its team."""
    match = _LOCAL_EXPERT.fullmatch(name)
    if match is None:
        what = f"{stage.folder}: {name} is sharded over some of the ranks, but is not an expert of deepspeed.moe"
        raise Unsupported(what, "It is unknown which ranks have which part of it.", "With DeepSpeed: load it there.")
    experts = filter(None, map(_LOCAL_EXPERT.fullmatch, names))
    local = 1 + max(int(expert["number"]) for expert in experts if expert["module"] == match["module"])
    return f"{match['module']}{team * local + int(match['number'])}{match['rest']}"
