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
from ckptool.formats.boxes import Chunk
from ckptool.formats.deepspeed.shares import Share, complete
from ckptool.formats.deepspeed.zero import Models, Tag, checkpoint_of, joined_groups, parallel, shapes_of, tree_of
from ckptool.formats.joined_folder import damaged, lacks, mixed

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
    _same_run(tag, tags, states, shares)
    names = {number: _names(tags[number], states[number], shares[number]) for number in tags}
    known = {name: shape for groups in names.values() for group in groups for name, shape in group.items()}
    lists = [each.get("buffer_names") for each in states.values()]
    buffers = [name for names_of in lists if isinstance(names_of, list) for name in names_of if type(name) is str]
    own = _layers(tag, known, buffers)
    weights, optimizer = _joined(tags, states, shares, names, own)
    first = shares[0][0] if shares[0] else None
    module = Models(tag, states[0], own, weights, 1, len(shares[0])).module()
    tree = tree_of(states[0], module, optimizer, first.rest if first else {})
    engine = ", pipeline" if first is None else f", {first.engine}, pipeline"
    return checkpoint_of(tag, tree, engine, sum(map(len, shares.values())))


def _same_run(
    tag: Tag, tags: Mapping[int, Tag], states: Mapping[int, dict[str, Any]], shares: Mapping[int, list[Share]]
) -> None:
    for number in tags:
        one, other = tag.models[0], tags[number].models[0]
        if states[number].get("global_steps") != states[0].get("global_steps"):
            raise mixed(tag.folder, one, other, "global_steps differ")
        if [share.counts for share in shares[number][:1]] != [share.counts for share in shares[0][:1]]:
            raise mixed(tag.folder, one, other, "the optimizer of the stages is divided over other numbers of ranks")


def _names(tag: Tag, states: dict[str, Any], shares: list[Share]) -> list[dict[str, Any]]:
    """The parameters of a stage by group, with their shapes; None where only the order of their pieces is recorded."""
    if states.get("param_shapes") is not None or not shares:
        return [dict(group) for group in shapes_of(tag, states, tag.models[0])]
    groups = range(len(shares[0].mappings))
    return [{name: None for share in shares for name in share.mappings[group : group + 1][0]} for group in groups]


def _layers(tag: Tag, known: Mapping[str, Any], buffers: Iterable[str]) -> dict[str, Any]:
    """The tensors of all layers by their full names. known: the parameters that the optimizer has, and their shapes.

    Raises `Corrupt` where one of these, or of the buffers, is in no layer's file.
    """
    found: dict[str, Any] = {}
    for file in sorted(tag.layers, key=lambda name: int(name.split("-")[0].removeprefix("layer_"))):
        tree = tag.files.open(file)
        if not isinstance(tree, dict):
            raise damaged(tag.folder, f"{file} has no weights of a layer")
        layer = int(file.split("-")[0].removeprefix("layer_"))
        for name, value in tree.items():
            full = f"{layer}.{name}"
            shape = value.shape if isinstance(value, TensorEntry) else None
            tied = [
                other
                for other, known_shape in known.items()
                if other.startswith("tied_modules.")
                and other.split(".", 2)[2:] == [name]
                and known_shape in (None, shape)
            ]
            found.setdefault(tied[0] if full not in known and len(tied) == 1 else full, value)
    _refuse_missing(tag, {**dict.fromkeys(buffers), **known}, found)
    return found


def _refuse_missing(tag: Tag, known: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raises `Corrupt` for parameters and buffers that the ranks name, and that no layer's file has."""
    of_layers = {
        (name.partition(".")[2], value.shape if isinstance(value, TensorEntry) else None)
        for name, value in found.items()
    }
    for name, shape in known.items():
        layer, _, rest = name.partition(".")
        # A tied one whose layer cannot be told from its name is under that of the layer.
        tied = layer == "tied_modules" and (rest.partition(".")[2], shape) in of_layers
        if name not in found and (layer.isdecimal() or layer == "tied_modules") and not tied:
            file = f"layer_{layer:0>2}-model_states.pt" if layer.isdecimal() else "a layer's file"
            what = f"{tag.folder} lacks {name}, which the ranks' files name"
            raise Corrupt(what, f"It is in {file}, which is not there or is another's.", "Copy all files of the run.")


def _joined(
    tags: Mapping[int, Tag],
    states: Mapping[int, dict[str, Any]],
    shares: Mapping[int, list[Share]],
    names: Mapping[int, list[dict[str, Any]]],
    own: dict[str, Any],
) -> tuple[dict[str, TensorEntry], dict[str, Any] | None]:
    """The weights and the optimizer of all stages; a parameter that several have is that of the first."""
    weights: dict[str, TensorEntry] = {}
    whole: dict[str, Any] | None = None
    for number, tag in tags.items():
        if not shares[number]:
            continue
        shapes = [{name: _shape(tag, name, shape, own) for name, shape in group.items()} for group in names[number]]
        joined = joined_groups(tag, {**states[number], "param_shapes": shapes}, shares[number], own)
        for name, entry in joined.weights.items():
            chunk = Chunk(entry, (0,) * len(entry.shape), f"stage {number}")
            earlier = [replace(chunk, entry=weights[name], owner="an earlier stage")] if name in weights else []
            weights[name] = tag.joiner.replicated(name, [*earlier, chunk])
        optimizer = joined.optimizer or {}
        whole = whole or {"state": {}, "param_groups": [{**g, "params": []} for g in optimizer["param_groups"]]}
        whole["state"] = optimizer["state"] | whole["state"]
        for group, more in zip(whole["param_groups"], optimizer["param_groups"], strict=False):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    return weights, whole


def _shape(tag: Tag, name: str, shape: tuple[int, ...] | None, own: Mapping[str, Any]) -> tuple[int, ...]:
    if shape is None and not isinstance(own.get(name), TensorEntry):
        raise lacks(tag.folder, "the file of the layer", [name])
    return own[name].shape if shape is None else shape
