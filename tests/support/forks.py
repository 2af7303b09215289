"""Processes that are forked, one for a request, from one that has imported what they need."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Forks:
    """A Python given these words, which calls `serve_forked`. Request and answer are a line of JSON each."""

    def __init__(self, *words: str, cwd: Path = ROOT) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, *words], stdin=pipe, stdout=pipe, cwd=cwd, text=True)

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def serve_forked(work: Callable[[Any], Any], ended: Callable[[int, Any], Any]) -> None:
    """Answers each line of the input with what `work` makes of it in a child; where that gives nothing, with what
    `ended` makes of its status and usage."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            with open(writing, "w", encoding="utf-8", errors="backslashreplace") as pipe:
                pipe.write(json.dumps(work(json.loads(line))))
            os._exit(0)
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            answer = pipe.read()
        _, status, usage = os.wait4(child, 0)
        print(answer or json.dumps(ended(status, usage)), file=answers, flush=True)


def torchrun_places(count: int) -> list[dict[str, str]]:
    """The variables that torchrun sets for each of so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "tests"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
