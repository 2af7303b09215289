"""`eval`: the metrics of a run's checkpoint on its validation or test data."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from ckptool.commands import option, several, verb
from ckptool.training import check_harness
from ckptool.training.reports import Evaluated
from ckptool.verbs._options import Run, Set


@verb(
    ("ckptool eval runs/basic", "the best checkpoint, on the validation data"),
    ("ckptool eval runs/basic --checkpoint 400 --on test", "another, on data.test"),
)
def eval(
    run: Run,
    set: Set = (),
    *,
    checkpoint: Annotated[str | int | None, option("--checkpoint STEP", "A step, best (default) or newest.")] = None,
    on: Annotated[Literal["val", "test"], option("--on", "On data.val (or what is held out), or data.test.")] = "val",
) -> Evaluated:
    """Evaluates a checkpoint of a run, and writes nothing to it; `set` changes its configuration this once.

    Raises `UsageError` for a checkpoint or data that do not exist, `Corrupt` for a damaged checkpoint.
    """
    check_harness()
    from ckptool.training.trainer import evaluate_run

    return evaluate_run(os.fspath(run), several(set), checkpoint, on)
