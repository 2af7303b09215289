"""Models: building, initialising and starting one from a checkpoint; activation checkpointing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ckptool.analysis.targets import names_code
from ckptool.analysis.warm_start import LoadReport, percent
from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg, command
from ckptool.errors import PlanRefused, Text, UsageError, counted, listed, printable
from ckptool.training.config import ActivationCheckpoint, Model
from ckptool.training.extensions import Choice
from ckptool.training.matching import modules_matching, outermost
from ckptool.training.toys import MLP, MOVED_MODELS

Say = Callable[[str], Any]

if TYPE_CHECKING:
    from ckptool.training.data import Samples

MODELS = Choice(
    "models",
    "called with args, it gives a torch.nn.Module",
    {"mlp": MLP},
    moved=MOVED_MODELS,
    gives=("a torch.nn.Module", lambda made: isinstance(made, nn.Module)),
)


def build_model(
    settings: Model, data: Samples, *, fresh: bool = True, name: str = "main", say: Say = lambda text: None
) -> nn.Module:
    """The model that a configuration names, initialised, and started from a checkpoint where it says so.

    Facts of the data (`inputs`, `classes`, …) are passed on where the model takes them and `args` does not give them.
    fresh: False for a run that goes on, whose weights come from its own checkpoint.  name: its key in `models`.  say:
    called with what was skipped of a checkpoint that need not fit.
    """
    found = MODELS.find(settings.name)
    takes = inspect.signature(found).parameters if callable(found) else ()
    known = {name: value for name, value in data.about.items() if name in takes and name not in settings.args}
    model: nn.Module = MODELS.make(settings.name, {**known, **settings.args})
    initialise(model, settings.init)
    if fresh and settings.from_ is not None:
        skipped = start_from(model, settings.from_, settings.strict, name, settings.min_loaded)
        if skipped:
            say(skipped)
    return model


INIT = Choice(
    "init",
    "called with the model, it sets its first values",
    {
        "default": None,
        "xavier_uniform": nn.init.xavier_uniform_,
        "xavier_normal": nn.init.xavier_normal_,
        "kaiming_normal": partial(nn.init.kaiming_normal_, nonlinearity="relu"),
        "kaiming_uniform": partial(nn.init.kaiming_uniform_, nonlinearity="relu"),
        "orthogonal": nn.init.orthogonal_,
    },
)


def initialise(model: nn.Module, scheme: str) -> None:
    """Gives weights of two and more dimensions their first values, biases zeros; norms keep their own.

    scheme: `default`, which keeps all, one of the table, or the user's own function of a model.
    """
    first = INIT.find(scheme)
    if names_code(scheme):
        call_user_code(first, "init", scheme, model)
    for module in model.modules() if scheme in INIT.built_in and scheme != "default" else ():
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                first(parameter)
            elif "bias" in name:
                nn.init.zeros_(parameter)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


def start_from(model: nn.Module, path: str, strict: bool, name: str = "main", min_loaded: float | None = None) -> str:
    """Loads weights into a model before it starts; raises what `ckptool.load_into` raises where they do not fit.

    Returns what was skipped, in words; "" where all fitted. strict: False skips tensors of other names and shapes.
    """
    from ckptool.bridge.modules import load_into

    try:
        way = "error" if strict else "skip"
        return _skipped(load_into(model, path, strict=strict, on_mismatch=way, min_loaded=min_loaded), name)
    except (PlanRefused, UsageError) as error:  # its advice is for those who call it, who have more options
        less = f"only what fits: {arg(set=f'models.{name}.strict=false')}"
        less = less if strict else f"however little fits: {arg(set=f'models.{name}.min_loaded=0')}"
        part = "" if "#" in path else f"; a part of it: {arg(set=f'models.{name}.from={path}#ADDRESS')}"
        error.fix = Text(f"See what it has: {command('inspect', path, all=True)}{part}; {less}")
        raise


def _skipped(report: LoadReport, name: str) -> str:
    other = [f"{printable(each.target)} ({each.have} for {each.want})" for each in report.mismatched]
    lists = {
        "skipped, of another shape": other,
        "not in it": [printable(each.name) for each in report.missing],
        "not in the model": [printable(each.name) for each in report.unexpected],
    }
    words = "; ".join(f"{len(names)} {what}: {listed(names, 8)}" for what, names in lists.items() if names)
    loaded = f"{counted(len(report.loaded), 'tensor')} ({percent(report.share)} of its values)"
    return words and f"models.{printable(name)} starts with {loaded} of {printable(report.source)}; {words}"


# Activation checkpointing --------------------------------------------------------------------------------------------


def checkpoint_activations(model: nn.Module, settings: ActivationCheckpoint, say: Say) -> None:
    """Has the modules that match recompute their activations; nothing is wrapped, so names stay. Weights end the same.

    Raises `UsageError` where nothing matches, or `sequential` is no `nn.Sequential`.
    """
    options = {"use_reentrant": settings.use_reentrant, "preserve_rng_state": settings.preserve_rng_state}
    if settings.sequential is not None:
        chosen = {settings.sequential: _sequential(model, settings.sequential)}
        _in_segments(chosen[settings.sequential], settings.segments, options)
    else:
        # The outermost modules that match: what is inside of them is computed again with them.
        patterns = settings.match or ""
        names = outermost(modules_matching(model, patterns, "activation_checkpoint"))
        chosen = {name: model.get_submodule(name) for name in names}
        for module in chosen.values():
            _forgetting(module, options)
    drops = [name for name, module in chosen.items() if _has(module, nn.modules.dropout._DropoutNd)]
    if drops and not settings.preserve_rng_state:
        within = f"dropout inside {listed(drops, 3)}"
        say(f"note: preserve_rng_state is off, so {within} draws new random numbers on recomputation: results differ")
    if norms := [name for name, module in chosen.items() if _has(module, nn.modules.batchnorm._BatchNorm)]:
        say(f"note: BatchNorm inside {listed(norms, 3)} sees its batch twice, and updates its running statistics twice")


def _sequential(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    found = modules.get(name)
    if not isinstance(found, nn.Sequential):
        there = [place or "''" for place, module in modules.items() if isinstance(module, nn.Sequential)]
        raise UsageError(
            f"activation_checkpoint: {name!r} is not an nn.Sequential", f"Available: {listed(there, 8) or 'none'}."
        )
    return found


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

    # The older way looks at positional tensors only, and learns nothing where none of them asks for a gradient.
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
                    "activation_checkpoint: use_reentrant needs floating-point inputs, which can have a gradient",
                    "The first segment would learn nothing.",
                    f"Turn it off: {arg(set='train.activation_checkpoint.use_reentrant=false')}",
                )
            value = value.detach().requires_grad_()
        return checkpoint_sequential(  # type: ignore[no-untyped-call]
            list(self), min(segments, len(self)), value, **options
        )

    _with_forward(module, forward)


def _with_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives one module another forward, by a class of its own, so that DataParallel's copies run on themselves."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _has(module: nn.Module, kind: type) -> bool:
    return any(isinstance(part, kind) for part in module.modules())


class KeptBytes:
    """The bytes of activations that autograd keeps for the backward pass."""

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
def kept_bytes() -> Iterator[KeptBytes]:
    """Counts what a forward pass keeps; weights are not counted, a storage once."""
    found = KeptBytes()
    with torch.autograd.graph.saved_tensors_hooks(found.pack, lambda tensor: tensor):
        yield found
