"""`megatron`: a folder of Megatron-Core's `torch_dist` backend, one iteration of a run, or the folder of the run.

An iteration is what torch.distributed.checkpoint writes, with the names flat (`decoder.final_layernorm.weight`,
`optimizer.state.exp_avg.NAME`), beside `common.pt`, the entries that are the same on all ranks, and `metadata.json`,
written last. The layers of a model are one tensor with an axis in front, unless they differ. An object of one rank is
called `KEY/shard_OFFSETS_SHAPE`. `latest_checkpointed_iteration.txt` in the folder above says which iteration is the
last: a number or `release`.

Source: megatron/core/dist_checkpointing (core.py, mapping.py, serialization.py, strategies/torch.py, common.py,
optimizer.py), optimizer/optimizer.py and distrib_optimizer.py, megatron_core 0.16.1.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.checkpoint.files import Folder, Input, read_small
from ckptool.checkpoint.nodes import fields
from ckptool.checkpoint.paths import absolute
from ckptool.commands import command
from ckptool.errors import Corrupt, Truncated, Unsupported
from ckptool.formats import dcp
from ckptool.formats.dcp.tables import METADATA
from ckptool.formats.folder import another_run, damaged, json_in, one_of
from ckptool.formats.marks import noted

NAME = "megatron"
BACKEND, COMMON = "metadata.json", "common.pt"
TRACKER = "latest_checkpointed_iteration.txt"
MAX_TRACKER = 64
_ITERATION = re.compile(r"iter_([0-9]{7,12})|release")
_OBJECT = re.compile(r"(.+)/(shard_[0-9.]+_[0-9.]+)")
_OF_OPTIMIZER = re.compile(r"(?:chained_([0-9]{1,4})\.)?optimizer\.(?:state\.([^.]+)\.(.+)|(.+))")


def detect(head: bytes, source: Input) -> bool:
    if not isinstance(source, Folder):  # the table of an iteration stands for it
        above, name = os.path.split(source.path)
        return name == METADATA and detect(b"", Folder(above))
    return is_run(source) or bool(_backend(source)) or (COMMON in source and METADATA in source)


def is_run(folder: Folder) -> bool:
    """True for the folder of a run, whose iterations are checkpoints."""
    return TRACKER in folder and any(_ITERATION.fullmatch(name) for name in folder.names)


def read(source: Input) -> Checkpoint:
    """The checkpoint in the folder of an iteration; of a run, its last one.

    Gives the model by its full names, the optimizer's state by name, what `common.pt` says, and under `sharded_objects`
    those of the ranks, by key. Raises what `dcp.read` raises; `Corrupt` for a tracker that leads nowhere or elsewhere,
    `Truncated` without `common.pt`, `Unsupported` for another backend, `Conflict` for files of two iterations.
    """
    from ckptool import formats

    if not isinstance(source, Folder):
        source = Folder(os.path.dirname(source.path), shown=source.path)
    if is_run(source):
        return one_of(source, latest(source), filter(_ITERATION.fullmatch, source.names), formats.read_alone)
    backend = _backend(source)
    if not backend:
        what = f"{source} has {COMMON} of Megatron-Core and no {BACKEND} that can be read"
        why = f"{BACKEND} is written last: the run was stopped before that, or it was damaged or not copied along."
        raise Truncated(what, why, "Copy the whole folder, or take an earlier iteration.")
    if backend != "torch_dist":
        what = f"{source} was saved by Megatron-Core with its backend {backend[:40]}, not torch_dist"
        raise Unsupported(what, fix="With that Megatron: load it, and save it with --ckpt-format torch_dist")
    if COMMON not in source:
        what = f"{source} has no {COMMON}"
        raise Truncated(what, "It has the arguments, the iteration and the optimizer's settings.", "Copy all files.")
    checkpoint = dcp.read(source)
    common = formats.read_alone(source.open(COMMON))
    if not isinstance(common.tree, dict):
        raise damaged(source, f"{COMMON} is not a dictionary")
    tree = _sorted_by_kind(checkpoint.tree, common.tree)
    notes = [note for note in (*checkpoint.notes, *common.notes) if note.code != "flat-names"]  # as in the model
    about = f"in {COMMON} and in the ranks' files, whose value is used"
    notes += noted("common-collides", _fill(tree, common.tree), "entry is", "entries are", about)
    _name_parameters(tree.get("optimizer"))
    facts = {"engine": "Megatron-Core, torch_dist"} | step_of(source, common.tree.get("iteration"))
    return replace(
        checkpoint,
        tree=tree,
        container=NAME,
        metadata=checkpoint.metadata | facts,
        notes=tuple(notes),
        discarded=(*checkpoint.discarded, *common.discarded),
    )


def latest(run: Folder) -> Folder:
    """The folder of the iteration that the tracker of a run names. Raises `Corrupt` where there is none."""
    iterations = [name for name in run.names if _ITERATION.fullmatch(name)]
    text = read_small(os.path.join(run.path, TRACKER), "a tracker", MAX_TRACKER).decode("latin-1").strip()
    name = f"iter_{int(text):07d}" if re.fullmatch("[0-9]{1,12}", text) else text if text == "release" else ""
    folder = Folder(os.path.join(run.path, name)) if name in iterations else run
    if is_run(folder):  # or a link that leads back to where it is
        what, why = f"{run}: its {TRACKER} says {text!r}, an iteration that is not there", "It was not copied along."
        raise Corrupt(what, why, f"Name one: {command('inspect', os.path.join(run.path, iterations[-1]))}")
    return folder


def _backend(folder: Folder) -> str:
    """The backend that wrote the folder of an iteration; empty for another folder."""
    backend = json_in(folder.path, BACKEND).get("sharded_backend") if BACKEND in folder else None
    return backend if isinstance(backend, str) else ""


def step_of(folder: Folder, iteration: Any) -> dict[str, Any]:
    """The iteration of an `iter_*` folder, by its files or its name. Raises `Conflict` where they are two."""
    match = _ITERATION.fullmatch(os.path.basename(absolute(folder.path)))
    if type(iteration) is not int:
        return {"step": int(match[1])} if match and match[1] else {}
    if match and match[1] and int(match[1]) != iteration:
        raise another_run(folder, f"its files are of iteration {iteration:,}, the folder of {int(match[1]):,}")
    return {"step": iteration}


# The tree ------------------------------------------------------------------------------------------------------------


def _sorted_by_kind(values: dict[Any, Any], common: dict[Any, Any]) -> dict[Any, Any]:
    """The values under `model`, `optimizer` and `sharded_objects`; others by their names."""
    tree: dict[Any, Any] = {"model": {}}
    for name, value in values.items():
        if match := _OBJECT.fullmatch(name):
            tree.setdefault("sharded_objects", {}).setdefault(match[1], {})[match[2]] = value
        elif match := _OF_OPTIMIZER.fullmatch(name):
            chained, slot, parameter, buffer = match.groups()
            target, source = tree.setdefault("optimizer", {}), fields(common.get("optimizer"))
            for key in (int(chained) if chained else None, "optimizer"):  # to the level of its groups in `common.pt`
                inner = source.get(key)
                if isinstance(inner, dict) and "param_groups" not in source:
                    target, source = target.setdefault(key, {}), inner
            if slot:
                target.setdefault("state", {}).setdefault(parameter, {})[slot] = value
            else:
                target.setdefault("buffers", {})[buffer] = value
        elif isinstance(value, (TensorEntry, Composite)):
            tree["model"][name] = value
        else:
            tree[name] = value
    return {key: value for key, value in tree.items() if key != "model" or value}


def _fill(tree: dict[Any, Any], common: dict[Any, Any], prefix: str = "") -> list[str]:
    """Adds the entries that the tree lacks; gives the names of those that it has."""
    collisions = []
    for key, value in common.items():
        if key not in tree:
            tree[key] = value
        elif isinstance(tree[key], dict) and isinstance(value, dict):
            collisions += _fill(tree[key], value, f"{prefix}{key}/")
        else:
            collisions.append(f"{prefix}{key}")
    return collisions


def _name_parameters(optimizer: Any) -> None:
    """Gives each parameter the step that Megatron saves once for all, and the one group of parameters their names."""
    if not isinstance(optimizer, dict):
        return
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        for inner in optimizer.values():
            _name_parameters(inner)
        return
    step = state.pop("common_step", None)
    for slots in state.values():
        if step is not None and isinstance(slots, dict):
            slots.setdefault("step", step.alone() if isinstance(step, TensorEntry) else step)
    if len(groups) == 1 and isinstance(groups[0], dict) and not groups[0].get("params"):
        optimizer["param_groups"] = [{**groups[0], "params": list(state)}]
