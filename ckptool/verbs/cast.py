"""`cast`: model weights in another floating type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from ckptool.analysis.quantization import refuse_quantized
from ckptool.analysis.save import Written
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.state_dicts import model_state_dicts
from ckptool.commands import several
from ckptool.errors import NoMatch, UsageError, counted, listed, printable
from ckptool.formats.model_folder import model_folder, quantization_config
from ckptool.options import option, verb
from ckptool.transforms.cast import Cast, cast_roots, parse_dtype
from ckptool.transforms.dequantize import DequantizedCheckpoint
from ckptool.transforms.dequantize import dequantize as dequantized
from ckptool.verbs._change import begin_change
from ckptool.verbs._options import ChangedAt, ChangedFiles, Exclude, Only, Out
from ckptool.verbs._save import ChangeOptions, Output, Unpack, out_first

SHOWN = 12  # weights that are listed without -n


@verb(
    ("ckptool cast model.pt --dtype bf16 -o half.pt", "half the size"),
    ("ckptool cast fp8/ --dtype bf16 --dequantize -o bf16/", "a folder of quantized weights"),
)
def cast(
    file: ChangedFiles,
    out: Out = None,
    dtype: Annotated[
        object, option("--dtype DTYPE", "bf16, f16, f32, float8_e4m3fn, …", needed=True, show_default=False)
    ] = None,
    *,
    at: ChangedAt = None,
    only: Only = (),
    exclude: Exclude = (),
    dequantize: Annotated[
        bool, option("--dequantize", "Compute the weights of fp8, GPTQ, AWQ, bitsandbytes, … from their scales.")
    ] = False,
    block_size: Annotated[str, option("--block-size RxC", "With --dequantize: the block that shares a scale.")] = "",
    **options: Unpack[ChangeOptions],
) -> Written | Any:
    """Converts the floating tensors of all model weights to `dtype`, as torch's `tensor.to(dtype)` does, bit for bit.

    dtype: its name, or torch's or numpy's own.  only, exclude: patterns for keys. Optimizer state, integers, complex
    and quantized tensors stay as they are.
    dequantize: computes the weights that codes and scales stand for, in f32, and leaves the scales out.
    block_size: `128x128`, the rows and columns that share a scale, where no configuration beside the file says it.
    The report names the tensors that lost values, with the largest error; a dry run, which reads no values, does not.
    """
    out, dtype = out_first(out, dtype)
    if dtype is None:
        raise UsageError("cast needs a dtype", "", "For example: --dtype bf16")
    target = parse_dtype(dtype)
    if block_size and not dequantize:
        raise UsageError("--block-size is of quantized weights", "", "Compute them: --dequantize")
    change = begin_change("cast", file, out, at, options)
    part, roots = change.part, model_state_dicts(change.part, named=change.named)
    weights: DequantizedCheckpoint | None = None
    if dequantize:
        weights = dequantized(part, roots, target, block_size)
        part, roots = weights.checkpoint, model_state_dicts(weights.checkpoint, named=change.named)
    else:
        refuse_quantized(part, [root.node for root in roots], "Cast")
    values = [value for root in roots for value in root.node.values()]
    if change.named and not any(isinstance(value, TensorEntry) and value.dtype.is_float for value in values):
        raise NoMatch(
            f"{roots[0].address or 'the whole file'} has no floating tensors under names of its own",
            "Only those are cast. Nothing was written.",
        )
    plan = cast_roots(part, roots, target, several(only), several(exclude))
    if change.output.live and not change.output.dry_run and plan.skipped and not plan.tensors:
        kinds = listed(list(dict.fromkeys(kind for _, kind in plan.skipped)), 3)
        count = counted(len(plan.skipped), "floating tensor is", "floating tensors are")
        raise NoMatch(f"nothing was cast: {count} of another kind ({kinds})", "Only plain ones are cast.")
    beside = model_folder(change.original, plan.checkpoint.tree, dequantized=True) if weights else None
    result = change.save(plan.checkpoint, changes=plan.tensors > 0 or weights is not None, beside=beside)
    losses = _losses(plan, change.output)
    details = (
        *(_dequantized_lines(weights, target, None if change.output.dry_run else SHOWN) if weights else ()),
        *(losses if not weights or len(losses) > 1 else ()),  # of the others none may have changed
        *(f"{printable(name)} left as it is ({kind})" for name, kind in plan.skipped),
    )
    summary, facts = _summary(plan), _facts(plan)
    if weights:
        if quantization_config(change.original) and not result.details:
            details += ("config.json beside it still names the quantization; a folder (-o DIR/) gets one without it",)
        count = counted(len(weights.weights), "quantized weight")
        summary = f"{count} computed as {target.name}" + (f"; {summary}" if plan.tensors else "")
        facts |= _dequantized_facts(weights)
    return change.written(result, summary, facts=facts, details=details)


def _dequantized_lines(done: DequantizedCheckpoint, target: DType, most: int | None) -> Iterator[str]:
    for name, weight in done.weights[:most]:
        yield f"{printable(name)} {list(weight.shape)} {target.name} ← {weight.words}"
    if most and len(done.weights) > most:
        yield f"… and {counted(len(done.weights) - most, 'weight')} more (-n shows all)"
    if done.left_out:
        yield f"left out, of activations: {listed([printable(name) for name in done.left_out], 6)}"


def _dequantized_facts(done: DequantizedCheckpoint) -> dict[str, Any]:
    weights = [
        {"path": name, "from": weight.words, "shape": list(weight.shape), "keys": list(weight.keys)}
        for name, weight in done.weights
    ]
    return {"dequantized": weights, "left_out": list(done.left_out)}


def _summary(plan: Cast) -> str:
    name = plan.target.name
    if plan.tensors:
        sizes = f"{plan.bytes_before:,} → {plan.bytes_after:,} bytes"
        return f"{counted(plan.tensors, 'tensor')} cast to {name}, {sizes}"
    if plan.skipped:
        left = counted(len(plan.skipped), "tensor is", "tensors are")
        return f"nothing was cast: {left} left as before; any others are {name} already"
    return f"already clean: every floating tensor that was asked for is {name}"


def _losses(plan: Cast, output: Output) -> list[str]:
    if output.dry_run or not plan.tensors:
        return []
    lossy = sorted((fact for fact in plan.tallies if fact[2].changed), key=lambda fact: -fact[2].max_abs_error)
    if not lossy:
        return ["no value was changed"]
    lines = [f"values rounded in {len(lossy):,} of {counted(len(plan.tallies), 'storage')}; the largest errors:"]
    for name, dtype, tally in lossy[:3]:
        text = (
            f"  {printable(name)} ({dtype.name}): {tally.changed:,} of "
            f"{counted(tally.elements, 'value')}, by at most {tally.max_abs_error:.3g}"
        )
        lines.append(text)
    for word, count in (
        ("became infinite or NaN", sum(t.overflowed for _, _, t in lossy)),
        ("became zero", sum(t.underflowed for _, _, t in lossy)),
    ):
        lines += [f"{counted(count, 'value')} {word}"] if count else []
    return lines


def _facts(plan: Cast) -> dict[str, Any]:
    lossy = [
        {
            "storage_of": name,
            "from": dtype.name,
            "elements": tally.elements,
            "changed": tally.changed,
            "overflowed": tally.overflowed,
            "underflowed": tally.underflowed,
            "max_abs_error": tally.max_abs_error,
            "max_rel_error": tally.max_rel_error,
        }
        for name, dtype, tally in plan.tallies
        if tally.changed
    ]
    skipped = [{"path": name, "kind": kind} for name, kind in plan.skipped]
    return {
        "dtype": plan.target.name,
        "tensors": plan.tensors,
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "lossy": lossy,
        "skipped": skipped,
    }
