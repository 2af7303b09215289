"""HOSTILE.md, row 131 and section 7: inputs that change while they are read, and systems that fail while a file is written.

The sweep over every event of every command is `tests/output/test_faults.py`; here are the faults that need a system of their own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptool
from ckptool.cli import main
from ckptool.errors import CkptoolError, FileChanged, FileProblem
from ckptool.output import copying, durable
from tests.checkpoints import saved
from tests.helpers import assert_same_objects, default_signals, load

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-c", "from ckptool.cli import main; main()"]


def state(rows: int = 300) -> dict[str, Any]:
    w = torch.arange(rows * 200, dtype=torch.float32).reshape(rows, 200)
    return {"module.fc.weight": w, "module.fc.bias": torch.ones(200).half(), "module.more": torch.ones(9_000)}


def clean(rows: int = 300) -> dict[str, Any]:
    return {key.removeprefix("module."): value for key, value in state(rows).items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(state(), tmp_path / "in.pt")


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".ckptool-*")]


# Inputs that change ----------------------------------------------------------------------------------------------------

READING: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda file, out: ckptool.inspect(file, stats=True),
    "show": lambda file, out: ckptool.show(file, at="module.fc.weight", all=True),
    "show, corners": lambda file, out: ckptool.show(file, at="module.fc.weight"),
    "diff": lambda file, out: ckptool.diff(file, file.with_name(f"copy{file.suffix}")),
    "diff, the other way": lambda file, out: ckptool.diff(file.with_name(f"copy{file.suffix}"), file),
    "strip-module": lambda file, out: ckptool.strip_module(file, out),
    "strip-module, verified": lambda file, out: ckptool.strip_module(file, out, verify=True),
    "cast": lambda file, out: ckptool.cast(file, out, dtype="bf16"),
    "convert": lambda file, out: ckptool.convert(file, out.with_suffix(".safetensors")),
    "convert to pt": lambda file, out: ckptool.convert(file, out),
}


def shrunk(file: Path) -> None:
    os.truncate(file, file.stat().st_size * 2 // 3)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def overwritten(file: Path) -> None:
    size = file.stat().st_size
    time.sleep(0.005)
    with file.open("r+b") as other:
        other.write(os.urandom(size))


@pytest.mark.parametrize("container", ["pt", "safetensors"])
@pytest.mark.parametrize("change", [shrunk, emptied, overwritten])
@pytest.mark.parametrize("verb", READING)
def test_row_131_the_input_changes_while_it_is_read(
    verb: str, change: Callable[[Path], None], container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first read, in the middle, and at the last: never a result, a crash, or another error than that."""
    file, out = tmp_path / f"in.{container}", tmp_path / "out.pt"
    data = safetensors.torch.save(state()) if container == "safetensors" else saved(state(), file).read_bytes()
    file.with_name(f"copy.{container}").write_bytes(data)
    reads, at, lock = [0], [0], threading.Lock()  # checksums are read in threads

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            result = real(*args)
            if os.fstat(args[0]).st_ino == file.stat().st_ino:
                with lock:
                    reads[0] += 1
                    if reads[0] == at[0]:
                        change(file)
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("pread", "preadv", "copy_file_range"):
        counted(name)
    file.write_bytes(data)
    READING[verb](file, out)
    total, noticed = reads[0], 0
    for point in {1, 2, total // 2, total - 1, total} - {0}:
        for path in tmp_path.glob("out*"):
            path.unlink()
        file.write_bytes(data)
        reads[0], at[0] = 0, point
        with suppress(FileChanged):
            READING[verb](file, out)
            assert reads[0] < point <= total, "threads needed fewer reads this time, and nothing was changed"
            continue
        noticed += 1
        assert not list(tmp_path.glob("out*")) and temporaries(tmp_path) == []
    assert noticed >= 3


# Signals and pipes -----------------------------------------------------------------------------------------------------


def test_row_150_nobody_reads_what_is_said(model: Path) -> None:
    """SIGPIPE: the work is done, and the exit code says how it went."""
    script = f"set -o pipefail; {{ '{sys.executable}' -c '{PROGRAM[2]}' strip-module in.pt -o out.pt; echo $? >code; }} 2>&1 | true"
    subprocess.run(["bash", "-c", script], cwd=model.parent, check=False)
    assert (model.parent / "code").read_text() == "0\n"
    assert_same_objects(load(model.parent / "out.pt"), clean())
    missing = f"{{ sleep 0.1; '{sys.executable}' -c '{PROGRAM[2]}' inspect no.pt; echo $? >code; }} 2>&1 | true"
    subprocess.run(["bash", "-c", missing], cwd=model.parent, check=False)
    assert (model.parent / "code").read_text() == "2\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_row_150_standard_streams_that_are_closed(closed: str, model: Path) -> None:
    """A file that is opened then gets number 0, 1 or 2: nothing may be printed into it."""
    script = f"'{sys.executable}' -c '{PROGRAM[2]}' strip-module in.pt -o out.pt {closed}"
    assert subprocess.run(["bash", "-c", script], cwd=model.parent, check=False, capture_output=True).returncode == 0
    assert_same_objects(load(model.parent / "out.pt"), clean())
    script = f"'{sys.executable}' -c '{PROGRAM[2]}' strip-module in.pt --in-place --dry-run --prefix nope. {closed}"
    assert subprocess.run(["bash", "-c", script], cwd=model.parent, check=False, capture_output=True).returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_row_150_a_signal_that_python_would_drop(number: signal.Signals, tmp_path: Path) -> None:
    """While an object is thrown away Python drops what is raised: the signal is heard a moment later."""
    code = f"""
import os, signal, sys, time
from ckptool import cli
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), {int(number)})
def run(*args):
    Dropped()
    time.sleep(20)
cli._run = run
cli.main()
"""
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, preexec_fn=default_signals
    )
    assert ended.returncode == 128 + number and "Traceback" not in ended.stderr and time.monotonic() - start < 15


# Full disks ------------------------------------------------------------------------------------------------------------

FILLED = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from ckptool.cli import main
from ckptool.output import durable
folder, words, free = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
durable._check_space = durable.reserve = lambda *args: None  # somebody else takes the room after it was looked at
import ckptool.output.append, ckptool.output.folders
ckptool.output.append._check_space = ckptool.output.folders._check_space = ckptool.output.folders.reserve = durable.reserve
os.chdir(folder)
data = open(sys.argv[4], "rb").read()
for room in free:
    for name in os.listdir("."):
        os.remove(name)
    for name in ("in.pt", "out.pt"):
        with open(name, "wb") as file:
            file.write(data if name == "in.pt" else b"old")
    left = os.statvfs(".").f_bavail * os.statvfs(".").f_frsize
    with open("ballast", "wb") as file:
        file.write(bytes(max(0, left - room)))
    told = io.StringIO()
    with redirect_stderr(told), redirect_stdout(told):
        code = main(words)
    with open("in.pt", "rb") as file, open("out.pt", "rb") as other:
        print(json.dumps([room, code, told.getvalue(), sorted(os.listdir(".")), file.read() == data, other.read() == b"old"]))
"""


def filled(words: list[str], free: list[int], model: Path) -> list[list[Any]]:
    """What `main(words)` does on a tmpfs with so many bytes free; where there are no user namespaces, with so low a limit on files."""
    small = model.parent / "small"
    small.mkdir()
    script, arguments = model.parent / "run.py", [str(small), json.dumps(words), json.dumps(free), str(model)]
    script.write_text(FILLED)
    mount = 'mount -t tmpfs -o size=2m none "$0" && shift 0 && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, str(small), sys.executable, str(script), *arguments]
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        command = [sys.executable, "-c", LIMITED, str(script), *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# Without a file system of its own: the same script, with a limit on the size of files instead of the room on the disk.
LIMITED = """
import builtins, resource, sys
sys.argv = sys.argv[1:]
code = open(sys.argv[0]).read().replace('file.write(bytes(max(0, left - room)))', 'file.write(b"")')
code = code.replace('code = main(words)', 'limit(room); code = main(words); limit(-1)')
exec(code, {"limit": lambda room: resource.setrlimit(resource.RLIMIT_FSIZE, (room, -1))})
"""

FULL = [
    ["strip-module", "in.pt", "-o", "out.pt", "-f"],
    ["strip-module", "in.pt", "-o", "in.pt", "-f"],
    ["strip-module", "in.pt", "--in-place"],
    ["cast", "in.pt", "--dtype", "bf16", "-o", "out.pt", "-f"],
    ["convert", "in.pt", "-o", "new.safetensors"],
]


@pytest.mark.parametrize("words", FULL, ids=" ".join)
def test_row_151_a_disk_that_fills(words: list[str], model: Path) -> None:
    free = [0, 4096, 8192, 40_960, 65_536, 98_304, 131_072, 200_000, 240_000]
    found = filled(words, free, model)
    refused = [result for result in found if result[1]]
    assert len(found) == len(free) and len(refused) >= 1
    for _, code, told, names, same_input, same_output in refused:
        assert code == 2 and told.startswith("error[disk-full]: cannot write") and "is as it was" in told, told
        assert "the disk is full" in told or "may not grow so large" in told
        assert same_input and same_output and set(names) <= {"in.pt", "out.pt", "ballast"}


@pytest.mark.parametrize("words", FULL, ids=" ".join)
def test_row_151_the_limit_on_file_sizes(words: list[str], model: Path) -> None:
    """RLIMIT_FSIZE, and the signal SIGXFSZ that comes with it, which Python ignores and we must not make deadly."""
    (model.parent / "out.pt").write_bytes(b"old")
    before = {path.name: path.read_bytes() for path in model.parent.iterdir()}
    size = 1000 if "--in-place" not in words else model.stat().st_size + 100

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    ended = subprocess.run(
        [*PROGRAM, *words], cwd=model.parent, preexec_fn=limit, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2 and "files may not grow so large here" in ended.stderr, ended
    assert {path.name: path.read_bytes() for path in model.parent.iterdir()} == before


# Errors that come late -------------------------------------------------------------------------------------------------


class Calls:
    """Fails at one call of a function of `os` on files of one kind, and remembers the order of all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str, number: int, folder: bool = False) -> None:
        self.seen: list[str] = []
        for name in ("fsync", "close", "dup", "replace", "link", "unlink"):
            real = getattr(os, name)

            def call(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
                self.seen.append(name)
                is_folder = isinstance(args[0], int) and stat.S_ISDIR(os.fstat(args[0]).st_mode)
                if name == failing and is_folder is folder and number:
                    if name == "close":
                        real(*args)  # as it is: the descriptor is gone, and the error told
                    raise OSError(number, os.strerror(number))
                return real(*args, **options)

            monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "close"])
def test_rows_152_and_153_an_error_of_sync_or_close_is_a_failure_and_nothing_is_renamed(
    call: str, number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.pt").write_bytes(b"old")
    with monkeypatch.context() as patch:
        calls = Calls(patch, call, number)
        with pytest.raises(FileProblem) as caught:
            ckptool.strip_module(model, tmp_path / "out.pt", overwrite=True)
    assert "replace" not in calls.seen and "link" not in calls.seen, "not renamed"
    assert calls.seen.count("fsync") == 1, "not asked again: the second answer would be a lie"
    assert "is as it was" in caught.value.why
    assert (tmp_path / "out.pt").read_bytes() == b"old" and temporaries(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EBUSY, errno.EACCES, errno.ENOSPC])
def test_row_154_a_rename_that_fails(number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.pt").write_bytes(b"old")
    Calls(monkeypatch, "replace", number)
    with pytest.raises(FileProblem):
        ckptool.strip_module(model, tmp_path / "out.pt", overwrite=True)
    assert (tmp_path / "out.pt").read_bytes() == b"old" and temporaries(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOTSUP])
def test_row_155_a_folder_that_cannot_be_synced_is_a_note(
    number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        Calls(patch, "fsync", number, folder=True)
        assert main(["strip-module", str(model), "-o", str(tmp_path / "out.pt")]) == 0
        told = capsys.readouterr().out
        done = ckptool.add_module(model, tmp_path / "two.pt")
    assert "complete and visible, but its durability is uncertain" in told
    assert [note.code for note in done.notes] == ["not-synced"]
    assert_same_objects(load(tmp_path / "out.pt"), clean())


def test_row_155_is_told_of_digests_and_of_what_was_recovered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Calls(patch, "fsync", errno.EIO, folder=True)
        verified = ckptool.verify(model, write_digest=tmp_path / "digests.json")
        recovered = ckptool.recover(model, tmp_path / "whole.pt")
    assert "not-synced" in [note.code for note in verified.notes]
    assert [note.code for note in recovered.notes] == ["not-synced"] and "is uncertain" in str(recovered)


def test_row_156_calls_that_do_half_or_ask_to_be_tried_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "PAUSE", 0.0)
    counts: dict[str, int] = {}

    def odd(name: str, shortened: Callable[..., Any]) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            if name in ("pwrite", "copy_file_range") and counts[name] % 3 == 0:
                raise BlockingIOError(errno.EAGAIN, "try again")
            return shortened(real, *args)

        monkeypatch.setattr(os, name, call)

    odd("pwrite", lambda real, fd, data, at: real(fd, bytes(data)[:7_777], at))
    odd("copy_file_range", lambda real, a, b, size, *rest: real(a, b, min(size, 10_001), *rest))
    odd("pread", lambda real, fd, size, at: real(fd, min(size, 5_001), at))
    ckptool.strip_module(model, tmp_path / "out.pt", verify=True)
    assert_same_objects(load(tmp_path / "out.pt"), clean())
    assert counts["pwrite"] > 3

    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)  # for ever: an error, not an endless loop
    with pytest.raises(FileProblem):
        ckptool.strip_module(model, tmp_path / "two.pt")
    assert not (tmp_path / "two.pt").exists() and temporaries(tmp_path) == []


def test_row_156_signals_do_not_disturb(tmp_path: Path) -> None:
    """EINTR: a timer that fires all the time changes nothing."""
    file = saved(state(2_000), tmp_path / "in.pt")
    ticks: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for number in range(5):
            ckptool.strip_module(file, tmp_path / f"{number}.pt", verify=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(ticks) > 5
    assert_same_objects(load(tmp_path / "4.pt"), clean(2_000))


# Several at once -------------------------------------------------------------------------------------------------------


def test_rows_158_and_159_two_writers_and_a_reader(tmp_path: Path) -> None:
    """One complete winner; a reader sees the file of one or the other, whole, all the time."""
    file, target = saved(state(), tmp_path / "in.pt"), tmp_path / "out.pt"
    ckptool.strip_module(file, target)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", f"import ckptool\nfor _ in range(12): {call}"], cwd=tmp_path, stderr=subprocess.PIPE
        )
        for call in (
            "ckptool.strip_module('in.pt', 'out.pt', overwrite=True)",
            "ckptool.add_module('in.pt', 'out.pt', overwrite=True)",
        )
    ]
    seen: set[str] = set()
    while any(writer.poll() is None for writer in writers):
        found = load(target)
        first = next(iter(found))
        seen.add(first)
        prefix = {"fc.weight": "", "module.module.fc.weight": "module.module."}[first]
        assert_same_objects(found, {f"{prefix}{key}": value for key, value in clean().items()})
    for writer in writers:
        assert writer.communicate()[1] == b"" and writer.returncode == 0
    assert seen and temporaries(tmp_path) == []


def test_row_158_two_writers_in_place(tmp_path: Path) -> None:
    file = saved(state(), tmp_path / "in.pt")
    codes: list[str] = []

    def edit() -> None:
        for _ in range(4):
            try:
                ckptool.add_module(file, in_place=True)
                codes.append("done")
            except CkptoolError as error:
                codes.append(error.code)

    threads = [threading.Thread(target=edit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {"done", "conflict", "file-changed"} and "done" in codes
    prefix = "module." * codes.count("done")
    assert_same_objects(load(file), {f"{prefix}{key}": value for key, value in state().items()})


# Limits of the process -------------------------------------------------------------------------------------------------

LOW_MEMORY = """
import resource, sys
from ckptool.cli import main
room = int(sys.argv.pop(1))
pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else 0
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
main()
"""


@pytest.mark.parametrize("words", [FULL[0], FULL[3], ["inspect", "in.pt", "--stats"]], ids=" ".join)
def test_row_160_little_memory(words: list[str], tmp_path: Path) -> None:
    saved({"model": state(12_000), "text": "x" * 3_000_000}, tmp_path / "in.pt")
    codes = set()
    for room in (1 << 18, 3 << 20, 12 << 20, 400 << 20):
        (tmp_path / "out.pt").write_bytes(b"old")
        ended = subprocess.run(
            [sys.executable, "-c", LOW_MEMORY, str(room), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        codes.add(ended.returncode)
        assert ended.returncode in (0, 2) and "Traceback" not in ended.stderr, (room, ended.stderr)
        assert "error[bug]" not in ended.stderr, (room, ended.stderr)
        assert temporaries(tmp_path) == []
        assert ((tmp_path / "out.pt").read_bytes() == b"old") is (ended.returncode == 2 or words[0] == "inspect")
    assert 0 in codes and (2 in codes or sys.platform != "linux")


FEW_FILES = """
import os, resource, sys
from ckptool.cli import main
count = int(sys.argv.pop(1))
taken = len(os.listdir("/proc/self/fd")) - 1 if os.path.isdir("/proc/self/fd") else 3
resource.setrlimit(resource.RLIMIT_NOFILE, (taken + count,) * 2)
main()
"""


def test_row_161_too_many_open_files(model: Path) -> None:
    codes = []
    for count in (0, 1, 2, 3, 6):
        (model.parent / "out.pt").write_bytes(b"old")
        words = ["strip-module", "in.pt", "-o", "out.pt", "-f", "--verify"]
        ended = subprocess.run(
            [sys.executable, "-c", FEW_FILES, str(count), *words],
            cwd=model.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode in (0, 2) and "Traceback" not in ended.stderr, ended.stderr
        assert ended.returncode == 0 or ("open files" in ended.stderr and "error[io]" in ended.stderr), ended.stderr
        assert temporaries(model.parent) == []
        assert ((model.parent / "out.pt").read_bytes() == b"old") is (ended.returncode == 2)
        codes.append(ended.returncode)
    assert codes[0] == 2 and codes[-1] == 0


@pytest.mark.parametrize("folder", [None, "/nowhere", "/proc", "\0"])
def test_row_161_no_place_for_temporary_files(folder: str | None, model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    if folder is not None and folder != "\0":
        environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)
    words = ["cast", "in.pt", "--dtype", "f16", "-o", "out.pt"]
    ended = subprocess.run(
        [*PROGRAM, *words], cwd=model.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert load(model.parent / "out.pt")["module.fc.weight"].dtype == torch.float16


# What others left ------------------------------------------------------------------------------------------------------


def test_row_162_clocks_that_jump(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on the time of day, nor on how old a file seems."""
    left = tmp_path / f"{durable._prefix('out.pt')}0123456789abcdef.tmp"
    for moment in (0, 1, 2**31, 4_000_000_000):
        left.write_bytes(b"debris")
        os.utime(left, (moment, moment))
        os.utime(model, (moment, moment))
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        ckptool.strip_module(model, tmp_path / "out.pt", overwrite=True)
        assert temporaries(tmp_path) == []
    assert_same_objects(load(tmp_path / "out.pt"), clean())


def test_row_162_a_locked_file_is_somebody_elses_whoever_that_is(model: Path, tmp_path: Path) -> None:
    """The lock of a dead machine may never go: no run waits for it, and none removes what it holds."""
    foreign = tmp_path / f"{durable._prefix('out.pt')}0123456789abcdef.tmp"
    foreign.write_bytes(b"another machine's")
    with foreign.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        ckptool.strip_module(model, tmp_path / "out.pt")
        assert time.monotonic() - start < 10 and foreign.read_bytes() == b"another machine's"
    others = [".ckptool-notes.tmp", "in.pt.tmp", ".ckptool-ffffffffffffffff-0123456789abcdef.tmp"]
    for name in others:
        (tmp_path / name).write_bytes(b"theirs")
    ckptool.strip_module(model, tmp_path / "out.pt", overwrite=True)
    assert not foreign.exists() and all((tmp_path / name).read_bytes() == b"theirs" for name in others)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_row_162_a_file_system_without_locks(
    number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written all the same; what a killed run left stays, since nobody can tell whose it is. In place is refused."""

    def refused(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    left = tmp_path / f"{durable._prefix('out.pt')}0123456789abcdef.tmp"
    left.write_bytes(b"perhaps alive")
    ckptool.strip_module(model, tmp_path / "out.pt")
    assert_same_objects(load(tmp_path / "out.pt"), clean())
    assert left.read_bytes() == b"perhaps alive"
    before = model.read_bytes()
    with pytest.raises(FileProblem, match="cannot be locked"):
        ckptool.strip_module(model, in_place=True)
    assert model.read_bytes() == before


def test_row_162_a_name_that_always_seems_taken_is_an_error_not_a_loop(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*args: Any) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "taken")

    monkeypatch.setattr(fcntl, "flock", taken)
    with pytest.raises(FileProblem, match="No locks available"):
        ckptool.strip_module(model, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
