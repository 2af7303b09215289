"""Models: building, initialising and starting one from a checkpoint; activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ckptool.analysis.targets import names_code
from ckptool.analysis.warm_start import percent
from ckptool.commands import arg, command
from ckptool.errors import PlanRefused, Text, UsageError, counted, listed, printable
from ckptool.training.config import ActivationCheckpoint, Model
from ckptool.training.extensions import Choice, modules_matching, outermost, signature_of
from ckptool.training.toys import MLP

Say = Callable[[str], Any]

if TYPE_CHECKING:
    from ckptool.training.data import Samples

MODELS = Choice(
    "models",
    "is called with args and gives a torch.nn.Module",
    {"mlp": MLP},
    gives=("a torch.nn.Module", lambda value: isinstance(value, nn.Module)),
)


def build_model(
    settings: Model, data: Samples, *, fresh: bool = True, name: str = "main", say: Say = lambda text: None
) -> nn.Module:
    """The model that a configuration names, initialised, and started from a checkpoint where it says so.

    Facts of the data (`inputs`, `classes`, …) are passed on if the model takes them and `args` does not have them.
    fresh: False for a resumed run, whose weights come from its own checkpoint.  name: its key in `models`.  say:
    called with what was skipped of a checkpoint that need not fit. Raises what `ckptool.load_into` raises for one that
    does not.
    """
    builder = MODELS.find(settings.name)
    takes = getattr(signature_of(builder), "parameters", ()) if callable(builder) else ()
    facts = {fact: value for fact, value in data.about.items() if fact in takes and fact not in settings.args}
    model: nn.Module = MODELS.make(settings.name, {**facts, **settings.args})
    if lazy := [parameter for parameter, value in model.named_parameters() if hasattr(value, "materialize")]:
        what = f"models.{name}: parameters of lazy modules have no shape yet: {listed(lazy, 4)}"
        raise UsageError(what, "", "Give the modules their sizes, or pass them a batch where the model is built.")
    if fresh or names_code(settings.init):  # of the user's: it may replace parameters
        INIT.call(settings.init, {}, model)
    if not fresh or (path := settings.from_) is None:
        return model
    from ckptool.bridge.modules import load_into

    strict, at_least = settings.strict, settings.min_loaded
    try:
        report = load_into(model, path, strict=strict, on_mismatch="error" if strict else "skip", min_loaded=at_least)
    except (PlanRefused, UsageError) as error:  # its advice is for callers of `load_into`, who have more options
        option = f"models.{name}.strict=false" if strict else f"models.{name}.min_loaded=0"
        words = "only what fits" if strict else "however little fits"
        part = "" if "#" in path else f"; a part of it: {arg(set=f'models.{name}.from={path}#ADDRESS')}"
        error.fix = Text(f"See what it has: {command('inspect', path, all=True)}{part}; {words}: {arg(set=option)}")
        raise
    lists = {
        "skipped, as its shape differs": [f"{each.target} ({each.have} for {each.want})" for each in report.mismatched],
        "not in it": [each.name for each in report.missing],
        "not in the model": [each.name for each in report.unexpected],
    }
    skipped = [f"{len(names)} {what}: {printable(listed(names, 8))}" for what, names in lists.items() if names]
    if skipped:
        loaded = f"{counted(len(report.loaded), 'tensor')} ({percent(report.share)} of its values)"
        say(f"models.{printable(name)} starts with {loaded} of {printable(report.source)}; {'; '.join(skipped)}")
    return model


INIT = Choice("init", "is called with the model and sets its first values", {"default": lambda model: None})


# Activation checkpointing --------------------------------------------------------------------------------------------


def checkpoint_activations(model: nn.Module, settings: ActivationCheckpoint, say: Say) -> None:
    """Has the modules that match recompute their activations; nothing is wrapped, so names stay. Weights end the same.

    Raises `UsageError` where nothing matches, or `sequential` is no `nn.Sequential`.
    """
    modules = dict(model.named_modules())
    if settings.sequential is None:
        # The outermost modules that match: what is inside them is recomputed with them.
        names = outermost(modules_matching(model, settings.match or "", "activation_checkpoint"))
    elif isinstance(modules.get(settings.sequential), nn.Sequential):
        names = [settings.sequential]
    else:
        sequentials = [place or "''" for place, module in modules.items() if isinstance(module, nn.Sequential)]
        what = f"activation_checkpoint: {settings.sequential!r} is not an nn.Sequential"
        raise UsageError(what, f"Available: {listed(sequentials, 8) or 'none'}.")
    for name in names:
        _recompute(modules[name], settings)

    batch_norm = nn.modules.batchnorm._BatchNorm
    if norms := [name for name in names if any(isinstance(part, batch_norm) for part in modules[name].modules())]:
        say(f"note: BatchNorm inside {listed(norms, 3)} sees its batch twice, and updates its running statistics twice")


def _recompute(module: nn.Module, settings: ActivationCheckpoint) -> None:
    """Gives a module another `forward` by a class of its own: a bound method would run DataParallel's copies on it."""
    kind: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        # The older way has no gradients unless a positional tensor requires one, and takes no keyword arguments.
        asks = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
        older = settings.use_reentrant and asks and not kwargs
        options: Any = {"use_reentrant": older, "preserve_rng_state": settings.preserve_rng_state}
        if settings.sequential is None:
            return checkpoint(partial(kind.forward, self), *args, **options, **kwargs)
        in_segments: Any = checkpoint_sequential  # torch gives it no types
        return in_segments(list(self), min(settings.segments, len(self)), *args, **options)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
