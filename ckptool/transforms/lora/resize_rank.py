"""Adapters in another rank: smaller, by the SVD of each product; or larger, by zeros. Names stay as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.adapter_keys import BIAS, WHOLE
from ckptool.commands import arg
from ckptool.errors import LimitExceeded, UsageError, counted, listed
from ckptool.transforms.lora.adapters import DIFFUSERS_CONFIG, MAX_RANK, Adapter, Delta
from ckptool.transforms.lora.low_rank import MAX_FACTORS, Truncation
from ckptool.transforms.lora.schemes import (
    AdapterFile,
    alpha_of,
    alpha_tensor,
    diffusers_metadata,
    peft_config,
    refuse_others,
)
from ckptool.transforms.views import padded


def resize(adapter: Adapter, rank: int) -> AdapterFile:
    """The adapter with every module in this rank, under its names and with the same scale.

    Raises `Unsupported` for what is no product of two factors, `UsageError` for a rank that is none.
    """
    if not 1 <= rank <= MAX_RANK:
        raise UsageError(f"rank {rank:,} is not from 1 to {MAX_RANK:,}", "", f"For example: {arg(rank=16)}")
    refuse_others(adapter)
    tree: dict[str, TensorEntry] = dict(adapter.tree)
    truncations: list[Truncation] = []
    deltas = []
    for delta in adapter.products:
        made = _resized(delta, rank, bool(adapter.config.get("use_rslora")), truncations)
        deltas.append(made)
        tree |= {delta.keys[role]: entry for role, entry in made.factors.items()}
        if "alpha" in delta.keys and rank != delta.rank:
            tree[delta.keys["alpha"]] = alpha_tensor(alpha_of(made), adapter.tree[delta.keys["alpha"]].dtype)
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
    ranks = listed([f"{each:,}" for each in sorted({each.rank for each in adapter.products})], 4)
    summary = f"{counted(len(deltas), 'module')} of rank {ranks} in rank {rank:,}"

    def facts() -> dict[str, Any]:
        errors = {each.name: each.error for each in truncations if each.error is not None}
        return {"rank": rank, "modules": len(deltas), "errors": errors}

    dora = sum(delta.magnitude is not None for delta in deltas)
    return AdapterFile(tree, config, texts, summary, facts, _details(truncations, dora))


def _details(truncations: Sequence[Truncation], dora: int) -> Iterator[str]:
    worst = sorted(((each.error, each.name) for each in truncations if each.error is not None), key=lambda it: -it[0])
    if worst:
        shown = [f"{name} {error:.2%}" for error, name in worst]
        yield f"cut off, of the norm of each product: {listed(shown, 4)}"
    if dora and truncations:
        yield f"the magnitudes of {counted(dora, 'module')} (DoRA) are as before: only directions lose something"


def _resized(delta: Delta, rank: int, rs: bool, truncations: list[Truncation]) -> Delta:
    a, b = delta.factors["A"], delta.factors["B"]
    if rank == delta.rank:
        return delta
    if rank > delta.rank:
        factors = {"A": padded(a, 0, rank), "B": padded(b, 1, rank)}
    elif a.numel + b.numel > MAX_FACTORS:
        what = f"{delta.module} has {counted(a.numel + b.numel, 'element')}"
        raise LimitExceeded(what, f"At most {MAX_FACTORS:,} are computed at once.")
    else:
        truncations.append(Truncation(delta.module, b, a, rank))
        factors = truncations[-1].factors()
    changed = replace(delta, factors=factors, rank=rank)
    return changed if delta.alpha is None else replace(changed, alpha=alpha_of(changed, rs))
