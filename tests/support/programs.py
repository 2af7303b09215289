"""`ckptool` and `python` for shells, forked from a process that has everything imported: a start takes milliseconds.

What a start itself does (imports, the interpreter's own options, signals, a terminal of its own) is for tests with the
real program.
"""

import gc
import marshal
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import ckptool

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TORCH = ("torch", "ckptool.bridge", "ckptool.training.trainer")
SERVERS: list[subprocess.Popen[bytes]] = []
BEGINNINGS: list[float] = []  # seconds
CLIENT = """\
#!/bin/sh
'''exec' "{python}" -IS "$0" "$@"
' '''
import marshal, os, sys
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket
asked = socket(AF_UNIX, SOCK_STREAM)
asked.connect({address!r})
given = marshal.dumps((sys.argv, os.getcwd(), dict(os.environb)))
fds = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
asked.sendmsg([len(given).to_bytes(8, "big")], [(SOL_SOCKET, SCM_RIGHTS, fds)])
while given:
    given = given[asked.send(given):]
os._exit(int(asked.recv(8) or 137))
"""


@cache
def programs(*modules: str) -> Path:
    """The folder of `ckptool` and `python`, which have imported these modules too; it is there until the tests end, or
    are killed: the server removes it."""
    folder = Path(tempfile.mkdtemp(prefix="ck"))
    for name in ("ckptool", "python"):
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket")))
        (folder / name).chmod(0o755)
    words = [sys.executable, "-m", "tests.support.programs", str(folder / "socket"), *modules]
    # It ends when this process does, with its end of the pipe.
    server = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    BEGINNINGS.append(_spent(server))
    SERVERS.append(server)
    return folder


def path_with(*modules: str) -> str:
    """A `PATH` that begins with `ckptool`; the other programs of this environment are there too."""
    return os.pathsep.join([str(programs(*modules)), str(BIN), os.environ.get("PATH", os.defpath)])


def python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """What came of a text, the last word, that a Python ran which has torch imported; `-W error` is understood."""
    quick = programs(*TORCH) / "python"
    return subprocess.run([quick, *words], capture_output=True, text=True, check=False, **options)


def serve(address: str) -> None:
    """Forks for everyone who asks, and tells them how it ended, until its input ends."""
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while sys.stdin not in (ready := select.select([listener, ended, sys.stdin, *running.values()], [], [])[0]):
            for child, asked in running.items():
                if asked in ready:  # its end: who asked was killed
                    os.kill(child, signal.SIGKILL)
            if ended in ready:
                ended.recv(100)
                while running and (gone := os.waitpid(-1, os.WNOHANG))[0]:
                    with running.pop(gone[0]) as asked, suppress(OSError):
                        asked.send(str(os.waitstatus_to_exitcode(gone[1]) % 256).encode())
            if listener in ready:
                asked = listener.accept()[0]
                head, fds, _, _ = socket.recv_fds(asked, 8, 3)
                size, data = int.from_bytes(head, "big"), b""
                while len(data) < size:
                    data += asked.recv(size - len(data))
                child = os.fork()
                if not child:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    asked.close()
                    _child(data, fds)
                for fd in fds:
                    os.close(fd)
                running[child] = asked


def _child(data: bytes, fds: list[int]) -> None:
    """Does not come back."""
    code = 1
    try:
        words, folder, environment = marshal.loads(data)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        with suppress(OSError):
            os.chdir(folder)
        os.environb.clear()
        os.environb.update(environment)
        code = _ran(words)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)


def _ran(words: list[str]) -> int:
    """Begins as an interpreter does, and gives the exit code."""
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if stream == "stderr" else "surrogateescape" if stream == "stdin" else "strict"
        opened: Any = open(number, "w" if number else "r", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        if number and (number == 2 or opened.isatty()):
            opened.reconfigure(line_buffering=True)
        setattr(sys, stream, opened)
        setattr(sys, f"__{stream}__", opened)
    for path in filter(None, reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        sys.path.insert(0, path)
        if os.path.exists(own := os.path.join(path, "sitecustomize.py")):
            runpy.run_path(own)
    sys.argv = words
    try:
        if os.path.basename(words[0]) == "python":  # FILE.py WORDS, -c TEXT WORDS, or anything before a TEXT
            warnings.simplefilter("error") if "-W" in words else None
            sys.path.insert(0, "")
            at = words.index("-c") + 1 if "-c" in words else len(words) - 1
            if "-c" not in words and words[1].endswith(".py"):
                sys.argv = words[1:]
                runpy.run_path(words[1], run_name="__main__")
            else:
                sys.argv = ["-c", *words[at + 1 :]]
                exec(compile(words[at], "<string>", "exec"), {"__name__": "__main__"})
            return 0
        return int(import_module("ckptool.__main__").main() or 0)
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:  # noqa: BLE001  the last words of the program
        import traceback

        traceback.print_exc()
        return 1


def spent() -> tuple[float, float]:
    """The seconds of processor time that they took, which nobody has waited for; and those of their beginnings."""
    return sum(map(_spent, SERVERS)), sum(BEGINNINGS)


def _spent(server: subprocess.Popen[bytes]) -> float:
    with suppress(OSError):
        numbers = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, numbers[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def stop_programs() -> None:
    programs.cache_clear()
    BEGINNINGS.clear()
    while SERVERS:
        with SERVERS.pop():  # its end of the pipe is closed, and it is waited for
            pass


if __name__ == "__main__":
    _, address, *needed = sys.argv
    if not needed:
        sys.modules["torch"] = None  # type: ignore[assignment]
    for name in ("numpy", *needed):
        import_module(name)
    for module in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
        with suppress(ImportError):  # what needs torch
            import_module(module.name)
    if not needed:
        del sys.modules["torch"]
    gc.collect()
    gc.freeze()
    try:
        serve(address)
    finally:
        shutil.rmtree(os.path.dirname(address))
