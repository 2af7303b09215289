"""Model parallel: one model on several devices, cut before named modules, fed with micro-batches.

It runs in one process. Modules stay where they are in the model, so names and state dict do not change; tensors are moved where one part
ends and the next begins. On GPUs the parts work at the same time: a micro-batch is in the second while the next one is in the first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ckptool.errors import UsageError, listed, printable
from ckptool.training.config import Split
from ckptool.training.data import to_device


def place(model: nn.Module, settings: Split, home: torch.device) -> None:
    """Puts each part of a model on its device, and has tensors moved between them; the output comes back to `home`.

    Parts follow the order in which modules are defined. A module with weights that are tied to an earlier part's runs there. Raises
    `UsageError` for a cut before something that is not there, out of order, or a device that is none.
    """
    devices = [device_here("split.devices", name) for name in settings.devices]
    part_of = _parts(model, settings.at)
    placed: set[int] = set()
    for name, module in model.named_modules():
        device = devices[part_of[name]]
        # A tied tensor stays where it came first.
        module._apply(
            lambda tensor, device=device: tensor if id(tensor) in placed else tensor.to(device), recurse=False
        )
        placed.update(map(id, (*module.parameters(recurse=False), *module.buffers(recurse=False))))
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        inside = {part_of[names[id(part)]] for part in module.modules()}
        if len(inside) == 1:
            own = next(module.parameters(), None)
            device = devices[inside.pop()] if own is None else own.device
            module.register_forward_pre_hook(_mover(device), with_kwargs=True)
    model.register_forward_hook(lambda module, inputs, output: to_device(output, home))


def device_here(key: str, name: str) -> torch.device:
    """A device of this machine that a key of the configuration names. Raises `UsageError` for one that is none, or not here."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        told = printable(str(error).partition("\n")[0])
        raise UsageError(
            f"{key}: {printable(name)!r} is no device here: {told}", "", "For example: cpu, cuda, cuda:1, mps, auto"
        ) from None


def _parts(model: nn.Module, cuts: list[str]) -> dict[str, int]:
    """The part of each module, by its place in the order of definition; an outer module counts to that of its beginning."""
    names = [name for name, _ in model.named_modules()]
    for cut in cuts:
        if cut not in names or not cut:
            raise UsageError(
                f"split.at: there is no module {printable(cut)!r}",
                f"There are: {listed([printable(name) for name in names if name], 12)}.",
            )
    places = [names.index(cut) for cut in cuts]
    if places != sorted(set(places)):
        raise UsageError(
            "split.at: the cuts are not in the order of the model",
            f"In its order they are: {', '.join(names[place] for place in sorted(set(places)))}.",
        )
    return {name: sum(number >= place for place in places) for number, name in enumerate(names)}


def _mover(device: torch.device) -> Callable[..., Any]:
    def move(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return to_device(args, device), to_device(kwargs, device)

    return move


class Pipeline(nn.Module):
    """Runs a model on the parts of a batch one after the other, and puts their outputs together.

    With one micro-batch it is the model itself. With more, BatchNorm sees each of them by itself, and dropout draws for each.
    """

    def __init__(self, model: nn.Module, microbatches: int) -> None:
        super().__init__()
        self.module, self.microbatches = model, microbatches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        size = next((len(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), 1)
        if min(self.microbatches, size) == 1:
            return self.module(*args, **kwargs)
        bounds = [size * number // self.microbatches for number in range(self.microbatches + 1)]
        outputs = []
        for begin, end in pairwise(bounds):
            if begin < end:
                part = [_slice(value, size, begin, end) for value in args]
                named = {key: _slice(value, size, begin, end) for key, value in kwargs.items()}
                outputs.append(self.module(*part, **named))
        return _together(outputs)


def _slice(value: Any, size: int, begin: int, end: int) -> Any:
    return value[begin:end] if isinstance(value, torch.Tensor) and value.dim() and len(value) == size else value


def _together(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(outputs)
    if isinstance(first, dict):
        return {key: _together([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_together(list(column)) for column in zip(*outputs, strict=True))
    raise UsageError(
        f"split: the model gives {type(first).__name__}, which cannot be put together from micro-batches",
        "It should give a tensor, or a tuple, list or dictionary of them.",
        "Do without: --set split.microbatches=1",
    )
