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
from ckptool.checkpoint.nodes import fields, items
from ckptool.errors import Corrupt, Unsupported
from ckptool.formats.boxes import Piece
from ckptool.formats.folder import complete, damaged, lacks
from ckptool.formats.layouts.zero import Tag, checkpoint_of, joined_groups, shapes_of
from ckptool.formats.pieces import refuse_other

_LAYER = re.compile(r"layer_(?P<layer>\d{1,7})-(?:model_00-)?model_states\.pt")


def read_stages(tag: Tag) -> Checkpoint:
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
            names[number] = [{**group} for group in shapes_of(each, states[number], each.models[0])]
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
        joined, optimizer = joined_groups(each, {**states[number], "param_shapes": shapes}, shares[number], own)
        for name, entry in joined.items():
            piece = Piece(entry, (0,) * len(entry.shape), f"stage {number}")
            earlier = [replace(piece, tensor=weights[name], owner="an earlier stage")] if name in weights else []
            weights[name] = tag.joiner.replicated(name, [*earlier, piece])
        whole = whole or {"state": {}, "param_groups": [{**g, "params": []} for g in optimizer["param_groups"]]}
        whole["state"] = optimizer["state"] | whole["state"]
        for group, more in zip(whole["param_groups"], optimizer["param_groups"], strict=False):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    rest, engine = (shares[0][0].rest, shares[0][0].engine) if shares[0] else ({}, "")
    world = sum(map(len, shares.values()))
    return checkpoint_of(tag, states[0], own, weights, whole, rest, 1, world, f"{engine}, pipeline")


def _layers(tag: Tag, known: Mapping[str, Any], buffers: Iterable[str]) -> dict[str, Any]:
    """The tensors of all layers by their full names. known: the parameters that the optimizer has, and their shapes.

    Raises `Corrupt` where one of these, or of the buffers, is in no layer's file.
    """
    found: dict[str, Any] = {}
    for layer, file in sorted((int(named["layer"]), name) for name in tag.layers if (named := _LAYER.fullmatch(name))):
        if not isinstance(tree := tag.joiner.open(file).tree, dict):
            raise damaged(tag.folder, f"{file} has no weights of a layer")
        for name, value in tree.items():
            full, shapes = f"{layer}.{name}", (None, value.shape if isinstance(value, TensorEntry) else None)
            tied = [n for n, s in known.items() if n.startswith("tied_modules.") and s in shapes]
            tied = [each for each in tied if each.split(".", 2)[2:] == [name]]
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
