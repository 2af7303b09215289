"""What ends a run before its end (a signal, its time, an error) costs none of the steps that were done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.errors import NotFinite, UserCodeFailed
from ckptool.training.start import resume, start
from ckptool.training.store import Lines, name_of
from tests.support.small_runs import config, last, scheduled

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


TERM = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize("evaluate", [PLAIN, GREEDY], ids=["plain", "catches everything"])
@pytest.mark.parametrize("steps", [20, 13])
@pytest.mark.parametrize("every", [5, 13])
def test_a_signal_ends_an_evaluation(tmp_path: Path, every: int, steps: int, evaluate: str) -> None:
    """The batch that is being computed is the last one; the state is saved, and the evaluation is done again."""
    changes = [f"train.steps={steps}", f"eval.every={every}", "data.val_fraction=0.5", "save.every=13", "log.every=1"]
    changes += [evaluated(tmp_path, TERM, evaluate), "save.keep_last=9"]
    optim = scheduled("ReduceLROnPlateau")
    start(config(*changes, run=tmp_path / "whole" / "run", optim=optim))
    (tmp_path / "log").unlink()
    (tmp_path / "do").touch()
    done = start(config(*changes, run=tmp_path / "parts" / "run", optim=optim))
    assert (done.status, done.step, done.exit_code) == ("stopped", every, 143)
    assert batches(tmp_path) == [0, 1]
    saved = tmp_path / "parts/run/checkpoints" / name_of(every)
    assert torch.load(saved, weights_only=True)["pending"] == "evaluation"
    assert "metrics" not in (json.loads(saved.with_suffix(".json").read_text())["metrics"])
    assert resume(str(tmp_path / "parts" / "run")).status == "done"
    assert last(tmp_path / "whole") == last(tmp_path / "parts")
    one, other = ((tmp_path / name / "run" / "metrics.jsonl").read_text() for name in ("whole", "parts"))
    assert one == other


def test_an_evaluation_is_stopped_when_the_time_is_over(tmp_path: Path) -> None:
    change = evaluated(tmp_path, "__import__('time').sleep(0.5)")
    (tmp_path / "do").touch()
    done = start(config("eval.every=1", "data.val_fraction=0.5", "stop.after=0.4", change, run=tmp_path / "run"))
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
from ckptool.training.data import BUILT_IN
def data():
    made = BUILT_IN["blobs"](samples=60, inputs=4)
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


@pytest.mark.parametrize("where", ["after_step", "facts", "logged", "data", "evaluation"])
def test_an_error_between_two_steps_costs_no_step(tmp_path: Path, where: str) -> None:
    """The last whole step is saved; with the fault mended, the run ends with the same bytes."""
    changes = ["save.every=1000", "log.every=7", "eval.every=7", "data.val_fraction=0.5"]
    sections: dict[str, Any] = {}
    if where == "data":
        (tmp_path / "own.py").write_text(DATA.replace("DO", repr(str(tmp_path / "do"))))
        sections["data"] = {"name": f"{tmp_path / 'own.py'}:data", "batch": 8}
        changes.remove("data.val_fraction=0.5")
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
    assert step == 7 or (where == "data" and 5 < step < 10)
    assert f"Step {step} is saved; resume: ckptool resume {run}" in raised.value.fix
    failed = [fact for fact in Lines(f"{run}/history.jsonl").read() if fact["event"] == "failed"]
    assert [(fact["step"], "LookupError: lost" in fact["error"]) for fact in failed] == [(step, True)]
    (tmp_path / "do").unlink(missing_ok=True)
    assert resume(run).step == 20
    assert last(tmp_path / "whole") == last(tmp_path / "parts")


def test_an_error_within_a_step_saves_nothing(tmp_path: Path) -> None:
    """Weights, buffers and optimizers are half of the next step there."""
    (tmp_path / "own.py").write_text(
        "from ckptool.training.tasks import Task, Phase, classify\ncalls = []\n"
        "def task():\n    made = classify()\n    def loss(models, batch):\n        calls.append(1)\n"
        "        return made.phases[0].loss(models, batch) / (0 if len(calls) == 8 else 1)\n"
        "    return Task([Phase('main', loss)], made.evaluate)\n"
    )
    with pytest.raises(NotFinite):
        start(config(f"task={tmp_path / 'own.py'}:task", run=tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.pt")] == [name_of(5)]
