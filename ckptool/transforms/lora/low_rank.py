"""Matrices as products of low rank: those of a difference that is read in blocks, and of another product; and the
adapter of such products in a lower rank.

A difference D [out, in] is never held whole. Its right singular vectors V come from D'D, exactly for up to EXACT
inputs; else from a random start, seeded by the tensor's name, by two steps of subspace iteration with half as many
vectors again, and by the best of them (Rayleigh-Ritz). B = D V, whose columns are U S, is computed row by row; A = V'.
The error is at most 1.02 times that of the exact SVD. Sums are BLAS's: the same bytes on one machine, and the same
product within rounding on others.

Source: Halko, Martinsson, Tropp, Finding structure with randomness (2011), algorithms 4.4 and 5.3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from math import prod
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import TensorValues, computed_rows, stretches
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.numeric import Array
from ckptool.commands import arg
from ckptool.conventions.adapter_keys import BIAS, WHOLE
from ckptool.errors import Conflict, LimitExceeded, UsageError, counted
from ckptool.transforms.lora.adapters import DIFFUSERS_CONFIG, MAX_RANK, Adapter
from ckptool.transforms.lora.schemes import (
    AdapterFile,
    alpha_of,
    alpha_tensor,
    diffusers_metadata,
    peft_config,
    refuse_others,
)
from ckptool.transforms.views import once

EXACT = 768  # inputs up to which D'D is decomposed whole: 5 MB
STEPS = 2
MAX_FACTORS = 1 << 26  # elements of A and B together
_WIDE = 1 << 20  # numbers that are computed with in f64; more of them in f32


class TensorDifference:
    """The difference of two tensors as a matrix [out, in], and its parts of low rank.

    name: of the tensor, for errors and the random start.
    """

    def __init__(self, name: str, tuned: TensorEntry, base: TensorEntry) -> None:
        self.name, self.inputs = name, (tuned, base)
        self.shape = tuned.shape[0], prod(tuned.shape[1:])
        self.sides = TensorValues(tuned), TensorValues(base)

    def factors(self, rank: int, dtype: DType, kernel: tuple[int, ...]) -> dict[str, TensorEntry]:
        """A [rank, in, kernel…] and B [out, rank, 1…], not computed yet."""
        height, width = self.shape
        ones = (1,) * len(kernel)
        inner = (rank, width // max(1, prod(kernel)), *kernel)
        a = computed_rows(dtype, inner, lambda start, stop: self._vectors(rank)[start:stop], self.inputs)
        b = computed_rows(dtype, (height, rank, *ones), lambda *place: self._projected(rank, *place), self.inputs)
        return {"A": a, "B": b}

    def rank_for(self, energy: float, most: int) -> int:
        """The smallest rank that keeps this share of the squares of all elements, at most `most`, at least 1."""
        import numpy

        _, squares, total = self._decomposed(most)
        enough = int(numpy.searchsorted(numpy.cumsum(squares[:most]), energy * total)) + 1
        return max(1, min(enough, most))

    def _vectors(self, rank: int) -> Array:
        vectors: Array = self._decomposed(rank)[0]
        return vectors[:, :rank].T

    def _projected(self, rank: int, start: int, stop: int) -> Array:
        import numpy

        vectors = self._vectors(rank).T
        return numpy.concatenate([block @ vectors for block in self._blocks(start, stop, vectors.dtype.char)])

    def _decomposed(self, rank: int) -> Any:
        """Right singular vectors as columns, the squares of singular values, and the sum of all squares."""
        return once(self, lambda: self._decompose(rank))

    def _decompose(self, rank: int) -> tuple[Array, Array, float]:
        import numpy

        height, width = self.shape
        is_exact = width <= EXACT
        count = width if is_exact else min(height, width, rank + rank // 2 + 8)
        kind = "d" if is_exact or count * width <= _WIDE else "f"
        basis = None if is_exact else self._basis(count, kind)
        gram, total = numpy.zeros((count, count)), 0.0
        for block in self._blocks(0, height, kind):
            part = block if basis is None else (block @ basis).astype("d")
            gram += part.T @ part
            total += 0.0 if is_exact else float(numpy.vdot(block, block))
        squares, turn = numpy.linalg.eigh(self._finite(gram))
        turn, squares = turn[:, ::-1], squares[::-1].clip(0)  # the largest first
        if basis is None:
            return _with_sign(turn), squares, float(numpy.trace(gram))
        return _with_sign(basis @ turn[:, :rank].astype(kind)), squares[:rank], total

    def _basis(self, count: int, kind: str) -> Array:
        """Orthogonal columns that the right singular vectors are nearly made of."""
        import numpy

        height, width = self.shape
        start = numpy.random.default_rng(int.from_bytes(sha256(self.name.encode()).digest()[:8], "little"))
        basis = numpy.linalg.qr(start.standard_normal((width, count), "d").astype(kind))[0]
        for _ in range(STEPS):
            powers = numpy.zeros((width, count), kind)
            for block in self._blocks(0, height, kind):
                powers += block.T @ (block @ basis)
            del basis
            basis = numpy.linalg.qr(self._finite(powers))[0]
            del powers
        return basis

    def _blocks(self, start: int, stop: int, kind: str) -> Iterator[Array]:
        import numpy

        for at in stretches(start, stop, 2 * self.shape[1]):
            after, before = (side.rows(*at) for side in self.sides)
            with numpy.errstate(all="ignore"):
                yield (after - before).reshape(after.shape[0], -1).astype(kind)

    def _finite(self, values: Array) -> Array:
        import numpy

        if not numpy.isfinite(values).all():
            what = f"the difference in {self.name} has infinities or NaN"
            raise Conflict(what, "One of the two models is damaged there. Nothing was written.")
        return values


def _with_sign(vectors: Array) -> Array:
    """The same with the largest element of each column positive: the sign of a singular vector is arbitrary."""
    import numpy

    largest = numpy.abs(vectors).argmax(axis=0)
    signs = numpy.sign(vectors[largest, numpy.arange(vectors.shape[1])])
    vectors *= numpy.where(signs == 0, 1, signs).astype(vectors.dtype)
    return vectors


class Truncation:
    """A product B @ A in a smaller rank: QR of both, and the SVD of what is between them. error: relative, once known.

    The two fit into memory, with their copies.
    """

    def __init__(self, name: str, b: TensorEntry, a: TensorEntry, rank: int) -> None:
        self.name, self.entries, self.rank = name, (b, a), rank
        self.error: float | None = None

    def factors(self) -> dict[str, TensorEntry]:
        """A and B in the types of the old ones, not computed yet."""
        b, a = self.entries
        shapes = {"A": (self.rank, *a.shape[1:]), "B": (b.shape[0], self.rank, *b.shape[2:])}
        return {
            role: computed_rows(entry.dtype, shapes[role], partial(self._rows, role), self.entries, entry.location)
            for role, entry in (("A", a), ("B", b))
        }

    def _rows(self, role: str, start: int, stop: int) -> Array:
        made: dict[str, Array] = once(self, self._truncate)
        return made[role][start:stop]

    def _truncate(self) -> dict[str, Array]:
        import numpy

        b, a = (TensorValues(entry).rows(0, entry.shape[0]).reshape(entry.shape[0], -1) for entry in self.entries)
        kind = "d" if a.size + b.size <= _WIDE else "f"
        if not (numpy.isfinite(a).all() and numpy.isfinite(b).all()):
            raise Conflict(f"{self.name} has infinities or NaN", "It is damaged. Nothing was written.")
        left, upper = numpy.linalg.qr(b.astype(kind))
        right, lower = numpy.linalg.qr(a.T.astype(kind))
        del a, b
        u, values, v = numpy.linalg.svd(upper.astype("d") @ lower.T.astype("d"))
        squares = values**2
        self.error = float(numpy.sqrt(squares[self.rank :].sum() / max(squares.sum(), 5e-324)))
        count = min(self.rank, len(values))  # zeros behind, where the matrix has no such rank
        sides = numpy.zeros((len(u), self.rank), kind), numpy.zeros((self.rank, len(v)), kind)
        sides[0][:, :count], sides[1][:count] = u[:, :count] * values[:count], v[:count]
        return {"B": left @ sides[0], "A": sides[1] @ right.T}


# Adapters ------------------------------------------------------------------------------------------------------------


def resize(adapter: Adapter, rank: int) -> tuple[AdapterFile, list[Truncation]]:
    """The adapter with every module in at most this rank, under its names and with the same scale; and what is cut off.

    Raises `Unsupported` for what is no product of two factors, `UsageError` for a rank that is none or that no module
    is above.
    """
    if not 1 <= rank <= MAX_RANK:
        raise UsageError(f"rank {rank:,} is not from 1 to {MAX_RANK:,}", "", f"For example: {arg(rank=16)}")
    refuse_others(adapter)
    largest = max(delta.rank for delta in adapter.products)
    if rank > largest:
        what = f"rank {rank:,} is more than any module of {adapter.name} has"
        raise UsageError(what, f"The largest has rank {largest:,}. Nothing was written.", f"For example: {arg(rank=1)}")
    tree: dict[str, TensorEntry] = dict(adapter.tree)
    truncations: list[Truncation] = []
    deltas = []
    for delta in adapter.products:
        if rank < delta.rank:
            a, b = delta.factors["A"], delta.factors["B"]
            if a.numel + b.numel > MAX_FACTORS:
                what = f"{delta.module} has {counted(a.numel + b.numel, 'element')}"
                raise LimitExceeded(what, f"At most {MAX_FACTORS:,} are computed at once.")
            truncations.append(Truncation(delta.module, b, a, rank))
            delta = replace(delta, factors=truncations[-1].factors(), rank=rank)
            if delta.alpha is not None:
                delta = replace(delta, alpha=alpha_of(delta, bool(adapter.config.get("use_rslora"))))
            tree |= {delta.keys[role]: entry for role, entry in delta.factors.items()}
            if "alpha" in delta.keys:
                tree[delta.keys["alpha"]] = alpha_tensor(alpha_of(delta), adapter.tree[delta.keys["alpha"]].dtype)
        deltas.append(delta)
    others = (delta for delta in adapter.deltas if delta.method in (BIAS, WHOLE))
    changed = replace(adapter, deltas=(*deltas, *others))
    config = None
    if adapter.config:
        own = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
        config = {**adapter.config} | {each: value for each, value in peft_config(changed).items() if each in own}
    texts = {key: value for key, value in adapter.metadata.items() if isinstance(value, str)}
    if DIFFUSERS_CONFIG in texts and not any("alpha" in delta.keys for delta in deltas):
        fields = json.loads(texts[DIFFUSERS_CONFIG]) | diffusers_metadata(changed)
        texts[DIFFUSERS_CONFIG] = json.dumps(fields, indent=2)
    return AdapterFile(tree, config, texts), truncations
