"""The parts of a run, built in the order that resuming needs: models, optimizers, schedules, then state."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ckptool.errors import Conflict, UsageError, printable
from ckptool.training.config import Config, recorded
from ckptool.training.data import Samples, load_data, seed_all
from ckptool.training.extensions import took_part
from ckptool.training.models import Say, build_model, checkpoint_activations
from ckptool.training.optim import (
    Average,
    Freezing,
    build_optimizer,
    build_schedule,
    ends_early,
    forward_to,
    load_optimizer,
)
from ckptool.training.parallel import World, placed, wrapped
from ckptool.training.tasks import Task, load_task


@dataclass(slots=True)
class Trainer:
    """The parts of a run, and how far it has come. `step` is the number of completed optimizer steps.

    models: as they are saved.  runners: the same, wrapped as the strategy runs them.  loss: the mean over the samples
    of the last step.  best: metric, value and step of the best evaluation.  samples: how many were trained on.
    pending: the evaluation that is due was not done.  whole: False within a step.
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
        """The models for the update of one of them: under ddp the others unwrapped, with no gradients to exchange."""
        return self.runners if self.config.strategy != "ddp" else {**self.models, name: self.runners[name]}

    def key(self, kind: str, name: str) -> str:
        """The key of a part of the state: `model_state_dict`; with several models `model_NAME_state_dict`."""
        return f"{kind}_state_dict" if len(self.models) == 1 else f"{kind}_{name}_state_dict"

    @property
    def steps_per_epoch(self) -> int:
        return self.data.batches(self.config.data.batch, self.config.data.drop_last)

    @property
    def total_steps(self) -> int:
        """The length of the run, by `train.steps` or `train.epochs`."""
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
    """A trainer at step 0. Raises `UsageError` for what the configuration asks for and does not exist.

    say: called with each note.  fresh: False for one that gets a saved state next, and need not start from another.
    """
    deterministic(config)
    data, task = load_data(config.data, config.seed), _task(config)
    models, freezing = {}, {}
    for name, settings in config.models.items():
        seed_all(torch.device("cpu"), config.seed, "init", name)
        models[name] = placed(build_model(settings, data, fresh=fresh, name=name), config, world)
        if config.train.activation_checkpoint is not None:
            checkpoint_activations(models[name], config.train.activation_checkpoint, say)
        freezing[name] = Freezing(models[name], settings.freeze)
        freezing[name].apply(0)
    optimizers = {name: build_optimizer(model, config.optim[name]) for name, model in models.items()}
    trainer = Trainer(
        config,
        world,
        data,
        task,
        models,
        runners={name: wrapped(model, config, world) for name, model in models.items()},
        optimizers=optimizers,
        schedules={},
        scaler=torch.amp.GradScaler(world.device.type) if config.train.precision == "fp16" else None,
        averages={name: Average(model, config.train.ema) for name, model in models.items()} if config.train.ema else {},
        freezing=freezing,
    )
    _build_schedules(trainer, say)
    return trainer


def _task(config: Config) -> Task:
    task = load_task(config.task)
    if missing := [phase.model for phase in task.phases if phase.model not in config.models]:
        raise UsageError(
            f"task: {config.task} trains the model {printable(missing[0])!r}, but there is none by this name",
            f"Available: {', '.join(map(printable, config.models))}.",
            f"Call it so: models: {{{printable(missing[0])}: …}}",
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
                "--set eval.every=200",
            )
        length = trainer.total_steps if settings.per == "step" else -(-trainer.total_steps // trainer.steps_per_epoch)
        if words := ends_early(schedule, settings, length, f"optim.{name}.schedule"):
            say(words)


def deterministic(config: Config) -> None:
    """Sets torch's switches so that the same step gives the same bits."""
    if config.deterministic is False:
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
    tree["data_state"] = {"epoch": trainer.epoch, "batch": trainer.batch_in_epoch, "samples": trainer.samples}
    tree["best"] = dict(trainer.best) if trainer.best else None
    if trainer.pending:
        tree["pending"] = "evaluation"
    tree["config"] = recorded(trainer.config.dumped())
    return to_cpu(tree, copied=copied)  # type: ignore[no-any-return]


def restored(trainer: Trainer, tree: dict[str, Any], where: str) -> None:
    """Gives a trainer that was just built the state of a checkpoint. Raises `Conflict` naming what does not fit."""
    for name, model in trainer.models.items():
        try:
            model.load_state_dict(_part(tree, trainer.key("model", name), where))
        except RuntimeError as error:
            if took_part(error):
                raise
            raise Conflict(
                f"{where}: the weights do not fit the model: {error}", "The checkpoint belongs to another model."
            ) from error
    for name in trainer.optimizers:
        if _declared(tree, name) == _declared({"config": trainer.config.dumped()}, name):
            _as_it_was(trainer, tree, name, where)
        else:
            _as_declared(trainer, tree, name, where)
    if trainer.scaler is not None:
        trainer.scaler.load_state_dict(_part(tree, "scaler_state_dict", where))
    for name, average in trainer.averages.items():
        average.load(_part(tree, trainer.key("ema", name), where))
    trainer.step, trainer.loss, trainer.best = tree["step"], tree["loss"], tree["best"]
    trainer.samples, trainer.pending = tree["data_state"]["samples"], "pending" in tree


def _as_it_was(trainer: Trainer, tree: dict[str, Any], name: str, where: str) -> None:
    """An optimizer and its schedule go on where they stopped."""
    load_optimizer(trainer.optimizers[name], _part(tree, trainer.key("optimizer", name), where), where)
    if name in trainer.schedules:
        trainer.schedules[name].load_state_dict(_part(tree, trainer.key("scheduler", name), where))


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


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """A schedule's state without functions: they are made again from the configuration."""
    return {key: value for key, value in state.items() if key != "lr_lambdas"} | (
        {"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else {}
    )


def to_cpu(value: Any, *, copied: bool = False) -> Any:
    """A copy of a tree with its tensors on the CPU, shared ones still shared. copied: even those that were there."""
    return _moved(value, copied, {})


def _moved(node: Any, copied: bool, moved: dict[int, torch.Tensor]) -> Any:
    """No function inside a function: it would hold itself, and with it the copies until garbage is collected."""
    if isinstance(node, torch.Tensor):
        if id(node) not in moved:
            moved[id(node)] = node.detach().to("cpu", copy=copied)
        return moved[id(node)]
    if isinstance(node, dict):
        made: Any = type(node)() if type(node) is not dict else {}
        for key, item in node.items():
            made[key] = _moved(item, copied, moved)
        if hasattr(node, "_metadata"):
            made._metadata = node._metadata
        return made
    return type(node)(_moved(item, copied, moved) for item in node) if type(node) in (list, tuple) else node
