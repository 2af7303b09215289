"""What `ckptool.Run` cannot know it notices, once each, with the line to write; and no word of it where all is well."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from tests.support.own_loops import parts, seeded, train


class Killed(Exception):
    """Stands for the end of a process."""


class Environment:
    """One that a library could have made: it has a state, and no state_dict."""

    def reset(self) -> float:
        self.place = 0.0
        return self.place

    def step(self, action: float) -> float:
        self.place += action
        return self.place


def said_by(folder: Path, script: Callable[[ckptool.Run, dict[str, Any]], None]) -> list[str]:
    """What a run says that was killed in its third step and is resumed."""
    for kill in (3, None):
        seeded()
        own, said = parts(), list[str]()
        with ckptool.Run(folder, say=said.append, **own) as run:
            try:
                for step in _loop(run, own, script):
                    train(torch.rand(4, 4), **own)
                    run.save()
                    if step == kill:
                        raise Killed
            except Killed:
                continue
    return said


def _loop(run: ckptool.Run, own: dict[str, Any], script: Callable[..., None]) -> Iterator[int]:
    script(run, own)
    return run.steps(4)


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: numpy.random.rand(),
    "python": random.random,
    "an iterator": lambda: iter(torch.utils.data.DataLoader([1, 2])),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_before_the_loop_of_a_resumed_process_is_noticed(tmp_path: Path, name: str) -> None:
    noted = said_by(tmp_path / "drawn", lambda run, own: DRAWS[name]())
    assert [line for line in noted if 'run["batch"] = batch' in line]
    quiet = said_by(tmp_path / "first", lambda run, own: run.resumed or DRAWS[name]())
    assert [line for line in quiet if "numbers were drawn" in line] == []


def test_a_value_that_is_set_again_before_the_loop_does_not_overwrite_the_saved_one(tmp_path: Path) -> None:
    found = []

    def script(run: ckptool.Run, own: dict[str, Any]) -> None:
        found.append(run.get("best"))
        run["best"] = 1.0 + len(found)

    noted = said_by(tmp_path / "run", script)
    assert found == [None, 2.0]
    assert [line for line in noted if "run['best'] was set between" in line and "if not run.resumed" in line]
    with ckptool.Run(tmp_path / "run", say=str, **parts()) as run:
        assert run["best"] == 2.0


def test_the_first_save_says_what_is_in_it_and_what_was_seen_and_is_not(tmp_path: Path) -> None:
    seeded()
    own, said = parts(), list[str]()
    env, ema = Environment(), torch.optim.swa_utils.AveragedModel(own["model"])
    noise, loss = torch.Generator(), torch.nn.MSELoss()
    wrapped, kind = torch.nn.DataParallel(own["model"]), torch.nn.Linear  # neither has a state of its own
    loader = torch.utils.data.DataLoader(torch.rand(8, 4), batch_size=4, shuffle=True)
    run = ckptool.Run(tmp_path / "run", say=said.append, **own)
    run["best"] = 0.5
    for _, batch in run.batches(loader, steps=2):
        train(batch, **own)
        run.save()
    assert said[0] == (
        "the checkpoint of step 1 holds model, optimizer, scheduler, run['best'], the place in the data, the random "
        "states of python, torch"
    )
    assert said[1].startswith("seen in the script and not saved: ")
    for name in ("env (Environment)", "ema (AveragedModel)", "noise (Generator)"):
        assert name in said[1]
    assert [
        name for name in ("wrapped", "loss", "kind", "loader", "run (") if name in said[1].partition(". What")[0]
    ] == []
    assert loss and wrapped and kind and env and noise and ema and len(said) == 2
    again = list[str]()
    with ckptool.Run(tmp_path / "run", say=again.append, **parts()) as run:
        run.save()
    assert len(again) == 1 and again[0].startswith("resumed")


def test_a_run_that_break_ended_goes_on_where_more_is_asked_for(tmp_path: Path) -> None:
    def steps(upto: int, leave: int | None = None) -> tuple[list[int], list[str]]:
        seeded()
        own, said, seen = parts(), list[str](), list[int]()
        with ckptool.Run(tmp_path / "run", say=said.append, **own) as run:
            for step in run.steps(upto):
                train(torch.rand(4, 4), **own)
                seen.append(step)
                if step == leave:
                    break
        return seen, said

    assert steps(6, leave=2)[0] == [1, 2]
    seen, said = steps(6)
    assert seen == [] and "`break` ended this run at step 2; it goes on only if you ask for more steps" in said
    assert steps(8)[0] == [3, 4, 5, 6, 7, 8]


def test_an_exception_ends_no_run_and_saves_no_half_of_a_step(tmp_path: Path) -> None:
    def steps(fail: int | None) -> list[int]:
        seeded()
        own, seen = parts(), list[int]()
        with ckptool.Run(tmp_path / "run", say=str, **own) as run:
            for step in run.steps(5):
                train(torch.rand(4, 4), **own)
                run.save()
                seen.append(step)
                if step == fail:
                    raise Killed
        return seen

    with pytest.raises(Killed):
        steps(3)
    assert steps(None) == [3, 4, 5]


NESTED: dict[str, Callable[[ckptool.Run], Any]] = {
    "run.epochs was called inside run.steps": lambda run: [next(iter(run.epochs(2))) for _ in run.steps(2)],
    "run.steps counts the steps of the whole run": lambda run: [list(run.steps(2)) for _ in run.epochs(2)],
    "takes neither steps nor epochs": lambda run: [list(run.batches([1], steps=2)) for _ in run.epochs(2)],
    "run.batches was called twice": lambda run: [
        list(run.batches([1])) + list(run.batches([1])) for _ in run.epochs(2)
    ],
    "the loader yielded no batch at all": lambda run: [list(run.batches([])) for _ in run.epochs(2)],
}


@pytest.mark.parametrize("words", NESTED)
def test_loops_that_cannot_be_told_apart_are_refused(tmp_path: Path, words: str) -> None:
    run = ckptool.Run(tmp_path / "run", say=str, model=torch.nn.Linear(1, 1))
    with pytest.raises(ckptool.errors.UsageError, match=words):
        NESTED[words](run)


LOOPS: dict[str, Callable[[ckptool.Run, Any], Any]] = {
    "steps": lambda run, loader: run.steps(5),
    "batches by steps": lambda run, loader: run.batches(loader, steps=5),
    "batches by epochs": lambda run, loader: run.batches(loader, epochs=2),
    "epochs": lambda run, loader: (step for _ in run.epochs(2) for step in run.batches(loader)),
    "epochs alone": lambda run, loader: run.epochs(3),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_finished_run_that_is_started_again_leaves_the_random_states_of_its_end(tmp_path: Path, name: str) -> None:
    drawn = []
    for _ in range(2):
        seeded()
        own = parts()
        loader = torch.utils.data.DataLoader(torch.rand(12, 4), batch_size=4, shuffle=True)
        with ckptool.Run(tmp_path / "run", say=str, **own) as run:
            for _ in LOOPS[name](run, loader):
                train(torch.rand(4, 4), **own)
        drawn.append([float(torch.rand(1)), float(numpy.random.rand()), random.random()])
    assert drawn[0] == drawn[1]
