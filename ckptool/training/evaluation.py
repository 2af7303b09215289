"""The evaluation of a run's checkpoint, beside the run: nothing is written to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ckptool.commands import arg, nearest
from ckptool.errors import UsageError, listed
from ckptool.training import CONFIG, configfile
from ckptool.training.config import Config
from ckptool.training.extensions import name_culprits
from ckptool.training.loop import measured
from ckptool.training.parallel import world_of
from ckptool.training.reports import Evaluated
from ckptool.training.runs import read_config, retention_of
from ckptool.training.saving import loaded
from ckptool.training.start import switches_given_back
from ckptool.training.store import SavedState, Store, check
from ckptool.training.trainer import build, in_parts, restored_weights

BEST, NEWEST = "best", "newest"


def evaluate_run(folder: str, changes: Sequence[str], checkpoint: str | int | None, on: str) -> Evaluated:
    """The metrics of a checkpoint of a run on its validation or test data, in one process."""
    if on not in ("val", "test"):
        raise UsageError(f"there are no {on} data", "", arg(on=nearest(on, ("val", "test")) or "val"))
    number, config = read_config(folder)
    strategy = config.strategy if config.split is not None else "single"
    values = {**config.dumped(), "run": folder, "strategy": strategy}
    config = configfile.changed(values, changes, os.path.join(folder, CONFIG))
    chosen, saved = _chosen(Store(folder, number).all(), config, checkpoint, folder)
    check(saved, config.save.verify)
    with name_culprits(), switches_given_back(), world_of(config) as world:
        trainer = build(config, world, fresh=False)
        restored_weights(trainer, loaded(saved.path, in_parts), saved.path)
        metrics = measured(trainer, on)
    if not metrics:
        raise UsageError(
            "there is nothing to evaluate on",
            "No sample is held out, and there is no validation set.",
            f"Name one: {arg(set=['data.val.name=file.py:NAME', 'data.val_fraction=0'])}",
        )
    return Evaluated(folder, saved.step, chosen, on, config.eval.ema, metrics)


def _chosen(
    there: Sequence[SavedState], config: Config, checkpoint: str | int | None, folder: str
) -> tuple[str, SavedState]:
    """The checkpoint that is asked for, and in words which it is: the best where there is one, without being asked."""
    rules = replace(retention_of(config), last=0, best=1, every=0).reasons(there)
    found = {str(saved.step): saved for saved in there}
    for saved in there:
        found |= {name: saved for name in (BEST, NEWEST) if name in rules.get(saved.step, ())}
    wanted = str(checkpoint) if checkpoint is not None else BEST if BEST in found else NEWEST
    if wanted not in found:
        raise UsageError(
            f"{folder} has no checkpoint {wanted}",
            f"Available: {listed(list(found), 12)}." if found else "It has none.",
        )
    return f"the best {config.eval.metric}" if wanted == BEST else wanted if wanted == NEWEST else "", found[wanted]
