"""`resume`: a run from where it stopped."""

from __future__ import annotations

import os

from ckptool.commands import several, verb
from ckptool.training import check_harness
from ckptool.training.reports import Outcome
from ckptool.verbs._options import Lines, Logged, Run, Set


@verb(("ckptool resume runs/basic", "continue where it was killed"))
def resume(run: Run, set: Set = (), *, progress: Logged = None, say: Lines = None) -> Outcome:
    """Resumes a run from its newest intact checkpoint; `set` changes what may change. Raises what `train` does."""
    check_harness()
    from ckptool.training.trainer import resume as go_on

    return go_on(os.fspath(run), several(set), progress=progress, say=say)
