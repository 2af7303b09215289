"""Processes that are forked from one that has everything imported: torch alone takes seconds to import.

`python -m tests.support.fork_server` reads one request a line, forks, answers with the process's id and with
how it ended. The server computes nothing itself, so its children begin like new processes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import IO, Any

from ckptool.errors import RunFailed
from tests.support.crash import Crash
from tests.support.forks import ROOT

GRACE = 600.0  # seconds that one process may take
Work = Callable[[dict[str, Any]], int]
"""The work of a forked process for a request; returns its exit code."""


class ForkServer:
    """Starts one process at a time, in a group of its own, and waits for it.

    log: where its stderr goes.  module: whose `main` calls `answer_requests`.
    """

    def __init__(self, log: str, module: str = "tests.support.fork_server", cwd: str | None = None) -> None:
        self.log = log
        self.child: int | None = None
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )  # without buffers, in which an answer would lie that nobody waits for

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.child, signal.SIGKILL)
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()

    def start(self, words: list[str], **request: Any) -> int:
        """Starts `ckptool WORDS`; `crash`: where the process kills itself. Returns its id, and the group's."""
        pipe: IO[bytes] | Any = self.process.stdin
        pipe.write(f"{json.dumps({'words': words, 'log': self.log, **request})}\n".encode())
        self.child = self._answer()
        return self.child

    def wait(self) -> int:
        """The exit code of what was started, negative for a signal."""
        code = self._answer()
        self.child = None
        return code

    def ended(self) -> bool:
        """True when `wait` would not wait."""
        pipe: IO[bytes] | Any = self.process.stdout
        return bool(select.select([pipe], [], [], 0)[0])

    def run(self, words: list[str], **request: Any) -> int:
        """Starts a process and waits for it."""
        self.start(words, **request)
        return self.wait()

    def stderr_tail(self) -> str:
        """The end of what was written to stderr."""
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                return file.read()[-2000:].strip()
        except OSError:
            return ""

    def _answer(self) -> int:
        pipe: IO[bytes] | Any = self.process.stdout
        if not select.select([pipe], [], [], GRACE)[0]:
            raise RunFailed(f"a training process took more than {GRACE:.0f} seconds", "It was killed.")
        line = pipe.readline().decode()
        if not line.strip().lstrip("-").isdigit():
            raise RunFailed("training processes cannot be started", line.strip())
        return int(line)


# The server ----------------------------------------------------------------------------------------------------------


def answer_requests(work: Work) -> None:
    """Answers requests until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        with suppress(OSError):
            os.truncate(request["log"], 0)
        child = os.fork()
        if not child:
            _child_main(work, request)
        with suppress(OSError):
            os.setpgid(child, child)  # here too: it may be killed before it gets that far
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _child_main(work: Work, request: dict[str, Any]) -> None:
    """The forked process: a program of its own, in a process group of its own."""
    code = 2
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = work(request)
        sys.stderr.flush()
    finally:
        os._exit(code)


# Training ------------------------------------------------------------------------------------------------------------


def _train(request: dict[str, Any]) -> int:
    """Runs the command of a request; only the log hears of it."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDWR)
    for fd, target in ((null, 0), (null, 1), (log, 2)):
        os.dup2(fd, target)
    if "crash" in request:
        Crash(**request["crash"])
    code: int = import_module("ckptool.cli").main(request["words"])
    return code


def main() -> None:
    """Serves training processes."""
    needed = "cli verbs.train bridge.modules training.trainer formats.torch_zip formats.zip.writer pickles.encode"
    # What the first step of an optimizer imports is there too.
    others = ("torch._dynamo", "torch.profiler._cupti_monitor", "torch.utils.serialization.config", "typer.main")
    for name in (*others, *(f"ckptool.{name}" for name in needed.split())):
        import_module(name)
    answer_requests(_train)


if __name__ == "__main__":
    main()
