"""Durable replacement of folders: the old one or the new one, whole, under its name, and nothing else left."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.plan import Plan
from ckptool.errors import Conflict, FileProblem, OutputExists
from ckptool.formats import read
from ckptool.output import folders
from ckptool.output.folders import check_folder, replace_folder
from tests.support.errors import three_parts
from tests.support.files import contents, saved, weights
from tests.support.folder_plans import NEW, OLD, names, plan

# What it does --------------------------------------------------------------------------------------------------------


def test_a_new_folder(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    assert replace_folder(plan(), tmp_path / "out", progress=lambda done, total: told.append((done, total))) == ()
    assert contents(tmp_path / "out") == NEW and names(tmp_path) == ["out"]
    assert told[-1] == (10, 10) and [done for done, _ in told] == sorted(done for done, _ in told)


def test_an_empty_folder_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o750)
    replace_folder(plan(), tmp_path / "out")
    assert contents(tmp_path / "out") == NEW and names(tmp_path) == ["out"]
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


@pytest.mark.parametrize("target", ["out", "out/", "./out", "../{}/out"])
def test_ways_to_write_the_name(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace_folder(plan(), target.format(tmp_path.name))
    replace_folder(plan(OLD), target.format(tmp_path.name), overwrite=True, replaceable=["c"])
    assert contents(tmp_path / "out") == OLD and names(tmp_path) == ["out"]


@pytest.mark.permissions
def test_an_existing_folder_is_replaced_whole(old: Path, way: str) -> None:
    old.chmod(0o700)
    replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    assert contents(old) == NEW and names(old.parent) == ["out"]
    assert stat.S_IMODE(old.stat().st_mode) == 0o700


def test_the_exchange_is_really_used(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        return
    rename, renamed = os.rename, list[object]()
    monkeypatch.setattr(os, "rename", lambda *names: renamed.append(names) or rename(*names))
    replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    assert contents(old) == NEW and len(renamed) == 1  # which does not rename onto a folder with files in it


@pytest.mark.parametrize("extra", ["config.json", "tokenizer", "\x1b[31m", "sub"])
def test_files_that_are_not_the_checkpoints_are_never_deleted(extra: str, old: Path) -> None:
    if extra == "sub":
        (old / extra).mkdir()
    else:
        (old / extra).write_bytes(b"precious")
    with pytest.raises(Conflict, match="would be deleted with it") as caught:
        replace_folder(plan(), old, overwrite=True, replaceable=["b", "sub"])
    assert "\x1b" not in str(caught.value) and "Only files of the checkpoint" in caught.value.why
    three_parts(caught.value)
    assert (old / extra).exists() and (old / "b").read_bytes() == b"old b" and names(old.parent) == ["out"]


def test_a_file_that_is_put_there_at_the_last_moment(old: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(path: str) -> None:
        (old / "config.json").write_bytes(b"precious")

    with pytest.raises(Conflict, match=r"config\.json would be deleted"):
        replace_folder(plan(), old, overwrite=True, replaceable=["b"], verify=put)
    assert contents(old) == {**OLD, "config.json": b"precious"} and names(old.parent) == ["out"]


def test_impossible_targets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "loop").symlink_to("loop")
    for target in ("missing/out", "file/out", "file", "loop", "x" * 300, "nul\0"):
        for check in (
            lambda path: check_folder(path, overwrite=True),
            lambda path: replace_folder(plan(), path, overwrite=True),
        ):
            with pytest.raises(FileProblem) as caught:
                check(tmp_path / target)
            assert caught.value.code == "io" and caught.value.what.startswith(("cannot write", "cannot use"))
    assert names(tmp_path) == ["file", "loop"] and (tmp_path / "file").read_bytes() == b"old"


def test_names_that_lead_elsewhere_are_a_mistake_of_ours(tmp_path: Path) -> None:
    for name in ("../a", "", ".", "a/b"):
        with pytest.raises(AssertionError):
            replace_folder(Plan({name: [InlineBytes(b"x")], "y": [InlineBytes(b"y")]}), tmp_path / "out")
    assert names(tmp_path) == []


# What goes wrong -----------------------------------------------------------------------------------------------------


def test_a_failed_second_rename_puts_the_old_folder_back(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    real, calls = os.rename, []

    def failing(one: str, other: str) -> None:
        calls.append(other)
        if len(calls) == 3:  # onto the target; the target aside; the new one in its place
            raise OSError(errno.EIO, "broken disk")
        real(one, other)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(FileProblem):
        replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    assert len(calls) == 4 and contents(old) == OLD and names(old.parent) == ["out"]


def test_an_interrupt_right_after_the_commit_leaves_no_old_folder(
    old: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.close

    def interrupted(fd: int) -> None:
        is_new = os.path.samestat(os.fstat(fd), old.stat())
        real(fd)
        if is_new:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    assert contents(old) == NEW and names(old.parent) == ["out"]


def test_everything_is_on_disk_before_it_is_visible(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def watched(module: Any, name: str) -> None:
        real = getattr(module, name)

        def seen(*args: Any, **options: Any) -> Any:
            done = real(*args, **options)
            events.append("sync folder" if name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode) else name)
            return done

        monkeypatch.setattr(module, name, seen)

    for name in ("pwrite", "fsync", "rmdir"):
        watched(os, name)
    watched(folders, "_commit")
    replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    assert events == ["pwrite", "fsync"] * 2 + ["sync folder", "_commit", "sync folder", "rmdir"]


# Through the verbs ---------------------------------------------------------------------------------------------------


def model(folder: Path, *more: str) -> Path:
    return saved(weights("a", "b", "c", *more), folder / "model.pt")


def test_a_verb_replaces_only_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    file, out = model(tmp_path), tmp_path / "out"
    ckptool.convert(file, out, shard_size="24B")
    with pytest.raises(OutputExists):
        ckptool.convert(file, out, shard_size="48B")
    with pytest.raises(OutputExists):
        ckptool.convert(file, out, shard_size="48B", dry_run=True)
    ckptool.convert(file, out, shard_size="48B", overwrite=True, dry_run=True)
    assert len(names(out)) == 4
    ckptool.convert(file, out, shard_size="48B", overwrite=True, verify=True)
    assert names(out) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)] + ["model.safetensors.index.json"]
    (out / "config.json").write_text("{}")
    for dry in (False, True):
        with pytest.raises(Conflict, match=r"config\.json would be deleted"):
            ckptool.convert(file, out, shard_size="1MB", overwrite=True, dry_run=dry)
    (out / "config.json").unlink()
    (out / "model-00001-of-00009.safetensors").write_bytes(b"stale: of a run that nothing tells about")
    with pytest.raises(Conflict, match="model-00001-of-00009"):
        ckptool.convert(file, out, shard_size="1MB", overwrite=True)
    (out / "model-00001-of-00009.safetensors").unlink()
    ckptool.convert(file, out, container="sharded", overwrite=True)
    assert names(out) == ["model.safetensors"] and names(tmp_path) == ["model.pt", "out"]


def test_a_folder_is_written_over_itself_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckptool.convert(model(tmp_path), out, shard_size="24B")
    with pytest.raises(Conflict, match="is the input itself"):
        ckptool.add_module(out, out)
    ckptool.add_module(out, out, overwrite=True, verify=True)
    assert list(read(out).tree) == ["module.a", "module.b", "module.c"] and names(tmp_path) == ["model.pt", "out"]


def test_a_file_and_a_folder_do_not_replace_each_other(tmp_path: Path) -> None:
    file = model(tmp_path)
    ckptool.convert(file, tmp_path / "out", shard_size="24B")
    with pytest.raises(FileProblem, match="it is a folder"):
        ckptool.convert(file, tmp_path / "out", container="torch-zip", overwrite=True)
    with pytest.raises(FileProblem, match="it is a file"):
        ckptool.convert(file, file, container="sharded", overwrite=True)
    assert read(file).container == "torch-zip"


def test_a_parent_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "mkdir", denied)  # as root there is no folder that may not be written to
    with pytest.raises(FileProblem, match="Permission denied") as caught:
        replace_folder(plan(), tmp_path / "out")
    assert "permissions" in caught.value.why and names(tmp_path) == []
