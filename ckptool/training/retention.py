"""Which checkpoints of a run are kept: a union of pure functions over what is there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint as retention sees it. `step` is unique in a run; `metrics` are those of the evaluation at that step."""

    step: int
    metrics: Metrics = field(default_factory=dict)


Policy = Callable[[Sequence[Kept]], set[int]]
"""From checkpoints, oldest first, to the steps that it wants to keep."""


def last(n: int) -> Policy:
    """The newest `n`."""
    return lambda there: {kept.step for kept in there[-n:]} if n else set()


def best(n: int, metric: str, mode: str) -> Policy:
    """The best `n` by a metric; a value of 0.0 counts, NaN and missing ones never rank; of equal ones the older."""

    def choose(there: Sequence[Kept]) -> set[int]:
        ranked = [kept for kept in there if not math.isnan(kept.metrics.get(metric, math.nan))]
        ranked.sort(key=lambda kept: (kept.metrics[metric] if mode == "min" else -kept.metrics[metric], kept.step))
        return {kept.step for kept in ranked[:n]}

    return choose


def every(n: int) -> Policy:
    """Those at a multiple of `n` steps; none for 0."""
    return lambda there: {kept.step for kept in there if n and kept.step % n == 0}


def newest(there: Sequence[Kept]) -> set[int]:
    """The newest, which is never deleted."""
    return {there[-1].step} if there else set()


def keep(there: Iterable[Kept], policies: dict[str, Policy]) -> dict[int, list[str]]:
    """The steps to keep, each with the names of the policies that want it. The newest is always among them."""
    ordered = sorted(there, key=lambda kept: kept.step)
    reasons: dict[int, list[str]] = {}
    for name, policy in {"newest": newest, **policies}.items():
        for step in sorted(policy(ordered)):
            reasons.setdefault(step, []).append(name)
    return dict(sorted(reasons.items()))
