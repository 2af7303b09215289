"""Reports as HTML for notebooks: plain tables, everything escaped, no scripts, at home in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import counted, printable
from ckptool.render.inspection import branch_detail, overview
from ckptool.render.outline import Branch
from ckptool.render.style import size
from ckptool.render.text import notes_text
from ckptool.reports.inspect import Listing, Part, listing, parts

if TYPE_CHECKING:
    from ckptool.reports.inspect import Inspection

_CELL = "text-align:left;padding:0 1em 0 0;vertical-align:top;white-space:pre"
_BAR = "display:inline-block;height:0.7em;background:currentColor;opacity:0.4"


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """An opened checkpoint: its parts and an outline of their tensors."""
    return _listing_html(listing(checkpoint), ())


def inspection_html(found: Inspection) -> str:
    """What `inspect` found, with the notes."""
    return _listing_html(found.listing, found.notes)


def _listing_html(found: Listing, notes: Sequence[Note]) -> str:
    shown, hidden = overview(parts(found))
    biggest = max((part.bytes or 0 for part in shown), default=0)
    rows: list[str] = []
    for part in shown:
        rows.append(_row(part.name, part.bytes, biggest, part.detail, 0))
        if part.outline is not None:
            rows += _branches(part.outline, part.part, biggest, 1)
    if hidden:
        rows.append(_row("…", None, biggest, f"{hidden:,} more", 0))
    name = escape(printable(found.file) or "checkpoint")
    facts = f"{escape(found.container)}, {counted(len(found.tensors), 'tensor')}, {size(found.tensor_bytes)}"
    told = f"<pre>{escape(notes_text(notes))}</pre>" if notes else ""
    return f"<div><b>{name}</b>: {facts}<table>{''.join(rows)}</table>{told}</div>"


def _branches(branch: Branch, part: Part, biggest: int, level: int) -> Iterable[str]:
    for child in branch.expanded:
        yield _row(child.label, child.size, biggest, branch_detail(child, part), level)
        yield from _branches(child, part, biggest, level + 1)
    if branch.hidden:
        yield _row("…", None, biggest, f"{branch.hidden:,} more", level)


def _row(label: str, nbytes: int | None, biggest: int, detail: str, level: int) -> str:
    width = round(8 * (nbytes or 0) / biggest, 2) if biggest else 0
    drawn = f'<span style="{_BAR};width:{width}em"></span>' if width else ""
    cells = (f"{'  ' * level}{escape(label)}", "" if nbytes is None else size(nbytes), drawn, escape(detail))
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"
