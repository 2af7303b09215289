"""How a program changes its folder, as seen from outside, and its end at such a change."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

from ckptool.training.reports import PRELOAD, TIME

HALF = "half of a write"
KINDS = ("open", "write", HALF, "rename", "unlink", "fsync", "truncate", "mkdir")  # as in shim.c
_HEAD, _FOLDER, _OUTSIDE, _LOG = struct.Struct("2q5i"), 4096, 8192, 1 << 20  # the page that is shared with shim.c


class Watch:
    """What a program does to its folder, as `shim.c` counts it, which ends it before an event or half through a write.

    library: the compiled shim; "" where there is none, and no event is seen.
    """

    def __init__(self, run: str, tools: str) -> None:
        self.run, self.page, self.library = run, os.path.join(tools, "events"), compiled(tools)
        self.size = _HEAD.size + _FOLDER + _OUTSIDE + _LOG
        Path(self.page).write_bytes(bytes(self.size))
        with open(self.page, "r+b") as file:
            self.shared = mmap.mmap(file.fileno(), self.size)
        self.least = 0  # log2 of the bytes of a write that counts: one of a checkpoint, not of a log

    @property
    def name(self) -> str:
        return PRELOAD if self.library else TIME

    def begin(self, env: dict[str, str]) -> None:
        """Before a process starts: what it needs goes into `env`."""
        if self.library:
            folder = os.fsencode(os.path.realpath(self.run))
            self.shared[:] = (_HEAD.pack(0, -1, 0, 0, 0, 0, self.least) + folder).ljust(self.size, b"\0")
            env["LD_PRELOAD"] = ":".join(filter(None, (self.library, env.get("LD_PRELOAD"))))
            env["CKPTOOL_PROVE_EVENTS"] = self.page

    def arm(self, kind: str, after: int = 0) -> None:
        """Asks for an end at the next event of a kind (at any of another), once so many events have come."""
        self.shared[16:20] = struct.pack("i", KINDS.index(kind) if kind in KINDS else -1)
        self.shared[8:16] = struct.pack("q", after)

    def due(self) -> bool:
        """True where that has come."""
        return bool(_HEAD.unpack(self.shared[: _HEAD.size])[3])

    def total(self) -> int:
        """How many events the process had so far."""
        return int(_HEAD.unpack(self.shared[: _HEAD.size])[0])

    def counts(self) -> Counter[str]:
        """Kind -> how many events of it the process had."""
        entries = self.shared[self.size - _LOG :][: self.total()]
        self.least = max((entry >> 3 for entry in entries), default=2) - 2
        return Counter(KINDS[entry & 7] for entry in entries)

    def outside(self) -> list[str]:
        """Files that were opened for writing elsewhere."""
        begin = _HEAD.size + _FOLDER
        text = self.shared[begin : begin + _OUTSIDE].rstrip(b"\0")
        return [os.fsdecode(path) for path in text.split(b"\n")[:-1]]


def compiled(tools: str) -> str:
    """The shim, compiled into a folder; "" where there is no compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or sys.platform != "linux":
        return ""
    library, source = os.path.join(tools, "shim.so"), str(Path(__file__).with_name("shim.c"))
    words = [compiler, "-shared", "-fPIC", "-O1", "-w", "-U_FORTIFY_SOURCE", "-o", library, source, "-ldl"]
    return "" if subprocess.run(words, capture_output=True, check=False).returncode else library
