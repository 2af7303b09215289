"""Renders what a verb wrote as text and JSON."""

from __future__ import annotations

from ckptool.analysis.save import Written
from ckptool.checkpoint.registry import provides
from ckptool.errors import printable
from ckptool.facts import size
from ckptool.formats import named
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style, notes_text


@provides("text", Written)
def save_text(written: Written, style: Style = PLAIN) -> str:
    """What a verb wrote, or would write: one line, then details and notes."""
    facts = [size(written.file_bytes), "in place" if written.how == "in place" else written.how]
    if written.how == "in place":
        facts[1] = f"in place, {written.bytes_written:,} bytes {'to be ' if written.dry_run else ''}added"
    elif written.how == "new file" and named(written.container).writes_folder:
        facts[1] = "new folder"
    if written.how == "nothing":
        facts[1] = "unchanged"
    facts += ["verified"] if written.verified else []
    where = f"written to {printable(written.output)}" if written.output else "returned"
    where += f" ({', '.join(facts)})"
    verb = style.bold(written.verb)
    if written.dry_run:
        lines = [f"{verb}: {written.summary}; would be {where}", "  dry run: nothing was written"]
    else:
        lines = [f"{verb}: {written.summary} → {where.removeprefix('written to ')}"]
    lines += [f"  {line}" for line in written.details]
    notes = notes_text(written.notes, style)
    return "\n".join([*lines, *([notes] if notes else [])]) + "\n"


document(
    Written,
    "written",
    "verb file output container how dry_run verified bytes_written file_bytes summary facts details notes",
)
