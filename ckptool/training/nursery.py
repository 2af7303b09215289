"""Training processes for `prove`, each forked from one that has everything imported: torch alone takes seconds to import.

Run as `python -m ckptool.training.nursery`: reads one request a line, forks, answers with the process's id, and with its end. It never
computes anything itself, so that its children begin like new processes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from ckptool.errors import RunFailed, printable
from ckptool.training.crashing import crash_in

GRACE = 600.0  # seconds that one process may take


class Nursery:
    """The side of `prove`: starts one process at a time, and waits for it. log: where their stderr goes."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.child: int | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckptool.training.nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.child is not None:
            os.killpg(self.child, signal.SIGKILL)
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()

    def start(self, words: list[str], **request: Any) -> int:
        """Starts `ckptool WORDS`; `crash`: where it kills itself. Returns its id, which is that of its process group too."""
        pipe: IO[str] | Any = self.process.stdin
        pipe.write(json.dumps({"words": words, "log": self.log, **request}) + "\n")
        pipe.flush()
        self.child = self._answer(GRACE)
        return self.child

    def wait(self) -> int:
        """The exit code of what was started, negative for a signal."""
        code = self._answer(GRACE)
        self.child = None
        return code

    def ended(self) -> bool:
        """True when `wait` would not wait."""
        pipe: IO[str] | Any = self.process.stdout
        return bool(select.select([pipe], [], [], 0)[0])

    def run(self, words: list[str], **request: Any) -> int:
        """Starts a process and waits for it."""
        self.start(words, **request)
        return self.wait()

    def said(self) -> str:
        """The end of what was written to stderr."""
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                return file.read()[-2000:].strip()
        except OSError:
            return ""

    def _answer(self, seconds: float) -> int:
        pipe: IO[str] | Any = self.process.stdout
        if not select.select([pipe], [], [], seconds)[0]:
            raise RunFailed(f"a training process took more than {seconds:.0f} seconds", "It was ended.")
        line = pipe.readline()
        if not line.strip().lstrip("-").isdigit():
            raise RunFailed("training processes cannot be started", printable(line.strip()))
        return int(line)


def main() -> None:
    """The other side: until its input ends."""
    from importlib import import_module

    # What the first step of an optimizer imports is there too.
    for name in (
        "torch",
        "torch._dynamo",
        "ckptool.cli",
        "ckptool.cli.training",
        "ckptool.live",
        "ckptool.training.start",
    ):
        import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _born(request)
        with suppress(OSError):
            os.setpgid(child, child)  # here too: it may be killed before it gets that far
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _born(request: dict[str, Any]) -> None:
    """The forked process: a program of its own."""
    code = 2
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        null = os.open(os.devnull, os.O_RDWR)
        for fd, target in ((null, 0), (null, 1), (log, 2)):
            os.dup2(fd, target)
        code = _done(request)
        sys.stderr.flush()
    finally:
        os._exit(code)


def _done(request: dict[str, Any]) -> int:
    from importlib import import_module

    if "forget" in request:
        return 0 if import_module("ckptool.training.ablation").forget(*request["forget"]) else 1
    if "crash" in request:
        crash_in(**request["crash"])
    code: int = import_module("ckptool.cli").main(request["words"])
    return code


if __name__ == "__main__":
    main()
