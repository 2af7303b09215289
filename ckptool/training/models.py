"""Built-in models; building, initialising and starting one from a checkpoint; activation checkpointing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ckptool.analysis.warm_start import LoadReport, percent
from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg, command
from ckptool.errors import PlanRefused, Text, UsageError, counted, listed, printable
from ckptool.training.config import ActivationCheckpoint, Model
from ckptool.training.extensions import find_named, load_named
from ckptool.training.matching import modules_matching, outermost

Say = Callable[[str], Any]

if TYPE_CHECKING:
    from ckptool.training.data import Samples


class MLP(nn.Sequential):
    """Linear layers with ReLU and dropout between them, for inputs of any shape, and tokens with a vocabulary."""

    def __init__(
        self,
        inputs: list[int],
        outputs: int = 0,
        classes: int = 0,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        vocabulary: int = 0,
        width: int = 16,
    ) -> None:
        first = math.prod(inputs) * (width if vocabulary else 1)
        sizes = [first, *([64] if hidden is None else hidden), outputs or classes]
        layers: list[nn.Module] = [nn.Embedding(vocabulary, width)] if vocabulary else []
        layers.append(nn.Flatten())
        for number, (before, after) in enumerate(pairwise(sizes)):
            layers.append(nn.Linear(before, after))
            if number < len(sizes) - 2:
                layers += [nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*layers)


class Conv(nn.Module):
    """Convolutions with BatchNorm and dropout, then a linear head."""

    def __init__(
        self, inputs: list[int], classes: int, channels: list[int] | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = [inputs[0], *(channels or [16, 32])]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(dropout))
            for a, b in pairwise(sizes)
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean(dim=(2, 3)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer of a transformer, normalised before its parts."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class CharGPT(nn.Module):
    """A small causal transformer over characters. The embedding and the output layer are one tensor: tied weights."""

    def __init__(
        self, inputs: list[int], vocabulary: int, width: int = 32, layers: int = 2, heads: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(inputs[0], width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.tokens(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Tagger(nn.Module):
    """A recurrent classifier of padded sequences: takes tokens and their lengths."""

    def __init__(self, vocabulary: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, codes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states, _ = self.body(self.tokens(codes))
        last = states[torch.arange(len(codes), device=codes.device), lengths - 1]
        return self.head(last)  # type: ignore[no-any-return]


class Generator(nn.Sequential):
    """The half of a GAN that makes samples of noise; `noise` is how many numbers it takes."""

    def __init__(self, inputs: list[int], noise: int = 4, hidden: int = 32) -> None:
        super().__init__(
            nn.Linear(noise, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, math.prod(inputs)),
        )
        self.noise = noise


class Discriminator(nn.Sequential):
    """The half of a GAN that tells samples from made ones."""

    def __init__(self, inputs: list[int], hidden: int = 32, dropout: float = 0.1) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(math.prod(inputs), hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, 1),
        )


BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "conv": Conv,
    "chargpt": CharGPT,
    "tagger": Tagger,
    "generator": Generator,
    "discriminator": Discriminator,
}


def build_model(
    settings: Model, data: Samples, *, fresh: bool = True, name: str = "main", say: Say = lambda text: None
) -> nn.Module:
    """The model that a configuration names, initialised, and started from a checkpoint where it says so.

    Facts of the data (`inputs`, `classes`, …) are passed on where the model takes them and `args` does not give them.
    fresh: False for a run that goes on, whose weights come from its own checkpoint.  name: its key in `models`.  say:
    called with what was skipped of a checkpoint that need not fit.
    """
    found = find_named(settings.name, BUILT_IN, "models")
    takes = inspect.signature(found).parameters if callable(found) else ()
    known = {name: value for name, value in data.about.items() if name in takes and name not in settings.args}
    model = load_named(settings.name, BUILT_IN, "models", {**known, **settings.args})
    if not isinstance(model, nn.Module):
        raise UsageError(f"models: {settings.name} returned {type(model).__name__}, not a torch.nn.Module")
    initialise(model, settings.init)
    if fresh and settings.from_ is not None:
        skipped = start_from(model, settings.from_, settings.strict, name, settings.min_loaded)
        if skipped:
            say(skipped)
    return model


_SCHEMES: dict[str, Callable[[torch.Tensor], Any]] = {
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_normal": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    "orthogonal": nn.init.orthogonal_,
}


def initialise(model: nn.Module, scheme: str) -> None:
    """Gives weights of two and more dimensions their first values, biases zeros; norms keep their own.

    scheme: `default`, which keeps all, one of the table, or the user's own function of a model.
    """
    if scheme == "default":
        return
    if scheme not in _SCHEMES:
        call_user_code(find_named(scheme, _SCHEMES, "init"), "init", scheme, model)
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                _SCHEMES[scheme](parameter)
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
