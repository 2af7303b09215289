"""The training loop, in the order in which things happen: `ckptool.Run`'s, around the steps of a configuration.

A step is atomic: signals, saves and evaluation come only between steps; an evaluation that a signal ends is done again
on resume. `step` is the number of completed optimizer steps, and the file `step-N` is the state after N of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from ckptool.bridge.user_code import call_user_code
from ckptool.checkpoint.nodes import with_article
from ckptool.commands import arg, command
from ckptool.errors import CkptoolError, FileProblem, NotFinite, Text, UsageError
from ckptool.training.config import Config
from ckptool.training.data import Batch
from ckptool.training.extensions import numbers
from ckptool.training.hooks import Hooks
from ckptool.training.optim import clip_gradients, parameters_of
from ckptool.training.parallel import unsynchronised
from ckptool.training.rng import seed_all
from ckptool.training.state import evaluation_mode
from ckptool.training.tasks import Phase

if TYPE_CHECKING:
    from ckptool.training.trainer import Trainer, TrainerRun


def train(trainer: Trainer, run: TrainerRun, hooks: Hooks) -> None:
    """Trains from where the trainer is to the end of the run, or to where it is stopped; saves on the way and then.

    An error between two steps (in the data, an evaluation, a hook) is raised after the last whole step is saved. Not so
    an error within a step, where the state is half of the next; or in writing; or with several processes, all of which
    would have to take part.
    """
    begun_at = trainer.step
    with hooks.watching(trainer, run.folder.folder), closing(run.loop()) as steps:
        try:
            if trainer.config.save.at_start and not run.resumed:
                run.save()
            if trainer.pending:  # the run was stopped in its evaluation, which is done again
                _between(trainer, run, hooks, 0.0)
            for _, batches in steps:
                run.metrics = {}
                one_step(trainer, batches, hooks)
                seconds = time.monotonic() - run.begin()
                _between(trainer, run, hooks, (trainer.step - begun_at) / seconds if seconds else 0.0)
        except Exception as error:
            is_whole = 0 < trainer.step == run.step
            if is_whole and not trainer.world.distributed and not isinstance(error, FileProblem):
                with suppress(Exception):  # the first error is the one to raise
                    trainer.facts |= hooks.facts() if trainer.pending else {}
                    run.save_now()
                    if isinstance(error, CkptoolError):
                        saved = f"step {trainer.step:,} is saved; resume: {command('resume', run.folder.folder)}"
                        error.fix = Text(error.fix, "; " * bool(error.fix), saved)
            if trainer.world.is_first:
                words = error.what if isinstance(error, CkptoolError) else f"{type(error).__name__}: {error}"
                with suppress(CkptoolError):
                    run.folder.note("failed", step=trainer.step, error=words.partition("\n")[0])
            raise


def _between(trainer: Trainer, run: TrainerRun, hooks: Hooks, rate: float) -> None:
    """Evaluates, logs and saves after a step; does no more than evaluate if the run is stopped in the evaluation."""
    config = trainer.config
    if is_due(trainer, trainer.eval_every):
        metrics = measured(trainer, lambda: run.stopping)
        if metrics is None:  # the run is to stop; the evaluation is done again on resume
            trainer.facts |= hooks.facts() if trainer.world.is_first else {}
            return
        run.metrics = metrics
        remember(trainer, metrics)
    trainer.pending = False
    if trainer.world.is_first and (run.metrics or is_due(trainer, config.log.every)):
        place = {"step": trainer.step, "epoch": trainer.epoch}
        fact: dict[str, Any] = {**place, "loss": trainer.loss, **run.metrics, **trainer.facts, **hooks.facts(), **place}
        for name, optimizer in trainer.optimizers.items():
            fact["lr" if len(trainer.optimizers) == 1 else f"lr_{name}"] = float(optimizer.param_groups[0]["lr"])
        run.log(**{name: value for name, value in fact.items() if name not in place})
        hooks.logged(trainer, fact, rate)
    trainer.facts = {}
    if trainer.is_stale:  # the last step is always saved
        run.length["steps"] = trainer.step
    run.save(every=config.save.every, seconds=config.save.seconds)


def is_due(trainer: Trainer, every: int) -> bool:
    """True at each multiple of `every`, and at the end of the run."""
    return bool(every) and (trainer.step % every == 0 or trainer.step == trainer.total_steps)


def remember(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Records the best metric so far, and steps the schedules that follow evaluation.

    An evaluation at the end, between two multiples of `eval.every`, does neither: a run that is extended has none
    there, and has to end with the same bytes.
    """
    settings, stop = trainer.config.eval, trainer.config.stop
    if not metrics and not stop.patience:
        return  # nothing is held out
    if settings.metric not in metrics:
        close = get_close_matches(settings.metric, metrics, 1, 0)
        what = f"eval.metric is {settings.metric}, which the task does not give"
        why = f"It gives: {', '.join(metrics)}." if metrics else "No data is held out to evaluate on."
        raise UsageError(what, why, arg(set=f"eval.metric={close[0]}" if close else "stop.patience=null"))
    if trainer.step % trainer.eval_every:
        return
    value = metrics[settings.metric]
    for schedule in trainer.schedules.values():
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(value)

    def improves(previous: dict[str, Any] | None, margin: float = 0.0) -> bool:
        if previous is None or previous["metric"] != settings.metric or previous["value"] is None:
            return value == value  # NaN is never better
        gain: float = previous["value"] - value if settings.mode == "min" else value - previous["value"]
        return gain > margin

    if improves(trainer.best):
        trainer.best = {"metric": settings.metric, "value": value, "step": trainer.step}
    if stop.patience:
        stale = trainer.stale if trainer.stale and trainer.stale["metric"] == settings.metric else None
        stale = stale or {"metric": settings.metric, "value": None, "count": 0}
        update = {"value": value, "count": 0} if improves(stale, stop.min_delta) else {"count": stale["count"] + 1}
        trainer.stale = stale | update


# One step ------------------------------------------------------------------------------------------------------------


def one_step(trainer: Trainer, batches: Sequence[Batch], hooks: Hooks) -> None:
    """One optimizer step of every phase, on one global batch in `accumulate` micro-batches."""
    count = sum(batch.total for batch in batches)
    losses = []
    for number, phase in enumerate(trainer.task.phases):
        with phase.alone(trainer.models) if len(trainer.models) > 1 else nullcontext():
            losses.append(_phase(trainer, phase, number, batches, count, hooks))
    for name in trainer.task.stepped & trainer.averages.keys():
        trainer.averages[name].update()
    trainer.loss = losses[0]
    trainer.samples += count
    is_epoch_end = (trainer.step + 1) % trainer.data.steps_per_epoch == 0
    for name, schedule in trainer.schedules.items():
        settings = trainer.config.optim[name].schedule
        if settings is None or settings.follows_evaluation:
            continue
        # Schedules follow the optimizer: a step that was skipped does not count for them.
        if trainer.config.model_of(name) in trainer.task.stepped if settings.per == "step" else is_epoch_end:
            schedule.step()
    trainer.task.stepped.clear()
    trainer.step += 1
    trainer.pending = is_due(trainer, trainer.eval_every)
    hooks.call("after_step", trainer)


def _phase(trainer: Trainer, phase: Phase, number: int, batches: Sequence[Batch], count: int, hooks: Hooks) -> float:
    """One update of one model, unless its loss or gradients are not finite.

    Returns the mean loss over all samples of the step.
    """
    world, scaler, config, task = trainer.world, trainer.scaler, trainer.config, trainer.config.task
    update, runners = trainer.updates[phase.model], trainer.runners
    if config.strategy == "ddp":  # other models are not wrapped: they have no gradients to exchange
        runners = {**trainer.models, phase.model: runners[phase.model]}
    optimizer, kind = update.optimizer, update.kind
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for micro, batch in enumerate(batches):
        seed_all(world.device, config.seed, "step", trainer.step, number, micro, world.rank)
        with unsynchronised(runners[phase.model], micro == len(batches) - 1), autocast(config, world.device):
            loss = call_user_code(phase.loss, "task", task, runners, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            form = (
                f"of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else with_article(type(loss).__name__)
            )
            what = f"task: the loss of {task} is {form}, not a tensor of one element"
            raise UsageError(what, "Gradients are computed from it.", "Return the mean over the batch.")
        loss = loss.reshape(())
        # Weighted by samples, so that a last, partial window counts as what it is; processes are averaged.
        weight = batch.size * world.size / count
        scaled = loss if weight == 1 else loss * weight
        if scaled.requires_grad:  # else all parameters are frozen
            scaled = scaler.scale(scaled) if scaler is not None else scaled
            call_user_code(torch.autograd.backward, "task", task, scaled)
        losses.append((loss.detach(), batch.size))
    gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
    if scaler is not None and gradients:
        scaler.unscale_(optimizer)
    hooks.call("after_backward", trainer, phase.model)
    mean = losses[0][0]
    if len(losses) > 1 or world.distributed:
        mean = world.all_reduce(torch.stack([loss * size for loss, size in losses]).sum()) / count
    value, finite = _checked(mean, gradients if scaler is None else ())  # overflows of fp16 are the scaler's
    if finite:
        for part, clip in update.clips:
            call_user_code(clip_gradients, "optim", kind, part, clip)
        stepped = True
        if scaler is None:
            call_user_code(optimizer.step, "optim", kind)
        elif gradients:
            scale = scaler.get_scale()
            call_user_code(scaler.step, "optim", kind, optimizer)
            scaler.update()
            stepped = scaler.get_scale() >= scale  # else they overflowed: it was left out, and the schedule waits too
        if stepped:
            trainer.task.stepped.add(phase.model)
    elif config.train.on_nonfinite == "stop":
        what = f"the loss or a gradient of step {trainer.step + 1} is not finite (loss {value})"
        fix = f"Skip such steps: {arg(set='train.on_nonfinite=skip')}; or clip gradients, or lower the learning rate."
        raise NotFinite(what, "The run stopped there; its checkpoints are unchanged.", fix)
    elif scaler is not None and gradients:
        scaler.update()  # ends its record of this step's gradients
    return value


def _checked(mean: torch.Tensor, gradients: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """The loss as a number, and whether it and all gradients are finite.

    One fused call per device and dtype, as `GradScaler` does; scaling by 1 leaves gradients unchanged.
    """
    groups: dict[tuple[torch.device, torch.dtype, torch.layout], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype, gradient.layout), []).append(gradient)
    flags = []
    for (device, dtype, layout), group in groups.items():
        if layout is not torch.strided:
            group = [gradient._values() for gradient in group]
        if dtype.is_complex:
            group = [torch.view_as_real(gradient) for gradient in group]
        flags.append(torch.zeros((), device=device))
        torch._amp_foreach_non_finite_check_and_unscale_(group, flags[-1], torch.ones((), device=device))
    loss = mean.item()
    return loss, math.isfinite(loss) and not any(infinite.item() for infinite in flags)


# Evaluation ----------------------------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Ends an evaluation from inside the user's own code, which may catch every `Exception`."""


def measured(
    trainer: Trainer, stopping: Callable[[], bool] = lambda: False, on: str = "val", limit: int | None = None
) -> dict[str, float] | None:
    """Metrics over the validation or test samples, the same in all processes; None if the run was stopped meanwhile.

    stopping: called before each batch.  on: `val` or `test`.  limit: the number of batches; None for all.
    """
    config, world = trainer.config, trainer.world
    stopped = False

    def batches(samples: Iterator[Batch]) -> Iterator[Batch]:
        nonlocal stopped
        for number, batch in enumerate(islice(samples, limit)):
            # Processes that compute a model together have to stop together.
            if world.any_rank(stopping()) if config.strategy == "fsdp" else stopping():
                stopped = True
                raise _Stopped
            seed_all(world.device, config.seed, "eval", trainer.step, number)
            yield batch

    metrics: Any = {}
    with closing(trainer.data.validation(world.device, trainer.epoch, on)) as samples:
        seed_all(world.device, config.seed, "eval", trainer.step)
        models = trainer.models.values()
        with evaluation_mode(models), autocast(config, world.device), ExitStack() as stack, suppress(_Stopped):
            for model in models:
                model.eval()  # which may do more than set a mode
                stack.callback(model.train)
            for average in trainer.averages.values() if config.eval.ema else ():
                stack.enter_context(average.in_place())
            metrics = call_user_code(trainer.task.evaluate, "task", config.task, trainer.models, batches(samples))
    if world.any_rank(stopped):
        return None
    return world.broadcast(numbers(metrics, "task", f"evaluate of {config.task}"))  # type: ignore[no-any-return]


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of the forward pass."""
    if config.train.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if config.train.precision == "bf16" else torch.float16)
