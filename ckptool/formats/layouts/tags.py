"""The folder of a tag: as each rank saved it, of a pipeline, or universal, as `ds_to_universal` makes it of another.

Of a pipeline there are the files of every layer, and for each stage the model states, with an empty `module`, and the
shares of its own ranks. A universal folder has files for every parameter, whatever the world: `zero/NAME/fp32.pt`,
`exp_avg.pt`, `exp_avg_sq.pt` are a tensor, or a dictionary that has it under `param`; of stage 3 they are flat.
`step.pt` is there of stages 1 and 2. `zero/optimizer_state.pt` holds the parameter groups. Buffers and frozen
parameters may lie there in f32 as well; those in the model states beside them are of the type that they have.

Source: deepspeed/runtime/pipe/module.py (`layer_03-model_states.pt`; parameters are called `3.weight`, those of tied
layers `tied_modules.KEY.weight`), deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import fields, items, same_kind
from ckptool.errors import Corrupt, Unsupported, counted, listed
from ckptool.formats.folder import complete, damaged, lacks, number_in
from ckptool.formats.layouts import zero
from ckptool.formats.layouts.deepspeed import UNIVERSAL
from ckptool.formats.layouts.zero import Tag
from ckptool.formats.pieces import agree, refuse_other
from ckptool.formats.placements import Piece

NAME = "deepspeed-universal"  # of those that are
_WEIGHT, _COMMON = "fp32", "optimizer_state.pt"
_NO_BUFFERS = "no-buffers"  # of the notes
_LAYER = re.compile(r"layer_(?P<layer>\d{1,7})-(?:model_00-)?model_states\.pt")


def read(folder: Folder) -> Checkpoint:
    """The checkpoint of a tag's folder of any kind; see `deepspeed.read`."""
    tag = zero.tag_files(folder)
    if UNIVERSAL in folder:
        return _universal(tag)
    if tag.stages or tag.layers:
        return _stages(tag)
    first = tag.model(tag.first)
    if "offloaded_tensors" in folder or first.get("ds_autoep_layers"):
        what = "experts in AutoEP" if first.get("ds_autoep_layers") else "an optimizer that was offloaded to NVMe"
        why = "Its values are laid out in another way than those of ZeRO, which is not read."
        raise Unsupported(f"{folder} has {what}", why, "With DeepSpeed: load it, and save it without.")
    shares = tag.shares()
    for layer, count in enumerate(items(first.get("num_experts"))):
        there = {name for name in tag.experts if name.startswith(f"layer_{layer}_")}
        if type(count) is int and len(there) < count:
            raise lacks(folder, f"experts: {len(there):,} of {counted(count, 'expert')} in layer {layer} are there")
    own: dict[Any, Any] = dict(first["module"])
    experts: set[Any] = set()  # each in a file of its own
    for name in tag.experts:
        expert = tag.joiner.open(name).tree
        if not isinstance(expert, dict) or experts & expert.keys():
            raise damaged(folder, f"{name} has no weights of an expert, or those of another one")
        experts |= expert.keys()
        own |= expert
    own = same_kind(first["module"], own)
    if not shares:
        if first.get("param_shapes") is not None:
            what = "the optimizer's files are not there: the weights are the model's own, and its f32 values are lost"
            tag.joiner.notes.append(Note(zero.NO_OPTIMIZER, what))
        world = first.get("dp_world_size")  # of stage 0 the first rank alone saves
        ranks = max(1, world) if type(world) is int else 1
        return zero.checkpoint_of(tag, first, own, zero.masters(tag, first, own), None, {}, 0, ranks, "")
    share = shares[0]
    found = zero.checkpoint_of(
        tag,
        first,
        own,
        *zero.joined_groups(tag, first, shares, own),
        share.rest,
        share.stage,
        len(shares),
        share.engine,
    )
    if share.stage > 2 and not any("step" in zero.undivided(share.state(group)) for group in range(len(share.weights))):
        return replace(found, untied=tuple(share.file for share in shares))  # stages 1 and 2 have the weights twice
    return found


# A pipeline ----------------------------------------------------------------------------------------------------------


def _stages(tag: Tag) -> Checkpoint:
    """The checkpoint of a pipeline. Raises `Unsupported` where its layers are divided by tensor parallelism."""
    tags = {0: tag, **tag.stages}
    if lacking := next((number for number, each in tags.items() if not each.models), None):
        raise lacks(tag.folder, f"mp_rank_{lacking:02}_model_states.pt")
    states = {number: each.model(each.models[0], layered=True) for number, each in sorted(tags.items())}
    degrees = states[0].get("checkpoint_parallel_dimensions")
    wide = degrees.get("tp_degree") != 1 if isinstance(degrees, dict) else not tag.layers
    if odd := [name for name in tag.layers if not _LAYER.fullmatch(name)] or (wide and [tag.models[0]]):
        raise Unsupported(
            f"{tag.folder} was saved with tensor parallelism, which {odd[0]} is of",
            "Each rank has parts of the weights, and how those are joined depends on the model.",
            "With DeepSpeed: deepspeed/checkpoint/ds_to_universal.py, which has rules for it; then name its folder.",
        )
    count = fields(degrees).get("pp_degree")
    complete(tag.folder, tags, count if type(count) is int else len(tags), tag.models[0])
    shares = {number: each.shares() for number, each in tags.items()}
    facts: dict[str, Any] = {}
    names: dict[int, list[dict[str, tuple[int, ...] | None]]] = {}
    for number, each in tags.items():
        of_ranks = shares[number][0].counts if shares[number] else None
        about = {"step": states[number].get("global_steps"), "number of ranks": of_ranks}
        facts = facts or about
        refuse_other(tag.folder, (tag.models[0], facts), (each.models[0], about))
        if states[number].get("param_shapes") is not None or not shares[number]:
            names[number] = [{**group} for group in zero.shapes_of(each, states[number], each.models[0])]
        else:  # only the order of their pieces is recorded
            groups = range(len(shares[number][0].mappings))
            names[number] = [{n: None for share in shares[number] for n in share.placed(group)} for group in groups]
    # The parameters that the optimizer has.
    known = {name: shape for groups_of in names.values() for group in groups_of for name, shape in group.items()}
    buffers = [n for each in states.values() for n in items(each.get("buffer_names")) if type(n) is str]
    own = _layers(tag, known, buffers)
    weights: dict[str, TensorEntry] = {}  # a parameter that several stages have is that of the first
    whole: dict[str, Any] | None = None
    for number, each in tags.items():
        if not shares[number]:
            continue
        for name, shape in ((name, shape) for group in names[number] for name, shape in group.items()):
            if shape is None and not isinstance(own.get(name), TensorEntry):
                raise lacks(tag.folder, "the file of the layer", [name])
        shapes = [{n: own[n].shape if shape is None else shape for n, shape in g.items()} for g in names[number]]
        joined, optimizer = zero.joined_groups(each, {**states[number], "param_shapes": shapes}, shares[number], own)
        for name, entry in joined.items():
            piece = Piece(entry, (0,) * len(entry.shape), f"stage {number}")
            earlier = [replace(piece, tensor=weights[name], owner="an earlier stage")] if name in weights else []
            weights[name] = tag.joiner.replicated(name, [*earlier, piece])
        whole = whole or {"state": {}, "param_groups": [{**g, "params": []} for g in optimizer["param_groups"]]}
        whole["state"] = optimizer["state"] | whole["state"]
        for group, more in zip(whole["param_groups"], optimizer["param_groups"], strict=False):
            group["params"] = [*dict.fromkeys([*group["params"], *more["params"]])]
    rest, engine = (shares[0][0].rest, shares[0][0].engine) if shares[0] else ({}, "")
    world = sum(map(len, shares.values()))
    return zero.checkpoint_of(tag, states[0], own, weights, whole, rest, 1, world, f"{engine}, pipeline")


def _layers(tag: Tag, known: Mapping[str, Any], buffers: Iterable[str]) -> dict[str, Any]:
    """The tensors of all layers by their full names. known: the parameters that the optimizer has, and their shapes.

    Raises `Corrupt` where one of these, or of the buffers, is in no layer's file.
    """
    found: dict[str, Any] = {}
    tied_by_name: dict[str, list[tuple[str, Any]]] = {}  # of those in a layer
    for name, shape in known.items():
        if name.startswith("tied_modules.") and name.count(".") > 1:
            tied_by_name.setdefault(name.split(".", 2)[2], []).append((name, shape))
    for layer, file in sorted((int(named["layer"]), name) for name in tag.layers if (named := _LAYER.fullmatch(name))):
        if not isinstance(tree := tag.joiner.open(file).tree, dict):
            raise damaged(tag.folder, f"{file} has no weights of a layer")
        for name, value in tree.items():
            full, shapes = f"{layer}.{name}", (None, value.shape if isinstance(value, TensorEntry) else None)
            tied = [each for each, shape in tied_by_name.get(name, ()) if shape in shapes]
            found.setdefault(tied[0] if full not in known and len(tied) == 1 else full, value)
    of_layers = {(n.partition(".")[2], v.shape if isinstance(v, TensorEntry) else None) for n, v in found.items()}
    for name, shape in {**dict.fromkeys(buffers), **known}.items():
        number, _, rest = name.partition(".")
        # A tied one whose layer cannot be told from its name is under that of the layer.
        is_tied = number == "tied_modules" and (rest.partition(".")[2], shape) in of_layers
        if name not in found and (number.isdecimal() or number == "tied_modules") and not is_tied:
            file = f"layer_{number:0>2}-model_states.pt" if number.isdecimal() else "a layer's file"
            what = f"{tag.folder} lacks {name}, which the ranks' files name"
            raise Corrupt(what, f"It is in {file}, which is not there or is another's.", "Copy all files of the run.")
    return found


# A universal folder --------------------------------------------------------------------------------------------------


def _universal(tag: Tag) -> Checkpoint:
    """The checkpoint of a universal folder. Raises `Corrupt` for parameters that are not there."""
    folder, first = tag.folder, tag.model(tag.first, layered=bool(tag.stages))
    groups, own = zero.shapes_of(tag, first, tag.first), same_kind(first["module"], dict(first["module"] or {}))
    if first["module"] is None:
        message = "of a pipeline, ds_to_universal leaves out buffers and frozen parameters: they are not here"
        tag.joiner.notes.append(Note(_NO_BUFFERS, message))
    # What other ranks of tensor or pipeline parallelism have: names of parameters, buffers, frozen parameters.
    for file in (file for stage in tag.stages.values() for file in stage.models.values()):
        states = fields(tag.joiner.open(file).tree)
        for number, shapes in enumerate(zero.shapes_of(tag, states, file)):
            groups.extend({} for _ in range(number + 1 - len(groups)))
            groups[number].update(shapes)
        trained = {name for shapes in groups for name in shapes}
        for name, value in fields(states.get("module")).items():
            other: Any = own.setdefault(name, value)
            both = isinstance(other, TensorEntry) and isinstance(value, TensorEntry)
            if name not in trained and both and agree(other, value, read=True) is False:
                what = f"{folder}: {name!s} is another tensor in {file}, and is not trained"
                why = "It may be divided over ranks of tensor parallelism; ds_to_universal joins only what is trained."
                raise Unsupported(what, why, "With DeepSpeed: load it there, and save the whole model.")
    inside = Folder(os.path.join(folder.path, UNIVERSAL))
    if missing := [name for shapes in groups for name in shapes if name not in inside]:
        raise lacks(inside, counted(len(missing), "parameter"), missing)
    common = fields(tag.joiner.open(_COMMON, inside).tree if _COMMON in inside else {})
    once = fields(fields(common.get("optimizer_state_dict")).get("state"))  # what stage 3 keeps for a group: a `step`
    weights: dict[str, TensorEntry] = {}
    state: dict[str, dict[str, Any]] = {}
    stepped: tuple[str, dict[str, Any]] | None = None
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            slots = _parameter(tag, inside, name, shape)
            weights[name] = slots.pop(_WEIGHT)
            state[name] = zero.undivided(once.get(number)) | slots
            if (step := number_in(state[name].get("step"))) is not None:  # ZeRO steps all of its vectors together
                stepped = stepped or (name, {"step": step})
                refuse_other(inside, stepped, (name, {"step": step}))
    parameters = zero.named_groups(common.get("param_groups"), dict(enumerate(groups)))
    optimizer = {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": parameters}
    world = first.get("dp_world_size")
    size = world if type(world) is int and 0 < world < 1 << 32 else max(tag.models) + 1
    folder.adopt(UNIVERSAL, inside)
    rest = {str(key): zero.plain(value) for key, value in common.items() if key not in _JOINED}
    stage = 3 if "zero_pp_rank" in tag.first else 2
    found = zero.checkpoint_of(tag, first, own, weights, optimizer, rest, stage, size, ", universal")
    return replace(found, container=NAME)


# Of `optimizer_state.pt`: what is by name elsewhere, or is the first rank's share of it.
_JOINED = ("param_groups", "optimizer_state_dict", "fp32_flat_groups", "group_paddings", "param_alignment_paddings")


def _parameter(tag: Tag, inside: Folder, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The values of a parameter by the names of their files, in its shape."""
    files = Folder(os.path.join(inside.path, name))
    slots: dict[str, Any] = {}
    for file in (file for file in files.names if file.endswith(".pt")):
        value = tag.joiner.open(file, files).tree
        value = zero.bare(value.get("param") if isinstance(value, dict) else value)
        if isinstance(value, TensorEntry) and len(value.shape) == 1 and value.numel == prod(shape):
            value = value.reshape(shape)
        slots[file.removesuffix(".pt")] = value
    inside.adopt(name, files)
    weight = slots.get(_WEIGHT)
    if not isinstance(weight, TensorEntry):
        raise damaged(files, f"has no tensor in {_WEIGHT}.pt")
    wrong = [key for key, e in slots.items() if isinstance(e, TensorEntry) and e.shape not in (weight.shape, ())]
    if wrong or len(weight.shape) != len(shape):
        meant = list(weight.shape if wrong else shape)
        raise damaged(files, f"has {listed(wrong or [_WEIGHT])} of another shape than {meant}")
    return slots
