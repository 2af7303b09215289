"""Every trap (docs/traps.md) through every verb that rewrites: it comes back bit for bit, or is refused by name. torch
is the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckptool
from ckptool.formats import read
from fixtures.traps import TRAPS
from tests.formats.contract import same_for_torch
from tests.support.errors import refused
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.same import assert_same_objects, assert_same_tree

OPTIONS: dict[str, Any] = {"verify": True, "keep_unknown": True}

# What has no dictionary that looks like weights, so that verbs on keys ask for the part by name.
WITHOUT_WEIGHTS = {
    "09-dtypes-as-values",
    "11-typed-storage",
    "11-uninitialized-buffer",
    "11-uninitialized-parameter",
    "11-wrapper-subclass",
    "17-optimizer-states-named",
    "17-several-param-groups",
    "18-cyclic-dict",
    "18-cyclic-list",
    "18-empty-containers",
    "18-keys-that-are-not-text",
    "18-keys-with-dots-and-slashes",
    "18-nested-deeply",
    "18-none-and-scalars",
    "18-shared-list",
    "19-dtypes-and-strings",
    "19-numpy-arrays",
    "19-numpy-odd-arrays",
    "20-collections-of-python",
    "20-defaultdict-of-unknown",
    "20-dict-subclass",
    "20-functions-and-classes",
    "20-namespace",
    "20-numbers-and-dates",
    "20-numpy-scalars",
    "20-path",
    "20-random-states",
    "20-sets",
}
# What strip-module refuses: keys that are prefixed in part, or that would become one.
MIXED = {
    "13-a-submodule-called-module",
    "13-on-some-keys",
    "13-only-the-prefix",
    "15-collision",
    "15-collision-of-wrappers",
}
# What `convert --all` has no words for.
NOT_CARRIED = {
    "11-wrapper-subclass",
    "20-unknown-call",
    "20-unknown-object",
    "20-dict-subclass",
    "20-defaultdict-of-unknown",
}


def trap(name: str, tmp_path: Path) -> Path:
    return saved(TRAPS[name](), tmp_path / "in.pt")


# `same_for_torch` compares storages, strides, types, ties, order and types of keys, `_metadata`, and loads the result
# as safely as the original.
every_trap = looped("name", TRAPS, here=1 / 3)


@every_trap
def test_add_and_strip_give_every_trap_back(name: str, tmp_path: Path) -> None:
    file = trap(name, tmp_path)
    there, back = tmp_path / "there.pt", tmp_path / "back.pt"
    if name in WITHOUT_WEIGHTS:
        refused("usage", tmp_path, lambda: ckptool.add_module(file, there, **OPTIONS))
        return
    added = ckptool.add_module(file, there, **OPTIONS)
    assert added.verified and added.how == "new file"
    for root in added.facts["roots"]:
        part = read(there).tree if not root["root"] else ckptool.open(f"{there}#{root['root']}").tree
        assert all(key.startswith("module.") or key == "n_averaged" for key in part)
    ckptool.strip_module(there, back, prefix="module.", **OPTIONS)
    same_for_torch(file, back, mmap=False)
    assert_same_tree(read(file), read(back))


@every_trap
def test_strip_changes_only_names_or_is_refused(name: str, tmp_path: Path) -> None:
    file = trap(name, tmp_path)
    out = tmp_path / "out.pt"
    if name in WITHOUT_WEIGHTS | MIXED:
        refused(
            "usage" if name in WITHOUT_WEIGHTS else "conflict",
            tmp_path,
            lambda: ckptool.strip_module(file, out, **OPTIONS),
        )
        return
    done = ckptool.strip_module(file, out, **OPTIONS)
    if done.how == "copy":
        assert out.read_bytes() == file.read_bytes() and done.facts["changed"] == 0
        return
    assert name[:2] in ("12", "13", "14") and done.facts["changed"] > 0
    before, after = load(file), load(out)
    assert_same_objects(list(before.values()), list(after.values()))
    again = ckptool.strip_module(out, tmp_path / "again.pt")
    assert again.how == "copy" or name == "13-twice" or list(after)[1].startswith("module.")


@every_trap
def test_remap_there_and_back_gives_every_trap_back(name: str, tmp_path: Path) -> None:
    file = trap(name, tmp_path)
    there, back = tmp_path / "there.pt", tmp_path / "back.pt"
    done = ckptool.remap(file, there, to="cuda:1", **OPTIONS)
    assert done.verified and done.facts["changed"] == done.facts["storages"]
    ckptool.remap(there, back, to="cpu", **OPTIONS)
    same_for_torch(file, back, mmap=False)
    assert_same_tree(read(file), read(back))


@every_trap
def test_convert_all_there_and_back_gives_every_trap_back(name: str, tmp_path: Path) -> None:
    file = trap(name, tmp_path)
    there, back = tmp_path / "there.safetensors", tmp_path / "back.pt"
    if name in NOT_CARRIED:
        refused("unsupported", tmp_path, lambda: ckptool.convert(file, there, all=True, **OPTIONS))
        return
    assert ckptool.convert(file, there, all=True, **OPTIONS).verified
    assert ckptool.convert(there, back, **OPTIONS).verified
    same_for_torch(file, back, mmap=False)
    assert_same_tree(read(file), read(back))


@every_trap
def test_add_and_strip_in_place_give_every_trap_back(name: str, tmp_path: Path) -> None:
    file = trap(name, tmp_path)
    before = saved(TRAPS[name](), tmp_path / "before.pt")
    if name in WITHOUT_WEIGHTS:
        refused("usage", tmp_path, lambda: ckptool.add_module(file, in_place=True, **OPTIONS))
        return
    added = ckptool.add_module(file, in_place=True, **OPTIONS)
    assert (
        added.how == "in place"
        and added.verified
        and added.bytes_written == file.stat().st_size - before.stat().st_size
    )
    ckptool.strip_module(file, in_place=True, prefix="module.", **OPTIONS)
    same_for_torch(before, file, mmap=True)
    assert_same_tree(read(before), read(file))


@every_trap
def test_the_same_input_gives_the_same_bytes_under_any_name(name: str, tmp_path: Path) -> None:
    file = trap(name, tmp_path)
    """Same in, same out, under any file name."""
    other = saved(TRAPS[name](), tmp_path / "another name.bin")
    ckptool.remap(file, tmp_path / "a.pt", to="cuda:3", keep_unknown=True)
    ckptool.remap(other, tmp_path / "b.pt", to="cuda:3", keep_unknown=True)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
