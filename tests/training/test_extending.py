"""A run that is made longer ends with the same bytes as one that was so long from the beginning."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from ckptool.errors import Conflict
from ckptool.training.start import resume, start
from tests.support.looped import sliced
from tests.support.small_runs import ARGS, CONV, GAN, IMAGES, config, last, run_to_end, scheduled

FIRST, STEPS = 10, 20


def extended(path: Path, *changes: str, **sections: Any) -> None:
    """Asserts that some steps and then the rest are the whole run: nothing of the state knows where the run was to
    end."""
    run_to_end(path / "whole", f"train.steps={STEPS}", *changes, **sections)
    for first in (FIRST, 13):
        parts = path / f"{first}"
        start(config(f"train.steps={first}", *changes, run=parts / "run", **sections))
        resume(str(parts / "run"), [f"train.steps={STEPS}"])
        assert last(path / "whole") == last(parts), f"{first} steps and {STEPS - first}"


@pytest.mark.parametrize(
    ("name", "every"), sliced(itertools.product(["ReduceLROnPlateau", "warmup_cosine", "StepLR"], [3, 5, 7, 1000]), 4)
)
def test_wherever_evaluation_falls(tmp_path: Path, name: str, every: int) -> None:
    """Also where the first part ends between two evaluations, and is judged once more for that."""
    extended(tmp_path, f"eval.every={every}", "train.ema=0.9", optim=scheduled(name))


@pytest.mark.parametrize(("name", "per"), sliced(itertools.product(sorted(ARGS), ["step", "epoch"]), 9))
def test_every_schedule(tmp_path: Path, name: str, per: str) -> None:
    extended(tmp_path, "eval.every=4", optim=scheduled(name, per=per))


@pytest.mark.parametrize(
    "sections",
    [GAN, {"data": IMAGES, "models": {"main": CONV}}, {"train": {"steps": 9, "precision": "fp16", "accumulate": 3}}],
    ids=["gan", "conv", "fp16"],
)
def test_other_runs(tmp_path: Path, sections: dict[str, Any]) -> None:
    extended(tmp_path, "eval.every=4", "eval.metric=val_loss", **sections)


@pytest.mark.parametrize("change", ["eval.every=2", "eval.metric=val_acc"])
def test_what_a_plateau_follows_changes_only_when_it_is_said(tmp_path: Path, change: str) -> None:
    plateau = scheduled("ReduceLROnPlateau")
    run_to_end(tmp_path, "train.steps=10", optim=plateau)
    with pytest.raises(Conflict, match=change.partition("=")[0]):
        start(config("train.steps=20", change, run=tmp_path / "run", optim=plateau), resume="auto")
    resume(str(tmp_path / "run"), ["train.steps=20", change])
    run_to_end(tmp_path / "free", "train.steps=10")
    start(config("train.steps=20", change, run=tmp_path / "free" / "run"), resume="auto")
