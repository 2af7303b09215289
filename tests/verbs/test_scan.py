"""`scan`: the state of a folder of checkpoints, and what a file's pickles would call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.support.cli import Run


class Foreign:
    """A class that ckptool does not know."""

    def __init__(self) -> None:
        self.value = 1


def leave_a_trace(path: str) -> None:
    Path(path).write_text("it ran")


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return leave_a_trace, (str(self.path),)


def checkpoint(path: Path, step: int | None = None, **more: Any) -> Path:
    tree = {"model": {"fc.weight": torch.ones(4, 4)}, **({} if step is None else {"step": step}), **more}
    torch.save(tree, path)
    return path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "old").mkdir(parents=True)
    checkpoint(folder / "a.pt", 100)
    checkpoint(folder / "old" / "b.pt", 50)
    checkpoint(folder / "c.pt", 300)
    os.truncate(folder / "c.pt", 900)
    checkpoint(folder / "d.pt", 200)
    (folder / "empty.pt").touch()
    (folder / "notes.txt").write_text("text")
    (folder / ".hidden.pt").write_text("not looked at")
    return folder


def test_a_folder_is_listed_with_states_steps_and_sizes(run_folder: Path) -> None:
    found = ckptool.scan(run_folder)
    rows = {os.path.relpath(file.path, run_folder): file for file in found.files}
    assert {name: (file.state, file.step) for name, file in rows.items()} == {
        "a.pt": ("good", 100),
        "c.pt": ("truncated", None),
        "d.pt": ("good", 200),
        "empty.pt": ("truncated", None),
        "old/b.pt": ("good", 50),
    }
    assert rows["a.pt"].bytes == (run_folder / "a.pt").stat().st_size and rows["a.pt"].holds == ("model weights",)
    assert (found.findings, found.other_files, found.latest_by) == (2, 2, "step")
    assert found.latest is not None and found.latest.path == str(run_folder / "d.pt")


def test_the_newest_by_time_where_no_file_says_its_step(tmp_path: Path) -> None:
    for number, name in enumerate(("late.pt", "early.pt")):
        os.utime(checkpoint(tmp_path / name), (1_000_000 - number, 1_000_000 - number))
    found = ckptool.scan(tmp_path)
    assert found.latest_by == "time" and found.latest is not None and found.latest.path.endswith("late.pt")


@pytest.mark.parametrize(
    ("name", "tree", "expected"),
    [
        ("model.pt", {"global_step": 7, "epoch": 2}, (7, 2)),
        ("model.pt", {"trainer": {"step": 9}}, (9, None)),
        ("checkpoint-500.pt", None, (500, None)),
        ("epoch=3-step=1000.ckpt", None, (1000, 3)),
        ("model_epoch_50.pth", None, (None, 50)),
        ("resnet50.pt", None, (None, None)),
        ("model.pt", {"step": True, "epoch": -1}, (None, None)),
    ],
)  # fmt: skip
def test_how_far_a_checkpoint_was(name: str, tree: Any, expected: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), **(tree or {})}, tmp_path / name)
    (file,) = ckptool.scan(tmp_path).files
    assert (file.step, file.epoch) == expected


def test_the_command(run_folder: Path, tmp_path: Path, run: Run) -> None:
    bad, empty, files = (tmp_path / name for name in ("bad", "empty", "files"))
    for folder in (bad, empty, files):
        folder.mkdir()
    (bad / "a.pt").touch()
    clean, foreign = checkpoint(files / "clean.pt"), checkpoint(files / "foreign.pt", config=Foreign())
    unread = "not compared with its checksums"
    for words, code, said in (
        ((run_folder, "--latest-good", "-q"), 0, f"{run_folder / 'd.pt'}\n"),
        ((bad, "--latest-good", "-q"), 1, ""),
        ((bad,), 1, "1 not good"),
        ((empty,), 0, "0 checkpoints"),
        ((clean,), 0, "nothing in it would run"),
        ((foreign,), 1, f"makes objects of  {__name__}.Foreign  at config"),
        ((clean, foreign, "-q"), 1, ""),
        ((files,), 1, unread),
        ((files, "--full"), 1, ""),
    ):
        found = run("scan", *map(str, words))
        assert found.code == code and (said in found.out if said else unread not in found.out), (words, found)
        assert "-q" not in words or found.out == said, (words, found)


# What would run ------------------------------------------------------------------------------------------------------


def test_what_a_pickle_would_call_is_named_with_its_place(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    path = checkpoint(tmp_path / "a.pt", hooks=[Runs(trace)], config=Foreign(), cls={Foreign: 1})
    (file,) = ckptool.scan(path).files
    home = __name__
    assert [(call.name, call.how, call.places, call.is_custom) for call in file.calls] == [
        (f"{home}.leave_a_trace", "called", ("hooks/0",), False),
        (f"{home}.Foreign", "named", ("cls",), False),
        (f"{home}.Foreign", "made", ("config",), True),
    ]
    assert not trace.exists()


def test_a_call_that_is_thrown_away_is_named(tmp_path: Path) -> None:
    import zipfile

    path = checkpoint(tmp_path / "a.pt")
    pickled = b"\x80\x02cbuiltins\nbreakpoint\n)R0}."
    out = tmp_path / "b.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, pickled if entry.filename.endswith("data.pkl") else old.read(entry))
    (file,) = ckptool.scan(out).files
    assert [(call.name, call.how) for call in file.calls] == [("builtins.breakpoint", "called")]


def test_links_to_folders_to_themselves_and_to_nothing_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "itself.pt").symlink_to("itself.pt")
    (tmp_path / "nothing.pt").symlink_to("gone.pt")
    checkpoint(tmp_path / "a.pt")
    assert len(ckptool.scan(tmp_path).files) == 1


def test_one_file_is_the_latest_good_one_where_it_is_good(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "good.pt")
    found = ckptool.scan(good).latest
    assert found is not None and found.path == str(good)
    assert ckptool.scan(checkpoint(tmp_path / "bad.pt", x=Runs(tmp_path / "ran"))).latest is None
