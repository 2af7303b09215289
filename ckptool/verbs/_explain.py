"""`explain`: what a code or an error message means, and what fixes it: the rows of `docs/codes.md`, which lies here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

from ckptool.analysis.findings import Diagnosis
from ckptool.commands import FILE, Command, argument, command, nearest, verb
from ckptool.errors import NoMatch, UsageError
from ckptool.facts import LIVE, Report, Table, Told, bold, cyan, dataclass
from ckptool.verbs._options import standard_input

WIDTH = 25  # columns of a code in the list
_CODE = "[a-z][a-z0-9-]*"
# Errors and findings, as they are printed: `error[CODE]`, `problem [CODE]`, `note [CODE]`.
_IN_BRACKETS = re.compile(rf"^(?:.*\berror|problem |note )\[({_CODE})\]", re.MULTILINE)
_NOTE = re.compile(rf"^({_CODE}): ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Code:
    """A code. kind: the title of its table.  facts: the head of each other column -> its text; empty ones left out."""

    code: str
    kind: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Report):
    """The codes that were asked for, or all, of which a list shows only the meaning."""

    schema = "explain/2"

    codes: tuple[Code, ...]
    is_list: Annotated[bool, LIVE] = False

    def told(self) -> Told:
        lists: dict[str, list[tuple[str, str]]] = {}
        for code in self.codes:
            (_, meaning), *columns = [(head, text.replace("`", "")) for head, text in code.facts.items()]
            if self.is_list:
                lists.setdefault(code.kind, []).append((cyan(code.code), meaning))
                continue
            yield ""
            yield bold(code.code), f" ({code.kind})"
            yield from (f"  {meaning}", *(f"  {head}: {text}" for head, text in columns))
        for kind, rows in lists.items():
            yield from ("", Table(rows, kind, hang=WIDTH))


@cache
def all_codes() -> dict[str, Code]:
    """Every code, in the order of the page."""
    codes: dict[str, Code] = {}
    kind, heads = "", [""]
    for line in Path(__file__).with_name("codes.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" |")]
        if line.startswith("## "):
            kind = line[3:]
        elif line.startswith("| code |"):
            heads = cells
        elif line.startswith("| `"):
            code, texts = cells[0].strip("`"), zip(heads[1:], cells[1:], strict=False)
            codes[code] = Code(code, kind, {head: text for head, text in texts if text})
    return codes


@verb(
    ("ckptool explain prefix-module", "a code: what it means, and what fixes it"),
    ("python train.py 2>&1 | ckptool explain -", "any error message of any program"),
    exits=False,
)
def explain(
    code: Annotated[
        str, argument("[CODE|-]", "A code, or a message; -: one on standard input. Without it: list all codes.")
    ] = "",
) -> Explanation | Diagnosis:
    """The explanation of a code, or of the message that is piped in; without a code the list of all.

    Raises `NoMatch` for an unknown code or message.
    """
    codes = all_codes()
    if code == "-" or " " in code.strip():  # the codes in what ckptool printed; else what `doctor --error` says
        from ckptool.analysis.findings import LOOK, MAX_TEXT, UNKNOWN, of_error_text

        text = standard_input() if code == "-" else code
        if not text.strip():
            raise UsageError("standard input has no text", "", "For example: python train.py 2>&1 | ckptool explain -")
        cited: Sequence[str] = _IN_BRACKETS.findall(end := text[-MAX_TEXT:])
        # Only those of notes are looked for without their brackets, and not in a traceback: `usage: train.py` is none.
        if "Traceback (most" not in end:
            cited = [*cited, *(name for name in _NOTE.findall(end) if name in codes and codes[name].kind != "Errors")]
        if matches := [codes[name] for name in dict.fromkeys(cited) if name in codes]:
            return Explanation(tuple(matches))
        diagnosis = of_error_text(text)
        if diagnosis.findings[0].code == UNKNOWN:
            look = f"{LOOK}{command('doctor', FILE)}"
            raise NoMatch("ckptool does not know this message", f"It says: {diagnosis.findings[0].says}", look)
        return diagnosis
    if not code:
        return Explanation(tuple(codes.values()), is_list=True)
    name = code.strip("[]: ").lower().rpartition("[")[2]  # it may be as it is printed: error[usage]
    if name not in codes:
        closest = nearest(name, codes)
        see = f"See all: {Command(('ckptool', 'explain'))}"
        raise NoMatch(f"there is no code {code!r}", f"Did you mean {closest}?" if closest else "", see)
    return Explanation((codes[name],))
