"""Paths in a configuration are relative to it; what lies beside a file of code can be imported by it."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ckptool.errors import Conflict, UsageError
from ckptool.training import configfile
from ckptool.training.trainer import fingerprint, resume, start
from tests.support.small_runs import config, last, run_to_end, trainer

CODE = """
import helper
import torch

class Own:
    about = {"inputs": [3], "classes": 2}
    def __init__(self, root="", count=30):
        self.root, self.count = root, count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        import late
        return torch.rand(3) * helper.FACTOR + late.FACTOR, torch.tensor(i % 2)
"""


@pytest.fixture(autouse=True)
def _paths() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
    forget_neighbours()


def forget_neighbours() -> None:
    """As in another process."""
    for name in ("helper", "late", "late.inner"):
        sys.modules.pop(name, None)


def project(folder: Path, factor: int = 1) -> Path:
    """A folder with a configuration, code, and what lies beside it."""
    (folder / "late").mkdir(parents=True)
    (folder / "own.py").write_text(CODE)
    (folder / "helper.py").write_text(f"FACTOR = {factor}\n")
    (folder / "late/__init__.py").write_text("from late.inner import FACTOR\n")
    (folder / "late/inner.py").write_text(f"FACTOR = {factor}\n")
    values = config().dumped() | {"run": "run"}
    values["data"] |= {"name": "own.py:Own", "args": {"root": "./pictures"}, "batch": 8}
    values["data"] |= {"val_fraction": 0.0, "val": {"name": "./own.py:Own", "args": {"count": 9}}}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder


def test_paths_are_relative_to_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf, here = project(tmp_path / "conf"), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    changes = ["task=mine.py:task", "data.val.args.root=../x", "models.main.args.name=a.py:b", "hooks=[h.py:hook]"]
    made = configfile.read("../conf/run.yaml", changes)
    assert (made.run, made.task) == ("run", f"{here}/mine.py:task")
    assert (made.data.name, made.data.args) == (f"{conf}/own.py:Own", {"root": f"{conf}/pictures"})
    assert made.data.val is not None
    assert (made.data.val.name, made.data.val.args) == (f"{conf}/own.py:Own", {"count": 9, "root": f"{tmp_path}/x"})
    assert made.models["main"].args["name"] == "a.py:b"  # an argument is the model's own affair
    assert made.hooks == [f"{here}/h.py:hook"]
    (conf / "run.yaml").write_text(
        "run: r\ntrain: {steps: 1}\nmodels: {main: {from: 'w.pt#a//b'}}\nhooks: [pkg:hook]\n"
    )
    again = configfile.read("../conf/run.yaml")
    assert (again.models["main"].from_, again.hooks) == (f"{conf}/w.pt#a//b", ["pkg:hook"])
    assert configfile.changed(again.dumped(), []) == again
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = ["run=~/runs/r", "task=~/mine.py:task", "data.args.root=~/x", "models.main.from=~/w.pt#a", "hooks=[~h]"]
    home = configfile.read("../conf/run.yaml", changes)
    assert (home.run, home.task, home.data.args["root"]) == (
        f"{tmp_path}/runs/r",
        f"{tmp_path}/mine.py:task",
        f"{tmp_path}/x",
    )
    assert (home.models["main"].from_, home.hooks) == (f"{tmp_path}/w.pt#a", ["~h"])


def test_a_run_goes_on_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose project lies elsewhere meanwhile: the code is the same."""
    conf = project(tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    for name, steps in (("whole", 12), ("parts", 5)):
        start(configfile.read("conf/run.yaml", [f"train.steps={steps}", f"run={name}/run"]))
    assert f"{conf}/own.py:Own" in (tmp_path / "parts/run/run.yaml").read_text()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume(str(tmp_path / "parts/run"), ["train.steps=8"])
    moved = Path(shutil.move(conf, tmp_path / "moved"))
    forget_neighbours()
    changes = ["train.steps=12", f"run={tmp_path}/parts/run", f"data.args.root={conf}/pictures"]
    start(configfile.read(str(moved / "run.yaml"), changes), resume="auto")
    assert last(tmp_path / "whole") == last(tmp_path / "parts")
    with pytest.raises(Conflict, match=r"data\.name was .*own\.py:Own"):
        start(configfile.read(str(moved / "run.yaml"), [*changes, "data.name=other.py:Own"]), resume="auto")


# Neighbours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_code_imports_what_lies_beside_it(tmp_path: Path, workers: int) -> None:
    """At once and later, in workers too; a second run with neighbours of the same names does not take them."""

    def ended(name: str, again: str = "") -> bytes:
        data: dict[str, Any] = {"name": f"{tmp_path / name}/own.py:Own", "batch": 8}
        run_to_end(tmp_path / f"{name}{again}", f"data.workers={workers}", "train.steps=4", data=data)
        return last(tmp_path / f"{name}{again}")

    project(tmp_path / "one", 1)
    project(tmp_path / "two", 3)
    assert ended("one") == ended("one", "again")
    with pytest.raises(UsageError, match="is imported already"):
        ended("two")


def test_what_is_installed_comes_before_a_neighbour(tmp_path: Path) -> None:
    """Later on: only while the code is imported are its neighbours first, as with `python own.py`."""
    folder = project(tmp_path / "one")
    (folder / "colorsys.py").write_text("raise SystemError('imported')\n")
    trainer(data={"name": f"{folder}/own.py:Own"})
    sys.modules.pop("colorsys", None)
    import colorsys

    assert sys.path.index(str(folder)) > sys.path.index(sysconfig.get_paths()["stdlib"])
    assert hasattr(colorsys, "rgb_to_hsv")


def test_of_two_files_of_one_name_a_change_of_either_is_seen(tmp_path: Path) -> None:
    digests, data = [], SimpleNamespace(train_count=1, held_out=[])
    for text in ("f = 1", "f = 2"):
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "net.py").write_text(text if folder == "a" else "f = 1")
        names = {folder: {"name": f"{tmp_path / folder / 'net.py'}:f"} for folder in ("a", "b")}
        settings: Any = SimpleNamespace(dumped=lambda names=names: {"models": names})
        digests.append(fingerprint(settings, data)["code"])
    assert digests[0].keys() == {"net.py"} and digests[0] != digests[1]
