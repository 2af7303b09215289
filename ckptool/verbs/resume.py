"""`resume`: a run from where it stopped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ckptool.checkpoint.commands import several
from ckptool.reports.train import Outcome
from ckptool.verbs._training import PathLike, Say, check_harness


def resume(run: PathLike, set: str | Sequence[str] = (), *, progress: Any = None, say: Say | None = None) -> Outcome:
    """Goes on with a run from its newest whole checkpoint; `set` changes what may change. Raises what `train` does."""
    check_harness()
    from ckptool.training.start import resume as go_on

    return go_on(os.fspath(run), several(set), progress=progress, say=say)
