"""One file that cannot be read hides none of the others: verbs that look at several files tell its error, and go on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.support.cli import Run
from tests.support.files import saved
from tests.support.hostile_pickles import INPUTS


def bad_files(folder: Path) -> list[str]:
    whole = saved({"w": torch.ones(30)}, folder / "whole.pt").read_bytes()
    os.symlink("nowhere", folder / "dangling.pt")
    os.symlink("circle.pt", folder / "circle.pt")
    os.mkfifo(folder / "pipe.pt")
    (folder / "folder.pt").mkdir()
    contents = {"empty.pt": b"", "cut.pt": whole[: len(whole) // 2], "page.pt": b"<html>", "new\nline.pt": whole[:99]}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    for number, data in enumerate(INPUTS.values()):
        (folder / f"hostile{number}.pt").write_bytes(data() if callable(data) else data)
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
