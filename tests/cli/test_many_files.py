"""Several files at once: where one is refused, none is written; or the others are, where that was asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptool
from tests.support.cli import Run
from tests.support.files import saved, weights
from tests.support.hostile_inputs import pickle_zip
from tests.support.hostile_pickles import REFUSED


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, and between them one that has no weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("one.pt", "three.pt"):
        saved(weights("module.a.w", "a.b"), tmp_path / name)
    saved({"epoch": 3}, tmp_path / "two.pt")
    return tmp_path


FILES = ("one.pt", "two.pt", "three.pt")


def test_as_json_each_file_has_its_object(three: Path, run: Callable[..., object]) -> None:
    ran = run("strip-module", *FILES, "--partial", "-d", "out", "--skip-refused", "--json")
    results = json.loads(ran.out)["results"]
    assert ran.code == 1 and [each["schema"].partition("/")[0] for each in results].count("ckptool.error") == 1
    assert len(results) == 3


def test_doctor_looks_at_several_and_fixes_them(three: Path, run: Run) -> None:
    for name in ("one.pt", "three.pt"):
        saved(weights("module.a.w"), three / name)
    looked = run("doctor", *FILES)
    assert looked.code == 1 and looked.out.endswith("3 files: 1 fine, 2 with findings\n"), looked
    fixed = run("doctor", "one.pt", "three.pt", "--fix", "-d", "out")
    assert fixed.code == 0 and fixed.out.endswith("2 files: 2 written\n"), fixed
    assert list(torch.load(three / "out" / "one.pt")) == ["a.w"]
    assert run("doctor", *FILES, "--fix", "-o", "one-for-all.pt").code == 2 and not (three / "one-for-all.pt").exists()


def test_the_sum_of_several_files(three: Path, run: Run) -> None:
    (three / "cut.pt").write_bytes((three / "one.pt").read_bytes()[:999])
    for words, told in {
        ("verify", "one.pt", "cut.pt", "none.pt"): "3 files: 1 fine, 1 with findings, 1 not read\n",
        ("inspect", "one.pt", "cut.pt"): "2 files: 1 read, 1 not read\n",
        ("strip-module", *FILES, "--partial", "-d", "out", "--skip-refused"): "3 files: 2 written, 1 refused\n",
    }.items():
        assert run(*words).out.endswith(told), words
    assert "6 files, " in run("scan", ".").out
    assert run("inspect", "one.pt", "three.pt", "-q").out.splitlines() == ["module.a.w", "a.b"] * 2


def test_a_list_in_python(three: Path) -> None:
    assert [type(each).__name__ for each in ckptool.verify([*FILES, "none.pt"])] == ["Verification"] * 3 + [
        "FileMissing"
    ]
    with pytest.raises(ckptool.CkptoolError, match="one output"):
        ckptool.strip_module([*FILES], "out.pt")
    with pytest.raises(ckptool.CkptoolError, match="None of the files was written"):
        ckptool.strip_module([*FILES], folder="out", partial=True)
    with pytest.raises(TypeError, match="finit"):
        ckptool.verify([*FILES], finit=True)
    written = ckptool.cast([Path("one.pt"), "three.pt"], in_place=True, dtype="bf16", jobs=2)
    assert [each.how for each in written] == ["in place"] * 2 and not (three / "out").exists()


# One that cannot be read hides none of the others: its error is told, and the work goes on ----------------------------


def bad_files(folder: Path) -> list[str]:
    whole = saved({"w": torch.ones(30)}, folder / "whole.pt").read_bytes()
    os.symlink("nowhere", folder / "dangling.pt")
    os.symlink("circle.pt", folder / "circle.pt")
    os.mkfifo(folder / "pipe.pt")
    (folder / "folder.pt").mkdir()
    contents = {"empty.pt": b"", "cut.pt": whole[: len(whole) // 2], "page.pt": b"<html>", "new\nline.pt": whole[:99]}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    for number, (pickle, _) in enumerate([*REFUSED.values()][::7]):
        (folder / f"hostile{number}.pt").write_bytes(pickle_zip(pickle))
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["verify", "--finite"], ["scan"], ["git-check"]])
def test_the_others_are_looked_at(words: list[str], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = bad_files(tmp_path)
    saved({"w": torch.ones(3)}, tmp_path / "a.pt")
    saved({"w": torch.ones(3)}, tmp_path / "z.pt")
    monkeypatch.chdir(tmp_path)
    for name in bad:
        alone, found = run(*words, name), run(*words, "a.pt", name, "z.pt")
        assert found.code == alone.code and found.err == alone.err, name
        assert "a.pt" in found.out and ("z.pt" in found.out or words[0] == "git-check"), name
    every = run(*words, "a.pt", *bad, "z.pt", "--json")
    rows = json.loads(every.out)["results"]
    assert every.code == 2 and not every.err and len(rows) == len(bad) + 2
    errors = [row["what"] for row in rows if row["schema"] == "ckptool.error/2"]
    assert len(errors) > 2 and rows[0]["schema"] == rows[-1]["schema"] != "ckptool.error/2"
    assert not any("bug" in row.get("code", "") for row in rows)
