"""The training loop, in the order in which things happen.

A step is atomic: signals, saves and evaluation come only between steps; an evaluation that a signal ends is done again
on resume. `step` is the number of completed optimizer steps, and the file `step-N` is the state after N of them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Any

import torch

from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg, command
from ckptool.errors import CkptoolError, FileProblem, NotFinite, Text, UsageError, counted
from ckptool.training.config import Config
from ckptool.training.data import Batch, seed_all
from ckptool.training.extensions import numbers
from ckptool.training.hooks import Hooks
from ckptool.training.optim import clip_gradients
from ckptool.training.parallel import World, unsynchronised
from ckptool.training.reports import Outcome
from ckptool.training.run_folder import environment
from ckptool.training.runs import ConfiguredRun
from ckptool.training.saving import Saver
from ckptool.training.stopping import Stopping
from ckptool.training.tasks import Phase
from ckptool.training.trainer import Trainer, gathered


def train(trainer: Trainer, run: ConfiguredRun, stop: Stopping, hooks: Hooks) -> Outcome:
    """Trains from where the trainer is to the end of the run, or to where it is stopped; saves on the way and then."""
    there = run.store.all() if trainer.step else []
    with (
        Saver(
            run, trainer.world, background=trainer.config.save.async_, step=there[-1].step if there else None
        ) as saver,
        hooks.watching(trainer, run.folder),
        closing(trainer.data.stream(trainer)) as batches,
    ):
        try:
            _steps(trainer, run, stop, hooks, saver, batches)
        except Exception as error:
            _rescue(trainer, run, saver, error)
            raise
        if saver.step != trainer.step and trainer.step:
            _save(trainer, run, saver)
    done = trainer.step >= trainer.total_steps and not trainer.pending
    why = _why_early(trainer) if trainer.is_stale and not done else ""
    code = 0 if done or why else trainer.world.broadcast(stop.exit_code)
    if trainer.world.is_first:
        event = "done" if done else "early-stop" if why else "stop"
        run.note(event, step=trainer.step, signal=stop.number or None, **({"why": why} if why else {}))
    return Outcome(
        "done" if done else "stopped-early" if why else "stopped", trainer.step, code, run.folder, why, hooks.profiled
    )


def _why_early(trainer: Trainer) -> str:
    """What ended a run by `stop.patience`, in words."""
    count = trainer.stale["count"] if trainer.stale else 0
    best = f", best at step {trainer.best['step']:,}" if trainer.best else ""
    return f"{trainer.config.eval.metric} has not improved in {counted(count, 'evaluation')}{best}"


def _steps(
    trainer: Trainer, run: ConfiguredRun, stop: Stopping, hooks: Hooks, saver: Saver, batches: Iterator[Sequence[Batch]]
) -> None:
    begun_at = trainer.step
    if trainer.config.save.at_start and not trainer.step:
        _save(trainer, run, saver)
    if trainer.pending and is_due(trainer, trainer.eval_every):
        _between(trainer, run, stop, hooks, saver, 0.0)  # a run that was stopped in its evaluation does it again
    trainer.pending = False
    while trainer.step < trainer.total_steps and not trainer.is_stale and not trainer.world.any_rank(stop.asked):
        step = next(batches)
        began = stop.begin()
        one_step(trainer, step, hooks)
        seconds = time.monotonic() - began
        _between(trainer, run, stop, hooks, saver, (trainer.step - begun_at) / seconds if seconds else 0.0)


def _between(trainer: Trainer, run: ConfiguredRun, stop: Stopping, hooks: Hooks, saver: Saver, rate: float) -> None:
    """Evaluates, logs and saves after a step; only the first where the run is to stop in the evaluation."""
    trainer.metrics = {}
    if trainer.pending:
        evaluate(trainer, stop)
    if trainer.pending:
        return
    _log(trainer, run, hooks, rate)
    late = saver.is_late(trainer.config.save.seconds)
    if late or is_due(trainer, trainer.config.save.every):
        _save(trainer, run, saver)


def _save(trainer: Trainer, run: ConfiguredRun, saver: Saver) -> None:
    """Saves the state after the last step, with facts about it."""

    def gather(copied: bool) -> dict[str, Any]:
        return gathered(trainer, copied=copied) if trainer.world.is_first or trainer.is_divided else {}

    loss = trainer.loss
    facts = {
        "epoch": trainer.epoch,
        "loss": loss if loss is None or loss - loss == 0 else str(loss),
        "metrics": {key: value for key, value in trainer.metrics.items() if value - value == 0},
        "revision": run.revision,
        "config": run.config.dumped(),
        "fingerprint": run.fingerprint,
        "environment": environment(trainer.world.size, trainer.world.device),
    }
    saver.save(trainer.step, gather, facts)


def _rescue(trainer: Trainer, run: ConfiguredRun, saver: Saver, error: Exception) -> None:
    """Saves the last whole step when something fails between two of them: in the data, an evaluation, a hook.

    Not within a step, where the state is half of the next; not what could not be written; not with several processes,
    all of which would have to take part.
    """
    if trainer.whole and trainer.step and not trainer.world.distributed and not isinstance(error, FileProblem):
        with suppress(Exception):  # the first error is the news
            if saver.step != trainer.step:
                _save(trainer, run, saver)
                saver.wait()
            if isinstance(error, CkptoolError):
                before = error.fix + " " if error.fix else ""
                saved = f"Step {trainer.step:,} is saved; resume: {command('resume', run.folder)}"
                error.fix = Text(before, saved)
    if trainer.world.is_first:
        words = error.what if isinstance(error, CkptoolError) else f"{type(error).__name__}: {error}"
        with suppress(CkptoolError):
            run.note("failed", step=trainer.step, error=words.partition("\n")[0])


def is_due(trainer: Trainer, every: int) -> bool:
    """True at each multiple of `every`, and at the end of the run."""
    return bool(every) and (trainer.step % every == 0 or trainer.step == trainer.total_steps)


# One step ------------------------------------------------------------------------------------------------------------


def one_step(trainer: Trainer, batches: Sequence[Batch], hooks: Hooks) -> None:
    """One optimizer step of every phase, on one global batch in `accumulate` micro-batches."""
    trainer.thaw()
    trainer.whole = False
    count = sum(batch.total for batch in batches)
    losses = []
    for number, phase in enumerate(trainer.task.phases):
        with phase.alone(trainer.models) if len(trainer.models) > 1 else nullcontext():
            losses.append(_phase(trainer, phase, number, batches, count, hooks))
    for name in trainer.task.stepped & trainer.averages.keys():
        trainer.averages[name].update()
    trainer.loss = losses[0]
    trainer.samples += count
    trainer.step += 1
    _step_schedules(trainer)
    trainer.whole, trainer.pending = True, is_due(trainer, trainer.eval_every)
    hooks.after_step(trainer)


def _phase(trainer: Trainer, phase: Phase, number: int, batches: Sequence[Batch], count: int, hooks: Hooks) -> float:
    """One update of one model; returns the mean loss over all samples of the step."""
    world, scaler, config = trainer.world, trainer.scaler, trainer.config
    optimizer, runners = trainer.updates[phase.model].optimizer, trainer.runners_for(phase.model)
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for micro, batch in enumerate(batches):
        seed_all(world.device, config.seed, "step", trainer.step, number, micro, world.rank)
        with unsynchronised(runners[phase.model], micro == len(batches) - 1), autocast(config, world.device):
            loss = _one_number(call_user_code(phase.loss, "task", config.task, runners, batch), config.task)
        # Weighted by samples, so that a last, partial window counts as what it is; processes are averaged.
        weight = batch.size * world.size / count
        scaled = loss if weight == 1 else loss * weight
        if scaled.requires_grad:  # else all that could learn is frozen
            call_user_code(
                torch.autograd.backward, "task", config.task, scaler.scale(scaled) if scaler is not None else scaled
            )
        parts.append((loss.detach(), batch.size))
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scaler is not None and gradients:
        scaler.unscale_(optimizer)
    hooks.after_backward(trainer, phase.model)
    return _update(trainer, phase.model, _mean(parts, count, world), gradients)


def _one_number(loss: Any, task: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(
            f"task: the loss of {task} is of {kind}, not a tensor of one number",
            "Gradients are computed from it.",
            "Return the mean over the samples of the batch.",
        )
    return loss.reshape(()) if loss.dim() else loss


def _update(trainer: Trainer, name: str, mean: torch.Tensor, gradients: Sequence[torch.Tensor]) -> float:
    """Steps the optimizer, unless loss or gradients are not finite; returns the loss as a number."""
    update, scaler = trainer.updates[name], trainer.scaler
    optimizer, kind = update.optimizer, update.kind
    loss, finite = _checked(mean, gradients if scaler is None else ())  # overflows of fp16 are the scaler's
    if finite:
        for part, clip in update.clips:
            call_user_code(clip_gradients, "optim", kind, part, clip)
        if scaler is None or not gradients or call_user_code(_scaled_step, "optim", kind, scaler, optimizer):
            trainer.task.stepped.add(name)
        if scaler is None:
            call_user_code(optimizer.step, "optim", kind)
    elif trainer.config.train.on_nonfinite == "stop":
        raise NotFinite(
            f"the loss or a gradient of step {trainer.step + 1} is not finite (loss {loss})",
            "The run stopped there; its checkpoints are as they were.",
            f"Skip such steps: {arg(set='train.on_nonfinite=skip')}; or clip gradients, or lower the learning rate.",
        )
    elif scaler is not None and gradients:
        scaler.update()  # which is done with this step's gradients
    return loss


def _scaled_step(scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
    """False where the gradients overflowed: the step was left out, and the schedule waits too."""
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


def _mean(parts: Sequence[tuple[torch.Tensor, int]], count: int, world: World) -> torch.Tensor:
    """The mean loss over the samples of a step, of means over those of its parts."""
    if len(parts) == 1 and not world.distributed:
        return parts[0][0]
    return world.all_reduce(torch.stack([loss * size for loss, size in parts]).sum()) / count


def _checked(mean: torch.Tensor, gradients: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """The loss as a number, and whether it and all gradients are finite.

    One fused call per device and dtype, as `GradScaler` does; scaling by 1 leaves gradients unchanged.
    """
    alike: dict[tuple[torch.device, torch.dtype, torch.layout], list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype, gradient.layout), []).append(gradient)
    found = []
    for (device, dtype, layout), each in alike.items():
        if layout is not torch.strided:
            each = [gradient._values() for gradient in each]
        if dtype.is_complex:
            each = [torch.view_as_real(gradient) for gradient in each]
        found.append(torch.zeros((), device=device))
        torch._amp_foreach_non_finite_check_and_unscale_(each, found[-1], _one(device))
    loss = mean.item()
    return loss, math.isfinite(loss) and not any(infinite.item() for infinite in found)


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
        if trainer.config.model_of(name) in trainer.task.stepped if settings.per == "step" else ended:
            try:
                schedule.step()
            except ValueError as error:
                raise UsageError(
                    f"the schedule of {name} ends before step {trainer.step}: {error}",
                    "It is shorter than the run.",
                    f"Make it longer: {arg(set=f'optim.{name}.schedule.args.total_steps={trainer.total_steps}')}",
                ) from error
    trainer.task.stepped.clear()


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of the forward pass."""
    if config.train.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if config.train.precision == "bf16" else torch.float16)


# Between steps -------------------------------------------------------------------------------------------------------


class _EvaluationStopped(BaseException):
    """Ends an evaluation through the user's own code, which may catch every `Exception`."""


class _UntilAsked:
    """The batches of an evaluation, before each of which randomness is seeded; none more when the run is to stop."""

    def __init__(self, trainer: Trainer, batches: Iterator[Batch], stop: Stopping | None) -> None:
        self.trainer, self.batches, self.stop, self.dropped = trainer, enumerate(batches), stop, False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        # Of processes that compute a model together, at once in all of them.
        asked = self.stop is not None and self.stop.asked
        if self.trainer.world.any_rank(asked) if self.trainer.is_divided else asked:
            self.dropped = True
            raise _EvaluationStopped
        number, batch = next(self.batches)
        seed_all(self.trainer.world.device, self.trainer.config.seed, "eval", self.trainer.step, number)
        return batch


def evaluate(trainer: Trainer, stop: Stopping | None = None) -> None:
    """Evaluates between two steps, and remembers the best.

    It is dropped, and stays pending, when the run is asked to stop meanwhile.
    """
    metrics = measured(trainer, stop=stop)
    if metrics is not None:
        trainer.metrics = metrics
        _remember(trainer)
        trainer.pending = False


def measured(trainer: Trainer, on: str = "val", stop: Stopping | None = None) -> dict[str, float] | None:
    """Metrics over the validation or test samples, the same in all processes; None if it is to stop.

    on: `val` or `test`.
    """
    config, world = trainer.config, trainer.world
    found: Any = {}
    with closing(trainer.data.validation(world.device, trainer.epoch, on)) as samples:
        batches = _UntilAsked(trainer, samples, stop)
        seed_all(world.device, config.seed, "eval", trainer.step)
        with _evaluating(trainer), torch.no_grad(), autocast(config, world.device), suppress(_EvaluationStopped):
            found = call_user_code(trainer.task.evaluate, "task", config.task, trainer.models, batches)
    if world.any_rank(batches.dropped):
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


def _remember(trainer: Trainer) -> None:
    """Takes note of the best so far, and steps the schedules that follow it.

    An evaluation at the end, between two multiples of `eval.every`, does neither: a run that is made longer has none
    there, and ends with the same bytes.
    """
    settings, metrics = trainer.config.eval, trainer.metrics
    if not metrics and not trainer.config.stop.patience:
        return  # nothing is held out
    if settings.metric not in metrics:
        raise UsageError(
            f"eval.metric is {settings.metric}, which the task does not give",
            f"It gives: {', '.join(metrics)}." if metrics else "Nothing is held out to evaluate on.",
            arg(set=f"eval.metric={next(iter(metrics))}") if metrics else arg(set="stop.patience=null"),
        )
    if trainer.step % trainer.eval_every:
        return
    value = metrics[settings.metric]
    for schedule in trainer.schedules.values():
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(value)
    best = trainer.best["value"] if trainer.best and trainer.best["metric"] == settings.metric else None
    if _improves(trainer, value, best):
        trainer.best = {"metric": settings.metric, "value": value, "step": trainer.step}
    if trainer.config.stop.patience:
        known = trainer.stale if trainer.stale and trainer.stale["metric"] == settings.metric else None
        known = known or {"metric": settings.metric, "value": None, "count": 0}
        better = _improves(trainer, value, known["value"], trainer.config.stop.min_delta)
        trainer.stale = {**known, **({"value": value, "count": 0} if better else {"count": known["count"] + 1})}


def _improves(trainer: Trainer, value: float, known: float | None, least: float = 0.0) -> bool:
    """True for a value of `eval.metric` that is better than the known one, by more than `least`; NaN never is."""
    if known is None:
        return value == value
    return (known - value if trainer.config.eval.mode == "min" else value - known) > least


def _log(trainer: Trainer, run: ConfiguredRun, hooks: Hooks, rate: float) -> None:
    if not trainer.world.is_first or not (is_due(trainer, trainer.config.log.every) or trainer.metrics):
        return
    place = {"step": trainer.step, "epoch": trainer.epoch}
    fact = {**place, "loss": trainer.loss, **trainer.metrics, **hooks.facts(), **place}
    for name, optimizer in trainer.optimizers.items():
        key = "lr" if len(trainer.optimizers) == 1 else f"lr_{name}"
        fact[key] = float(optimizer.param_groups[0]["lr"])
    run.metrics.add(fact)
    hooks.logged(trainer, fact, rate)
