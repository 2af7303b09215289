"""Runs a script of tests/engines/scripts many times, each in a fork of one process that has imported its library.

`python -m tests.support.killed_scripts SCRIPT` reads one JSON object a line from stdin and answers with one: args and
options of the script's `main`; `world`, a number of processes that run it together; `after`, the seconds to SIGKILL; or
`event`, the number of the change in the folder at which it ends itself; and `folder`.
"""

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.forks import torchrun_places

SCRIPTS = Path(__file__).parents[1] / "engines" / "scripts"


class Scripts:
    """A process with a script's libraries imported. python: of an environment that has them."""

    def __init__(self, name: str, folder: Path, python: str = sys.executable) -> None:
        self.errors = folder / "stderr"
        folder.mkdir(parents=True, exist_ok=True)
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        self.process = subprocess.Popen(
            [python, "-m", "tests.support.killed_scripts", str(SCRIPTS / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment | {"SCRIPT_ERRORS": str(self.errors)},
        )

    def run(self, *args: Any, **wish: Any) -> dict[str, Any]:
        """Runs it once: its exit status (-9 where it was killed), `seconds`, the `events` it made, `stderr`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(
            json.dumps({"args": [str(a) if isinstance(a, Path) else a for a in args], **wish}), file=self.process.stdin
        )
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return {**answer, "stderr": self.errors.read_text()}

    def finish(self, *args: Any, **wish: Any) -> dict[str, Any]:
        """Runs it to its end."""
        answer = self.run(*args, **wish)
        assert answer["status"] == 0, answer["stderr"][-3000:]
        return answer

    def killed_at_random(self, times: int, seconds: float, seed: int, *args: Any, **wish: Any) -> int:
        """Kills it some times, each at a random moment of a run of `seconds`, sooner after one that ended before its
        kill; how many were killed before the end."""
        dice, found = random.Random(seed), list[int]()
        for _ in range(times):
            found.append(self.run(*args, after=dice.uniform(0.2, 1) * seconds, **wish)["status"])
            seconds *= 1 if found[-1] else 0.7
        assert set(found) <= {0, -9}, (found, self.errors.read_text()[-3000:])
        return found.count(-9)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


def answer(path: str) -> None:
    """Imports a script, then runs its `main` as asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    script = runpy.run_path(path)
    for line in sys.stdin:
        wish = json.loads(line)
        status, begun = os.pipe(), time.monotonic()
        child = os.fork()
        if not child:
            _child(script["main"], wish, status[1])
        os.close(status[1])
        if "after" in wish:
            time.sleep(wish["after"])
            os.kill(child, signal.SIGKILL)
        _, code = os.waitpid(child, 0)
        with os.fdopen(status[0]) as told:
            events = told.read()
        answer = {"status": os.waitstatus_to_exitcode(code), "seconds": time.monotonic() - begun}
        print(json.dumps(answer | {"events": int(events or 0)}), file=answers, flush=True)


def _child(main: Any, wish: dict[str, Any], told: int) -> None:
    errors = os.open(os.environ["SCRIPT_ERRORS"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    if (world := wish.get("world", 1)) > 1 and (status := _ranks(world)) is not None:
        os._exit(status)
    code = 1
    try:
        crash = None
        if "event" in wish:
            from tests.support.crash import Crash

            crash = Crash(wish["folder"], wish["event"])
        main(*wish["args"], **wish.get("options", {}))
        if crash is not None:
            os.write(told, str(wish["event"] - crash.at).encode())
        code = 0
    except BaseException:  # noqa: BLE001  said to the test
        traceback.print_exc()
    finally:
        os._exit(code)


def _ranks(world: int) -> int | None:
    """Becomes so many processes, as torchrun starts them; in the one that started them, their exit code."""
    children = []
    for place in torchrun_places(world):
        if not (child := os.fork()):
            os.environ.update(place, ACCELERATE_USE_CPU="true")
            return None
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    import tests.engines.conftest  # noqa: F401  torchvision

    answer(sys.argv[1])
