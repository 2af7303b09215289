"""Adapters in another rank: smaller, by the SVD of each product; or larger, by zeros. Names stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.adapter_keys import BIAS, WHOLE
from ckptool.errors import LimitExceeded, UsageError, counted, printable
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


@dataclass(frozen=True, slots=True)
class ResizedAdapter:
    """The adapter, its old ranks, and for each module in a smaller one what was cut off, which is known once written.

    dora: modules whose magnitudes stay as they are.
    """

    stored: AdapterFile
    ranks: tuple[int, ...]
    truncations: tuple[Truncation, ...]
    dora: int


def resize(
    node: Mapping[Any, Any], adapter: Adapter, rank: int, *, name: str, metadata: Mapping[str, Any]
) -> ResizedAdapter:
    """The state dict of an adapter with every module in this rank, and the same scale.

    name: of its file.  metadata: of its file. Raises `Unsupported` for what is no product of two factors,
    `UsageError` for a rank that is none.
    """
    if not 1 <= rank <= MAX_RANK:
        raise UsageError(f"rank {rank:,} is not from 1 to {MAX_RANK:,}", "", "For example: --rank 16")
    refuse_others(adapter, name)
    tree: dict[str, TensorEntry] = dict(node)
    truncations: list[Truncation] = []
    deltas = []
    for delta in adapter.products:
        made = _resized(delta, rank, bool(adapter.config.get("use_rslora")), truncations)
        deltas.append(made)
        tree |= {delta.keys[role]: entry for role, entry in made.factors.items()}
        if "alpha" in delta.keys and rank != delta.rank:
            tree[delta.keys["alpha"]] = alpha_tensor(alpha_of(made), node[delta.keys["alpha"]].dtype)
    others = (delta for delta in adapter.deltas if delta.method in (BIAS, WHOLE))
    changed = replace(adapter, deltas=(*deltas, *others))
    config = None
    if adapter.config:
        own = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
        config = {**adapter.config} | {each: value for each, value in peft_config(changed).items() if each in own}
    texts = {key: value for key, value in metadata.items() if isinstance(value, str)}
    if DIFFUSERS_CONFIG in texts and not any("alpha" in delta.keys for delta in deltas):
        fields = json.loads(texts[DIFFUSERS_CONFIG]) | diffusers_metadata(changed)
        texts[DIFFUSERS_CONFIG] = json.dumps(fields, indent=2)
    dora = sum(delta.magnitude is not None for delta in deltas)
    return ResizedAdapter(
        AdapterFile(tree, config, texts), tuple(each.rank for each in adapter.products), tuple(truncations), dora
    )


def _resized(delta: Delta, rank: int, rs: bool, truncations: list[Truncation]) -> Delta:
    a, b = delta.factors["A"], delta.factors["B"]
    if rank == delta.rank:
        return delta
    if rank > delta.rank:
        factors = {"A": padded(a, 0, rank), "B": padded(b, 1, rank)}
    elif a.numel + b.numel > MAX_FACTORS:
        what = f"{printable(delta.module)} has {counted(a.numel + b.numel, 'element')}"
        raise LimitExceeded(what, f"At most {MAX_FACTORS:,} are computed at once.")
    else:
        truncations.append(Truncation(delta.module, b, a, rank))
        factors = truncations[-1].factors()
    changed = replace(delta, factors=factors, rank=rank)
    return changed if delta.alpha is None else replace(changed, alpha=alpha_of(changed, rs))
