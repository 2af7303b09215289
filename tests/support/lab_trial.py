"""One trial of the lab: what `doctor` says of a specimen, its commands as a shell reads them, and torch as the judge of
what comes out."""

import os
import re
import shlex
import shutil
import subprocess
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import ckptool
from ckptool.analysis.findings import Diagnosis
from ckptool.cli import main
from fixtures import lab

# Findings that say something about a file that loads, and loads as what one expects.
REMARKS = frozenset({"legacy-format", "no-checksums", "wasted-storage", "unused-record", "deflated", "ties-recorded"})


@dataclass
class Trial:
    """What became of a specimen. `failed`: commands that did not exit 0.  out: what came out.  loads: stock torch takes
    that, and the model what is in it."""

    codes: set[str]
    blocks: bool
    all_clear: bool
    good: bool
    failed: list[str] = field(default_factory=list)
    out: str = ""
    loads: bool = False
    ran: int = 0


def stock_loads(path: str, model: str) -> bool:
    """True if torch (or safetensors, by the suffix) loads a file, and the model takes its top, strictly."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if path.endswith(".safetensors"):
                loaded: Any = safetensors.torch.load_file(path)
            else:
                loaded = torch.load(path, weights_only=True)
            if any(value.device.type != "cpu" for value in loaded.values()):
                return False
            lab.model(model).load_state_dict(loaded, strict=True)
    except Exception:  # noqa: BLE001 (whatever torch says, it is no)
        return False
    return True


def shell_words(line: str) -> list[str]:
    """A printed command as bash reads it: by bash itself where there is more in it than quotes."""
    if re.fullmatch(r"[\w\s./:=@%+,#'-]*", line):
        return shlex.split(line)
    said = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return said.stdout.split("\0")[:-1]


def run_line(line: str) -> int:
    """Runs a printed command as it stands; ours in this process, after a shell has read it."""
    if line.startswith("ckptool "):
        return main(shell_words(line)[1:])
    program = line.split()[0]
    if program == "git" or shutil.which(program) is None:
        return 0
    return subprocess.run(["bash", "-c", line], capture_output=True, check=False).returncode


def written_by(line: str, before: set[str]) -> str:
    words = shell_words(line.replace(" > ", " -o "))
    if "-o" in words:
        return words[words.index("-o") + 1]
    return next(iter(sorted(files_below() - before)), "")


def files_below() -> set[str]:
    return {os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names}


def trial(specimen: lab.Specimen, folder: Path, against: bool) -> Trial:
    """Makes a specimen in a folder of its own, diagnoses it and does what is printed."""
    lab.make(specimen, folder)
    target = f"net.py:{specimen.model}" if against else None
    found = ckptool.doctor(specimen.name, against=target)
    good = bool(specimen.model) and stock_loads(specimen.name, specimen.model)
    codes = {finding.code for finding in found.findings}
    made = Trial(codes, not found.loads, codes <= REMARKS, good)
    out = _follow(found, made, specimen.name)
    for _ in range(3):  # what another program unpacked, or one of several files
        if (
            specimen.model
            and out
            and out != specimen.name
            and not stock_loads(out, specimen.model)
            and os.path.exists(out)
        ):
            again = ckptool.doctor(out, against=target)
            if not any(finding.fixes for finding in again.findings):
                break
            out = _follow(again, made, out)
    made.out = out
    made.loads = bool(specimen.model) and bool(out) and stock_loads(out, specimen.model)
    return made


def _follow(found: Diagnosis, made: Trial, out: str) -> str:
    """Runs every command that was printed; the last file that one of them wrote."""
    for finding in found.findings:
        for fix in finding.fixes:
            before = files_below()
            made.ran += 1
            code = run_line(fix)
            if code not in (0, 1 if fix.startswith("ckptool recover") else 0):
                made.failed.append(f"{fix} → {code}")
            out = written_by(fix, before) or out
    return out
