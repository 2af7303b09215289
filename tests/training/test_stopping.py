"""What ends a run before its end (a signal, its time, an error) costs none of the steps that were done."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.errors import UserCodeFailed
from ckptool.training.hooks import Hooks
from ckptool.training.loop import remember
from ckptool.training.store import Lines, name_of
from ckptool.training.trainer import resume, start
from tests.support.looped import sliced
from tests.support.same import first_difference
from tests.support.small_runs import config, events, killed_after, last, scheduled, trainer

# A task that counts the batches of its evaluations, and does something in the second batch of one, as often as it is
# told.
TASK = """
import json, os, signal
from ckptool.training.tasks import Task, classify
def task():
    made = classify()
    def watched(batches):
        for number, batch in enumerate(batches):
            with open(LOG, "a") as file:
                file.write(f"{number}\\n")
            if number == 1 and os.path.exists(DO):
                os.unlink(DO)
                ACTION
            yield batch
    def evaluate(models, batches):
        EVALUATE
    return Task(made.phases, evaluate)
"""
PLAIN = "return made.evaluate(models, watched(batches))"
GREEDY = "\n        ".join(
    ("try:", f"    {PLAIN}", "except BaseException:", "    return {'val_loss': -1.0, 'val_acc': 9.0}")
)


def evaluated(path: Path, action: str, evaluate: str = PLAIN) -> str:
    text = TASK.replace("LOG", repr(str(path / "log"))).replace("DO", repr(str(path / "do")))
    (path / "own.py").write_text(text.replace("ACTION", action).replace("EVALUATE", evaluate))
    return f"task={path / 'own.py'}:task"


def batches(path: Path) -> list[int]:
    return [int(line) for line in (path / "log").read_text().split()]


def parents(path: Path) -> dict[int, Any]:
    """Of each checkpoint, by step, the one before it, and its metrics."""
    facts = [json.loads(each.read_text()) for each in (path / "run/checkpoints").glob("*.json")]
    return {fact["step"]: (fact["parent"], fact["metrics"]) for fact in facts}


TERM = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(("greedy", "steps", "every"), sliced(product([False, True], [20, 13], [5, 13]), 3))
def test_a_signal_ends_an_evaluation(tmp_path: Path, every: int, steps: int, greedy: bool) -> None:
    """The batch that is being computed is the last one; the state is saved, and the evaluation is done again."""
    changes = [f"train.steps={steps}", f"eval.every={every}", "data.val_fraction=0.5", "save.every=13", "log.every=1"]
    changes += [
        evaluated(tmp_path, TERM, GREEDY if greedy else PLAIN),
        "save.keep_last=9",
        "save.at_start=true",
        "hooks=[grad_norm]",
        f"data.workers={2 if steps == 13 else 0}",
    ]
    optim = scheduled("ReduceLROnPlateau")
    start(config(*changes, run=tmp_path / "whole" / "run", optim=optim))
    (tmp_path / "log").unlink()
    (tmp_path / "do").touch()
    done = start(config(*changes, run=tmp_path / "parts" / "run", optim=optim))
    assert (done.status, done.step, done.exit_code) == ("stopped", every, 143)
    assert batches(tmp_path) == [0, 1]
    saved = tmp_path / "parts/run/checkpoints" / name_of(every)
    assert torch.load(saved, weights_only=True)["pending"] == "evaluation"
    assert json.loads(saved.with_suffix(".json").read_text())["stop"]
    assert resume(str(tmp_path / "parts" / "run")).status == "done"
    assert last(tmp_path / "whole") == last(tmp_path / "parts")
    one, other = ((tmp_path / name / "run" / "metrics.jsonl").read_text() for name in ("whole", "parts"))
    assert one == other and "grad_norm" in one
    assert parents(tmp_path / "whole") == parents(tmp_path / "parts")


def test_an_evaluation_is_stopped_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", time.monotonic)  # which the evaluation replaces
    change = evaluated(tmp_path, "setattr(__import__('time'), 'monotonic', lambda: 1e12)")
    (tmp_path / "do").touch()
    done = start(config("eval.every=1", "data.val_fraction=0.5", "stop.after=900", change, run=tmp_path / "run"))
    assert (done.status, done.step, done.exit_code) == ("stopped", 1, 0)
    assert batches(tmp_path) == [0, 1]


def test_a_run_that_is_made_longer_does_not_do_the_last_evaluation_again(tmp_path: Path) -> None:
    changes = ["eval.every=1000", "data.val_fraction=0.5", evaluated(tmp_path, TERM)]
    (tmp_path / "do").touch()
    assert start(config("train.steps=5", *changes, run=tmp_path / "run")).status == "stopped"
    (tmp_path / "log").unlink()
    resume(str(tmp_path / "run"), ["train.steps=9"])
    assert batches(tmp_path) == [0, 1, 2, 3]  # the one at the new end


# Errors ---------------------------------------------------------------------------------------------------------------

HOOK = """
class Hook:
    def WHERE(self, *given):
        trainer = given[0] if given else None
        import os
        if os.path.exists(DO) and (trainer is None or trainer.step >= 7):
            raise LookupError("lost")
"""
DATA = """
import os
from ckptool.training.toys import blobs
def data():
    made = blobs(samples=60, inputs=4)
    class Own:
        about = made.about
        def __len__(self):
            return len(made)
        def __getitem__(self, i):
            self.count = getattr(self, "count", 0) + 1
            if os.path.exists(DO) and self.count > 70:
                raise LookupError("lost")
            return made[i]
    return Own()
"""


@pytest.mark.parametrize("where", ["after_step", "facts", "logged", "data", "data in a worker", "evaluation"])
def test_an_error_between_two_steps_costs_no_step(tmp_path: Path, where: str) -> None:
    """The last whole step is saved; with the fault mended, the run ends with the same bytes."""
    changes = ["save.every=1000", "log.every=7", "eval.every=7", "data.val_fraction=0.5"]
    sections: dict[str, Any] = {}
    if where.startswith("data"):
        (tmp_path / "own.py").write_text(DATA.replace("DO", repr(str(tmp_path / "do"))))
        sections["data"] = {"name": f"{tmp_path / 'own.py'}:data", "batch": 8}
        changes[-1] = f"data.workers={int(where != 'data')}"
    elif where == "evaluation":
        changes.append(evaluated(tmp_path, "raise LookupError('lost')"))
    else:
        (tmp_path / "own.py").write_text(HOOK.replace("WHERE", where).replace("DO", repr(str(tmp_path / "do"))))
        changes.append(f"hooks=[{tmp_path / 'own.py'}:Hook]")
    start(config(*changes, run=tmp_path / "whole" / "run", **sections))
    (tmp_path / "do").touch()
    with pytest.raises(UserCodeFailed, match="LookupError: lost") as raised:
        start(config(*changes, run=tmp_path / "parts" / "run", **sections))
    run = str(tmp_path / "parts" / "run")
    step = int(max((tmp_path / "parts/run/checkpoints").glob("*.pt")).stem[5:])
    assert step == 7 or (where.startswith("data") and 5 < step < 10)
    assert f"step {step} is saved; resume: ckptool resume {run}" in raised.value.fix
    failed = [fact for fact in Lines(f"{run}/history.jsonl").read() if fact["event"] == "failed"]
    assert [(fact["step"], "LookupError: lost" in fact["error"]) for fact in failed] == [(step, True)]
    (tmp_path / "do").unlink(missing_ok=True)
    assert resume(run).step == 20
    assert last(tmp_path / "whole") == last(tmp_path / "parts")


# No more progress, and time -------------------------------------------------------------------------------------------

LEARNS_NOTHING = ("optim.main.lr=1e-30", "eval.every=2", "save.every=2", "save.keep_last=99", "log.every=1")


@pytest.mark.parametrize("step", [1, 2, 4, 6, 8])
def test_a_run_that_gets_no_better_is_stopped_early(tmp_path: Path, step: int) -> None:
    """At the same step, with the same bytes, wherever it was killed before."""
    changes = (*LEARNS_NOTHING, "stop.patience=3", "save.at_start=true")
    done = start(config(*changes, run=tmp_path / "a/run"))
    assert (done.status, done.step, done.exit_code) == ("stopped-early", 8, 0)
    assert done.why == "val_loss has not improved in 3 evaluations, best at step 2"
    assert events(tmp_path / "a/run")[-1]["event"] == "early-stop"
    lines = (tmp_path / "a/run/metrics.jsonl").read_bytes()
    killed = start(config(*changes, run=tmp_path / "b/run"))
    killed_after(tmp_path / "b/run", step)
    again = resume(str(tmp_path / "b/run"))
    assert (again.status, again.step, again.why) == (killed.status, killed.step, killed.why)
    assert last(tmp_path / "a") == last(tmp_path / "b")
    assert (tmp_path / "b/run/metrics.jsonl").read_bytes() == lines


def test_more_patience_goes_on_as_if_it_had_always_been_so(tmp_path: Path) -> None:
    assert start(config(*LEARNS_NOTHING, "stop.patience=2", run=tmp_path / "a/run")).step == 6
    assert resume(str(tmp_path / "a/run")).step == 6  # what a scheduler does that does not look
    assert resume(str(tmp_path / "a/run"), ["stop.patience=5"]).step == 12
    start(config(*LEARNS_NOTHING, "stop.patience=5", run=tmp_path / "b/run"))
    assert last(tmp_path / "a") == last(tmp_path / "b")
    assert resume(str(tmp_path / "a/run"), ["stop.patience=null"]).status == "done"
    start(config(*LEARNS_NOTHING, run=tmp_path / "c/run"))
    assert last(tmp_path / "a") == last(tmp_path / "c")


def test_what_counts_as_better(tmp_path: Path) -> None:
    made = trainer("stop.patience=2", "stop.min_delta=0.1", "eval.metric=m", "eval.mode=max", "eval.every=1")
    counts = []
    for value in (float("nan"), 0.5, 0.55, 0.61, 0.61, 0.7, float("nan")):
        made.step += 1
        remember(made, {"m": value})
        assert made.stale is not None
        counts.append((made.stale["value"], made.stale["count"], made.is_stale))
    values = (None, 0.5, 0.5, 0.61, 0.61, 0.61, 0.61)
    assert counts == list(zip(values, (1, 0, 1, 0, 1, 2, 3), (False,) * 5 + (True,) * 2, strict=True))
    assert made.best == {"metric": "m", "value": 0.7, "step": 6}


def test_saving_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 3 of the seconds of this clock, which advances one with every step; the last file is as it was."""
    now = [0.0]
    monkeypatch.setattr("ckptool.training.saving.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Hooks, "call", lambda _, method, *given: now.__setitem__(0, now[0] + (method == "after_step")))
    changes = ("save.every=8", "save.keep_last=99", "save.keep_best=0")
    start(config(*changes, "save.seconds=3", run=tmp_path / "a/run"))
    saved = [int(path.stem[5:]) for path in sorted((tmp_path / "a/run/checkpoints").glob("*.pt"))]
    assert saved == [3, 6, 8, 11, 14, 16, 19, 20]
    start(config(*changes, run=tmp_path / "b/run"))
    assert last(tmp_path / "a") == last(tmp_path / "b")


def test_the_history_has_the_time_of_each_start_and_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that was killed counts up to the last event that it noted."""
    now = [100.0]
    monkeypatch.setattr("ckptool.training.store.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Hooks, "call", lambda _, method, *given: now.__setitem__(0, now[0] + (method == "after_step")))
    start(config("train.steps=7", run=tmp_path / "run"))
    (tmp_path / "run/checkpoints/step-00000007.pt").unlink()
    resume(str(tmp_path / "run"), ["train.steps=10"])
    found = events(tmp_path / "run")
    assert all(fact["time"].endswith("+00:00") for fact in found)
    times = [(fact["event"], fact.get("seconds"), fact.get("total_seconds")) for fact in found]
    assert times == [
        ("start", 0, 0),
        ("save", 5, 5),
        ("save", 7, 7),
        ("done", 7, 7),
        ("changed", None, None),
        ("resume", 0, 7),
        ("save", 5, 12),
        ("done", 5, 12),
    ]


# The files of a run that was stopped ----------------------------------------------------------------------------------

STOPPER = """
import os, signal
class Stopper:
    def after_step(self, trainer):
        if trainer.step in STEPS and os.path.exists(DO):
            os.unlink(DO)
            os.kill(os.getpid(), signal.SIGTERM)
"""


CHANGES = (
    ("save.every=4", "eval.every=6", "save.keep_last=3"),
    ("save.every=7", "eval.every=0", "save.keep_last=2", "save.async=true"),
    ("save.every=3", "eval.every=3", "save.keep_last=2", "save.keep_every=6", "train.epochs=3", "train.steps=null"),
)


@pytest.mark.parametrize(("at", "changes"), sliced(product([1, 5, 6, 12], CHANGES), 5))
def test_a_run_that_was_stopped_ends_with_the_same_files(tmp_path: Path, at: int, changes: tuple[str, ...]) -> None:
    """All checkpoints, not the last alone, and the metrics: one that was saved only to stop leaves nothing."""
    text = STOPPER.replace("STEPS", repr([at, at + 2])).replace("DO", repr(str(tmp_path / "do")))
    (tmp_path / "own.py").write_text(text)
    found = []
    for name in ("whole", "stopped"):
        run = tmp_path / name
        made = config(*changes, "log.every=1", f"hooks=[{tmp_path / 'own.py'}:Stopper]", run=run)
        for _ in range(2 if name == "stopped" else 0):
            (tmp_path / "do").touch()
            assert start(made, resume="auto").exit_code == 143
            assert json.loads(max(run.glob("checkpoints/*.json")).read_text()).get("stop", True) is True
        assert start(made, resume="auto").status == "done"
        files = [*run.glob("checkpoints/*.pt"), run / "metrics.jsonl"]
        found.append({path.name: path.read_bytes() for path in files})
    assert found[0] == found[1]


def test_how_often_it_is_evaluated_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    ends = []
    for every in ("0", "1", "7", "epoch"):
        start(config(f"eval.every={every}", run=tmp_path / every / "run"))
        ends.append(torch.load(tmp_path / every / "run/checkpoints" / name_of(20), weights_only=True))
    for end in ends[1:]:
        assert first_difference({**end, "best": None}, ends[0]) == ""
