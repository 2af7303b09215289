"""Going on with a run: from which checkpoint, with which configuration, and what is said and noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Conflict, Corrupt, NoneValid, UsageError
from ckptool.training.reports import Outcome
from ckptool.training.start import resume, start
from ckptool.training.store import Lines, name_of
from ckptool.training.toys import MLP
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


# With which configuration ---------------------------------------------------------------------------------------------


def test_a_change_holds_for_the_next_time_too(tmp_path: Path) -> None:
    """run.yaml is written once; what was changed since is in the history."""
    run = begun(tmp_path)
    text = (run / "run.yaml").read_text()
    resume(str(run), ["train.steps=15", "optim.main.lr=0.1"])
    (noted,) = [fact for fact in events(run) if fact["event"] == "changed"]
    assert noted["changes"] == {"train.steps": [10, 15], "optim.main.lr": [0.01, 0.1]}
    resume(str(run), ["train.steps=20"])
    assert resume(str(run)).step == 20
    state = torch.load(run / "checkpoints" / name_of(20), weights_only=True)
    assert state["optimizer_state_dict"]["param_groups"][0]["lr"] == 0.1
    assert (run / "run.yaml").read_text() == text
    assert [fact["event"] for fact in events(run)].count("changed") == 2


def test_a_change_that_fails_is_not_kept(tmp_path: Path) -> None:
    run = begun(tmp_path)
    with pytest.raises(UsageError):
        on(run, "device=nonsense")
    assert on(run).step == 20


def test_a_fixed_key_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run = begun(tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(Conflict, match=r"data\.batch was 8, and is now 16"):
        on(run, "data.batch=16")
    with pytest.raises(Conflict, match=r"optim\.main\.lr was 0.01, and is now 0.5"):
        start(config("optim.main.lr=0.5", run=run), resume="auto")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"} == {
        path: data for path, data in before.items() if path.name != "lock"
    }


def test_a_run_that_was_moved(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.rename(tmp_path / "elsewhere")
    assert on(tmp_path / "elsewhere").path == str(tmp_path / "elsewhere")
    assert not run.exists()


def test_resume_must_have_something(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run: it has no run.yaml"):
        resume(str(tmp_path))
    with pytest.raises(UsageError, match=r"is not a run"):
        start(config(run=tmp_path / "none"), resume="must")
    run = begun(tmp_path)
    with pytest.raises(Conflict, match="is a run already"):
        start(config(run=run))
    (run / "run.yaml").write_text((run / "run.yaml").read_text().partition("\n")[2])
    with pytest.raises(Corrupt, match="is not the configuration of a run"):
        on(run)


def test_a_run_that_is_done_stays_done(tmp_path: Path) -> None:
    run = begun(tmp_path)
    before = last(tmp_path)
    done = resume(str(run))
    assert (done.status, done.step, done.exit_code) == ("done", 10, 0)
    assert last(tmp_path) == before


def test_other_conditions_are_said_in_one_line(tmp_path: Path) -> None:
    run = begun(tmp_path)
    threads, said = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        resume(str(run), ["train.steps=12"], say=said.append)
    finally:
        torch.set_num_threads(threads)
    assert len([line for line in said if "threads 1 → 2" in line]) == 1


# What is in the file --------------------------------------------------------------------------------------------------


def test_the_file_opens_everywhere(tmp_path: Path) -> None:
    """Stock torch.load, load_state_dict, and ckptool's own verbs: the weights and their average are clean roots."""
    run = begun(tmp_path, "train.ema=0.9")
    path = run / "checkpoints" / name_of(10)
    state = torch.load(path, weights_only=True)
    for key in ("model_state_dict", "ema_state_dict"):
        MLP(inputs=[4], classes=4, hidden=[6], dropout=0.2).load_state_dict(state[key])
    assert list(state) == [
        *("epoch", "step", "loss", "model_state_dict", "optimizer_state_dict", "ema_state_dict", "rng_state"),
        *("data_state", "best", "config"),
    ]
    assert state["optimizer_state_dict"]["param_groups"][0]["param_names"][0] == "1.weight"
    for root in (None, "model_state_dict", "ema_state_dict"):
        found = ckptool.strip_module(path, at=root, in_place=True)
        assert (found.how, found.summary) == ("nothing", "already clean: no wrapper prefix on any key")


def test_the_sidecar_and_the_history_say_where_it_ran(tmp_path: Path) -> None:
    run = begun(tmp_path)
    sidecar = json.loads((run / "checkpoints" / name_of(10)).with_suffix(".json").read_text())
    assert {"run", "step", "bytes", "sha256", "epoch", "loss", "metrics", "parent", "environment"} <= set(sidecar)
    assert (sidecar["step"], sidecar["parent"]) == (10, 5)
    assert set(sidecar["metrics"]) == {"val_loss", "val_acc"}
    assert {"torch", "host", "device", "threads", "argv", "git"} <= set(sidecar["environment"])
    assert [fact["event"] for fact in events(run)] == ["start", "save", "save", "done"]
    assert {"torch", "host", "argv", "git", "step"} <= set(events(run)[0])


def test_retention_follows_the_metrics(tmp_path: Path) -> None:
    run = begun(tmp_path, "save.every=1", "eval.every=1", "save.keep_last=2", "save.keep_every=4", "log.every=1")
    metrics = {fact["step"]: fact["val_loss"] for fact in Lines(str(run / "metrics.jsonl")).read()}
    best = min(metrics, key=lambda step: (metrics[step], step))
    kept = sorted(int(path.stem[5:]) for path in (run / "checkpoints").glob("*.pt"))
    assert kept == sorted({9, 10, 4, 8, best})
    assert len(list((run / "checkpoints").iterdir())) == 2 * len(kept)


def test_the_best_by_another_metric_is_chosen_anew(tmp_path: Path) -> None:
    """What was the best by one number says nothing of another, which a run may be judged by from a resume on."""
    run = begun(tmp_path)
    on(run, "eval.metric=val_acc", "eval.mode=max")
    best = torch.load(run / "checkpoints" / name_of(20), weights_only=True)["best"]
    later = {fact["step"]: fact["val_acc"] for fact in Lines(str(run / "metrics.jsonl")).read() if fact["step"] > 10}
    assert (best["metric"], best["value"]) == ("val_acc", max(later.values()))
