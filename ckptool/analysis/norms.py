"""The layers of a run's weights at its checkpoints, which are read side by side, each once: norms and movements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.arrays import fold
from ckptool.checkpoint.numeric import Array, has_numbers, numbers
from ckptool.checkpoint.progress import over
from ckptool.checkpoint.tree import tensors
from ckptool.conventions.state_dicts import find_state_dicts, without_wrappers
from ckptool.errors import CkptoolError

Weights = dict[str, TensorEntry]


@dataclass(frozen=True, slots=True, eq=False)
class NormsOverTime:
    """The norm of each layer of a run's weights at each of its checkpoints that could be read, and its movement.

    steps: of the checkpoints.  norms: layer -> its norm at each step.  moved: layer -> the norm of its change since the
    checkpoint before, as a share of its norm there; one fewer.  unread: step -> why a checkpoint was left out.
    """

    steps: tuple[int, ...]
    norms: dict[str, tuple[float, ...]]
    moved: dict[str, tuple[float, ...]]
    unread: dict[int, str]


def weights_of(checkpoint: Checkpoint) -> Weights:
    """The tensors of the models in a checkpoint, by names that do not depend on wrappers, nor on where the only model
    is; all tensors of one without a model."""
    models = [root for root in find_state_dicts(checkpoint) if root.is_model]
    found: Weights = {}
    for root in models:
        base = f"{root.address}/" if len(models) > 1 else ""
        for key, value in root.node.items():
            if isinstance(key, str) and isinstance(value, TensorEntry):
                found.setdefault(base + without_wrappers(key), value)
    everything = () if models else tensors(checkpoint.tree)
    return found | {"/".join(map(str, path)): one for path, one in everything if isinstance(one, TensorEntry)}


def norms_over_time(files: Mapping[int, Weights], unread: Mapping[int, str]) -> NormsOverTime:
    """The norms of the layers that all checkpoints have, by steps. One that cannot be read is left out, and why."""
    import numpy

    squares: dict[str, Array] = {}
    moves: dict[str, Array] = {}
    weights = next(iter(files.values()), {})
    for key, first in over(weights.items(), lambda pair: pair[1].nbytes * len(files)):
        layer, _, name = key.rpartition(".")
        entries = [weights[key] for weights in files.values() if key in weights and _is_comparable(weights[key], first)]
        if name.startswith("running_") or len(entries) < len(files):
            continue
        here = squares.setdefault(layer, numpy.zeros(len(files)))
        moved = moves.setdefault(layer, numpy.zeros(len(files) - 1))

        def add(_: int, *blocks: Array, entries: Any = entries, here: Array = here, moved: Array = moved) -> None:
            pairs = zip(blocks, entries, strict=True)
            values = numpy.stack([numbers(raw, each.dtype) for raw, each in pairs], dtype="d", casting="unsafe")
            numpy.nan_to_num(values, copy=False, nan=0, posinf=0, neginf=0)
            here += numpy.einsum("ij,ij->i", values, values)
            apart = numpy.diff(values, axis=0)
            moved += numpy.einsum("ij,ij->i", apart, apart)

        try:
            fold(add, *entries)
        except CkptoolError:
            for step, entry in zip(files, entries, strict=True):
                try:
                    fold(lambda *_: None, entry)
                except CkptoolError as problem:
                    others = {other: weights for other, weights in files.items() if other != step}
                    return norms_over_time(others, {**unread, step: problem.what})
            raise
    norms = {layer: tuple(map(sqrt, found.tolist())) for layer, found in squares.items()}
    shares = {
        layer: tuple(sqrt(move) / norm if norm else 0.0 for move, norm in zip(row.tolist(), norms[layer], strict=False))
        for layer, row in moves.items()
    }
    return NormsOverTime(tuple(files), norms, shares, dict(unread))


def _is_comparable(entry: TensorEntry, first: TensorEntry) -> bool:
    """True for values that are read beside those of the first checkpoint: floats, in the same shape."""
    return (
        entry.shape == first.shape
        and first.dtype.kind == "float"
        and has_numbers(entry.dtype)
        and entry.dtype.kind != "complex"
        and 0 < entry.nbytes <= entry.storage.nbytes
    )
