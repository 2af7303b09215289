"""Scripts with a loop, run in forked processes: quickly, and each a program of its own."""

import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NoReturn

from tests.support.crash import Crash
from tests.support.fork_server import answer_requests


def run_and_exit(
    source: str,
    names: Mapping[str, Any],
    line: int | None = None,
    number: int = signal.SIGKILL,
    then: Callable[[], Any] = lambda: None,
) -> NoReturn:
    """Runs a script with these names, and ends this process with its exit code, 9 where it raised.

    line: the number of the line, as they are executed, before which signal `number` comes.  then: called at the end.
    """
    code, left, own = 9, line or 0, os.getpid()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<loop>" or os.getpid() != own:  # a worker's lines are none of the loop
            return None
        if event == "line":
            left -= 1
            if not left:
                os.kill(own, number)
        return trace

    try:
        warnings.simplefilter("ignore")  # of schedules that step before their optimizer
        sys.settrace(trace if line else None)
        exec(compile(source, "<loop>", "exec"), {"__name__": "loop", **names})
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except BaseException:  # noqa: BLE001  pytest shows it
        traceback.print_exc()
    finally:
        sys.settrace(None)
        then()
        sys.stderr.flush()
        os._exit(code)


def script(request: dict[str, Any]) -> int:
    """Runs the script of a request; crash: where the process kills itself."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for fd in (1, 2):
        os.dup2(log, fd)
    if "crash" in request:
        Crash(**request["crash"])
    sys.argv = request["words"]
    try:
        runpy.run_path(request["words"][0], run_name="__main__")
    except SystemExit as error:
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001  the last words of the script
        import traceback

        traceback.print_exception(error)
        return 1
    return 0


def main() -> None:
    """Serves scripts."""
    for name in ("torch", "torch._dynamo", "torch.utils.data", "ckptool.training.run", "ckptool.bridge"):
        import_module(name)
    answer_requests(script)


if __name__ == "__main__":
    main()
