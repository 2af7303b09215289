"""Outputs on stores as they are: S3 (moto), to which s3fs talks, and a hub, to which huggingface_hub does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hub_server import HubServer
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.engines

# How many files each makes.
PLACES = {"strip-module in.pt -o s3://bucket/a/out.pt": 1, "convert in.pt --shard-size 12MB -o s3://bucket/a/out": 6}
Ended = tuple[int, str]


class Bench:
    """Runs the program in a folder with a checkpoint of 40 MB, which takes five parts."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.temporary = folder, folder / "temporary"
        self.temporary.mkdir(parents=True)
        self.environment = {**os.environ, "TMPDIR": str(self.temporary), **environment}
        torch.save({f"module.w{number}": torch.randn(1 << 20) for number in range(10)}, folder / "in.pt")

    def start(self, words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ckptool", *words.split()]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, preexec_fn=heard, **pipes)

    def run(self, words: str) -> Ended:
        program = self.start(words)
        return self.ended(program)

    def ended(self, program: subprocess.Popen[str]) -> Ended:
        said, _ = program.communicate()
        assert "Traceback" not in said and "error[bug]" not in said, said
        assert not [*self.temporary.iterdir()], "left behind here"
        return program.returncode, said


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def bench(s3: S3Server, tmp_path: Path) -> Bench:
    s3.refuses = lambda *_: False
    s3.empty()
    return Bench(tmp_path, **s3.environment)


@pytest.mark.parametrize("words", PLACES)
def test_s3_gets_what_is_written_here(words: str, s3: S3Server, bench: Bench) -> None:
    assert bench.run(words)[0] == 0
    here = bench.folder / "here" / Path(words).name
    here.parent.mkdir()
    assert bench.run(words.replace(f"s3://bucket/a/{here.name}", str(here)))[0] == 0
    objects, uploads = s3.held()
    files = [path for path in (here, *here.parent.rglob("*/*")) if path.is_file()]
    assert len(files) == PLACES[words] and not uploads
    for path in files:
        key = f"a/{path.relative_to(here.parent)}"
        assert s3.client().get_object(Bucket="bucket", Key=key)["Body"].read() == path.read_bytes()
        assert objects.pop(key) == path.stat().st_size
    assert not objects
    code, said = bench.run(words)
    assert code == 2 and "already exists" in said
    for key in ("a/new.pt", "a/out.pt"):  # a dry run, which says so of what is there
        code, said = bench.run(f"strip-module in.pt -o s3://bucket/{key} -n -f")
        assert (code, "dry run" in said) == ((0, True)) or Path(words).name == "out"
    assert s3.held()[0].keys() == {f"a/{path.relative_to(here.parent)}" for path in files}


@pytest.mark.parametrize("words", PLACES)
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "refused"])
def test_s3_keeps_nothing_of_what_was_stopped_or_refused(how: str, words: str, s3: S3Server, bench: Bench) -> None:
    """At every request; those that only look are not refused."""
    code, at = -1, 0
    while code:
        at += 1
        started: list[subprocess.Popen[str]] = []
        seen = count(1)

        def fault(method: str, _: str, at: int = at, seen: Any = seen, started: Any = started) -> bool:
            if how == "refused":
                return method in ("PUT", "POST") and next(seen) == at
            if next(seen) == at:
                started[0].send_signal(getattr(signal, how))
                time.sleep(0.2)
            return False

        s3.refuses = fault
        started.append(bench.start(words))
        code, said = bench.ended(started[0])
        if code:
            assert code == {"SIGINT": 130, "SIGTERM": 143, "refused": 2}[how], (at, said)
            assert s3.held() == ({}, []), (at, said)
    assert at >= 6


def test_s3_keeps_the_old_object_when_a_new_one_fails(s3: S3Server, bench: Bench) -> None:
    s3.client().put_object(Bucket="bucket", Key="a/out.pt", Body=b"the old one")
    s3.refuses = lambda method, query: "partNumber=3" in query
    assert bench.run("strip-module in.pt -o s3://bucket/a/out.pt -f")[0] == 2
    assert s3.held() == ({"a/out.pt": 11}, [])
    s3.refuses = lambda *_: False
    assert bench.run("strip-module in.pt -o s3://bucket/a/out.pt -f")[0] == 0
    assert s3.held()[0]["a/out.pt"] > 40_000_000


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "refused"])
def test_s3_keeps_what_another_writer_put_there_meanwhile(how: str, s3: S3Server, bench: Bench) -> None:
    started: list[subprocess.Popen[str]] = []

    def fault(_: str, query: str) -> bool:
        if "partNumber=3" not in query:
            return False
        s3.client().put_object(Bucket="bucket", Key="a/out.pt", Body=b"another's")
        if how != "refused":
            started[0].send_signal(getattr(signal, how))
            time.sleep(0.2)
        return how == "refused"

    s3.refuses = fault
    started.append(bench.start("strip-module in.pt -o s3://bucket/a/out.pt"))
    assert bench.ended(started[0])[0] == {"SIGINT": 130, "SIGTERM": 143, "refused": 2}[how]
    assert s3.held() == ({"a/out.pt": 9}, [])


def test_s3_says_what_is_wrong(s3: S3Server, bench: Bench) -> None:
    for change, said in (
        ({}, "bucket does not exist"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nowhere"}, "credentials"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9", **s3.keys}, "connect"),
    ):
        code, text = Bench(bench.folder / said, **s3.environment | change).run(
            "strip-module in.pt -o s3://another/out.pt -n"
        )
        assert code == 2 and said in text and "made-up" not in text, text


def test_a_hub_gets_a_file_or_a_folder_in_one_commit(tmp_path: Path) -> None:
    (tmp_path / "hub/org/model").mkdir(parents=True)
    (tmp_path / "hub/org/model/README.md").write_text("# A model\n")
    with HubServer(tmp_path / "hub") as hub:
        places = {"HF_ENDPOINT": hub.url.rstrip("/"), "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
        bench = Bench(tmp_path, **places, HF_TOKEN="hf_madeup")
        for words, files in (
            ("strip-module in.pt -o hf://org/model/a/out.pt", ["a/out.pt"]),
            ("convert in.pt --shard-size 12MB -o hf://org/model@main/", []),
        ):
            here = tmp_path / "here" / Path(words).name
            here.parent.mkdir(exist_ok=True)
            local = words.rpartition(" ")[0]
            assert bench.run(f"{local} {here}")[0] == 0
            code, said = bench.run(words)
            assert code == 0 and "hf_madeup" not in said and "it/s" not in said, said
            files = files or sorted(path.name for path in here.iterdir())
            assert sorted(hub.commits[-1]) == files
            for name in files:
                written = here / name if here.is_dir() else here
                assert (tmp_path / "hub/org/model" / name).read_bytes() == written.read_bytes()
            count = len(hub.commits)
            code, said = bench.run(words)
            assert code == 2 and "already exists" in said and len(hub.commits) == count
            assert bench.run(f"{words} -n -f")[0] == 0 and len(hub.commits) == count
        hub.faults = iter(["", "", "", "deny"] + ["deny"] * 20)
        code, said = bench.run("strip-module in.pt -o hf://org/model/b.pt")
        assert code == 2 and len(hub.commits) == count and not (tmp_path / "hub/org/model/b.pt").exists(), said
        hub.faults = iter(())
        code, said = bench.run("strip-module in.pt -o hf://org/another/b.pt")
        assert code == 2 and "repository not found" in said
