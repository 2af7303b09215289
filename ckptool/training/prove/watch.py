"""Ways to see from outside how a program changes its folder, and to end it at such a change.

`Preloaded` counts calls by `shim.c`, which ends the program by itself; `Polled` looks at the sizes of files.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from ckptool.training.reports import POLLING, PRELOAD

KINDS = ("open", "write", "half of a write", "rename", "unlink", "fsync", "truncate", "mkdir")  # as in shim.c
APPEARED, GREW, GONE = "a file appeared", "a file grew", "a file went away"
_HEAD, _FOLDER, _OUTSIDE, _LOG = struct.Struct("q6i"), 4096, 8192, 1 << 20  # the page that is shared with shim.c


class Polled:
    """Events as the sizes of files tell them; the killer is outside and comes a moment later."""

    name = POLLING
    kinds: tuple[str, ...] = (APPEARED, GREW, GONE)

    def __init__(self, run: str) -> None:
        self.run = run
        self.wanted: str | None = None
        self.count: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}

    def begin(self, words: list[str], env: dict[str, str]) -> list[str]:
        """Before a process starts: the words to start; what it needs goes into `env`."""
        self.wanted, self.count, self.sizes = None, Counter(), sizes(self.run)
        return words

    def arm(self, kind: str) -> None:
        """Asks for an end at the next event of a kind."""
        self.wanted = kind

    def due(self) -> bool:
        """Looks; True where the event has come and the process is to be killed from here."""
        before, now = self.sizes, sizes(self.run)
        self.sizes = now
        seen = [APPEARED for path in now if path not in before] + [GONE for path in before if path not in now]
        seen += [GREW for path, size in now.items() if size > before.get(path, size)]
        self.count.update(seen)
        return self.wanted in seen

    def counts(self) -> Counter[str]:
        """Choice -> how many events of it the process had."""
        return self.count

    def outside(self) -> list[str]:
        """Files that were opened for writing elsewhere."""
        return []


class Preloaded(Polled):
    """Events as `shim.c` counts them; it ends the process by itself, before the event or in the middle of a write."""

    name = PRELOAD
    kinds = KINDS

    def __init__(self, run: str, library: str, page: str) -> None:
        super().__init__(run)
        self.library, self.page = library, page
        self.size = _HEAD.size + _FOLDER + _OUTSIDE + _LOG
        Path(page).write_bytes(bytes(self.size))
        with open(page, "r+b") as file:
            self.shared = mmap.mmap(file.fileno(), self.size)
        self.least = 0  # log2 of the bytes of a write that counts: one of a checkpoint, not of a log

    def begin(self, words: list[str], env: dict[str, str]) -> list[str]:
        folder = os.fsencode(os.path.realpath(self.run))
        self.shared[:] = (_HEAD.pack(0, 0, 0, 0, 0, 0, self.least) + folder).ljust(self.size, b"\0")
        env["LD_PRELOAD"] = ":".join(filter(None, (self.library, env.get("LD_PRELOAD"))))
        env["CKPTOOL_PROVE_EVENTS"] = self.page
        return words

    def arm(self, kind: str) -> None:
        if kind not in KINDS:
            return
        self.shared[12:16] = struct.pack("i", KINDS.index(kind))
        self.shared[8:12] = struct.pack("i", 1)

    def due(self) -> bool:
        return bool(_HEAD.unpack(self.shared[: _HEAD.size])[3])

    def counts(self) -> Counter[str]:
        entries = self.shared[self.size - _LOG :][: _HEAD.unpack(self.shared[: _HEAD.size])[0]]
        self.least = max((entry >> 3 for entry in entries), default=2) - 2
        return Counter(KINDS[entry & 7] for entry in entries)

    def outside(self) -> list[str]:
        begin = _HEAD.size + _FOLDER
        text = self.shared[begin : begin + _OUTSIDE].rstrip(b"\0")
        return [os.fsdecode(path) for path in text.split(b"\n")[:-1]]


def watcher(run: str, tools: str) -> Polled:
    """The one that sees most here: a preloaded library where there is a compiler, else polling."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler and sys.platform == "linux":
        library = os.path.join(tools, "shim.so")
        source = str(Path(__file__).with_name("shim.c"))
        words = [compiler, "-shared", "-fPIC", "-O1", "-w", "-U_FORTIFY_SOURCE", "-o", library, source, "-ldl"]
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return Preloaded(run, library, os.path.join(tools, "events"))
    return Polled(run)


def sizes(folder: str) -> dict[str, int]:
    """Path -> bytes of every file below a folder."""
    found: dict[str, int] = {}
    for here, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found[os.path.join(here, name)] = os.lstat(os.path.join(here, name)).st_size
    return found
