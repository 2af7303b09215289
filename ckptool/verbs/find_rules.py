"""`translate --find`: the rules between two checkpoints of one model, found by value and proved."""

from __future__ import annotations

import os
from dataclasses import replace

from ckptool.analysis.find_rules import FoundRules
from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.plan import Plan
from ckptool.checkpoint.state_dicts import one_state_dict
from ckptool.formats.opening import CheckpointLike, PathLike, open_whole
from ckptool.output import check_target, replace_file


def find_rules(
    old: CheckpointLike,
    new: CheckpointLike,
    out: PathLike | None = None,
    *,
    part: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> FoundRules:
    """Rules that make the tensors of `new` of those of `old`: renamed, split, put together, transposed, reordered.

    They are found by value, and by names and shapes where values differ, then applied and compared. out: a new file of
    them for `translate(rules_file=…)`.  part: take also checkpoints that are only a rank's share or one shard.
    overwrite: replace an existing `out`.  dry_run: write nothing.
    Raises `UsageError` listing the sets of weights where a checkpoint has several, `OutputExists`.
    """
    from ckptool.transforms.suggest.find import proved_rules

    if out is not None:
        check_target(out, overwrite=overwrite)
    opened = [open_whole(file, part=part) for file in (old, new)]
    ours, theirs = (one_state_dict(each.checkpoint, each.at)[0] for each in opened)
    report = proved_rules(ours.node, theirs.node)
    report = replace(report, old=opened[0].name, new=opened[1].name, dry_run=dry_run)
    report = replace(report, output=os.fspath(out) if out is not None and report.rules else "")
    if report.output and not dry_run:
        replace_file(Plan({"": [InlineBytes(report.rules_file().encode())]}), report.output, overwrite=overwrite)
    return report
