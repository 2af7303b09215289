"""Patterns for the parameters and modules of a live model: one language for optimizers, groups, `freeze` and
`activation_checkpoint`.

`blocks.*.weight` is a glob of names in which `*` crosses dots, `re:…` an expression. `blocks.0` stands for all
parameters of a module, `type:LayerNorm` for those of all modules of a class and those derived from it,
`type:Linear.weight` for theirs by a name. `not:…` takes away from what the patterns before it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from torch import nn

from ckptool.checkpoint.paths import matcher
from ckptool.errors import UsageError, listed

Patterns = str | Sequence[str]


def parameters_matching(model: nn.Module, patterns: Patterns, what: str) -> list[str]:
    """The names of the parameters that patterns choose, in the model's order; a tied one under its first name.

    A pattern of names means parameters, and modules only where it matches none. what: the key that holds the patterns.
    Raises `UsageError` for one that matches nothing.
    """
    names = [name for name, _ in model.named_parameters()]

    def find(pattern: str) -> set[str]:
        if pattern.startswith("type:"):
            return set(_of_type(model, pattern)).intersection(names)
        matches = matcher(pattern)
        inside = (name for name in names if any(map(matches, accumulate(name.split(".")[:-1], "{}.{}".format))))
        return set(filter(matches, names)) or set(inside)

    return _chosen(patterns, names, find, f"{what}: {{!r}} matches no parameter")


def modules_matching(model: nn.Module, patterns: Patterns, what: str) -> list[str]:
    """The names of the modules that patterns choose, without the model itself. Raises `UsageError` as above."""
    modules = {name: module for name, module in model.named_modules() if name}

    def find(pattern: str) -> set[str]:
        is_type = matcher(pattern.removeprefix("type:"))
        if pattern.startswith("type:"):
            return {name for name, module in modules.items() if _is(module, is_type)}
        return set(filter(is_type, modules))

    return _chosen(patterns, list(modules), find, f"{what}: {{!r}} matches no module")


def outermost(names: Sequence[str]) -> list[str]:
    """The modules that are in none of the others."""
    return [name for name in names if not any(name.startswith(other + ".") for other in names)]


def _chosen(patterns: Patterns, names: list[str], find: Callable[[str], set[str]], problem: str) -> list[str]:
    each = [patterns] if isinstance(patterns, str) else list(patterns)
    chosen = set(names) if each and each[0].startswith("not:") else set()
    for pattern in each:
        found = find(pattern.removeprefix("not:"))
        if not found:
            raise UsageError(problem.format(pattern), f"Available: {listed(names, 8)}.")
        chosen = chosen - found if pattern.startswith("not:") else chosen | found
    return [name for name in names if name in chosen]


def _of_type(model: nn.Module, pattern: str) -> Iterator[str]:
    """The names of the parameters in modules of a class."""
    kind, _, own = pattern.removeprefix("type:").partition(".")
    is_type, is_own = matcher(kind), matcher(own or "*")
    for prefix, module in model.named_modules():
        if _is(module, is_type):
            for name, _ in module.named_parameters():
                if is_own(name):
                    yield f"{prefix}.{name}" if prefix else name


def _is(module: nn.Module, is_type: Callable[[str], bool]) -> bool:
    return any(is_type(kind.__name__) for kind in type(module).__mro__)
