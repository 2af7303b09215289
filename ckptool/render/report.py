"""Renders `report` as a page, as text and as JSON."""

from __future__ import annotations

from html import escape

from ckptool.analysis.report import CheckpointReport, FileReport
from ckptool.checkpoint.registry import provides
from ckptool.errors import MissingExtra, counted, printable
from ckptool.facts import size
from ckptool.render.json import document, picked_of
from ckptool.render.style import PLAIN, Style, notes_text


@provides("page", CheckpointReport)
def page(report: CheckpointReport) -> str:
    """The page: one file, which makes no requests. Raises `MissingExtra` where jinja2 is not installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        what = "a report page needs jinja2, which is not installed"
        raise MissingExtra(what, "", "pip install 'ckptool[report]'") from error
    from ckptool.render.report_page import report_page

    return report_page(report)


# Text, JSON and notebooks ---------------------------------------------------------------------------------------------


@provides("text", CheckpointReport)
def report_text(found: CheckpointReport, *, style: Style = PLAIN) -> str:
    """One line: the tensors that were read, the problems, and where the page is; then what to know of the file."""
    read, total = (sum(getattr(file.health, name) for file in found.files) for name in ("read", "tensors"))
    tensors = counted(total, "tensor") if read == total else f"{read:,} of {counted(total, 'tensor')}"
    facts = f"{counted(len(found.files), 'file')}, " * (len(found.files) > 1) + f"{tensors} read"
    count = found.problems
    problems = style.yellow(counted(count, "problem")) if count else style.green("no problems")
    where = f" → {printable(found.out)} ({size(found.bytes)})" if found.out else "; no page was written: -o OUT.html"
    notes = notes_text(found.notes, style)
    return f"report: {facts}, {problems}{where}\n" + (f"{notes}\n" if notes else "")


document(CheckpointReport, "report", "files diff fit run history norms distances out bytes notes")
picked_of(FileReport, "inspect=inspection doctor=diagnosis pictures health")


@provides("html", CheckpointReport)
def report_html(found: CheckpointReport) -> str:
    """A summary for notebooks; `.html()` gives the page."""
    return f"<div>{escape(str(found))}</div>"
