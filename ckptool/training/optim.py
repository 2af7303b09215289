"""Optimizers by name: parameter groups by pattern, schedules, clipping, freezing, the moving average of the weights."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain, count
from typing import Any

import torch
from torch import nn

from ckptool.errors import Conflict, UsageError, counted, listed, printable
from ckptool.training.config import Clip, FreezeUntil, Group, Optim, Schedule

Parameters = Mapping[str, nn.Parameter]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by name; a tied one once, under its first name."""
    return dict(model.named_parameters())


def build_optimizer(model: nn.Module, settings: Optim) -> torch.optim.Optimizer:
    """The optimizer, with every parameter and its name in exactly one group.

    Raises `UsageError` for an unknown optimizer, an unmatched pattern or an argument that it does not take.
    """
    kind = _class_of(torch.optim, settings.name, torch.optim.Optimizer, "optimizer")
    if kind.__name__ in _NO_OPTIMIZER:
        raise UsageError(
            f"optim: {kind.__name__} cannot be used here", _NO_OPTIMIZER[kind.__name__], "Name another one."
        )
    _check_options(kind, settings.groups)
    groups = _groups(named_parameters(model), settings.groups)
    try:
        made: torch.optim.Optimizer = kind(groups, lr=settings.lr, **settings.args)
        return made
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"torch.optim.{kind.__name__} does not take these arguments: {error}",
            f"It takes: {', '.join(list(inspect.signature(kind).parameters)[1:])}.",
        ) from error


# What a step of the loop cannot do.
_NO_OPTIMIZER = {"LBFGS": "It computes the loss several times in a step, by a closure; a step here computes it once."}


def _check_options(kind: type, groups: Iterable[Group]) -> None:
    """Raises `UsageError` for an option of a group that the optimizer would keep, and never look at."""
    known = [name for name in inspect.signature(kind).parameters if name != "params"]
    for group in groups:
        for name in group.model_extra or {}:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                raise UsageError(
                    f"optim.groups: {kind.__name__} has no option {printable(name)!r}",
                    f"It has: {', '.join(known)}.",
                    f"Did you mean {close[0]}?" if close else "",
                )


def _groups(parameters: Parameters, groups: Iterable[Group]) -> list[dict[str, Any]]:
    """The parameter groups: one for each pattern, in order, then the rest. The first pattern that matches wins."""
    left = dict(parameters)
    made = []
    for group in groups:
        chosen = {name: left.pop(name) for name in list(left) if fnmatchcase(name, group.match)}
        if not chosen:
            raise UsageError(
                f"optim.groups: {group.match!r} matches no parameter outside the earlier groups",
                f"Available: {listed([printable(name) for name in parameters], 8)}.",
            )
        made.append({"params": list(chosen.items()), **(group.model_extra or {})})
    if left:
        made.append({"params": list(left.items())})
    return made


def _class_of(module: Any, name: str, base: type, what: str) -> Any:
    """A class of a module by its name, whatever the case."""
    classes = {
        key.lower(): value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not key.startswith("_")
    }
    wanted = name.lower().replace("_", "")
    found = classes.get(wanted) or classes.get(wanted + "lr") or classes.get(wanted.removesuffix("lr"))
    if found is None:
        close = difflib.get_close_matches(wanted, classes, 1)
        hint = f"Did you mean {classes[close[0]].__name__}?" if close else ""
        raise UsageError(f"there is no {what} {name!r}", f"Available: {listed(sorted(classes), 40)}.", hint)
    return found


# Schedules -----------------------------------------------------------------------------------------------------------


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


def build_schedule(optimizer: torch.optim.Optimizer, settings: Schedule) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule at its beginning, without state. Raises `UsageError` for an unknown name or argument."""
    from torch.optim import lr_scheduler

    try:
        if settings.name in _LAMBDAS:
            return lr_scheduler.LambdaLR(optimizer, _LAMBDAS[settings.name](**settings.args))
        kind = _class_of(lr_scheduler, settings.name, lr_scheduler.LRScheduler, "schedule")
        if kind.__name__ in _NO_SCHEDULE:
            raise UsageError(
                f"schedule: {kind.__name__} cannot be named in a configuration", *_NO_SCHEDULE[kind.__name__]
            )
        made: lr_scheduler.LRScheduler = kind(optimizer, **settings.args)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(
            f"the schedule {settings.name} does not take these arguments: {error}",
            f"It takes: {', '.join(inspect.signature(_LAMBDAS[settings.name]).parameters)}."
            if settings.name in _LAMBDAS
            else "Its args are those of the class in torch.optim.lr_scheduler.",
        ) from error
    return made


# Schedules that end: the argument that says where, the rate from there on, and an argument that keeps it above 0.
_ENDS = {
    "warmup_cosine": ("total", "0", "floor"),
    "warmup_linear": ("total", "0", "floor"),
    "PolynomialLR": ("total_iters", "0", ""),
    "CosineAnnealingLR": ("T_max", "rising again", ""),
    "OneCycleLR": ("total_steps", "not defined, and the run stops", ""),
}


def ends_early(schedule: torch.optim.lr_scheduler.LRScheduler, settings: Schedule, length: int, key: str) -> str:
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


# Gradients -----------------------------------------------------------------------------------------------------------


def clip_gradients(optimizer: torch.optim.Optimizer, clip: Clip) -> None:
    """Cuts the gradients of all that an optimizer steps, to a norm or to a value, in place."""
    chosen = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if clip.norm is not None:
        nn.utils.clip_grad_norm_(chosen, clip.norm)
    elif clip.value is not None:
        nn.utils.clip_grad_value_(chosen, clip.value)


class Freezing:
    """Freezes parameters for ever or until a step, by taking their gradients away; groups are never rebuilt.

    Other parameters stay as the model's own code left them, and those that thaw become so again. Raises `UsageError`
    for a pattern that matches nothing.
    """

    def __init__(self, model: nn.Module, rules: Iterable[str | FreezeUntil]) -> None:
        parameters = named_parameters(model)
        until: dict[str, float] = {}
        for rule in rules:
            pattern, end = (rule, math.inf) if isinstance(rule, str) else (rule.match, rule.until)
            matching = [name for name in parameters if fnmatchcase(name, pattern)]
            if not matching:
                raise UsageError(
                    f"freeze: {printable(pattern)!r} matches no parameter",
                    f"Available: {listed([printable(name) for name in parameters], 8)}.",
                )
            until.update({name: max(end, until.get(name, 0)) for name in matching})
        self._rules = [(parameters[name], parameters[name].requires_grad, end) for name, end in until.items()]
        self._next: float = 0  # the step at which something changes

    def apply(self, step: int) -> bool:
        """Sets `requires_grad` for a step, which is not before an earlier one; True where that changed something."""
        if step < self._next:
            return False
        changed = False
        for parameter, learned, end in self._rules:
            learns = learned and step >= end
            if parameter.requires_grad is not learns:
                parameter.requires_grad_(learns)
                parameter.grad = None
                changed = True
        self._next = min((end for _, _, end in self._rules if end > step), default=math.inf)
        return changed


# State ---------------------------------------------------------------------------------------------------------------


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], where: str) -> None:
    """Gives an optimizer its state back, matched by parameter name, whatever the order of modules.

    `Optimizer.load_state_dict` takes swapped groups and wrong shapes in silence; here they are a `Conflict`.
    """
    names = [list(group.get("param_names", ())) for group in optimizer.param_groups]
    given = [list(group.get("param_names", ())) for group in saved.get("param_groups", ())]
    if list(map(sorted, names)) != list(map(sorted, given)):
        raise Conflict(
            f"{where}: the optimizer has the groups {_shown(names)}, the checkpoint {_shown(given)}",
            "The state of one parameter would be given to another.",
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places, saved_names = {name: place for place, name in enumerate(chain(*names))}, list(chain(*given))
    state = {}
    for index, slots in saved.get("state", {}).items():
        name = saved_names[index]
        _check_slots(slots, name, parameters[places[name]], where)
        # Copies, which else would stay parts of the file that they were loaded from.
        state[places[name]] = {s: v.clone() if isinstance(v, torch.Tensor) else v for s, v in slots.items()}
    numbers = iter(count())
    groups = [
        {**group, "params": [next(numbers) for _ in own], "param_names": own}
        for group, own in zip(saved["param_groups"], names, strict=True)
    ]
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})


def _check_slots(slots: dict[str, Any], name: str, parameter: torch.Tensor, where: str) -> None:
    for slot, value in slots.items():
        if isinstance(value, torch.Tensor) and value.dim() and not _is_of(value, parameter):
            raise Conflict(
                f"{where}: {slot} of {name} has the shape {list(value.shape)}, the parameter {list(parameter.shape)}",
                "It is the state of another model.",
            )


def _is_of(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """True for state of a parameter's shape, or with one row or column of it (Adafactor)."""
    return value.dim() == parameter.dim() and all(
        a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True)
    )


def forward_to(schedule: torch.optim.lr_scheduler.LRScheduler, count: int) -> None:
    """Advances a schedule that was just built by `count` steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer does not step meanwhile
        for _ in range(count):
            schedule.step()


def _shown(groups: list[list[str]]) -> str:
    return "; ".join(f"{counted(len(names), 'parameter')} ({listed(names, 2)})" for names in groups) or "none"


class Average:
    """The exponential moving average of a model's weights; buffers are copied. Tied weights stay one."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.model = decay, model
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                place = value.data_ptr() or id(value), value.shape
                self.values[name] = copies.setdefault(place, value.detach().clone())
        learning = {name: p for name, p in model.named_parameters() if name in self.values and p.is_floating_point()}
        self._means = [self.values[name] for name in learning]
        self._live: list[torch.Tensor] = list(learning.values())
        averaged = set(map(id, self._means))
        self._copied = [name for name, value in self.values.items() if id(value) not in averaged]

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights after a step into account."""
        torch._foreach_lerp_(self._means, self._live, 1 - self.decay)
        if self._copied:
            buffers = dict(self.model.named_buffers())
            for name in self._copied:
                if name in buffers:
                    self.values[name].copy_(buffers[name])

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes a saved average back. Raises `Conflict` where names or shapes differ."""
        if {n: v.shape for n, v in values.items()} != {n: v.shape for n, v in self.values.items()}:
            raise Conflict("the saved average belongs to another model", "Its names or shapes differ.")
        for name, mean in self.values.items():
            mean.copy_(values[name])
