"""`prune`: the checkpoints that a run need not keep."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Annotated, NamedTuple

from ckptool.commands import option, several, verb
from ckptool.errors import counted
from ckptool.facts import Bytes, Report, Table, Told, bold, dataclass, size
from ckptool.formats import refuse_address
from ckptool.training import check_harness
from ckptool.verbs._options import RunFolder, Set


class Gone(NamedTuple):
    """A checkpoint that was deleted, or would be."""

    step: int
    bytes: Bytes


class Kept(NamedTuple):
    """A checkpoint that stays. why: the rules that want it."""

    step: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Pruned(Report):
    """The checkpoints of a run that were deleted, or would be, and those that stay."""

    schema = "prune/2"

    run: str
    deleted: tuple[Gone, ...]
    kept: tuple[Kept, ...]
    dry_run: bool

    def told(self) -> Told:
        verb, outcome = ("would delete", "would go") if self.dry_run else ("deleted", "deleted")
        freed = size(sum(checkpoint.bytes for checkpoint in self.deleted))
        yield bold(self.run), f": {verb} {counted(len(self.deleted), 'checkpoint')}, {freed}"
        steps = [(checkpoint.step, outcome) for checkpoint in self.deleted]
        steps += [(checkpoint.step, f"kept: {', '.join(checkpoint.why)}") for checkpoint in self.kept]
        yield Table([(f"step {step:,}", fate) for step, fate in sorted(steps)])


@verb(("ckptool prune runs/basic -n", "what would be deleted"))
def prune(
    run: RunFolder,
    set: Set = (),
    *,
    dry_run: Annotated[bool, option("-n --dry-run", "Show what would be deleted; delete nothing.")] = False,
) -> Pruned:
    """Deletes the checkpoints that a run's retention does not keep; `set` changes it this once (`save.keep_last=1`).

    Those that stay are compared with their sha256 first; damaged ones stay, too, and do not count.
    Raises `Conflict` while the run is being written.
    """
    check_harness()
    refuse_address("prune", run)
    from ckptool.training.configfile import reopen_to_prune

    with closing(reopen_to_prune(os.fspath(run), several(set), write=not dry_run)) as opened:
        reasons, unwanted = opened.retention.divide(opened.all(), "full")
        deleted = tuple(Gone(saved.step, (saved.sidecar or {}).get("bytes", 0)) for saved in unwanted)
        if not dry_run:
            for saved in unwanted:
                opened.remove(saved)
            opened.note("prune", steps=[checkpoint.step for checkpoint in deleted])
    return Pruned(os.fspath(run), deleted, tuple(Kept(step, tuple(why)) for step, why in reasons.items()), dry_run)
