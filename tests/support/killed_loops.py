"""Scripts with a loop, run in forked processes: quickly, and each a program of its own."""

import ast
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

# What a loop imports in its first steps and saves: before they are forked, and not in each of them.
_NEEDED = (
    *("torch._dynamo", "torch.utils.data", "torch.utils.serialization.config", "torch.profiler._cupti_monitor"),
    *("multiprocessing.popen_fork", "multiprocessing.queues", "multiprocessing.synchronize"),
    *("ckptool.training.run", "ckptool.bridge.from_live", "ckptool.formats.torch_zip", "ckptool.formats.zip.writer"),
    *("ckptool.formats.nested_streams", "ckptool.pickles.encode", "ckptool.pickles.objects", "ckptool.pickles.runs"),
)


def import_needed() -> None:
    """Imports what loops need."""
    for name in _NEEDED:
        import_module(name)


class _Ticking(ast.NodeTransformer):
    """Puts a call of `_tick` before each statement: a trace function would be asked of every call of torch, too."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, name, None), list):
                ticks = [ast.parse("_tick()").body[0] for _ in statements]
                for tick, statement in zip(ticks, statements, strict=True):
                    ast.copy_location(tick, statement)
                setattr(node, name, [each for pair in zip(ticks, statements, strict=True) for each in pair])
        return ast.fix_missing_locations(node)


def run_and_exit(
    source: str,
    names: Mapping[str, Any],
    line: int | None = None,
    number: int = signal.SIGKILL,
    then: Callable[[], Any] = lambda: None,
) -> NoReturn:
    """Runs a script with these names, and ends this process with its exit code, 9 where it raised.

    line: the number of the statement, as they are executed, before which signal `number` comes.  then: called at the
    end.
    """
    code, left, own = 9, line or 0, os.getpid()

    def tick() -> None:
        nonlocal left
        if os.getpid() == own:  # a worker's statements are none of the loop
            left -= 1
            if not left:
                os.kill(own, number)

    try:
        warnings.simplefilter("ignore")  # of schedules that step before their optimizer
        tree: Any = _Ticking().visit(ast.parse(source)) if line else source
        exec(compile(tree, "<loop>", "exec"), {"__name__": "loop", "_tick": tick, **names})
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except BaseException:  # noqa: BLE001  pytest shows it
        traceback.print_exc()
    finally:
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
    import_needed()
    answer_requests(script)


if __name__ == "__main__":
    main()
