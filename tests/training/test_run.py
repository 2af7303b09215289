"""`ckptool.Run`: what it saves and restores, what it refuses by name, what it says, and how it ends.

That a loop of any shape, killed at any line, ends with the same files is in `test_run_shapes.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ckptool
from ckptool import Run
from ckptool.errors import Conflict, DiskFull, NoneValid, UsageError
from ckptool.training.store import RunFolder
from tests.support.own_loops import parts, seeded, train
from tests.support.programs import python
from tests.support.same import first_difference
from tests.support.small_runs import flip_a_bit


class Killed(Exception):
    """Stands for the end of a process."""


class Noisy(Dataset[Any]):
    """Samples that are augmented by every global generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4) + random.random() + float(numpy.random.rand()) + index


class Holder:
    """An object with a state of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Environment:
    """One that a library could have made: it has a state, and no state_dict."""

    def reset(self) -> float:
        return 0.0

    def step(self, action: float) -> float:
        return action


def noisy() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


def trained(folder: Path, steps: int, upto: int | None = None, loader: Any = None, **options: Any) -> Run:
    """A script that saves each step, and is killed after `upto`. loader: gives the batches, if they are not its own."""
    seeded()
    own = parts()
    run = Run(folder, **{"say": str, **own, **options})
    with suppress(Killed), run:
        pairs = ((step, torch.rand(4, 4)) for step in run.steps(steps))
        for step, batch in run.batches(loader, steps=steps) if loader is not None else pairs:
            run.log(step, loss=train(batch, **own))
            run.save(acc=1 / step)
            if step == upto:
                raise Killed
    return run


def end(folder: Path, steps: int) -> Any:
    return torch.load(folder / "checkpoints" / f"step-{steps:08d}.pt", weights_only=True)


def last(folder: Path, steps: int) -> bytes:
    return (folder / "checkpoints" / f"step-{steps:08d}.pt").read_bytes()


def ended_alike(script: Callable[[Path, int | None], Any], tmp_path: Path, kill: int, steps: int) -> bool:
    """Whether a script that is killed and started again leaves the checkpoint of one that ran through."""
    script(tmp_path / "whole", None)
    with pytest.raises(Killed):
        script(tmp_path / "killed", kill)
    script(tmp_path / "killed", None)
    return last(tmp_path / "whole", steps) == last(tmp_path / "killed", steps)


def kill_at(run: Run, step: int | None) -> None:
    if run.step == step:
        run.close()
        raise Killed


# What is refused ------------------------------------------------------------------------------------------------------


def of_no_module() -> dict[str, Any]:
    model, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    return {"model": model, "optimizer": torch.optim.SGD([*model.parameters(), scale], lr=0.1)}


MEANINGLESS: dict[str, dict[str, Any]] = {
    "vocabulary is a dict, which has no state_dict": {"vocabulary": {}},
    "keep_lst is an int, which has no state_dict": {"keep_lst": 2},
    "optimizer trains 1 parameter of no module that was given": of_no_module(),
    "verify is 'sha256'": {"verify": "sha256"},
    "signals is": {"signals": ("BOGUS",)},
    "seed is 'x'": {"seed": "x"},
    "stop_after is 0": {"stop_after": 0},
    "keep_every at least 0": {"keep_every": -3},
    "keep_last must be at least 1": {"keep_last": 0},
    "folder is 's3://bucket/run'": {"folder": "s3://bucket/run"},
}


@pytest.mark.parametrize("words", MEANINGLESS)
def test_what_means_nothing_or_cannot_be_saved_is_refused_by_name(tmp_path: Path, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Run(**{"folder": tmp_path / "run", **MEANINGLESS[words]})
    assert not list(tmp_path.rglob("*.pt"))


def other_groups(model: nn.Sequential) -> Any:
    return torch.optim.AdamW([{"params": model[at].parameters()} for at in (3, 1, 0)], lr=0.01)


OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "holds the state of scheduler, which this script does not give": lambda own: own.pop("scheduler"),
    "holds no state of ema": lambda own: own.update(ema=nn.Linear(1, 1)),
    "the state of model does not fit": lambda own: own.update(model=nn.Linear(4, 9)),
    "seed=None, the script has seed=3": lambda own: own.update(seed=3),
    "AdamW; the script gives Adam": lambda own: own.update(optimizer=torch.optim.Adam(own["model"].parameters())),
    "gives StepLR": lambda own: own.update(scheduler=torch.optim.lr_scheduler.StepLR(own["optimizer"], 3)),
    "saved with 0.weight as torch.float32; the script's is torch.float64": lambda own: own["model"].double(),
    "the optimizer has the groups": lambda own: own.update(optimizer=other_groups(own["model"])),
}


def test_what_is_not_what_was_saved_is_refused_by_name(tmp_path: Path) -> None:
    """Also groups of an optimizer in another order, which torch takes in silence."""
    trained(tmp_path, 1)
    for words, change in OTHERS.items():
        own = {"say": str, **parts()}
        change(own)
        with pytest.raises(Conflict, match=words):
            Run(tmp_path, **own)


@pytest.mark.parametrize("value", [numpy.float64(1), numpy.ones(2), deque([1]), {"a": b""}, frozenset([1])])
def test_a_state_that_could_not_be_read_again_is_refused_before_it_is_written(tmp_path: Path, value: Any) -> None:
    run = Run(tmp_path, say=str, model=nn.Linear(2, 1), early=Holder(value))
    with pytest.raises(UsageError, match="the state of early holds"):
        run.save()
    run["found"] = []
    with pytest.raises(UsageError, match=r"run\['best'\] holds"):
        run["best"] = value
    run["found"].append(value)
    run.objects.named["early"].value = None
    with pytest.raises(UsageError, match=r"run\['found'\] holds"):
        run.save()
    assert not list(tmp_path.rglob("*.pt"))


WRONG: dict[str, Callable[[Run], Any]] = {
    "run.epochs was called inside run.steps": lambda run: [next(iter(run.epochs(2))) for _ in run.steps(2)],
    "run.steps counts the steps of the whole run": lambda run: [list(run.steps(2)) for _ in run.epochs(2)],
    "takes neither steps nor epochs": lambda run: [list(run.batches([1], steps=2)) for _ in run.epochs(2)],
    "run.batches was called twice": lambda run: [
        list(run.batches([1])) + list(run.batches([1])) for _ in run.epochs(2)
    ],
    "the loader yielded no batch at all": lambda run: [list(run.batches([])) for _ in run.epochs(2)],
    "run.steps was called inside run.steps": lambda run: [next(iter(run.steps(2))) for _ in run.steps(2)],
    "ends with its first epoch": lambda run: run.batches(iter([1]), steps=3),
    "exactly one of steps and epochs": lambda run: run.batches([1]),
    r"run\.log was given dict as the step": lambda run: run.log({"loss": 1.0}),  # type: ignore[arg-type]
    "loss is str, which is not a number": lambda run: run.log(loss="x"),
    r"run\.save has no option evry\n(?s:.*)Did you mean every\?": lambda run: run.save(evry=True),
    r"run\.save\(every=500": lambda run: run.due(every=3),
}


@pytest.mark.parametrize("words", WRONG)
def test_calls_that_cannot_be_meant_are_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises((UsageError, AttributeError), match=words):
        WRONG[words](Run(tmp_path, say=str, model=nn.Linear(1, 1)))


def test_a_schedule_free_optimizer_in_evaluation_mode_is_refused(tmp_path: Path) -> None:
    own = parts()
    own["optimizer"].param_groups[0]["train_mode"] = False
    with pytest.raises(UsageError, match="optimizer is in evaluation mode"):
        Run(tmp_path, say=str, **own).save()


def test_data_that_became_shorter_is_named(tmp_path: Path) -> None:
    trained(tmp_path, 9, upto=5, loader=lambda: iter(torch.ones(5, 4, 4)))
    with pytest.raises(Conflict, match="gave 3 batches of an epoch in which 4 were trained on"):
        trained(tmp_path, 9, loader=lambda: iter(torch.ones(3, 4, 4)))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(Conflict, match="which this run did not write") as caught:
        Run(tmp_path, **parts())
    assert "ckptool.Run('OTHER', …)" in str(caught.value)
    trained(tmp_path / "other", 1)
    with pytest.raises(UsageError, match=r"is a run of ckptool\.Run in"):
        ckptool.resume(tmp_path / "other")


# What is saved and restored -------------------------------------------------------------------------------------------


def test_epochs_end_where_they_end_and_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    """Also where a loader gives more than its length says."""

    class Longer:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            return (torch.full((4, 4), float(number)) for number in range(4))

    said: list[str] = []
    for expected in ([(step, (step - 1) // 4, (step - 1) % 4) for step in range(1, 9)], []):
        own = parts()
        run = Run(tmp_path, say=said.append, **own)
        seen = []
        for step, batch in run.batches(Longer(), epochs=2):
            train(batch, **own)
            seen.append((step, run.epoch, int(batch[0, 0])))
        assert (seen, run.step) == (expected, 8)
    assert said[-1] == "finished: 2 epochs of 2 are done; the loop goes on only if you ask for more"


def test_generators_that_are_given_are_restored_and_others_are_named(tmp_path: Path) -> None:
    def loop(given: bool, upto: int) -> tuple[list[float], list[str]]:
        seeded()
        model, own, said = nn.Linear(4, 1), torch.Generator().manual_seed(5), list[str]()
        model.noise, model.calls = own, 0
        model.register_buffer("passing", torch.zeros(1), persistent=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given_too = {"noise": own, "pcg": numpy.random.default_rng(3), "plain": random.Random(4)} if given else {}
        run = Run(tmp_path / str(given), model=model, optimizer=optimizer, say=said.append, **given_too)
        drawn = []
        for _ in run.steps(upto):
            train(torch.rand(2, 4, generator=own), model, optimizer)
            model.calls += 1
            model.passing += 1
            drawn += [float(torch.rand((), generator=own)), *(each.random() for each in list(given_too.values())[1:])]
            run.save()
        return drawn, said

    whole, _ = loop(True, 8)
    (tmp_path / "True").rename(tmp_path / "whole")
    assert loop(True, 5)[0] + loop(True, 8)[0] == whole
    said = loop(False, 8)[1]
    for name in ("model.noise (generator)", "model.calls (module attribute)", "model.passing (non-persistent buffer)"):
        assert [line for line in said if line.startswith(name)], (name, said)
    assert len(said) == len(set(said))


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
    "named": lambda model: torch.optim.AdamW(model.named_parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_states_of_other_shapes_and_with_names_end_with_the_same_bytes(
    tmp_path: Path, name: str
) -> None:
    """And a scaler that is disabled, which has no state."""

    def script(folder: Path, kill: int | None) -> None:
        seeded()
        model, scaler = nn.Linear(4, 2), torch.amp.GradScaler("cpu", enabled=False)
        optimizer = OPTIMIZERS[name](model)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(3, 4)).pow(2).mean()
            loss.backward()
            return loss

        with Run(folder, say=str, model=model, optimizer=optimizer, scaler=scaler) as run:
            for step in run.steps(6):
                optimizer.step(closure)
                if step == 3:
                    run.save()
                kill_at(run, kill)

    assert ended_alike(script, tmp_path, 4, 6)


def steps_of(run: Run) -> int:
    return len(list(run.steps(5)))


LOOPS: dict[str, Callable[[Run, Any], Any]] = {
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
        loader = DataLoader(torch.rand(12, 4), batch_size=4, shuffle=True)
        with Run(tmp_path, say=str, **own) as run:
            for _ in LOOPS[name](run, loader):
                train(torch.rand(4, 4), **own)
        drawn.append([float(torch.rand(1)), float(numpy.random.rand()), random.random()])
    assert drawn[0] == drawn[1]


def test_tied_weights_are_written_once_also_from_a_copy(tmp_path: Path) -> None:
    for background in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        with Run(tmp_path / str(background), say=str, save_async=background, model=model) as run:
            run.save()
    assert last(tmp_path / "True", 0) == last(tmp_path / "False", 0)
    assert len(last(tmp_path / "True", 0)) < 2 * 8 * 8 * 4 + 20_000


def test_what_is_logged_of_a_run_without_its_loop_is_kept(tmp_path: Path) -> None:
    for times in (1, 2):
        with Run(tmp_path, say=str, **parts()) as run:
            if not run.resumed:
                run.save()
            for _ in range(times):
                run.log(acc=0.5)
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == times


def test_an_evaluation_changes_nothing_however_often_it_is_done(tmp_path: Path) -> None:
    for every in (1, 3):
        seeded()
        own = parts()
        run = Run(tmp_path / str(every), say=str, **own)
        for step, batch in run.batches(noisy(), steps=9):
            train(batch, **own)
            if step % every == 0:
                with run.evaluating():
                    assert not own["model"][1].training and not torch.is_grad_enabled()
                    next(iter(noisy()))
                    torch.rand(3)
                assert own["model"][1].training
    assert first_difference(end(tmp_path / "1", 9), end(tmp_path / "3", 9)) == ""


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    said: list[str] = []
    trained(tmp_path, 4, keep_last=9)
    (tmp_path / "checkpoints/step-00000004.json").write_text("{}")
    flip_a_bit(tmp_path / "checkpoints/step-00000003.pt")
    with Run(tmp_path, say=said.append, **parts()) as run:
        assert run.step == 2
    assert "step-00000004.pt" in said[0] and "step-00000003.pt does not match its sha256" in said[1]
    for step in (1, 2):
        flip_a_bit(tmp_path / f"checkpoints/step-{step:08d}.pt")
    with pytest.raises(NoneValid):
        Run(tmp_path, say=str, **parts())


def test_retention_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    own = parts()
    run = Run(tmp_path, say=str, keep_last=1, keep_best=("acc", "max"), **own)
    for step in run.steps(6):
        train(torch.rand(4, 4), **own)
        run.save(acc={2: 0.9}.get(step, 0.1 * (step == 4)))
    run.close()
    assert sorted(path.name for path in tmp_path.rglob("*.pt")) == ["step-00000002.pt", "step-00000006.pt"]
    report = ckptool.inspect_run(tmp_path)
    assert (report.metric, report.mode, report.resumes) == ("acc", "max", 6)
    assert ckptool.prune(tmp_path, ["save.keep_best=0"]).deleted[0][0] == 2


def test_the_metrics_of_the_last_step_are_taken_and_its_function_is_called_where_the_save_is_due_alone(
    tmp_path: Path,
) -> None:
    model, called = nn.Linear(1, 1), []

    def measure() -> float:
        assert not torch.is_grad_enabled() and not model.training
        torch.rand(3)
        called.append(run.step)
        return 1.0 / run.step

    run = Run(tmp_path, model=model, say=str, keep_last=1, keep_best=("val", "max"))
    for _ in run.steps(8):
        run.save(every=3, val=measure)
    assert called == [3, 6, 8]
    assert {saved.step: saved.metrics for saved in run.folder.all()} == {3: {"val": 1 / 3}, 8: {"val": 1 / 8}}


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
    assert "`break` ended this run at step 2; it goes on only if you ask for more steps" in said


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


def test_a_loop_whose_iterator_is_held_gives_signals_back_and_is_named_on_closing(tmp_path: Path) -> None:
    said: list[str] = []
    run = Run(tmp_path, model=nn.Linear(1, 1), say=said.append)
    before, held = signal.getsignal(signal.SIGTERM), run.steps(9)
    for _ in held:
        break
    run.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert said[-1].startswith("step 1 was not saved: run.close() came before the loop had ended, or a variable still")


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
    assert steps_of(run) == 5 and last(tmp_path / "run", 5)


def test_a_child_neither_writes_nor_closes_files_of_others(tmp_path: Path) -> None:
    run = Run(tmp_path, say=str, **parts())
    assert run.folder.lock is not None
    held = run.folder.lock.fd
    if not (child := os.fork()):
        try:
            own = os.open(os.devnull, os.O_RDONLY)
            with pytest.raises(UsageError, match="the run is closed"):
                run.save()
            run.close()
            os.fstat(own)
            os._exit(0 if own == held else 3)
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


def test_the_first_save_says_what_is_in_it_and_what_was_seen_and_is_not(tmp_path: Path) -> None:
    seeded()
    own, said = parts(), list[str]()
    env, ema = Environment(), torch.optim.swa_utils.AveragedModel(own["model"])
    noise, loss = torch.Generator(), nn.MSELoss()
    wrapped, kind = nn.DataParallel(own["model"]), nn.Linear  # neither has a state of its own
    loader = DataLoader(torch.rand(8, 4), batch_size=4, shuffle=True)
    run = Run(tmp_path, say=said.append, **own)
    run["best"] = 0.5
    for _, batch in run.batches(loader, steps=2):
        train(batch, **own)
        run.save()
    assert said[0] == (
        "the checkpoint of step 1 holds model, optimizer, scheduler, run['best'], the place in the data, the random "
        "states of python, torch"
    )
    seen = said[1].removeprefix("seen in the script and not saved: ").partition(". What")[0]
    assert sorted(seen.split(", ")) == ["ema (AveragedModel)", "env (Environment)", "noise (Generator)"]
    assert loss and wrapped and kind and env and noise and ema and len(said) == 2
    again = list[str]()
    with Run(tmp_path, say=again.append, **parts()) as run:
        run.save()
    assert len(again) == 1 and again[0].startswith("resumed")


def test_a_schedule_that_was_not_given_is_named_once(tmp_path: Path) -> None:
    """But one of another library, which was, is not missed; and what a script freezes on the way is named."""
    own, said = parts(), list[str]()
    own.pop("scheduler")
    with Run(tmp_path / "run", say=said.append, **own) as run:
        run.save()
    noted = [line for line in said if "schedule" in line.lower()]
    assert len(noted) == 1 and "has a learning rate schedule, which was not given" in noted[0]
    own, said = {**parts(), "scheduler": Holder({"count": 0})}, list[str]()
    run = Run(tmp_path / "other", say=said.append, **own)
    for step in run.steps(3):
        train(torch.ones(4, 4), own["model"], own["optimizer"])
        own["model"][0].weight.requires_grad_(step < 2)
        run.save()
    assert said[1:] == ["requires_grad of model.0.weight (value) changes during training and is not saved"]


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
