"""Tasks: the loss of a batch, and the metrics of an evaluation. A task with two models has two phases in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ckptool.commands import arg
from ckptool.errors import UsageError
from ckptool.training.data import Batch
from ckptool.training.extensions import Choice

Models = Mapping[str, nn.Module]
Loss = Callable[[Models, Batch], torch.Tensor]
Evaluate = Callable[[Models, Iterable[Batch]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Phase:
    """One update in a step: of which model, and its mean loss over a batch."""

    model: str
    loss: Loss

    @contextmanager
    def alone(self, models: Models) -> Iterator[None]:
        """Gradients for this phase's model only; those of the other models are off."""
        others = [
            p for name, model in models.items() if name != self.model for p in model.parameters() if p.requires_grad
        ]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)


@dataclass(slots=True)
class Task:
    """The objective of a run. stepped: the models whose optimizer made its step, for their schedules."""

    phases: Sequence[Phase]
    evaluate: Evaluate
    stepped: set[str] = field(default_factory=set)


def inputs_of(batch: Batch) -> tuple[Any, ...]:
    """The inputs of the model: everything but the second part, which is the target."""
    parts = batch.data if isinstance(batch.data, (tuple, list)) else (batch.data,)
    return (parts[0], *parts[2:])


def target_of(batch: Batch) -> torch.Tensor:
    """The target, with which the output is compared. Raises `UsageError` for samples that have none."""
    if not isinstance(batch.data, (tuple, list)) or len(batch.data) < 2:
        what = f"data: a batch is {type(batch.data).__name__}, and the task needs (inputs, target)"
        raise UsageError(what, "", f"Name a task of your own: {arg(set='task=file.py:NAME')}")
    target: torch.Tensor = batch.data[1]
    return target


def supervised(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], right: Callable[..., Any] | None) -> Task:
    """One model `main`, a mean loss of its output and the target; `right` says which outputs are right."""

    def of_batch(models: Models, batch: Batch) -> torch.Tensor:
        return loss(models["main"](*inputs_of(batch)), target_of(batch))

    def evaluate(models: Models, batches: Iterable[Batch]) -> dict[str, float]:
        total = correct = 0.0
        count = answers = 0
        for batch in batches:
            output, target = models["main"](*inputs_of(batch)), target_of(batch)
            total += loss(output, target).item() * batch.size
            count += batch.size
            if right is not None:
                correct += right(output, target).sum().item()
                answers += target.numel()
        metrics = {"val_loss": total / count} if count else {}
        return metrics | ({"val_acc": correct / answers} if answers else {})

    return Task([Phase("main", of_batch)], evaluate)


# Classes: cross entropy, and the share of right answers; numbers: mean squared error; the next token, at all places.
classify = partial(supervised, functional.cross_entropy, lambda output, target: output.argmax(dim=1) == target)
regress = partial(supervised, functional.mse_loss, None)
lm = partial(
    supervised,
    lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten()),
    lambda output, target: output.argmax(dim=2) == target,
)


def gan() -> Task:
    """Two models, `generator` and `discriminator`: the second learns first in each step, then the first."""

    def fakes(models: Models, count: int, device: torch.device) -> torch.Tensor:
        runner = models["generator"]
        noise = getattr(getattr(runner, "module", runner), "noise", 4)
        sample: torch.Tensor = runner(torch.randn(count, noise, device=device))
        return sample

    def bce(models: Models, samples: torch.Tensor, real: bool) -> torch.Tensor:
        score = models["discriminator"](samples)
        return functional.binary_cross_entropy_with_logits(score, torch.full_like(score, float(real)))

    def discriminator(models: Models, batch: Batch) -> torch.Tensor:
        real = inputs_of(batch)[0]
        return bce(models, real, True) + bce(models, fakes(models, len(real), real.device).detach(), False)

    def generator(models: Models, batch: Batch) -> torch.Tensor:
        real = inputs_of(batch)[0]
        return bce(models, fakes(models, len(real), real.device), True)

    def evaluate(models: Models, batches: Iterable[Batch]) -> dict[str, float]:
        total, count = {"val_loss": 0.0, "val_loss_generator": 0.0}, 0
        for batch in batches:
            for name, loss in zip(total, (discriminator, generator), strict=True):
                total[name] += loss(models, batch).item() * batch.size
            count += batch.size
        return {name: value / count for name, value in total.items()} if count else {}

    return Task([Phase("discriminator", discriminator), Phase("generator", generator)], evaluate)


TASKS = Choice(
    "task",
    "is called without arguments and gives a ckptool.training.tasks.Task",
    {"classify": classify, "regress": regress, "lm": lm, "gan": gan},
    gives=("a ckptool.training.tasks.Task", lambda value: isinstance(value, Task)),
)
