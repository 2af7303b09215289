"""Learning rate schedules: torch's by name, functions of the step, and the user's own."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ckptool.analysis.targets import names_code
from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg
from ckptool.errors import CkptoolError, UsageError, printable
from ckptool.training.config import Schedule
from ckptool.training.extensions import class_of, find_named, load_named


def warmup_cosine(warmup: int, total: int, floor: float = 0.0) -> Callable[[int], float]:
    """Up in a line over `warmup` steps, then half a cosine down to `floor` at `total`."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def inverse_sqrt(warmup: int) -> Callable[[int], float]:
    """Up in a line over `warmup` steps, then down with the square root of the step (Vaswani et al., 2017)."""
    return lambda step: min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def warmup_linear(warmup: int, total: int, floor: float = 0.0) -> Callable[[int], float]:
    """Up in a line over `warmup` steps, then down in a line to `floor` at `total`."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(floor, 1 - (1 - floor) * (step - warmup) / max(1, total - warmup))

    return factor


_LAMBDAS: dict[str, Callable[..., Callable[[int], float]]] = {
    "warmup_cosine": warmup_cosine,
    "inverse_sqrt": inverse_sqrt,
    "warmup_linear": warmup_linear,
}


_OF_FUNCTIONS = (
    "It takes functions, which a configuration cannot hold.",
    f"Name a function of the step instead: {', '.join(_LAMBDAS)}.",
)
_OF_OTHERS = ("It takes other schedules.", f"Name one schedule; with a warm-up: {', '.join(_LAMBDAS)}.")
_NO_SCHEDULE = {
    "LambdaLR": _OF_FUNCTIONS,
    "MultiplicativeLR": _OF_FUNCTIONS,
    "SequentialLR": _OF_OTHERS,
    "ChainedScheduler": _OF_OTHERS,
}


def build_schedule(optimizer: torch.optim.Optimizer, settings: Schedule) -> LRScheduler:
    """The schedule at its beginning, without state. Raises `UsageError` for an unknown name or argument."""
    if names_code(settings.name):
        return _own_schedule(optimizer, settings)
    try:
        if settings.name in _LAMBDAS:
            return lr_scheduler.LambdaLR(optimizer, _LAMBDAS[settings.name](**settings.args))
        kind = class_of(lr_scheduler, settings.name, lr_scheduler.LRScheduler, "schedule")
        if kind.__name__ in _NO_SCHEDULE:
            raise UsageError(
                f"schedule: {kind.__name__} cannot be named in a configuration", *_NO_SCHEDULE[kind.__name__]
            )
        made: lr_scheduler.LRScheduler = kind(optimizer, **settings.args)
    except CkptoolError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"the schedule {settings.name} does not take these arguments: {error}",
            f"It takes: {', '.join(inspect.signature(_LAMBDAS[settings.name]).parameters)}."
            if settings.name in _LAMBDAS
            else "Its args are those of the class in torch.optim.lr_scheduler.",
        ) from error
    return made


def _own_schedule(optimizer: torch.optim.Optimizer, settings: Schedule) -> LRScheduler:
    """The schedule of the user's own: a class, a function of (optimizer, …), or one of the step that gives a factor."""
    found, name = find_named(settings.name, {}, "schedule"), settings.name
    is_function = inspect.isroutine(found)
    makes = isinstance(found, type) or (is_function and "optimizer" in inspect.signature(found).parameters)
    if makes:
        made = load_named(name, {}, "schedule", settings.args, optimizer)
    elif is_function:
        load_named(name, {}, "schedule", settings.args, 0)  # which says what it does not take
        made = lr_scheduler.LambdaLR(
            optimizer, lambda step: float(call_user_code(found, "schedule", name, step, **settings.args))
        )
    else:
        made = found
    if not isinstance(made, lr_scheduler.LRScheduler) or isinstance(made, lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            f"schedule: {name} {'returned' if makes else 'is'} {type(made).__name__}",
            "It should be a function of the step, or make a torch.optim.lr_scheduler.LRScheduler that follows steps.",
            f"One that follows evaluation: {arg(set='optim.main.schedule.name=ReduceLROnPlateau')}",
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
    name = settings.name if settings.name in _LAMBDAS else type(schedule).__name__
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
