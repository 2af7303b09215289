"""`prune`: the checkpoints that a run need not keep."""

from __future__ import annotations

import os
from typing import Annotated

from ckptool.analysis.train import Pruned
from ckptool.formats.opening import refuse_address
from ckptool.options import option, several, verb
from ckptool.verbs._training import RunFolder, Set, check_harness


@verb(("ckptool prune runs/basic -n", "what would be deleted"))
def prune(
    run: RunFolder,
    set: Set = (),
    *,
    dry_run: Annotated[bool, option("-n --dry-run", "Show what would be deleted; delete nothing.")] = False,
) -> Pruned:
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
