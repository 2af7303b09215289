"""What a server does not send is no damage, what it replaces meanwhile no checkpoint. The judge is the local file."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pytest
import torch

import ckptool
from ckptool.checkpoint import remote
from ckptool.errors import FileProblem, NoPermission, UsageError
from tests.support.cli import Run
from tests.support.elsewhere import make_elsewhere
from tests.support.looped import looped
from tests.support.range_server import RangeHandler, RangeServer
from tests.support.sharded_folders import hub


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_elsewhere(tmp_path_factory.mktemp("elsewhere"))


JUDGES = ("verify {} --finite", "scan {} --full", "scan {} --latest-good", "recover {} -o out.pt -f", "doctor {}")


@looped("name", ("model.pt", "m.safetensors", "hub/", "dcp/", "zero/"))
@pytest.mark.parametrize("fault", ["ignore", "cut", "busy", "deny"])
def test_what_a_server_does_not_send_is_never_taken_for_damage(
    fault: str, name: str, files: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From whichever request on: the answer is that of the local file, or there is none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote, "WAIT", 0)
    random = Random(f"{fault} {name}")
    for verb in JUDGES:
        expected = run(*verb.replace("{}", str(files / name)).split()).code
        good = random.choice(range(1, 12))
        with RangeServer(files, itertools.chain([""] * good, itertools.repeat(fault))) as server:
            ran = run(*verb.replace("{}", f"{server.url}{name}").split(), "--json")
        state = ran.json["files"][0]["state"] if ran.json["schema"].startswith("ckptool.scan") else ""
        is_said = ran.code == 2 and ran.json.get("code") == "io"
        assert is_said or ran.code == expected or (ran.code == 1 and state == "io"), (verb, good, ran)


def test_the_latest_good_one_is_not_judged_without_one_that_is_not_read(tmp_path: Path, run: Run) -> None:
    class Lost(RangeHandler):
        fault = ""

        def answer(self, name: str, fault: str) -> None:
            super().answer(name, fault or (self.fault if name == "3.pt" else ""))

    for step in (1, 2, 3):
        torch.save({"w": torch.ones(3), "step": step}, tmp_path / f"{step}.pt")
    for Lost.fault, code, said in (("deny", 2, "3.pt: not allowed"), ("gone", 0, "/2.pt"), ("", 0, "/3.pt")):
        with RangeServer(tmp_path, handler=Lost) as server:
            ran = run("scan", server.url, "--latest-good")
        assert ran.code == code and said in ran.out + ran.err, ran


@looped("name", ("hub/", "own.dcp/"))
@pytest.mark.parametrize("verb", ["convert {} -o out.pt -f", "inspect {} --stats"])
def test_a_folder_that_is_replaced_meanwhile_is_never_read_as_a_mix_of_two(
    verb: str, name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of the requests, and that by which all are still the same."""
    monkeypatch.chdir(tmp_path)
    for value in (1, 2):
        weights = {f"{shard}.w": torch.full((100, 100), float(value)) for shard in range(3)}
        hub(tmp_path / f"{value}" / "hub", weights, 3)
        ckptool.convert(tmp_path / f"{value}" / "hub", tmp_path / f"{value}" / "own.dcp")

    class Replaced(RangeHandler):
        def answer(self, name: str, fault: str) -> None:
            if len(self.server.log) > before:
                self.server.folder = tmp_path / "2"
            super().answer(name, fault)

    for before in range(1, 50):
        with RangeServer(tmp_path / "1", handler=Replaced) as server:
            ran = run(*verb.format(f"{server.url}{name}").split(), "--json")
        if ran.code == 0:
            read = torch.load("out.pt").values() if "convert" in verb else ()
            rows = ran.json.get("tensors", ())
            means = {each.mean().item() for each in read} or {row["statistics"]["mean"] for row in rows}
            assert len(means) == 1, (before, server.log)
        else:
            assert ran.code == 2 and ran.json["code"] == "file-changed", ran
        if len(server.log) < before:
            break
    assert ran.code == 0 and before > 4


@pytest.mark.parametrize(
    ("raised", "kind", "tries"),
    [
        (ValueError("bad option"), UsageError, 1),
        (OSError("reset"), FileProblem, 3),
        (PermissionError(), NoPermission, 1),
    ],
)
def test_what_a_file_system_raises_is_tried_again_only_where_that_may_help(
    raised: Exception, kind: type[Exception], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, asked = fsspec.filesystem("memory"), list[str]()
    memory.pipe("/failing.pt", bytes(100))

    def cat_file(_: Any, path: str, *__: Any) -> bytes:
        asked.append(path)
        raise raised

    monkeypatch.setattr(remote, "WAIT", 0)
    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    with pytest.raises(kind):
        ckptool.open("memory://failing.pt")
    assert len(asked) == tries
