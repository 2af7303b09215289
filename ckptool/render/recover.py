"""A recovered file, as text and JSON."""

from __future__ import annotations

from collections import defaultdict

from ckptool.checkpoint.registry import provides
from ckptool.errors import counted, listed, printable
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style, columns, notes_text, size
from ckptool.reports.recover import Recovery

SHOWN = 20


@provides("text", Recovery)
def recover_text(done: Recovery, *, style: Style = PLAIN) -> str:
    """The outcome of a recovery: what was recovered, what is lost and why, and where it was written."""
    lines = [*_verdict(done, style)]
    if done.damage:
        lines.append(f"  found: {printable(done.damage)}")
    if done.how:
        lines.append(f"  {done.how}")
    if not done.proven and not done.raw:
        lines.append("  the file has no checksums: nothing proves that these are the right bytes")
    lines += _lost(done, style)
    lines += _filled(done, style)
    where = f"{printable(done.output)} ({done.container}, {size(done.file_bytes)})"
    lines.append(f"would be written to {where}; dry run: nothing was written" if done.dry_run else f"→ {where}")
    notes = notes_text(done.notes, style)
    return "\n".join([*lines, *([notes] if notes else [])]) + "\n"


def _verdict(done: Recovery, style: Style) -> list[str]:
    name = style.bold(printable(done.file))
    records = f"{done.whole:,} of {counted(done.records, 'record')} {'proven' if done.proven else 'there'}"
    if done.raw:
        return [
            f"{name}: {style.yellow('bytes only')}, {records}",
            "  its pickle, which says which record is which tensor, is lost: each record is kept as bytes by its name",
        ]
    if done.complete and not (done.damage or done.how):
        return [f"{name}: {style.green('nothing is missing')}, {counted(done.tensors or 0, 'tensor')} ({records})"]
    if done.complete:
        return [
            f"{name}: {style.green('everything was recovered')}, {counted(done.tensors or 0, 'tensor')} ({records})"
        ]
    gone = f"{len(done.lost):,} lost" + (f", {len(done.filled):,} filled in" if done.filled else "")
    back = f"{done.back:,} of {counted(done.tensors or 0, 'tensor')} recovered"
    return [f"{name}: {style.yellow('incomplete')}, {back}, {gone} ({records})"]


def _lost(done: Recovery, style: Style) -> list[str]:
    if not (done.lost or (done.raw and done.lost_records)):
        return []
    rows = [(printable(item.address) or "(the whole file)", size(item.nbytes), item.why) for item in done.lost]
    if done.raw:
        rows = [(printable(record.name), size(record.nbytes), record.why) for record in done.lost_records]
    lines = [style.bold(f"lost ({len(rows):,})"), *_few(columns(rows, right=(1,)))]
    if done.dropped:
        names = listed([printable(name) for name in done.dropped], SHOWN)
        lines.append(f"  dropped with them, as half of an optimizer's state is worse than none: {names}")
    return lines


def _filled(done: Recovery, style: Style) -> list[str]:
    lines = []
    if done.filled:
        title = f"filled in from {printable(done.filled_from)} ({len(done.filled):,}); every later inspect reports it"
        rows = [printable(here) + ("" if here == there else f" from {printable(there)}") for here, there in done.filled]
        lines += [style.bold(title), *_few([f"  {row}" for row in rows])]
    if done.refused:
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, why in done.refused:
            reasons[why].append(printable(name))
        lines.append(style.bold(f"not filled in ({len(done.refused):,})"))
        lines += [f"  {printable(why)}: {listed(names, SHOWN)}" for why, names in reasons.items()]
    return lines


def _few(lines: list[str]) -> list[str]:
    if len(lines) <= SHOWN + 1:
        return lines
    return [*lines[:SHOWN], f"  … {len(lines) - SHOWN:,} more (--json lists them)"]


# JSON -----------------------------------------------------------------------------------------------------------------


document(
    Recovery,
    "recovery",
    "file output container complete dry_run damage how proven raw tensors back records whole_records=whole file_bytes"
    " lost lost_records dropped filled_from filled:address,from refused:address,why notes",
)
