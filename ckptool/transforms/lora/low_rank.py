"""Matrices as products of low rank: the difference between two models as an adapter, and an adapter in a lower rank.

A difference D [out, in] is never held whole. Its right singular vectors V come from D'D, exactly for up to EXACT
inputs; else from a random start, seeded by the tensor's name, by two steps of subspace iteration with half as many
vectors again, and by the best of them (Rayleigh-Ritz). B = D V, whose columns are U S, is computed row by row; A = V'.
The error is at most 1.02 times that of the exact SVD. Sums are BLAS's: the same bytes on one machine, and the same
product within rounding on others.

PEFT replaces whole modules only (`modules_to_save`), so a changed norm or embedding takes all tensors of its module
along; the bias of a matrix in low rank stands in `base_layer` (`bias: lora_only`).

Source: Halko, Martinsson, Tropp, Finding structure with randomness (2011), algorithms 4.4 and 5.3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from math import prod
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.arrays import TensorValues, computed_rows, fold, stretches
from ckptool.checkpoint.dtypes import Array, DType, has_numbers, numbers
from ckptool.checkpoint.paths import selected
from ckptool.checkpoint.progress import over
from ckptool.commands import FILE, OUT, PATTERN, arg, command
from ckptool.conventions.adapter_keys import BIAS, EMBEDDING, PEFT, WHOLE, is_linear, orientation
from ckptool.errors import Conflict, LimitExceeded, NoMatch, Unsupported, UsageError, counted, listed
from ckptool.facts import replace
from ckptool.transforms.lora.adapters import (
    DIFFUSERS_CONFIG,
    MAX_RANK,
    MODEL,
    Adapter,
    AdapterFile,
    Delta,
    alpha_of,
    alpha_tensor,
    diffusers_metadata,
    peft_config,
    refuse_others,
    stored,
)
from ckptool.transforms.memory_names import MemoryTree
from ckptool.transforms.views import once

EXACT = 768  # inputs up to which D'D is decomposed whole: 5 MB
STEPS = 2
MAX_FACTORS = 1 << 26  # elements of A and B together
_WIDE = 1 << 20  # numbers that are computed with in f64; more of them in f32


def low_rank_change(key: str, module: str, tuned: TensorEntry, base: TensorEntry, rank: int, dtype: DType) -> Delta:
    """The difference of two tensors, as a matrix [out, in], in at most this rank: A [rank, in, kernel…] and B [out,
    rank, 1…], not computed yet. key: of the tensor, for errors and the random start."""
    import numpy

    height, width = tuned.shape[0], prod(tuned.shape[1:])
    rank = min(rank, height, width)
    if rank * (height + width) > MAX_FACTORS:
        name = f"{key} in rank {rank:,}"
        what = f"{name} takes {counted(rank * (height + width), 'element')}"
        raise LimitExceeded(what, f"ckptool computes at most {MAX_FACTORS:,} at once.")
    inputs, sides = (tuned, base), (TensorValues(tuned), TensorValues(base))

    def blocks(start: int, stop: int, kind: str) -> Iterator[Array]:
        for at in stretches(start, stop, 2 * width):
            after, before = (side.rows(*at) for side in sides)
            with numpy.errstate(all="ignore"):
                yield (after - before).reshape(after.shape[0], -1).astype(kind)

    def finite(values: Array) -> Array:
        if not numpy.isfinite(values).all():
            what = f"the difference in {key} has infinities or NaN"
            raise Conflict(what, "One of the two models is damaged there. Nothing was written.")
        return values

    def decomposed() -> Array:
        """The first right singular vectors, as columns."""
        is_exact = width <= EXACT
        count = width if is_exact else min(height, width, rank + rank // 2 + 8)
        kind = "d" if is_exact or count * width <= _WIDE else "f"
        if not is_exact:  # orthogonal columns that the vectors are nearly made of
            start = numpy.random.default_rng(int.from_bytes(sha256(key.encode()).digest()[:8], "little"))
            basis = numpy.linalg.qr(start.standard_normal((width, count), "d").astype(kind))[0]
            for _ in range(STEPS):
                powers = numpy.zeros((width, count), kind)
                for block in blocks(0, height, kind):
                    powers += block.T @ (block @ basis)
                del basis
                basis = numpy.linalg.qr(finite(powers))[0]
                del powers
        gram = numpy.zeros((count, count))
        for block in blocks(0, height, kind):
            part = block if is_exact else (block @ basis).astype("d")
            gram += part.T @ part
        turn = numpy.linalg.eigh(finite(gram))[1][:, ::-1][:, :rank]  # the largest first
        made: Array = turn if is_exact else basis @ turn.astype(kind)
        # The sign of a singular vector is arbitrary: the largest element of each is positive.
        signs = numpy.sign(made[numpy.abs(made).argmax(axis=0), numpy.arange(rank)])
        made *= numpy.where(signs == 0, 1, signs).astype(made.dtype)
        return made

    def rows_of_b(start: int, stop: int) -> Array:
        vectors = once(decomposed, decomposed)
        return numpy.concatenate([block @ vectors for block in blocks(start, stop, vectors.dtype.char)])

    def rows_of_a(start: int, stop: int) -> Array:
        vectors: Array = once(decomposed, decomposed).T[start:stop]
        return vectors

    a = computed_rows(dtype, (rank, *tuned.shape[1:]), rows_of_a, inputs)
    b = computed_rows(dtype, (height, rank, *(1 for _ in tuned.shape[2:])), rows_of_b, inputs)
    return Delta(MODEL, module, {"A": a, "B": b}, {}, rank, float(rank))


class Truncation:
    """A product B @ A in a smaller rank: QR of both, and the SVD of what is between them. error: relative, once known.

    The two fit into memory, with their copies.
    """

    def __init__(self, name: str, b: TensorEntry, a: TensorEntry, rank: int) -> None:
        self.name, self.entries, self.rank = name, (b, a), rank
        self.error: float | None = None

    def factors(self) -> dict[str, TensorEntry]:
        """A and B in the types of the old ones, not computed yet."""

        def rows(role: str, start: int, stop: int) -> Array:
            made: dict[str, Array] = once(self, self._truncate)
            return made[role][start:stop]

        b, a = self.entries
        shapes = {"A": (self.rank, *a.shape[1:]), "B": (b.shape[0], self.rank, *b.shape[2:])}
        return {
            role: computed_rows(entry.dtype, shapes[role], partial(rows, role), self.entries, entry.location)
            for role, entry in (("A", a), ("B", b))
        }

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


# An adapter in a lower rank -------------------------------------------------------------------------------------------


def _check_rank(rank: int) -> None:
    if not 1 <= rank <= MAX_RANK:
        raise UsageError(f"rank {rank:,} is not from 1 to {MAX_RANK:,}", "", f"For example: {arg(rank=16)}")


def resize(adapter: Adapter, rank: int) -> tuple[AdapterFile, list[Truncation]]:
    """The adapter with every module in at most this rank, under its names and with the same scale; and what is cut off.

    Raises `Unsupported` for what is no product of two factors, `UsageError` for a rank that is none or that no module
    is above.
    """
    _check_rank(rank)
    refuse_others(adapter)
    largest = max(delta.rank for delta in adapter.products)
    if rank > largest:
        what = f"rank {rank:,} is higher than that of any module of {adapter.name}"
        raise UsageError(what, f"The highest is {largest:,}. Nothing was written.", f"For example: {arg(rank=1)}")
    tree: dict[str, TensorEntry] = dict(adapter.tree)
    truncations: list[Truncation] = []
    deltas = []
    for delta in adapter.products:
        if rank < delta.rank:
            a, b = delta.factors["A"], delta.factors["B"]
            if a.numel + b.numel > MAX_FACTORS:
                what = f"{delta.module} has {counted(a.numel + b.numel, 'element')}"
                raise LimitExceeded(what, f"ckptool computes at most {MAX_FACTORS:,} at once.")
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


# The difference between two models ------------------------------------------------------------------------------------


def extract(
    tuned: Mapping[Any, Any],
    model: MemoryTree,
    names: tuple[str, str],
    rank: int,
    dtype: DType,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> tuple[AdapterFile, dict[str, Any], list[str]]:
    """The adapter that makes `tuned` of a model, of rank `rank`; facts for a report, and what is smaller than the rank.

    Reads the tensors until it finds that they differ. names: of the two.
    Raises `Conflict` for keys and shapes that they do not share, `NoMatch` where nothing changed, `UsageError` for a
    rank that no matrix has, `Unsupported` for a change that PEFT has no form for.
    """
    _check_rank(rank)
    base, ties = model.tree, model.ties
    keys = {key for node in (tuned, base) for key in node if type(key) is str}
    chosen, problems = selected(sorted(keys), only, exclude), []
    for key in sorted(chosen):
        after, before = tuned.get(key), base.get(key)
        if after is None or before is None:
            problems.append(f"{key} is only in {names[after is None]}")
        elif not all(isinstance(each, TensorEntry) and has_numbers(each.dtype) for each in (after, before)):
            problems.append(f"{key} is not a tensor of plain numbers")
        elif after.shape != before.shape:
            problems.append(f"{key} is {list(after.shape)} and {list(before.shape)}")
    if problems:
        what = f"{names[0]} and {names[1]} are not the same model: {listed(problems, 6)}"
        why = "An adapter changes the values of tensors that both have. Nothing was written."
        raise Conflict(what, why, f"Leave tensors out on purpose: {arg(exclude=PATTERN)}")
    tied = {name: source for name, source in (ties or {}).items() if name not in keys}
    tuned, base = ({**node} | {name: node[source] for name, source in tied.items()} for node in (tuned, base))
    chosen |= {name for name, source in tied.items() if source in chosen}
    changed, aliases = _changed(tuned, base, chosen)
    if not changed:
        raise NoMatch(f"{names[0]} and {names[1]} have the same values", "There is nothing to extract.")
    if ties is None and (embeddings := [name for name in changed if EMBEDDING.fullmatch(name)]):
        what = f"{listed(embeddings)} changed, and config.json ties the head to one"
        raise Unsupported(what, "It is unknown what PEFT calls the head.", f"Leave it out: {arg(exclude=PATTERN)}")
    low, saved, alike = _modules(tuned, base, changed, aliases, model)
    deltas, whole, clamped, turns = list[Delta](), dict[str, Delta](), list[str](), orientation(base)
    every = [key for key in {**base, **tuned} if type(key) is str]
    for key in sorted(every, key=lambda key: key.rpartition(".")[0] in alike):
        module, _, leaf = key.rpartition(".")
        if module in low and key in changed and leaf == "weight":
            if len(turned := turns(key)) > 1:
                what = f"{key} is square, [out, in] or [in, out], and the matrices around it are of both kinds"
                raise Unsupported(what, "Nothing was written.", f"Leave it out: {arg(exclude=key)}")
            after, before = (node[key].transpose() if True in turned else node[key] for node in (tuned, base))
            deltas.append(low_rank_change(key, module, after, before, rank, dtype))
            clamped += [key] if deltas[-1].rank < rank else []
        elif module in saved or (module in low and key in changed):
            name = key if module in saved else f"{module}.base_layer.bias"
            entry = tuned[key]
            if key in aliases:  # PEFT looks for every name in the file
                entry = entry.with_storage(entry.storage.alone())
            whole[name] = Delta(MODEL, key, {"": entry}, {"": f"{MODEL}{name}"})
    if not deltas:
        what = f"no layer's matrix differs between {names[0]} and {names[1]}: {listed(sorted(changed))}"
        why = "Possible embeddings are taken whole, and PEFT loads no adapter without a low-rank matrix."
        raise Unsupported(what, f"{why} Nothing was written.")
    if len(clamped) == len(deltas):
        largest = max(each.rank for each in deltas)
        what = f"rank {rank:,} is higher than that of any matrix that changed"
        why = f"The highest is {largest:,}, which keeps everything."
        raise UsageError(what, why, f"For example: {arg(rank=largest)}")
    both = {*aliases, *aliases.values()}
    is_alone = "lm_head.weight" in both and len(both) == 2 and "lm_head.bias" not in base
    config = {
        "base_model_name_or_path": None,
        "bias": "lora_only" if any(name.endswith(".base_layer.bias") for name in whole) else "none",
        "ensure_weight_tying": "lm_head" in saved and is_alone,  # PEFT makes any other a Linear without bias
        "fan_in_fan_out": any(True in turns(f"{delta.module}.weight") for delta in deltas),
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": sorted(saved) or None,
        "task_type": None,
        "use_rslora": False,
    }
    modules = (key[:-7] for key in base if type(key) is str and key.endswith(".weight"))
    others = [name for name in modules if name not in {delta.module for delta in deltas}]
    facts = {
        "base": names[1],
        "ranks": {each.module: each.rank for each in deltas},
        "whole": [each.module for each in whole.values()],
        "unchanged": len(chosen) - len(changed) - len(aliases),
        "tied": list(aliases),
    }
    return stored(Adapter(PEFT, (*deltas, *whole.values()), config), PEFT, others), facts, clamped


def _modules(
    tuned: Mapping[Any, Any], base: Mapping[Any, Any], changed: set[str], aliases: Mapping[str, str], model: MemoryTree
) -> tuple[set[str], set[str], set[str]]:
    """The modules whose weights change by a product of low rank; those that are taken whole; and of these the ones that
    are taken only because PEFT compares the ends of names, even within words."""
    ties = {*(model.ties or {}), *(model.ties or {}).values()}
    heads = {pair[1] for pair in aliases.items() for key in pair if key in ties or EMBEDDING.fullmatch(key)}
    shapes = {key: getattr(entry, "shape", None) for key, entry in base.items()}
    low = set[str]()
    for key in changed:
        module, shape, dtypes = key.removesuffix(".weight"), base[key].shape, (tuned[key].dtype, base[key].dtype)
        if key.endswith("weight") and not all(each.is_float and each.itemsize > 1 for each in dtypes):
            why = "The difference of codes is not a difference of weights. Nothing was written."
            fix = f"Dequantize it first: {command('cast', FILE, dequantize=True, dtype='bf16', out=OUT)}"
            raise Unsupported(f"{key} is quantized: it holds codes, whose scales are elsewhere", why, fix)
        is_depthwise = len(shape) > 2 and shape[1] == 1
        is_matrix = module != key and 2 <= len(shape) <= 5 and not is_depthwise and not EMBEDDING.fullmatch(key)
        is_odd = f".{module}".endswith(tuple(f".{end}" for end in model.odd))
        if is_matrix and key not in heads and not is_odd and is_linear(module, shapes):
            low.add(module)
    every = {key.rpartition(".")[0]: key for key in {**base, **tuned} if type(key) is str}
    parents = {module[: dot.start()] for module in every for dot in re.finditer(r"\.", module)} | {""}
    saved: set[str] = set()
    for key in base:
        module, _, leaf = str(key).rpartition(".")
        is_low = module in low and leaf in ("weight", "bias")
        if (key not in changed and aliases.get(key) not in heads & changed) or is_low:
            continue
        if module not in parents:
            saved.add(module)
        elif key not in ties:  # else its other name is that of a module of its own
            raise _unfit(key)
    alike = {module for module in every if module.endswith(tuple(saved))}
    if odd := sorted(alike & parents):
        raise _unfit(every[odd[0]])
    return low - alike, alike, alike - saved


def _unfit(key: str) -> Unsupported:
    what = f"{key} changed, but a PEFT adapter cannot hold it"
    why = "It is not a matrix, and PEFT saves whole modules only if they contain no others. Nothing was written."
    return Unsupported(what, why, f"Leave it out: {arg(exclude=key)}")


def _changed(tuned: Mapping[Any, Any], base: Mapping[Any, Any], chosen: set[str]) -> tuple[set[str], dict[str, str]]:
    """The names of tensors that differ, and of those that are tied to one before in both models, with that."""
    seen: dict[Any, str] = {}
    changed: set[str] = set()
    tied: dict[str, str] = {}
    for key in over([key for key in base if key in chosen], lambda key: 2 * base[key].nbytes):
        after, before = tuned[key], base[key]
        first = seen.setdefault((after.view, before.view), key)
        if first != key:
            tied[key] = first
            continue

        def differ(_: int, *blocks: Array, dtypes: Sequence[DType] = (after.dtype, before.dtype)) -> bool:
            ours, theirs = (numbers(*pair, f"wide {at}") for at, pair in enumerate(zip(blocks, dtypes, strict=True)))
            same = ours.tobytes() == theirs.tobytes() if ours.dtype == theirs.dtype else (ours == theirs).all()
            if not same:
                changed.add(key)  # noqa: B023 -- called before the next
            return not same

        fold(differ, after, before)
    return changed, tied
