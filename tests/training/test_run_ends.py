"""How a loop of `ckptool.Run` ends, which processes may write its folder, and what it notices and says, once each."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from ckptool import Run
from ckptool.errors import DiskFull, UsageError
from ckptool.training.store import RunFolder
from tests.support.own_loops import Holder, Killed, bytes_at, end, kill_at, parts, seeded, train, trained
from tests.support.programs import python


class Lazy:
    """Stands for an object that is not there yet; asking it for its class fails, and its own is of no module."""

    __module__ = None  # type: ignore[assignment]

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of a request")


class Environment:
    """One that a library could have made: it has a state, and no state_dict."""

    def reset(self) -> float:
        return 0.0

    def step(self, action: float) -> float:
        return action


def steps_of(run: Run) -> int:
    return len(list(run.steps(5)))


# How it ends ----------------------------------------------------------------------------------------------------------


def test_a_save_that_would_wait_for_ever_is_named(tmp_path: Path) -> None:
    model, said = nn.Linear(2, 1), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(tmp_path, model=model, optimizer=optimizer, say=said.append)
    for _ in run.steps(9):
        optimizer.step()  # with the gradients of the step before
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        run.save(every=2)
    assert [text for text in said if text.startswith("a save has waited since step 2: gradients are added after")]


@pytest.mark.parametrize("steps", [3, 4])
def test_gradients_that_one_loop_leaves_to_the_next_are_named(tmp_path: Path, steps: int) -> None:
    model, said = nn.Linear(2, 1), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(tmp_path, model=model, optimizer=optimizer, say=said.append)
    for length in (steps, 8):
        for step in run.steps(length):
            model(torch.ones(2)).sum().backward()
            if step % 2 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    named = [text for text in said if text.startswith("after step 3 a loop begins with gradients")]
    assert len(named) == (steps == 3)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, None)])
def test_a_signal_saves_and_leaves_the_program(tmp_path: Path, number: int, code: int | None) -> None:
    own, before = parts(), signal.getsignal(number)
    run = Run(tmp_path, say=str, **own)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        for step in run.steps(9):
            train(torch.rand(4, 4), **own)
            if step == 3:
                os.kill(os.getpid(), number)
            assert run.stopping == (step == 3)
    assert getattr(caught.value, "code", None) == code
    assert signal.getsignal(number) is before
    assert end(tmp_path, 3)["step"] == 3
    events = [json.loads(line)["event"] for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert events == ["start", "save", "stop"]


def test_a_run_that_is_started_again_to_end_where_it_was_stopped_is_saved_as_finished(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for steps in (9, 5):
        own = parts()
        with suppress(SystemExit), Run(tmp_path, say=str, **own) as run:
            for step in run.steps(steps):
                train(torch.rand(4, 4), **own)
                run.save(every=3)
                if step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
        found.append(json.loads((tmp_path / "checkpoints/step-00000005.json").read_text()))
    stopped, finished = found
    assert (stopped["stop"], stopped["parent"]) == (True, 3)
    assert (finished.get("stop"), finished["parent"], finished["sha256"]) == (None, 3, stopped["sha256"])


def test_a_run_that_is_collected_while_an_optimizer_steps_breaks_no_step(tmp_path: Path) -> None:
    """torch calls its hooks in a loop over them, in which the collector may run."""
    run = Run(tmp_path, say=str, **parts())
    run.itself = run  # type: ignore[attr-defined]
    collected = weakref.ref(run)
    del run
    handles = [register_optimizer_step_post_hook(hook) for hook in (lambda *_: gc.collect() and None, lambda *_: None)]
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert collected() is None


def test_time_that_is_over_stops_a_run_with_exit_code_0(tmp_path: Path) -> None:
    run = Run(tmp_path, say=str, stop_after=1e-9, **parts())
    with pytest.raises(SystemExit) as caught:
        steps_of(run)
    assert (caught.value.code, run.step) == (0, 1)


def test_a_run_that_break_ended_goes_on_where_more_is_asked_for(tmp_path: Path) -> None:
    said: list[str] = []
    for upto, expected in ((6, [1, 2]), (6, []), (8, [3, 4, 5, 6, 7, 8])):
        seen = []
        with Run(tmp_path, say=said.append, **parts()) as run:
            for step in run.steps(upto):
                seen.append(step)
                if step == 2:
                    break
        assert seen == expected
    assert "`break` ended this run at step 2; it trains on only if you ask for more steps" in said


def test_an_exception_ends_no_run_and_saves_no_half_of_a_step(tmp_path: Path) -> None:
    trained(tmp_path, 5, upto=3)
    with Run(tmp_path, say=str, **parts()) as run:
        assert list(run.steps(5)) == [3, 4, 5]


def test_what_fails_in_the_save_at_break_is_raised_on_closing(tmp_path: Path) -> None:
    said: list[str] = []
    run = Run(tmp_path, model=nn.Linear(1, 1), say=said.append)
    for _ in run.steps(9):
        run.save(val=lambda: int("no number"))
        break
    assert [text for text in said if text.startswith("step 1, where `break` left the loop, was not saved: invalid")]
    with pytest.raises(ValueError, match="no number"):
        run.close()


def test_a_loop_whose_iterator_is_held_gives_signals_back_and_is_named_on_closing(tmp_path: Path) -> None:
    said: list[str] = []
    run = Run(tmp_path, model=nn.Linear(1, 1), say=said.append)
    before, held = signal.getsignal(signal.SIGTERM), run.steps(9)
    for _ in held:
        break
    run.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert said[-1].startswith("step 1 was not saved: the run was closed, or the program ended, before the loop; or a")


def test_a_loop_whose_iterator_is_held_is_named_at_the_end_of_the_program(tmp_path: Path) -> None:
    text = f"import ckptool\nrun = ckptool.Run({str(tmp_path)!r})\nheld = run.steps(9)\nfor _ in held: break"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert ended.stderr.startswith("ckptool: step 1 was not saved: the run was closed, or the program ended, before")


@pytest.mark.parametrize("in_loop", [True, False])
def test_the_failure_of_an_async_save_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_loop: bool) -> None:
    """At the next save; that of the last one is said."""
    said: list[str] = []
    run = Run(tmp_path, say=said.append, save_async=True, **parts())

    def full(*args: Any) -> None:
        raise DiskFull("no room", "", "")

    monkeypatch.setattr(RunFolder, "commit", full)
    if in_loop:
        with pytest.raises(DiskFull, match="no room") as caught:
            for _ in run.steps(9):
                run.save()
        assert run.step == 2 and "run the script again" in str(caught.value)
    else:
        run.save()
        run.close()
        assert said[-1].startswith("the last save failed: no room")


# Processes and folders ------------------------------------------------------------------------------------------------


def test_a_cell_that_is_run_again_takes_its_run_over_and_another_process_cannot(tmp_path: Path) -> None:
    run = Run(tmp_path, say=str, **parts())
    again = Run(tmp_path, say=str, **parts())
    with pytest.raises(UsageError, match="the run is closed"):
        run.save()
    other = python(f"import ckptool, torch; ckptool.Run({str(tmp_path)!r}, model=torch.nn.Linear(1, 1))")
    assert "is being written by another process" in other.stderr
    again.close()


def test_a_run_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run("run", say=str, **parts())
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert steps_of(run) == 5 and bytes_at(tmp_path / "run", 5)


def test_a_child_neither_writes_nor_closes_files_of_others(tmp_path: Path) -> None:
    run = Run(tmp_path, say=str, **parts())
    assert run.folder.lock is not None
    held = run.folder.lock.fd
    if not (child := os.fork()):
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), held)  # the number is another file's now
            with pytest.raises(UsageError, match="the run is closed"):
                run.save()
            run.close()
            os.fstat(held)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# What it notices ------------------------------------------------------------------------------------------------------


def resumed(folder: Path, script: Callable[[Run], Any]) -> list[str]:
    """What a run says that was killed in its third step and is resumed. script: comes before its loop."""
    said: list[str] = []
    for kill in (3, None):
        seeded()
        own = parts()
        said.clear()
        with suppress(Killed), Run(folder, say=said.append, **own) as run:
            script(run)
            for _ in run.steps(4):
                train(torch.rand(4, 4), **own)
                run.save()
                kill_at(run, kill)
    return said


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: numpy.random.rand(),
    "python": random.random,
    "an iterator": lambda: iter(DataLoader([1, 2])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_before_the_loop_of_a_resumed_process_is_noticed(tmp_path: Path, name: str) -> None:
    noted = resumed(tmp_path / "drawn", lambda run: DRAWS[name]())
    assert [line for line in noted if 'run["batch"] = batch' in line]
    quiet = resumed(tmp_path / "first", lambda run: run.resumed or DRAWS[name]())
    assert [line for line in quiet if "numbers were drawn" in line] == []


def test_a_value_that_is_set_again_before_the_loop_does_not_overwrite_the_saved_one(tmp_path: Path) -> None:
    found = []

    def script(run: Run) -> None:
        found.append(run.get("best"))
        run["best"] = 1.0 + len(found)

    noted = resumed(tmp_path, script)
    assert found == [None, 2.0]
    assert [line for line in noted if "run['best'] was set between" in line and "if not run.resumed" in line]
    with Run(tmp_path, say=str, **parts()) as run:
        assert run["best"] == 2.0 and "best" in run and run.get("other", 3) == 3


@pytest.mark.parametrize("kill", range(1, 7))
def test_an_option_that_is_set_before_the_loop_is_in_use_or_named(tmp_path: Path, kill: int) -> None:
    """Resumed between epochs it is used; inside an epoch the saved one is, and a note says so."""
    said, rates = list[str](), list[float]()
    for until, rate in ((kill, 0.25), (None, 0.125)):
        seeded()
        own = parts()
        optimizer = own["optimizer"]
        own["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        said.clear()
        rates.clear()
        with suppress(Killed), Run(tmp_path, say=said.append, **own) as run:
            optimizer.param_groups[0]["lr"] = rate
            for _ in run.epochs(3):
                for _ in run.batches([torch.ones(4, 4)] * 3):
                    rates.append(optimizer.param_groups[0]["lr"])
                    run.save()
                    kill_at(run, until)
    noted = [line for line in said if "an option of optimizer was set between" in line]
    assert rates == [0.25 if noted else 0.125] * (10 - kill) and bool(noted) == (kill % 3 != 1)


def test_the_first_save_says_what_is_in_it_and_what_was_seen_and_is_not(tmp_path: Path) -> None:
    seeded()
    own, _said = parts(), list[str]()
    env, ema = Environment(), torch.optim.swa_utils.AveragedModel(own["model"])
    noise, loss = torch.Generator(), nn.MSELoss()
    wrapped, kind, lazy = nn.DataParallel(own["model"]), nn.Linear, Lazy()  # none has a state of its own
    loader = DataLoader(torch.rand(8, 4), batch_size=4, shuffle=True)
    run = Run(tmp_path, say=_said.append, **own)
    run["best"] = 0.5
    for _, batch in run.batches(loader, steps=2):
        train(batch, **own)
        run.save()
    assert _said[0] == (
        "the checkpoint of step 1 holds model, optimizer, scheduler, run['best'], the place in the data, the random "
        "states of python, torch"
    )
    seen = _said[1].removeprefix("seen in the script and not saved: ").partition(". What")[0]
    assert sorted(seen.split(", ")) == ["ema (AveragedModel)", "env (Environment)", "noise (Generator)"]
    assert len(_said) == 2, _said
    assert loss and wrapped and kind and lazy and env and noise and ema
    again = list[str]()
    with Run(tmp_path, say=again.append, **parts()) as run:
        run.save()
    assert len(again) == 1 and again[0].startswith("resumed")


def test_a_schedule_that_was_not_given_is_named_once(tmp_path: Path) -> None:
    """But one of another library, which was, is not missed."""
    own, said = parts(), list[str]()
    own.pop("scheduler")
    with Run(tmp_path / "run", say=said.append, **own) as run:
        run.save()
    noted = [line for line in said if "schedule" in line.lower()]
    assert len(noted) == 1 and "has a learning rate schedule, which was not given" in noted[0]
    own, said = {**parts(), "scheduler": Holder({"count": 0})}, list[str]()
    run = Run(tmp_path / "other", say=said.append, **own)
    for _ in run.steps(3):
        train(torch.ones(4, 4), own["model"], own["optimizer"])
        run.save()
    assert len(said) == 1


def test_what_a_script_freezes_otherwise_is_named(tmp_path: Path) -> None:
    for before, after in ((False, False), (False, False), (True, False), (False, True)):
        model, said = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), list[str]()
        model[0].requires_grad_(not before)
        run = Run(tmp_path, model=model, say=said.append)
        model[1].requires_grad_(not after)
        for _ in run.steps(run.step + 1):
            assert all(each.requires_grad for each in model.parameters())
        run.close()
        named = [line for line in said if "frozen is '0.weight, 0.bias' in the script, but was 'none'" in line]
        assert len(named) == before, said
        assert len([line for line in said if line.startswith("an option of model was set between")]) == after, said


def test_an_option_that_the_script_changed_is_named(tmp_path: Path) -> None:
    for fused in (False, True):
        model, said = nn.Linear(4, 1), list[str]()
        own = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1 + fused, fused=fused)}
        run = Run(tmp_path, say=said.append, **own)
        for _ in run.steps(1 + fused):
            train(torch.rand(4, 4), **own)
    assert [line for line in said if "fused of group 0 is True in the script, but was False when the run began" in line]
    assert [line for line in said if "lr of group 0 is 1.1 in the script, but was 0.1" in line]


def test_a_metric_that_is_never_given_is_named_once(tmp_path: Path) -> None:
    said: list[str] = []
    run = Run(tmp_path, say=said.append, keep_best=("val_acc", "max"), **parts())
    run.save(val=1)
    run.save(val=2)
    assert said == [
        "run.save was given no val_acc, or NaN, so keep_best cannot rank this checkpoint",
        "the checkpoint of step 0 holds model, optimizer, scheduler",
    ]


def test_the_last_step_is_saved_once_with_all_its_metrics(tmp_path: Path) -> None:
    run = Run(tmp_path, say=str, **parts())
    for _ in run.epochs(2):
        for _ in run.batches([torch.ones(4, 4)] * 3):
            run.save(every=4, inner=lambda: 1.0)
        run.save(outer=2.0)
    saves = [fact for fact in run.folder.history.read() if fact["event"] == "save"]
    assert [fact["step"] for fact in saves] == [3, 4, 6]
    assert saves[-1]["metrics"] == {"inner": 1.0, "outer": 2.0} and run.folder.all()[-1].sidecar["parent"] == 4
    run.close()
    again = Run(tmp_path, **parts())  # killed before the script saves what it computed after the loop
    again["score"] = 1.0
    again.save()
    assert again.folder.all()[-1].metrics == {"inner": 1.0, "outer": 2.0}


def test_a_batch_that_was_fetched_before_a_save_that_failed_is_trained_on_in_the_next_loop(tmp_path: Path) -> None:
    failing = [True]

    def metric() -> float:
        assert not failing or not failing.pop()
        return 1.0

    run, seen = Run(tmp_path, model=nn.Linear(1, 1), say=str), []
    with pytest.raises(AssertionError):
        for _, batch in run.batches(list("abcdef"), epochs=1):
            seen.append(batch)
            run.save(every=3, val=metric)
    seen += [batch for _, batch in run.batches(list("abcdef"), epochs=1)]
    assert "".join(seen) == "abcdef"
