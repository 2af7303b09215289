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
from itertools import accumulate, chain, repeat
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Note, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import Global, Object, fields, items, same_kind
from ckptool.commands import other_program
from ckptool.errors import Corrupt, Unsupported, counted, listed, printable
from ckptool.facts import dataclass, field, replace
from ckptool.formats.folder import complete, damaged, lacks, mixed, number_in
from ckptool.formats.pieces import Joiner, Vector, begin_alike, refuse_other
from ckptool.formats.placements import Piece, sizes_of
from ckptool.pickles.torch_objects import BUILDERS

NAME = "deepspeed"
COPIES, STEPS, NO_OPTIMIZER = "copies-not-shown", "steps-differ", "no-optimizer-files"  # of the notes
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

    folder: Folder
    joiner: Joiner
    models: dict[int, str] = field(default_factory=dict)  # by rank; of stages below 3, of rank 0
    optimizers: dict[int, str] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    stages: dict[int, Tag] = field(default_factory=dict)  # of a pipeline, or ranks of tensor parallelism, but the first
    others: list[str] = field(default_factory=list)

    @property
    def first(self) -> str:
        """The file of the first rank's model states."""
        return self.models[min(self.models)]

    def model(self, file: str, *, layered: bool = False) -> dict[str, Any]:
        """A rank's model states. layered: the weights may be in other files. Raises `Corrupt` for something else."""
        tree = self.joiner.open(file).tree
        module = tree.get("module", ()) if isinstance(tree, dict) else ()
        if not isinstance(module, dict) and not (layered and module is None):
            raise damaged(self.folder, f"{file} has no `module` with the weights of a model in it")
        states: dict[str, Any] = tree
        return states

    def shares(self) -> list[Share]:
        """What all ranks have of the optimizer. Raises `Conflict` for shares of several checkpoints, `Corrupt` where
        some are missing."""
        found = [Share(rank, name, self.joiner.open(name).tree) for rank, name in sorted(self.optimizers.items())]
        for other in found[1:]:
            refuse_other(self.folder, (found[0].file, found[0].facts), (other.file, other.facts))
        if found:
            complete(self.folder, self.optimizers, max(found[0].counts), found[0].file)
        return found


def tag_files(folder: Folder) -> Tag:
    """The files in a tag's folder. Raises `Conflict` for two of one rank, `Corrupt` where the model's are missing."""
    tag = Tag(folder, joiner := Joiner(folder))
    for name in folder.names:
        for pattern, names in ((_EXPERT, tag.experts), (_LAYER, tag.layers), (_OTHER, tag.others)):
            if pattern.fullmatch(name):
                names.append(name)
        if found := _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name):
            number, rank = int(found["mp"]), int(found["rank"] or 0)
            mine = tag.stages.setdefault(number, Tag(folder, joiner)) if number else tag
            files = mine.models if found.re is _MODEL else mine.optimizers
            if files.setdefault(rank, name) != name:
                raise mixed(folder, files[rank], name, "both are of one rank")
    if not tag.models:
        raise lacks(folder, "mp_rank_00_model_states.pt, which has the names and shapes of the weights")
    return tag


# A rank's share ------------------------------------------------------------------------------------------------------


class Share:
    """The optimizer's file of one rank: its share of the flat vectors. Raises `Corrupt` for a file of another kind.

    weights: the f32 master values of each group (of stage 3: each sub-group).  states: the state of the base optimizer,
    by group.  groups: its parameter groups.  counts: over how many ranks each group is divided.  rest: what says
    nothing of the layout.  engine: the optimizer that wrote it, for people.
    """

    def __init__(self, rank: int, file: str, tree: Any) -> None:
        found = fields(fields(tree).get("optimizer_state_dict"))
        vectors, base = (next((found[key] for key in keys if key in found), None) for keys in (_VECTORS, _STATES))
        self.rank, self.file = rank, file
        weights = [*map(bare, items(vectors))]
        if vectors is None or not all(isinstance(each, TensorEntry) and len(each.shape) == 1 for each in weights):
            raise damaged(file, "has no f32 weights in flat vectors")
        self.weights: list[TensorEntry] = weights
        states = base if isinstance(base, list) else fields(base).get("state")
        self.states: dict[Any, Any] = dict(enumerate(states)) if isinstance(states, list) else fields(states)
        self.groups = items(fields(base).get("param_groups"))
        stage = plain(found.get("zero_stage"))
        self.stage = stage if type(stage) is int else 1
        self.counts = (*items(found.get("partition_count")),) or (found.get("partition_count"),)
        if not all(type(count) is int and 0 < count < 1 << 32 for count in self.counts):
            raise damaged(file, "does not say over how many ranks it is divided")
        self.mappings = [*map(fields, items(found.get("param_slice_mappings")))]
        self.paddings = [*map(items, items(found.get("param_alignment_paddings")))]
        self.rest = {str(key): plain(value) for key, value in found.items() if key not in _LAYOUT}
        self.engine = f", ZeRO stage {self.stage}" if "zero_stage" in found else ", BF16_Optimizer"

    @property
    def facts(self) -> dict[str, Any]:
        """What the shares of all ranks have alike."""
        settings = [{k: v for k, v in fields(group).items() if type(v) in _PLAIN} for group in self.groups]
        facts = {"ZeRO stage": self.stage, "division over ranks": self.counts, "number of groups": len(self.weights)}
        facts |= {"learning rate or another setting": settings}
        if self.stage > 2:
            facts["length of vectors"] = [entry.shape[0] for entry in self.weights]
        for number in range(len(self.weights)):
            once = undivided(self.state(number))
            facts |= {f"{key} of group {number} of the optimizer": value for key, value in once.items()}
        return facts

    def state(self, group: int) -> dict[Any, Any]:
        return fields(self.states.get(group))

    def vector(self, group: int, key: str) -> tuple[TensorEntry, str]:
        """The master values of a group, or what the optimizer keeps under a key for it, as long as those; and whose."""
        weights = self.weights[group]
        entry = self.state(group).get(key) if key else weights
        if not isinstance(entry, TensorEntry) or len(entry.shape) != 1 or entry.shape[0] < weights.shape[0]:
            raise damaged(self.file, f"has no {key} for all of group {group}, of which it has the weights")
        return replace(entry, shape=weights.shape), f"rank {self.rank:,}"

    def placed(self, group: int) -> dict[str, tuple[int, int]]:
        """Where the file says that the pieces of names begin in this rank's vector, and their lengths."""
        found = {}
        for name, address in self.mappings[group].items() if group < len(self.mappings) else ():
            begin, length = (fields(address).get(key) for key in ("start", "numel"))
            if type(name) is str and type(begin) is int and type(length) is int and min(begin, length) >= 0:
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
        for key, value in fields(state).items()
        if not (isinstance(value, TensorEntry) and value.shape)
    }


def plain(node: Any) -> Any:
    """An object of DeepSpeed's own (a loss scaler) as its attributes, a member of an enum (a stage) as its number."""
    if not isinstance(node, Object):
        return node
    is_member = type(node.args) is tuple and len(node.args) == 1 and type(node.args[0]) is int
    return node.args[0] if is_member else dict(node.attributes)


def named_groups(groups: Any, names: Mapping[int, Iterable[str]]) -> list[dict[str, Any]]:
    """Parameter groups with names in place of the numbers of their vectors. names: those in each vector."""
    return [
        {**group, "params": [name for number in items(group.get("params")) for name in names.get(number, ())]}
        for group in items(groups)
        if isinstance(group, dict)
    ]


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


# The pieces of trained tensors ---------------------------------------------------------------------------------------


_Placed = tuple[str, tuple[int, ...], int, int]  # a tensor of a group, and where it begins in its vectors
_Run = tuple[dict[str, list[Vector]], list[_Placed], int]
"""Tensors in a row, and by key ("" for the weights) the vectors that each of them is divided over evenly: one that the
ranks have together, or of stage 3 one of every rank. With the number of elements that the vectors are filled up to."""


def joined_groups(
    tag: Tag, first: dict[str, Any], shares: list[Share], own: dict[Any, Any]
) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Every parameter that the optimizer has, by name, and the optimizer's state. own: the model's copies of them.

    Raises `Corrupt` where the parameters take more or less than the vectors have, `Conflict` where the optimizer has
    taken more steps than the model; fewer are noted (a restart).
    """
    share, total, skipped = shares[0], first.get("global_steps"), first.get("skipped_steps", 0)
    steps = [n for group in range(len(share.weights)) if (n := number_in(share.state(group).get("step")))]
    if type(total) is int and type(skipped) is int and steps and max(steps) != total - skipped:
        what = f"the model is at step {total - skipped:,}, the optimizer at step {int(max(steps)):,}"
        if max(steps) > total - skipped + 1:  # DeepSpeed before 0.15 counts a first step that changes nothing
            raise mixed(tag.folder, tag.first, share.file, what)
        why = "either the optimizer was restarted, or its files are of another step; the files do not tell which"
        tag.joiner.notes.append(Note(STEPS, f"{what}: {why}"))
    weights: dict[str, TensorEntry] = {}
    state: dict[str, dict[str, Any]] = {}
    names: dict[int, list[str]] = {}
    for rows, laid, step in (_divided_each if share.stage > 2 else _whole_vectors)(tag, first, shares):
        world, length = len(rows[""]), rows[""][0].length
        needed = max((begin + -(-prod(shape) // world) for _, shape, _, begin in laid), default=0)
        if -(-needed // step) != -(-length // step):
            what = f"the parameters of group {laid[0][2] if laid else 0} take {counted(needed, 'element')}"
            raise damaged(tag.folder, f"{what} of the ranks' vectors, which have {length:,}")
        for name, shape, group, begin in laid:
            if name in weights:
                raise damaged(tag.folder, f"{name} is in two groups of the optimizer")
            copy = own.get(name)  # the model's own, to which the optimizer's is compared; stage 3 has none
            if not isinstance(copy, TensorEntry) or copy.shape != shape or not copy.dtype.is_float:
                copy = None
            values = {
                key: tag.joiner.flat(f"{name} {key}".strip(), shape, _pieces(row, begin, shape), None if key else copy)
                for key, row in rows.items()
            }
            weights[name] = values.pop("")
            if slots := values | undivided(share.state(group)):
                state[name] = slots
            names.setdefault(group, []).append(name)
    return weights, {"state": state, "param_groups": named_groups(share.groups, names)}


def _pieces(vectors: list[Vector], begin: int, shape: tuple[int, ...]) -> Iterator[Piece]:
    """What each of the vectors has of a tensor that they divide evenly, without the padding of the last."""
    total = prod(shape)
    each = -(-total // len(vectors)) if vectors else 0
    for number, vector in enumerate(vectors):
        if number == 0 or number * each < total:
            yield from vector.cut(begin, min(each, total - number * each), number * each)


def _rows(team: list[Share], groups: Iterable[int], *, divided: bool) -> dict[str, list[Vector]]:
    """By key the vectors that these ranks have: one of all of them, or where each tensor is divided, one of each."""
    groups = [*groups]
    state = team[0].state(min(groups, default=0))
    keys = ["", *(key for key, value in state.items() if isinstance(value, TensorEntry) and value.shape)]
    teams = [[share] for share in team] if divided else [team]

    def vector(team: list[Share], key: str) -> Vector:
        return Vector(share.vector(group, key) for share in team for group in groups)

    return {key: [vector(each, key) for each in teams] for key in keys}


def _in_a_row(group: int, shapes: Shapes, world: int, begin: int = 0, paddings: Iterable[int] = ()) -> list[_Placed]:
    """Where tensors begin that lie one after the other, each divided over as many vectors. paddings: behind them."""
    behind = chain(paddings, repeat(0))
    begins = accumulate((-(-prod(shape) // world) + next(behind) for shape in shapes.values()), initial=begin)
    return [(name, shape, group, at) for (name, shape), at in zip(shapes.items(), begins, strict=False)]


def _whole_vectors(tag: Tag, first: dict[str, Any], shares: list[Share]) -> Iterator[_Run]:
    """Stages 1 and 2: each group is a vector, of which every rank of a team has a piece.

    Raises `Conflict` where ranks say that they lay the tensors out otherwise.
    """
    share, world, config = shares[0], len(shares), fields(first.get("ds_config"))
    shapes = shapes_of(tag, first, tag.first)
    if len(shapes) != len(share.weights):
        groups = f"one has {counted(len(shapes), 'group')}, the other {len(share.weights):,}"
        raise mixed(tag.folder, tag.models[0], share.file, groups)
    # DeepSpeed's own record of the pieces has another order than its vectors.
    mapped = not fields(config.get("zero_optimization")).get("round_robin_gradients")
    for group, named in enumerate(shapes):
        size = share.counts[group] if group < len(share.counts) else max(share.counts)
        size = world if size >= world or world % size else size
        teams = world // size  # of experts, several, with experts of their own
        laid = _in_a_row(group, named, 1, paddings=share.paddings[group] if group < len(share.paddings) else ())
        where = {name: (at, prod(shape)) for name, shape, _, at in laid}
        for number in range(teams):
            in_blocks = config.get("use_data_before_expert_parallelism")
            team = shares[number * size : (number + 1) * size] if in_blocks else shares[number::teams]
            rows = _rows(team, [group], divided=False)
            for each, low in zip(team, rows[""][0].begins, strict=True) if mapped else ():
                high = low + each.weights[group].shape[0]
                for name, place in each.placed(group).items():  # of the rank's own alone: there may be a thousand ranks
                    at, size = where.get(name, (high, 0))
                    begin, end = max(at, low), min(at + size, high)
                    if begin < end and place != (begin - low, end - begin):
                        raise mixed(tag.folder, tag.models[0], each.file, f"{name} lies elsewhere")
            every = [(_global_name(tag, each[0], number, named), *each[1:]) for each in laid] if teams > 1 else laid
            yield rows, every, 2 * size


def _global_name(tag: Tag, name: str, team: int, names: Iterable[str]) -> str:
    """The name of an expert among all of them, of its name among those of its ranks."""
    found = _LOCAL_EXPERT.fullmatch(name)
    if found is None:
        what = f"{tag.folder}: {name} is divided over some of the ranks, and is no expert of deepspeed.moe"
        why = "Which ranks have which part of it is not known here."
        raise Unsupported(what, why, "With DeepSpeed: load it there.")
    experts = filter(None, map(_LOCAL_EXPERT.fullmatch, names))
    local = 1 + max(int(each["number"]) for each in experts if each["module"] == found["module"])
    return f"{found['module']}{team * local + int(found['number'])}{found['rest']}"


def _divided_each(tag: Tag, first: dict[str, Any], shares: list[Share]) -> Iterator[_Run]:
    """Stage 3: every rank has as many elements of each parameter, one after the other in its vectors."""
    world, lengths = len(shares), [entry.shape[0] for entry in shares[0].weights]
    shapes = shapes_of(tag, first, tag.first)
    needed = [sum(-(-prod(shape) // world) for shape in named.values()) for named in shapes]
    if needed == lengths:
        for group, named in enumerate(shapes):
            yield _rows(shares, [group], divided=True), _in_a_row(group, named, world), 1
    else:  # where a parameter is in two vectors, they are read as one
        begins = accumulate(needed, initial=0)
        laid = [_in_a_row(*each, world, begin) for each, begin in zip(enumerate(shapes), begins, strict=False)]
        yield _rows(shares, range(len(lengths)), divided=True), [*chain(*laid)], 1


def masters(tag: Tag, first: dict[str, Any], own: dict[Any, Any]) -> dict[str, TensorEntry]:
    """Stage 0 in bf16 or fp16: the f32 weights of its optimizer, which has them in the order of the model's, each by
    itself or those of a group in a row."""
    state, buffers = fields(first.get("optimizer")), first.get("buffer_names") or ()
    single = [(each, False) for group in items(state.get("fp32_groups")) for each in items(group)]
    left = {n: e for n, e in own.items() if isinstance(e, TensorEntry) and e.dtype.is_float and n not in buffers}
    found: dict[str, TensorEntry] = {}
    for wrapped, in_a_row in (*single, *((each, True) for each in items(state.get("fp32_groups_flat")))):
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
        row = [Vector([(master.reshape((master.numel,)), "the optimizer")])]
        for name, shape, _, at in _in_a_row(0, {name: left.pop(name).shape for name in names}, 1):
            found[name] = tag.joiner.flat(name, shape, _pieces(row, at, shape), own[name])
    return found


# The checkpoint ------------------------------------------------------------------------------------------------------


def checkpoint_of(
    tag: Tag,
    first: dict[str, Any],
    own: dict[Any, Any],
    trained: dict[str, TensorEntry],
    optimizer: Any,
    rest: Mapping[str, Any],
    stage: int,
    ranks: int,
    engine: str,
) -> Checkpoint:
    """What the first rank saved, with the whole model and the optimizer by name in their places.

    own: what is there as `module`.  trained: the f32 master values.  rest: what the optimizer's files hold beside.
    """
    more: dict[str, Any] = {"module": _module_of(tag, first, own, trained, stage, ranks)}
    more |= {} if optimizer is None else {"optimizer": optimizer}
    more |= {ZERO: rest} if rest else {}
    more |= {name: tag.joiner.open(name).tree for name in tag.others}
    tree = {key: value for key, value in first.items() if key != "frozen_param_fragments"} | more
    version = first.get("ds_version")
    engine = f"DeepSpeed {printable(version) if type(version) is str else ''}".strip() + engine
    return tag.joiner.checkpoint(NAME, tree, engine, ranks, first.get("global_steps"))


def _module_of(
    tag: Tag, first: dict[str, Any], own: dict[Any, Any], trained: dict[str, TensorEntry], stage: int, world: int
) -> dict[Any, Any]:
    """The model: trained, frozen and tied parameters, buffers, in the order in which it was saved.

    A frozen parameter of stage 3 is divided over the ranks; a buffer is saved whole by each.
    """
    frozen: dict[str, list[tuple[TensorEntry, str]]] = {}
    buffers: dict[str, list[Piece]] = {}
    facts: dict[str, Any] = {}
    if stage > 2:
        complete(tag.folder, tag.models, world, tag.first)
    for rank, file in sorted(tag.models.items())[: None if stage > 2 else 1]:
        states, owner = tag.model(file) if facts else first, f"rank {rank:,}"
        about = {"step": states.get("global_steps"), "size of the world": states.get("dp_world_size")}
        about["list of parameters"] = shapes_of(tag, states, file)
        facts = facts or about
        refuse_other(tag.folder, (tag.first, facts), (file, about))
        for name, entry in fields(states.get("frozen_param_fragments")).items():
            if isinstance(entry, TensorEntry):
                frozen.setdefault(name, []).append((entry, owner))
        for name in items(states.get("buffer_names")):
            if type(name) is str and isinstance(entry := fields(states["module"]).get(name), TensorEntry):
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
                values[name] = tag.joiner.flat(name, shape, _pieces(vectors, 0, shape))
    values |= {name: tag.joiner.replicated(name, pieces) for name, pieces in buffers.items()}
    # The other names of shared parameters have the values of those that are stored.
    ties = dict(fields(first.get("shared_params")))
    views = {entry.view: name for name in values if isinstance(entry := own.get(name), TensorEntry) and entry.numel}
    for name, entry in own.items():
        if name not in values and isinstance(entry, TensorEntry) and entry.view in views:
            ties.setdefault(name, views[entry.view])
    for name, source in ties.items():
        if isinstance(value := values.get(source, own.get(source)), TensorEntry) and type(name) is str:
            values[name] = value
    if copies := Counter(e.dtype for name in trained if isinstance(e := own.get(name), TensorEntry) and e.numel):
        what = counted(copies.total(), "weight is shown as", "weights are shown as")
        compared = f"the model's own copies ({listed([*map(str, copies)])}) are compared with them when they are read"
        tag.joiner.notes.append(Note(COPIES, f"{what} the optimizer's f32 master values; {compared}"))
    module = same_kind(own, {**own, **values})
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
