"""The training loop, in the order in which things happen.

A step is atomic: signals, saves and evaluation come only between steps. `step` is the number of completed optimizer steps, and the file
`step-N` is the state after N of them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ckptool.errors import NotFinite, UsageError, printable
from ckptool.training.config import Config
from ckptool.training.data import Batch
from ckptool.training.hooks import Hooks
from ckptool.training.named import called
from ckptool.training.optim import clip_gradients
from ckptool.training.parallel import World, unsynchronised
from ckptool.training.runs import Run
from ckptool.training.saving import Saver
from ckptool.training.seeds import seed_all
from ckptool.training.signals import Stopping
from ckptool.training.tasks import Phase
from ckptool.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. status: `done` or `stopped`.  exit_code: 0, or 128 plus the signal that stopped it."""

    status: str
    step: int
    exit_code: int
    path: str


def train(trainer: Trainer, run: Run, stop: Stopping, hooks: Hooks) -> Outcome:
    """Trains from where the trainer is to the end of the run, or to where it is stopped. Saves on the way, and at the end."""
    with (
        Saver(trainer, run) as saver,
        hooks.watching(trainer, run.folder),
        closing(trainer.data.stream(trainer)) as batches,
    ):
        if trainer.config.save.at_start and not trainer.step:
            saver.save()
        began, begun_at = time.monotonic(), trainer.step
        while trainer.step < trainer.total_steps and not trainer.world.any(stop.asked):
            one_step(trainer, next(batches), hooks)
            trainer.metrics = {}
            if _is_due(trainer, trainer.config.eval.every):
                evaluate(trainer)
            _log(trainer, run, hooks, time.monotonic() - began, trainer.step - begun_at)
            if trainer.step % trainer.config.save.every == 0 or trainer.step == trainer.total_steps:
                saver.save()
        if saver.step != trainer.step and trainer.step:
            saver.save()
    done = trainer.step >= trainer.total_steps
    code = 0 if done else trainer.world.told(stop.exit_code)
    if trainer.world.is_first:
        run.note("done" if done else "stop", step=trainer.step, signal=stop.number or None)
    return Outcome("done" if done else "stopped", trainer.step, code, run.folder)


def _is_due(trainer: Trainer, every: int) -> bool:
    return bool(every) and (trainer.step % every == 0 or trainer.step == trainer.total_steps)


# One step ------------------------------------------------------------------------------------------------------------


def one_step(trainer: Trainer, batches: Sequence[Batch], hooks: Hooks) -> None:
    """One optimizer step of every phase, on one global batch in `accumulate` micro-batches."""
    trainer.thaw()
    count = sum(batch.total for batch in batches)
    losses = []
    for number, phase in enumerate(trainer.task.phases):
        with phase.alone(trainer.models):
            losses.append(_phase(trainer, phase, number, batches, count, hooks))
    for name in trainer.task.stepped & trainer.averages.keys():
        trainer.averages[name].update()
    trainer.loss = losses[0]
    trainer.samples += count
    trainer.step += 1
    _step_schedules(trainer)
    hooks.after_step(trainer)


def _phase(trainer: Trainer, phase: Phase, number: int, batches: Sequence[Batch], count: int, hooks: Hooks) -> float:
    """One update of one model; returns the mean loss over all samples of the step."""
    world, scaler, config = trainer.world, trainer.scaler, trainer.config
    optimizer, runners = trainer.optimizers[phase.model], trainer.runners_for(phase.model)
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for micro, batch in enumerate(batches):
        seed_all(world.device, config.seed, "step", trainer.step, number, micro, world.rank)
        with unsynchronised(runners[phase.model], micro == len(batches) - 1), autocast(config, world.device):
            loss = called(phase.loss, "task", config.task, runners, batch)
        # Weighted by samples, so that a last, partial window counts as what it is; processes are averaged, hence their number.
        weight = batch.size * world.size / count
        scaled = loss if weight == 1 else loss * weight
        if scaled.requires_grad:  # else all that could learn is frozen
            called(torch.autograd.backward, "task", config.task, scaler.scale(scaled) if scaler is not None else scaled)
        parts.append((loss.detach(), batch.size))
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scaler is not None and gradients:
        scaler.unscale_(optimizer)
    hooks.after_backward(trainer, phase.model)
    return _update(trainer, phase.model, _mean(parts, count, world), gradients)


def _update(trainer: Trainer, name: str, mean: torch.Tensor, gradients: Sequence[torch.Tensor]) -> float:
    """Steps the optimizer, unless loss or gradients are not finite; returns the loss as a number."""
    optimizer, scaler, clip = trainer.optimizers[name], trainer.scaler, trainer.config.optim[name].clip
    loss, finite = _looked_at(mean, gradients if scaler is None else ())  # overflows of fp16 are the scaler's
    if finite:
        if clip is not None:
            clip_gradients(optimizer, clip)
        if scaler is None or not gradients or _scaled_step(scaler, optimizer):
            trainer.task.stepped.add(name)
        if scaler is None:
            optimizer.step()
    elif trainer.config.train.on_nonfinite == "stop":
        raise NotFinite(
            f"the loss or a gradient of step {trainer.step + 1} is not finite (loss {loss})",
            "The run stopped there; its checkpoints are as they were.",
            "Leave such steps out: --set train.on_nonfinite=skip; or cut gradients, or lower the learning rate.",
        )
    elif scaler is not None and gradients:
        scaler.update()  # which is done with this step's gradients
    return loss


def _scaled_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """False where the gradients overflowed: the step was left out, and the schedule waits too."""
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


def _mean(parts: Sequence[tuple[torch.Tensor, int]], count: int, world: World) -> torch.Tensor:
    """The mean loss over the samples of a step, of means over those of its parts."""
    if len(parts) == 1 and not world.distributed:
        return parts[0][0]
    return world.total(torch.stack([loss * size for loss, size in parts]).sum()) / count


def _looked_at(mean: torch.Tensor, gradients: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """The loss as a number, and whether it and all gradients are finite.

    Gradients are gone through as `GradScaler` does it, one call for all of a kind; times one, they stay what they are.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        dense = gradient._values() if gradient.is_sparse else gradient
        alike.setdefault((dense.device, dense.dtype), []).append(
            torch.view_as_real(dense) if dense.is_complex() else dense
        )
    flaws = []
    for (device, _), each in alike.items():
        flaws.append(torch.zeros((), device=device))
        torch._amp_foreach_non_finite_check_and_unscale_(each, flaws[-1], _one(device))
    loss = mean.item()
    return loss, math.isfinite(loss) and not any(flaw.item() for flaw in flaws)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def _step_schedules(trainer: Trainer) -> None:
    """Schedules follow the optimizer: a step that was left out does not count for them."""
    ended = bool(trainer.schedules) and trainer.batch_in_epoch == 0
    for name, schedule in trainer.schedules.items():
        settings = trainer.config.optim[name].schedule
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) or settings is None:
            continue  # after evaluation
        if name in trainer.task.stepped if settings.per == "step" else ended:
            try:
                schedule.step()
            except ValueError as error:
                raise UsageError(
                    f"the schedule of {name} cannot go on after step {trainer.step}: {error}",
                    "It is shorter than the run.",
                    f"Make it longer: --set optim.{name}.schedule.args.total_steps={trainer.total_steps}",
                ) from error
    trainer.task.stepped.clear()


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of the forward pass."""
    if config.train.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if config.train.precision == "bf16" else torch.float16)


# Between steps -------------------------------------------------------------------------------------------------------


def evaluate(trainer: Trainer) -> None:
    """Metrics over the validation samples, in evaluation mode; remembers the best. All processes go by what the first one found."""
    config, world = trainer.config, trainer.world
    for model in trainer.models.values():
        model.eval()
    seed_all(world.device, config.seed, "eval", trainer.step)
    with torch.no_grad(), autocast(config, world.device):
        batches = trainer.data.validation(world.device)
        found = called(trainer.task.evaluate, "task", config.task, trainer.models, batches)
    for model in trainer.models.values():
        model.train()
    trainer.metrics = world.told({name: float(value) for name, value in found.items()})
    _remember(trainer)


def _remember(trainer: Trainer) -> None:
    """The best so far, and the schedules that follow it."""
    settings, metrics = trainer.config.eval, trainer.metrics
    if not metrics:
        return  # nothing is held out
    if settings.metric not in metrics:
        raise UsageError(
            f"eval.metric is {printable(settings.metric)}, which the task does not give",
            f"It gives: {', '.join(map(printable, metrics))}.",
            f"--set eval.metric={printable(next(iter(metrics)))}",
        )
    value = metrics[settings.metric]
    for schedule in trainer.schedules.values():
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(value)
    best = trainer.best["value"] if trainer.best and trainer.best["metric"] == settings.metric else None
    if value == value and (best is None or (value < best if settings.mode == "min" else value > best)):
        trainer.best = {"metric": settings.metric, "value": value, "step": trainer.step}


def _log(trainer: Trainer, run: Run, hooks: Hooks, seconds: float, steps: int) -> None:
    if not trainer.world.is_first or not (_is_due(trainer, trainer.config.log.every) or trainer.metrics):
        return
    rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in trainer.optimizers.items()}
    fact = {"step": trainer.step, "epoch": trainer.epoch, "loss": trainer.loss, **trainer.metrics, **hooks.facts()}
    fact |= (
        {"lr": float(next(iter(rates.values())))}
        if len(rates) == 1
        else {f"lr_{name}": float(rate) for name, rate in rates.items()}
    )
    run.metrics.add(fact)
    hooks.logged(trainer, fact, steps / seconds if seconds else 0.0)
