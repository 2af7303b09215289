"""Adapters in another rank: smaller, by the SVD of each product; or larger, by zeros. Names stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.adapter_keys import LORA, PEFT, adapter_key
from ckptool.errors import LimitExceeded, Unsupported, UsageError, counted, printable
from ckptool.transforms.lora.adapters import DIFFUSERS_CONFIG, MAX_RANK, Adapter, Delta
from ckptool.transforms.lora.extract import MAX_FACTORS
from ckptool.transforms.lora.low_rank import Truncation
from ckptool.transforms.lora.schemes import Stored, alpha_of, alpha_tensor, diffusers_metadata, peft_config
from ckptool.transforms.views import padded


@dataclass(frozen=True, slots=True)
class Resized:
    """The adapter, its old ranks, and for each module in a smaller one what was cut off, which is known once written.

    dora: modules whose magnitudes stay as they are.
    """

    stored: Stored
    ranks: tuple[int, ...]
    truncations: tuple[Truncation, ...]
    dora: int


def resize(node: Mapping[Any, Any], adapter: Adapter, rank: int, *, name: str, metadata: Mapping[str, Any]) -> Resized:
    """The state dict of an adapter with every module in this rank, and the same scale.

    name: of its file.  metadata: of its file. Raises `Unsupported` for what is no product of two factors,
    `UsageError` for a rank that is none.
    """
    if not 1 <= rank <= MAX_RANK:
        raise UsageError(f"rank {rank:,} is not from 1 to {MAX_RANK:,}", "", "For example: --rank 16")
    if adapter.config.get("target_parameters"):
        raise Unsupported(f"{name} is for parameters of experts", "Each of its experts has a rank of its own.")
    tree: dict[str, TensorEntry] = dict(node)
    truncations: list[Truncation] = []
    deltas = []
    scheme = PEFT if "peft_type" in adapter.config else None
    rs = bool(adapter.config.get("use_rslora"))
    for delta in adapter.deltas:
        if delta.method != LORA or delta.factors.keys() != {"A", "B"}:
            kind = delta.method if delta.method != LORA else "LoRA with lora_mid"
            what = f"{name}: {printable(delta.module)} is {kind}"
            raise Unsupported(what, "Its rank is not that of one product. Nothing was written.")
        made = _resized(delta, rank, rs, truncations)
        deltas.append(made)
        for key in delta.keys:
            role = adapter_key(key, scheme).role
            if role in made.factors:
                tree[key] = made.factors[role]
            elif role == "alpha" and rank != delta.rank:
                tree[key] = alpha_tensor(alpha_of(made), node[key].dtype)
    changed = replace(adapter, deltas=tuple(deltas))
    config = None
    if adapter.config:
        own = peft_config(changed)
        config = {
            **adapter.config,
            **{field: own[field] for field in ("r", "lora_alpha", "rank_pattern", "alpha_pattern")},
        }
    texts = {key: value for key, value in metadata.items() if isinstance(value, str)}
    if DIFFUSERS_CONFIG in texts and "alpha" not in {adapter_key(key, scheme).role for key in node}:
        texts[DIFFUSERS_CONFIG] = json.dumps(
            json.loads(texts[DIFFUSERS_CONFIG]) | diffusers_metadata(changed), indent=2
        )
    dora = sum(delta.magnitude is not None for delta in deltas)
    return Resized(Stored(tree, config, texts), tuple(each.rank for each in adapter.deltas), tuple(truncations), dora)


def _resized(delta: Delta, rank: int, rs: bool, truncations: list[Truncation]) -> Delta:
    a, b = delta.factors["A"], delta.factors["B"]
    if rank < delta.rank:
        if a.numel + b.numel > MAX_FACTORS:
            what = f"{printable(delta.module)} has {counted(a.numel + b.numel, 'element')}"
            raise LimitExceeded(what, f"At most {MAX_FACTORS:,} are computed at once.")
        truncations.append(Truncation(delta.module, b, a, rank))
        factors = truncations[-1].factors()
    elif rank > delta.rank:
        factors = {"A": padded(a, 0, rank), "B": padded(b, 1, rank)}
    else:
        return delta
    changed = replace(delta, factors=factors, rank=rank)
    return changed if delta.alpha is None else replace(changed, alpha=alpha_of(changed, rs))
