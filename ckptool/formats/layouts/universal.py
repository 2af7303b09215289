"""A universal folder, as `ds_to_universal` makes it of a tag's folder: files for every parameter, whatever the world.

Source: deepspeed/checkpoint/ds_to_universal.py. `zero/NAME/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` are a tensor, or a
dictionary that has it under `param`; of stage 3 they are flat. `step.pt` is there of stages 1 and 2.
`zero/optimizer_state.pt` holds the parameter groups. Buffers and frozen parameters may lie there in f32 as well; those
in the model states beside them are of the type that they have.
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, TensorEntry
from ckptool.checkpoint.files import Folder, Input
from ckptool.checkpoint.nodes import fields, same_kind
from ckptool.errors import Unsupported, counted, listed
from ckptool.formats.folder import damaged, lacks, number_in
from ckptool.formats.layouts import deepspeed, zero
from ckptool.formats.pieces import agree, refuse_other

NAME = "deepspeed-universal"
NO_BUFFERS = "no-buffers"  # of the notes
WEIGHT = "fp32"
_OPTIMIZER = "optimizer_state.pt"


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and deepspeed.is_universal(source)


def read(source: Folder) -> Checkpoint:
    """The checkpoint of a universal folder, or of the one that `latest_universal` names; see `deepspeed.read`."""
    return deepspeed.read(source)


def read_tag(folder: Folder) -> Checkpoint:
    """The checkpoint of a universal folder. Raises `Corrupt` for parameters that are not there."""
    tag = zero.tag_files(folder)
    first = tag.model(tag.first, layered=bool(tag.stages))
    groups, own = zero.shapes_of(tag, first, tag.first), same_kind(first["module"], dict(first["module"] or {}))
    if first["module"] is None:
        message = "of a pipeline, ds_to_universal leaves out buffers and frozen parameters: they are not here"
        tag.joiner.notes.append(Note(NO_BUFFERS, message))
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
    inside = Folder(os.path.join(folder.path, deepspeed.UNIVERSAL))
    if missing := [name for shapes in groups for name in shapes if name not in inside]:
        raise lacks(inside, counted(len(missing), "parameter"), missing)
    common = fields(tag.joiner.open(_OPTIMIZER, inside).tree if _OPTIMIZER in inside else {})
    once = fields(fields(common.get("optimizer_state_dict")).get("state"))  # what stage 3 keeps for a group: a `step`
    weights: dict[str, TensorEntry] = {}
    state: dict[str, dict[str, Any]] = {}
    stepped: tuple[str, dict[str, Any]] | None = None
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            slots = _parameter(tag, inside, name, shape)
            weights[name] = slots.pop(WEIGHT)
            state[name] = zero.undivided(once.get(number)) | slots
            if (step := number_in(state[name].get("step"))) is not None:  # ZeRO steps all of its vectors together
                stepped = stepped or (name, {"step": step})
                refuse_other(inside, stepped, (name, {"step": step}))
    parameters = zero.named_groups(common.get("param_groups"), dict(enumerate(groups)))
    optimizer = {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": parameters}
    world = first.get("dp_world_size")
    size = world if type(world) is int and 0 < world < 1 << 32 else max(tag.models) + 1
    folder.adopt(deepspeed.UNIVERSAL, inside)
    rest = {str(key): zero.plain(value) for key, value in common.items() if key not in _JOINED}
    stage = 3 if "zero_pp_rank" in tag.first else 2
    found = zero.checkpoint_of(tag, first, own, weights, optimizer, rest, stage, size, ", universal")
    return replace(found, container=NAME)


# Of `optimizer_state.pt`: what is by name elsewhere, or is the first rank's share of it.
_JOINED = ("param_groups", "optimizer_state_dict", "fp32_flat_groups", "group_paddings", "param_alignment_paddings")


def _parameter(tag: zero.Tag, inside: Folder, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
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
    weight = slots.get(WEIGHT)
    if not isinstance(weight, TensorEntry):
        raise damaged(files, f"has no tensor in {WEIGHT}.pt")
    wrong = [key for key, e in slots.items() if isinstance(e, TensorEntry) and e.shape not in (weight.shape, ())]
    if wrong or len(weight.shape) != len(shape):
        meant = list(weight.shape if wrong else shape)
        raise damaged(files, f"has {listed(wrong or [WEIGHT])} of another shape than {meant}")
    return slots
