"""`lora merge`: a LoRA, LoHa or LoKr adapter merged into the weights that it is for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import read_json
from ckptool.checkpoint.state_dicts import one_state_dict
from ckptool.errors import Corrupt, UsageError, counted, listed, printable
from ckptool.formats.model_folder import ADAPTER, MAX_CONFIG, config_beside, configuration
from ckptool.formats.opening import Opened, PathLike, open_whole
from ckptool.reports.quantization import refuse_quantized
from ckptool.reports.save import Written
from ckptool.transforms.flatten import around
from ckptool.transforms.lora.adapters import Adapter, read_adapter
from ckptool.transforms.lora.merge import MergedWeights, merge
from ckptool.verbs._save import SaveOptions, output_of, save, weights_alone, written

if TYPE_CHECKING:
    from typing_extensions import Unpack


def lora_merge(
    base: PathLike,
    adapter: PathLike,
    out: PathLike | None = None,
    *,
    config: PathLike | None = None,
    scale: float = 1.0,
    at: str | None = None,
    part: bool = False,
    **options: Unpack[SaveOptions],
) -> Written:
    """Merges an adapter into one set of weights of `base`, with the bits of PEFT's `merge_and_unload`.

    adapter: a folder of PEFT's, or a file with the names of PEFT, kohya, LyCORIS, diffusers or ai-toolkit.
    config: its adapter_config.json, if that is not beside it.  scale: a factor for all of its changes.  at: the part
    of the base.  part: take also a base that is only a part of a checkpoint.
    Raises `NoMatch` unless every key of the adapter is used, `Conflict` for shapes of another base and for one side of
    tied weights, `Unsupported` for kinds of adapters that no weights can stand for, and for a quantized base.
    """
    output = output_of("lora merge", out, options)
    if output.in_place:
        raise UsageError("lora merge writes a new file", "It has two inputs.", "For example: -o merged.safetensors")
    if not math.isfinite(scale):
        raise UsageError(f"a scale of {scale} is no number", "", "For example: --scale 0.8")
    opened, added = open_whole(base, at, part=part), open_whole(adapter)
    checkpoint = opened.checkpoint
    root, remark = one_state_dict(checkpoint, opened.at)
    refuse_quantized(checkpoint, [root.node], "Merged")
    found = open_adapter(added, config)
    names = printable(opened.path), printable(added.path)
    merged = merge(root.node, found, names=names, multiplier=scale, tied=is_tied(checkpoint))
    changed = weights_alone(checkpoint, merged.tree, [(checkpoint.metadata, root.path)])
    source = added.checkpoint.source
    saved = save(output, checkpoint, changed, inputs=[source] if source is not None else [])
    behind = [printable(name) for name in around(checkpoint, root)]
    details = [*_details(merged, found, remark), *(f"left behind: {name}" for name in behind)]
    facts = {
        "adapter": names[1],
        "scheme": found.scheme,
        "base_model": printable(found.base_model),
        "keys": merged.keys,
        "changed": list(merged.changed),
        "replaced": list(merged.replaced),
        "added": list(merged.added),
        "left_behind": behind,
    }
    return written(
        output, checkpoint, saved, _summary(merged, names[1]), facts=facts, details=details, notes=found.notes
    )


def open_adapter(opened: Opened, config: PathLike | None = None) -> Adapter:
    """The adapter that was opened, with PEFT's configuration: that given, or the one beside it."""
    root, _ = one_state_dict(opened.checkpoint, opened.at)
    name = printable(opened.path)
    fields = config_beside(opened.checkpoint, ADAPTER)
    if config is not None:
        fields = read_json(config, "a configuration", MAX_CONFIG)
        if not isinstance(fields, dict):
            raise Corrupt(f"{printable(os.fspath(config))} is no JSON object", "A configuration is one.")
    return read_adapter(root.node, name, fields, opened.checkpoint.metadata)


def is_tied(checkpoint: Checkpoint) -> bool:
    """True where config.json says that the head is the embedding."""
    config = configuration(checkpoint)
    inner = config.get("text_config")
    return any(isinstance(each, dict) and each.get("tie_word_embeddings") is True for each in (config, inner))


def _summary(merged: MergedWeights, name: str) -> str:
    return f"{name} merged: {counted(merged.keys, 'key')} into {counted(len(merged.changed), 'tensor')}"


def _details(merged: MergedWeights, adapter: Adapter, remark: str) -> Iterator[str]:
    if remark:
        yield remark
    yield from merged.moved
    if merged.replaced:
        yield f"taken whole from the adapter: {listed([printable(key) for key in merged.replaced], 8)}"
    if merged.added:
        yield f"new, from modules_to_save: {listed([printable(key) for key in merged.added], 8)}"
    if adapter.base_model:
        yield f"the adapter was trained on {printable(adapter.base_model)[:200]}"
