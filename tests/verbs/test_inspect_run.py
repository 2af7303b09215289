"""A run's folder as `inspect` and `scan` see it, without torch, whatever is in it; and how it is made."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Conflict
from ckptool.training.configfile import recorded_config
from ckptool.training.start import start
from ckptool.training.store import name_of
from tests.support.small_runs import Typed, config, create, cut_short, flip_a_bit, forget_record, train_typed

pytestmark = pytest.mark.usefixtures("harness")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    start(config("save.keep_last=2", "save.keep_best=1", "eval.metric=val_acc", "eval.mode=max", run=tmp_path / "run"))
    return tmp_path / "run"


def test_what_is_damaged_is_found_by_its_size_or_in_full(run_folder: Path) -> None:
    flip_a_bit(run_folder / "checkpoints" / name_of(20))
    assert ckptool.inspect_run(run_folder).damaged == 0
    full = ckptool.inspect_run(run_folder, full=True)
    assert (full.damaged, full.resumes) == (1, 15)
    assert full.checkpoints[-1].kept == ("damaged",)
    cut_short(run_folder / "checkpoints" / name_of(15))
    for path in (run_folder / "checkpoints").glob("*.pt"):
        cut_short(path)
    found = ckptool.inspect_run(run_folder)
    assert (found.damaged, found.resumes) == (len(found.checkpoints), None)
    assert "none of them is whole" in str(found)


WEIRD: list[dict[str, Any]] = [
    {"metrics": "none", "epoch": "x", "loss": []},
    {"metrics": {"val_acc": "high", "val_loss": None}, "bytes": "many"},
    {"metrics": {"val_acc": [1], "\x1b[31m": 1.0}, "loss": 1e999},
]


@pytest.mark.parametrize("facts", WEIRD, ids=["texts", "numbers", "lists"])
def test_a_sidecar_of_anything(run_folder: Path, facts: dict[str, Any]) -> None:
    path = (run_folder / "checkpoints" / name_of(20)).with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    text = str(ckptool.inspect_run(run_folder))
    assert "\x1b" not in text
    json.dumps(ckptool.inspect_run(run_folder).to_dict(), allow_nan=False)


# How it is made -------------------------------------------------------------------------------------------------------


def test_a_run_that_never_saved_begins_again_and_one_that_did_does_not(tmp_path: Path) -> None:
    """As one is left whose model raised: mended, it is started by the same command."""
    made = create(config(run=tmp_path / "run"))
    made.note("changed", config=config("seed=9").dumped())
    with pytest.raises(Conflict, match="is being written"):
        create(config(run=made.folder))
    assert made.lock is not None
    made.lock.release()
    again = create(config("seed=4", run=made.folder))
    assert again.lock is not None
    assert (recorded_config(made.folder)[1].seed, list(again.history.read())) == (4, [])
    again.commit(1, {"step": 1}, {})
    again.lock.release()
    with pytest.raises(Conflict, match="is a run already"):
        create(config(run=made.folder))
    assert recorded_config(made.folder)[0] == again.id


def test_a_loop_of_ones_own_goes_on_with_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mine/train.py"])
    model = torch.nn.Linear(2, 1)
    for steps, told in (
        (3, "done at step 3; to go on, give the loop in train.py more steps or epochs, and run it again"),
        (4, "done at step 4; to go on, give the loop in train.py more steps or epochs, and run it again"),
        (6, "done at step 6; to go on"),
    ):
        with ckptool.Run(tmp_path / "run", model=model, say=lambda text: None) as run:
            for step in run.steps(steps):
                if step % 2 == 0:
                    run.save()
                elif step == 3 and steps == 3:
                    break
        found = ckptool.inspect_run(tmp_path / "run")
        assert (found.script, found.to_dict()["script"]) == ("train.py", "train.py")
        assert told in str(found) and "ckptool resume" not in str(found)


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, forget_record], ids=lambda made: made.__name__)
def test_a_damaged_checkpoint_is_shown(typed: Typed, damage: Any) -> None:
    train_typed(typed)
    path = Path("runs/x/checkpoints") / name_of(20)
    damage(path)
    code, out, _ = typed("scan", "--full", "runs/x")
    assert code == 1
    assert "1 damaged" in out
    assert "resumes from step 15" in out
    assert str(path) in out.splitlines()[-1]
    code, out, err = typed("resume", "runs/x", "-q")
    assert code == 0
    assert f"skipped {path}" in err


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ((), "done"),
        (("train.steps=null", "train.epochs=2"), "done"),
        (("stop.after=0.000001",), "stop"),
        (("stop.patience=1", "eval.every=1", "optim.main.lr=1e-30"), "early-stop"),
    ],
)
def test_the_command_that_is_printed_of_a_run_works(typed: Typed, changes: tuple[str, ...], event: str) -> None:
    """Also where its newest checkpoint is damaged; where all are, none is printed."""
    train_typed(typed, *changes)
    assert json.loads(typed("inspect", "runs/x", "--json")[1])["event"] == event
    for _ in range(2):
        (line,) = re.findall(r"ckptool (resume .*)", typed("inspect", "runs/x")[1])
        assert typed(*shlex.split(line), "-q")[0] == 0
        there = sorted(Path("runs/x/checkpoints").glob("*.pt"))
        if len(there) > 1:
            cut_short(there[-1])
    for path in Path("runs/x/checkpoints").glob("*.pt"):
        cut_short(path)
    said = typed("inspect", "runs/x")[1]
    assert "none of them is whole, so it cannot go on" in said and "ckptool" not in said
