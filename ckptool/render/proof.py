"""What `prove` found, as text and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ckptool.errors import counted, printable
from ckptool.render.json import Json
from ckptool.render.style import PLAIN, Style

if TYPE_CHECKING:
    from ckptool.training.prove.proof import Proof


def proof_text(found: Proof, *, style: Style = PLAIN) -> str:
    """The reference, the kills, what was resumed from, the result, and what each part of the state is needed for."""
    same = found.result == found.reference
    kills = ", ".join(f"{kill.at} ({kill.signal})" for kill in found.kills)
    resumed = ", ".join("the beginning" if kill.resumed is None else str(kill.resumed) for kill in found.kills)
    rows = [("processes", f"{found.processes}, which train together (ddp)")] if found.processes > 1 else []
    rows += [
        ("reference", f"{counted(found.steps, 'step')}  sha256 {found.reference[:8]}…"),
        ("killed at", kills or "it ended before it could be killed"),
        ("resumed from", resumed or "nothing"),
        (
            "result",
            f"{counted(found.steps, 'step')}  sha256 {found.result[:8]}…   {'identical file' if same else 'another file'}",
        ),
    ]
    if found.events is not None:
        rows.append(("every event", f"{counted(found.events, 'kill')}, each ended with the same bytes"))
    for part, differs in found.without.items():
        if differs is not None:
            words = "differs (so it is needed)" if differs else "ends the same: it is saved, but has no effect"
            rows.append((f"without {part}", words))
    lines = [f"{name:<22}{value}" for name, value in rows]
    if found.lost:
        lines.append("a run went on from before a checkpoint that it had: it deletes old ones before new ones are safe")
    if found.proved:
        lines.append(style.green("proved: a run killed anywhere ends with the same bytes."))
    else:
        lines.append(style.red("disproved") + (f": {printable(found.differs)}" if found.differs else ""))
        lines.append(f"  its runs are kept in {printable(found.kept)}")
    return "\n".join(lines) + "\n"


# JSON ----------------------------------------------------------------------------------------------------------------


def proof_json(found: Proof) -> Json:
    """`ckptool.prove/1`: digests, kills and ablations."""
    return {"schema": "ckptool.prove/1", "proved": found.proved, **asdict(found)}
