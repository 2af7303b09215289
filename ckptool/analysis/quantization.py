"""The quantized weights of a checkpoint, by its names and by the configuration beside it: described, or refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint, Composite, Note, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.commands import FILE, OUT, OUT_SAFETENSORS, Slot, command, input_of
from ckptool.conventions.quantized import Quantized, find_quantized, may_be_quantized
from ckptool.conventions.state_dicts import StateDict
from ckptool.errors import Unsupported, listed
from ckptool.formats.model_folder import quantization_config

if TYPE_CHECKING:
    from ckptool.analysis.warm_start import LoadReport


def quantized_in(checkpoint: Checkpoint, node: Mapping[Any, Any]) -> Quantized:
    """The quantized weights of a state dict of a checkpoint."""
    return find_quantized(node, quantization_config(checkpoint), checkpoint.metadata)


def refuse_quantized(
    checkpoint: Checkpoint, nodes: Sequence[Mapping[Any, Any]], action: str, keys: Collection[Any] | None = None
) -> None:
    """Raises `Unsupported` for state dicts with quantized weights. action: what would make them wrong, `Cast`.
    keys: those that it is done to, None for all; only parts of a weight are refused, or any of an unknown scheme."""
    for node in nodes:
        quant = quantized_in(checkpoint, node)
        parts = {key for weight in quant.weights for key in weight.keys}
        if quant and (keys is None or (keys and quant.problems) or not parts.isdisjoint(keys)):
            raise _refusal(checkpoint, quant, action)


def refuse_codes(checkpoint: Checkpoint, node: Mapping[Any, Any], report: LoadReport) -> None:
    """Raises `Unsupported` unless all parts of a quantized weight are loaded as they are: codes need their scales."""
    quant = quantized_in(checkpoint, node)
    if not quant:
        return
    tensors = {key: value.view for key, value in node.items() if isinstance(value, (TensorEntry, Composite))}
    from ckptool.analysis.warm_start import AS_IT_IS  # which the other functions do not need

    views = {tensors.get(fact.source) for fact in report.loaded if fact.how == AS_IT_IS}  # or of an extra state
    loaded = {key for key, view in tensors.items() if view in views}
    unloaded = {fact.source for fact in report.unexpected} | {fact.source for fact in report.mismatched}
    is_split = any(0 < sum(key in loaded for key in weight.keys) < len(weight.keys) for weight in quant.weights)
    without = any(key in unloaded for weight in quant.weights for key in weight.keys)
    unknown = bool(quant.problems) and len(loaded) < len(tensors)
    if is_split or without or unknown:
        raise _refusal(checkpoint, quant, "Loaded")


def _refusal(checkpoint: Checkpoint, quant: Quantized, action: str) -> Unsupported:
    fix = command("cast", input_of(checkpoint.source), dtype="bf16", dequantize=True, out=_output_slot(checkpoint))
    what = f"{checkpoint.source or 'the checkpoint'} is quantized: {listed([*quant.lines(), *quant.problems], 3)}"
    why = f"{action} without their scales, its codes would become wrong weights. Nothing was written."
    return Unsupported(what, why, "" if quant.problems else f"Compute the weights: {fix}")


def quantized_notes(checkpoint: Checkpoint, roots: Sequence[StateDict]) -> Iterator[Note]:
    """The formats of quantized weights, and what is not known of them."""
    for root in roots:
        if not root.is_model or not may_be_quantized(root.node):
            continue
        quant = quantized_in(checkpoint, root.node)
        if quant.weights:
            fix = command("cast", FILE, dtype="bf16", dequantize=True, out=_output_slot(checkpoint))
            facts = [weight.facts for weight in quant.weights if "forms" in weight.facts]
            # With zero points that are not all the same, only the configuration says what they stand for.
            unsettled = any(not fact["forms"] and fact["symmetric"] is not True for fact in facts)
            need = ["how their zero points are stored is in config.json, which has to be beside it"] * unsettled
            yield Note("quantized", "; ".join([*quant.lines(), *need]), () if quant.problems or need else fix)
        if quant.problems:
            yield Note("quantized-unknown", listed(quant.problems, 4))


def _output_slot(checkpoint: Checkpoint) -> Slot:
    if quantization_config(checkpoint):  # which a folder has no longer
        return Slot("OUT/")
    return OUT_SAFETENSORS if isinstance(checkpoint.source, Folder) else OUT
