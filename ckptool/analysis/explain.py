"""Explanations of codes: the rows of `docs/codes.md`, which lies here too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ckptool.analysis.doctor import UNKNOWN, Diagnosis, of_error_text
from ckptool.analysis.error_texts import MAX_TEXT
from ckptool.checkpoint.registry import Report
from ckptool.commands import Advice, Command
from ckptool.errors import NoMatch, UsageError
from ckptool.options import nearest

_CODE = "[a-z][a-z0-9-]*"
# Errors and findings, as they are printed: `error[CODE]`, `problem [CODE]`, `note [CODE]`.
_IN_BRACKETS = re.compile(rf"^(?:.*\berror|problem |note )\[({_CODE})\]", re.MULTILINE)
_NOTE = re.compile(rf"^({_CODE}): ", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_ALL = Advice("See all: ", Command(("ckptool", "explain")))


@dataclass(frozen=True, slots=True)
class Code:
    """A code. kind: the title of its table.  facts: the head of each other column -> its text; empty ones left out."""

    code: str
    kind: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Report):
    """The codes that were asked for, or all, of which a list shows only the meaning."""

    codes: tuple[Code, ...]
    is_list: bool = False


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
            code, *texts = cells
            codes[code.strip("`")] = Code(code.strip("`"), kind, {h: t for h, t in zip(heads[1:], texts) if t})  # noqa: B905
    return codes


def explain(code: str = "") -> Explanation:
    """The explanation of a code; without one the list of all. Raises `NoMatch` for an unknown code."""
    codes = all_codes()
    if not code:
        return Explanation(tuple(codes.values()), is_list=True)
    found = _IN_BRACKETS.match(code)  # pasted as it is printed
    name = found[1] if found else code.strip("[]: ").lower()
    if name not in codes:
        meant = nearest(name, codes)
        raise NoMatch(f"there is no code {code!r}", f"Did you mean {meant}?" if meant else "", _ALL)
    return Explanation((codes[name],))


def explain_text(text: str) -> Explanation | Diagnosis:
    """The explanation of the codes in what ckptool printed; of any other error message what `doctor --error` says.

    Only the codes of notes are looked for without their brackets, and not in a traceback: `usage: train.py` is no code.
    Raises `NoMatch` for a message that is not known.
    """
    if not text.strip():
        raise UsageError("standard input has no text", "", "For example: python train.py 2>&1 | ckptool explain -")
    shown, codes = _COLOUR.sub("", text[:MAX_TEXT]), all_codes()
    named: Sequence[str] = _IN_BRACKETS.findall(shown)
    if "Traceback (most" not in shown:
        named = [*named, *(name for name in _NOTE.findall(shown) if name in codes and codes[name].kind != "Errors")]
    found = [codes[name] for name in dict.fromkeys(named) if name in codes]
    if found:
        return Explanation(tuple(found))
    diagnosis = of_error_text(text)
    for finding in diagnosis.findings:
        if finding.code == UNKNOWN:
            raise NoMatch(finding.what, f"It says: {finding.says}", finding.advice)
    return diagnosis
