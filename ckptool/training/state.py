"""What a checkpoint of a run holds: the keys that every tutorial uses, on the CPU, without a clock and without a wrapper's prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckptool.errors import Conflict
from ckptool.training.blame import took_part
from ckptool.training.optim import forward_to, load_optimizer

if TYPE_CHECKING:
    from ckptool.training.trainer import Trainer

# What of the configuration decides where a run ends; the rest may change from one resume to the next, and is not in the file.
FIXED_SECTIONS = ("seed", "task", "data", "models", "optim")
_FIXED_OF_TRAIN = ("accumulate", "precision", "ema", "on_nonfinite", "activation_checkpoint")


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
    tree["config"] = fixed_part(trainer.config.dumped())
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


def fixed_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a dumped configuration that has to stay the same in a run."""
    fixed = {name: config[name] for name in FIXED_SECTIONS}
    fixed["data"] = {key: value for key, value in config["data"].items() if key != "workers"}
    return fixed | {"train": {key: config["train"][key] for key in _FIXED_OF_TRAIN}}


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
