"""Matrices as products of low rank: the difference between two models as an adapter, and an adapter in a lower rank.

A difference D [out, in] is never held whole. Its right singular vectors V come from D'D, exactly for up to EXACT
inputs; else from a random start, seeded by the tensor's name, by two steps of subspace iteration with half as many
vectors again, of which Rayleigh-Ritz takes the best. B = D V, whose columns are U S, is computed row by row; A = V'.
The error is at most 1.02 times that of the exact SVD. Sums are BLAS's: the same bytes on one machine, and the same
product within rounding on others.

PEFT replaces only whole modules (`modules_to_save`), so a changed norm or embedding takes all tensors of its module
along; the bias of a matrix in low rank goes to `base_layer` (`bias: lora_only`).

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
from ckptool.checkpoint.paths import literal, selected
from ckptool.checkpoint.progress import over
from ckptool.commands import FILE, OUT, PATTERN, arg, command
from ckptool.conventions.adapter_keys import BIAS, DIFFUSERS_CONFIG, EMBEDDING, PEFT, WHOLE, is_linear, orientation
from ckptool.conventions.state_dicts import differences
from ckptool.errors import Conflict, LimitExceeded, NoMatch, Unsupported, UsageError, counted, listed
from ckptool.facts import replace
from ckptool.transforms.lora.adapters import (
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

EXACT = 768  # up to so many inputs, D'D is decomposed whole: 5 MB
STEPS = 2
MAX_FACTORS = 1 << 26  # elements of A and B together
_WIDE = 1 << 20  # up to so many numbers are computed in f64, more in f32


def low_rank_change(key: str, module: str, tuned: TensorEntry, base: TensorEntry, rank: int, dtype: DType) -> Delta:
    """The difference of two tensors, as a matrix [out, in], in at most this rank: A [rank, in, kernel…] and B [out,
    rank, 1…], not computed yet. key: the tensor's, for errors and the random start."""
    import numpy

    height, width = tuned.shape[0], prod(tuned.shape[1:])
    rank = min(rank, height, width)
    if rank * (height + width) > MAX_FACTORS:
        name = f"{key} in rank {rank:,}"
        what = f"{name} takes {counted(rank * (height + width), 'element')}"
        raise LimitExceeded(what, f"ckptool computes at most {MAX_FACTORS:,} at once.")
    inputs, sides = (tuned, base), (TensorValues(tuned), TensorValues(base))

    def blocks(start: int, stop: int, kind: str) -> Iterator[Array]:
        for stretch in stretches(start, stop, 2 * width):
            after, before = (side.rows(*stretch) for side in sides)
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
        if not is_exact:  # orthogonal columns whose span nearly contains the vectors
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
        vectors: Array = turn if is_exact else basis @ turn.astype(kind)
        # The sign of a singular vector is arbitrary: the largest element of each is positive.
        signs = numpy.sign(vectors[numpy.abs(vectors).argmax(axis=0), numpy.arange(rank)])
        vectors *= numpy.where(signs == 0, 1, signs).astype(vectors.dtype)
        return vectors

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
    """A product B @ A in a smaller rank: QR of both, and the SVD of the core. error: relative, once computed.

    Both factors fit into memory, with their copies.
    """

    def __init__(self, name: str, b: TensorEntry, a: TensorEntry, rank: int) -> None:
        self.name, self.entries, self.rank = name, (b, a), rank
        self.error: float | None = None

    def factors(self) -> dict[str, TensorEntry]:
        """A and B in the types of the old factors, not computed yet."""

        def rows(role: str, start: int, stop: int) -> Array:
            matrices: dict[str, Array] = once(self, self._truncate)
            return matrices[role][start:stop]

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
        count = min(self.rank, len(values))  # followed by zeros, where the matrix has a lower rank
        sides = numpy.zeros((len(u), self.rank), kind), numpy.zeros((self.rank, len(v)), kind)
        sides[0][:, :count], sides[1][:count] = u[:, :count] * values[:count], v[:count]
        return {"B": left @ sides[0], "A": sides[1] @ right.T}


# An adapter in a lower rank -------------------------------------------------------------------------------------------


def _check_rank(rank: int) -> None:
    if not 1 <= rank <= MAX_RANK:
        raise UsageError(f"rank {rank:,} is not from 1 to {MAX_RANK:,}", "", f"For example: {arg(rank=16)}")


def resize(adapter: Adapter, rank: int) -> tuple[AdapterFile, list[Truncation]]:
    """The adapter with every module in at most this rank, with its names and scale; and the truncations.

    Raises `Unsupported` for what is not a product of two factors, `UsageError` for an impossible rank or one above
    every module's.
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
        changing = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
        config = {**adapter.config} | {name: value for name, value in peft_config(changed).items() if name in changing}
    texts = {key: value for key, value in adapter.metadata.items() if isinstance(value, str)}
    if DIFFUSERS_CONFIG in texts and not any("alpha" in delta.keys for delta in deltas):
        fields = json.loads(texts[DIFFUSERS_CONFIG]) | diffusers_metadata(changed)
        texts[DIFFUSERS_CONFIG] = json.dumps(fields, indent=2)
    # PEFT takes no names of what its model was in.
    lead = adapter.products[0].component.removesuffix(MODEL) if adapter.scheme == PEFT else ""
    return AdapterFile({key.removeprefix(lead): entry for key, entry in tree.items()}, config, texts), truncations


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
    """The adapter of rank `rank` that turns a model into `tuned`; facts for a report, and the keys of smaller matrices.

    Reads each pair of tensors until it finds a difference. names: of the two models.
    Raises `Conflict` for keys and shapes that they do not share, `NoMatch` where nothing changed, `UsageError` for a
    rank above that of every matrix, `Unsupported` for a change that PEFT cannot express.
    """
    _check_rank(rank)
    base, ties = model.tree, model.ties
    keys = {key for node in (tuned, base) for key in node if type(key) is str}
    chosen = selected(sorted(keys), only, exclude)
    pair = [{key: node[key] for key in sorted(chosen) if key in node} for node in (tuned, base)]
    problems = [*differences(pair, names, types=False)]
    values = [item for node in pair for item in node.items()]
    odd = {key: None for key, entry in values if not isinstance(entry, TensorEntry) or not has_numbers(entry.dtype)}
    problems += [f"{key} is not a tensor of plain numbers" for key in odd]
    if problems:
        what = f"{names[0]} and {names[1]} are not the same model: {listed(problems, 6)}"
        why = "An adapter changes the values of tensors that both have. Nothing was written."
        raise Conflict(what, why, f"Leave tensors out on purpose: {arg(exclude=PATTERN)}")
    tied = {name: source for name, source in (ties or {}).items() if name not in keys}
    tuned, base = ({**node} | {name: node[source] for name, source in tied.items()} for node in (tuned, base))
    chosen |= {name for name, source in tied.items() if source in chosen}
    changed, aliases = _differing(tuned, base, chosen)
    if not changed:
        raise NoMatch(f"{names[0]} and {names[1]} have the same values", "There is nothing to extract.")
    if ties is None and (embeddings := [name for name in changed if EMBEDDING.fullmatch(name)]):
        what = f"{listed(embeddings)} changed, and config.json ties the head to one"
        raise Unsupported(what, "It is unknown what PEFT calls the head.", f"Leave it out: {arg(exclude=PATTERN)}")
    low, saved, incidental = _low_and_whole(tuned, base, changed, aliases, model)
    deltas, whole_deltas, clamped, turns = list[Delta](), dict[str, Delta](), list[str](), orientation(base)
    all_keys = [key for key in {**base, **tuned} if type(key) is str]
    for key in sorted(all_keys, key=lambda key: key.rpartition(".")[0] in incidental):
        module, _, leaf = key.rpartition(".")
        if module in low and key in changed and leaf == "weight":
            if len(turned := turns(key)) > 1:
                what = f"{key} is square, [out, in] or [in, out], and the matrices around it are of both kinds"
                raise Unsupported(what, "Nothing was written.", f"Leave it out: {arg(exclude=literal(key))}")
            after, before = (node[key].transpose() if True in turned else node[key] for node in (tuned, base))
            deltas.append(low_rank_change(key, module, after, before, rank, dtype))
            clamped += [key] if deltas[-1].rank < rank else []
        elif module in saved or (module in low and key in changed):
            name = key if module in saved else f"{module}.base_layer.bias"
            entry = tuned[key]
            if key in aliases:  # PEFT looks for every name in the file, tied or not
                entry = entry.alone()
            whole_deltas[name] = Delta(MODEL, key, {"": entry}, {"": f"{MODEL}{name}"})
    if not deltas:
        what = f"nothing that differs between {names[0]} and {names[1]} is a layer's matrix: {listed(sorted(changed))}"
        why = "Possible embeddings are taken whole, and PEFT loads no adapter without a low-rank matrix."
        raise Unsupported(what, f"{why} Nothing was written.")
    if len(clamped) == len(deltas):
        largest = max(delta.rank for delta in deltas)
        what = f"rank {rank:,} is higher than that of any matrix that changed"
        why = f"The highest is {largest:,}, which keeps everything."
        raise UsageError(what, why, f"For example: {arg(rank=largest)}")
    tied_names = {*aliases, *aliases.values()}
    is_alone = "lm_head.weight" in tied_names and len(tied_names) == 2 and "lm_head.bias" not in base
    config = {
        "base_model_name_or_path": None,  # which other programs read, though PEFT needs it not
        "bias": "lora_only" if any(name.endswith(".base_layer.bias") for name in whole_deltas) else "none",
        "ensure_weight_tying": "lm_head" in saved and is_alone,  # PEFT makes every other one a Linear without bias
        "fan_in_fan_out": any(True in turns(f"{delta.module}.weight") for delta in deltas),
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": sorted(saved) or None,
        "task_type": None,
        "use_rslora": False,
    }
    modules = (key[:-7] for key in base if type(key) is str and key.endswith(".weight"))
    ranks = {delta.module: delta.rank for delta in deltas}
    other_modules = [name for name in modules if name not in ranks]
    facts = {
        "base": names[1],
        "ranks": ranks,
        "whole": [delta.module for delta in whole_deltas.values()],
        "unchanged": len(chosen) - len(changed) - len(aliases),
        "tied": list(aliases),
    }
    return stored(Adapter(PEFT, (*deltas, *whole_deltas.values()), config), PEFT, other_modules), facts, clamped


def _low_and_whole(
    tuned: Mapping[Any, Any], base: Mapping[Any, Any], changed: set[str], aliases: Mapping[str, str], model: MemoryTree
) -> tuple[set[str], set[str], set[str]]:
    """The modules whose weights change by a product of low rank; those that are taken whole; and of these, the ones
    taken only because PEFT compares the ends of names, even within words."""
    ties = {*(model.ties or {}), *(model.ties or {}).values()}
    heads = {pair[1] for pair in aliases.items() for key in pair if key in ties or EMBEDDING.fullmatch(key)}
    shapes = {key: getattr(entry, "shape", None) for key, entry in base.items()}
    low = set[str]()
    for key in changed:
        module, shape, dtypes = key.removesuffix(".weight"), base[key].shape, (tuned[key].dtype, base[key].dtype)
        if key.endswith("weight") and not all(dtype.is_float and dtype.itemsize > 1 for dtype in dtypes):
            why = "The difference of codes is not a difference of weights. Nothing was written."
            fix = f"Dequantize it first: {command('cast', FILE, dequantize=True, dtype='bf16', out=OUT)}"
            raise Unsupported(f"{key} is quantized: it holds codes, whose scales are elsewhere", why, fix)
        is_depthwise = len(shape) > 2 and shape[1] == 1
        is_matrix = module != key and 2 <= len(shape) <= 5 and not is_depthwise and not EMBEDDING.fullmatch(key)
        is_odd = f".{module}".endswith(tuple(f".{end}" for end in model.odd))
        if is_matrix and key not in heads and not is_odd and is_linear(module, shapes):
            low.add(module)
    key_of = {key.rpartition(".")[0]: key for key in {**base, **tuned} if type(key) is str}
    parents = {module[: dot.start()] for module in key_of for dot in re.finditer(r"\.", module)} | {""}
    saved: set[str] = set()
    for key in base:
        module, _, leaf = str(key).rpartition(".")
        is_low = module in low and leaf in ("weight", "bias")
        if (key not in changed and aliases.get(key) not in heads & changed) or is_low:
            continue
        if module not in parents:
            saved.add(module)
        elif key not in ties:  # a tied key's other name belongs to a module of its own
            raise _not_in_adapter(key)
    matching = {module for module in key_of if module.endswith(tuple(saved))}
    if odd := sorted(matching & parents):
        raise _not_in_adapter(key_of[odd[0]])
    return low - matching, matching, matching - saved


def _not_in_adapter(key: str) -> Unsupported:
    what = f"{key} changed, but a PEFT adapter cannot hold it"
    why = "It is not a matrix, and PEFT saves whole modules only if they contain no others. Nothing was written."
    return Unsupported(what, why, f"Leave it out: {arg(exclude=literal(key))}")


def _differing(tuned: Mapping[Any, Any], base: Mapping[Any, Any], chosen: set[str]) -> tuple[set[str], dict[str, str]]:
    """The names of tensors that differ; and of those tied to an earlier one in both models, each with that one."""
    first_keys: dict[Any, str] = {}
    changed: set[str] = set()
    tied: dict[str, str] = {}
    for key in over([key for key in base if key in chosen], lambda key: 2 * base[key].nbytes):
        after, before = tuned[key], base[key]
        first = first_keys.setdefault((after.view, before.view), key)
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
