"""What a server does not send is no damage, what it replaces meanwhile no checkpoint. The judge is the local file."""

from __future__ import annotations

import itertools
import shlex
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pytest
import torch

import ckptool
from ckptool.checkpoint import remote
from ckptool.checkpoint.paths import given_url
from ckptool.errors import CkptoolError, FileProblem, NoPermission, UsageError
from tests.support.cli import Run
from tests.support.elsewhere import READS, layered, make_elsewhere
from tests.support.engine_folders import hub
from tests.support.looped import looped
from tests.support.range_server import RangeHandler, RangeServer


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


# Secrets --------------------------------------------------------------------------------------------------------------
# Secrets in the URLs of checkpoints are used and never printed; URLs that name nothing, and missing packages.


@pytest.fixture
def at(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    torch.save(layered(), "dp.pt")
    yield files


@pytest.mark.long("every verb that reads, in two forms")
@pytest.mark.parametrize("name", ["model.pt", "none.pt", "hub/"])
def test_what_is_secret_in_a_url_is_never_printed(at: Path, name: str, run: Run) -> None:
    with RangeServer(at) as server:
        url = f"{server.url.replace('://', '://me:geheim@')}{name}?X-Amz-Signature=s3cret/x&other=1"
        for command in (*READS, "report {0} -o r.html -f", "strip-module {0} --in-place", "strip-module dp.pt -o {0}"):
            for form in ([], ["--json"]):
                ran = run(*shlex.split(command.replace("{0}", f"'{url}'")), *form)
                text = ran.out + ran.err
                assert "bug" not in text and "geheim" not in text and "s3cret" not in text, (command, ran)
        assert any("s3cret" in path for _, path, _ in server.log)  # the server got it
        run("edit", "dp.pt", "--set", f"url={url}", "-o", "edited.pt")
        assert ckptool.open("edited.pt")["url"] == url  # what is no file stays as it is
        for function in (ckptool.inspect, ckptool.scan, ckptool.verify, ckptool.doctor):
            try:
                answer = repr(function(url).to_dict())
            except CkptoolError as error:
                answer = repr(error)
            assert "geheim" not in answer and "s3cret" not in answer, function


@pytest.mark.parametrize("user", ["geheim@", "me:mehr@geheim@"])
def test_nor_what_comes_before_a_host(files: Path, user: str, run: Run) -> None:
    with RangeServer(files) as server:
        ran = run("inspect", f"{server.url.replace('://', f'://{user}')}none.pt")
    assert ran.code == 2 and "/none.pt" in ran.err and "geheim" not in ran.err


CHAINED = (
    "zip://{}::{}",
    "zip://a/{}::{}",
    "dir://{}::{}",
    "tar://{}::{}",
    "zip://{}::dir://a.zip::{}",
    "simplecache::{1}",
)


@pytest.mark.parametrize("chain", CHAINED)
@pytest.mark.parametrize("user", ["geheim", "me:mehr@geheim"])
def test_nor_those_of_a_url_at_the_end_of_a_chain(files: Path, chain: str, user: str, run: Run, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(files / "model.pt", "model.pt")
    with RangeServer(tmp_path) as server:
        url = chain.format("model.pt", f"{server.url.replace('://', f'://{user}@')}a.zip?sig=s3cret")
        for form in ([], ["--json"]):
            ran = run("inspect", url, *form)
            assert "geheim" not in ran.out + ran.err and "s3cret" not in ran.out + ran.err
    assert ran.code == 0 or chain != CHAINED[0]


def test_nor_that_of_where_a_redirect_leads(run: Run, tmp_path: Path) -> None:
    class Lost(RangeHandler):
        def answer(self, name: str, fault: str) -> None:
            self.send(302, {"Location": f"{self.path}&Signature=s3cret"})

    with RangeServer(tmp_path, handler=Lost) as server:
        ran = run("inspect", f"{server.url}model.pt?Key=s3cret%2F")
    assert ran.code == 2 and "too many redirects" in ran.err and "s3cret" not in ran.err


def test_two_urls_that_differ_in_their_query_are_two(files: Path) -> None:
    with RangeServer(files) as server:
        report = ckptool.diff(f"{server.url}model.pt?id=1", f"{server.url}model.pt?id=2")
        assert report.left != report.right and report.same
        assert {path.partition("?")[2] for _, path, _ in server.log} == {"id=1", "id=2"}


@pytest.mark.parametrize(("url", "package"), [("hf://a/b/m.pt", "'ckptool[remote]'"), ("gs://a/m.pt", "gcsfs")])
def test_a_package_that_is_missing_is_named_with_its_install_line(
    url: str, package: str, at: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] in ("fsspec", "gcsfs")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "gcsfs" if package == "gcsfs" else "fsspec", None)
    for command in (*READS, "strip-module {0} -o o.pt", "strip-module dp.pt -o {0}", "convert dp.pt -d {0} --to npz"):
        ran = run(*shlex.split(command.replace("{0}", url)))
        assert ran.code == 2 and f"pip install {package}" in ran.out + ran.err, (command, ran)


@pytest.mark.parametrize("url", ["http://", "s3:///", "hf://"])
def test_a_url_that_names_nothing_is_told_so(url: str, at: Path, run: Run) -> None:
    for command in (f"inspect {url}", f"strip-module dp.pt -o {url}", f"diff dp.pt {url}"):
        assert "names no file" in run(*command.split()).err, command


@pytest.mark.parametrize("name", ["hub", "hub/model.safetensors.index.json", ""])
def test_a_folder_behind_a_chain_of_urls_is_refused(name: str, files: Path, tmp_path: Path, run: Run) -> None:
    shutil.make_archive(str(tmp_path / "a"), "zip", files)
    for verb in ("scan {}", "inspect {}", f"strip-module {files}/model.pt --to torch-zip -o {{}}"):
        ran = run(*verb.format(f"zip://{name}::{tmp_path}/a.zip").split())
        assert ran.code == 2 and ("only single files" in ran.err or "chains file systems" in ran.err), ran


@pytest.mark.parametrize(
    ("page", "file"),
    [
        (
            "huggingface.co/org/m/blob/main/model.safetensors?x=1",
            "huggingface.co/org/m/resolve/main/model.safetensors?x=1",
        ),
        ("huggingface.co/datasets/org/m/blob/main/a.pt", "huggingface.co/datasets/org/m/resolve/main/a.pt"),
        ("github.com/org/m/blob/main/blob/a.pt", "github.com/org/m/raw/main/blob/a.pt"),
        ("example.org/org/m/blob/main/a.pt", "example.org/org/m/blob/main/a.pt"),
    ],
)
def test_the_page_of_a_file_on_a_hub_stands_for_the_file(page: str, file: str) -> None:
    assert given_url(f"https://{page}") == f"https://{file}"
