"""Everything that a run works with, built in the order that resuming needs: models, optimizers, schedules, then state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckptool.errors import UsageError, printable
from ckptool.training import activation
from ckptool.training.activation import Say
from ckptool.training.config import Config, Model
from ckptool.training.data import Samples, load_data
from ckptool.training.models import build_model
from ckptool.training.optim import Average, Freezing, build_optimizer, build_schedule, ends_early
from ckptool.training.parallel import World, placed, wrapped
from ckptool.training.seeds import seed_all
from ckptool.training.tasks import Task, load_task


@dataclass(slots=True)
class Trainer:
    """The parts of a run, and how far it has come. `step` is the number of completed optimizer steps.

    models: as they are saved.  runners: the same, wrapped as the strategy runs them.  loss: the mean over the samples of the last step.
    best: metric, value and step of the best evaluation.  samples: how many were trained on.  pending: the evaluation that is due was not
    done.  whole: False within a step.
    """

    config: Config
    world: World
    data: Samples
    task: Task
    models: dict[str, nn.Module]
    runners: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    schedules: dict[str, torch.optim.lr_scheduler.LRScheduler]
    scaler: torch.amp.GradScaler | None
    averages: dict[str, Average]
    freezing: dict[str, Freezing]
    step: int = 0
    loss: float | None = None
    samples: int = 0
    best: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    pending: bool = False
    whole: bool = True

    def thaw(self) -> None:
        """Sets which parameters learn in the next step."""
        for name, freezing in self.freezing.items():
            # Which gradients the processes exchange is fixed when the model is wrapped.
            if freezing.apply(self.step) and self.config.strategy == "ddp":
                self.runners[name] = wrapped(self.models[name], self.config, self.world)

    def runners_for(self, name: str) -> dict[str, nn.Module]:
        """The models as the update of one of them runs them: under ddp the others as they are, since they have no gradients to exchange."""
        return self.runners if self.config.strategy != "ddp" else {**self.models, name: self.runners[name]}

    @property
    def steps_per_epoch(self) -> int:
        return self.data.batches(self.config.data.batch, self.config.data.drop_last)

    @property
    def total_steps(self) -> int:
        """How many steps the run has, by `train.steps` or `train.epochs`."""
        train = self.config.train
        return train.steps if train.steps is not None else (train.epochs or 0) * self.steps_per_epoch

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self.step // self.steps_per_epoch

    @property
    def batch_in_epoch(self) -> int:
        return self.step % self.steps_per_epoch


def build(config: Config, world: World, say: Say = lambda text: None, *, fresh: bool = True) -> Trainer:
    """A trainer at step 0. Raises `UsageError` for what the configuration asks for and there is not.

    say: told what is worth a note.  fresh: False for one that is given a saved state next, and need not start from another.
    """
    deterministic(config)
    data = load_data(config.data, config.seed)
    if not data.batches(config.data.batch, config.data.drop_last):
        raise UsageError(
            f"data.batch is {config.data.batch}, but there are {data.train_count} samples to train on",
            "With drop_last there would be no step.",
            "Make the batch smaller: --set data.batch=…",
        )
    task = load_task(config.task)
    if missing := [phase.model for phase in task.phases if phase.model not in config.models]:
        raise UsageError(
            f"task: {config.task} trains the model {printable(missing[0])!r}, and there is none of this name",
            f"There are: {', '.join(map(printable, config.models))}.",
            f"Call it so: models: {{{printable(missing[0])}: …}}",
        )
    models, freezing = {}, {}
    for name, settings in config.models.items():
        models[name] = _model(name, settings, config, data, world, say, fresh)
        freezing[name] = Freezing(models[name], settings.freeze)
        freezing[name].apply(0)
    optimizers = {name: build_optimizer(models[name], config.optim[name]) for name in models}
    schedules = _schedules(config, optimizers)
    fp16 = config.train.precision == "fp16"
    trainer = Trainer(
        config,
        world,
        data,
        task,
        models,
        {name: wrapped(model, config, world) for name, model in models.items()},
        optimizers,
        schedules,
        torch.amp.GradScaler(world.device.type) if fp16 else None,
        {name: Average(model, config.train.ema) for name, model in models.items()} if config.train.ema else {},
        freezing,
    )
    for name, schedule in schedules.items():
        wanted = config.optim[name].schedule
        assert wanted is not None
        length = trainer.total_steps if wanted.per == "step" else -(-trainer.total_steps // trainer.steps_per_epoch)
        if words := ends_early(schedule, wanted, length, f"optim.{name}.schedule"):
            say(words)
    return trainer


def _model(name: str, settings: Model, config: Config, data: Samples, world: World, say: Say, fresh: bool) -> nn.Module:
    seed_all(torch.device("cpu"), config.seed, "init", name)
    model = placed(build_model(settings, data, fresh=fresh, name=name), config, world)
    if config.train.activation_checkpoint is not None:
        activation.apply(model, config.train.activation_checkpoint, say)
    return model


def _schedules(
    config: Config, optimizers: dict[str, torch.optim.Optimizer]
) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
    made = {}
    for name, optimizer in optimizers.items():
        if (wanted := config.optim[name].schedule) is not None:
            made[name] = build_schedule(optimizer, wanted)
            if isinstance(made[name], torch.optim.lr_scheduler.ReduceLROnPlateau) and not config.eval.every:
                raise UsageError(
                    "schedule: ReduceLROnPlateau follows evaluation, and there is none",
                    "eval.every is 0.",
                    "--set eval.every=200",
                )
    return made


def deterministic(config: Config) -> None:
    """Sets torch's switches so that the same step gives the same bits."""
    import os

    if config.deterministic is False:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "warn")
