"""A process that runs verbs on untrusted files under an audit hook, each file in a fork of its own, and says what it
saw.

`Watched` is the side of the tests. The other side is `main`: it loads what the verbs need on a
warm-up file, then every import, compilation, call of a program or connection that follows is a violation: the file must
have caused it.
"""

import contextlib
import gc
import importlib
import io
import os
import pkgutil
import resource
import signal
import sys
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forks import ROOT, Forks, serve_forked

SECONDS, MEGABYTES = 1.0, 300  # what a file of at most 1 MB may take (docs/design.md)
USUAL = 0.026  # seconds of CPU that `_pace` takes on a machine with nothing else to do
PATIENCE = 25  # seconds of a fork's CPU, after which it is ended

# `ctypes.dlopen`: of anything but the C library that is there already.
FORBIDDEN = tuple(
    (
        "import exec compile code.__new__ marshal. pickle. os.system os.exec os.spawn os.posix_spawn os.fork "
        "subprocess. pty. socket. ctypes.dlopen webbrowser. urllib. ftplib. http. smtplib. builtins.input"
    ).split()
)

LOOKING = ("inspect", "inspect --all", "inspect --stats", "html", "show", "diff itself", "diff")
WRITING = ("convert", "convert --all", "convert to pt", "remap")
# Verbs that take a file, and that a version of ckptool may have or not.
OPTIONAL = ("scan", "verify", "doctor")


@dataclass(frozen=True)
class Step:
    """One command on one file. `code`: `ok`, `answer-no`, the error's code, or `bug` with the traceback in
    `message`."""

    command: str
    code: str
    message: str
    seconds: float
    printed: int
    raw_control: bool


@dataclass(frozen=True)
class Seen:
    """What was seen of one file. `megabytes`: how much more memory than before it took."""

    steps: tuple[Step, ...]
    violations: tuple[str, ...]
    megabytes: int
    ended_by: int

    def codes(self) -> dict[str, str]:
        return {step.command: step.code for step in self.steps}

    def assert_bounded(self, name: str = "") -> None:
        """Fails if it crashed, printed a raw control byte, or took more than an input of 1 MB may."""
        assert not self.ended_by, f"{name}: the process was ended by signal {self.ended_by}"
        assert not [step.message for step in self.steps if step.code == "bug"], name
        assert not [step.command for step in self.steps if step.raw_control], name
        slow = {step.command: step.seconds for step in self.steps if step.seconds > limit(step.command)}
        assert not slow, f"{name}: {slow} s"
        assert self.megabytes < MEGABYTES, f"{name}: {self.megabytes} MB"


def limit(command: str) -> float:
    """The seconds of CPU that a command may take: twice the promise to open and list, here where both the text and the
    JSON are made.

    Comparing opens two files; converting reads back what it wrote; a table of every tensor is written twice too.
    """
    return SECONDS * (2 if command in ("inspect", "show", "html") else 4)


class Watched(Forks):
    """The process. Its working directory, `folder`, may hold decoys."""

    def __init__(self, folder: Path) -> None:
        program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support import watched; watched.main()"
        super().__init__("-I", "-B", "-c", program, cwd=folder)

    def run(self, file: Path, commands: Sequence[str] = LOOKING + WRITING + OPTIONAL, **more: Any) -> Seen:
        """Runs the commands on `file`; their outputs go to a folder beside it and are removed."""
        answer = self.ask({"file": os.fspath(file), "commands": commands, **more})
        steps = tuple(Step(*step) for step in answer["steps"])
        return Seen(steps, tuple(answer["violations"]), answer["megabytes"], answer["ended_by"])


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """A process that is there for a while."""
    process = Watched(folder)
    try:
        yield process
    finally:
        process.close()


# The other side ------------------------------------------------------------------------------------------------------


class Violation(BaseException):
    """Raised by the hook where something happens that no input may cause."""


_ARMED: list[bool] = []
_VIOLATIONS: list[str] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    is_parsed = event == "compile" and args[1] == "<unknown>"  # by ast.parse; running it would be an event of its own
    if _ARMED and event.startswith(FORBIDDEN) and (event, args) != ("ctypes.dlopen", (None,)) and not is_parsed:
        _ARMED.clear()  # telling may import
        shown = ", ".join(repr(arg)[:80] for arg in args[:2])
        _VIOLATIONS.append(f"{event}({shown})")
        _ARMED.append(True)
        raise Violation(_VIOLATIONS[-1])


class _Counting(io.TextIOBase):
    """Standard output that counts what it is given, and looks for control bytes in it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.count = 0
        self.raw_control = False

    def write(self, text: str) -> int:
        self.count += len(text)
        self.raw_control |= any(c != "\n" and not c.isprintable() for c in text[:1_000_000])
        return len(text)

    def isatty(self) -> bool:
        return False


def _step(command: str, file: str, other: str, out: str) -> list[Any]:
    from ckptool.errors import CkptoolError

    stream = _Counting()
    began, code, message = time.process_time(), "ok", ""
    try:
        _run(command, file, other, out, stream)
    except CkptoolError as error:
        code, message = error.code, str(error)[:2000]
        stream.write(str(error))
    except Violation as violation:
        code, message = "violation", str(violation)
    except BaseException:  # noqa: BLE001 (whatever it is, it is told)
        _ARMED.clear()  # what tells it may compile
        code, message = "bug", traceback.format_exc()[-3000:]
    return [command, code, message, time.process_time() - began, stream.count, stream.raw_control]


def _run(command: str, file: str, other: str, out: str, stream: _Counting) -> None:
    """One command as the program runs it, its answer as text and as JSON."""
    import ckptool
    from ckptool.cli.output import answer_of
    from ckptool.render.json import dumps
    from ckptool.render.lines import PLAIN

    verb, _, option = command.partition(" ")
    options: dict[str, Any] = {}
    if verb in OPTIONAL:
        if hasattr(ckptool, verb):
            stream.write(str(getattr(ckptool, verb)(file)))
        return
    if verb == "inspect":
        report: Any = ckptool.inspect(file, stats=option == "--stats")
        options = {"all": option == "--all", "depth": None}
    elif verb == "html":
        stream.write(ckptool.inspect(file)._repr_html_())
        return
    elif verb == "show":
        report = ckptool.show(file)
    elif verb == "diff":
        report = ckptool.diff(file, file if option else other)
    elif verb == "convert":
        suffix = {"": ".safetensors", "--all": ".all.safetensors", "to pt": ".pt"}[option]
        report = ckptool.convert(file, out + suffix, all=option == "--all")
    else:
        report = ckptool.remap(file, out + ".cpu.pt", to="cpu")
    stream.write(answer_of(report, PLAIN, options, 0).content)
    stream.write(dumps(answer_of(report, None, options, 0).content))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import shutil
    import tempfile

    gc.disable()  # as the program does
    resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = []
    folder = tempfile.mkdtemp(prefix="watched-", dir=os.path.dirname(request["file"]))
    for command in request["commands"]:
        _ARMED.append(True)
        steps.append(
            _step(command, request["file"], request.get("other", request["file"]), os.path.join(folder, "out"))
        )
        _ARMED.clear()
        if steps[-1][3] > SECONDS / 2:
            steps[-1][3] /= max(1.0, _pace())
    if request.get("control"):
        _control(request["control"])
    shutil.rmtree(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"steps": steps, "violations": _VIOLATIONS, "megabytes": (peak - before) // 1024, "ended_by": 0}


def _pace() -> float:
    """How many times slower than usual this machine is now, with others at work on the same cores."""
    began = time.process_time()
    found: dict[int, list[int]] = {}
    for number in range(200_000):
        found[number] = [number]
    return (time.process_time() - began) / USUAL


def _control(program: str) -> None:
    """Runs a program in which something happens that no input may cause, to show that it would be seen."""
    code = compile(program, "control", "exec")
    for module in ("subprocess", "socket", "ctypes", "pickle"):
        __import__(module)
    function = types.FunctionType(code, {"__builtins__": __builtins__})
    _ARMED.append(True)
    with contextlib.suppress(Violation, OSError):
        function()
    _ARMED.clear()


def _warm_up() -> None:
    """Runs every command on a file with something of everything, so that all that is imported later is there."""
    import codecs
    import tempfile

    from tests.support.hostile_inputs import KNOWN, ORDINARY, pickle_zip

    # Chosen by us, not by a file: a format is imported when the first file of its kind is opened.
    importlib.import_module("ml_dtypes")
    importlib.import_module("fractions")
    for package in ("checkpoint", "formats", "pickles", "transforms", "analysis", "render", "output"):
        path = importlib.import_module(f"ckptool.{package}").__path__
        for module in pkgutil.walk_packages(path, f"ckptool.{package}."):
            importlib.import_module(module.name)
    for codec in ("unicode_escape", "raw_unicode_escape", "utf-32-le", "utf-32-be", "latin-1"):
        codecs.lookup(codec)

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate((pickle_zip(*ORDINARY), pickle_zip(*KNOWN), b"{}", b"")):
            file = os.path.join(folder, f"{number}.pt")
            Path(file).write_bytes(data)
            for command in LOOKING + WRITING + OPTIONAL:
                step = _step(command, file, os.path.join(folder, "0.pt"), out := os.path.join(folder, f"out{number}"))
                assert step[1] != "bug", step[2]
                if number == 1 and command == "convert":
                    _step("inspect", f"{out}.safetensors", "", "")
        _step("show", os.path.join(folder, "0.pt#nowhere"), "", "")


def _ended(status: int, _: Any) -> dict[str, Any]:
    return {"steps": [], "violations": [], "megabytes": 0, "ended_by": os.WTERMSIG(status) or -1}


def main() -> None:
    os.environ["CKPTOOL_DEBUG"] = "1"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _warm_up()
    sys.addaudithook(_hook)
    serve_forked(_answer, _ended)
