"""Checkpoints in S3 (moto) and on a hub, read by s3fs and huggingface_hub. The judge is the local file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import FileChanged, FileMissing, FileProblem, NoPermission
from tests.support.elsewhere import FILES, SHARDS, make_elsewhere
from tests.support.hub_server import HubServer
from tests.support.s3_server import S3Server
from tests.support.same import assert_same_tree

pytestmark = pytest.mark.engines
NAMES = (*FILES, "hub", "hub/", "hub/model.safetensors.index.json", "dcp", "zero/")
MOST = {"model.pt": 4, "script.pt": 4, "m.safetensors": 3, "hub": 5 + 3 * SHARDS, "dcp": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_elsewhere(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="module")
def s3(files: Path) -> Iterator[S3Server]:
    import s3fs

    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        for path in files.rglob("*"):
            if path.is_file():
                s3fs.S3FileSystem().put_file(str(path), f"bucket/a/{path.relative_to(files)}")
        yield server


@pytest.fixture(scope="module")
def hub(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    from huggingface_hub import HfFileSystem, constants

    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(files, folder / "org" / "repo")
    with HubServer(folder) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.url.rstrip("/"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        template = f"{server.url}{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        HfFileSystem.clear_instance_cache()
        yield server


def same(url: str, path: Path) -> None:
    found, local = (ckptool.inspect(each).to_dict() for each in (url, path))
    for each in (found, local):
        for key in ("file", "notes", "bytes"):
            each.pop(key)
    assert found == local
    assert_same_tree(ckptool.open(url).tree, ckptool.open(path).tree)


@pytest.mark.parametrize("name", NAMES)
def test_s3(files: Path, s3: S3Server, name: str) -> None:
    s3.log.clear()
    ckptool.inspect(f"s3://bucket/a/{name}")
    assert len(s3.log) <= MOST.get(name.partition("/")[0], 40), s3.log
    same(f"s3://bucket/a/{name}", files / name)


def test_what_s3_says(files: Path, s3: S3Server) -> None:
    import s3fs

    for url in ("s3://bucket/a/none.pt", "s3://none/a.pt"):
        with pytest.raises(FileMissing):
            ckptool.open(url)
    s3fs.S3FileSystem().put_file(str(files / "model.pt"), "bucket/changing.pt")
    opened = ckptool.open("s3://bucket/changing.pt")["state_dict"]
    torch.save(torch.load(files / "model.pt"), files.parent / "other.pt")
    s3fs.S3FileSystem().put_file(str(files.parent / "other.pt"), "bucket/changing.pt")
    with pytest.raises(FileChanged):
        opened["layers.6.0"].numpy()
    s3.refuses = lambda method, path: "model.pt" in path
    with pytest.raises(NoPermission):
        ckptool.open("s3://bucket/a/model.pt")
    s3.refuses = lambda *_: False
    found: Any = ckptool.load("s3://bucket/a/model.pt#state_dict", map_location="cpu")
    assert torch.equal(found["layers.6.0"], torch.load(files / "model.pt")["state_dict"]["layers.6.0"])


@pytest.mark.parametrize("answered", ["", "bytes=0-9999999", "bytes=7-9"])
def test_a_store_that_answers_with_another_range(answered: str, files: Path, s3: S3Server) -> None:
    import s3fs

    s3fs.S3FileSystem().put_file(str(files / "model.pt"), "bucket/ranges.pt")
    torch.save({"w": torch.ones(3)}, files.parent / "small.pt")
    s3fs.S3FileSystem().put_file(str(files.parent / "small.pt"), "bucket/small.pt")
    s3.range_of = lambda asked: answered
    try:
        with pytest.raises(FileProblem, match="does not support range requests") as caught:
            ckptool.open("s3://bucket/ranges.pt")
        assert "aws s3 cp s3://bucket/ranges.pt" in caught.value.fix
        if not answered.endswith("-9"):  # the whole of a small object is what was asked for
            assert ckptool.open("s3://bucket/small.pt")["w"].numpy().tolist() == [1, 1, 1]
    finally:
        s3.range_of = str


@pytest.mark.parametrize("name", NAMES)
def test_hub(files: Path, hub: HubServer, name: str) -> None:
    before = len(hub.log)
    ckptool.inspect(f"hf://org/repo/{name}")
    asked = [path for _, path, _ in hub.log[before:] if "/api/" not in path]
    assert len(asked) <= MOST.get(name.partition("/")[0], 40), asked
    same(f"hf://org/repo@main/{name}", files / name)


def test_what_a_hub_says(hub: HubServer) -> None:
    for url in ("hf://org/repo/none.pt", "hf://org/none/a.pt", "hf://org/repo@v2/model.pt"):
        with pytest.raises(FileMissing):
            ckptool.open(url)
