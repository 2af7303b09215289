"""Disks that fill, calls that fail late, do half or ask to be tried again; little memory, few open files."""

import errno
import json
import os
import resource
import signal
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint.paths import temporary_files
from ckptool.cli.output import in_words
from ckptool.errors import DiskFull, FileProblem
from ckptool.output import sink
from tests.support.files import load, saved
from tests.support.hostile_system import FULL, PROGRAM, ROOT, clean, ran, temporaries, wrapped_state
from tests.support.same import assert_same_objects


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(wrapped_state(), tmp_path / "in.pt")


# Full disks -----------------------------------------------------------------------------------------------------------

FILLED = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from ckptool.cli import main
from ckptool.output import durable
folder, words, free = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
durable.check_space = durable.reserve = lambda *args: None  # somebody else takes the room after it was looked at
import ckptool.output.durable, ckptool.output.folders
ckptool.output.durable.check_space = ckptool.output.folders.check_space = durable.reserve
ckptool.output.folders.reserve = durable.reserve
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
        same = file.read() == data, other.read() == b"old"
        print(json.dumps([room, code, told.getvalue(), sorted(os.listdir(".")), *same]))
"""


def filled(words: list[str], free: list[int], model: Path) -> list[list[Any]]:
    """What `main(words)` does on a tmpfs with so many bytes free; where there are no user namespaces, with so low a
    limit on files."""
    small = model.parent / "small"
    small.mkdir()
    script, arguments = model.parent / "run.py", [str(small), json.dumps(words), json.dumps(free), str(model)]
    script.write_text(FILLED)
    mount = 'mount -t tmpfs -o size=2m none "$0" && shift 0 && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, str(small), sys.executable, str(script), *arguments]
    if ran(["unshare", "-rm", "true"]).returncode:
        command = [sys.executable, "-c", LIMITED, str(script), *arguments]
    done = ran(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
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


@pytest.mark.parametrize("words", FULL, ids=" ".join)
def test_a_full_disk_leaves_everything_as_it_was(words: list[str], model: Path) -> None:
    free = [0, 4096, 8192, 40_960, 65_536, 98_304, 131_072, 200_000, 240_000]
    found = filled(words, free, model)
    refused = [result for result in found if result[1]]
    assert len(found) == len(free) and len(refused) >= 1
    for _, code, told, names, same_input, same_output in refused:
        said = "Nothing was written" if "new.safetensors" in words else "is as it was"
        assert code == 2 and told.startswith("error[disk-full]: cannot write") and said in told, told
        assert "the disk is full" in told or "file size limit" in told
        assert same_input and same_output and set(names) <= {"in.pt", "out.pt", "ballast"}


@pytest.mark.parametrize("name", ["check_space", "reserve", "settle"])
def test_what_was_not_there_is_not_as_it_was(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"ckptool.output.durable.{name}", full)
    out = model.parent / "out.pt"
    for there in (False, True):
        with pytest.raises(DiskFull) as caught:
            ckptool.strip_module(model, out, overwrite=there)
        assert ("is as it was" in caught.value.why) == there == out.exists(), caught.value
        out.write_bytes(b"old")


@pytest.mark.parametrize("words", FULL[::2], ids=" ".join)
def test_the_limit_on_file_sizes_leaves_everything_as_it_was(words: list[str], model: Path) -> None:
    """RLIMIT_FSIZE, and the signal SIGXFSZ that comes with it, which Python ignores and we must not make deadly."""
    (model.parent / "out.pt").write_bytes(b"old")
    before = {path.name: path.read_bytes() for path in model.parent.iterdir()}
    size = 1000 if "--in-place" not in words else model.stat().st_size + 100

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    ended = ran([*PROGRAM, *words], cwd=model.parent, preexec_fn=limit)
    assert ended.returncode == 2 and "the file size limit was reached" in ended.stderr, ended
    assert {path.name: path.read_bytes() for path in model.parent.iterdir()} == before


@pytest.mark.long("prove imports torch")
@pytest.mark.parametrize("room", ["4k", "400k"])
def test_no_room_for_temporary_files_is_an_error_and_leaves_none(room: str, tmp_path: Path) -> None:
    """With 400k there is room for all but the pages that are mapped."""
    if ran(["unshare", "-rm", "true"]).returncode:
        pytest.skip("no file system of its own here")
    script = f'mount -t tmpfs -o size={room} none "$TMPDIR" && ("$@"; code=$?; ls "$TMPDIR"; exit $code)'
    words = [*PROGRAM, "prove", "--kills", "1", "--", "sh", "-c", "echo 1 > {run}/a.pt"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ended = ran(["unshare", "-rm", "sh", "-c", script, "sh", *words], env=environment, cwd=ROOT)
    assert ended.returncode == 2 and not ended.stdout, ended
    assert ended.stderr.startswith("error[io]: cannot write temporary files to") and "TMPDIR" in ended.stderr, ended


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENOENT, errno.EROFS])
@pytest.mark.parametrize("folder", ["/tmp/odd", None])
def test_only_errors_of_temporary_files_are_said_to_be_theirs(
    number: int, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder)
    for names in ((), ("/tmp/odd/a",), ("/usr/b", None, "/tmp/odd/a"), ("/usr/b",)):
        is_theirs = folder is None or names != ("/usr/b",)
        with pytest.raises(FileProblem if is_theirs else OSError) as caught, temporary_files():
            raise OSError(number, os.strerror(number), *names)
        assert isinstance(caught.value, FileProblem) == is_theirs
        assert not is_theirs or ("TMPDIR" in caught.value.fix and "/usr/b" not in str(caught.value))


# Errors that come late ------------------------------------------------------------------------------------------------


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
def test_an_error_of_sync_or_close_is_a_failure_and_nothing_is_renamed(
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


def test_verify_and_recover_note_a_folder_that_cannot_be_synced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Calls(patch, "fsync", errno.EIO, folder=True)
        verified = ckptool.verify(model, write_digest=tmp_path / "digests.json")
        recovered = ckptool.recover(model, tmp_path / "whole.pt")
    assert "not-synced" in [note.code for note in verified.notes]
    assert [note.code for note in recovered.notes] == ["not-synced"] and "may not be durable" in str(recovered)


def test_short_and_interrupted_calls_are_completed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "PAUSE", 0.0)
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


def test_signals_do_not_disturb_writing(tmp_path: Path) -> None:
    """EINTR: a timer that fires all the time changes nothing."""
    file = saved(wrapped_state(2_000), tmp_path / "in.pt")
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


# Limits of the process ------------------------------------------------------------------------------------------------


LOW_MEMORY = """
import resource, sys
from ckptool.cli import main
room = int(sys.argv.pop(1))
pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else 0
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
main()
"""


@pytest.mark.parametrize("words", [FULL[0], FULL[3], ["inspect", "in.pt", "--stats"]], ids=" ".join)
def test_too_little_memory_is_an_error_and_writes_nothing(words: list[str], tmp_path: Path) -> None:
    saved({"model": wrapped_state(12_000), "text": "x" * 3_000_000}, tmp_path / "in.pt")
    codes = set()
    for room in (1 << 18, 3 << 20, 12 << 20, 400 << 20):
        (tmp_path / "out.pt").write_bytes(b"old")
        ended = ran([sys.executable, "-c", LOW_MEMORY, str(room), *words], cwd=tmp_path)
        codes.add(ended.returncode)
        assert ended.returncode in (0, 2) and "Traceback" not in ended.stderr, (room, ended.stderr)
        assert "error[bug]" not in ended.stderr, (room, ended.stderr)
        assert temporaries(tmp_path) == []
        assert ((tmp_path / "out.pt").read_bytes() == b"old") is (ended.returncode == 2 or words[0] == "inspect")
    assert 0 in codes and (2 in codes or sys.platform != "linux")


@pytest.mark.parametrize(
    "said", ["error return without exception set", "f() returned NULL without setting an exception"]
)
def test_where_not_even_the_error_could_be_made_it_is_memory_that_lacks(said: str) -> None:
    assert (
        in_words(SystemError(said)).code == "limit-exceeded"
    )  # the two ways in which CPython says so (Objects/call.c)
    assert in_words(SystemError("bad argument to internal function")).code == "bug"


FEW_FILES = """
import os, resource, sys
from ckptool.cli import main
count = int(sys.argv.pop(1))
taken = len(os.listdir("/proc/self/fd")) - 1 if os.path.isdir("/proc/self/fd") else 3
resource.setrlimit(resource.RLIMIT_NOFILE, (taken + count,) * 2)
main()
"""


def test_too_few_open_files_are_an_error_and_write_nothing(model: Path) -> None:
    codes = []
    for count in (0, 1, 2, 3, 6):
        (model.parent / "out.pt").write_bytes(b"old")
        words = ["strip-module", "in.pt", "-o", "out.pt", "-f", "--verify"]
        ended = ran([sys.executable, "-c", FEW_FILES, str(count), *words], cwd=model.parent)
        assert ended.returncode in (0, 2) and "Traceback" not in ended.stderr, ended.stderr
        assert ended.returncode == 0 or ("open files" in ended.stderr and "error[io]" in ended.stderr), ended.stderr
        assert temporaries(model.parent) == []
        assert ((model.parent / "out.pt").read_bytes() == b"old") is (ended.returncode == 2)
        codes.append(ended.returncode)
    assert codes[0] == 2 and codes[-1] == 0


@pytest.mark.parametrize("folder", [None, "/nowhere", "/proc", "\0"])
def test_no_temporary_folder_is_needed(folder: str | None, model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    if folder is not None and folder != "\0":
        environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)
    words = ["cast", "in.pt", "--dtype", "f16", "-o", "out.pt"]
    ended = ran([*PROGRAM, *words], cwd=model.parent, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert load(model.parent / "out.pt")["module.fc.weight"].dtype == torch.float16
