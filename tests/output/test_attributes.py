"""What a file has beside its contents stays when it is replaced: owner, group, permissions, access lists, extended
attributes."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.blocks import Plan
from ckptool.output import replace_file
from ckptool.output.durable import ACCESS_LIST
from ckptool.output.folders import replace_folder
from tests.support.files import saved, weights

pytestmark = pytest.mark.permissions
OTHER = 54321  # nobody here


def access_list(*users: int, owner: int = 6) -> bytes:
    """A POSIX access list as Linux stores it: the owner reads and writes, these users and the group read."""
    entries = [(0x01, owner, -1), *((0x02, 4, user) for user in users), (0x04, 4, -1), (0x10, 4, -1), (0x20, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


def has(place: Path, name: str, value: bytes) -> bool:
    """Sets an extended attribute; False where this file system has none of the kind."""
    try:
        os.setxattr(place, name, value)
    except (OSError, AttributeError):
        return False
    return True


def decked_out(place: Path, mode: int) -> dict[str, Any]:
    """What can be seen of a file or folder, after it was given all that this system lets it have."""
    if os.geteuid() == 0:
        os.chown(place, OTHER, OTHER + 1)
    elif len(groups := set(os.getgroups())) > 1:
        os.chown(place, -1, max(groups - {os.getegid()}))
    place.chmod(mode)
    has(place, "user.origin", b"https://example.org/model")
    has(
        place, ACCESS_LIST, access_list(4001, 4002, owner=7 if place.is_dir() else 6)
    )  # into a folder it also has to get
    return seen(place)


def seen(place: Path) -> dict[str, Any]:
    status = os.stat(place)
    names = sorted(os.listxattr(place)) if hasattr(os, "listxattr") else []
    extended = {name: os.getxattr(place, name) for name in names}
    return {"owner": status.st_uid, "group": status.st_gid, "mode": stat.S_IMODE(status.st_mode), **extended}


def files(word: bytes = b"new") -> Plan:
    return Plan({"a.bin": [InlineBytes(word)], "b.bin": [InlineBytes(word)]})


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444, 0o755])
def test_a_file_that_is_replaced_also_through_a_link(mode: int, tmp_path: Path) -> None:
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)
    before = decked_out(path, mode)
    for target, word in ((path, b"new"), (link, b"newer")):
        assert replace_file(word, target, overwrite=True) == ()
        assert path.read_bytes() == word and link.is_symlink() and seen(path) == before


def test_a_folder_that_is_replaced_and_the_files_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"old")
    (folder / "old.bin").write_bytes(b"old")
    whole, file = decked_out(folder, 0o750), decked_out(folder / "a.bin", 0o640)
    assert replace_folder(files(), folder, overwrite=True, replaceable=["old.bin"]) == ()
    assert sorted(os.listdir(folder)) == ["a.bin", "b.bin"] and (folder / "a.bin").read_bytes() == b"new"
    assert seen(folder) == whole and seen(folder / "a.bin") == file


def test_hard_links_stay_names_of_the_old_file_and_are_mentioned(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "other"
    path.write_bytes(b"old")
    other.hardlink_to(path)
    (note,) = replace_file(b"new", path, overwrite=True)
    assert "hard links (1 more)" in note.message and (path.read_bytes(), other.read_bytes()) == (b"new", b"old")
    assert replace_file(b"newer", path, overwrite=True) == ()


def test_a_new_file_has_what_files_have_there(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"x")
    replace_file(b"new", tmp_path / "x")
    assert seen(tmp_path / "x") == seen(tmp_path / "plain")


def test_an_access_list_that_the_folder_hands_out_is_not_put_on_a_file_without_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    before = seen(path)
    if not has(tmp_path, "system.posix_acl_default", access_list(4001)):
        pytest.skip("no access lists here")
    assert replace_file(b"new", path, overwrite=True) == ()
    assert seen(path) == before


COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "strip-module": lambda source, out: ckptool.strip_module(source, out, overwrite=True),
    "already clean": lambda source, out: ckptool.remap(source, out, to="cpu", overwrite=True),
    "convert": lambda source, out: ckptool.convert(source, out.with_suffix(".safetensors"), overwrite=True),
    "slim": lambda source, out: ckptool.slim(source, out, overwrite=True),
    "spec": lambda source, out: ckptool.spec(source, out.with_suffix(".spec.json"), overwrite=True),
    "over itself": lambda source, out: ckptool.strip_module(out, out, overwrite=True),
    "shards": lambda source, out: ckptool.convert(source, out.with_suffix(""), shard_size="1MB", overwrite=True),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_verb_keeps_them(name: str, tmp_path: Path) -> None:
    source, out = (
        saved(weights("module.a", "module.b"), tmp_path / "in.pt"),
        saved(weights("module.w"), tmp_path / "out.pt"),
    )
    COMMANDS[name](source, out)
    target = next((place for place in tmp_path.iterdir() if place not in (source, out)), out)
    before = decked_out(target, 0o750 if target.is_dir() else 0o640)
    if name == "over itself":
        torch.save(weights("module.w"), target)
    written = COMMANDS[name](source, out)
    assert seen(target) == before and "attributes-lost" not in {note.code for note in getattr(written, "notes", ())}


def test_what_the_system_does_not_let_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file is there all the same, and has no more rights than the old one had."""
    path, folder = tmp_path / "x", tmp_path / "out"
    path.write_bytes(b"old")
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"old")
    path.chmod(0o6755)
    attributes = has(path, "user.origin", b"x")
    status = os.stat(path)
    real = os.stat

    def of_another(place: Any, *args: Any, **options: Any) -> os.stat_result:
        found = real(place, *args, **options)
        mine = [*found]
        if isinstance(place, str) and os.path.basename(place) in ("x", "out", "a.bin"):
            mine[4:6] = [OTHER, OTHER + 1]
        return os.stat_result(mine)

    def refused(*args: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    from ckptool.output import durable as module

    class System:
        """`os` as somebody sees it who is not the owner."""

        stat, fchown, setxattr = staticmethod(of_another), staticmethod(refused), staticmethod(refused)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    monkeypatch.setattr(module, "os", System())
    (note,) = replace_file(b"new", path, overwrite=True)
    assert note.code == "attributes-lost" and f"its owner ({OTHER})" in note.message and "its group" in note.message
    assert ("the attribute user.origin" in note.message) == attributes
    assert (
        path.read_bytes() == b"new" and stat.S_IMODE(os.stat(path).st_mode) == 0o755 and status.st_uid == os.geteuid()
    )
    (note,) = replace_folder(files(), folder, overwrite=True)
    assert note.code == "attributes-lost" and note.message.count("its owner") == 1
    assert (folder / "a.bin").read_bytes() == b"new"
