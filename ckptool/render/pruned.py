"""What `prune` deleted of a run, as text and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.errors import counted, printable
from ckptool.render.json import Json
from ckptool.render.style import PLAIN, Style, columns, size

if TYPE_CHECKING:
    from ckptool.reports.training import Pruned


def pruned_text(found: Pruned, *, style: Style = PLAIN) -> str:
    """What goes, and what stays with why."""
    freed = sum(nbytes for _, nbytes in found.deleted)
    verb = "would delete" if found.dry_run else "deleted"
    lines = [f"{style.bold(printable(found.run))}: {verb} {counted(len(found.deleted), 'checkpoint')}, {size(freed)}"]
    rows = [(f"step {step:,}", "deleted" if not found.dry_run else "would go") for step, _ in found.deleted]
    rows += [(f"step {step:,}", f"kept: {', '.join(why)}") for step, why in found.kept.items()]
    return "\n".join([*lines, *columns(sorted(rows, key=lambda row: int(row[0][5:].replace(",", ""))))]) + "\n"


# JSON ----------------------------------------------------------------------------------------------------------------


def pruned_json(found: Pruned) -> Json:
    """`ckptool.prune/1`: the steps that went, and those that stay."""
    return {
        "schema": "ckptool.prune/1",
        "run": found.run,
        "dry_run": found.dry_run,
        "deleted": [{"step": step, "bytes": nbytes} for step, nbytes in found.deleted],
        "kept": [{"step": step, "why": list(why)} for step, why in found.kept.items()],
    }
