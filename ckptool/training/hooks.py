"""Hooks, which watch a run: gradient norms, statistics of activations, the user's own, the profiler, TensorBoard."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg
from ckptool.errors import CkptoolError, MissingExtra
from ckptool.output.durable import write_problems
from ckptool.training.config import Profile
from ckptool.training.extensions import Choice, numbers
from ckptool.training.parallel import is_divided

if TYPE_CHECKING:
    from ckptool.training.trainer import Trainer

METHODS = ("attach", "after_backward", "after_step", "facts", "logged", "ended")
Progress = Callable[[dict[str, Any], float], None]
"""Given a line's facts, with the length of the run as `steps`, and the steps per second."""


class Hooks:
    """The hooks of a run, called in order between and within steps. None of them may change what is trained.

    A hook is a class, or a function that makes one, with any of: attach(trainer), after_backward(trainer, model) and
    facts() that give numbers for the next line, after_step(trainer), logged(trainer, fact), ended(trainer). Raises
    `UsageError` for one with none of them.
    """

    def __init__(self, names: list[str], progress: Progress | None = None) -> None:
        self.progress = progress
        self.numbers: dict[str, dict[str, Any]] = {}
        self.hooks: list[tuple[str, Any]] = [(name, HOOKS.make(name, {})) for name in names]

    def call(self, method: str, *args: Any) -> None:
        """Calls a method of every hook that has it, and keeps the numbers that it returns for the next line.

        Tensors on a device are kept as they are, and only waited for when the line is written.
        """
        for name, hook in self.hooks:
            measures = call_user_code(getattr(hook, method), "hooks", name, *args) if hasattr(hook, method) else None
            if measures is not None and method in ("after_backward", "facts"):
                if not isinstance(measures, Mapping):
                    numbers(measures, "hooks", name)  # raises
                self.numbers.setdefault(name, {}).update(measures)

    @contextmanager
    def watching(self, trainer: Trainer, folder: str) -> Iterator[None]:
        """Attaches the hooks while a run trains, with the profiler and TensorBoard if they are configured."""
        config = trainer.config
        if trainer.world.is_first and config.profile is not None:
            self.hooks.append(("profile", Profiler(config.profile, folder)))
        if trainer.world.is_first and config.log.tensorboard:
            self.hooks.append(("tensorboard", Board(folder, trainer.step)))
        errors: list[CkptoolError] = []
        try:
            self.call("attach", trainer)
            yield
        finally:  # every hook's `ended` is called, whatever the others raise
            for name, hook in self.hooks:
                try:
                    if hasattr(hook, "ended"):
                        call_user_code(hook.ended, "hooks", name, trainer)
                except CkptoolError as error:
                    errors.append(error)
        if errors:  # an error that stopped the run is raised in their place
            raise errors[0]

    def facts(self) -> dict[str, float]:
        """The numbers of the hooks since the last line."""
        self.call("facts")
        facts, self.numbers = self.numbers, {}
        return {key: value for name, values in facts.items() for key, value in numbers(values, "hooks", name).items()}

    def logged(self, trainer: Trainer, fact: dict[str, Any], rate: float) -> None:
        """Called with every line of the metrics."""
        self.call("logged", trainer, fact)
        if self.progress is not None:
            self.progress({**fact, "steps": trainer.total_steps}, rate)


class GradNorm:
    """The norm of a model's gradients, as `grad_norm`, before they are clipped."""

    def after_backward(self, trainer: Trainer, model: str) -> dict[str, torch.Tensor]:
        norms: Any = torch._foreach_norm([p.grad for p in trainer.models[model].parameters() if p.grad is not None])
        name = "grad_norm" if len(trainer.models) == 1 else f"grad_norm_{model}"
        # The norms of tensors divided among processes are divided, too: each needs all of its parts.
        tensors = [(norm.full_tensor() if is_divided(norm) else norm).to(trainer.world.device) for norm in norms]
        return {name: torch.stack(tensors).norm()} if tensors else {}


class ActivationStats:
    """Mean and deviation of the outputs of the first model's layers, in the last forward pass before each line."""

    def __init__(self) -> None:
        self.statistics: dict[str, torch.Tensor] = {}
        self.handles: list[Any] = []

    def attach(self, trainer: Trainer) -> None:
        name, model = next(iter(trainer.models.items()))
        for path, module in model.named_modules():
            if not list(module.children()):
                look = partial(self._look, trainer, f"{name}.{path}" if path else name)
                self.handles.append(module.register_forward_hook(look))

    def ended(self, trainer: Trainer) -> None:
        while self.handles:
            self.handles.pop().remove()

    def _look(self, trainer: Trainer, path: str, module: Any, inputs: Any, output: Any) -> None:
        due = (trainer.step + 1) % trainer.config.log.every == 0 or trainer.step + 1 == trainer.total_steps
        if due and module.training and isinstance(output, torch.Tensor) and output.is_floating_point():
            values = output.detach().float()
            self.statistics[f"{path}.mean"], self.statistics[f"{path}.std"] = values.mean(), values.std(unbiased=False)

    def facts(self) -> dict[str, torch.Tensor]:
        statistics, self.statistics = self.statistics, {}
        return statistics


class Profiler:
    """`torch.profiler` over some steps, once; the trace in the run's folder is for chrome://tracing or Perfetto."""

    def __init__(self, settings: Profile, folder: str) -> None:
        self.path = os.path.join(folder, settings.trace)
        with _quietly():
            schedule = torch.profiler.schedule(
                wait=settings.wait, warmup=settings.warmup, active=settings.active, repeat=1
            )
            self.profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write)
            self.profiler.start()

    def _write(self, profile: torch.profiler.profile) -> None:
        with write_problems(self.path, "write the trace to"):
            profile.export_chrome_trace(self.path)

    def after_step(self, trainer: Trainer) -> None:
        with _quietly():
            self.profiler.step()

    def ended(self, trainer: Trainer) -> None:
        with _quietly():
            self.profiler.stop()


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences the profiler's warnings: of a missing warm-up, and of a round that starts over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Board:
    """Event files for TensorBoard, in a run's folder `tensorboard`. Raises `MissingExtra` where it is not installed."""

    def __init__(self, folder: str, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            what = "log.tensorboard needs the package tensorboard, which is not installed"
            fix = f"pip install tensorboard; or turn it off: {arg(set='log.tensorboard=false')}"
            raise MissingExtra(what, "Nothing was trained. metrics.jsonl holds the same numbers.", fix) from error
        writer: Any = SummaryWriter
        self.writer = writer(os.path.join(folder, "tensorboard"), purge_step=step + 1)

    def logged(self, trainer: Trainer, fact: dict[str, Any]) -> None:
        for name, value in fact.items():
            if isinstance(value, float):
                self.writer.add_scalar(name, value, trainer.step)

    def ended(self, trainer: Trainer) -> None:
        self.writer.close()


HOOKS = Choice(
    "hooks",
    f"is called without arguments and gives an object with any of the methods {', '.join(METHODS)}",
    {"grad_norm": GradNorm, "activation_stats": ActivationStats},
    gives=("an object with one of these methods", lambda hook: any(hasattr(hook, method) for method in METHODS)),
)
