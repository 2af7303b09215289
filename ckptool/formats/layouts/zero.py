"""A tag's folder as DeepSpeed saves it: what each rank has of the flat vectors, as pieces of the tensors in them.

Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`), bf16_optimizer.py, engine.py
(`_save_checkpoint`, `_save_moe_checkpoint`), utils/groups.py (which ranks share an expert). Stages 1 and 2 lay the
parameters of a group one after the other and divide that vector; the last ranks leave out its padding. Stage 3 divides
every parameter by itself, as many elements to each rank, the last filled up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Composite, Note, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import Global, Object, same_kind
from ckptool.commands import other_program
from ckptool.errors import Conflict, Corrupt, Unsupported, counted, listed, printable
from ckptool.formats.folder import RankFolder, damaged, lacks, missing_ranks, mixed, number_in
from ckptool.formats.pieces import Joiner, Piece, Range, Vector, agree, begin_alike
from ckptool.formats.placements import sizes_of
from ckptool.pickles.torch_objects import BUILDERS

NAME = "deepspeed"
COPIES = "copies-not-shown"  # of the notes
STEPS = "steps-differ"
NO_OPTIMIZER = "no-optimizer-files"
ZERO = "zero_optimizer_state"  # the key of what the optimizer's files hold beside the optimizer
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,7})_mp_rank_(?P<mp>\d{1,7})_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,7})_)?mp_rank_(?P<mp>\d{1,7})_model_states\.pt")
_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt")
_LAYER = re.compile(r"layer_\d{1,7}-(?:.+-)?model_states\.pt")
_OTHER = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_LOCAL_EXPERT = re.compile(r"(?P<module>.*\.deepspeed_experts\.)(?P<number>\d{1,9})(?P<rest>\..*)", re.DOTALL)
_VECTORS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_STATES = ("base_optimizer_state", "optimizer_state_dict")
# What says how the vectors are laid out; of no use when they are joined.
_LAYOUT = (*_VECTORS, *_STATES, "param_slice_mappings", "group_paddings", "param_alignment_paddings")
_PLAIN = frozenset({int, float, bool, str, tuple, type(None)})

Shapes = dict[str, tuple[int, ...]]
"""The shapes of tensors by name, in the order in which they lie in a vector."""


# The files -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Tag:
    """The files in a tag's folder by kind and rank."""

    files: RankFolder
    models: dict[int, str] = field(default_factory=dict)  # by rank; of stages below 3, of rank 0
    optimizers: dict[int, str] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    stages: dict[int, Tag] = field(default_factory=dict)  # of a pipeline, or ranks of tensor parallelism, but the first
    others: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Folder:
        return self.files.folder

    @property
    def joiner(self) -> Joiner:
        return self.files.joiner

    @property
    def first(self) -> str:
        """The file of the first rank's model states."""
        return self.models[min(self.models)]

    def model(self, rank: int, *, layered: bool = False) -> dict[str, Any]:
        """A rank's model states. layered: the weights may be in other files. Raises `Corrupt` for something else."""
        tree = self.files.open(self.models[rank])
        module = tree.get("module", ()) if isinstance(tree, dict) else ()
        if not isinstance(tree, dict) or not (isinstance(module, dict) or (layered and module is None)):
            raise damaged(self.folder, f"{self.models[rank]} has no `module` with the weights of a model in it")
        return tree

    def shares(self) -> list[Share]:
        """What all ranks have of the optimizer, which has to fit together."""
        found = [Share(rank, name, self.files.open(name)) for rank, name in sorted(self.optimizers.items())]
        if found:
            _check_shares(self.folder, found)
        return found


def tag_files(folder: Folder) -> Tag:
    """The files in a tag's folder. Raises `Conflict` for two of one rank, `Corrupt` where the model's are missing."""
    tag = Tag(RankFolder(folder))
    for name in folder.names:
        for pattern in (_MODEL, _OPTIMIZER):
            if found := pattern.fullmatch(name):
                number, rank = int(found["mp"]), int(found["rank"] or 0)
                mine = tag.stages.setdefault(number, Tag(tag.files)) if number else tag
                files = mine.models if pattern is _MODEL else mine.optimizers
                if rank in files:
                    raise mixed(folder, files[rank], name, "both are of one rank")
                files[rank] = name
        for pattern, names in ((_EXPERT, tag.experts), (_LAYER, tag.layers), (_OTHER, tag.others)):
            if pattern.fullmatch(name):
                names.append(name)
    if not tag.models:
        raise lacks(folder, "mp_rank_00_model_states.pt, which has the names and shapes of the weights")
    return tag


def read_tag(folder: Folder) -> Checkpoint:
    """The checkpoint of a tag's folder; see `deepspeed.read`."""
    tag = tag_files(folder)
    if tag.stages or tag.layers:
        from ckptool.formats.layouts.pipeline import read_stages

        return read_stages(tag)
    first = tag.model(min(tag.models))
    if "offloaded_tensors" in folder or first.get("ds_autoep_layers"):
        what = "experts in AutoEP" if first.get("ds_autoep_layers") else "an optimizer that was offloaded to NVMe"
        why = "Its values are laid out in another way than those of ZeRO, which is not read."
        raise Unsupported(f"{folder} has {what}", why, "With DeepSpeed: load it, and save it without.")
    shares = tag.shares()
    own = same_kind(first["module"], dict(first["module"]))
    own.update(_experts(tag, first))
    weights, optimizer = joined_groups(tag, first, shares, own) if shares else (_masters(tag, first, own), None)
    module = module_of(tag, first, own, weights, shares[0].stage if shares else 0, len(shares))
    tree = tree_of(first, module, optimizer, shares[0].rest if shares else {})
    tree |= {name: tag.files.open(name) for name in tag.others}
    if not shares and first.get("param_shapes") is not None:
        message = "the optimizer's files are not there: the weights are the model's own, and its f32 values are lost"
        tag.files.notes.append(Note(NO_OPTIMIZER, message))
    world = first.get("dp_world_size")  # of stage 0 the first rank alone saves
    ranks = len(shares) or (world if type(world) is int else 1)
    found = checkpoint_of(tag, tree, f", {shares[0].engine}" if shares else "", max(1, ranks))
    stepless = shares and not any("step" in shares[0].undivided(n) for n in range(len(shares[0].weights)))
    if stepless and shares[0].stage > 2:  # stages 1 and 2 have the weights twice
        found = replace(found, untied=tuple(share.file for share in shares))
    return found


def parallel(folder: Folder, name: str) -> Unsupported:
    """The error for a model that is divided by tensor parallelism."""
    return Unsupported(
        f"{folder} was saved with tensor parallelism, which {name} is of",
        "Each rank has parts of the weights, and how those are joined depends on the model.",
        "With DeepSpeed: deepspeed/checkpoint/ds_to_universal.py, which has rules for it; then name its folder here.",
    )


def _experts(tag: Tag, first: dict[str, Any]) -> dict[Any, Any]:
    """The weights of all experts, each in a file of its own. Raises `Corrupt` for one that is not there."""
    counts = first.get("num_experts")
    for layer, count in enumerate(counts if isinstance(counts, list) else ()):
        there = {name for name in tag.experts if name.startswith(f"layer_{layer}_")}
        if type(count) is int and len(there) < count:
            raise lacks(tag.folder, f"experts: {len(there):,} of {counted(count, 'expert')} in layer {layer} are there")
    found: dict[Any, Any] = {}
    for name in tag.experts:
        expert = tag.files.open(name)
        if not isinstance(expert, dict) or found.keys() & expert.keys():
            raise damaged(tag.folder, f"{name} has no weights of an expert, or those of another one")
        found |= expert
    return found


def checkpoint_of(tag: Tag, tree: dict[str, Any], engine: str, world: int) -> Checkpoint:
    """The checkpoint of what was joined, with its notes."""
    version = tree.get("ds_version")
    engine = f"DeepSpeed {printable(version) if type(version) is str else ''}".strip() + engine
    return tag.files.checkpoint(NAME, tree, engine, world, tree.get("global_steps"))


def tree_of(first: dict[str, Any], module: Any, optimizer: Any, rest: dict[str, Any]) -> dict[str, Any]:
    """What the first rank saved, with the whole model and the optimizer by name in their places."""
    joined = {"module": module} | ({"optimizer": optimizer} if optimizer is not None else {})
    tree = {key: joined.get(key, value) for key, value in first.items() if key != "frozen_param_fragments"}
    return {**tree, **joined, **({ZERO: rest} if rest else {})}


# A rank's share ------------------------------------------------------------------------------------------------------


class Share:
    """The optimizer's file of one rank: its share of the flat vectors. Raises `Corrupt` for a file of another kind.

    weights: the f32 master values of each group (of stage 3: each sub-group).  states: the state of the base optimizer,
    by group.  groups: its parameter groups.  counts: over how many ranks each group is divided.  mappings: for each
    group, what the file says of where a name's piece is in this rank's vector.  rest: what says nothing of the layout.
    """

    def __init__(self, rank: int, file: str, tree: Any) -> None:
        found = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
        found = found if isinstance(found, dict) else {}
        vectors = next((found[key] for key in _VECTORS if key in found), None)
        if not isinstance(vectors, list):
            raise damaged(file, "has no f32 weights in it")
        self.rank, self.file = rank, file
        bared = list(map(bare, vectors))
        if not all(isinstance(entry, TensorEntry) and len(entry.shape) == 1 for entry in bared):
            raise damaged(file, "has f32 weights that are not flat vectors")
        self.weights: list[TensorEntry] = bared
        base: Any = next((found[key] for key in _STATES if key in found), {})
        states, groups = (base.get("state"), base.get("param_groups")) if isinstance(base, dict) else (base, [])
        self.states = (
            dict(enumerate(states)) if isinstance(states, list) else states if isinstance(states, dict) else {}
        )
        self.groups = groups if isinstance(groups, list) else []
        stage = _number(found.get("zero_stage"))
        self.stage = 1 if stage is None else stage
        self.counts = _items(found.get("partition_count")) or (found.get("partition_count"),)
        if not all(type(count) is int and 0 < count < 1 << 32 for count in self.counts):
            raise damaged(file, "does not say over how many ranks it is divided")
        self.mappings = [each if isinstance(each, dict) else {} for each in _items(found.get("param_slice_mappings"))]
        self.paddings = _items(found.get("param_alignment_paddings"))
        self.rest = {str(key): plain(value) for key, value in found.items() if key not in _LAYOUT}

    @property
    def engine(self) -> str:
        """The optimizer that wrote it, for people."""
        return f"ZeRO stage {self.stage}" if "zero_stage" in self.rest else "BF16_Optimizer"

    def state(self, group: int) -> dict[str, Any]:
        found = self.states.get(group)
        return found if isinstance(found, dict) else {}

    def keys(self, group: int) -> list[str]:
        """`""` for the weights, and the keys of the state of a group whose values are divided as the weights are."""
        return ["", *(key for key, value in self.state(group).items() if _is_divided(value))]

    def undivided(self, group: int) -> dict[str, Any]:
        """The rest of the state: a `step`."""
        return undivided(self.state(group))

    def vector(self, group: int, key: str = "") -> tuple[TensorEntry, str]:
        """The master values of a group, or what the optimizer keeps under a key for it, as long as those; and whose."""
        weights = self.weights[group]
        entry = self.state(group).get(key) if key else weights
        if not isinstance(entry, TensorEntry) or len(entry.shape) != 1 or entry.shape[0] < weights.shape[0]:
            raise damaged(self.file, f"has no {key} for all of group {group}, of which it has the weights")
        return replace(entry, shape=weights.shape), f"rank {self.rank:,}"

    def placed(self, group: int) -> dict[str, tuple[int, int]]:
        """Where it says that the pieces of names begin in this rank's vector, and their lengths."""
        found = {}
        for name, address in self.mappings[group].items() if group < len(self.mappings) else ():
            fields = address.attributes if isinstance(address, Object) else {}
            begin, length = fields.get("start"), fields.get("numel")
            if type(begin) is int and type(length) is int and type(name) is str and begin >= 0 <= length:
                found[name] = begin, length
        return found


def bare(node: Any) -> Any:
    """The tensor of one with attributes (`ds_id`), as a parameter of stage 3 has them; anything else as it is."""
    args: tuple[Any, ...] = node.made.args if isinstance(node, Composite) and "with attributes" in node.kind else ()
    if len(args) == 4 and isinstance(args[0], Global) and isinstance(args[2], tuple) and args[0] in BUILDERS:
        return BUILDERS[args[0]](args[2])
    return args[0] if args and isinstance(args[0], TensorEntry) else node


def undivided(state: Any) -> dict[str, Any]:
    """What an optimizer keeps once for a group (a `step`): each time another tensor, as every parameter has its own."""
    return {
        key: value.with_storage(value.storage.alone()) if isinstance(value, TensorEntry) else value
        for key, value in (state.items() if isinstance(state, dict) else ())
        if not _is_divided(value)
    }


def _is_divided(value: Any) -> bool:
    return isinstance(value, TensorEntry) and bool(value.shape)


def plain(node: Any) -> Any:
    """An object of DeepSpeed's own (a loss scaler, a stage) as its attributes or its number."""
    if not isinstance(node, Object):
        return node
    number = _number(node)
    return dict(node.attributes) if number is None else number


def _number(node: Any) -> int | None:
    """A number, or that of a member of an enum."""
    if isinstance(node, Object) and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    return node if type(node) is int else None


def _items(node: Any) -> tuple[Any, ...]:
    return tuple(node) if isinstance(node, (list, tuple)) else ()


def named_groups(groups: Any, names: Mapping[int, Iterable[str]]) -> list[dict[str, Any]]:
    """Parameter groups with names in place of the numbers of their vectors. names: those in each vector."""
    return [
        {**group, "params": [name for number in _items(group.get("params")) for name in names.get(number, ())]}
        for group in _items(groups)
        if isinstance(group, dict)
    ]


def _check_shares(folder: Folder, shares: list[Share]) -> None:
    """Raises `Corrupt` where ranks are missing, `Conflict` for shares of several checkpoints. shares: by rank."""

    def settings(share: Share) -> list[Any]:  # the learning rate of a step, and the like
        return [
            {key: value for key, value in group.items() if type(value) in _PLAIN} if isinstance(group, dict) else None
            for group in share.groups
        ]

    first = shares[0]
    for other in shares[1:]:
        for what, one, another in (
            ("ZeRO stage", first.stage, other.stage),
            ("division over ranks", first.counts, other.counts),
            ("number of groups", len(first.weights), len(other.weights)),
            ("step or learning rate", settings(first), settings(other)),
        ):
            if one != another:
                shown = f": {one} and {another}" if type(one) is int else ""
                raise mixed(folder, first.file, other.file, f"the {what} differs{shown}")
        for group in range(len(first.weights)):
            ours, theirs = first.undivided(group), other.undivided(group)
            for key in ours.keys() & theirs.keys():
                one, another = ours[key], theirs[key]
                both = isinstance(one, TensorEntry) and isinstance(another, TensorEntry)
                if agree(one, another) is False if both else type(one) is not type(another) or one != another:
                    raise mixed(folder, first.file, other.file, f"{key!s} of the optimizer differs")
    complete(folder, [share.rank for share in shares], max(first.counts), first.file)


def complete(folder: Folder, ranks: list[int], world: int, file: str) -> None:
    """Raises `Corrupt` for ranks of this world that have no file, `Conflict` for files of ranks beyond it."""
    there = set(ranks)
    if beyond := [f"rank {rank:,}" for rank in sorted(there) if rank >= world]:
        raise Conflict(
            f"{folder} has files of {counted(len(beyond), 'rank')} beyond the {world:,} that saved it: "
            f"{listed(beyond, 3)}",
            f"{file} gives that number. The others are left from a larger world, and may be of another step.",
            "Copy only the files of this checkpoint into another folder, or take another checkpoint.",
        )
    if len(there) < world:
        what = f"the files of {counted(world - len(there), 'rank')} of {world:,}"
        raise lacks(folder, what, [f"rank {rank:,}" for rank in missing_ranks(there, world)])


# The pieces of trained tensors ---------------------------------------------------------------------------------------


class _Placed(NamedTuple):
    """A tensor of a group, and by key ("" for the weights) the ranges of the vectors that its values are in."""

    name: str
    shape: tuple[int, ...]
    group: int
    ranges: dict[str, list[Range]]


def joined_groups(
    tag: Tag, first: dict[str, Any], shares: list[Share], own: dict[Any, Any]
) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Every parameter that the optimizer has, by name, and the optimizer's state. own: the model's copies of them."""
    shapes = shapes_of(tag, first, tag.first)
    _check_steps(tag, first, shares[0])
    weights: dict[str, TensorEntry] = {}
    state: dict[str, dict[str, Any]] = {}
    names: dict[int, list[str]] = {}
    placed = _whole_vectors(tag, first, shares, shapes) if shares[0].stage < 3 else _divided_each(tag, shares, shapes)
    for name, shape, group, ranges in placed:
        if name in weights:
            raise damaged(tag.folder, f"{name} is in two groups of the optimizer")
        values = {
            key: tag.joiner.in_ranges(
                f"{name} {key}".strip(), shape, parts, None if key else _copy(own.get(name), shape)
            )
            for key, parts in ranges.items()
        }
        weights[name] = values.pop("")
        if slots := values | shares[0].undivided(group):
            state[name] = slots
        names.setdefault(group, []).append(name)
    return weights, {"state": state, "param_groups": named_groups(shares[0].groups, names)}


def _copy(own: Any, shape: tuple[int, ...]) -> Piece | None:
    """The model's own copy of a weight, to which the optimizer's is compared; stage 3 has none."""
    if not isinstance(own, TensorEntry) or own.shape != shape or not own.dtype.is_float:
        return None
    return Piece(own, (0,) * len(shape), "the model's own copy")


def _check_steps(tag: Tag, first: dict[str, Any], share: Share) -> None:
    """Raises `Conflict` where the optimizer has taken more steps than the model; fewer are noted (a restart)."""
    total, skipped = first.get("global_steps"), first.get("skipped_steps", 0)
    steps = [steps for group in range(len(share.weights)) if (steps := number_in(share.undivided(group).get("step")))]
    if type(total) is not int or type(skipped) is not int or not steps or max(steps) == total - skipped:
        return
    what = f"the model is at step {total - skipped:,}, the optimizer at step {int(max(steps)):,}"
    if max(steps) > total - skipped + 1:  # DeepSpeed before 0.15 counts a first step that changes nothing
        raise mixed(tag.folder, tag.first, share.file, what)
    why = "either the optimizer was restarted, or its files are of another step; the files do not tell which"
    tag.files.notes.append(Note(STEPS, f"{what}: {why}"))


def shapes_of(tag: Tag, states: dict[str, Any], file: str, key: str = "param_shapes") -> list[Shapes]:
    """The shapes of a file's parameters by name, for each group. Raises `Corrupt` for what is no shape."""
    groups = states.get(key) or ()
    found = []
    for group in groups if isinstance(groups, (list, tuple)) else (groups,):
        shapes = {name: sizes_of(value) for name, value in group.items()} if isinstance(group, dict) else {"": None}
        if not all(type(name) is str and shape is not None for name, shape in shapes.items()):
            raise damaged(tag.folder, f"{file} has {key} that are no names and shapes")
        found.append({name: shape for name, shape in shapes.items() if shape is not None})
    return found


def _whole_vectors(tag: Tag, first: dict[str, Any], shares: list[Share], shapes: list[Shapes]) -> Iterator[_Placed]:
    """Stages 1 and 2: each group is a vector, of which every rank of a team has a piece."""
    count, config = len(shares[0].weights), first.get("ds_config")
    if len(shapes) != count:
        groups = f"one has {counted(len(shapes), 'group')}, the other {count:,}"
        raise mixed(tag.folder, tag.models[0], shares[0].file, groups)
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    # DeepSpeed's own record of the pieces has another order than its vectors.
    mapped = not (isinstance(zero, dict) and zero.get("round_robin_gradients"))
    in_blocks = isinstance(config, dict) and config.get("use_data_before_expert_parallelism")
    for group in range(count):
        counts = shares[0].counts
        size = counts[group] if group < len(counts) else max(counts)
        size = len(shares) if size >= len(shares) or len(shares) % size else size
        teams = len(shares) // size  # of experts, several, with experts of their own
        for number in range(teams):
            team = shares[number * size : (number + 1) * size] if in_blocks else shares[number::teams]
            vectors = {key: Vector(share.vector(group, key) for share in team) for key in team[0].keys(group)}
            paddings = team[0].paddings[group] if group < len(team[0].paddings) else ()
            behind = iter(paddings if isinstance(paddings, list) else ())
            begins = accumulate((prod(shape) + next(behind, 0) for shape in shapes[group].values()), initial=0)
            row = zip(shapes[group].items(), begins, strict=False)
            laid = [(name, begin, prod(shape)) for (name, shape), begin in row]
            _check_vector(tag, team, group, laid, vectors[""], mapped)
            for name, begin, length in laid:
                full = _global_name(tag, name, number, shapes[group]) if teams > 1 else name
                ranges = {key: [(row, begin, length)] for key, row in vectors.items()}
                yield _Placed(full, shapes[group][name], group, ranges)


def _check_vector(
    tag: Tag, team: list[Share], group: int, laid: list[tuple[str, int, int]], vector: Vector, mapped: bool
) -> None:
    """Raises `Corrupt` where the parameters take more or less than a vector has, `Conflict` where ranks say that they
    lay them out otherwise."""
    needed = max((begin + length for _, begin, length in laid), default=0)
    step = 2 * len(team)  # to which the vector is filled up
    if -(-needed // step) != -(-vector.length // step):
        has = f"have {counted(needed, 'element')}, the ranks' files {vector.length:,}"
        raise damaged(tag.folder, f"the parameters of group {group} {has}")
    for share, low in zip(team, vector.begins, strict=True) if mapped else ():
        high, placed = low + share.weights[group].shape[0], share.placed(group)
        for name, at, length in laid:
            begin, end = max(at, low), min(at + length, high)
            if begin < end and placed.get(name, (begin - low, end - begin)) != (begin - low, end - begin):
                raise mixed(tag.folder, tag.models[0], share.file, f"{name} lies elsewhere")


def _global_name(tag: Tag, name: str, team: int, names: Iterable[str]) -> str:
    """The name of an expert among all of them, of its name among those of its ranks."""
    found = _LOCAL_EXPERT.fullmatch(name)
    if found is None:
        what = f"{tag.folder}: {name} is divided over some of the ranks, and is no expert of deepspeed.moe"
        raise Unsupported(
            what, "Which ranks have which part of it is not known here.", "With DeepSpeed: load it there."
        )
    experts = filter(None, map(_LOCAL_EXPERT.fullmatch, names))
    local = 1 + max(int(each["number"]) for each in experts if each["module"] == found["module"])
    return f"{found['module']}{team * local + int(found['number'])}{found['rest']}"


def _divided_each(tag: Tag, shares: list[Share], shapes: list[Shapes]) -> Iterator[_Placed]:
    """Stage 3: every rank has as many elements of each parameter, one after the other in its vectors."""
    world = len(shares)
    lengths = [entry.shape[0] for entry in shares[0].weights]
    needed = [sum(-(-prod(shape) // world) for shape in group.values()) for group in shapes]
    if odd := next((share for share in shares if [entry.shape[0] for entry in share.weights] != lengths), None):
        raise mixed(tag.folder, shares[0].file, odd.file, "their vectors have other lengths")
    if sum(needed) != sum(lengths):
        has = f"take {counted(sum(needed), 'element')} of each rank, {shares[0].file} has {sum(lengths):,}"
        raise damaged(tag.folder, f"the parameters {has}")
    # Where a parameter is in two vectors, they are read as one.
    runs = [[number] for number in range(len(lengths))] if needed == lengths else [[*range(len(lengths))]]
    for number, run in enumerate(runs):
        keys = shares[0].keys(run[0])
        vectors = {key: [Vector(share.vector(group, key) for group in run) for share in shares] for key in keys}
        begin = 0
        for group in range(len(shapes)) if len(runs) == 1 else (number,):
            for name, shape in shapes[group].items():
                yield _Placed(name, shape, group, {key: _of_each(v, begin, shape) for key, v in vectors.items()})
                begin += -(-prod(shape) // world)


def _of_each(vectors: list[Vector], begin: int, shape: tuple[int, ...]) -> list[Range]:
    """What each rank has of a tensor, without the padding of the last."""
    total = prod(shape)
    each = -(-total // len(vectors)) if vectors else 0
    return [
        (vector, begin, max(0, min(each, total - rank * each)))
        for rank, vector in enumerate(vectors)
        if rank == 0 or rank * each < total
    ]


def _masters(tag: Tag, first: dict[str, Any], own: dict[Any, Any]) -> dict[str, TensorEntry]:
    """Stage 0 in bf16 or fp16: the f32 weights of its optimizer, which has them in the order of the model's, each by
    itself or those of a group in a row."""
    optimizer, buffers = first.get("optimizer"), first.get("buffer_names") or ()
    state = optimizer if isinstance(optimizer, dict) else {}
    single = [(each, False) for group in state.get("fp32_groups") or () if isinstance(group, list) for each in group]
    left = {n: e for n, e in own.items() if isinstance(e, TensorEntry) and e.dtype.is_float and n not in buffers}
    found: dict[str, TensorEntry] = {}
    for wrapped, in_a_row in (*single, *((each, True) for each in state.get("fp32_groups_flat") or ())):
        master, names, begin = bare(wrapped), list[str](), 0
        if isinstance(master, TensorEntry) and in_a_row:  # the weights of other groups have other first values
            for name, entry in left.items():
                if entry.numel <= master.numel - begin and begin_alike(master.narrow(0, begin, entry.numel), entry):
                    names.append(name)
                    begin += entry.numel
        elif isinstance(master, TensorEntry):  # between several of the shape (some may be frozen) these decide
            alike = [name for name, entry in left.items() if entry.shape == master.shape]
            names = [n for n in alike if len(alike) > 1 and begin_alike(master, left[n])][:1] or alike[:1]
        if not names or sum(left[name].numel for name in names) != master.numel:
            raise damaged(tag.folder, f"the optimizer has f32 weights {master!r:.100} that are none of the model's")
        vector, begin = master.reshape((master.numel,)), 0
        for copy, name in ((left.pop(name), name) for name in names):
            entry = vector.narrow(0, begin, copy.numel).reshape(copy.shape)
            whole = Piece(entry, (0,) * len(copy.shape), "the optimizer")
            found[name] = tag.joiner.tensor(name, entry.shape, entry.dtype, [whole], _copy(copy, entry.shape))
            begin += copy.numel
    return found


# The model -----------------------------------------------------------------------------------------------------------


def module_of(
    tag: Tag, first: dict[str, Any], own: dict[Any, Any], trained: dict[str, TensorEntry], stage: int, world: int
) -> dict[Any, Any]:
    """The model: trained, frozen and tied parameters, buffers, in the order in which it was saved.

    own: what the first rank saved as `module`.  trained: the f32 master values. A frozen parameter of stage 3 is
    divided over the ranks; a buffer is saved whole by each.
    """
    frozen: dict[str, list[tuple[TensorEntry, str]]] = {}
    buffers: dict[str, list[Piece]] = {}
    if stage > 2:
        complete(tag.folder, list(tag.models), world, tag.first)
    shapes, start = shapes_of(tag, first, tag.first), min(tag.models)
    for rank in sorted(tag.models) if stage > 2 else (start,):
        states, owner = first if rank == start else tag.model(rank), f"rank {rank:,}"
        for key in ("global_steps", "dp_world_size"):
            if first.get(key) != states.get(key):
                what = f"{key} are {first.get(key)!s} and {states.get(key)!s}"
                raise mixed(tag.folder, tag.first, tag.models[rank], what)
        if rank != start and shapes_of(tag, states, tag.models[rank]) != shapes:
            raise mixed(tag.folder, tag.first, tag.models[rank], "their parameters have other names or shapes")
        fragments, names = states.get("frozen_param_fragments"), states.get("buffer_names")
        for name, entry in fragments.items() if isinstance(fragments, dict) else ():
            if isinstance(entry, TensorEntry):
                frozen.setdefault(name, []).append((entry, owner))
        for name in names if isinstance(names, list) else ():
            if type(name) is str and isinstance(entry := (states["module"] or {}).get(name), TensorEntry):
                buffers.setdefault(name, []).append(Piece(entry, (0,) * len(entry.shape), owner))
    values: dict[str, Any] = dict(trained)
    known = {n: s for each in shapes_of(tag, first, tag.first, "frozen_param_shapes") for n, s in each.items()}
    for name, shape in known.items():
        if pieces := frozen.get(name):
            if stage < 3 and isinstance(own.get(name), TensorEntry):
                values[name] = own[name]
            elif len(pieces) == 1 and pieces[0][0].shape == shape:
                values[name] = pieces[0][0]
            else:
                vectors = [Vector([piece]) for piece in pieces if len(piece[0].shape) == 1]
                values[name] = tag.joiner.in_ranges(name, shape, _of_each(vectors, 0, shape))
    values |= {name: tag.joiner.replicated(name, pieces) for name, pieces in buffers.items()}
    _tie(first, own, values)
    copies = [entry for name in trained if isinstance(entry := own.get(name), TensorEntry) and entry.numel]
    if copies:
        types = listed([str(dtype) for dtype in Counter(entry.dtype for entry in copies)])
        what = counted(len(copies), "weight is shown as", "weights are shown as")
        compared = f"the model's own copies ({types}) are compared with them when they are read"
        tag.files.notes.append(Note(COPIES, f"{what} the optimizer's f32 master values; {compared}"))
    module = same_kind(own, {name: values.get(name, value) for name, value in own.items()})
    module.update({name: value for name, value in values.items() if name not in module})
    empty = [
        str(name)
        for name, value in module.items()
        if isinstance(value, TensorEntry) and value.shape == (0,) and name not in known and name not in buffers
    ]
    if empty and (stage > 2 or any("zero_pp_rank" in name for name in tag.models.values())):
        what = f"{tag.folder} has no values of {counted(len(empty), 'weight')}: {listed(empty, 3)}"
        why = "ZeRO stage 3 keeps them in the *_optim_states.pt files, which are not there or do not name them."
        raise Corrupt(what, why, f"See what is there: {other_program('ls', tag.folder.path)}")
    return module


def _tie(first: dict[str, Any], own: dict[Any, Any], values: dict[str, Any]) -> None:
    """Gives the other names of shared parameters the values of those that are stored."""
    shared = first.get("shared_params")
    ties = dict(shared) if isinstance(shared, dict) else {}
    views = {entry.view: name for name in values if isinstance(entry := own.get(name), TensorEntry) and entry.numel}
    for name, entry in own.items():
        if name not in values and isinstance(entry, TensorEntry) and entry.view in views:
            ties.setdefault(name, views[entry.view])
    for name, source in ties.items():
        found = values.get(source, own.get(source))
        if isinstance(found, TensorEntry) and type(name) is str:
            values[name] = found
