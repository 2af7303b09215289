"""Training processes for `prove`, each forked from one that has everything imported: torch alone takes seconds to import.

Run as `python -m ckptool.training.prove.fork_server`: reads one request a line, forks, answers with the process's id and
with how it ended. The server computes nothing itself, so its children begin like new processes. Several that train
together (ddp) are one process group, and find each other by the variables that torchrun sets.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import IO, Any

from ckptool.errors import RunFailed, printable
from ckptool.training.prove.crash import install_crash

GRACE = 600.0  # seconds that one process may take


class ForkServer:
    """The side of `prove`: starts one process at a time, and waits for it.

    log: where their stderr goes.  processes: how many train together, each time.
    """

    def __init__(self, log: str, processes: int = 1) -> None:
        self.log, self.processes = log, processes
        self.child: int | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckptool.training.prove.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ForkServer:
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
        """Starts `ckptool WORDS`; `crash`: where the first process kills itself. Returns its id, which is that of the group too."""
        pipe: IO[str] | Any = self.process.stdin
        pipe.write(json.dumps({"words": words, "log": self.log, "processes": self.processes, **request}) + "\n")
        pipe.flush()
        self.child = self._answer(GRACE)
        return self.child

    def wait(self) -> int:
        """The exit code of what was started, negative for a signal; of several, that of the first which failed."""
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
        "ckptool.cli.use",
        "ckptool.bridge.modules",
        "ckptool.training.start",
    ):
        import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        with suppress(OSError):
            os.truncate(request["log"], 0)
        children: list[int] = []
        places = _places(request["processes"])
        for place in places:
            group = children[0] if children else 0
            child = os.fork()
            if not child:
                _child_main(request, group, place)
            with suppress(OSError):
                os.setpgid(child, group or child)  # here too: it may be killed before it gets that far
            children.append(child)
        print(children[0], flush=True)  # noqa: T201 - the parent reads it
        print(_end_of(children), flush=True)  # noqa: T201


def _places(count: int) -> list[dict[str, str]]:
    """What torchrun puts into the environment of each process; nothing for one that trains alone."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "ckptool-prove"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _end_of(children: list[int]) -> int:
    """Waits for all of them. The code of the first that failed; the others are killed then, since they may wait for it."""
    left, code = list(children), 0
    while left:
        ended, status = os.wait()
        left.remove(ended)
        found = os.waitstatus_to_exitcode(status)
        if not found or code:
            continue
        code = found
        if children[0] in left:
            first, status = os.waitpid(children[0], os.WNOHANG)
            if first:  # it was the reason
                left.remove(first)
                code = os.waitstatus_to_exitcode(status) or found
        if code < 128:  # else each of them was asked to stop, and saves
            for child in left:
                os.kill(child, signal.SIGKILL)
    return code


def _child_main(request: dict[str, Any], group: int, place: dict[str, str]) -> None:
    """The forked process: a program of its own, in a process group (0: in one of its own)."""
    code = 2
    try:
        with suppress(OSError):  # where the first one has ended already
            os.setpgid(0, group)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _told_its_place(place)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        null = os.open(os.devnull, os.O_RDWR)
        for fd, target in ((null, 0), (null, 1), (log, 2)):
            os.dup2(fd, target)
        code = _done(request)
        sys.stderr.flush()
    finally:
        os._exit(code)


def _told_its_place(place: dict[str, str]) -> None:
    """Tells a process its place among several, each of which computes in one thread, as torchrun has it."""
    if place:
        import torch

        os.environ.update(place)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)


def _done(request: dict[str, Any]) -> int:
    from importlib import import_module

    if "forget" in request:
        return 0 if import_module("ckptool.training.prove.proof").reset_part(*request["forget"]) else 1
    if "crash" in request and os.environ.get("RANK", "0") == "0":  # the one that writes
        install_crash(**request["crash"])
    code: int = import_module("ckptool.cli").main(request["words"])
    return code


if __name__ == "__main__":
    main()
