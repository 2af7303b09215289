"""A tag's folder as DeepSpeed saves it: all ranks' files, joined into one model and its optimizer.

Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py (`state_dict`), bf16_optimizer.py, engine.py
(`_save_checkpoint`, `_save_moe_checkpoint`), utils/groups.py (which ranks share an expert). Stages 1 and 2 lay the
parameters of a group one after the other and divide that vector; the last ranks leave out its padding. Stage 3 divides
every parameter by itself, as many elements to each rank, the last filled up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Note, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import same_kind
from ckptool.commands import other_program
from ckptool.errors import Corrupt, Unsupported, counted, listed, printable
from ckptool.formats.boxes import Chunk, Joiner, begin_alike
from ckptool.formats.deepspeed.flat import Range, RankVector, Vector, bare, in_a_row, join
from ckptool.formats.deepspeed.shares import (
    Share,
    check_mappings,
    checked,
    complete,
    named_groups,
    share_of,
)
from ckptool.formats.joined_folder import JoinedFolder, damaged, lacks, mixed, number_in
from ckptool.formats.placements import sizes_of

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


@dataclass(slots=True, eq=False)
class Tag:
    """The files in a tag's folder by kind and rank."""

    files: JoinedFolder
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

    def stage(self, number: int) -> Tag:
        """The files of a rank of model parallelism, put together with these."""
        if number and number not in self.stages:
            self.stages[number] = Tag(self.files)
        return self.stages[number] if number else self

    def model(self, rank: int, *, layered: bool = False) -> dict[str, Any]:
        """A rank's model states. layered: the weights may be in other files. Raises `Corrupt` for something else."""
        tree = self.files.open(self.models[rank])
        module = tree.get("module", ()) if isinstance(tree, dict) else ()
        if not isinstance(tree, dict) or not (isinstance(module, dict) or (layered and module is None)):
            raise damaged(self.folder, f"{self.models[rank]} has no `module` with the weights of a model in it")
        return tree

    def shares(self) -> list[Share]:
        """What all ranks have of the optimizer, which has to fit together."""
        found = [share_of(rank, name, self.files.open(name)) for rank, name in sorted(self.optimizers.items())]
        if found:
            checked(self.folder, found)
        return found


def tag_files(folder: Folder) -> Tag:
    """The files in a tag's folder. Raises `Conflict` for two of one rank, `Corrupt` where the model's are missing."""
    tag = Tag(JoinedFolder(folder))
    for name in folder.names:
        for pattern in (_MODEL, _OPTIMIZER):
            if found := pattern.fullmatch(name):
                mine = tag.stage(int(found["mp"]))
                files, rank = mine.models if pattern is _MODEL else mine.optimizers, int(found["rank"] or 0)
                if rank in files:
                    raise mixed(folder, files[rank], name, "both are of one rank")
                files[rank] = name
        for pattern, names in ((_EXPERT, tag.experts), (_LAYER, tag.layers), (_OTHER, tag.others)):
            if pattern.fullmatch(name):
                names.append(name)
    if not tag.models:
        raise lacks(folder, "mp_rank_00_model_states.pt, which has the names and shapes of the weights")
    return tag


def parallel(folder: Folder, name: str) -> Unsupported:
    """The error for a model that is divided by tensor parallelism."""
    return Unsupported(
        f"{folder} was saved with tensor parallelism, which {name} is of",
        "Each rank has parts of the weights, and how those are joined depends on the model.",
        "With DeepSpeed: deepspeed/checkpoint/ds_to_universal.py, which has rules for it; then name its folder here.",
    )


def read_tag(folder: Folder) -> Checkpoint:
    """The checkpoint of a tag's folder; see `deepspeed.read`."""
    tag = tag_files(folder)
    if tag.stages or tag.layers:
        from ckptool.formats.deepspeed.layers import read_stages

        return read_stages(tag)
    first = tag.model(min(tag.models))
    if "offloaded_tensors" in folder or first.get("ds_autoep_layers"):
        what = "experts in AutoEP" if first.get("ds_autoep_layers") else "an optimizer that was offloaded to NVMe"
        why = "Its values are laid out in another way than those of ZeRO, which is not read."
        raise Unsupported(f"{folder} has {what}", why, "With DeepSpeed: load it, and save it without.")
    shares = tag.shares()
    own = same_kind(first["module"], dict(first["module"]))
    own.update(_experts(tag, first))
    joined = joined_groups(tag, first, shares, own) if shares else Joined(_masters(tag, first, own))
    models = Models(tag, first, own, joined.weights, shares[0].stage if shares else 0, len(shares))
    tree = tree_of(first, models.module(), joined.optimizer, shares[0].rest if shares else {})
    tree |= {name: tag.files.open(name) for name in tag.others}
    if not shares and first.get("param_shapes") is not None:
        message = "the optimizer's files are not there: the weights are the model's own, and its f32 values are lost"
        tag.files.notes.append(Note(NO_OPTIMIZER, message))
    world = first.get("dp_world_size")  # of stage 0 the first rank alone saves
    ranks = len(shares) or (world if type(world) is int else 1)
    found = checkpoint_of(tag, tree, f", {shares[0].engine}" if shares else "", max(1, ranks))
    if (
        shares
        and shares[0].stage > 2
        and not any("step" in shares[0].undivided(n) for n in range(len(shares[0].weights)))
    ):
        found = replace(found, untied=tuple(share.file for share in shares))  # stages 1 and 2 have the weights twice
    return found


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


# The optimizer's vectors ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Joined:
    """The trained weights and the optimizer's state by name."""

    weights: dict[str, TensorEntry] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None


class _Placed(NamedTuple):
    """A tensor of a group, and by key ("" for the weights) the ranges of the vectors that its values are in."""

    name: str
    shape: tuple[int, ...]
    group: int
    ranges: dict[str, list[Range]]


def _copy(own: Any, shape: tuple[int, ...]) -> Chunk | None:
    """The model's own copy of a weight, to which the optimizer's is compared; stage 3 has none."""
    if not isinstance(own, TensorEntry) or own.shape != shape or not own.dtype.is_float:
        return None
    return Chunk(own, (0,) * len(shape), "the model's own copy")


def _masters(tag: Tag, first: dict[str, Any], own: dict[Any, Any]) -> dict[str, TensorEntry]:
    """Stage 0 in bf16 or fp16: the f32 weights of its optimizer, which has them in the order of the model's, each by
    itself or those of a group in a row."""
    optimizer, buffers = first.get("optimizer"), first.get("buffer_names") or ()
    state = optimizer if isinstance(optimizer, dict) else {}
    single = [each for group in state.get("fp32_groups") or () if isinstance(group, list) for each in group]
    masters = [(each, _of_shape) for each in single]
    masters += [(each, _in_a_vector) for each in state.get("fp32_groups_flat") or ()]
    left = {n: e for n, e in own.items() if isinstance(e, TensorEntry) and e.dtype.is_float and n not in buffers}
    found: dict[str, TensorEntry] = {}
    for wrapped, names_of in masters:
        master = bare(wrapped)
        names = names_of(master, left) if isinstance(master, TensorEntry) else []
        if not names or sum(left[name].numel for name in names) != master.numel:
            raise damaged(tag.folder, f"the optimizer has f32 weights {master!r:.100} that are none of the model's")
        vector, begin = master.reshape((master.numel,)), 0
        for copy, name in ((left.pop(name), name) for name in names):
            entry = vector.narrow(0, begin, copy.numel).reshape(copy.shape)
            whole = Chunk(entry, (0,) * len(copy.shape), "the optimizer")
            found[name] = tag.joiner.tensor(name, entry.shape, entry.dtype, [whole], _copy(copy, entry.shape))
            begin += copy.numel
    return found


def _of_shape(master: TensorEntry, left: dict[str, TensorEntry]) -> list[str]:
    """The weight of this shape; between several (some may be frozen) their first values decide."""
    names = [name for name, entry in left.items() if entry.shape == master.shape]
    return [name for name in names if len(names) > 1 and begin_alike(master, left[name])][:1] or names[:1]


def _in_a_vector(master: TensorEntry, left: dict[str, TensorEntry]) -> list[str]:
    """The weights that lie one after the other in a vector, those of other groups left out by their first values."""
    names, begin = [], 0
    for name, entry in left.items():
        if entry.numel <= master.numel - begin and begin_alike(master.narrow(0, begin, entry.numel), entry):
            names.append(name)
            begin += entry.numel
    return names


def joined_groups(tag: Tag, first: dict[str, Any], shares: list[Share], own: dict[Any, Any]) -> Joined:
    """Every parameter that the optimizer has, by name. own: the model's copies of them."""
    shapes = shapes_of(tag, first, tag.models[min(tag.models)])
    _check_steps(tag, first, shares[0])
    laid = _whole_vectors(tag, first, shares, shapes) if shares[0].stage < 3 else _divided_each(tag, shares, shapes)
    joined = Joined()
    state: dict[str, dict[str, Any]] = {}
    names: dict[int, list[str]] = {}
    for name, shape, group, ranges in laid:
        if name in joined.weights:
            raise damaged(tag.folder, f"{name} is in two groups of the optimizer")
        values = {
            key: join(tag.joiner, f"{name} {key}".strip(), shape, parts, None if key else _copy(own.get(name), shape))
            for key, parts in ranges.items()
        }
        joined.weights[name] = values.pop("")
        state[name] = values | shares[0].undivided(group)
        names.setdefault(group, []).append(name)
    groups = named_groups(shares[0].groups, names)
    joined.optimizer = {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": groups}
    return joined


def _check_steps(tag: Tag, first: dict[str, Any], share: Share) -> None:
    """Raises `Conflict` where the optimizer has taken more steps than the model; fewer are noted (a restart)."""
    total, skipped = first.get("global_steps"), first.get("skipped_steps", 0)
    steps = [steps for group in range(len(share.weights)) if (steps := number_in(share.undivided(group).get("step")))]
    if type(total) is not int or type(skipped) is not int or not steps or max(steps) == total - skipped:
        return
    what = f"the model is at step {total - skipped:,}, the optimizer at step {int(max(steps)):,}"
    if max(steps) > total - skipped + 1:  # DeepSpeed before 0.15 counts a first step that changes nothing
        raise mixed(tag.folder, tag.models[min(tag.models)], share.file, what)
    why = "either the optimizer was restarted, or its files are of another step; the files do not tell which"
    tag.files.notes.append(Note(STEPS, f"{what}: {why}"))


def shapes_of(
    tag: Tag, states: dict[str, Any], file: str, key: str = "param_shapes"
) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of a file's parameters by name, for each group. Raises `Corrupt` for what is no shape."""
    groups = states.get(key) or ()
    found = []
    for group in groups if isinstance(groups, (list, tuple)) else (groups,):
        shapes = {name: sizes_of(value) for name, value in group.items()} if isinstance(group, dict) else {"": None}
        if not all(type(name) is str and shape is not None for name, shape in shapes.items()):
            raise damaged(tag.folder, f"{file} has {key} that are no names and shapes")
        found.append({name: shape for name, shape in shapes.items() if shape is not None})
    return found


def _whole_vectors(
    tag: Tag, first: dict[str, Any], shares: list[Share], shapes: list[dict[str, tuple[int, ...]]]
) -> Iterator[_Placed]:
    """Stages 1 and 2: each group is a vector, of which every rank of a team has a piece."""
    count = len(shares[0].weights)
    if len(shapes) != count:
        raise mixed(
            tag.folder, tag.models[0], shares[0].file, f"one has {counted(len(shapes), 'group')}, the other {count:,}"
        )
    for group in range(count):
        for number, team in enumerate(_teams(first, shares, group)):
            keys = ["", *team[0].divided(group)]
            vectors = {key: Vector(share.vector(group, key) for share in team) for key in keys}
            paddings = team[0].paddings[group] if group < len(team[0].paddings) else ()
            row = list(in_a_row(shapes[group], paddings if isinstance(paddings, list) else ()))
            _check_vector(tag, first, team, group, row, vectors[""])
            for name, begin, length in row:
                full = _global_name(tag, name, number, shapes[group]) if len(team) < len(shares) else name
                yield _Placed(
                    full, shapes[group][name], group, {key: [(v, begin, length)] for key, v in vectors.items()}
                )


def _check_vector(
    tag: Tag, first: dict[str, Any], team: list[Share], group: int, row: list[tuple[str, int, int]], vector: Vector
) -> None:
    """Raises `Corrupt` where the parameters take more or less than a vector has, `Conflict` where ranks lay them out
    otherwise."""
    needed = max((begin + length for _, begin, length in row), default=0)
    step = 2 * len(team)  # to which the vector is filled up
    if -(-needed // step) != -(-vector.length // step):
        has = f"have {counted(needed, 'element')}, the ranks' files {vector.length:,}"
        raise damaged(tag.folder, f"the parameters of group {group} {has}")
    config = first.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        return  # DeepSpeed's own record of the pieces has another order than its vectors
    for share, begin in zip(team, vector.begins, strict=True):
        if name := check_mappings(share, group, row, begin):
            raise mixed(tag.folder, tag.models[0], share.file, f"{name} lies elsewhere")


def _teams(first: dict[str, Any], shares: list[Share], group: int) -> list[list[Share]]:
    """The ranks that divide a group among themselves; of experts, several teams with experts of their own."""
    counts = shares[0].counts
    size = counts[group] if group < len(counts) else max(counts)
    if size >= len(shares) or len(shares) % size:
        return [shares]
    teams = len(shares) // size
    config = first.get("ds_config")
    if isinstance(config, dict) and config.get("use_data_before_expert_parallelism"):
        return [shares[number * size : (number + 1) * size] for number in range(teams)]
    return [shares[number::teams] for number in range(teams)]


def _global_name(tag: Tag, name: str, team: int, names: Iterable[str]) -> str:
    """The name of an expert among all of them, of its name among those of its ranks."""
    found = _LOCAL_EXPERT.fullmatch(name)
    if found is None:
        what = f"{tag.folder}: {name} is divided over some of the ranks, and is no expert of deepspeed.moe"
        raise Unsupported(
            what, "Which ranks have which part of it is not known here.", "With DeepSpeed: load it there."
        )
    of_module = (
        each for other in names if (each := _LOCAL_EXPERT.fullmatch(other)) and each["module"] == found["module"]
    )
    local = 1 + max(int(each["number"]) for each in of_module)
    return f"{found['module']}{team * local + int(found['number'])}{found['rest']}"


def _divided_each(tag: Tag, shares: list[Share], shapes: list[dict[str, tuple[int, ...]]]) -> Iterator[_Placed]:
    """Stage 3: every rank has as many elements of each parameter, one after the other in its vectors."""
    world = len(shares)
    lengths = [entry.shape[0] for entry in shares[0].weights]
    needed = [sum(-(-prod(shape) // world) for shape in group.values()) for group in shapes]
    # Where a parameter is in two vectors, they are read as one.
    runs = [[number] for number in range(len(lengths))] if needed == lengths else [[*range(len(lengths))]]
    if odd := next((share for share in shares if [entry.shape[0] for entry in share.weights] != lengths), None):
        raise mixed(tag.folder, shares[0].file, odd.file, "their vectors have other lengths")
    if sum(needed) != sum(lengths):
        has = f"take {counted(sum(needed), 'element')} of each rank, {shares[0].file} has {sum(lengths):,}"
        raise damaged(tag.folder, f"the parameters {has}")
    for number, run in enumerate(runs):
        keys = ["", *shares[0].divided(run[0])]
        vectors = {key: [Vector(share.vector(group, key) for group in run) for share in shares] for key in keys}
        begin = 0
        for group in range(len(shapes)) if len(runs) == 1 else (number,):
            for name, shape in shapes[group].items():
                yield _Placed(
                    name, shape, group, {key: list(_shares_of(v, begin, shape)) for key, v in vectors.items()}
                )
                begin += -(-prod(shape) // world)


def _shares_of(vectors: list[Vector], begin: int, shape: tuple[int, ...]) -> Iterator[Range]:
    """What each rank has of a tensor, without the padding of the last."""
    total = prod(shape)
    each = -(-total // len(vectors))
    for rank, vector in enumerate(vectors):
        if rank == 0 or rank * each < total:
            yield vector, begin, max(0, min(each, total - rank * each))


# The model -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Models:
    """The model states of all ranks. own: what the first saved as `module`.  trained: the f32 master values.

    A frozen parameter of stage 3 is divided over the ranks; a buffer is saved whole by each.
    """

    tag: Tag
    first: dict[str, Any]
    own: dict[Any, Any]
    trained: dict[str, TensorEntry]
    stage: int
    world: int
    pieces: dict[str, list[RankVector]] = field(default_factory=dict)
    buffers: dict[str, list[Chunk]] = field(default_factory=dict)

    def module(self) -> dict[Any, Any]:
        """The model: trained, frozen and tied parameters, buffers, in the order in which it was saved."""
        tag, file = self.tag, self.tag.models[min(self.tag.models)]
        self._take(min(tag.models), self.first)
        if self.stage > 2:
            complete(tag.folder, list(tag.models), self.world, file)
            self._others(file)
        values: dict[str, Any] = dict(self.trained)
        for shapes in shapes_of(tag, self.first, file, "frozen_param_shapes"):
            for name, shape in shapes.items():
                if pieces := self.pieces.get(name):
                    values[name] = self._frozen(name, shape, pieces)
        values |= {name: tag.joiner.replicated(name, chunks) for name, chunks in self.buffers.items()}
        self._tie(values)
        self._copies()
        module = same_kind(self.own, {name: values.get(name, value) for name, value in self.own.items()})
        module.update({name: value for name, value in values.items() if name not in module})
        self._refuse_empty(module)
        return module

    def _others(self, file: str) -> None:
        """The model states of the other ranks, of which frozen pieces and buffers are taken."""
        shapes = shapes_of(self.tag, self.first, file)
        for rank in sorted(self.tag.models)[1:]:
            other, name = self.tag.model(rank), self.tag.models[rank]
            for key in ("global_steps", "dp_world_size"):
                if self.first.get(key) != other.get(key):
                    what = f"{key} are {self.first.get(key)!s} and {other.get(key)!s}"
                    raise mixed(self.tag.folder, file, name, what)
            if shapes_of(self.tag, other, name) != shapes:
                raise mixed(self.tag.folder, file, name, "their parameters have other names or shapes")
            self._take(rank, other)

    def _take(self, rank: int, states: dict[str, Any]) -> None:
        owner = f"rank {rank:,}"
        fragments = states.get("frozen_param_fragments")
        for name, entry in fragments.items() if isinstance(fragments, dict) else ():
            if isinstance(entry, TensorEntry):
                self.pieces.setdefault(name, []).append(RankVector(entry, owner))
        module, names = states["module"] or {}, states.get("buffer_names")
        for name in names if isinstance(names, list) else ():
            if type(name) is str and isinstance(entry := module.get(name), TensorEntry):
                self.buffers.setdefault(name, []).append(Chunk(entry, (0,) * len(entry.shape), owner))

    def _frozen(self, name: str, shape: tuple[int, ...], pieces: list[RankVector]) -> TensorEntry:
        if self.stage < 3 and isinstance(own := self.own.get(name), TensorEntry):
            return own
        if len(pieces) == 1 and pieces[0].entry.shape == shape:
            return pieces[0].entry
        vectors = [Vector([piece]) for piece in pieces if len(piece.entry.shape) == 1]
        return join(self.tag.joiner, name, shape, _shares_of(vectors, 0, shape) if vectors else ())

    def _tie(self, values: dict[str, Any]) -> None:
        """Gives the other names of shared parameters the values of those that are stored."""
        shared = self.first.get("shared_params")
        ties = dict(shared) if isinstance(shared, dict) else {}
        views = {own.view: name for name in values if isinstance(own := self.own.get(name), TensorEntry) and own.numel}
        for name, entry in self.own.items():
            if name not in values and isinstance(entry, TensorEntry) and entry.view in views:
                ties.setdefault(name, views[entry.view])
        for name, source in ties.items():
            found = values.get(source, self.own.get(source))
            if isinstance(found, TensorEntry) and type(name) is str:
                values[name] = found

    def _copies(self) -> None:
        """A note on the model's own copies of the weights, in place of which the optimizer's are shown."""
        copies = [own for name in self.trained if isinstance(own := self.own.get(name), TensorEntry) and own.numel]
        if copies:
            types = listed([str(dtype) for dtype in Counter(own.dtype for own in copies)])
            what = counted(len(copies), "weight is shown as", "weights are shown as")
            own = f"the model's own copies ({types}) are compared with them when they are read"
            self.tag.files.notes.append(Note(COPIES, f"{what} the optimizer's f32 master values; {own}"))

    def _refuse_empty(self, module: dict[Any, Any]) -> None:
        known = {name for shapes in shapes_of(self.tag, self.first, "", "frozen_param_shapes") for name in shapes}
        known |= set(self.buffers)
        empty = [
            str(name)
            for name, value in module.items()
            if isinstance(value, TensorEntry) and value.shape == (0,) and name not in known
        ]
        if empty and (self.stage > 2 or any("zero_pp_rank" in name for name in self.tag.models.values())):
            what = f"{self.tag.folder} has no values of {counted(len(empty), 'weight')}: {listed(empty, 3)}"
            why = "ZeRO stage 3 keeps them in the *_optim_states.pt files, which are not there or do not name them."
            raise Corrupt(what, why, f"See what is there: {other_program('ls', self.tag.folder.path)}")
