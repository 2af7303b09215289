"""`eval`: the metrics of a run's checkpoint on its validation or test data."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptool.checkpoint.commands import several
from ckptool.reports.train import Evaluated
from ckptool.verbs._training import PathLike, check_harness


def eval(
    run: PathLike, set: str | Sequence[str] = (), *, checkpoint: str | int | None = None, on: str = "val"
) -> Evaluated:
    """Evaluates a checkpoint of a run, and writes nothing to it; `set` changes its configuration for once.

    checkpoint: a step, `best` or `newest`; the best, where there is one.  on: `val` or `test`, for `data.test`.
    Raises `UsageError` for a checkpoint or data that do not exist, `Corrupt` for a damaged checkpoint.
    """
    check_harness()
    from ckptool.training.evaluation import evaluate_run

    return evaluate_run(os.fspath(run), several(set), checkpoint, on)
