"""Parametrisations folded into plain weights: weight norm (old and new) and pruning.

    weight norm    weight_g, weight_v                 v * g / ‖v‖, over the axes where g has one element
                   parametrizations.weight.original0, original1           the same (torch.nn.utils.parametrizations)
    pruning        weight_orig, weight_mask           weight_orig * weight_mask, exact

Spectral norm is recognised and left alone (weight_orig, weight_u, weight_v; parametrizations.weight.original, 0._u,
0._v): the weight depends on vectors that change with every step in training.
Sources: torch/nn/utils/{weight_norm,spectral_norm,prune,parametrizations}.py. Norms are summed in f64 and the result is
rounded once, so it may differ from what torch computes in f32 in the last bit. The old names of weight norm and the new
ones turn into each other exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import TensorValues, computed_tensor, fold
from ckptool.checkpoint.nodes import same_kind
from ckptool.checkpoint.numeric import Array, numbers
from ckptool.commands import arg
from ckptool.errors import Conflict, Unsupported, UsageError, listed, printable

FORMS = ("plain", "old", "new")
_NEW = re.compile(
    r"(?P<module>(?:.*\.)?)parametrizations\.(?P<name>[^.]+)\.(?P<part>original0|original1|original|0\._u|0\._v)"
)
WEIGHT_NORM, PRUNING, SPECTRAL = "weight norm", "pruning", "spectral norm"


@dataclass(frozen=True, slots=True)
class Folded:
    """A weight and its parts. parts: role -> key (`g`, `v`, `orig`, `mask`, `u`).  new: by torch's newer names."""

    weight: str
    kind: str
    parts: dict[str, str]
    new: bool


@dataclass(frozen=True, slots=True)
class Baked:
    """A state dict with parametrisations folded. left: those that were recognised and left alone, with why."""

    tree: dict[Any, Any]
    folded: tuple[Folded, ...]
    left: tuple[tuple[str, str], ...]


def bake(node: Mapping[Any, Any], *, form: str = "plain") -> Baked:
    """The state dict with plain weights for parametrisations; or, with `form`, weight norm by its other names.

    Raises `UsageError` for another form, `Conflict` where the plain weight is there already, `Unsupported` for types
    that have no product.
    """
    if form not in FORMS:
        raise UsageError(f"unknown {arg('form')} {form!r}", f"Available: {', '.join(FORMS)}.")
    found, left = _found(node)
    chosen = []
    for each in found:
        if each.kind == SPECTRAL:
            vectors = " and ".join(printable(key) for role, key in each.parts.items() if role in ("u", "v"))
            left.append((each.weight, f"spectral norm: {vectors} change with every step in training"))
        elif form == "plain" or each.kind == WEIGHT_NORM:
            chosen.append(each)
        else:
            left.append((each.weight, f"{each.kind} has one form only"))
    parts = {key: each for each in chosen for key in each.parts.values()}
    tree = same_kind(node, {})
    done: set[str] = set()
    for key, value in node.items():
        folding = parts.get(key) if type(key) is str else None
        if folding is None:
            _put(tree, key, value)
        elif form != "plain":
            _put(tree, _renamed(folding, key, form), value)
        elif folding.weight not in done:
            done.add(folding.weight)
            _put(tree, folding.weight, _FOLDS[folding.kind](node, folding))
    return Baked(tree, tuple(chosen), tuple(left))


def _put(tree: dict[Any, Any], key: Any, value: Any) -> None:
    if key in tree:
        raise Conflict(
            f"{key!s} exists already, next to the parts that it is made from", "One of the two would be lost."
        )
    tree[key] = value


# What is there -------------------------------------------------------------------------------------------------------


def _found(node: Mapping[Any, Any]) -> tuple[list[Folded], list[tuple[str, str]]]:
    """Everything that is recognised, in order; and what looks like a parametrisation and is not understood."""
    groups: dict[tuple[str, bool], dict[str, str]] = {}
    for key, value in node.items():
        if type(key) is str and isinstance(value, TensorEntry):
            for weight, new, role in _roles(key):
                groups.setdefault((weight, new), {})[role] = key
    found: list[Folded] = []
    left: list[tuple[str, str]] = []
    for (weight, new), parts in groups.items():
        kind = _kind(set(parts))
        if kind is None:
            if new:
                left.append((weight, "an unknown parametrization"))
        else:
            found.append(Folded(weight, kind, {role: parts[role] for role in _NEEDS[kind]}, new))
    return found, left


def _roles(key: str) -> list[tuple[str, bool, str]]:
    """The weight that a key may be a part of, whether by the new names, and as what."""
    if match := _NEW.fullmatch(key):
        roles = {"original0": "g", "original1": "v", "original": "orig", "0._u": "u", "0._v": "v"}
        return [(match["module"] + match["name"], True, roles[match["part"]])]
    weight, _, role = key.rpartition("_")
    return [(weight, False, role)] if weight and role in ("g", "v", "orig", "mask", "u") else []


_NEEDS = {WEIGHT_NORM: ("g", "v"), PRUNING: ("orig", "mask"), SPECTRAL: ("orig", "u", "v")}


def _kind(roles: set[str]) -> str | None:
    for kind, needs in _NEEDS.items():
        if roles == set(needs):
            return kind
    return None


def _renamed(folding: Folded, key: str, form: str) -> str:
    role = next(role for role, name in folding.parts.items() if name == key)
    if form == "old":
        return f"{folding.weight}_{role}"
    module, _, name = folding.weight.rpartition(".")
    return f"{module + '.' if module else ''}parametrizations.{name}.{'original0' if role == 'g' else 'original1'}"


# Folding -------------------------------------------------------------------------------------------------------------


def _weight_norm(node: Mapping[Any, Any], folding: Folded) -> TensorEntry:
    g, v = node[folding.parts["g"]], node[folding.parts["v"]]
    shape = g.shape if len(g.shape) == len(v.shape) else (1,) * len(v.shape)
    if g.numel != prod(shape) or any(a not in (1, b) for a, b in zip(shape, v.shape, strict=True)):
        raise Conflict(
            f"{folding.weight}: g of shape {list(g.shape)} is not a norm of v of shape {list(v.shape)}",
            "They are not the two halves of one weight.",
        )
    scale: list[Array] = []

    def scales() -> Array:
        if not scale:
            import numpy

            norm = numpy.sqrt(_sums(v, shape, lambda values: values * values))
            with numpy.errstate(all="ignore"):
                scale.append(_elements(g)(0, g.numel).reshape(shape) / norm)
        return scale[0]

    return _product(v, (g, v), lambda start, stop: _spread(scales(), v.shape, start, stop))


def _pruned(node: Mapping[Any, Any], folding: Folded) -> TensorEntry:
    orig, mask = node[folding.parts["orig"]], node[folding.parts["mask"]]
    if orig.shape != mask.shape:
        raise Conflict(f"{folding.weight}: the mask is of another shape, {list(mask.shape)}", "")
    return _product(orig, (orig, mask), _elements(mask))


_FOLDS: dict[str, Callable[[Mapping[Any, Any], Folded], TensorEntry]] = {WEIGHT_NORM: _weight_norm, PRUNING: _pruned}


def _product(entry: TensorEntry, inputs: tuple[TensorEntry, ...], factor: Callable[[int, int], Any]) -> TensorEntry:
    """The tensor times a factor for each element, made piece by piece, rounded once."""
    if not entry.dtype.is_float or any(not part.dtype.is_float and part.dtype.kind != "bool" for part in inputs):
        raise Unsupported(f"tensors of type {entry.dtype} are not folded", "Parametrized weights are floating-point.")
    elements = _elements(entry)
    made = computed_tensor(
        entry.dtype, entry.shape, lambda *place: elements(*place) * factor(*place), inputs, entry.location
    )
    return made.with_flags(entry.flags._replace(conj=False, neg=False))


def _elements(entry: TensorEntry) -> Callable[[int, int], Array]:
    """A function that gives elements by row-major numbers, as f64."""
    values = TensorValues(entry)
    return lambda start, stop: values.read(start, stop).astype("f8")


def _sums(entry: TensorEntry, shape: tuple[int, ...], term: Callable[[Array], Array]) -> Array:
    """Sums over the axes where `shape` has 1, of a term of each element, in f64."""
    import numpy

    total = numpy.zeros(prod(shape))

    def add(start: int, raw: Array) -> None:
        values = numbers(raw, entry.dtype).astype(numpy.float64)
        places = _places(numpy.arange(start, start + len(values)), entry.shape, shape)
        numpy.add(total, numpy.bincount(places, term(values), len(total)), out=total)

    fold(add, entry)
    return total.reshape(shape)


def _spread(values: Array, shape: tuple[int, ...], start: int, stop: int) -> Array:
    """For each element of `shape` from its number `start` to `stop`, the value that is broadcast to it."""
    import numpy

    spread: Array = values.reshape(-1)[_places(numpy.arange(start, stop), shape, values.shape)]
    return spread


def _places(at: Array, shape: tuple[int, ...], reduced: tuple[int, ...]) -> Array:
    """The row-major numbers in `reduced` of elements of `shape`; axes of 1 are summed over."""
    import numpy

    places = numpy.zeros(len(at), numpy.int64)
    for index, size in zip(numpy.unravel_index(at, shape) if shape else (), reduced, strict=True):
        places = places * size + (index if size != 1 else 0)
    return places


def summary_lines(baked: Baked) -> list[str]:
    """The folded weights and those left alone, a line for each kind."""
    lines = []
    for kind in _FOLDS:
        names = [each.weight for each in baked.folded if each.kind == kind]
        lines += [f"{kind}: {listed(names, 4)}"] if names else []
    return lines + [f"left alone: {name} ({why})" for name, why in baked.left]
