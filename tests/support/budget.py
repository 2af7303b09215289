"""What looking at hostile bytes costs: `inspect`, as text and as JSON, or any command line, in a process of its own
whose time and memory are measured.

A server without torch forks one child for each input, so that a measurement takes milliseconds and starts from a small
process.
"""

import atexit
import io
import json
import os
import resource
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.guard import slowness
from tests.support.forks import Forks, serve_forked

SMALL = 1 << 20  # bytes of input that the budget is promised for
SECONDS, MEGABYTES = 1.0, 300.0
ROOM = 4 / 3  # of a bound: the same work takes more on another machine, and on a busy one
_CPU_LIMIT, _ROOM = 20, 2 << 30  # what a child may use before it is stopped


@dataclass(frozen=True)
class Outcome:
    """What came of looking at an input.

    code: of the `CkptoolError`; empty if there was none; `crash: …` for anything else.  text: what people would read.
    seconds: processor time, megabytes: memory, of the child and beyond what it began with.
    """

    code: str
    text: str
    seconds: float
    megabytes: float


def meets_budget(
    data: bytes | Path, suffix: str = ".pt", seconds: float = SECONDS, megabytes: float = MEGABYTES
) -> Outcome:
    """The outcome of `inspect` on these bytes (or on a file). Fails if it is a crash, or takes more than 1 s of
    processor time or 300 MB.

    Fails too if a control character would reach a terminal.
    """
    if isinstance(data, Path):
        outcome = _ask(data)
    else:
        assert len(data) <= SMALL or (seconds, megabytes) != (SECONDS, MEGABYTES), "the budget is for at most 1 MB"
        with tempfile.TemporaryDirectory(prefix="ckptool-hostile-") as folder:
            path = Path(folder, "input" + suffix)
            path.write_bytes(data)
            outcome = _ask(path)
    assert not outcome.code.startswith("crash"), outcome
    assert outcome.seconds <= seconds * ROOM * slowness(), f"{outcome.seconds:.2f} s for {outcome.code or 'an answer'}"
    assert outcome.megabytes <= megabytes * ROOM, f"{outcome.megabytes:.0f} MB for {outcome.code or 'an answer'}"
    raw = {c for c in outcome.text if not c.isprintable()} - {"\n"}
    assert not raw, f"raw control characters: {raw!r}"
    return outcome


def command_meets_budget(*words: str | Path, characters: int = 2_000_000) -> Outcome:
    """The outcome of a command line on small hostile files: at most 1.5 s of processor time, 300 MB, so much text.

    A folder for torch.distributed has each entry by itself, and so what several share as often, within bounds: 5 s.
    """
    outcome = _ask([os.fspath(word) for word in words])
    assert not outcome.code.startswith("crash") and "error[bug]" not in outcome.text, (words, outcome)
    seconds = 5 if os.fspath(words[-1]).endswith(".dcp") else 1.5
    assert outcome.seconds <= seconds * ROOM * slowness(), f"{words}: {outcome.seconds:.2f} s"
    assert outcome.megabytes <= MEGABYTES * ROOM, f"{words}: {outcome.megabytes:.0f} MB"
    assert len(outcome.text) <= characters, f"{words}: {len(outcome.text):,} characters"
    return outcome


def command_outcome(*words: str | Path) -> Outcome:
    """The outcome of a command line, whatever it takes."""
    return _ask([os.fspath(word) for word in words])


# The server ----------------------------------------------------------------------------------------------------------


@cache
def _server() -> Forks:
    server = Forks("-m", "tests.support.budget")
    atexit.register(server.close)
    return server


def _ask(task: Path | list[str]) -> Outcome:
    return Outcome(**_server().ask(task if isinstance(task, list) else os.fspath(task)))


def _measured(task: str | list[str]) -> dict[str, Any]:
    """Looks at a file, or runs a command line."""
    _bounded()
    before, started = _memory(), time.process_time()
    code, text = _look(task) if isinstance(task, str) else _run(task)
    return asdict(Outcome(code, text[: 10 << 20], time.process_time() - started, _memory() - before))


def _stopped(status: int, used: Any) -> dict[str, Any]:
    seconds = used.ru_utime + used.ru_stime
    return asdict(Outcome(f"crash: stopped, status {status}", "", seconds, used.ru_maxrss / 1024))


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_LIMIT, _CPU_LIMIT))
    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _ROOM, now + _ROOM))


def _memory() -> float:
    """The most memory that this process has had, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1 << 20)


def _run(words: list[str]) -> tuple[str, str]:
    from ckptool.cli import main

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(words)
    return str(code), said.getvalue()


def _look(path: str) -> tuple[str, str]:
    from ckptool.errors import CkptoolError
    from ckptool.render.json import dumps
    from ckptool.render.lines import PLAIN, error_text
    from ckptool.verbs.inspect import inspect

    try:
        found = inspect(path)
        text = str(found) + "\n"
        json.loads(dumps(found.to_dict()))
    except CkptoolError as error:
        return error.code, error_text(error, PLAIN)
    except BaseException as error:  # noqa: BLE001 (it is told, and fails the test)
        return f"crash: {type(error).__name__}: {error!s:.200}", ""
    return "", text


if __name__ == "__main__":
    import ckptool.cli  # imported once, before the forks
    from ckptool.formats import FORMATS
    from ckptool.render import json as as_json
    from ckptool.render import lines
    from ckptool.verbs import inspect

    assert ckptool.cli and FORMATS and as_json and lines and inspect and "torch" not in sys.modules
    _look(__file__)
    serve_forked(_measured, _stopped)
