"""How a run ended, or what a rehearsal of it showed, as text and JSON."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from ckptool.errors import counted, printable, quoted
from ckptool.render.json import Json, finite
from ckptool.render.style import PLAIN, Style, short, size


def training_text(found: Any, *, style: Style = PLAIN) -> str:
    """One line of how it ended, and what to type next; of a rehearsal, what it showed."""
    if hasattr(found, "activations"):
        return _rehearsal(found, style)
    path = printable(found.path)
    if found.status == "done":
        return f"{style.green('done')}: {counted(found.step, 'step')} → {path}\n"
    where = f"after {counted(found.step, 'step')}, saved → {path}" if found.step else f"before the first step: {path}"
    return f"{style.yellow('stopped')} {where}\n  {style.cyan(f'ckptool resume {quoted(found.path)}')}\n"


def _rehearsal(found: Any, style: Style) -> str:
    models = ", ".join(
        f"{printable(name)} {counted(count, 'parameter', shown=short)}" for name, count in found.parameters.items()
    )
    kept = size(found.activations)
    if found.without:
        kept += f", {size(found.without)} without activation checkpointing ({1 - found.activations / found.without:.0%} saved)"
    lines = [
        f"{style.green('it runs')}: one step, saved, loaded again, the same to the last bit; nothing was left behind",
        f"  models        {models}, on {found.device}",
        (
            f"  data          {counted(found.train_samples, 'sample')} to train on, {found.val_samples:,} held out; "
            f"{counted(found.steps, 'step')}"
        ),
        f"  step          {found.step_seconds:.3f} s (the first, with all set-up), loss {found.loss:.5g}",
        f"  checkpoint    {size(found.checkpoint_bytes)} in {found.save_seconds:.3f} s",
        f"  activations   {kept}",
    ]
    return "\n".join(lines) + "\n"


# JSON ----------------------------------------------------------------------------------------------------------------


def training_json(found: Any) -> Json:
    """`ckptool.train/1`: how it ended; of a rehearsal, `ckptool.dry_run/1`."""
    schema = "ckptool.dry_run/1" if hasattr(found, "activations") else "ckptool.train/1"
    assert is_dataclass(found) and not isinstance(found, type)
    return {"schema": schema, **finite(asdict(found))}
