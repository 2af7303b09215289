"""Durable replacement: the old file or the new one, whole, under its name, and nothing else left."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ckptool.checkpoint import FileRange, InlineBytes
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.files import Source
from ckptool.errors import FileProblem, OutputExists
from ckptool.output import durable
from ckptool.output.durable import replace_file
from tests.support.folder_plans import names


def file_plan(data: bytes = b"new") -> Plan:
    return Plan({"": [InlineBytes(data)]})


# What there is at the target ------------------------------------------------------------------------------------------


def test_a_new_file(tmp_path: Path) -> None:
    replace_file(file_plan(), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"new" and names(tmp_path) == ["out"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o666 & ~mask
    assert (tmp_path / "out").stat().st_nlink == 1


def test_names_that_are_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("real")  # which leads to nothing yet
    for target in ("link", "é" * 127, "./relative"):
        replace_file(file_plan(), target)
        assert Path(target).read_bytes() == b"new"
    assert Path("link").is_symlink() and names(tmp_path) == ["link", "real", "relative", "é" * 127]


def test_impossible_targets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    for target in ["missing/out", "file/out", ".", "fifo", "loop", "x" * 300, "nul\0"]:
        with pytest.raises(FileProblem) as caught:
            replace_file(file_plan(), tmp_path / target, overwrite=True)
        assert caught.value.code == "io" and caught.value.what.startswith(("cannot write", "cannot use"))
        assert target != "missing/out" or "mkdir -p" in caught.value.fix
    assert names(tmp_path) == ["fifo", "file", "loop"] and (tmp_path / "file").read_bytes() == b"old"


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    replace_file(file_plan(), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"new" and names(tmp_path) == ["out"]
    two = tmp_path / "two"
    with pytest.raises(OutputExists):
        replace_file(file_plan(), two, verify=lambda path: two.write_bytes(b"theirs") and None)
    assert two.read_bytes() == b"theirs" and names(tmp_path) == ["out", "two"]


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_everything_is_on_disk_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("pwrite", "fsync", "link", "replace", "unlink"):
        real = getattr(os, name)

        def seen(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            events.append("sync folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else name)
            return real(*args, **options)

        monkeypatch.setattr(os, name, seen)
    replace_file(file_plan(), tmp_path / "out")
    assert events == ["pwrite", "fsync", "link", "unlink", "sync folder"]
    events.clear()
    replace_file(file_plan(), tmp_path / "out", overwrite=True)
    assert events == ["pwrite", "fsync", "replace", "sync folder"]


def test_the_output_may_replace_its_own_input(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"0123456789" * 20_000)
    source = Source(target)
    swapped = Plan({"": [FileRange(source, 100_000, 100_000), FileRange(source, 0, 100_000)]})
    replace_file(swapped, target, overwrite=True, inputs=[source])
    assert target.read_bytes() == b"0123456789" * 20_000 and source.read(0, 10) == b"0123456789"
    assert names(tmp_path) == ["file"]


# Temporary files -----------------------------------------------------------------------------------------------------


def test_a_file_that_only_looks_like_ours_is_left_alone(tmp_path: Path) -> None:
    for name in (".ckptool-notes.tmp", ".ckptool-0123456789abcdef-x.tmp", Path(durable.hidden_name("out", "x")).name):
        (tmp_path / name).write_bytes(b"theirs")
    before = names(tmp_path)
    replace_file(file_plan(), tmp_path / "out")
    assert names(tmp_path) == sorted([*before, "out"])


def test_a_new_temporary_file_is_not_taken_for_one_that_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between being made and being locked it is nobody's; another run may sweep it then. Its writer notices, and makes
    another."""
    real, swept = fcntl.flock, []

    def slow(fd: int, operation: int) -> None:
        if not swept:
            swept.append(1)
            durable.sweep_folder(str(tmp_path))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    replace_file(file_plan(), tmp_path / "out")
    assert swept and (tmp_path / "out").read_bytes() == b"new" and names(tmp_path) == ["out"]
