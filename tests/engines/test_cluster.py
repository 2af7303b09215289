"""A dask scheduler with three workers, all processes of their own: what is done with many files is as one after the
other, also where a worker is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.checkpoint import workers
from ckptool.checkpoint.workers import in_turn
from ckptool.errors import RunFailed
from fixtures.sparse import make_sparse
from tests.support.files import contents, saved
from tests.support.processes import HANG, ROOT
from tests.support.worked import worked

pytestmark = pytest.mark.engines
distributed = pytest.importorskip("distributed")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a scheduler, and the processes of its three workers and its own, in a folder of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "elsewhere").mkdir()

    def started(*words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "distributed.cli.dask_" + words[0], *words[1:], "--no-dashboard"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(argv, cwd=tmp_path / "elsewhere", env=ENVIRONMENT, **quiet)  # type: ignore[call-overload, no-any-return]

    scheduler = started("scheduler", "--host", "127.0.0.1", "--port", place.rpartition(":")[2])
    workers = [started("worker", f"tcp://{place}", "--no-nanny", "--nthreads", "1") for _ in range(3)]
    try:
        with distributed.Client(f"tcp://{place}", timeout=HANG, set_as_default=False) as client:
            client.wait_for_workers(3, timeout=HANG)
        yield place, [*workers, scheduler]
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()


def ran(folder: Path, *words: str) -> subprocess.Popen[str]:
    argv, pipe = [sys.executable, "-m", "ckptool", *words], subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)


def test_all_is_as_one_after_the_other(cluster: tuple[str, object], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(9):
        saved({"module.a": torch.randn(50, 50), "epoch": number}, folder / f"m{number}.pt")
    os.truncate(folder / "m3.pt", 5000)
    files = sorted(path.name for path in folder.iterdir())
    for name in files:
        os.utime(folder / name, (0, 0))  # their age is shown
    for words in (
        ["scan", "."],
        ["verify", *files, "--finite", "--json"],
        ["doctor", *files],
        ["convert", *files, "--to", "safetensors", "-d", "{out}", "--skip-refused", "--verify"],
    ):
        found = []
        for out, jobs in (("one", "1"), ("other", f"dask://{cluster[0]}")):
            process = ran(folder, *(word.format(out=f"../{out}") for word in words), "--jobs", jobs)
            told = [each.replace("../other", "../one") for each in process.communicate(timeout=HANG)]
            found.append((process.returncode, *told, contents(tmp_path / out)))
        assert found[0] == found[1]


def test_a_worker_is_killed_while_it_works(cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path) -> None:
    place, workers = cluster
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(12):
        make_sparse(folder / f"m{number}.pt", 1 << 30)
        os.utime(folder / f"m{number}.pt", (0, 0))
    process = ran(folder, "scan", ".", "--full", "--jobs", f"dask://{place}")
    while not any(works(worker.pid, folder) for worker in workers[:1]):
        assert process.poll() is None
        time.sleep(0.01)
    workers[0].send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, err) == (0, "")
    assert out == ran(folder, "scan", ".", "--full").communicate(timeout=HANG)[0]
    assert workers[0].wait() == -signal.SIGKILL and "12 good" in out


def works(process: int, folder: Path) -> bool:
    """True while a process has a file of the folder open."""
    with suppress(OSError):
        return any(os.path.realpath(fd).startswith(f"{folder}{os.sep}") for fd in Path(f"/proc/{process}/fd").iterdir())
    return False


def test_a_file_that_kills_its_workers_is_its_row(cluster: tuple[str, object]) -> None:
    found: list[object] = []
    for task in in_turn(worked, range(7), jobs=f"dask://{cluster[0]}"):
        try:
            found.append(task())
        except Exception as error:  # noqa: BLE001
            found.append(error)
    assert [each for each in found if isinstance(each, int)] == [0, 10, 30, 60]
    assert isinstance(found[2], RunFailed) and "2: its worker was lost: KilledWorker" in found[2].what


def test_a_cluster_without_workers_is_left(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scheduler waits for new ones, for ever."""
    monkeypatch.setattr(workers, "ALONE", 3)
    with closing(in_turn(time.sleep, [0, 600, 600], jobs=f"dask://{cluster[0]}")) as tasks:
        next(tasks)()
        for worker in cluster[1][:3]:
            worker.kill()
        for task in tasks:
            with pytest.raises(RunFailed, match="600: its worker was lost"):
                task()


def test_a_scheduler_that_is_killed_is_told_by_the_rows_of_the_files(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    place, (first, *_, scheduler) = cluster
    (tmp_path / "in").mkdir()
    for number in range(9):
        make_sparse(tmp_path / "in" / f"m{number}.pt", 1 << 30)
    process = ran(tmp_path, "verify", *map(str, (tmp_path / "in").iterdir()), "--jobs", f"dask://{place}")
    while not works(first.pid, tmp_path / "in"):
        time.sleep(0.01)
    scheduler.kill()
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 2 and "not read" in out and "Traceback" not in err, err


def test_a_server_that_says_nothing_is_no_cluster(tmp_path: Path) -> None:
    """Such as that of dask's own dashboard, which waits for a question."""
    files = [str(saved({"a": torch.ones(3)}, tmp_path / f"{number}.pt")) for number in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = ran(tmp_path, "verify", *files, "--jobs", f"dask://127.0.0.1:{server.getsockname()[1]}")
        err = process.communicate(timeout=HANG)[1]
    assert process.returncode == 2 and "no worker of a dask scheduler answers" in err, err


def test_an_executor_of_dask_in_python(cluster: tuple[str, object], tmp_path: Path) -> None:
    files = [saved({"a": torch.ones(3)}, tmp_path / f"{number}.pt") for number in range(3)]
    with distributed.Client(f"tcp://{cluster[0]}", set_as_default=False) as client:
        assert [str(each) for each in ckptool.verify(files, jobs=client.get_executor())] == [
            str(ckptool.verify(file)) for file in files
        ]
