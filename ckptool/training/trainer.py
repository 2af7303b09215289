"""The parts of a run, built in the order that resuming needs: models, optimizers, schedules, then state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckptool.commands import arg
from ckptool.errors import UsageError
from ckptool.training import optim
from ckptool.training.config import Config, recorded
from ckptool.training.data import Samples, load_data
from ckptool.training.models import Say, build_model, checkpoint_activations
from ckptool.training.optim import Average, Freezing, Update
from ckptool.training.parallel import World, placed, wrapped
from ckptool.training.rng import seed_all
from ckptool.training.saving import refuse_not_plain
from ckptool.training.state import SUFFIX, Objects
from ckptool.training.tasks import Task, load_task


@dataclass(slots=True)
class Trainer:
    """The parts of a run, and how far it has come. `step` is the number of completed optimizer steps.

    models: as they are saved.  runners: the same, wrapped as the strategy runs them.  updates: what steps each of them.
    skipped: of the checkpoints that models start from, in words.  loss: the mean over the samples of the last step.
    best: metric, value and step of the best evaluation.  stale: with `stop.patience`, the metric, the value that has to
    be improved on, and the count of evaluations in a row that did not.  samples: how many were trained on.
    pending: the evaluation that is due was not done.  told: what the hooks had to say of this step.
    """

    config: Config
    world: World
    data: Samples
    task: Task
    models: dict[str, nn.Module]
    runners: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    updates: dict[str, Update]
    schedules: dict[str, torch.optim.lr_scheduler.LRScheduler]
    scaler: torch.amp.GradScaler | None
    averages: dict[str, Average]
    freezing: dict[str, Freezing]
    skipped: list[str]
    step: int = 0
    loss: float | None = None
    samples: int = 0
    best: dict[str, Any] | None = None
    stale: dict[str, Any] | None = None
    pending: bool = False
    told: dict[str, float] = field(default_factory=dict)

    @property
    def is_divided(self) -> bool:
        """True where every process has a part of each model, and all of them compute it together."""
        return self.config.strategy == "fsdp"

    @property
    def is_stale(self) -> bool:
        """True when evaluations have not got better for as long as `stop.patience` allows."""
        patience = self.config.stop.patience
        return bool(patience and self.stale and self.stale["count"] >= patience)

    def thaw(self) -> None:
        """Sets which parameters learn in the next step."""
        for name, freezing in self.freezing.items():
            # Which gradients the processes exchange is fixed when the model is wrapped.
            if freezing.apply(self.step) and self.config.strategy == "ddp":
                self.runners[name] = wrapped(self.models[name], self.config, self.world)

    def key(self, kind: str, name: str) -> str:
        """The name by which a part is saved: `model`; with several models `model_NAME`.

        So are those of optimizers and schedulers, where there are several optimizers.
        """
        several = len(self.optimizers if kind in ("optimizer", "scheduler") else self.models) > 1
        return f"{kind}_{name}" if several else kind

    def objects(self, *, trains: bool = True, without: Collection[str] = ()) -> Objects:
        """What is saved by its `state_dict`. trains: False for what an evaluation needs.

        without: the optimizers whose schedules are left out.
        """
        found: dict[str, Any] = {self.key("model", name): each for name, each in self.models.items()}
        if trains:
            schedules = {name: each for name, each in self.schedules.items() if name not in without}
            found |= {self.key("optimizer", name): each for name, each in self.optimizers.items()}
            found |= {self.key("scheduler", name): each for name, each in schedules.items()}
            found |= {"scaler": self.scaler} if self.scaler is not None else {}
        return Objects(found | {self.key("ema", name): each for name, each in self.averages.items()})

    @property
    def place(self) -> dict[str, Any]:
        """The place in the data after the last step, as it is saved. Raises `UsageError` for what is not plain."""
        of_data = self.data.state(self.step)
        refuse_not_plain(of_data, f"the state of data {self.config.data.name}")
        return {"epoch": self.epoch, "batch": self.batch_in_epoch, "samples": self.samples, **of_data}

    @property
    def steps_per_epoch(self) -> int:
        return self.data.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The length of the run, by `train.steps` or `train.epochs`."""
        train = self.config.train
        return train.steps if train.steps is not None else (train.epochs or 0) * self.steps_per_epoch

    @property
    def eval_every(self) -> int:
        """The steps between two evaluations; 0: never."""
        every = self.config.eval.every
        return self.steps_per_epoch if every == "epoch" else every

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self.step // self.steps_per_epoch

    @property
    def batch_in_epoch(self) -> int:
        return self.step % self.steps_per_epoch


def build(config: Config, world: World, say: Say = lambda text: None, *, fresh: bool = True) -> Trainer:
    """A trainer at step 0. Raises `UsageError` for what the configuration asks for and does not exist.

    say: called with each note.  fresh: False for one that gets a saved state next, and need not start from another.
    """
    data, task = load_data(config.data, config.seed), load_task(config.task)
    if missing := [phase.model for phase in task.phases if phase.model not in config.models]:
        what = f"task: {config.task} trains the model {missing[0]!r}, but there is none by this name"
        raise UsageError(what, f"Available: {', '.join(config.models)}.")
    per_epoch = any(each.schedule is not None and each.schedule.per == "epoch" for each in config.optim.values())
    if not data.epoch_count and (config.train.epochs or config.eval.every == "epoch" or per_epoch):
        what = f"data: {config.data.name} has no length, so the steps of an epoch cannot be counted"
        raise UsageError(what, "", f"Give it __len__, or count in steps: {arg(set='train.steps=NUMBER')}")
    models, freezing, optimizers, updates = {}, {}, {}, {}
    skipped: list[str] = []
    for name, settings in config.models.items():
        seed_all(torch.device("cpu"), config.seed, "init", name)
        models[name] = placed(build_model(settings, data, fresh=fresh, name=name, say=skipped.append), config, world)
        if config.train.activation_checkpoint is not None:
            checkpoint_activations(models[name], config.train.activation_checkpoint, say)
        freezing[name] = Freezing(models[name], settings.freeze)
        freezing[name].apply(0)
        own = {each: found for each, found in config.optim.items() if config.model_of(each) == name}
        taken = optim.shares(models[name], own, freezing[name].never)
        made = {each: optim.build_optimizer(models[name], own[each], theirs) for each, theirs in taken.items()}
        optimizers.update(made)
        updates[name] = Update(made, own, settings.clip)
    for words in skipped:
        say(words)
    trainer = Trainer(
        config,
        world,
        data,
        task,
        models,
        runners={name: wrapped(model, config, world) for name, model in models.items()},
        optimizers=optimizers,
        updates=updates,
        schedules={},
        scaler=torch.amp.GradScaler(world.device.type) if config.train.precision == "fp16" else None,
        averages={name: Average(model, config.train.ema) for name, model in models.items()} if config.train.ema else {},
        freezing=freezing,
        skipped=skipped,
    )
    for name, optimizer in optimizers.items():
        if (planned := config.optim[name].schedule) is not None:
            schedule = trainer.schedules[name] = optim.build_schedule(optimizer, planned)
            length = (
                trainer.total_steps if planned.per == "step" else -(-trainer.total_steps // trainer.steps_per_epoch)
            )
            if words := optim.ends_early(schedule, planned, length, f"optim.{name}.schedule"):
                say(words)
    return trainer


@contextmanager
def deterministic(how: bool | str) -> Iterator[None]:
    """Sets torch's switches so that the same step gives the same bits; sets them back for whoever calls this."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if how:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=how == "warn")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


def gathered(trainer: Trainer, place: dict[str, Any] | None = None) -> dict[str, Any]:
    """All that is saved after the last step. place: in the data, where the next batch may have been fetched since."""
    tree = {"epoch": trainer.epoch, "step": trainer.step, "loss": trainer.loss, **trainer.objects().state({})}
    del tree["kinds"]  # which the configuration has
    tree["rng_state"] = {"seed": trainer.config.seed, "derived_from": "seed, step, micro-step, rank"}
    tree["data_state"] = trainer.place if place is None else place
    tree["best"] = dict(trainer.best) if trainer.best else None
    if trainer.stale is not None:
        tree["stale"] = dict(trainer.stale)
    if trainer.pending:
        tree |= {"pending": "evaluation"} | ({"hooks": trainer.told} if trainer.told else {})
    tree["config"] = recorded(trainer.config.dumped())
    return tree


def restored(trainer: Trainer, tree: dict[str, Any], where: str) -> None:
    """Gives a trainer that was just built the state of a checkpoint. Raises `Conflict` naming what does not fit.

    An optimizer whose learning rate or schedule was changed goes on with that, as if it had always been so.
    """
    now = recorded(trainer.config.dumped())["optim"]
    before = tree["config"]["optim"]
    changed = {name for name in now if any(now[name][key] != before[name][key] for key in ("lr", "schedule"))}
    options = {
        name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for name, optimizer in trainer.optimizers.items()
    }
    trainer.objects(without=changed).restore(tree, where)
    trainer.step, trainer.loss, trainer.best = tree["step"], tree["loss"], tree["best"]
    trainer.stale = tree.get("stale") if trainer.config.stop.patience else None
    trainer.samples = tree["data_state"]["samples"]
    trainer.pending, trainer.told = "pending" in tree, dict(tree.get("hooks", ()))
    trainer.data.load_state(trainer.step, tree["data_state"])
    for name in changed:
        for group, given in zip(trainer.optimizers[name].param_groups, options[name], strict=True):
            group.update(given)
        settings, old = trainer.config.optim[name].schedule, before[name]["schedule"]
        if settings is None or settings.follows_evaluation:
            continue
        count = trainer.step // (1 if settings.per == "step" else trainer.steps_per_epoch)
        if old is not None and old["per"] == settings.per:  # which did not count steps that were left out
            count = tree[trainer.key("scheduler", name) + SUFFIX].get("last_epoch", count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer does not step meanwhile
            for _ in range(count):
                trainer.schedules[name].step()
