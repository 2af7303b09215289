"""The meaning of the error messages of other programs, and what fixes each: the table of `error_texts.yaml`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ckptool.analysis.findings import Diagnosis, Finding, commands_of, table
from ckptool.analysis.fixes import Chain
from ckptool.commands import FILE, Command, command
from ckptool.errors import listed, printable

MAX_TEXT = 100_000  # characters of a message that are looked at
UNKNOWN = "unknown-error"
LOOK = "Look at the file instead: "

_SHORT = {
    "<begin>": r"\A(?:(?!missing key)(?s:.))*missing key\(s\) in state_dict:\s*",  # once, however often it is there
    "<q>": "[\"']",
}
# The device that a message is about: torch's own words where it names the tag.
_DEVICE = re.compile(r"tagged with ([a-zA-Z]+)|\b(cuda|mps|xpu|hpu|npu)\b", re.IGNORECASE)


class KnownError(NamedTuple):
    """A message.  finding: what is said of it, whose commands have slots for what the pattern names."""

    pattern: re.Pattern[str]
    finding: Finding

    def commands(self, text: str) -> tuple[Command, ...]:
        """Those that fix it, with the pattern's named groups in a message in the slots of their names: `PREFIX`."""
        match = self.pattern.search(text[:MAX_TEXT])
        words = {name.upper(): value for name, value in match.groupdict().items() if value} if match else {}
        return tuple(fix.with_words(words) for fix in self.finding.commands)


@cache
def known_errors() -> tuple[KnownError, ...]:
    """The table; the first that matches is meant."""
    errors = []
    for row in table("error_texts"):
        pattern = row["seen"] if isinstance(row["seen"], str) else "|".join(row["seen"])
        for name, expression in _SHORT.items():
            pattern = pattern.replace(name, expression)
        fixes, advised = (commands_of(row.get(key, ()), {}) for key in ("fixes", "advised"))
        advice, is_certain = row.get("advice", ""), not row.get("likely")
        meant = Finding(row["code"], row["means"], "", True, fixes, advice, advised, certain=is_certain)
        errors.append(KnownError(re.compile(pattern, re.IGNORECASE), meant))
    return tuple(errors)


def recognised(text: str) -> KnownError | None:
    """The first entry of the table that matches the beginning of a message."""
    return next((known for known in known_errors() if known.pattern.search(text[:MAX_TEXT])), None)


def first_line(text: str, known: KnownError | None = None) -> str:
    """The line of a traceback that says what happened: a known one, else one that begins as errors do."""
    lines = [line.strip() for line in text[:MAX_TEXT].splitlines() if line.strip()]
    named = [line for line in lines if known is not None and known.pattern.search(line)]
    told = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)]
    return printable((named or told or lines or [""])[0])[:200]


def of_error_text(text: str, file: str = "", devices: Sequence[str] | None = None) -> Diagnosis:
    """The meaning of an error message, from that alone, but for the devices that the file's tensors are tagged with.
    Without a file its commands speak of FILE and OUT."""
    known = recognised(text)
    if known is None:
        what = "ckptool does not know this message" if text.strip() else "the message is empty"
        finding = Finding(UNKNOWN, what, first_line(text), advice=LOOK, advised=(command("doctor", FILE),))
        return Diagnosis(file, "", (finding.filled(Chain(file)),))
    finding = replace(known.finding, says=first_line(text, known), commands=known.commands(text))
    if devices is not None and finding.code in ("cuda-location", "device-location", "gpu-memory"):
        tagged = f"tagged {listed(devices, 3)}" if devices else "tagged with no device but the CPU"
        tags = f"{file or 'the checkpoint'} is {tagged}"
        meant = _DEVICE.search(text)
        kind = (meant[1] or meant[2]).lower() if meant else ""
        if finding.code == "gpu-memory" or any(device.partition(":")[0] == kind for device in devices):
            finding = replace(finding, what=f"{finding.what} {tags}.")
        else:
            what = f"{tags}: the message is of another file, or the code itself asks for the device."
            advice = "Name the file that the code loads."
            finding = replace(finding, what=what, commands=(), advice=advice, advised=(), certain=False)
    return Diagnosis(file, "", (finding.filled(Chain(file)),))
