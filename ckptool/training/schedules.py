"""Learning rate schedules: torch's by name, functions of the step, and the user's own."""

from __future__ import annotations

import inspect
import math
import warnings

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ckptool.analysis.targets import names_code
from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg
from ckptool.errors import UsageError, printable
from ckptool.training.config import Schedule
from ckptool.training.extensions import Choice, classes_of, numbers


def warmup_cosine(step: int, warmup: int, total: int, floor: float = 0.0) -> float:
    """Up in a line over `warmup` steps, then half a cosine down to `floor` at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def inverse_sqrt(step: int, warmup: int) -> float:
    """Up in a line over `warmup` steps, then down with the square root of the step (Vaswani et al., 2017)."""
    return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def warmup_linear(step: int, warmup: int, total: int, floor: float = 0.0) -> float:
    """Up in a line over `warmup` steps, then down in a line to `floor` at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    return max(floor, 1 - (1 - floor) * (step - warmup) / max(1, total - warmup))


# Those of torch whose arguments no configuration can hold.
_TAKES = {
    lr_scheduler.LambdaLR: "functions",
    lr_scheduler.MultiplicativeLR: "functions",
    lr_scheduler.SequentialLR: "other schedules",
    lr_scheduler.ChainedScheduler: "other schedules",
}
SCHEDULES = Choice(
    "schedule",
    "is a function of the step that gives a factor; or a class, or a function whose first argument is optimizer, "
    "that gives a torch schedule, as LambdaLR(optimizer, …)",
    {"warmup_cosine": warmup_cosine, "inverse_sqrt": inverse_sqrt, "warmup_linear": warmup_linear},
    classes_of(lr_scheduler, LRScheduler),
    unnamed=_TAKES,
    gives=("a torch.optim.lr_scheduler.LRScheduler", lambda made: isinstance(made, LRScheduler)),
)


def build_schedule(optimizer: torch.optim.Optimizer, settings: Schedule) -> LRScheduler:
    """The schedule at its beginning, without state. Raises `UsageError` for an unknown name or argument."""
    name, args = settings.name, settings.args
    found = SCHEDULES.find(name)
    if found in _TAKES:
        raise UsageError(
            f"schedule: {found.__name__} cannot be named in a configuration",
            f"It takes {_TAKES[found]}, which a configuration cannot hold. "
            f"Built in, with a warm-up: {', '.join(SCHEDULES.built_in)}.",
            SCHEDULES.typed,
        )
    if inspect.isroutine(found) and "optimizer" not in inspect.signature(found).parameters:
        numbers({"step 0": SCHEDULES.call(name, args, 0)}, "schedule", name)  # which say what is wrong with it
        return lr_scheduler.LambdaLR(
            optimizer, lambda step: float(call_user_code(found, "schedule", name, step, **args))
        )
    made: LRScheduler = SCHEDULES.make(name, args, optimizer)
    if names_code(name) and isinstance(made, lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            f"schedule: {name} returned ReduceLROnPlateau, which follows evaluation",
            "One of your own follows steps.",
            f"Name that of torch: {arg(set='optim.main.schedule.name=ReduceLROnPlateau')}",
        )
    return made


# Schedules that end: the argument that says where, the rate from there on, and an argument that keeps it above 0.
_ENDS = {
    "warmup_cosine": ("total", "0", "floor"),
    "warmup_linear": ("total", "0", "floor"),
    "PolynomialLR": ("total_iters", "0", ""),
    "CosineAnnealingLR": ("T_max", "rising again", ""),
    "OneCycleLR": ("total_steps", "not defined, and the run stops", ""),
}


def ends_early(schedule: LRScheduler, settings: Schedule, length: int, key: str) -> str:
    """A warning for a schedule that is shorter than the run, else "". length: of the run, in the schedule's units."""
    name = settings.name if settings.name in SCHEDULES.built_in else type(schedule).__name__
    argument, rate, floor = _ENDS.get(name, ("", "", ""))
    end = settings.args.get(argument)
    if not isinstance(end, (int, float)) or end >= length or settings.args.get(floor):
        return ""
    return (
        f"the schedule {printable(settings.name)} ends after {end:g} of {length:,} {settings.per}s: the learning rate "
        f"is {rate} from there on. Make it as long as the run: --set {key}.args.{argument}={length}"
    )


def forward_to(schedule: LRScheduler, count: int) -> None:
    """Advances a schedule that was just built by `count` steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer does not step meanwhile
        for _ in range(count):
            schedule.step()
