"""`lora resize`: an adapter in a smaller rank."""

from __future__ import annotations

from typing import Any

from ckptool.commands import verb
from ckptool.errors import counted, listed
from ckptool.transforms.lora.low_rank import resize
from ckptool.verbs._adapters import NEW_ADAPTER, AdapterArgument, ConfigOption, Rank, open_adapter, write_adapter
from ckptool.verbs._options import Out
from ckptool.verbs._save import Row, Save, Unpack, Written, change_of


@verb(
    ("ckptool lora resize adapter --rank 8 -o small/", "by the SVD of every product, with its error"),
    one_output=NEW_ADAPTER,
)
def lora_resize(
    adapter: AdapterArgument, out: Out = None, *, rank: Rank, config: ConfigOption = None, **options: Unpack[Save]
) -> Written | Any:
    """Writes a LoRA adapter with every module in at most rank `rank`, under its names and with its scale.

    By the best approximation of each product; the report has the error of each. DoRA's magnitudes stay as they are.
    Raises `Unsupported` for LoHa and LoKr, `UsageError` for a rank below 1, or higher than that of any module.
    """
    change = change_of("lora resize", out, options, adapter)
    checkpoint, parsed = open_adapter(adapter, config)
    resized, cut = resize(parsed, rank)
    saved = write_adapter(change, checkpoint, resized)
    errors = {product.name: product.error for product in cut if product.error is not None}  # known once it is written
    worst = [f"{name} {error:.2%}" for name, error in sorted(errors.items(), key=lambda error: -error[1])]
    remarks = []
    if cut and (dora := sum(delta.magnitude is not None for delta in parsed.products)):
        remarks = [f"the magnitudes of {counted(dora, 'module')} (DoRA) are unchanged: only directions lose precision"]
    ranks = listed([f"{old:,}" for old in sorted({product.rank for product in parsed.products})], 4)
    return saved.about(
        f"{counted(len(parsed.products), 'module')} of rank {ranks} in rank {rank:,}",
        Row("rank", rank),
        Row("modules", len(parsed.products)),
        Row("errors", errors, [f"lost of each product's norm: {listed(worst, 4)}"] if worst else []),
        *remarks,
        notes=parsed.notes,
    )
