"""Optimizers by name: parameter groups by pattern, clipping, freezing, learning rate schedules (torch's by name,
functions of the step, and the user's own), and the moving average of the weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ckptool.analysis.targets import names_code
from ckptool.bridge.user_code import call_user_code
from ckptool.errors import Conflict, UsageError, counted, listed
from ckptool.training.extensions import Choice, classes_of, numbers, parameters_matching, signature_of
from ckptool.training.parallel import divided_like, is_divided, local
from ckptool.training.saving import to_cpu

if TYPE_CHECKING:
    from ckptool.training.config import Clip, Optim, Schedule

Parameters = Mapping[str, nn.Parameter]
OPTIMIZERS = Choice(
    "optim",
    "is called with (parameters, lr=…, **args) and gives a torch.optim.Optimizer",
    classes=classes_of(torch.optim, torch.optim.Optimizer),
    unfit={"lbfgs": "asks for the loss several times in a step, which is computed once here"},
    gives=("a torch.optim.Optimizer", lambda value: isinstance(value, torch.optim.Optimizer)),
)


def shares(model: nn.Module, settings: Mapping[str, Optim], never: Collection[str] = ()) -> dict[str, Parameters]:
    """The parameters of a model that each of its optimizers takes, by name.

    never: names of parameters that never learn and need no optimizer. Raises `UsageError` naming the others that no
    optimizer takes, or two.
    """
    parameters = dict(model.named_parameters())  # a tied one once, under its first name
    catch_alls = [name for name, options in settings.items() if not options.match]
    chosen = {
        name: set(parameters_matching(model, options.match, f"optim.{name}.match"))
        for name, options in settings.items()
        if options.match
    }
    takers = {p: [name for name, members in chosen.items() if p in members] or catch_alls for p in parameters}
    if twice := [f"{p} ({', '.join(names)})" for p, names in takers.items() if len(names) > 1]:
        fix = "Remove it from one of them: match: [PATTERN, not:PATTERN]"
        raise UsageError(f"optim: parameters that several optimizers take: {listed(twice, 8)}", "", fix)
    if forgotten := [p for p, names in takers.items() if not names and p not in never]:
        fix = "One optimizer without match takes the rest; or freeze them with the model's `freeze`."
        raise UsageError(f"optim: parameters that no optimizer takes: {listed(forgotten, 8)}", "", fix)
    return {name: {p: parameters[p] for p, names in takers.items() if name in names} for name in settings}


def build_optimizer(model: nn.Module, settings: Optim, parameters: Parameters | None = None) -> torch.optim.Optimizer:
    """The optimizer, with each parameter (by default, of the whole model) and its name in exactly one group.

    Raises `UsageError` for an unknown optimizer, an unmatched pattern, an argument or an option that it does not take.
    """
    kind, is_own = OPTIMIZERS.find(settings.name), names_code(settings.name)
    takes = [] if is_own else [name for name in inspect.signature(kind).parameters if name != "params"]
    remaining = dict(model.named_parameters()) if parameters is None else dict(parameters)
    names = {id(parameter): name for name, parameter in remaining.items()}
    groups: list[dict[str, Any]] = []
    for rule in settings.groups:  # the first that matches wins
        options = rule.model_extra or {}
        if unknown := [name for name in options if takes and name not in takes]:  # torch would store and ignore it
            what = f"optim.groups: {kind.__name__} has no option {unknown[0]!r}"
            raise UsageError(what, f"It has: {', '.join(takes)}.")
        matching = parameters_matching(model, rule.match, "optim.groups")
        chosen = {name: remaining.pop(name) for name in matching if name in remaining}
        if not chosen:
            what = f"optim.groups: {rule.match!r} matches no parameter outside the earlier groups"
            raise UsageError(what, f"Available: {listed(list(names.values()), 8)}.")
        groups.append({"params": list(chosen.values()), **options})
    if remaining:
        groups.append({"params": list(remaining.values())})
    # Without names, which not every optimizer of a user takes, and without groups if the configuration has none.
    params = groups if settings.groups or not groups else groups[0]["params"]
    optimizer: torch.optim.Optimizer = OPTIMIZERS.make(settings.name, {"lr": settings.lr, **settings.args}, params)
    ids = list(map(id, parameters_of(optimizer)))
    if sorted(ids) != sorted(names):
        left_out = [name for key, name in names.items() if key not in ids]
        why = f"It left out {listed(left_out)}." if left_out else "It steps others, too."
        raise UsageError(f"optim: {settings.name} does not step exactly the parameters that it was given", why)
    for group in optimizer.param_groups:
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    if is_own and callable(train := getattr(optimizer, "train", None)):  # schedule-free ones, whose weights have a mode
        train()
    return optimizer


class Update:
    """A model's optimizers as one: gradients are unscaled, checked and clipped over all of them.

    optimizer: the only one, or this object.  kind: their names, for errors.  clips: whose gradients are clipped, and
    how: first those of each optimizer, then by `clip` those of all together.
    """

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], settings: Mapping[str, Optim], clip: Clip | None
    ) -> None:
        self.optimizers = list(optimizers.values())
        self.optimizer: Any = self.optimizers[0] if len(self.optimizers) == 1 else self
        self.kind = ", ".join(settings[name].name for name in optimizers)
        individual = [(optimizer, settings[name].clip) for name, optimizer in optimizers.items()]
        self.clips = [(part, rule) for part, rule in (*individual, (self.optimizer, clip)) if rule is not None]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def parameters_of(optimizer: torch.optim.Optimizer | Update) -> list[nn.Parameter]:
    """The parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# Gradients -----------------------------------------------------------------------------------------------------------


def clip_gradients(optimizer: torch.optim.Optimizer | Update, clip: Clip) -> None:
    """Clips the gradients of an optimizer's parameters, to a norm or to a value, in place."""
    chosen = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    if clip.norm is not None:
        nn.utils.clip_grad_norm_(chosen, clip.norm)
    elif clip.value is not None:
        nn.utils.clip_grad_value_(chosen, clip.value)


def freeze(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Turns off the gradients of the parameters that match; returns the names of all that do not learn.

    Others stay as the model's own code set them. Raises `UsageError` for a pattern that matches nothing.
    """
    parameters = dict(model.named_parameters())  # a tied one once, under its first name
    for name in parameters_matching(model, patterns, "freeze"):
        parameters[name].requires_grad_(False)
    return {name for name, parameter in parameters.items() if not parameter.requires_grad}


# Schedules -----------------------------------------------------------------------------------------------------------


def warmup_cosine(step: int, warmup: int, total: int, floor: float = 0.0) -> float:
    """A factor that rises linearly over `warmup` steps, then falls by half a cosine to `floor` at `total`."""
    angle = math.pi * min(1.0, (step - warmup) / max(1, total - warmup))
    return (step + 1) / warmup if step < warmup else floor + (1 - floor) * 0.5 * (1 + math.cos(angle))


SCHEDULES = Choice(
    "schedule",
    "is a function of the step that gives a factor; or a class, or a function whose first argument is optimizer, "
    "that gives a torch schedule, as LambdaLR(optimizer, …)",
    {"warmup_cosine": warmup_cosine},
    classes_of(lr_scheduler, LRScheduler),
    dict.fromkeys(
        ("lambdalr", "multiplicativelr", "sequentiallr", "chainedscheduler"),
        "takes functions or other schedules, which no configuration can hold",
    ),
    gives=("a torch.optim.lr_scheduler.LRScheduler", lambda value: isinstance(value, LRScheduler)),
)


def build_schedule(optimizer: torch.optim.Optimizer, settings: Schedule) -> LRScheduler:
    """The schedule at its beginning, without state. Raises `UsageError` for an unknown name or argument."""
    name, args = settings.name, settings.args
    function = SCHEDULES.find(name)
    if inspect.isroutine(function) and "optimizer" not in getattr(signature_of(function), "parameters", ()):
        numbers({"step 0": SCHEDULES.call(name, args, 0)}, "schedule", name)  # calls it once, to report its errors
        return lr_scheduler.LambdaLR(
            optimizer, lambda step: float(call_user_code(function, "schedule", name, step, **args))
        )
    schedule: LRScheduler = SCHEDULES.make(name, args, optimizer)
    if names_code(name) and isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        raise UsageError(f"schedule: {name} returned ReduceLROnPlateau", "Use torch's, which follows evaluation.")
    return schedule


# State ---------------------------------------------------------------------------------------------------------------


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], where: str, names: list[list[str]]) -> None:
    """Restores an optimizer's state, matched by parameter name, whatever the order of modules.

    `Optimizer.load_state_dict` takes swapped groups and wrong shapes in silence; here they are a `Conflict`.
    names: of its parameters, group by group.
    """
    saved_groups = [list(group.get("param_names", ())) for group in saved.get("param_groups", ())]
    if list(map(sorted, names)) != list(map(sorted, saved_groups)):
        what = f"{where}: the optimizer has the groups {_shown(names)}, the checkpoint {_shown(saved_groups)}"
        why = "The state of one parameter would be given to another."
        raise Conflict(what, why, "Give the optimizer these groups before its state is loaded")
    parameters = parameters_of(optimizer)
    indices, saved_names = {name: position for position, name in enumerate(chain(*names))}, list(chain(*saved_groups))
    state: dict[Any, Any] = {}
    for index, slots in saved.get("state", {}).items():
        if not isinstance(index, int):  # of the whole optimizer, as some of people's own keep it
            state[index] = to_cpu(slots, copied=True)
            continue
        name = saved_names[index]
        parameter = parameters[indices[name]]
        slots = {slot: divided_like(value, parameter) for slot, value in slots.items()}
        if type(optimizer).__module__.startswith("torch.") and not isinstance(optimizer, torch.optim.LBFGS):
            for slot, value in slots.items():
                shape = list(value.shape) if isinstance(value, torch.Tensor) else []
                pairs = zip(shape, parameter.shape, strict=False)
                # Of the parameter's shape, or with one row or column of it (Adafactor).
                if shape and (len(shape) != parameter.dim() or any(a not in (1, b) for a, b in pairs)):
                    raise Conflict(
                        f"{where}: {slot} of {name} has the shape {shape}, the parameter {list(parameter.shape)}",
                        "It is the state of a different model.",
                    )
        # Copies: without them, tensors would stay mapped to the file that they were loaded from.
        state[indices[name]] = {s: v.clone() if isinstance(v, torch.Tensor) else v for s, v in slots.items()}
    groups = [
        {**{key: value for key, value in group.items() if key != "param_names"}, "params": [indices[p] for p in order]}
        for group, order in zip(saved["param_groups"], names, strict=True)
    ]
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
    for index in indices.values() & state.keys():  # loading casts them to the parameter's dtype; this undoes it
        live, slots = optimizer.state[parameters[index]], state[index]
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor) and isinstance(live[slot], torch.Tensor):
                live[slot] = live[slot] if live[slot].dtype == value.dtype else value.to(live[slot].device)


def _shown(groups: list[list[str]]) -> str:
    return "; ".join(f"{counted(len(names), 'parameter')} ({listed(names, 2)})" for names in groups) or "none"


class Average:
    """The exponential moving average of a model's weights; buffers are copied. Tied weights stay one."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.model = decay, model
        copies: dict[object, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                layout = local(value).data_ptr() or id(value), value.shape, value.stride()
                self.values[name] = copies.setdefault(layout, value.detach().clone())
        learning = {name: p for name, p in model.named_parameters() if name in self.values and p.is_floating_point()}
        self._means = [self.values[name] for name in learning]
        self._live: list[torch.Tensor] = list(learning.values())
        averaged = set(map(id, self._means))
        self._copied = [name for name, value in self.values.items() if id(value) not in averaged]

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average with the weights after a step."""
        torch._foreach_lerp_(list(map(local, self._means)), list(map(local, self._live)), 1 - self.decay)
        if self._copied:
            buffers = dict(self.model.named_buffers())
            for name in self._copied:
                if name in buffers:
                    self.values[name].copy_(buffers[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the average into the place of the weights, and both back afterwards; nothing is copied."""
        live = self.model.state_dict(keep_vars=True)
        pairs = {id(live[name]): (live[name], value) for name, value in self.values.items()}.values()
        try:
            _swap(pairs)
            yield
        finally:
            _swap(pairs)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The average, by the names of the model's state dict."""
        return dict(self.values)

    def load_state_dict(self, values: Mapping[str, torch.Tensor]) -> None:
        """Loads a saved average. Raises `Conflict` if names or shapes differ."""
        if {n: tuple(v.shape) for n, v in values.items()} != {n: tuple(v.shape) for n, v in self.values.items()}:
            raise Conflict("the saved average belongs to another model", "Its names or shapes differ.")
        for name, mean in self.values.items():
            mean.copy_(divided_like(values[name], mean))


def _swap(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for one, other in pairs:
        if is_divided(one):  # FSDP2 has views of it
            before = local(one).detach().clone()
            local(one).data.copy_(local(other))
            local(other).copy_(before)
        else:
            one.data, other.data = other.data, one.data
