"""`average`: the weighted mean of several checkpoints of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.commands import several
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.state_dicts import StateDict, is_beside, one_state_dict
from ckptool.checkpoint.tree import address
from ckptool.errors import UsageError, counted, listed, printable
from ckptool.formats.in_memory import together
from ckptool.formats.opening import CheckpointLike, PathLike, open_whole
from ckptool.formats.parts import refuse_placeholders
from ckptool.reports.quantization import refuse_quantized
from ckptool.reports.save import Written
from ckptool.transforms import average as means
from ckptool.transforms.flatten import around, left_behind, weights_alone
from ckptool.transforms.merging import Merge, merge_of
from ckptool.verbs._save import SaveOptions, Unpack, output_of, save, written


def average(
    files: Sequence[CheckpointLike] | Iterator[CheckpointLike],
    out: PathLike | None = None,
    *,
    weights: Sequence[float] | None = None,
    weight: str | Sequence[str] = (),
    ema: float | None = None,
    method: str = "mean",
    base: CheckpointLike | None = None,
    density: float | Sequence[float] | None = None,
    scale: float | None = None,
    t: float | None = None,
    seed: int | None = None,
    definition: str | None = None,
    at: str | None = None,
    part: bool = False,
    **options: Unpack[SaveOptions],
) -> Written | Any:
    """Writes the mean of one set of weights over several files: equal shares, `weights`, or a moving average (`ema`).

    The files are read side by side, in pieces. Counters and booleans are the last file's, and named.
    weight: other weights for some names, as `PATTERN=W,W`.  method: `mean`; `slerp` between two files, at `t`, 0 to 1;
    or `task-arithmetic`, `ties` or `dare`, which add differences from the file `base`, times `scale`.  density: the
    share of them, of all files or of each, that ties and dare keep.  seed: of the random choice of dare.  definition:
    whose ties and dare, `mergekit` or `peft`.
    at: the part of each file.  part: take also files that are only a part of a checkpoint (the same shard of each).
    Raises `Conflict` naming the keys, shapes and types that do not agree, `UsageError` for fewer than two files.
    """
    if isinstance(files, str) or not isinstance(files, (Sequence, Iterator)):
        what = f"average takes its inputs as one list, and was given {type(files).__name__}"
        raise UsageError(what, "", "For example: ckptool.average([A, B])")
    files = list(files)
    count = len(files)
    given = {
        "base": base,
        "density": density,
        "scale": scale,
        "t": t,
        "seed": seed,
        "definition": definition,
        "ema": ema,
    }
    how = merge_of(method, count, given)
    output = output_of("average", out, options, base, *files)
    if output.in_place:
        raise UsageError("average writes a new file", "It has several inputs.", "For example: -o mean.pt")
    if t is not None and weights is not None:
        raise UsageError("--t and --weights were both given", "They are mutually exclusive.")
    shares = means.weights_of(count, weights if t is None else [1 - t, t], ema, how)
    opened = [open_whole(file, at, part=part) for file in ([] if base is None else [base]) + files]
    roots = [one_state_dict(each.checkpoint, each.at) for each in opened]
    names = [each.path or f"checkpoint {number}" for number, each in enumerate(opened, count + 1 - len(opened))]
    for each, (root, _) in zip(opened, roots, strict=True):
        refuse_placeholders(each.checkpoint, root.node.items())
        refuse_quantized(each.checkpoint, [root.node], "Averaged")
    nodes = [_without_training(root) for root, _ in roots]
    by_key = means.weights_by_key(map(str, nodes[-1]), several(weight), count, how)
    found = means.average(nodes, names, shares, how, by_key)
    last = opened[-1].checkpoint
    pairs = [(each.checkpoint, root) for each, (root, _) in zip(opened, roots, strict=True)]
    changed = weights_alone(last, found.tree, ((checkpoint.metadata, root.path) for checkpoint, root in pairs))
    sources = [checkpoint.source for checkpoint, _ in pairs if checkpoint.source is not None]
    original = together(last, (each.checkpoint for each in opened))
    left = [
        left_behind(checkpoint, [*_training(root), *around(checkpoint, root)], found.tree, chosen=each.at is not None)
        for each, (checkpoint, root) in zip(opened, pairs, strict=True)
    ]
    saved = save(output, original, changed, inputs=sources)
    behind = list(dict.fromkeys(name for each in left for name in each.facts["left_behind"]))
    paths = names[len(names) - count :]
    lines = [*how.settings, *map(printable, several(weight))]
    details = [*_details(found, paths, shares, lines), *dict.fromkeys(line for each in left for line in each.lines)]
    facts = {
        "files": [printable(name) for name in paths],
        "weights": shares,
        "weight": several(weight),
        "method": how.method,
        "settings": list(how.settings),
        "base": printable(names[0]) if how.has_base else None,
        "averaged": found.averaged,
        "kept": dict(found.kept),
        "left_behind": behind,
    }
    summary = _summary(found, roots, how, count)
    notes = _unequal(sum(shares)) if how.method == "mean" else ()
    return written(output, last, saved, summary, facts=facts, details=details, notes=notes)


def _training(root: StateDict) -> list[str]:
    """The addresses of what belongs to the training between the weights: an optimizer of torchtitan."""
    return [address((*root.base, *root.path, key)) for key, value in root.node.items() if is_beside(key, value)]


def _without_training(root: StateDict) -> dict[Any, Any]:
    items = {key: value for key, value in root.node.items() if not is_beside(key, value)}
    if len(items) == len(root.node):
        return root.node  # type: ignore[no-any-return]
    return OrderedDict(items, root.node.attributes) if isinstance(root.node, OrderedDict) else items


def _summary(found: means.Averaged, roots: Sequence[tuple[StateDict, str]], how: Merge, count: int) -> str:
    of = f" of {printable(roots[-1][0].address)}" if roots[-1][0].address else ""
    remark = next((f" ({remark})" for _, remark in roots if remark), "")
    merged = "the mean" if how.method == "mean" else f"the {how.method} merge"
    return f"{merged} of {counted(count, 'file')}: {counted(found.averaged, 'tensor')}{of}{remark}"


def _details(
    found: means.Averaged, names: Sequence[str], shares: Sequence[float], settings: Sequence[str]
) -> Iterator[str]:
    yield from [f"{share:.6g} × {printable(name)}" for share, name in zip(shares, names, strict=True)][:8]
    yield from settings
    if found.kept:
        kept = listed([f"{printable(name)} ({why})" for name, why in found.kept], 4)
        yield f"from {printable(names[-1])} as they are: {kept}"


def _unequal(total: float) -> Iterator[Note]:
    if abs(total - 1) >= 1e-6:
        yield Note("weights-sum", f"the weights add up to {total:.6g}, not to 1: the result is scaled by that")
