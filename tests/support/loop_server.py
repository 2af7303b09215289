"""Runs scripts in processes forked from one that has torch imported: quickly, and each a program of its own."""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from typing import Any

from tests.support.crash import Crash
from tests.support.fork_server import answer_requests


def script(request: dict[str, Any]) -> int:
    """Runs the script of a request; crash: where the process kills itself."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 2)
    if "crash" in request:
        Crash(**request["crash"])
    sys.argv = request["words"]
    try:
        runpy.run_path(request["words"][0], run_name="__main__")
    except SystemExit as error:
        return int(error.code or 0)
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
