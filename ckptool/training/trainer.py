"""The parts of a run, built in the order that resuming needs: models, optimizers, schedules, then state."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ckptool.commands import arg
from ckptool.errors import Conflict, UsageError
from ckptool.training.config import Config, recorded
from ckptool.training.data import Samples, load_data, seed_all
from ckptool.training.extensions import took_part
from ckptool.training.models import Say, build_model, checkpoint_activations
from ckptool.training.optim import Average, Freezing, Update, build_optimizer, load_optimizer, shares, update_of
from ckptool.training.parallel import World, placed, wrapped
from ckptool.training.saving import plain_state, refuse_not_plain, to_cpu
from ckptool.training.schedules import build_schedule, ends_early, forward_to
from ckptool.training.shards import state_like
from ckptool.training.tasks import Task, load_task


@dataclass(slots=True)
class Trainer:
    """The parts of a run, and how far it has come. `step` is the number of completed optimizer steps.

    models: as they are saved.  runners: the same, wrapped as the strategy runs them.  updates: what steps each of them.
    skipped: of the checkpoints that models start from, in words.  loss: the mean over the samples of the last step.
    best: metric, value and step of the best evaluation.  stale: with `stop.patience`, the metric, the value that has to
    be improved on, and the count of evaluations in a row that did not.  samples: how many were trained on.
    pending: the evaluation that is due was not done.  whole: False within a step.
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
    metrics: dict[str, float] = field(default_factory=dict)
    pending: bool = False
    whole: bool = True

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

    def runners_for(self, name: str) -> dict[str, nn.Module]:
        """The models for the update of one of them: under ddp the others unwrapped, with no gradients to exchange."""
        return self.runners if self.config.strategy != "ddp" else {**self.models, name: self.runners[name]}

    def key(self, kind: str, name: str) -> str:
        """The key of a part of the state: `model_state_dict`; with several models `model_NAME_state_dict`.

        So are those of optimizers and schedulers, where there are several optimizers.
        """
        several = len(self.optimizers if kind in ("optimizer", "scheduler") else self.models) > 1
        return f"{kind}_{name}_state_dict" if several else f"{kind}_state_dict"

    @property
    def steps_per_epoch(self) -> int:
        return self.data.batches(self.config.data.batch, self.config.data.drop_last)

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
    deterministic(config)
    data, task = load_data(config.data, config.seed), _task(config)
    _refuse_epochs(config, data)
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
        taken = shares(models[name], own, freezing[name].never)
        made = {each: build_optimizer(models[name], own[each], parameters) for each, parameters in taken.items()}
        optimizers.update(made)
        updates[name] = update_of(made, own, settings.clip)
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
    _build_schedules(trainer, say)
    return trainer


def _refuse_epochs(config: Config, data: Samples) -> None:
    """Raises `UsageError` for what counts in epochs, where nobody knows how long they are."""
    per_epoch = any(each.schedule is not None and each.schedule.per == "epoch" for each in config.optim.values())
    if not data.epoch_count and (config.train.epochs or config.eval.every == "epoch" or per_epoch):
        raise UsageError(
            f"data: {config.data.name} has no length, so the steps of an epoch cannot be counted",
            "train.epochs, eval.every: epoch and schedules per: epoch need it.",
            f"Give it __len__, or count in steps: {arg(set='train.steps=NUMBER')}",
        )


def _task(config: Config) -> Task:
    task = load_task(config.task)
    if missing := [phase.model for phase in task.phases if phase.model not in config.models]:
        raise UsageError(
            f"task: {config.task} trains the model {missing[0]!r}, but there is none by this name",
            f"Available: {', '.join(config.models)}.",
            f"Call it so: models: {{{missing[0]}: …}}",
        )
    return task


def _build_schedules(trainer: Trainer, say: Say) -> None:
    for name, optimizer in trainer.optimizers.items():
        settings = trainer.config.optim[name].schedule
        if settings is None:
            continue
        schedule = trainer.schedules[name] = build_schedule(optimizer, settings)
        if isinstance(schedule, ReduceLROnPlateau) and not trainer.config.eval.every:
            raise UsageError(
                "schedule: ReduceLROnPlateau needs evaluation, which is off",
                "eval.every is 0.",
                arg(set="eval.every=200"),
            )
        length = trainer.total_steps if settings.per == "step" else -(-trainer.total_steps // trainer.steps_per_epoch)
        if words := ends_early(schedule, settings, length, f"optim.{name}.schedule"):
            say(words)


def deterministic(config: Config) -> None:
    """Sets torch's switches so that the same step gives the same bits."""
    if config.deterministic is False:
        torch.backends.cudnn.benchmark |= config.cudnn_benchmark
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "warn")


def gathered(trainer: Trainer, *, copied: bool = False) -> dict[str, Any]:
    """The state after the last step, as a tree of plain values and CPU tensors.

    copied: False for one that is written before the next step: tensors that are on the CPU stay the model's own.
    """
    tree: dict[str, Any] = {"epoch": trainer.epoch, "step": trainer.step, "loss": trainer.loss}
    for name, model in trainer.models.items():
        tree[trainer.key("model", name)] = model.state_dict()
    for name, optimizer in trainer.optimizers.items():
        tree[trainer.key("optimizer", name)] = optimizer.state_dict()
    for name, schedule in trainer.schedules.items():
        tree[trainer.key("scheduler", name)] = plain_state(schedule.state_dict())
    if trainer.scaler is not None:
        tree["scaler_state_dict"] = trainer.scaler.state_dict()
    for name, average in trainer.averages.items():
        tree[trainer.key("ema", name)] = dict(average.values)
    tree["rng_state"] = {"seed": trainer.config.seed, "derived_from": "seed, step, micro-step, rank"}
    place = {"epoch": trainer.epoch, "batch": trainer.batch_in_epoch, "samples": trainer.samples}
    of_data = trainer.data.state(trainer.step)
    refuse_not_plain(of_data, f"the state of data {trainer.config.data.name}")
    tree["data_state"] = place | of_data
    tree["best"] = dict(trainer.best) if trainer.best else None
    if trainer.stale is not None:
        tree["stale"] = dict(trainer.stale)
    if trainer.pending:
        tree["pending"] = "evaluation"
    tree["config"] = recorded(trainer.config.dumped())
    return to_cpu(tree, copied=copied)  # type: ignore[no-any-return]


def in_parts(key: str) -> bool:
    """True for the keys of what may be divided among processes."""
    return key.startswith(("model", "optimizer", "ema"))


def restored_weights(trainer: Trainer, tree: dict[str, Any], where: str) -> None:
    """Gives a trainer the weights and averages of a checkpoint. Raises `Conflict` naming what does not fit."""
    for name, model in trainer.models.items():
        try:
            model.load_state_dict(state_like(_part(tree, trainer.key("model", name), where), model.state_dict()))
        except RuntimeError as error:
            if took_part(error):
                raise
            raise Conflict(
                f"{where}: the weights do not fit the model: {error}", "The checkpoint belongs to another model."
            ) from error
    for name, average in trainer.averages.items():
        average.load(_part(tree, trainer.key("ema", name), where))
    trainer.step = tree["step"]


def restored(trainer: Trainer, tree: dict[str, Any], where: str) -> None:
    """Gives a trainer that was just built the state of a checkpoint. Raises `Conflict` naming what does not fit."""
    restored_weights(trainer, tree, where)
    for name in trainer.optimizers:
        if _declared(tree, name) == _declared({"config": recorded(trainer.config.dumped())}, name):
            # An optimizer and its schedule go on where they stopped.
            load_optimizer(trainer.optimizers[name], _part(tree, trainer.key("optimizer", name), where), where)
            if name in trainer.schedules:
                trainer.schedules[name].load_state_dict(_part(tree, trainer.key("scheduler", name), where))
        else:
            _as_declared(trainer, tree, name, where)
    if trainer.scaler is not None:
        trainer.scaler.load_state_dict(_part(tree, "scaler_state_dict", where))
    trainer.loss, trainer.best = tree["loss"], tree["best"]
    trainer.stale = tree.get("stale") if trainer.config.stop.patience else None
    trainer.samples, trainer.pending = tree["data_state"]["samples"], "pending" in tree
    trainer.data.load_state(trainer.step, tree["data_state"])


def _as_declared(trainer: Trainer, tree: dict[str, Any], name: str, where: str) -> None:
    """An optimizer goes on with a changed learning rate or schedule, as if the schedule had always been so."""
    optimizer = trainer.optimizers[name]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    load_optimizer(optimizer, _part(tree, trainer.key("optimizer", name), where), where)
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)
    schedule, settings = trainer.schedules.get(name), trainer.config.optim[name].schedule
    if schedule is None or settings is None or isinstance(schedule, ReduceLROnPlateau):
        return
    before = tree["config"]["optim"][name]["schedule"]
    if before is not None and before["per"] == settings.per and "last_epoch" in tree[trainer.key("scheduler", name)]:
        forward_to(schedule, tree[trainer.key("scheduler", name)]["last_epoch"])
    else:
        forward_to(schedule, tree["step"] // (1 if settings.per == "step" else trainer.steps_per_epoch))


def _declared(tree: dict[str, Any], name: str) -> tuple[Any, Any]:
    settings = tree["config"]["optim"][name]
    return settings["lr"], settings["schedule"]


def _part(tree: dict[str, Any], key: str, where: str) -> Any:
    if key not in tree:
        raise Conflict(f"{where} has no {key}", "Without it the run would resume as a different one.")
    return tree[key]
