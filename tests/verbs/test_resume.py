"""Going on with a run: from which checkpoint, with which configuration, and what is said and noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptool.errors import NoneValid
from ckptool.training.reports import Outcome
from ckptool.training.start import resume, start
from ckptool.training.store import Lines, name_of
from tests.support.small_runs import config, cut_short, events, flip_a_bit, forget_record, last

pytestmark = pytest.mark.usefixtures("harness")


def begun(path: Path, *changes: str, steps: int = 10, **sections: Any) -> Path:
    """A run that stopped after so many steps."""
    start(config(f"train.steps={steps}", *changes, run=path / "run", **sections))
    return path / "run"


def on(run: Path, *changes: str) -> Outcome:
    return resume(str(run), ["train.steps=20", *changes])


def whole(path: Path, *changes: str) -> bytes:
    """The last file of a run that never stopped."""
    start(config("train.steps=20", *changes, run=path / "whole"))
    return (path / "whole" / "checkpoints" / name_of(20)).read_bytes()


# From which checkpoint ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, forget_record], ids=lambda made: made.__name__)
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tmp_path: Path, damage: Any) -> None:
    run = begun(tmp_path)
    damage(run / "checkpoints" / name_of(10))
    said: list[str] = []
    resume(str(run), ["train.steps=20"], say=said.append)
    assert [line for line in said if line.startswith("skipped ") and name_of(10) in line]
    (skipped,) = [fact for fact in events(run) if fact["event"] == "skip-damaged"]
    assert (skipped["step"], skipped["path"]) == (10, str(run / "checkpoints" / name_of(10)))
    (resumed,) = [fact for fact in events(run) if fact["event"] == "resume"]
    assert resumed["step"] == 5
    assert last(tmp_path) == whole(tmp_path)


def test_all_are_damaged(tmp_path: Path) -> None:
    """Exit 3; nothing is deleted, nothing is begun again."""
    run = begun(tmp_path)
    for path in (run / "checkpoints").glob("*.pt"):
        flip_a_bit(path)
    before = {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    for how in (lambda: on(run), lambda: start(config(run=run), resume="auto")):
        with pytest.raises(NoneValid) as raised:
            how()
        assert raised.value.exit_code == 3
    assert {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()} == before


def test_a_damaged_one_is_written_again(tmp_path: Path) -> None:
    run = begun(tmp_path)
    good = (run / "checkpoints" / name_of(10)).read_bytes()
    flip_a_bit(run / "checkpoints" / name_of(10))
    resume(str(run))
    assert (run / "checkpoints" / name_of(10)).read_bytes() == good


def test_metrics_are_cut_back_to_where_it_goes_on(tmp_path: Path) -> None:
    run = begun(tmp_path, "log.every=1")
    flip_a_bit(run / "checkpoints" / name_of(10))
    on(run)
    assert [fact["step"] for fact in Lines(str(run / "metrics.jsonl")).read()] == list(range(1, 21))
