"""`cast`: model weights in another floating type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

from ckptool.analysis.quantization import refuse_quantized
from ckptool.checkpoint import Note, TensorEntry
from ckptool.commands import arg, option, several, verb
from ckptool.conventions.quantized import QuantizedWeight
from ckptool.conventions.state_dicts import model_state_dicts, optimizers
from ckptool.errors import NoMatch, UsageError, counted, listed
from ckptool.facts import size
from ckptool.formats.model_folder import model_folder, stale_config
from ckptool.transforms.casting import Cast, cast_roots, parse_dtype
from ckptool.transforms.dequantize import dequantize as dequantized
from ckptool.verbs._options import ChangedAt, ChangedFiles, Exclude, Only, Out
from ckptool.verbs._save import Row, SavePart, Unpack, Written, begin_change, out_first

SHOWN = 12  # weights that are listed without -n


@verb(
    ("ckptool cast model.pt --dtype bf16 -o half.pt", "half the size"),
    ("ckptool cast fp8/ --dtype bf16 --dequantize -o bf16/", "a folder of quantized weights"),
)
def cast(
    file: ChangedFiles,
    out: Out = None,
    dtype: Annotated[object, option("--dtype DTYPE", "bf16, f16, f32, float8_e4m3fn, …", needed=True)] = None,
    *,
    at: ChangedAt = None,
    only: Only = (),
    exclude: Exclude = (),
    dequantize: Annotated[
        bool, option("--dequantize", "Compute the weights of fp8, GPTQ, AWQ, bitsandbytes, … from their scales.")
    ] = False,
    **options: Unpack[SavePart],
) -> Written | Any:
    """Converts the floating tensors of all model weights to `dtype`, as torch's `tensor.to(dtype)` does, bit for bit.

    dtype: `bf16`, `f16`, `f32`, `float8_e4m3fn`, …, or torch's or numpy's own. Optimizer state, integers, complex and
    quantized tensors stay as they are; `dequantize` computes in f32, and leaves the scales out. The report names the
    tensors that lost values, with the largest error; a dry run, which reads no values, does not.
    """
    out, dtype = out_first(out, dtype)
    if dtype is None:
        raise UsageError("cast needs a dtype", "", f"For example: {arg(dtype='bf16')}")
    target = parse_dtype(dtype)
    change = begin_change("cast", file, out, at, options)
    part, roots = change.part, model_state_dicts(change.part, named=change.named)
    weights, left_out = list[tuple[str, QuantizedWeight]](), list[str]()
    if dequantize:
        part, weights, left_out = dequantized(part, roots, target)
        roots = model_state_dicts(part, named=change.named)
    else:
        refuse_quantized(part, [root.node for root in roots], "Cast")
    values = [value for root in roots for value in root.node.values()]
    if change.named and not any(isinstance(value, TensorEntry) and value.dtype.is_float for value in values):
        what = f"{roots[0].address or 'the whole file'} has no floating tensors under names of its own"
        raise NoMatch(what, "Only those can be cast. Nothing was written.")
    plan = cast_roots(part, roots, target, several(only), several(exclude))
    if change.live and not change.options["dry_run"] and plan.skipped and not plan.tensors:
        kinds = listed(list(dict.fromkeys(kind for _, kind in plan.skipped)), 3)
        count = counted(len(plan.skipped), "floating tensor is", "floating tensors are")
        raise NoMatch(f"nothing was cast: {count} of other kinds ({kinds})", "Only plain ones can be cast.")
    beside = model_folder(change.original, plan.checkpoint.tree, dequantized=True) if weights else None
    written = change.save(plan.checkpoint, changes=plan.tensors > 0 or bool(weights), beside=beside)
    dry_run, rows = bool(change.options["dry_run"]), list[Row | str]()
    summary = f"already clean: every floating tensor that was asked for is {target.name}"
    if plan.tensors:
        before, after = size(plan.bytes_before), size(plan.bytes_after)
        summary = f"{counted(plan.tensors, 'tensor')} cast to {target.name}, {before} → {after}"
    elif plan.skipped:
        unchanged = counted(len(plan.skipped), "tensor is", "tensors are")
        summary = f"nothing was cast: {unchanged} left as is; any others are already {target.name}"
    if weights:
        count = f"{counted(len(weights), 'quantized weight')} computed as {target.name}"
        summary = f"{count}; {summary}" if plan.tensors else count
        computed: list[dict[str, Any]] = [
            {"path": name, "from": weight.words, "shape": list(weight.shape), "keys": list(weight.keys)}
            for name, weight in weights
        ]
        lines = [f"{fact['path']} {fact['shape']} {target.name} ← {fact['from']}" for fact in computed]
        if not dry_run and (hidden := len(lines[SHOWN:])):
            lines[SHOWN:] = [f"… and {counted(hidden, 'weight')} more ({arg(dry_run=True)} shows all)"]
        scales = Row.named("left_out", left_out, "left out, scales of activations:", 6)
        rows = [Row("dequantized", computed, lines), scales]
    lossy = [(name, kind, asdict(tally)) for name, kind, tally in plan.tallies if tally.changed]
    facts = [{"storage_of": name, "from": kind.name, **tally} for name, kind, tally in lossy]
    rows.append(Row("lossy", facts, _losses(plan, bool(weights)) if plan.tensors and not dry_run else ()))
    not_cast = Row.named("", [f"{name} ({kind})" for name, kind in plan.skipped], "not cast:").lines
    rows.append(Row("skipped", [{"path": name, "kind": kind} for name, kind in plan.skipped], not_cast))
    if not written.details and (plan.tensors or weights):
        in_place = bool(change.options.get("in_place"))
        rows += stale_config(change.original, target.torch, dequantized=bool(weights), in_place=in_place)
    if plan.tensors and any(True for _ in optimizers(part.tree)):
        rows.append("the optimizer's state keeps its dtypes")
    infinite = sum(tally.overflowed for *_, tally in plan.tallies) if change.live else 0  # else a line says it
    notes = [Note("non-finite", f"{counted(infinite, 'value')} became infinite or NaN")] * bool(infinite)
    totals = {name: getattr(plan, name) for name in ("tensors", "bytes_before", "bytes_after")}
    return written.about(summary, *rows, notes=notes, dtype=target.name, **totals)


def _losses(plan: Cast, computed: bool) -> Iterator[str]:
    """The losses of the cast, if its values were read (`doctor` writes later).

    computed: it also computed weights; the casts beside them may be exact.
    """
    lossy = sorted((row for row in plan.tallies if row[2].changed), key=lambda row: -row[2].max_abs_error)
    if lossy:
        yield f"values rounded in {len(lossy):,} of {counted(len(plan.tallies), 'storage')}; the largest errors:"
        for name, kind, tally in lossy[:3]:
            rounded = f"{tally.changed:,} of {counted(tally.elements, 'value')}, by at most {tally.max_abs_error:.3g}"
            yield f"  {name} ({kind.name}): {rounded}"
        for word, what in (("became infinite or NaN", "overflowed"), ("became zero", "underflowed")):
            if count := sum(getattr(tally, what) for _, _, tally in lossy):
                yield f"{counted(count, 'value')} {word}"
    elif not computed and (not plan.bytes_before or any(tally.elements for *_, tally in plan.tallies)):
        yield "no value was changed"
