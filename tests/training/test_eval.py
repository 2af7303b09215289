"""`eval`: a checkpoint's metrics are those of its run; nothing is written to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.errors import Corrupt, UsageError
from tests.support.files import contents
from tests.support.small_runs import GAN, flip_a_bit, run_to_end

POINTS = {"name": "blobs", "args": {"samples": 60, "inputs": 4}, "batch": 8}


@pytest.fixture
def run_of(tmp_path: Path) -> Any:
    def made(*changes: str, **sections: Any) -> str:
        run_to_end(tmp_path, "save.keep_last=9", *changes, **sections)
        return str(tmp_path / "run")

    return made


def recorded(run: str) -> dict[int, dict[str, float]]:
    """The metrics of each checkpoint, as its sidecar has them."""
    sidecars = (json.loads(path.read_text()) for path in Path(run).glob("checkpoints/*.json"))
    return {facts["step"]: facts["metrics"] for facts in sidecars}


AVERAGED = {"train": {"steps": 20, "ema": 0.9}, "eval": {"every": 5, "ema": True}}


@pytest.mark.parametrize(("workers", "sections"), [(2, {}), (0, AVERAGED), (0, GAN), (0, {"strategy": "ddp"})])
def test_the_metrics_are_those_of_the_run(run_of: Any, workers: int, sections: dict[str, Any]) -> None:
    run = run_of("eval.metric=val_loss", **sections)
    before = contents(Path(run))
    known = recorded(run)
    for step, metrics in known.items():
        found = ckptool.eval(run, [f"data.workers={workers}"], checkpoint=step)
        assert (found.metrics, found.step, found.chosen) == (metrics, step, "")
    best = min(known, key=lambda step: (known[step]["val_loss"], step))
    assert (ckptool.eval(run).step, ckptool.eval(run).chosen) == (best, "the best val_loss")
    assert ckptool.eval(run, checkpoint="newest").step == 20
    assert contents(Path(run)) == before


def test_the_average_is_evaluated_when_it_is_asked_for(run_of: Any) -> None:
    run = run_of("train.ema=0.9")
    plain, average = ckptool.eval(run, checkpoint=20), ckptool.eval(run, "eval.ema=true", checkpoint=20)
    assert plain.metrics == recorded(run)[20]
    assert average.ema and average.metrics["val_loss"] != plain.metrics["val_loss"]


def test_test_data_and_other_data(run_of: Any) -> None:
    test = {"name": "blobs", "args": {"samples": 24, "inputs": 4, "seed": 5}}
    run = run_of(data={**POINTS, "val": {"name": "blobs", "args": {"inputs": 4}}, "test": test})
    on_test = ckptool.eval(run, on="test", checkpoint=20)
    assert on_test.metrics == ckptool.eval(run, f"data.val={json.dumps(test)}", checkpoint=20).metrics
    assert on_test.metrics != recorded(run)[20]
    assert on_test.on == "test"


def test_what_is_not_there_is_named(run_of: Any, tmp_path: Path) -> None:
    run = run_of("data.val_fraction=0", "eval.every=0")
    with pytest.raises(UsageError, match="nothing to evaluate on"):
        ckptool.eval(run)
    with pytest.raises(UsageError, match=r"there is no test set(?s:.*)data\.test\.name"):
        ckptool.eval(run, on="test")
    with pytest.raises(UsageError, match=r"given 'train' as on(?s:.*)'val' or 'test'"):
        ckptool.eval(run, on="train")
    with pytest.raises(UsageError, match=r"no checkpoint 7(?s:.*)5, 10, 15, 20, newest"):
        ckptool.eval(run, checkpoint=7)
    with pytest.raises(UsageError, match="no checkpoint best"):
        ckptool.eval(run, checkpoint="best")
    flip_a_bit(Path(run) / "checkpoints/step-00000010.pt")
    with pytest.raises(Corrupt, match="does not match its sha256"):
        ckptool.eval(run, checkpoint=10)
    with pytest.raises(UsageError, match="is not a run"):
        ckptool.eval(tmp_path)


def test_on_the_command_line(run_of: Any, run: Any) -> None:
    folder = run_of()
    best = ckptool.eval(folder)
    ran = run("eval", folder)
    assert ran.code == 0
    assert ran.out.splitlines()[0] == f"{folder}: step {best.step} (the best val_loss) on validation data"
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == ["val_loss", "val_acc"]
    told = json.loads(run("eval", folder, "--checkpoint", "newest", "--json").out)
    assert (told["schema"], told["step"], told["chosen"]) == ("ckptool.eval/2", 20, "newest")
    assert run("eval", folder, "--on", "test").code == 2
