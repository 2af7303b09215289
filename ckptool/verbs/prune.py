"""`prune`: the checkpoints that a run need not keep."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptool.checkpoint.commands import several
from ckptool.formats.opening import refuse_address
from ckptool.reports.training import Pruned
from ckptool.verbs.training import PathLike, check_harness


def prune(run: PathLike, set: str | Sequence[str] = (), *, dry_run: bool = False) -> Pruned:
    """Deletes the checkpoints that a run's retention does not keep; `set` changes it for once (`save.keep_last=1`).

    Raises `Conflict` while the run is being written.
    """
    check_harness()
    refuse_address("prune", run)
    from ckptool.training.runs import kept_of, opened_for_change

    opened = opened_for_change(os.fspath(run), several(set), write=not dry_run)
    try:
        kept, gone = kept_of(opened)
        deleted = tuple((saved.step, (saved.sidecar or {}).get("bytes", 0)) for saved in gone)
        if not dry_run:
            for saved in gone:
                opened.store.remove(saved)
            opened.note("prune", steps=[step for step, _ in deleted])
    finally:
        if opened.lock is not None:
            opened.lock.release()
    return Pruned(os.fspath(run), deleted, {step: tuple(why) for step, why in kept.items()}, dry_run)
