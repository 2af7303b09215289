"""`lora resize`: an adapter in another rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptool.checkpoint.state_dicts import one_state_dict
from ckptool.errors import counted, listed, printable
from ckptool.formats.opening import PathLike, open_whole
from ckptool.reports.save import Written
from ckptool.transforms.lora.resize_rank import ResizedAdapter, resize
from ckptool.verbs._adapters import output_of_adapter, save_adapter
from ckptool.verbs._save import SaveOptions, written
from ckptool.verbs.lora_merge import open_adapter

if TYPE_CHECKING:
    from typing_extensions import Unpack


def lora_resize(
    adapter: PathLike,
    out: PathLike | None = None,
    *,
    rank: int,
    config: PathLike | None = None,
    **options: Unpack[SaveOptions],
) -> Written:
    """Writes an adapter of LoRA with every module in rank `rank`, under its names and with its scale.

    Smaller: the best approximation of each product; the report has the error of each. Larger: zeros are added, and the
    product stays as it is, bit for bit. DoRA's magnitudes stay as they are.  config: its adapter_config.json, if that
    is not beside it.
    Raises `Unsupported` for LoHa and LoKr, `UsageError` for a rank that is none.
    """
    output = output_of_adapter("lora resize", out, options)
    opened = open_whole(adapter)
    found = open_adapter(opened, config)
    root, _ = one_state_dict(opened.checkpoint, opened.at)
    name = printable(opened.path)
    made = resize(root.node, found, rank, name=name, metadata=opened.checkpoint.metadata)
    saved = save_adapter(output, opened.checkpoint, made.stored)
    errors = {each.name: each.error for each in made.truncations if each.error is not None}
    ranks = listed([f"{each:,}" for each in sorted(set(made.ranks))], 4)
    return written(
        output,
        opened.checkpoint,
        saved,
        f"{counted(len(made.ranks), 'module')} of rank {ranks} in rank {rank:,}",
        facts={"rank": rank, "modules": len(made.ranks), "errors": errors},
        details=_details(made, errors),
        notes=found.notes,
    )


def _details(made: ResizedAdapter, errors: dict[str, float]) -> Iterator[str]:
    if errors:
        worst = sorted(errors.items(), key=lambda item: -item[1])
        shown = [f"{printable(name)} {error:.2%}" for name, error in worst]
        yield f"cut off, of the norm of each product: {listed(shown, 4)}"
    if made.dora and made.truncations:
        yield f"the magnitudes of {counted(made.dora, 'module')} (DoRA) are as before: only directions lose something"
