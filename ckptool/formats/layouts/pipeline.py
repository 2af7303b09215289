"""A pipeline's folder: the files of every layer, and for each stage the model states and shares of its own ranks.

Source: deepspeed/runtime/pipe/module.py (`layer_03-model_states.pt`; parameters are called `3.weight`, those of tied
layers `tied_modules.KEY.weight`). `module` is empty in the model states of a stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.errors import Corrupt
from ckptool.formats.folder import damaged, lacks, mixed
from ckptool.formats.layouts.zero import (
    Tag,
    checkpoint_of,
    complete,
    joined_groups,
    module_of,
    parallel,
    shapes_of,
    tree_of,
)
from ckptool.formats.pieces import Piece

_LAYER = re.compile(r"layer_(?P<layer>\d{1,7})-(?:model_00-)?model_states\.pt")


def read_stages(tag: Tag) -> Checkpoint:
    """The checkpoint of a pipeline. Raises `Unsupported` where its layers are divided by tensor parallelism."""
    tags = {0: tag, **tag.stages}
    if lacking := next((number for number, each in tags.items() if not each.models), None):
        raise lacks(tag.folder, f"mp_rank_{lacking:02}_model_states.pt")
    states = {number: each.model(0, layered=True) for number, each in sorted(tags.items())}
    degrees = states[0].get("checkpoint_parallel_dimensions")
    wide = degrees.get("tp_degree") != 1 if isinstance(degrees, dict) else not tag.layers
    if odd := [name for name in tag.layers if not _LAYER.fullmatch(name)] or (wide and [tag.models[0]]):
        raise parallel(tag.folder, odd[0])
    count = degrees.get("pp_degree") if isinstance(degrees, dict) else None
    complete(tag.folder, [*tags], count if type(count) is int else len(tags), tag.models[0])
    shares = {number: each.shares() for number, each in tags.items()}
    known: dict[str, tuple[int, ...] | None] = {}  # the parameters that the optimizer has
    names: dict[int, list[dict[str, tuple[int, ...] | None]]] = {}
    for number, each in tags.items():
        if states[number].get("global_steps") != states[0].get("global_steps"):
            raise mixed(tag.folder, tag.models[0], each.models[0], "global_steps differ")
        if [share.counts for share in shares[number][:1]] != [share.counts for share in shares[0][:1]]:
            what = "the optimizer of the stages is divided over other numbers of ranks"
            raise mixed(tag.folder, tag.models[0], each.models[0], what)
    for number, each in tags.items():
        if states[number].get("param_shapes") is not None or not shares[number]:
            names[number] = [dict(group) for group in shapes_of(each, states[number], each.models[0])]
        else:  # only the order of their pieces is recorded
            groups = range(len(shares[number][0].mappings))
            names[number] = [{n: None for share in shares[number] for n in share.placed(group)} for group in groups]
        known |= {name: shape for group in names[number] for name, shape in group.items()}
    lists = [each.get("buffer_names") for each in states.values()]
    buffers = [name for names_of in lists if isinstance(names_of, list) for name in names_of if type(name) is str]
    own = _layers(tag, known, buffers)
    weights: dict[str, TensorEntry] = {}  # a parameter that several stages have is that of the first
    whole: dict[str, Any] | None = None
    for number, each in tags.items():
        if not shares[number]:
            continue
        shapes = [{name: _shape(tag, name, shape, own) for name, shape in group.items()} for group in names[number]]
        joined, optimizer = joined_groups(each, {**states[number], "param_shapes": shapes}, shares[number], own)
        for name, entry in joined.items():
            piece = Piece(entry, (0,) * len(entry.shape), f"stage {number}")
            earlier = [replace(piece, entry=weights[name], owner="an earlier stage")] if name in weights else []
            weights[name] = tag.joiner.replicated(name, [*earlier, piece])
        whole = whole or {"state": {}, "param_groups": [{**g, "params": []} for g in optimizer["param_groups"]]}
        whole["state"] = optimizer["state"] | whole["state"]
        for group, more in zip(whole["param_groups"], optimizer["param_groups"], strict=False):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    first = shares[0][0] if shares[0] else None
    module = module_of(tag, states[0], own, weights, 1, len(shares[0]))
    tree = tree_of(states[0], module, whole, first.rest if first else {})
    engine = ", pipeline" if first is None else f", {first.engine}, pipeline"
    return checkpoint_of(tag, tree, engine, sum(map(len, shares.values())))


def _shape(tag: Tag, name: str, shape: tuple[int, ...] | None, own: Mapping[str, Any]) -> tuple[int, ...]:
    if shape is None and not isinstance(own.get(name), TensorEntry):
        raise lacks(tag.folder, "the file of the layer", [name])
    return own[name].shape if shape is None else shape


def _layers(tag: Tag, known: Mapping[str, Any], buffers: Iterable[str]) -> dict[str, Any]:
    """The tensors of all layers by their full names. known: the parameters that the optimizer has, and their shapes.

    Raises `Corrupt` where one of these, or of the buffers, is in no layer's file.
    """
    found: dict[str, Any] = {}
    for file in sorted(tag.layers, key=lambda name: int(name.split("-")[0].removeprefix("layer_"))):
        tree, layer = tag.files.open(file), int(file.split("-")[0].removeprefix("layer_"))
        if not isinstance(tree, dict):
            raise damaged(tag.folder, f"{file} has no weights of a layer")
        for name, value in tree.items():
            full, shape = f"{layer}.{name}", value.shape if isinstance(value, TensorEntry) else None
            tied = [
                other
                for other, known_shape in known.items()
                if other.startswith("tied_modules.")
                and other.split(".", 2)[2:] == [name]
                and known_shape in (None, shape)
            ]
            full = tied[0] if full not in known and len(tied) == 1 else full
            found.setdefault(full, value)
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
