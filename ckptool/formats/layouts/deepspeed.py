"""`deepspeed`: the folder of a tag (`global_step500`) that DeepSpeed wrote, or the one above, whose `latest` names it.

`mp_rank_00_model_states.pt` holds the model and everything else that was saved, of stage 3 of ZeRO one such file for
each rank; what a rank has of the optimizer's flat vectors is in its `zero_pp_rank_0_mp_rank_00_optim_states.pt`, and
`zero` puts these together. The tree is that of the first rank's model states, with whole weights under `module` and the
optimizer's state by name under `optimizer`.

Of a pipeline there are the files of every layer, and for each stage the model states, with an empty `module`, and the
shares of its own ranks. A universal folder has files for every parameter, whatever the world: `zero/NAME/fp32.pt`,
`exp_avg.pt`, `exp_avg_sq.pt` are a tensor, or a dictionary that has it under `param`; of stage 3 they are flat.
`step.pt` is there of stages 1 and 2. `zero/optimizer_state.pt` holds the parameter groups. Buffers and frozen
parameters may lie there in f32 as well; those in the model states beside them are of the type that they have.

Source: deepspeed/runtime/engine.py (`save_checkpoint`, the names of files; `_save_moe_checkpoint`),
utils/zero_to_fp32.py and checkpoint/ds_to_universal.py, 0.10 to 0.19; deepspeed/runtime/pipe/module.py
(`layer_03-model_states.pt`; parameters are called `3.weight`, those of tied layers `tied_modules.KEY.weight`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, TensorEntry
from ckptool.checkpoint.files import Folder, Input, folder_at, read_small
from ckptool.checkpoint.graph import alike
from ckptool.checkpoint.nodes import fields, items, same_kind
from ckptool.commands import command, other_program
from ckptool.errors import Ambiguous, Corrupt, Unsupported, counted, listed, printable
from ckptool.formats.folder import complete, damaged, lacks, mixed, names_in, number_in, one_of, without_copies
from ckptool.formats.layouts import zero
from ckptool.formats.layouts.zero import StageFiles
from ckptool.formats.marks import noted
from ckptool.formats.pieces import Joiner, Piece, Vector, agree, refuse_other
from ckptool.formats.placements import DIFFERENT, UNLIKE, same_leaf

NAME = "deepspeed"
LATEST = ("latest", "latest_universal")
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # copied beside every checkpoint
UNIVERSAL = "zero"  # the folder that a universal one has
MAX_TAG = 4_096  # bytes of the file `latest`
_STATES = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,7})_)?mp_rank_(?P<mp>\d{1,7})_?(?P<of>optim|model)_states\.pt"
)
_TAG = re.compile(r"global_step\d+(?:_universal)?")
_WEIGHT, _COMMON = "fp32", "optimizer_state.pt"
# Of the model states: what describes the model, and is read.
_OF_THE_MODEL = frozenset(
    "module buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params optimizer".split()
)
COPIES, NO_OPTIMIZER, NO_BUFFERS = "copies-not-shown", "no-optimizer-files", "no-buffers"  # of the notes
ZERO = "zero_optimizer_state"  # the key of what the optimizer's files hold beside the optimizer
_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt")
_OF_LAYERS = re.compile(r"layer_\d{1,7}-(?:.+-)?model_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d{1,7})-(?:model_00-)?model_states\.pt")
_OTHER = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt")


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and (_is_saved(source.path, source.names) or tag_of(source) is not None)


def belonging(folder: Folder) -> set[str]:
    """The names in a tag's folder, or the folder above, that belong to the checkpoint that is read there."""
    if _is_saved(folder.path, folder.names):
        return {name for name in folder.names if name.endswith("_states.pt") or name == UNIVERSAL}
    tag = tag_of(folder)
    return {name for name in (tag, *LATEST, *SCRIPTS) if name in folder} if tag else set()


def other_tags(folder: Folder) -> set[str]:
    """The tags in a folder beside the one that is read there: checkpoints of their own."""
    tags, _, name = _tags(folder)
    return {*tags} - {name}


def tag_of(folder: Folder) -> str | None:
    """The tag that is read in a folder; empty where `latest` leads nowhere or is missing beside several; None for other
    folders."""
    tags, latest, name = _tags(folder)
    return name if _is_tag(folder, name) else "" if tags or latest else None


def _tags(folder: Folder) -> tuple[list[str], str, str]:
    """The tags in a folder; the file that names one of them (`latest`), and what it says. Without it the only one."""
    candidates = [name for name in folder.names if _TAG.fullmatch(name) or SCRIPTS[0] in folder]
    tags = [name for name in candidates if _is_tag(folder, name)]
    for latest in (file for file in LATEST if file in folder):
        if folder_at(path := os.path.join(folder.path, latest)):  # a link to the folder of a step, maybe of another
            if (name := os.path.basename(os.path.realpath(path))) in tags:
                return tags, latest, name
            continue
        text = read_small(path, "the name of a tag", MAX_TAG)
        name = text.decode(errors="replace").strip()
        if tags or SCRIPTS[0] in folder or _is_tag(folder, name):
            return tags, latest, name
    return tags, "", tags[0] if len(tags) == 1 else ""


def _is_tag(folder: Folder, name: str) -> bool:
    """True for a folder inside, by its plain name, that has DeepSpeed's files."""
    path = os.path.join(folder.path, name)
    return name in folder and _is_saved(path, names_in(path))


def _is_saved(path: str, names: Collection[str]) -> bool:
    """True for a folder with ranks' files, or the parameters of a universal one."""
    is_universal = UNIVERSAL in names and _COMMON in names_in(os.path.join(path, UNIVERSAL))
    return is_universal or any(name.endswith("_states.pt") and _STATES.fullmatch(name) for name in names)


def _of_run(source: Folder) -> Checkpoint:
    """The checkpoint of the tag that `latest` names in this folder. Raises `Corrupt` where it leads elsewhere,
    `Ambiguous` for several tags without it."""
    tags, latest, name = _tags(source)
    advice = f"Name one: {command('inspect', os.path.join(source.path, tags[-1]))}" if tags else ""
    if not latest and not name:
        what = f"{source} holds {counted(len(tags), 'checkpoint')} of DeepSpeed, and no file `latest`"
        raise Ambiguous(f"{what}: {listed(tags, 3)}", fix=advice)
    if not _is_tag(source, name):
        path = os.path.join(source.path, latest)
        what = f"{path} names {name[:200]!r}, which is no folder of DeepSpeed's files beside it"
        why = "That tag was moved, deleted or not copied along, or its folder is another program's."
        raise Corrupt(what, why, advice or f"See what is in it: {other_program('ls', source.path)}")
    return one_of(source, Folder(os.path.join(source.path, name)), tags, read)


# The folder of a tag -------------------------------------------------------------------------------------------------


class Tag:
    """The files in a tag's folder by kind; by stage of a pipeline, or rank of tensor parallelism, those of ranks.

    Raises `Conflict` for two of one rank, `Corrupt` where those of the model are missing.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder, self.joiner = folder, Joiner(folder)
        self.unlike = set[str]()  # what ranks saved beside the model, as random states, and differs
        kinds = (_EXPERT, _OF_LAYERS, _OTHER)
        self.experts, self.layers, self.others = ([n for n in folder.names if kind.fullmatch(n)] for kind in kinds)
        files: dict[int, tuple[dict[int, str], dict[int, str]]] = {}  # of the model, of the optimizer, by rank
        for match in filter(None, map(_STATES.fullmatch, folder.names)):
            by_rank, name = files.setdefault(int(match["mp"]), ({}, {}))[match["of"] == "optim"], match[0]
            if (other := by_rank.setdefault(int(match["rank"] or 0), name)) != name:
                raise mixed(folder, other, name, "both belong to one rank")
        self.stages = {number: StageFiles(self.joiner, *files[number]) for number in sorted(files)}
        if 0 not in self.stages or not self.stages[0].models:
            raise lacks(folder, "mp_rank_00_model_states.pt, which has the names and shapes of the weights")
        self.first = self.stages[0]


def read(folder: Folder) -> Checkpoint:
    """The checkpoint of a tag's folder, or of the tag that `latest` names in the folder above.

    Reads the tables of every rank's files, no tensor data. Raises `Corrupt` for ranks that are missing, `Conflict` for
    files of several steps, stages or world sizes, `Unsupported` for tensor parallelism and what else is not joined,
    what opening a rank's file raises; see `_of_run`.
    """
    if not _is_saved(folder.path, folder.names):
        return _of_run(folder)
    tag = Tag(folder)
    if UNIVERSAL in folder:
        return _universal(tag)
    stages, states = tag.stages, tag.first.states
    is_pipeline = len(stages) > 1 or bool(tag.layers)
    if "offloaded_tensors" in folder or states.get("ds_autoep_layers"):
        what = "experts in AutoEP" if states.get("ds_autoep_layers") else "an optimizer that was offloaded to NVMe"
        raise Unsupported(f"{folder} has {what}", fix="With DeepSpeed: load it, and save it without.")
    model = _layers(tag) if is_pipeline else _with_experts(tag)
    weights: dict[str, TensorEntry] = {}  # a parameter that several stages have is that of the first
    optimizer: dict[str, Any] | None = None
    for number, stage in stages.items():
        if not stage.shares:
            continue
        masters, added = zero.trained(stage, model)
        for name, entry in masters.items():
            piece = Piece(entry, (0,) * len(entry.shape), f"stage {number}")
            earlier = [replace(piece, tensor=weights[name], owner="an earlier stage")] if name in weights else []
            weights[name] = tag.joiner.replicated(name, [*earlier, piece])
        optimizer = optimizer or {"state": {}, "param_groups": [{**g, "params": []} for g in added["param_groups"]]}
        optimizer["state"] = added["state"] | optimizer["state"]
        # Parameters go to the group of the same settings, preferably that in the same place; other groups are added.
        groups = optimizer["param_groups"]
        known = {name for group in groups for name in group["params"]}
        for place, other in enumerate(added["param_groups"]):
            candidates = (*groups[place : place + 1], *groups)
            group = next((g for g in candidates if {**g, "params": other["params"]} == other), None)
            if group is None:
                groups.append(group := {**other, "params": []})
            group["params"] = [*group["params"], *(name for name in other["params"] if name not in known)]
    tag.joiner.refuse_other_runs()  # of tied weights, which several stages have
    engine = ", pipeline" if is_pipeline else ""
    if not tag.first.shares:
        if states.get("param_shapes") is not None:
            what = "the optimizer's files are missing: the weights are the model's own, without their f32 values"
            tag.joiner.notes.append(Note(NO_OPTIMIZER, what))
        optimizers = {f"stage {number}": stage.states.get("optimizer") for number, stage in stages.items()}
        if is_pipeline and any(state is not None for state in optimizers.values()):  # each numbers its own
            optimizer = optimizers
        sizes = [stage.states.get("dp_world_size") for stage in stages.values()]  # only the first rank of each saves
        world = sum(size if type(size) is int and size > 0 else 1 for size in sizes)
        tag.joiner.untied += [*tag.layers, *tag.experts]
        return _checkpoint(tag, model, weights, optimizer, {}, 0, world, engine)
    world = sum(len(stage.shares) for stage in stages.values())
    share = tag.first.shares[0]
    kind = 1 if is_pipeline else share.stage
    if kind > 2 and not any("step" in zero.undivided(share.states.get(group)) for group in range(len(share.weights))):
        tag.joiner.untied += [share.file for share in tag.first.shares]  # 1 and 2 have weights twice
    return _checkpoint(tag, model, weights, optimizer, share.extra, kind, world, share.engine + engine)


def _with_experts(tag: Tag) -> dict[Any, Any]:
    """The model's own weights, with those of experts, each of which is in a file of its own."""
    states = tag.first.states
    for layer, count in enumerate(items(states.get("num_experts"))):
        expert_files = {name for name in tag.experts if name.startswith(f"layer_{layer}_")}
        if type(count) is int and len(expert_files) < count:
            what = f"experts: {len(expert_files):,} of {counted(count, 'expert')} in layer {layer} are there"
            raise lacks(tag.folder, what)
    if not isinstance(states.get("module"), dict):
        raise damaged(tag.folder, f"{tag.first.file} has no `module` with a model's weights")
    weights: dict[Any, Any] = dict(states["module"])
    experts: set[Any] = set()
    for name in tag.experts:
        expert = tag.joiner.open(name).tree
        if not isinstance(expert, dict) or experts & expert.keys():
            raise damaged(tag.folder, f"{name} does not hold the weights of its expert")
        experts |= expert.keys()
        weights |= expert
    return same_kind(states["module"], weights)


# A pipeline ----------------------------------------------------------------------------------------------------------


def _layers(tag: Tag) -> dict[Any, Any]:
    """The tensors of all layers of a pipeline by their full names.

    Raises `Corrupt` where one that the ranks' files name is in no layer's file, `Conflict` for stages of several steps,
    `Unsupported` where layers are divided by tensor parallelism.
    """
    stages, first = tag.stages, tag.first
    if lacking := next((number for number, stage in stages.items() if not stage.models), None):
        raise lacks(tag.folder, f"mp_rank_{lacking:02}_model_states.pt")
    degrees = first.states.get("checkpoint_parallel_dimensions")
    is_divided = degrees.get("tp_degree") != 1 if isinstance(degrees, dict) else not tag.layers
    if divided_files := [name for name in tag.layers if not _LAYER.fullmatch(name)] or (is_divided and [first.file]):
        what = f"{tag.folder} was saved with tensor parallelism, as {divided_files[0]} shows"
        raise Unsupported(what, fix="With DeepSpeed: ds_to_universal.py, which has rules for it; then name its folder.")
    count = fields(degrees).get("pp_degree")
    complete(tag.folder, stages, count if type(count) is int else len(stages), first.file)
    facts: dict[str, Any] = {}
    expected: dict[str, Any] = {}  # the buffers, and the parameters that the optimizer has
    parameters: dict[str, Any] = {}
    for stage in stages.values():
        world = max(stage.shares[0].counts) if stage.shares else None  # its groups may be more or fewer
        stage_facts = {"step": stage.states.get("global_steps"), "number of ranks": world}
        facts = facts or stage_facts
        refuse_other(tag.folder, (first.file, facts), (stage.file, stage_facts))
        tag.unlike |= _unlike(first.states, stage.states)
        expected |= dict.fromkeys(n for n in items(stage.states.get("buffer_names")) if type(n) is str)
        parameters |= {name: shape for group in stage.groups for name, shape in group.items()}
    expected |= parameters
    values: dict[Any, Any] = {}
    tied_by_name: dict[str, list[tuple[str, Any]]] = {}  # by the name in its layer
    for name, shape in parameters.items():
        if name.startswith("tied_modules.") and name.count(".") > 1:
            tied_by_name.setdefault(name.split(".", 2)[2], []).append((name, shape))
    for layer, file in sorted((int(match["layer"]), name) for name in tag.layers if (match := _LAYER.fullmatch(name))):
        if not isinstance(tree := tag.joiner.open(file).tree, dict):
            raise damaged(tag.folder, f"{file} has no weights of a layer")
        for name, value in tree.items():
            full, shapes = f"{layer}.{name}", (None, value.shape if isinstance(value, TensorEntry) else None)
            tied = [alias for alias, shape in tied_by_name.get(name, ()) if shape in shapes]
            values.setdefault(tied[0] if full not in parameters and len(tied) == 1 else full, value)
    of_layers = {(n.partition(".")[2], v.shape if isinstance(v, TensorEntry) else None) for n, v in values.items()}
    for name, shape in expected.items():
        number, _, rest = name.partition(".")
        # A tied parameter whose layer cannot be told from its name is there under the layer's own name.
        is_tied = number == "tied_modules" and (rest.partition(".")[2], shape) in of_layers
        if name not in values and (number.isdecimal() or number == "tied_modules") and not is_tied:
            file = f"layer_{number:0>2}-model_states.pt" if number.isdecimal() else "a layer's file"
            raise lacks(tag.folder, f"{name}, which the ranks' files name and which belongs in {file}")
    return values


# The checkpoint ------------------------------------------------------------------------------------------------------


def _checkpoint(
    tag: Tag,
    model: dict[Any, Any],
    trained: dict[str, TensorEntry],
    optimizer: Any,
    extra: Mapping[str, Any],
    stage: int,
    ranks: int,
    engine: str,
) -> Checkpoint:
    """What the first rank saved, with the whole model (trained, frozen and tied parameters, buffers, in the order in
    which it was saved) and the optimizer by name in their places.

    model: its own weights (`module`).  trained: the f32 master values.  extra: what else the optimizer's files hold.
    """
    first, states = tag.first, tag.first.states
    frozen = {n: s for group in first.shapes_in(states, first.file, "frozen_param_shapes") for n, s in group.items()}
    values: dict[str, Any] = dict(trained)
    fragments, buffers, facts = dict[str, list[Piece]](), dict[str, list[Piece]](), dict[str, Any]()
    if stage > 2:  # of frozen parameters each rank has a piece; buffers are saved whole by each
        complete(tag.folder, first.models, ranks, first.file)
    for rank, file in sorted(first.models.items())[: None if stage > 2 else 1]:
        saved = first.model(file) if facts else states
        rank_facts = {"step": saved.get("global_steps"), "size of the world": saved.get("dp_world_size")}
        lists = {"list of parameters": "param_shapes", "list of frozen parameters": "frozen_param_shapes"}
        rank_facts |= {what: [[*g.items()] for g in first.shapes_in(saved, file, key)] for what, key in lists.items()}
        facts = facts or rank_facts
        refuse_other(tag.folder, (first.file, facts), (file, rank_facts))
        tag.unlike |= _unlike(states, saved)
        module, rank_fragments = fields(saved.get("module")), fields(saved.get("frozen_param_fragments"))
        rank_buffers = {name: module.get(name) for name in items(saved.get("buffer_names")) if type(name) is str}
        for by_name, entries in ((fragments, rank_fragments), (buffers, rank_buffers)):
            for name, entry in entries.items():
                if isinstance(entry, TensorEntry):
                    by_name.setdefault(name, []).append(Piece(entry, (0,) * len(entry.shape), f"rank {rank:,}"))
    tag.joiner.notes += noted(DIFFERENT, sorted(tag.unlike), *UNLIKE)
    for name, shape in frozen.items():
        pieces = fragments.get(name, [])
        if stage > 2 and 0 < len(pieces) < ranks:  # their places follow from the ranks
            raise lacks(tag.folder, f"{name} in the model states of {counted(ranks - len(pieces), 'rank')}")
        if pieces and (stage > 2 or name not in model):
            vectors = [Vector([(piece.entry, piece.owner)]) for piece in pieces if len(piece.entry.shape) == 1]
            is_whole = len(pieces) == 1 and pieces[0].entry.shape == shape
            values[name] = pieces[0].entry if is_whole else tag.joiner.flat(name, shape, zero.pieces(vectors, shape))
    values |= {name: tag.joiner.replicated(name, pieces) for name, pieces in buffers.items()}
    # The other names of shared parameters have the values of those that are stored.
    ties = dict(fields(states.get("shared_params")))
    views = {entry.view: name for name in values if isinstance(entry := model.get(name), TensorEntry) and entry.numel}
    for name, entry in model.items():
        if name not in values and isinstance(entry, TensorEntry) and entry.view in views:
            ties.setdefault(name, views[entry.view])
    for name, source in ties.items():
        if isinstance(value := values.get(source, model.get(source)), TensorEntry) and type(name) is str:
            values.setdefault(name, value)
    pairs = [(model[name], entry) for name, entry in trained.items() if isinstance(model.get(name), TensorEntry)]
    if copies := Counter(copy.dtype for copy, entry in pairs if copy.numel and copy.shape == entry.shape):
        what = counted(copies.total(), "weight is shown as", "weights are shown as")
        compared = f"the model's own copies ({listed([*map(str, copies)])}) are compared with them when they are read"
        tag.joiner.notes.append(Note(COPIES, f"{what} the optimizer's f32 master values; {compared}"))
    module = same_kind(model, {**model, **values})
    empty = [str(n) for n, v in model.items() if isinstance(v, TensorEntry) and v.shape == (0,) and n not in values]
    if empty and (stage > 2 or any("zero_pp_rank" in name for name in first.models.values())):
        what = f"the values of {counted(len(empty), 'weight')}, which stage 3 of ZeRO keeps in *_optim_states.pt files"
        raise lacks(tag.folder, what, empty)
    joined: dict[str, Any] = {"module": module}
    joined |= {} if optimizer is None else {"optimizer": optimizer}
    joined |= {ZERO: extra} if extra else {}
    joined |= {name: tag.joiner.open(name).tree for name in tag.others}
    tree = {key: value for key, value in states.items() if key != "frozen_param_fragments"} | joined
    version = states.get("ds_version")
    engine = f"DeepSpeed {printable(version) if type(version) is str else ''}".strip() + engine
    return tag.joiner.checkpoint(NAME, tree, engine, ranks, states.get("global_steps"))


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """The names of what differs in the model states of two ranks and does not describe the model."""
    pairs = ((name, one.get(name), other.get(name)) for name in (one.keys() | other.keys()) - _OF_THE_MODEL)
    return {str(name) for name, ours, theirs in pairs if not alike(ours, theirs, equal=same_leaf)}


# A universal folder --------------------------------------------------------------------------------------------------


def _universal(tag: Tag) -> Checkpoint:
    """The checkpoint of a universal folder. Raises `Corrupt` for parameters that are not there."""
    folder, first_states = tag.folder, tag.first.states
    groups = tag.first.shapes_in(first_states, tag.first.file)
    model = same_kind(first_states.get("module"), dict(first_states.get("module") or {}))
    if first_states.get("module") is None:
        message = "ds_to_universal drops a pipeline's buffers and frozen parameters: they are not here"
        tag.joiner.notes.append(Note(NO_BUFFERS, message))
    # What other ranks of tensor or pipeline parallelism have: names of parameters, buffers, frozen parameters.
    for stage, file in ((other, file) for other in [*tag.stages.values()][1:] for file in other.models.values()):
        states = fields(tag.joiner.open(file).tree)
        for number, shapes in enumerate(stage.shapes_in(states, file)):
            groups.extend({} for _ in range(number + 1 - len(groups)))
            groups[number].update(shapes)
        trained = {name for shapes in groups for name in shapes}
        for name, value in fields(states.get("module")).items():
            other: Any = model.setdefault(name, value)
            are_tensors = isinstance(other, TensorEntry) and isinstance(value, TensorEntry)
            if name not in trained and are_tensors and agree(other, value, read=True) is False:
                what = f"{folder}: {name!s} differs in {file}, and is not trained"
                raise Unsupported(what, fix="With DeepSpeed: load it there, and save the whole model.")
    zero_folder = Folder(os.path.join(folder.path, UNIVERSAL))
    if missing := [name for name in [*chain(*groups), _COMMON] if name not in zero_folder]:
        raise lacks(zero_folder, counted(len(missing), "entry", "entries"), missing)
    common = fields(tag.joiner.open(_COMMON, zero_folder).tree)
    steps = fields(fields(common.get("optimizer_state_dict")).get("state"))  # what stage 3 keeps for a group: a `step`
    weights: dict[str, TensorEntry] = {}
    state: dict[str, dict[str, Any]] = {}
    firsts: dict[str, tuple[str, dict[str, Any]]] = {}  # the first file of each kind, with its type; and the first step
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            slots: dict[str, Any] = {}  # its values by the names of their files, in its shape
            files = Folder(os.path.join(zero_folder.path, name))
            for file in (file for file in without_copies(files.names) if file.endswith(".pt")):
                value = tag.joiner.open(file, files).tree
                value = zero.bare(value.get("param") if isinstance(value, dict) else value)
                if isinstance(value, TensorEntry) and len(value.shape) == 1 and value.numel == prod(shape):
                    value = value.reshape(shape)
                slots[key := file.removesuffix(".pt")] = value
                if not isinstance(value, TensorEntry) and (key != "step" or value is None):
                    raise damaged(files, f"has no tensor in {file}")
                this = f"{name}/{file}", {"type": value.dtype if isinstance(value, TensorEntry) else None}
                refuse_other(zero_folder, firsts.setdefault(key, this), this)
                tag.joiner.untied += [f"{name}/{file}"] if key not in (_WEIGHT, "step") else []
            zero_folder.adopt(name, files)
            weight = slots.get(_WEIGHT)
            if not isinstance(weight, TensorEntry):
                raise damaged(files, f"has no tensor in {_WEIGHT}.pt")
            allowed = weight.shape, ()
            misfits = [key for key, e in slots.items() if isinstance(e, TensorEntry) and e.shape not in allowed]
            if misfits or len(weight.shape) != len(shape):
                expected = list(weight.shape if misfits else shape)
                raise damaged(files, f"has {listed(misfits or [_WEIGHT])} of a different shape than {expected}")
            del slots[_WEIGHT]
            copy = model.get(name)  # with tensor parallelism, a part of it
            copy = copy if isinstance(copy, TensorEntry) and copy.shape == weight.shape else None
            piece = Piece(weight.reshape((weight.numel,)), (0,), f"{name}/{_WEIGHT}.pt")
            weights[name] = tag.joiner.flat(name, weight.shape, [piece], copy).with_flags(weight.flags)
            state[name] = zero.undivided(steps.get(number)) | slots
            if (step := number_in(state[name].get("step"))) is not None:  # ZeRO steps all of its vectors together
                refuse_other(zero_folder, firsts.setdefault("", (name, {"step": step})), (name, {"step": step}))
    keys = dict.fromkeys(key for slots in state.values() for key in slots)
    if missing := [f"{name}/{key}.pt" for name, slots in state.items() for key in keys if key not in slots]:
        raise lacks(zero_folder, counted(len(missing), "file"), missing)
    parameters = zero.named_groups(common.get("param_groups"), dict(enumerate(groups)))
    optimizer = {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": parameters}
    world = first_states.get("dp_world_size")
    size = world if type(world) is int and 0 < world < 1 << 32 else max(tag.first.models) + 1
    folder.adopt(UNIVERSAL, zero_folder)
    extra = {str(key): zero.plain(value) for key, value in common.items() if key not in _JOINED}
    kind = 3 if "zero_pp_rank" in tag.first.file else 2
    checkpoint = _checkpoint(tag, model, weights, optimizer, extra, kind, size, ", universal")
    return replace(checkpoint, container=f"{NAME}-universal")


# Of `optimizer_state.pt`: what is by name elsewhere, or is the first rank's share of it.
_JOINED = ("param_groups", "optimizer_state_dict", "fp32_flat_groups", "group_paddings", "param_alignment_paddings")
