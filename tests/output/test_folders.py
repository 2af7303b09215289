"""Durable replacement of folders: the old one or the new one, whole, under its name, and nothing else left."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.blocks import Plan
from ckptool.errors import Conflict, FileProblem, OutputExists
from ckptool.formats import read
from ckptool.output import durable, folders
from ckptool.output.folders import replace_folder
from tests.support.errors import refused, three_parts
from tests.support.files import contents, saved, weights
from tests.support.folder_plans import NEW, OLD, names, plan


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    for name, data in OLD.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(params=["exchanged", "put aside"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing a folder: that of Linux, and that of file systems which cannot exchange two names."""
    if request.param == "put aside":
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    return str(request.param)


# What it does --------------------------------------------------------------------------------------------------------


def test_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the way to write its name; an empty one is no obstacle."""
    monkeypatch.chdir(tmp_path)
    told: list[tuple[int, int]] = []
    assert replace_folder(plan(), "new", progress=lambda done, total: told.append((done, total))) == ()
    assert contents(tmp_path / "new") == NEW
    assert told[-1] == (10, 10) and [done for done, _ in told] == sorted(done for done, _ in told)
    (tmp_path / "out").mkdir(mode=0o750)
    for number, target in enumerate(["out", "out/", "./out", f"../{tmp_path.name}/out"]):
        replace_folder(plan(OLD if number else NEW), target, overwrite=bool(number), replaceable=["a", "b", "c"])
        assert contents(tmp_path / "out") == (OLD if number else NEW) and names(tmp_path) == ["new", "out"]
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


@pytest.mark.parametrize("answer", [None, 0, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EIO])
def test_whatever_the_system_says_of_an_exchange(
    answer: int | None, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it has no such call."""
    call = folders.system_call("renameat2")

    def exchange(*arguments: Any) -> int:
        ctypes.set_errno(answer or 0)
        return -1 if answer else call(*arguments)  # type: ignore[misc]

    monkeypatch.setattr(folders, "system_call", lambda name: None if answer is None else exchange)
    if answer == errno.EIO:
        with pytest.raises(FileProblem, match="Input/output error"):
            replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    elif call is not None or answer != 0:
        replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    assert contents(old) == (OLD if answer == errno.EIO else NEW) and names(old.parent) == ["out"]


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
    with pytest.raises(Conflict, match="would be deleted, too") as caught:
        replace_folder(plan(), old, overwrite=True, replaceable=["b", "sub"])
    assert "\x1b" not in str(caught.value) and "left as it is" in caught.value.why
    three_parts(caught.value)
    assert (old / extra).exists() and (old / "b").read_bytes() == b"old b" and names(old.parent) == ["out"]


def test_a_file_that_is_put_there_at_the_last_moment(old: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(path: str) -> None:
        (old / "config.json").write_bytes(b"precious")

    with pytest.raises(Conflict, match=r"config\.json would be deleted"):
        replace_folder(plan(), old, overwrite=True, replaceable=["b"], verify=put)
    assert contents(old) == {**OLD, "config.json": b"precious"} and names(old.parent) == ["out"]


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


# Others at work ------------------------------------------------------------------------------------------------------


def test_a_folder_put_aside_by_a_killed_run_is_put_back(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names cannot be exchanged there is an instant without a folder; the next run puts the old one back
    first."""
    aside = Path(durable.hidden_name(str(old), folders.ASIDE))
    old.rename(aside)
    with pytest.raises(OutputExists):
        replace_folder(plan(), old)
    assert contents(old) == OLD and names(old.parent) == ["out"]
    aside.mkdir()
    (aside / "a").write_bytes(b"older")
    replace_folder(plan(), old, overwrite=True, replaceable=["b"])
    assert contents(old) == NEW and names(old.parent) == ["out"]
    aside.mkdir()
    (aside / "a").write_bytes(b"older")
    old.rename(old.parent / "gone")
    old.write_bytes(b"a file")
    with pytest.raises(FileProblem):
        replace_folder(plan(), old, overwrite=True)
    assert contents(aside) == {"a": b"older"}  # it may be the only copy


def test_a_folder_swept_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is made first and locked then: in between, a second writer takes it for one that was left."""
    target, make, swept = tmp_path / "out", os.mkdir, []

    def mkdir(path: str, *more: int) -> None:
        make(path, *more)
        if not swept:
            durable.sweep_folder(str(tmp_path))
            swept.append(path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    replace_folder(plan(), target)
    assert not os.path.exists(swept[0]) and contents(target) == NEW and names(tmp_path) == ["out"]


def test_a_folder_that_cannot_be_opened_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for module in (folders, durable):
        monkeypatch.setattr(module, "opened", refused)
    with pytest.raises(FileProblem, match="Too many open files"):
        replace_folder(Plan({"a.bin": [InlineBytes(b"a")]}), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_opened_does_not_keep_the_rest_from_being_swept(tmp_path: Path) -> None:
    for number in range(8):
        left = tmp_path / f".ckptool-{number:016x}-{number:016x}.tmp"
        left.symlink_to("elsewhere") if number % 2 else left.write_bytes(b"left")
    durable.sweep_folder(str(tmp_path))
    assert len(names(tmp_path)) == 4 and all(path.is_symlink() for path in tmp_path.iterdir())


def test_two_runs_that_remove_one_folder_leave_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    for name in "abc":
        (folder / name).write_bytes(b"x")
    unlink, listed = os.unlink, os.listdir

    def names_then_one_goes(folder: int) -> list[str]:
        found = listed(folder)
        unlink(found[0], dir_fd=folder)
        return found

    monkeypatch.setattr(os, "listdir", names_then_one_goes)
    durable.remove(str(folder))
    assert not folder.exists()


@pytest.mark.parametrize("removing", ["sweep", "remove"])
@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_folder_that_is_swapped_for_a_link_while_it_is_removed_leads_nowhere(
    removing: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write into the folder above can put a link to another folder in its place at any instant."""
    target, mine = tmp_path / "out", tmp_path / "mine"
    left = Path(durable.hidden_name(str(target)))
    for folder in (left, mine):
        folder.mkdir()
        (folder / "a.bin").write_bytes(b"x")

    def swapped() -> None:
        if not left.is_symlink():
            left.rename(tmp_path / "aside")
            left.symlink_to(mine)

    real = getattr(os, "listdir" if moment == "between" else "lstat")

    def then_swapped(place: Any, *args: Any) -> Any:
        found = real(place, *args)
        if place != str(tmp_path):
            swapped()
        return found

    monkeypatch.setattr(os, "listdir" if moment == "between" else "lstat", then_swapped)
    if removing == "sweep":
        durable.sweep_folder(str(tmp_path))
    else:
        durable.remove(str(left))
    assert (mine / "a.bin").read_bytes() == b"x"


def test_a_folder_that_another_writer_makes_meanwhile_is_one_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, real = tmp_path / "out", folders.check_target

    def meanwhile(path: str, *, overwrite: bool) -> str:
        target.mkdir(exist_ok=True)
        return real(path, overwrite=overwrite)

    monkeypatch.setattr(folders, "check_target", meanwhile)
    assert folders.check_folder(target, overwrite=True) == str(target)


# Through the verbs ---------------------------------------------------------------------------------------------------


def model(folder: Path, *more: str) -> Path:
    return saved(weights("a", "b", "c", *more), folder / "model.pt")


def test_a_verb_replaces_only_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    file, out = model(tmp_path), tmp_path / "out"
    ckptool.convert(file, out, shard_size="24B")
    refused(OutputExists, tmp_path, lambda: ckptool.convert(file, out, shard_size="48B"))
    refused(OutputExists, tmp_path, lambda: ckptool.convert(file, out, shard_size="48B", dry_run=True))
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


def test_a_file_and_a_folder_do_not_replace_each_other_nor_themselves_unasked(tmp_path: Path) -> None:
    file, out = model(tmp_path), tmp_path / "out"
    ckptool.convert(file, out, shard_size="24B")
    refused(Conflict, tmp_path, lambda: ckptool.add_module(out, out), "is the input itself")
    ckptool.add_module(out, out, overwrite=True, verify=True)
    assert list(read(out).tree) == ["module.a", "module.b", "module.c"] and names(tmp_path) == ["model.pt", "out"]
    with pytest.raises(FileProblem, match="it is a folder"):
        ckptool.convert(file, out, container="torch-zip", overwrite=True)
    with pytest.raises(FileProblem, match="it is a file"):
        ckptool.convert(file, file, container="sharded", overwrite=True)
    assert read(file).container == "torch-zip"
