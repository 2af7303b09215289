"""Renders `doctor` as text and JSON."""

from __future__ import annotations

from ckptool.analysis.doctor import Diagnosis
from ckptool.analysis.findings import Finding
from ckptool.checkpoint.registry import provides
from ckptool.errors import printable
from ckptool.render.json import Json, document, fields_json, picked_of
from ckptool.render.style import PLAIN, Style


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


def _finding_json(finding: Finding) -> Json:
    fixes = [{"command": fix, "ckptool": fix.startswith("ckptool ")} for fix in finding.fixes]
    facts = fields_json(finding, "code what seen_as=says? blocks certain")
    return {**facts, "fixes": fixes, "advice": finding.advice or None}


picked_of(Finding, _finding_json)
document(Diagnosis, "doctor", "file? is=is_a? loads unread? against? findings")
