"""Nothing is executed: every file of the corpus and every hostile input goes through the verbs in a process with an
audit hook.

The hook fails on an import, a compilation, a call of a program, a connection or a library that is loaded, once all that
ckptool itself needs is there (`tests/support/watched.py`). Beside the input, which is also the working directory, lie
decoys that would leave a trace.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.all_hostile import everything
from tests.support.files import CORPUS
from tests.support.hostile_inputs import ORDINARY, pickle_zip
from tests.support.looped import sliced
from tests.support.watched import OPTIONAL, Watched, watched

DECOYS = "torch models numpy ckptool_marker safetensors yaml typer encodings sitecustomize usercustomize".split()
COMMANDS = ("inspect", "show", "diff itself", "convert", "convert to pt", *OPTIONAL)
LARGE = 1 << 20
# Of the hostile inputs, `make test` takes every so manieth of the large ones; `make soak` all.
EVERY = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with decoys: modules that files name, and those that programs are made to load."""
    made = tmp_path_factory.mktemp("decoys")
    for name in DECOYS:
        (made / f"{name}.py").write_text(f"open({str(made / 'trace')!r}, 'a').write({name!r})\n")
    (made / "ckptool.toml").write_text("[ckptool]\n")
    return made


@pytest.fixture(scope="module")
def watch(folder: Path) -> Iterator[Watched]:
    with watched(folder) as process:
        yield process


def assert_inert(watch: Watched, folder: Path, file: Path, commands: tuple[str, ...] = COMMANDS) -> None:
    seen = watch.run(file, commands)
    assert not seen.violations, (file, seen.violations)
    assert not seen.ended_by, file
    assert not [step.message for step in seen.steps if step.code in ("bug", "violation")], file
    assert not (folder / "trace").exists(), (file, (folder / "trace").read_text())


def corpus() -> list[Path]:
    return sorted(path for path in CORPUS.rglob("*") if path.is_file()) if CORPUS.is_dir() else []


@pytest.mark.parametrize("path", sliced(corpus(), 40), ids=lambda path: path.name)
def test_no_file_of_the_corpus_runs_anything(path: Path, watch: Watched, folder: Path) -> None:
    copy = folder / f"copy{path.suffix}"
    shutil.copyfile(path, copy)
    assert_inert(watch, folder, copy)


def small() -> Iterator[bytes]:
    return (data for _, data in everything() if len(data) <= LARGE // 16)


def large() -> Iterator[bytes]:
    return (data for _, data in everything() if len(data) > LARGE // 16)


def test_no_hostile_input_runs_anything(watch: Watched, folder: Path) -> None:
    inputs = list(small())[::5]
    assert len(inputs) > 30
    for data in inputs:
        assert_inert(watch, folder, written_among_decoys(data, folder), ("inspect", "show", "convert to pt", "scan"))


def test_no_large_hostile_input_runs_anything(watch: Watched, folder: Path) -> None:
    for number, data in enumerate(large()):
        if not number % EVERY:
            assert_inert(watch, folder, written_among_decoys(data, folder), ("inspect", "convert to pt"))


@pytest.mark.soak
def test_no_hostile_input_runs_anything_in_any_verb(watch: Watched, folder: Path) -> None:
    for _, data in everything():
        assert_inert(watch, folder, written_among_decoys(data, folder))


def written_among_decoys(data: bytes, folder: Path) -> Path:
    """The data in the folder of the decoys, under the name of one of them."""
    file = folder / "models.pt"
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("program", "event"),
    [
        ("import ckptool_marker", "import"),
        ("import antigravity", "import"),
        ("import torch", "import"),
        ("eval('1 + 1')", "compile"),
        ("exec('pass')", "compile"),
        ("import os; os.system('true')", "os.system"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "os.posix_spawn"),
        ("import subprocess; subprocess.Popen(['true'])", "subprocess.Popen"),
        ("import socket; socket.socket()", "socket"),
        ("import ctypes; ctypes.CDLL('libm.so.6')", "ctypes.dlopen"),
        ("import pickle; pickle.loads(b'cos\\nsystem\\n.')", "pickle.find_class"),
    ],
)
def test_the_hook_sees_it(program: str, event: str, watch: Watched, folder: Path) -> None:
    """What no input can do, done by the process itself: each of these is noticed."""
    file = written_among_decoys(pickle_zip(*ORDINARY), folder)
    assert not watch.run(file, ("inspect",)).violations
    violations = watch.run(file, (), control=program).violations
    assert violations and violations[0].startswith(event), violations
