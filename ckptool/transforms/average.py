"""The weighted mean of several sets of weights, or another way to merge them, in bounded memory while it is written.

Sums of a mean are kept in f64, those of 8- and 16-bit floats in f32, and rounded once at the end as torch rounds.
Counters and booleans have no mean: they are the last file's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool.analysis.diff import diff
from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.numpy_arrays import array_entry
from ckptool.checkpoint.patterns import selected
from ckptool.commands import arg, command
from ckptool.errors import Conflict, Unsupported, UsageError, counted, listed
from ckptool.formats import DEFAULT
from ckptool.transforms.merging import COMPONENTS, Merge, merged

_PLAIN = (
    "Give it as a plain tensor: tensor.detach().as_subclass(torch.Tensor), to_dense(), dequantize(), "
    "torch.from_numpy(array)"
)


@dataclass(frozen=True, slots=True)
class Averaged:
    """The mean, as a state dict; `kept`: the names that are the last file's, with why."""

    tree: dict[str, Any]
    averaged: int
    kept: tuple[tuple[str, str], ...]


def weights_of(count: int, weights: Sequence[float] | None, ema: float | None, how: Merge | None = None) -> list[float]:
    """The share of each file: equal ones, those given, or those of an exponential moving average in order.

    Raises `UsageError` for a number of weights that is not that of the files, or a decay outside of 0 to 1.
    """
    if weights is None and ema is None and how is not None and how.has_base:
        return [1.0] * count
    if weights is not None and ema is not None:
        raise UsageError("weights and an exponential average were both asked for", "They are mutually exclusive.")
    if ema is not None:
        if not 0 <= ema < 1:
            raise UsageError(f"a decay of {ema} is not from 0 to 1", "", f"For example: {arg(ema=0.999)}")
        later = [(1 - ema) * ema ** (count - 1 - i) for i in range(1, count)]
        return [ema ** (count - 1), *later]
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        what = f"{counted(len(weights), 'weight was', 'weights were')} given for {counted(count, 'file')}"
        raise UsageError(what, "Each file has one, in the same order.")
    if not math.isfinite(sum(weights)):
        raise UsageError(f"the weights add up to {sum(weights)}", "Each is a finite number, and so is their sum.")
    if how is not None and how.method == "slerp" and not (min(weights) >= 0 and sum(weights) > 0):
        raise UsageError(
            "slerp was given weights that are negative, or 0 in all",
            "The second one's share is the position on the arc.",
        )
    return list(weights)


def weights_by_key(keys: Iterable[str], texts: Sequence[str], count: int, how: Merge) -> dict[str, list[float]]:
    """The weights of the keys that a text `PATTERN=W,W` gives others; the first that matches decides.

    Raises `UsageError` for a text of another form, `NoMatch` for a pattern that matches no key.
    """
    found: dict[str, list[float]] = {}
    every = list(keys) if texts else []
    for text in reversed(texts):
        pattern, _, numbers = text.rpartition("=")
        try:
            shares = [float(number) for number in numbers.split(",")]
        except ValueError:
            pattern = ""
        if not pattern:
            example = f"For example: {arg(weight='layers.0.*=0.3,0.7')}"
            raise UsageError(f"{arg('weight')} {text!r} is not of the form PATTERN=W,W", "", example)
        found |= dict.fromkeys(selected(every, [pattern]), weights_of(count, shares, None, how))
    return found


def average(
    nodes: Sequence[Mapping[Any, Any]],
    names: Sequence[str],
    weights: Sequence[float],
    how: Merge | None = None,
    by_key: Mapping[str, Sequence[float]] | None = None,
) -> Averaged:
    """State dicts with the same keys, shapes and types, merged; without `how`, their mean. Reads nothing yet.

    nodes: where `how` has a base, that is the first.  by_key: the weights of keys that have others.
    Raises `Conflict` naming what they do not agree in, and for tied names with other weights; `Unsupported` for tensors
    that have no plain values.
    """
    last, merge = nodes[-1], how or Merge()
    others = zip(nodes[:-1], names, strict=False)
    if problems := [line for node, name in others for line in _differences(node, last, name, names[-1])]:
        raise Conflict(
            f"the files do not hold the same weights: {listed(problems, 6)}",
            "The mean of different models is not a model. Nothing was written.",
            f"See all of it: {command('diff', names[0], names[-1])}",
        )
    # The name of a tensor that has several, whatever order they are in.
    named = sorted(((str(key), value) for key, value in last.items()), key=lambda item: item[0], reverse=True)
    first = {value.view: name for name, value in named if isinstance(value, TensorEntry)}
    made: dict[tuple[Any, ...], TensorEntry] = {}
    given: dict[tuple[Any, ...], tuple[Any, Sequence[float]]] = {}  # the first name of each, and its weights
    again: dict[int, TensorEntry] = {}
    tree = same_kind(last, {})
    kept: list[tuple[str, str]] = []
    for key, value in last.items():
        kind = _without_mean(value)
        if kind and not all(_equal(node[key], value) for node in nodes[:-1]):
            what = f"{key!s} is a tensor of another kind ({kind}), whose mean is not computed"
            raise Unsupported(what, "The last one's values would stand among means. Nothing was written.", _PLAIN)
        if not isinstance(value, TensorEntry):
            kept.append((str(key), f"a {value.kind} tensor" if isinstance(value, Composite) else type(value).__name__))
            tree[key] = value
        elif not (value.dtype.is_float or value.dtype.name in COMPONENTS):
            kept.append((str(key), f"of type {value.dtype.name}"))
            tree[key] = value
        else:
            # Names that are one tensor in every file stay one.
            entries = [node[key] for node in nodes]
            view = tuple(entry.view for entry in entries)
            shares = (by_key or {}).get(str(key), weights)
            if view not in made:
                made[view], given[view] = merged(entries, merge, shares, first[value.view]), (key, shares)
            elif list(given[view][1]) != list(shares):
                what = f"{given[view][0]!s} and {key!s} are one tensor in all files"
                why = "They were given different weights, and one of them would be ignored. Nothing was written."
                raise Conflict(what, why, f"Give both the same: a {arg('weight')} whose pattern matches both")
            if id(value) not in again:  # what is one object stays one
                again[id(value)] = replace(made[view], flags=value.flags._replace(conj=False, neg=False))
            tree[key] = again[id(value)]
    return Averaged(tree, len(made), tuple(kept))


def _without_mean(value: Any) -> str:
    """What floating values are that are read, but not averaged: of a composite tensor, of an array beside tensors."""
    if isinstance(value, Composite):
        return value.kind
    array = None if isinstance(value, TensorEntry) else array_entry(value)
    return "an array of numpy" if array is not None and array.dtype.is_float else ""


def _equal(one: Any, other: Any) -> bool:
    """True where both have the same values, which are read for that."""
    return diff(Checkpoint({"": one}, DEFAULT), Checkpoint({"": other}, DEFAULT), statistics=False).same


def _differences(node: Mapping[Any, Any], last: Mapping[Any, Any], name: str, other: str) -> Iterator[str]:
    for here, there, where in ((node, last, name), (last, node, other)):
        if only := [str(key) for key in here if key not in there]:
            yield f"{len(only):,} only in {where} ({listed(only, 2)})"
    for key, value in last.items():
        before = node.get(key)
        if isinstance(value, TensorEntry) and isinstance(before, TensorEntry):
            if before.shape != value.shape:
                yield f"{key!s} is {list(before.shape)} in {name}, {list(value.shape)} in {other}"
            elif before.dtype is not value.dtype:
                yield f"{key!s} is {before.dtype} in {name}, {value.dtype} in {other}"
        elif key in node and type(before) is not type(value):
            yield f"{key!s} is a tensor in only one of {name} and {other}"
