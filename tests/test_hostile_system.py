"""Inputs that change while they are read, signals, pipes, and other processes.

The sweep over every event of every command is `tests/output/test_faults.py`; here are the faults that need a system of
their own. Full disks, late errors and limits of the process are in `test_hostile_disks`.
"""

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptool
from ckptool.checkpoint import files
from ckptool.commands import VERBS
from ckptool.errors import CkptoolError, FileChanged, FileProblem
from ckptool.output import durable
from tests.support.files import load, saved, weights
from tests.support.hostile_system import PROGRAM, ROOT, clean, ran, temporaries, wrapped_state
from tests.support.processes import HANG, default_signals
from tests.support.same import assert_same_objects
from tests.support.small_files import PLAIN, make_small_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(wrapped_state(), tmp_path / "in.pt")


# Inputs that change ---------------------------------------------------------------------------------------------------

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
def test_an_input_that_changes_while_it_is_read_is_refused(
    verb: str, change: Callable[[Path], None], container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first read, in the middle, and at the last: never a result, a crash, or another error than that."""
    file, out = tmp_path / f"in.{container}", tmp_path / "out.pt"
    data = (
        safetensors.torch.save(wrapped_state())
        if container == "safetensors"
        else saved(wrapped_state(), file).read_bytes()
    )
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


OF_FOLDERS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda folder, out: ckptool.convert(folder, out),
    "cast": lambda folder, out: ckptool.cast(folder, out, dtype="f64"),
    "load": lambda folder, out: torch.save(ckptool.load(folder), out),
    "verify": lambda folder, out: ckptool.verify(folder),
    "diff": lambda folder, out: ckptool.diff(folder, folder.with_name("1.pt")).changed,
}


@pytest.mark.parametrize("options", [{"container": "sharded", "shard_size": "30KB"}, {"container": "dcp", "ranks": 3}])
@pytest.mark.parametrize("verb", OF_FOLDERS)
def test_a_folder_that_is_replaced_while_it_is_read_is_never_mixed(
    verb: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each opening of a file of it: what comes of that is all of the old one, or of the new, or `FileChanged`."""
    folder, out, real = tmp_path / "folder", tmp_path / "out.pt", files.open_descriptor
    for value in (1, 2):
        torch.save({f"w{n}": torch.full((5_000,), value) for n in range(6)}, tmp_path / f"{value}.pt")
    opened, at, found = [0], [0], set[str]()

    def open_descriptor(path: str) -> Any:
        opened[0] += str(folder) in path
        if at[0] and opened[0] == at[0]:
            at[0] = 0  # once: writing opens, too
            ckptool.convert(tmp_path / "2.pt", folder, overwrite=True, **options)
        return real(path)

    monkeypatch.setattr(files, "open_descriptor", open_descriptor)
    total = 100
    for point in range(1, total):
        out.unlink(missing_ok=True)
        at[0] = 0
        ckptool.convert(tmp_path / "1.pt", folder, overwrite=True, **options)
        opened[0], at[0] = 0, point
        try:
            changed = OF_FOLDERS[verb](folder, out)
            values = {float(v) for w in torch.load(out).values() for v in (w[0], w[-1])} if out.exists() else set()
            assert len(values) < 2 and (verb != "diff" or len(changed) in (0, 6)), (point, values)  # type: ignore[arg-type]
            found.add("whole")
        except FileChanged:
            found.add("changed")
        if at[0]:  # it opens no more files than that
            break
    assert found == {"whole", "changed"} and 2 < point < total - 1


# Signals and pipes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_spoil_no_file(closed: str, model: Path) -> None:
    """A file that is opened then gets number 0, 1 or 2: nothing may be printed into it."""
    script = f"'{sys.executable}' -c '{PROGRAM[2]}' strip-module in.pt -o out.pt {closed}"
    assert ran(["bash", "-c", script], cwd=model.parent).returncode == 0
    assert_same_objects(load(model.parent / "out.pt"), clean())
    script = f"'{sys.executable}' -c '{PROGRAM[2]}' strip-module in.pt --in-place --dry-run --prefix nope. {closed}"
    assert ran(["bash", "-c", script], cwd=model.parent).returncode == 1


# While an object is thrown away Python drops what is raised: the signal is heard a moment later. While a class is made,
# or a module imported that has a way without another, something else is raised for it, or nothing.
UNHEARD = {
    "dropped": "class Dropped:\n        def __del__(self):\n            end()\n    Dropped()\n    time.sleep(200)",
    "replaced": "class Name:\n        def __set_name__(self, *_):\n            end()\n    class A:\n        a = Name()",
    "caught": "try:\n        end()\n    except BaseException:\n        return 0",
}


@pytest.mark.parametrize("how", UNHEARD)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_python_would_drop_is_heard(number: signal.Signals, how: str) -> None:
    code = f"""
import os, signal, sys, time
from ckptool import cli
def end():
    os.kill(os.getpid(), {int(number)})
def run(*args):
    {UNHEARD[how]}
cli._run = run
cli.main()
"""
    ended = ran([sys.executable, "-c", code], cwd=ROOT, preexec_fn=default_signals, timeout=HANG)
    assert ended.returncode == 128 + number and "Traceback" not in ended.stderr
    assert ended.stderr == ("interrupted\n" if number == signal.SIGINT else "")


def test_an_interrupt_while_the_program_starts_is_no_traceback() -> None:
    code = f"""
import dataclasses, os, sys
real, sys.argv = dataclasses.Field.__set_name__, ["ckptool", "--version"]
def end(*names):
    os.kill(os.getpid(), {int(signal.SIGINT)})
    real(*names)
dataclasses.Field.__set_name__ = end
from ckptool.__main__ import main
main()
"""
    ended = ran([sys.executable, "-c", code], cwd=ROOT, preexec_fn=default_signals, timeout=HANG)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_how_git_ended_is_known_where_the_signal_of_children_is_ignored(model: Path) -> None:
    words = [*PROGRAM, "git-check", "in.pt"]
    plain, ignored = (
        ran(words, cwd=model.parent, preexec_fn=lambda how=how: signal.signal(signal.SIGCHLD, how))
        for how in (signal.SIG_DFL, signal.SIG_IGN)
    )
    assert (ignored.returncode, ignored.stdout, ignored.stderr) == (plain.returncode, plain.stdout, plain.stderr)


# Several at once ------------------------------------------------------------------------------------------------------


def test_of_several_edits_in_place_at_once_some_are_refused(tmp_path: Path) -> None:
    file = saved(wrapped_state(), tmp_path / "in.pt")
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
    assert_same_objects(load(file), {f"{prefix}{key}": value for key, value in wrapped_state().items()})


# What others left -----------------------------------------------------------------------------------------------------


def test_clocks_that_jump_change_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on the time of day, nor on how old a file seems."""
    left = Path(durable.hidden_name(str(tmp_path / "out.pt")))
    for moment in (0, 1, 2**31, 4_000_000_000):
        left.write_bytes(b"debris")
        os.utime(left, (moment, moment))
        os.utime(model, (moment, moment))
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        ckptool.strip_module(model, tmp_path / "out.pt", overwrite=True)
        assert temporaries(tmp_path) == []
    assert_same_objects(load(tmp_path / "out.pt"), clean())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_without_file_locks_new_files_are_written_and_in_place_is_refused(
    number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written all the same; what a killed run left stays, since nobody can tell whose it is. In place is
    refused."""

    def refused(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    left = Path(durable.hidden_name(str(tmp_path / "out.pt")))
    left.write_bytes(b"perhaps alive")
    ckptool.strip_module(model, tmp_path / "out.pt")
    assert_same_objects(load(tmp_path / "out.pt"), clean())
    assert left.read_bytes() == b"perhaps alive"
    before = model.read_bytes()
    with pytest.raises(FileProblem, match="cannot be locked"):
        ckptool.strip_module(model, in_place=True)
    assert model.read_bytes() == before


def test_a_name_that_always_seems_taken_is_an_error_not_a_loop(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*args: Any) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "taken")

    monkeypatch.setattr(fcntl, "flock", taken)
    with pytest.raises(FileProblem, match="No locks available"):
        ckptool.strip_module(model, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


# Surroundings ---------------------------------------------------------------------------------------------------------
# The folder, the variables and the locale that the program runs in decide nothing.


# Every way to start it: as it is installed; and those that have the working directory on the path, with their words
# before the command, PYTHONPATH, and the folder.
SCRIPT = "import re\nimport sys\nfrom ckptool.__main__ import main\nsys.exit(main())\n"  # as pip makes it
INSTALLED = [str(Path(sys.executable).with_name("ckptool"))]
WAYS = {
    "installed": (INSTALLED, None, "full"),
    "-m": ([sys.executable, "-m", "ckptool"], None, "full"),
    "an empty part": ([sys.executable, "../script"], os.pathsep + "/nowhere", "full"),
    "a dot": ([sys.executable, "../script"], ".", "full"),
    "a neighbour": ([sys.executable, "../script"], "/nowhere" + os.pathsep + "../full", "full"),
    "a link, -m": ([sys.executable, "-m", "ckptool"], os.pathsep, "link"),
    "a link, a dot": ([sys.executable, "../script"], "/nowhere" + os.pathsep + ".", "link"),
}
# Those of `small_files`, and with what else is read: code of the user's own, rules, arrays.
LINES = PLAIN | {
    "inspect": "m.pt --stats --json",
    "show": "m.pt#sd/module.a.weight",
    "doctor": "m.pt --against model.py:build",
    "scan": "m.pt",
    "strip-module": "m.pt -o out.pt --verify",
    "rename": "m.pt --rules rules.yaml -o out.pt",
    "edit": "m.pt --set epoch=3 -o out.pt",
    "translate": "m.pt --rules rules.yaml -o out.pt",
    "convert": "m.pt --all -o out.safetensors",
    "warm-start": "m.pt --against model.py:build",
    "spec": "model.py:build -o out.json",
    "train": "run.yaml -n",
    **dict.fromkeys(("browse", "resume", "eval", "prove"), "none"),
    "git-setup": "--textconv m.pt",
}
ENDS_BADLY = {"browse", "resume", "eval", "prove"}
SETTINGS = ["ckptool.toml", ".ckptool.toml", "pyproject.toml", ".env", ".ckptoolrc", "ckptool.ini", "setup.cfg"]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a module of every name that the program could ever import, each of which leaves a trace,
    and settings that cannot be read."""
    folder = tmp_path_factory.mktemp("decoys") / "full"
    folder.mkdir()
    (folder.parent / "link").symlink_to(folder)
    (folder.parent / "script").write_text(SCRIPT)
    make_small_files(folder)
    (folder / "model.py").write_text("def build():\n    import torch\n    return torch.nn.Linear(3, 2)\n")
    for package in ("torch", "numpy", "ckptool"):
        (folder / f"{package}_pkg").mkdir()
    for name in SETTINGS:
        (folder / name).write_text("this is no setting that anyone could read = = =\n")
        (folder / name).chmod(0)
    for name in importable() - loaded_by_python_itself(folder.parent):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'TRACE')!r}, 'a').write({name!r} + ' ')\n")
    return folder


def importable() -> set[str]:
    """The names of all modules outside packages: the standard library's and those of everything that is installed."""
    found = set(sys.stdlib_module_names) | {"__future__", "models", "tests", "fixtures", "conftest"}
    return found | {name for name in packages_distributions() if name.isidentifier()}


def loaded_by_python_itself(folder: Path) -> set[str]:
    """What is imported before the first line of ours can run: beyond reach for a decoy beside the checkpoint."""
    blank = folder / "blank"
    (blank / "ckptool").mkdir(parents=True)
    (blank / "ckptool" / "__init__.py").touch()
    for place in (blank / "ckptool" / "__main__.py", blank / "script"):
        place.write_text("import re\nimport sys\nprint(*sys.modules)\n")
    found = {"ckptool", "sitecustomize", "usercustomize", "__main__", "model"}
    for words in (["-m", "ckptool"], ["script"]):
        ended = subprocess.run([sys.executable, *words], cwd=blank, capture_output=True, text=True, check=True)
        found |= {name.partition(".")[0] for name in ended.stdout.split()}
    return found


def start(folder: Path, way: str, verb: str) -> None:
    program, path, name = WAYS[way]
    words = [
        f"{list(WAYS).index(way)}{verb.replace(' ', '')}-{word}"
        if word.startswith(("out", "adapter", "playground"))
        else word
        for word in LINES[verb].split("," if "," in LINES[verb] else None)
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [*program, *verb.split(), *words],
        cwd=folder.parent / name,
        env=environment | ({"PYTHONPATH": path} if path is not None else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    trace = folder / "TRACE"
    assert not trace.exists(), (way, verb, trace.read_text())
    assert "Traceback" not in ended.stderr and "[bug]" not in ended.stderr, (verb, ended.stderr)
    assert ended.returncode == 2 if verb in ENDS_BADLY else ended.returncode in (0, 1), (verb, ended.stderr)


@pytest.mark.permissions
@pytest.mark.parametrize("way", WAYS)
def test_nothing_beside_the_checkpoint_is_imported_or_read(way: str, full: Path) -> None:
    """Some verb in each way; `make soak` has each in each way."""
    assert set(LINES) == set(VERBS)
    start(full, way, random.Random(f"{way}, once").choice(sorted({*VERBS} - ENDS_BADLY)))


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", LINES)
def test_soak_no_module_of_the_working_directory_is_imported(verb: str, way: str, full: Path) -> None:
    start(full, way, verb)


def test_a_path_that_names_the_working_directory_in_full_is_kept(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build():\n    import torch\n    return torch.nn.Linear(2, 2)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", "from ckptool.__main__ import *; forget_working_directory(); import own"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)


ODD = dict(
    each.split("=", 1)
    for each in (
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 TORCH_FORCE_WEIGHTS_ONLY_LOAD=1 PYTHONINSPECT= "
        "CKPTOOL_CONFIG=/nowhere COLUMNS=\x1b[31m TERM=\x1b TMPDIR=/nowhere HOME=/nowhere LC_ALL=C "
        "LANG=xx_YY.nonsense PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    ).split(" ")
)


def traced(path: Path, trace: Path) -> Path:
    """A checkpoint whose pickle would touch `trace` when it is loaded the unsafe way."""

    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    torch.save({"model": weights("module.a"), "evil": Touch()}, path)
    return path


def test_environment_variables_have_no_effect(tmp_path: Path) -> None:
    trace = tmp_path / "TRACE"
    startup = tmp_path / "startup.py"
    startup.write_text(f"open({str(trace)!r}, 'w')")
    traced(tmp_path / "in.pt", trace)
    results = []
    for environment in ({}, ODD | {"PYTHONSTARTUP": str(startup)}):
        outputs = []
        for words in (["inspect", "in.pt", "--json"], ["strip-module", "in.pt", "-o", "out.pt", "--keep-unknown"]):
            ended = subprocess.run(
                [*INSTALLED, *words], cwd=tmp_path, env=os.environ | environment, capture_output=True, check=False
            )
            assert ended.returncode == 0 and b"Traceback" not in ended.stderr, ended.stderr
            outputs.append(ended.stdout.replace(b"\xe2\x86\x92", b"\\u2192"))
        results.append((outputs, (tmp_path / "out.pt").read_bytes()))
        (tmp_path / "out.pt").unlink()
        assert not trace.exists()
    assert results[0] == results[1]


def test_file_names_that_no_locale_can_spell_work(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/\xff\xfe-\xe9.pt"
    path = saved(weights("module.é"), tmp_path / "in.pt")
    try:
        os.rename(os.fsencode(path), raw)
    except OSError:  # a file system that takes only UTF-8: then such a name is simply not there
        os.rename(path, os.fsencode(tmp_path) + b"/in.pt")
    for environment in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C.UTF-8"}):
        for words in (
            [b"inspect", raw, b"--json"],
            [b"strip-module", raw, b"-o", raw + b".out.pt", b"-f"],
            [b"inspect", b"\xff\x1b[31m.pt"],
            [b"show", raw + b"#\xff"],
        ):
            ended = subprocess.run(
                [*map(os.fsencode, INSTALLED), *words], env=os.environ | environment, capture_output=True, check=False
            )
            assert ended.returncode in (0, 1, 2) and b"Traceback" not in ended.stderr, ended.stderr
            assert b"error[bug]" not in ended.stderr, (words, ended.stderr)
            assert b"\x1b" not in ended.stdout + ended.stderr
            if words[0] == b"inspect" and raw in words and os.path.exists(raw):
                assert ended.returncode == 0 and b"module." in ended.stdout, ended.stderr
