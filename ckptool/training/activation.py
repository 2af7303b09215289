"""Activation checkpointing: what the backward pass needs is computed again instead of kept. Weights end the same, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ckptool.errors import UsageError, listed, printable
from ckptool.training.config import ActivationCheckpoint

Say = Callable[[str], Any]


def apply(model: nn.Module, settings: ActivationCheckpoint, say: Say) -> None:
    """Has the modules that match forget their activations. Names and state dict stay what they are: nothing is wrapped.

    Raises `UsageError` where nothing matches, or `sequential` is no `nn.Sequential`.
    """
    options = {"use_reentrant": settings.use_reentrant, "preserve_rng_state": settings.preserve_rng_state}
    if settings.sequential is not None:
        chosen = {settings.sequential: _sequential(model, settings.sequential)}
        _in_segments(chosen[settings.sequential], settings.segments, options)
    else:
        chosen = _matching(model, settings.match or "")
        for module in chosen.values():
            _forgetting(module, options)
    if not settings.preserve_rng_state and (
        drops := [n for n, m in chosen.items() if _has(m, nn.modules.dropout._DropoutNd)]
    ):
        say(
            f"note: preserve_rng_state is off, so dropout inside {listed(drops, 3)} draws anew, and weights end differently"
        )
    if norms := [name for name, module in chosen.items() if _has(module, nn.modules.batchnorm._BatchNorm)]:
        say(f"note: BatchNorm inside {listed(norms, 3)} sees its batch twice, and updates its running statistics twice")


def _sequential(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    found = modules.get(name)
    if not isinstance(found, nn.Sequential):
        there = [place or "''" for place, module in modules.items() if isinstance(module, nn.Sequential)]
        raise UsageError(
            f"activation_checkpoint: {printable(name)!r} is no nn.Sequential",
            f"There are: {listed(there, 8) or 'none'}.",
        )
    return found


def _matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The outermost modules that match: what is inside of them is computed again with them."""
    modules = {name: module for name, module in model.named_modules() if name}
    matching = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
    if not matching:
        raise UsageError(
            f"activation_checkpoint: {printable(pattern)!r} matches no module",
            f"There are: {listed([printable(name) for name in modules], 8)}.",
        )
    return {n: m for n, m in matching.items() if not any(n.startswith(other + ".") for other in matching)}


def _forgetting(module: nn.Module, options: dict[str, Any]) -> None:
    kind: Any = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        return _checkpointed(kind, self, args, kwargs, options)

    _with_forward(module, forward)


def _checkpointed(kind: Any, module: nn.Module, args: Any, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    if not options["use_reentrant"]:
        return checkpoint(kind.forward, module, *args, **options, **kwargs)

    # The older way looks at positional tensors only, and learns nothing where none of them asks for a gradient, as pictures do not.
    given_all = (*args, *kwargs.values(), *module.parameters())
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in given_all):
        return kind.forward(module, *args, **kwargs)

    def run(_: torch.Tensor, *values: Any) -> Any:
        given, named = values[: len(args)], values[len(args) :]
        return kind.forward(module, *given, **dict(zip(kwargs, named, strict=True)))

    return checkpoint(run, torch.empty(0, requires_grad=True), *args, *kwargs.values(), **options)


def _in_segments(module: Any, segments: int, options: dict[str, Any]) -> None:
    kind: Any = type(module)

    def forward(self: Any, value: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, value)
        if options["use_reentrant"] and not value.requires_grad:
            if not value.is_floating_point():
                raise UsageError(
                    "activation_checkpoint: use_reentrant needs inputs that can have a gradient, and these are whole numbers",
                    "The first segment would learn nothing.",
                    "Do without: --set train.activation_checkpoint.use_reentrant=false",
                )
            value = value.detach().requires_grad_()
        return checkpoint_sequential(  # type: ignore[no-untyped-call]
            list(self), min(segments, len(self)), value, **options
        )

    _with_forward(module, forward)


def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives one module another forward, as a class of its own: copies of it, as DataParallel makes, run on themselves."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _has(module: nn.Module, kind: type) -> bool:
    return any(isinstance(part, kind) for part in module.modules())


class Kept:
    """How many bytes of activations autograd keeps for the backward pass."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: set[int] = set()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen and not isinstance(tensor, nn.Parameter):
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


@contextmanager
def kept_bytes() -> Iterator[Kept]:
    """Counts what a forward pass keeps; weights are not counted, a storage once."""
    found = Kept()
    with torch.autograd.graph.saved_tensors_hooks(found.pack, lambda tensor: tensor):
        yield found
