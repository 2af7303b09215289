"""Open files in the place of paths: what they hold from where they stand."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint.file_objects import source_of
from ckptool.errors import Truncated, UsageError
from ckptool.formats.opening import open_file
from tests.support.files import torch_bytes, written

DATA = torch_bytes({"w": torch.arange(6.0)})


def _gzip(path: Path) -> Any:
    return gzip.open(written(gzip.compress(DATA), path))


def _bz2(path: Path) -> Any:
    return bz2.open(written(bz2.compress(DATA), path))


def _in_tar(path: Path) -> Any:
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("x.pt")
        member.size = len(DATA)
        archive.addfile(member, io.BytesIO(DATA))
    return tarfile.open(path).extractfile("x.pt")


def _in_zip(path: Path) -> Any:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.pt", DATA)
    return zipfile.ZipFile(path).open("x.pt")


def _pipe(path: Path) -> Any:
    read, write = os.pipe()
    os.write(write, DATA)
    os.close(write)
    return open(read, "rb")


def _temporary(path: Path) -> Any:
    file = tempfile.NamedTemporaryFile(dir=path.parent)  # noqa: SIM115
    file.write(DATA)  # and still in its buffer
    file.seek(0)
    return file


def _standing_at(path: Path) -> Any:
    file = written(b"before" + DATA, path).open("rb")
    file.seek(6)
    return file


def _in_memory(path: Path) -> Any:
    return io.BytesIO(DATA)


def _plain(path: Path) -> Any:
    return written(DATA, path).open("rb")


def _unbuffered(path: Path) -> Any:
    return written(DATA, path).open("rb", buffering=0)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "made", [_plain, _unbuffered, _in_memory, _gzip, _bz2, _in_tar, _in_zip, _pipe, _temporary, _standing_at]
)
def test_an_open_file_is_read_from_where_it_stands(made: Callable[[Path], Any], tmp_path: Path) -> None:
    file = made(tmp_path / "x")
    tree = open_file(file).checkpoint.tree
    assert file.read() == b""
    file.close()
    assert tree["w"].numpy().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_regular_file_is_not_copied_and_named(tmp_path: Path) -> None:
    path = written(DATA, tmp_path / "x.pt")
    with path.open("rb") as file:
        source = source_of(file)
    assert source.is_at(path)
    assert source.path == str(path)


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    for made in (_plain, _in_memory):
        with made(tmp_path / "x") as file:
            source_of(file)
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize(
    "file",
    [io.StringIO("text"), 3, None, type("Odd", (), {"read": lambda self, n=-1: "text"})()],
    ids=["text", "number", "none", "odd"],
)
def test_what_gives_no_bytes_is_refused(file: Any) -> None:
    with pytest.raises(UsageError):
        source_of(file)


def test_closed_and_write_only_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with path.open("wb") as file, pytest.raises(UsageError, match="cannot be read from"):
        source_of(file)
    with pytest.raises(UsageError, match="cannot be read from"):
        source_of(file)
    with path.open() as text, pytest.raises(UsageError, match="open as text"):
        source_of(text)


def test_nothing_is_left_at_the_end() -> None:
    file = io.BytesIO(DATA)
    open_file(file)
    with pytest.raises(Truncated, match="is at its end"):
        open_file(file)


def test_load_takes_an_open_file(tmp_path: Path) -> None:
    with written(DATA, tmp_path / "x.pt").open("rb") as file:
        assert ckptool.load(file)["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert ckptool.load(io.BytesIO(DATA))["w"].tolist() == [0, 1, 2, 3, 4, 5]
