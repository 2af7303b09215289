"""Adapters in a smaller rank, by the SVD of each product. Names stay as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from ckptool.checkpoint import TensorEntry
from ckptool.commands import arg
from ckptool.conventions.adapter_keys import BIAS, WHOLE
from ckptool.errors import LimitExceeded, UsageError, counted, listed
from ckptool.transforms.lora.adapters import DIFFUSERS_CONFIG, MAX_RANK, Adapter
from ckptool.transforms.lora.low_rank import MAX_FACTORS, Truncation
from ckptool.transforms.lora.schemes import (
    AdapterFile,
    alpha_of,
    alpha_tensor,
    diffusers_metadata,
    peft_config,
    refuse_others,
)


def resize(adapter: Adapter, rank: int) -> AdapterFile:
    """The adapter with every module in at most this rank, under its names and with the same scale.

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
    ranks = listed([f"{each:,}" for each in sorted({each.rank for each in adapter.products})], 4)
    summary = f"{counted(len(deltas), 'module')} of rank {ranks} in rank {rank:,}"

    def errors() -> dict[str, float]:
        return {each.name: each.error for each in truncations if each.error is not None}

    def details() -> Iterator[str]:
        if worst := sorted(errors().items(), key=lambda error: -error[1]):
            yield f"cut off, of the norm of each product: {listed([f'{name} {error:.2%}' for name, error in worst], 4)}"
        if (dora := sum(delta.magnitude is not None for delta in deltas)) and truncations:
            yield f"the magnitudes of {counted(dora, 'module')} (DoRA) are as before: only directions lose something"

    facts = {"rank": rank, "modules": len(deltas)}
    return AdapterFile(tree, config, texts, summary, lambda: {**facts, "errors": errors()}, details())
