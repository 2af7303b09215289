"""Everything that a run works with, built in the order that resuming needs: models, optimizers, schedules, then state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckptool.errors import Conflict, UsageError, printable
from ckptool.training.config import Config, Model, recorded
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
        checkpoint_activations(model, config.train.activation_checkpoint, say)
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


def key_of(kind: str, name: str, alone: bool) -> str:
    """`model_state_dict` for a run with one model; with several `model_NAME_state_dict`."""
    return f"{kind}_state_dict" if alone else f"{kind}_{name}_state_dict"


def gathered(trainer: Trainer, *, copied: bool = False) -> dict[str, Any]:
    """The state after the last step, as a tree of plain values and CPU tensors.

    copied: False for one that is written before the next step, since tensors that are on the CPU already stay the model's own.
    """
    alone = len(trainer.models) == 1
    tree: dict[str, Any] = {"epoch": trainer.epoch, "step": trainer.step, "loss": trainer.loss}
    for name, model in trainer.models.items():
        tree[key_of("model", name, alone)] = model.state_dict()
    for name, optimizer in trainer.optimizers.items():
        tree[key_of("optimizer", name, alone)] = optimizer.state_dict()
    for name, schedule in trainer.schedules.items():
        tree[key_of("scheduler", name, alone)] = plain_state(schedule.state_dict())
    if trainer.scaler is not None:
        tree["scaler_state_dict"] = trainer.scaler.state_dict()
    for name, average in trainer.averages.items():
        tree[key_of("ema", name, alone)] = dict(average.values)
    tree["rng_state"] = {"seed": trainer.config.seed, "derived_from": "seed, step, micro-step, rank"}
    tree["data_state"] = {"epoch": trainer.epoch, "batch": trainer.batch_in_epoch, "samples": trainer.samples}
    tree["best"] = dict(trainer.best) if trainer.best else None
    if trainer.pending:
        tree["pending"] = "evaluation"
    tree["config"] = recorded(trainer.config.dumped())
    return to_cpu(tree, copied=copied)  # type: ignore[no-any-return]


def restored(trainer: Trainer, tree: dict[str, Any], where: str) -> None:
    """Gives a trainer that was just built the state of a checkpoint. Raises `Conflict` naming what does not fit."""
    alone = len(trainer.models) == 1
    for name, model in trainer.models.items():
        try:
            model.load_state_dict(_part(tree, key_of("model", name, alone), where))
        except RuntimeError as error:
            if took_part(error):
                raise
            raise Conflict(
                f"{where}: the weights do not fit the model: {error}", "It is a checkpoint of another model."
            ) from error
    for name in trainer.optimizers:
        if _declared(tree, name) == _declared({"config": trainer.config.dumped()}, name):
            _as_it_was(trainer, tree, name, where)
        else:
            _as_declared(trainer, tree, name, where)
    if trainer.scaler is not None:
        trainer.scaler.load_state_dict(_part(tree, "scaler_state_dict", where))
    for name, average in trainer.averages.items():
        average.load(_part(tree, key_of("ema", name, alone), where))
    trainer.step, trainer.loss, trainer.best = tree["step"], tree["loss"], tree["best"]
    trainer.samples, trainer.pending = tree["data_state"]["samples"], "pending" in tree


def _as_it_was(trainer: Trainer, tree: dict[str, Any], name: str, where: str) -> None:
    """An optimizer and its schedule go on where they stopped."""
    alone = len(trainer.models) == 1
    load_optimizer(trainer.optimizers[name], _part(tree, key_of("optimizer", name, alone), where), where)
    if name in trainer.schedules:
        trainer.schedules[name].load_state_dict(_part(tree, key_of("scheduler", name, alone), where))


def _as_declared(trainer: Trainer, tree: dict[str, Any], name: str, where: str) -> None:
    """An optimizer goes on with a learning rate or a schedule that was changed since: as if the schedule had been so from the beginning."""
    alone, optimizer = len(trainer.models) == 1, trainer.optimizers[name]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    load_optimizer(optimizer, _part(tree, key_of("optimizer", name, alone), where), where)
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)
    schedule, settings = trainer.schedules.get(name), trainer.config.optim[name].schedule
    if schedule is None or settings is None or isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return
    before = tree["config"]["optim"][name]["schedule"]
    if before is not None and before["per"] == settings.per and "last_epoch" in tree[key_of("scheduler", name, alone)]:
        forward_to(schedule, tree[key_of("scheduler", name, alone)]["last_epoch"])
    else:
        forward_to(schedule, tree["step"] // (1 if settings.per == "step" else trainer.steps_per_epoch))


def _declared(tree: dict[str, Any], name: str) -> tuple[Any, Any]:
    settings = tree["config"]["optim"][name]
    return settings["lr"], settings["schedule"]


def _part(tree: dict[str, Any], key: str, where: str) -> Any:
    if key not in tree:
        raise Conflict(f"{where} has no {key}", "Without it the run would go on as another one.")
    return tree[key]


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """A schedule's state without functions: they are made again from the configuration."""
    return {key: value for key, value in state.items() if key != "lr_lambdas"} | (
        {"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else {}
    )


def to_cpu(value: Any, *, copied: bool = False) -> Any:
    """A copy of a tree with its tensors on the CPU; those that were one stay one. copied: tensors that are there already, too."""
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
