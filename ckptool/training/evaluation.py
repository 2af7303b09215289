"""Evaluation: between two steps of a run, and of a run's checkpoint beside the run, to which nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg, nearest
from ckptool.errors import UsageError, listed
from ckptool.training import CONFIG, configfile
from ckptool.training.config import Config
from ckptool.training.data import Batch, seed_all
from ckptool.training.extensions import name_culprits, numbers
from ckptool.training.parallel import world_of
from ckptool.training.reports import Evaluated
from ckptool.training.runs import read_config, retention_of
from ckptool.training.saving import loaded
from ckptool.training.store import RunFolder, SavedState, check
from ckptool.training.trainer import Trainer, build, load, switches_given_back

BEST, NEWEST = "best", "newest"


class _Stopped(BaseException):
    """Ends an evaluation through the user's own code, which may catch every `Exception`."""


def measured(
    trainer: Trainer, stopping: Callable[[], bool] = lambda: False, on: str = "val"
) -> dict[str, float] | None:
    """Metrics over the validation or test samples, the same in all processes; None if they are to stop meanwhile.

    stopping: asked before each batch.  on: `val` or `test`.
    """
    config, world = trainer.config, trainer.world
    dropped = False

    def batches(samples: Iterator[Batch]) -> Iterator[Batch]:
        nonlocal dropped
        for number, batch in enumerate(samples):
            # Of processes that compute a model together, at once in all of them.
            if world.any_rank(stopping()) if trainer.is_divided else stopping():
                dropped = True
                raise _Stopped
            seed_all(world.device, config.seed, "eval", trainer.step, number)
            yield batch

    found: Any = {}
    with closing(trainer.data.validation(world.device, trainer.epoch, on)) as samples:
        seed_all(world.device, config.seed, "eval", trainer.step)
        with _evaluating(trainer), torch.no_grad(), autocast(config, world.device), suppress(_Stopped):
            found = call_user_code(trainer.task.evaluate, "task", config.task, trainer.models, batches(samples))
    if world.any_rank(dropped):
        return None
    return world.broadcast(numbers(found, "task", f"evaluate of {config.task}"))  # type: ignore[no-any-return]


@contextmanager
def _evaluating(trainer: Trainer) -> Iterator[None]:
    """Puts models into evaluation mode, with their averages as weights by `eval.ema`; afterwards all is as it was."""
    modes = [(module, module.training) for model in trainer.models.values() for module in model.modules()]
    for model in trainer.models.values():
        model.eval()
    with ExitStack() as averaged:
        try:
            for average in trainer.averages.values() if trainer.config.eval.ema else ():
                averaged.enter_context(average.in_place())
            yield
        finally:
            for model in trainer.models.values():
                model.train()
            for module, mode in modes:
                module.training = mode


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of the forward pass."""
    if config.train.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if config.train.precision == "bf16" else torch.float16)


def evaluate_run(folder: str, changes: Sequence[str], checkpoint: str | int | None, on: str) -> Evaluated:
    """The metrics of a checkpoint of a run on its validation or test data, in one process."""
    if on not in ("val", "test"):
        raise UsageError(f"there are no {on} data", "", arg(on=nearest(on, ("val", "test")) or "val"))
    number, config = read_config(folder)
    strategy = config.strategy if config.split is not None else "single"
    values = {**config.dumped(), "run": folder, "strategy": strategy}
    config = configfile.changed(values, changes, os.path.join(folder, CONFIG))
    chosen, saved = _chosen(RunFolder(folder, number).all(), config, checkpoint, folder)
    check(saved, config.save.verify)
    with name_culprits(), switches_given_back(), world_of(config) as world:
        trainer = build(config, world, fresh=False)
        objects = trainer.objects(trains=False)
        load(objects, loaded(saved.path, objects.in_parts), saved.path)
        trainer.step = saved.step
        metrics = measured(trainer, on=on)
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
