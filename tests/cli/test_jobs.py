"""`--jobs N`: several processes, and everything as with one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.checkpoint import workers
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.jobs import MAX_JOBS
from ckptool.checkpoint.workers import in_turn
from ckptool.cli import main
from ckptool.errors import RunFailed, UsageError
from fixtures.sparse import make_sparse
from tests.support.cli import Run
from tests.support.errors import refused, three_parts
from tests.support.files import contents, saved, torch_bytes, weights
from tests.support.hostile_inputs import pickle_zip
from tests.support.hostile_pickles import REFUSED
from tests.support.hostile_system import temporaries
from tests.support.processes import HANG, default_signals
from tests.support.worked import throwing_away, worked

# What is done with all files; `.` stands for the folder.
WORK = {
    "scan": [["scan", "."], ["scan", ".", "--full", "--json"], ["scan", ".", "--latest-good"]],
    "verify": [["verify", "*"], ["verify", "*", "--finite", "--json"]],
    "inspect": [["inspect", "*"], ["inspect", "*", "--json"]],
    "convert": [["convert", "*", "--to", "safetensors", "-d", "../out"], ["convert", "*", "--all", "--to",
                "safetensors", "-d", "../out", "--skip-refused", "--json"]],
    "doctor": [["doctor", "*", "--fix", "-d", "../out", "--skip-refused"]],
    "strip-module": [["strip-module", "*", "--in-place", "--partial"],
                     ["strip-module", "*", "*", "--in-place", "--partial"]],
    "cast": [["cast", "*", "--dtype", "bf16", "-d", "../out", "--verify"],
             ["cast", "*", "--dtype", "bf16", "-d", "../out", "-n"], ["cast", "*", "--dtype", "bf16", "-f", "-d", "."]],
}  # fmt: skip


def random_files(seed: int, folder: Path) -> None:
    """Some files, of which some are damaged: cut off, with a wrong byte in a tensor, something else, of no weights."""
    rng = random.Random(seed)
    folder.mkdir()
    torch.manual_seed(seed)
    for number in range(rng.randint(3, 6)):
        weights = {"module.a": torch.randn(50, 50), "module.b": torch.arange(number + 1)}
        kind = rng.choice(["whole", "whole", "whole", "flipped", "cut", "text", "no weights"])
        data = torch_bytes({"state_dict": weights, "epoch": number} if kind != "no weights" else {"epoch": number})
        if kind == "flipped":
            at = data.index(weights["module.a"].numpy().tobytes()[:16])
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        if kind == "text":
            data = b"<html>not found</html>"
        (folder / f"m{number}.pt").write_bytes(data[: len(data) * 2 // 3] if kind == "cut" else data)
        os.utime(folder / f"m{number}.pt", (number, number))


def outcome(words: list[str], folder: Path, jobs: int, capfd: pytest.CaptureFixture[str]) -> object:
    """Everything that a command leaves, where it is run in `folder`."""
    files = sorted(path.name for path in folder.iterdir())
    line = [each for word in words for each in (files if word == "*" else [word])]
    os.chdir(folder)
    capfd.readouterr()
    code = main([*line, "--jobs", str(jobs)])
    return code, *capfd.readouterr(), contents(folder.parent), [path.name for path in folder.parent.iterdir()]


LINES = [(number, words) for lines in WORK.values() for number, words in enumerate(lines)]
CASES = [pytest.param(words, id=" ".join(words), marks=pytest.mark.soak if n else ()) for n, words in LINES]


@pytest.mark.parametrize("words", CASES)
def test_all_is_as_with_one(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random_files(1 if words[0] == "scan" else 7, tmp_path / "original")
    found = []
    for jobs in (1, 3):
        shutil.copytree(tmp_path / "original", tmp_path / "case" / "in")
        found.append(outcome(words, tmp_path / "case" / "in", jobs, capfd))
        shutil.rmtree(tmp_path / "case")
    assert found[0] == found[1]


def test_what_comes_after_a_failure_is_done_or_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whole under its name, or not there: never half."""
    weights = {"module.a": torch.randn(1500, 1000)}
    for number in range(5):
        saved(weights if number == 2 else {"module.a": torch.ones(3)}, tmp_path / f"m{number}.pt")
    data = bytearray((tmp_path / "m2.pt").read_bytes())
    data[-2_000_000] ^= 1
    (tmp_path / "m2.pt").write_bytes(data)
    files = [str(tmp_path / f"m{number}.pt") for number in range(5)]
    assert main(["convert", *files, "--to", "safetensors", "-d", str(tmp_path / "out"), "--jobs", "2"]) == 2
    told = " ".join(capfd.readouterr().err.split())
    assert "error[corrupt]" in told and "m2.pt" in told
    assert "2 of 5 files were done before; some of the others may be done, too" in told
    written = {name: load_file(tmp_path / "out" / name) for name in os.listdir(tmp_path / "out")}
    assert {"m0.safetensors", "m1.safetensors"} <= {*written} <= {f"m{n}.safetensors" for n in (0, 1, 3, 4)}
    assert all(each["module.a"].equal(torch.ones(3)) for each in written.values())
    before = contents(tmp_path)
    assert main(["cast", *files, "--dtype", "bf16", "--in-place", "--verify", "--jobs", "2"]) == 2
    changed = {name for name, content in contents(tmp_path).items() if content != before[name]}
    assert {"m0.pt", "m1.pt"} <= changed <= {f"m{n}.pt" for n in (0, 1, 3, 4)}
    assert all(torch.load(tmp_path / name)["module.a"].equal(torch.ones(3, dtype=torch.bfloat16)) for name in changed)


@pytest.mark.parametrize("jobs", ["0", "-1", "100000", "9" * 5_000, "two", ""])
def test_numbers_that_cannot_be_meant(jobs: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved({"a": torch.ones(3)}, tmp_path / "a.pt")
    for words in (["scan"], ["verify"], ["inspect"], ["cast", "--dtype", "f16", "-d", str(tmp_path / "out")]):
        assert main([*words, str(tmp_path / "a.pt"), "--jobs", jobs]) == 2
        ran = capfd.readouterr()
        assert ran.out == "" and "error[usage]: " in ran.err and "--jobs" in ran.err, ran
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    with pytest.raises(UsageError, match=f"jobs takes a number from 1 to {MAX_JOBS}, or dask:.*, not 0"):
        ckptool.scan(tmp_path, jobs=0)
    refused(UsageError, tmp_path, lambda: ckptool.scan(tmp_path, jobs=10**5_000), "not more")


class Dying(ProcessPoolExecutor):
    """Processes of which one dies with the third piece of work that is given out."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        self.given = getattr(self, "given", 0) + 1
        if self.given == 3:
            super().submit(os._exit, 1)
        return super().submit(work, *arguments, **more)


@pytest.mark.long("starts processes of three kinds")
@pytest.mark.parametrize("kind", ["threads", "processes", "processes of which one dies"])
def test_on_any_executor_all_is_as_one_after_the_other(kind: str, tmp_path: Path) -> None:
    spawn = get_context("spawn")
    random_files(12, tmp_path / "in")
    files = sorted((tmp_path / "in").iterdir())
    options: dict[str, Any] = {"container": "safetensors", "skip_refused": True, "verify": True}

    def results(jobs: Any, out: Path) -> list[str]:
        reports = [ckptool.scan(tmp_path / "in", full=True, jobs=jobs), *ckptool.verify(files, finite=True, jobs=jobs)]
        reports += ckptool.doctor(files, jobs=jobs) + ckptool.convert(files, folder=out, jobs=jobs, **options)
        return [str(report).replace(str(out), "out") for report in reports]

    expected = results(1, tmp_path / "one")
    assert any("error" in each or "damaged" in each for each in expected) and len(expected) == 1 + 3 * len(files)
    pools = {"threads": ThreadPoolExecutor, "processes": partial(ProcessPoolExecutor, mp_context=spawn)}
    with pools.get(kind, partial(Dying, mp_context=spawn))(2) as pool:
        assert results(pool, tmp_path / "other") == expected
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_so_many_are_given_out_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "AHEAD", 3)
    given: list[int] = []

    class Noting(ThreadPoolExecutor):
        def submit(self, work: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
            given.append(arguments[-1])
            return super().submit(work, *arguments, **more)

    with Noting(2) as pool, closing(in_turn(str, range(20), jobs=pool)) as tasks:
        for number, task in enumerate(tasks):
            assert task() == str(number) and max(given) == min(number + 2, 19)


def test_an_executor_that_takes_only_so_many_gets_the_others_later() -> None:
    pending = set[Future[Any]]()

    class Bounded(ThreadPoolExecutor):
        def submit(self, work: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
            if len(pending) >= 3:
                raise RuntimeError("the queue is full")
            pending.add(future := super().submit(work, *arguments, **more))
            future.add_done_callback(pending.discard)
            return future

    with Bounded(2) as pool:
        assert [task() for task in in_turn(str, range(20), pool)] == [*map(str, range(20))]


def test_a_cluster_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        saved({"a": torch.ones(3)}, tmp_path / f"{number}.pt")
    assert main(["scan", str(tmp_path), "--jobs", "dask://127.0.0.1:1"]) == 2
    told = capfd.readouterr().err
    assert "pip install 'ckptool[cluster]'" in told or "no worker of a dask scheduler answers" in told


# Errors and ends -----------------------------------------------------------------------------------------------------


def test_a_folder_is_sent_as_the_way_to_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    folder = Folder(tmp_path, tmp_path / "index")
    folder.open("a")
    got = ForkingPickler.loads(ForkingPickler.dumps(folder))
    assert (got.path, got.shown, got.names, got.files) == (folder.path, folder.shown, folder.names, {})


def outcomes(tasks: Iterable[Callable[[], object]]) -> list[object]:
    found: list[object] = []
    for task in tasks:
        try:
            found.append(task())
        except Exception as error:  # noqa: BLE001
            found.append(error)
    return found


@pytest.mark.parametrize("own", [True, False], ids=["own processes", "somebody else's"])
def test_a_worker_that_is_killed_is_one_error_and_the_others_go_on(own: bool) -> None:
    with nullcontext(2) if own else ProcessPoolExecutor(2, mp_context=get_context("spawn")) as jobs:
        found = outcomes(in_turn(worked, range(7), jobs=jobs))
    assert [each for each in found if isinstance(each, int)] == [0, 10, 30, 60]
    killed, missing, odd = (each for each in found if isinstance(each, Exception))
    assert isinstance(killed, RunFailed) and "was killed twice" in killed.what and three_parts(killed)
    assert isinstance(missing, FileNotFoundError) and missing.filename == "name"
    assert isinstance(odd, RuntimeError) and "ExceptionOfTests" in str(odd)


def test_a_worker_is_ended_in_silence_wherever_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    """A file that fails ends the work on others: what is told of that must not depend on where they were."""
    for task in in_turn(throwing_away, range(2), jobs=2):
        with pytest.raises(RunFailed, match="its worker process was killed twice"):
            task()
    assert capfd.readouterr().err == ""


def make_large(folder: Path, size: int) -> Path:
    """Files whose work takes a second or more each, and nearly no room."""
    for number in range(3):
        make_sparse(folder / f"m{number}.pt", size)
    return folder


def program(folder: Path, *words: str) -> subprocess.Popen[str]:
    argv, pipe = [sys.executable, "-m", "ckptool", *words], subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, stdout=pipe, stderr=pipe, text=True, preexec_fn=default_signals)


def at_work(process: int, folder: Path) -> list[int]:
    """The children of a process that have a file of the folder open."""
    lines = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    found = []
    for child, parent in map(str.split, lines.splitlines()):
        if int(parent) == process:
            with suppress(OSError):  # it has ended
                opened = [os.path.realpath(fd) for fd in Path(f"/proc/{child}/fd").iterdir()]
                found += [int(child)] * any(path.startswith(f"{folder}{os.sep}m") for path in opened)
    return found


def workers_of(process: subprocess.Popen[str], count: int, folder: Path) -> list[int]:
    """The workers of the program, once all of them work."""
    while len(found := at_work(process.pid, folder)) < count:
        assert process.poll() is None
        time.sleep(0.02)
    return found


def gone(processes: list[int], seconds: float = 0) -> bool:
    limit = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{each}/fd") and os.listdir(f"/proc/{each}/fd") for each in processes):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks at processes in /proc")


@needs_proc
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_a_signal_ends_all_processes_and_nothing_is_half_written(number: int, tmp_path: Path) -> None:
    large = make_large(tmp_path, 3 << 30)
    words = ["convert", *sorted(path.name for path in large.iterdir()), "--to", "safetensors", "-d", "out", "--verify"]
    process = program(large, *words, "--jobs", "3")
    found = workers_of(process, 3, large)
    for _ in range(40):  # as people do who cannot wait
        os.kill(process.pid, number)
        time.sleep(0.005)
    out, err = process.communicate(timeout=HANG)
    assert gone(found, HANG if number == signal.SIGKILL else 0)
    if number != signal.SIGKILL:
        assert (process.returncode, out, err) == (128 + number, "", "interrupted\n" * (number == signal.SIGINT))
    assert temporaries(large) == []
    assert {os.path.getsize(path) > 1 << 30 for path in (large / "out").glob("*")} <= {True}


@needs_proc
def test_a_file_whose_worker_was_killed_is_tried_again(tmp_path: Path) -> None:
    large = make_large(tmp_path, 1 << 28)
    process = program(large, "scan", ".", "--full", "--jobs", "2")
    os.kill(workers_of(process, 2, large)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0 and err == "" and "m2.pt" in out, (out, err)


def test_the_program_that_asks_is_not_run_again(tmp_path: Path) -> None:
    """Nor has it to be written for that, with `if __name__ == "__main__"`."""
    for number in range(2):
        saved({"a": torch.ones(3)}, tmp_path / f"{number}.pt")
    script = tmp_path / "script.py"
    script.write_text(f"import ckptool\nprint(len(ckptool.scan({str(tmp_path)!r}, jobs=2).files))")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("2\n", "")


def test_a_signal_that_another_thread_gets_waits_until_the_workers_run() -> None:
    """Libraries have threads that hold no signals back; one raised here would leave a worker without its orders."""
    over, begun = threading.Event(), []
    threading.Thread(target=over.wait).start()
    try:
        with pytest.raises(KeyboardInterrupt), workers._starting():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            begun.append(True)
    finally:
        over.set()
    assert begun and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, and between them one that has no weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("one.pt", "three.pt"):
        saved(weights("module.a.w", "a.b"), tmp_path / name)
    saved({"epoch": 3}, tmp_path / "two.pt")
    return tmp_path


FILES = ("one.pt", "two.pt", "three.pt")


def flipped() -> bytes:
    """A file in whose data one bit is another."""
    marked = torch.arange(64, dtype=torch.uint8)
    data = bytearray(torch_bytes({"module.a.w": marked}))
    data[data.index(bytes(marked))] ^= 1
    return bytes(data)


def test_as_json_each_file_has_its_object(three: Path, run: Callable[..., object]) -> None:
    ran = run("strip-module", *FILES, "--partial", "-d", "out", "--skip-refused", "--json")
    results = json.loads(ran.out)["results"]
    names = [each["schema"].partition("/")[0] for each in results]
    assert ran.code == 1 and names == ["ckptool.written", "ckptool.error", "ckptool.written"], "in the files' order"


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("refused", [(0,), (1, 3), (2, 3), (0, 1, 3)])
def test_each_result_stands_in_the_place_of_its_file(three: Path, refused: tuple[int, ...], jobs: int) -> None:
    files = ["two.pt" if number in refused else ("one.pt", "three.pt")[number % 2] for number in range(4)]
    files = [str(shutil.copy(name, f"{number}.pt")) for number, name in enumerate(files)]
    results = ckptool.strip_module(files, partial=True, folder="out", skip_refused=True, jobs=jobs)
    assert tuple(number for number, each in enumerate(results) if isinstance(each, Exception)) == refused
    written = [f"out/{file}" for number, file in enumerate(files) if number not in refused]
    assert [each.output for each in results if not isinstance(each, Exception)] == written


def test_doctor_looks_at_several_and_fixes_them(three: Path, run: Run) -> None:
    for name in ("one.pt", "three.pt"):
        saved(weights("module.a.w"), three / name)
    looked = run("doctor", *FILES)
    assert looked.code == 1 and looked.out.endswith("3 files: 1 fine, 2 with findings\n"), looked
    fixed = run("doctor", "one.pt", "three.pt", "--fix", "-d", "out")
    assert fixed.code == 0 and fixed.out.endswith("2 files: 2 written\n"), fixed
    assert list(torch.load(three / "out" / "one.pt")) == ["a.w"]
    assert run("doctor", *FILES, "--fix", "-o", "one-for-all.pt").code == 2 and not (three / "one-for-all.pt").exists()


def test_the_sum_of_several_files(three: Path, run: Run) -> None:
    (three / "cut.pt").write_bytes((three / "one.pt").read_bytes()[:999])
    for words, told in {
        ("verify", "one.pt", "cut.pt", "none.pt"): "3 files: 1 fine, 1 with findings, 1 not read\n",
        ("inspect", "one.pt", "cut.pt"): "2 files: 1 read, 1 not read\n",
        ("strip-module", *FILES, "--partial", "-d", "no", "-n", "--skip-refused"): "2 would be written, 1 refused\n",
        ("strip-module", *FILES, "--partial", "-d", "out", "--skip-refused"): "3 files: 2 written, 1 refused\n",
    }.items():
        assert run(*words).out.endswith(told), words
    assert "6 files, " in run("scan", ".").out
    assert run("inspect", "one.pt", "three.pt", "-q").out.splitlines() == ["module.a.w", "a.b"] * 2


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_skip_refused_goes_on_behind_a_file_whose_data_is_damaged(three: Path, run: Run, jobs: str) -> None:
    """Only copying it finds that out, when nothing more is planned."""
    (three / "flipped.pt").write_bytes(flipped())
    words = ("convert", "flipped.pt", "one.pt", "three.pt", "--to", "safetensors", "-d", "out", "--skip-refused")
    ran = run(*words, "--jobs", jobs)
    assert ran.code == 1 and ran.out.endswith("3 files: 2 written, 1 refused\n") and "error[corrupt]" in ran.out
    assert sorted(os.listdir(three / "out")) == ["one.safetensors", "three.safetensors"]


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_file_that_fails_does_not_take_the_new_folder_from_the_others(
    good: int, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may be about to write there: it goes at the end, and only if nothing is in it."""
    for name in ("bad.pt", "worse.pt"):
        (three / name).write_bytes(flipped())
    removed, rmdir = [], os.rmdir

    def remove(path: str) -> None:
        rmdir(path)
        removed.append(os.path.basename(path))

    monkeypatch.setattr(os, "rmdir", remove)
    files = ["bad.pt", *["one.pt", "three.pt"][:good], "worse.pt"]
    results = ckptool.convert(files, folder=Path("new/out"), container="safetensors", skip_refused=True)
    assert [isinstance(result, Exception) for result in results] == [True, *[False] * good, True]
    assert removed == ([] if good else ["out", "new"]) and os.path.exists("new") == bool(good)


def test_a_list_in_python(three: Path) -> None:
    assert [type(each).__name__ for each in ckptool.verify([*FILES, "none.pt"])] == ["Verification"] * 3 + [
        "FileMissing"
    ]
    assert [each.path for each in ckptool.scan([Path("one.pt"), "two.pt"])] == ["one.pt", "two.pt"]
    assert [each.path for each in ckptool.scan(Path().glob("one.p*"))] == ["one.pt"] and ckptool.scan([]) == []
    with pytest.raises(ckptool.CkptoolError, match="one output"):
        ckptool.strip_module([*FILES], "out.pt")
    with pytest.raises(ckptool.CkptoolError, match=r"None of the files were written; .*: skip_refused=True"):
        ckptool.strip_module([*FILES], folder="out", partial=True)
    with pytest.raises(TypeError, match="finit"):
        ckptool.verify([*FILES], finit=True)
    with pytest.raises(TypeError, match=r"rename.*did you mean a list of paths"):
        ckptool.rename("one.pt", "a => b", folder="out")
    with pytest.raises(TypeError, match=r"average.*'folder'; did you mean (?!a list)"):
        ckptool.average([*FILES], folder="out")
    rule = f"{next(iter(ckptool.open('one.pt').tensors()))} => x"
    for renamed in (
        ckptool.rename(["one.pt"], rule, None, folder="r"),
        ckptool.translate(["one.pt"], rule, folder="t", rest="keep"),
    ):
        assert [each.verb for each in renamed] and "x" in ckptool.open(renamed[0].output).tensors()
    written = ckptool.cast([Path("one.pt"), "three.pt"], in_place=True, dtype="bf16", jobs=2)
    assert [each.how for each in written] == ["in place"] * 2 and not (three / "out").exists()


# One that cannot be read hides none of the others: its error is told, and the work goes on ----------------------------


def bad_files(folder: Path) -> list[str]:
    whole = saved({"w": torch.ones(30)}, folder / "whole.pt").read_bytes()
    os.symlink("nowhere", folder / "dangling.pt")
    os.symlink("circle.pt", folder / "circle.pt")
    os.mkfifo(folder / "pipe.pt")
    (folder / "folder.pt").mkdir()
    contents = {"empty.pt": b"", "cut.pt": whole[: len(whole) // 2], "page.pt": b"<html>", "new\nline.pt": whole[:99]}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    for number, (pickle, _) in enumerate([*REFUSED.values()][::7]):
        (folder / f"hostile{number}.pt").write_bytes(pickle_zip(pickle))
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["verify", "--finite"], ["scan"], ["git-check"]])
def test_the_others_are_looked_at(words: list[str], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = bad_files(tmp_path)
    saved({"w": torch.ones(3)}, tmp_path / "a.pt")
    saved({"w": torch.ones(3)}, tmp_path / "z.pt")
    monkeypatch.chdir(tmp_path)
    for name in bad:
        alone, found = run(*words, name), run(*words, "a.pt", name, "z.pt")
        assert found.code == alone.code and found.err == alone.err, name
        assert "a.pt" in found.out and ("z.pt" in found.out or words[0] == "git-check"), name
    every = run(*words, "a.pt", *bad, "z.pt", "--json")
    rows = json.loads(every.out)["results"]
    assert every.code == 2 and not every.err and len(rows) == len(bad) + 2
    errors = [row["what"] for row in rows if row["schema"] == "ckptool.error/2"]
    assert len(errors) > 2 and rows[0]["schema"] == rows[-1]["schema"] != "ckptool.error/2"
    assert not any("bug" in row.get("code", "") for row in rows)
