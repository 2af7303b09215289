"""A script with a loop, run in a forked process, which a signal ends before any line of it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


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
