"""Every trap (docs/traps.md) through every verb that rewrites: it comes back bit for bit, or is refused by name. torch
is the judge."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
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
WITHOUT_WEIGHTS = set(
    (
        "09-dtypes-as-values 11-typed-storage 11-uninitialized-buffer 11-uninitialized-parameter 11-wrapper-subclass "
        "17-optimizer-states-named 17-several-param-groups 18-cyclic-dict 18-cyclic-list 18-empty-containers "
        "18-keys-that-are-not-text 18-keys-with-dots-and-slashes 18-nested-deeply 18-none-and-scalars 18-shared-list "
        "19-dtypes-and-strings 19-numpy-arrays 19-numpy-odd-arrays 20-collections-of-python 20-defaultdict-of-unknown "
        "20-dict-subclass 20-functions-and-classes 20-namespace 20-numbers-and-dates 20-numpy-scalars 20-path "
        "20-random-states 20-sets"
    ).split()
)
# What strip-module refuses: keys that are prefixed in part, or that would become one.
MIXED = set(
    ("13-a-submodule-called-module 13-on-some-keys 13-only-the-prefix 15-collision 15-collision-of-wrappers").split()
)
# What `convert --all` has no words for.
NOT_CARRIED = set(
    ("11-wrapper-subclass 20-unknown-call 20-unknown-object 20-dict-subclass 20-defaultdict-of-unknown").split()
)


def on_and_off(file: Path, there: Path, back: Path) -> None:
    added = ckptool.add_module(file, there, **OPTIONS)
    assert added.verified and added.how == "new file"
    for root in added.facts["roots"]:
        part = read(there).tree if not root["root"] else ckptool.open(f"{there}#{root['root']}").tree
        assert all(key.startswith("module.") or key == "n_averaged" for key in part)
    ckptool.strip_module(there, back, prefix="module.", **OPTIONS)


def on_and_off_in_place(file: Path, there: Path, back: Path) -> None:
    added = ckptool.add_module(back, in_place=True, **OPTIONS)
    assert added.how == "in place" and added.verified
    assert added.bytes_written == back.stat().st_size - file.stat().st_size
    ckptool.strip_module(back, in_place=True, prefix="module.", **OPTIONS)


def moved_and_back(file: Path, there: Path, back: Path) -> None:
    done = ckptool.remap(file, there, to="cuda:1", **OPTIONS)
    assert done.verified and done.facts["changed"] == done.facts["storages"]
    ckptool.remap(there, back, to="cpu", **OPTIONS)


def converted_and_back(file: Path, there: Path, back: Path) -> None:
    there = there.with_suffix(".safetensors")
    assert ckptool.convert(file, there, all=True, **OPTIONS).verified
    assert ckptool.convert(there, back, **OPTIONS).verified


# Ways there and back, with the traps that each refuses, and the error's code.
WAYS: dict[Callable[[Path, Path, Path], None], tuple[str, set[str]]] = {
    on_and_off: ("usage", WITHOUT_WEIGHTS),
    on_and_off_in_place: ("usage", WITHOUT_WEIGHTS),
    moved_and_back: ("", set()),
    converted_and_back: ("unsupported", NOT_CARRIED),
}


@looped("name", TRAPS, here=1 / 3)
def test_every_trap_comes_back_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """`same_for_torch` compares storages, strides, types, ties, order and types of keys, `_metadata`, and loads the
    result as safely as the original."""
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    for way, (code, refuses) in WAYS.items():
        (place := tmp_path / way.__name__).mkdir()
        there, back = place / "there.pt", place / "back.pt"
        if way is on_and_off_in_place:
            shutil.copy(file, back)
        if name in refuses:
            refused(code, place, partial(way, file, there, back))
            continue
        way(file, there, back)
        same_for_torch(file, back, mmap=way is on_and_off_in_place)
        assert_same_tree(read(file), read(back))


@looped("name", TRAPS, here=1 / 3)
def test_strip_changes_only_names_or_is_refused(name: str, tmp_path: Path) -> None:
    file, out = saved(TRAPS[name](), tmp_path / "in.pt"), tmp_path / "out.pt"
    if name in WITHOUT_WEIGHTS | MIXED:
        code = "usage" if name in WITHOUT_WEIGHTS else "conflict"
        refused(code, tmp_path, lambda: ckptool.strip_module(file, out, **OPTIONS))
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


@looped("name", TRAPS, here=1 / 3)
def test_the_same_input_gives_the_same_bytes_under_any_name(name: str, tmp_path: Path) -> None:
    outputs = []
    for number, called in enumerate(("in.pt", "another name.bin")):
        file = saved(TRAPS[name](), tmp_path / called)
        ckptool.remap(file, tmp_path / f"{number}.pt", to="cuda:3", keep_unknown=True)
        outputs.append((tmp_path / f"{number}.pt").read_bytes())
    assert outputs[0] == outputs[1]
