"""Renders `doctor` as text and JSON."""

from __future__ import annotations

from ckptool.checkpoint.registry import provides
from ckptool.errors import printable
from ckptool.render.json import Json
from ckptool.render.style import PLAIN, Style
from ckptool.reports.doctor import Diagnosis
from ckptool.reports.findings import Finding


@provides("text", Diagnosis)
def doctor_text(found: Diagnosis, *, style: Style = PLAIN) -> str:
    """The file's kind, then each finding: what is wrong, the message that people see, and the commands, in order."""
    head = printable(found.file) or "in memory"
    lines = [f"{style.bold(head)}: {printable(found.is_a)}"] if found.is_a else []
    if not found.findings:
        lines.append(style.green("found nothing that would keep it from loading"))
        if not found.against:
            lines.append("To check these names and shapes against a model: --against MODEL")
    number = 0
    for finding in found.findings:
        kind = style.red("problem") if finding.blocks else style.yellow("note")
        mark = kind if finding.certain else style.yellow("likely")
        lines += ["", f"{mark} [{finding.code}] {printable(finding.what)}"]
        lines += [f"  seen as: {style.dim(printable(finding.says))}"] if finding.says else []
        for fix in finding.fixes:
            number += 1
            lines.append(f"  {number}. {style.cyan(printable(fix))}{_program(fix)}")
        lines += [f"  {printable(finding.advice)}"] if finding.advice else []
    if found.unread:
        lines += [
            "",
            f"Only names, shapes and tables were read, not the tensors' data: {style.cyan(printable(found.unread))}",
        ]
    return "\n".join(lines).lstrip("\n") + "\n"


def _program(fix: str) -> str:
    """Marks a command of another program."""
    return "" if fix.startswith("ckptool ") else f"   (another program: {printable(fix.split(' ', 1)[0])})"


# JSON ----------------------------------------------------------------------------------------------------------------


@provides("json", Diagnosis)
def doctor_json(found: Diagnosis) -> Json:
    """`ckptool.doctor/1`: what the file is and every finding with its commands."""
    return {
        "schema": "ckptool.doctor/1",
        "file": found.file or None,
        "is": found.is_a or None,
        "loads": found.loads,
        "unread": found.unread or None,
        "against": found.against or None,
        "findings": [_finding_json(finding) for finding in found.findings],
    }


def _finding_json(finding: Finding) -> Json:
    return {
        "code": finding.code,
        "what": finding.what,
        "seen_as": finding.says or None,
        "blocks": finding.blocks,
        "certain": finding.certain,
        "fixes": [{"command": fix, "ckptool": fix.startswith("ckptool ")} for fix in finding.fixes],
        "advice": finding.advice or None,
    }
