"""`prune`: the checkpoints that a run need not keep."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptool.checkpoint.commands import several
from ckptool.formats.opening import refuse_address
from ckptool.reports.train import Pruned
from ckptool.verbs._training import PathLike, check_harness


def prune(run: PathLike, set: str | Sequence[str] = (), *, dry_run: bool = False) -> Pruned:
    """Deletes the checkpoints that a run's retention does not keep; `set` changes it for once (`save.keep_last=1`).

    Raises `Conflict` while the run is being written.
    """
    check_harness()
    refuse_address("prune", run)
    from ckptool.training.runs import reopen_to_prune

    opened = reopen_to_prune(os.fspath(run), several(set), write=not dry_run)
    try:
        kept, gone = opened.retention.divide(opened.store.all())
        deleted = tuple((saved.step, (saved.sidecar or {}).get("bytes", 0)) for saved in gone)
        if not dry_run:
            for saved in gone:
                opened.store.remove(saved)
            opened.note("prune", steps=[step for step, _ in deleted])
    finally:
        opened.close()
    return Pruned(os.fspath(run), deleted, {step: tuple(why) for step, why in kept.items()}, dry_run)
