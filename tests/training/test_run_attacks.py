"""`ckptool.Run` where a loop is not as the examples are: what would end with other bytes, or lose some, in silence."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import Conflict, DiskFull, UsageError
from tests.support.own_loops import parts, seeded, train


class Killed(Exception):
    """Stands for the end of a process."""


class Holder:
    """An object with a state of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def ended(script: Callable[[Path, int | None], bytes], tmp_path: Path, kill: int) -> tuple[bytes, bytes]:
    """The last checkpoints of a script that ran through, and of one that was killed and started again."""
    whole = script(tmp_path / "whole", None)
    with pytest.raises(Killed):
        script(tmp_path / "killed", kill)
    return whole, script(tmp_path / "killed", None)


def last(folder: Path, steps: int) -> bytes:
    return (folder / "checkpoints" / f"step-{steps:08d}.pt").read_bytes()


def kill_at(run: ckptool.Run, step: int | None) -> None:
    if run.step == step:
        run.close()
        raise Killed


@pytest.mark.parametrize("kill", [4, 6, 7, 9])
@pytest.mark.parametrize("batch", [0, 1, 2])  # 0: of its own; 1: the first loop ends in the first epoch
def test_a_second_loop_goes_on_where_the_first_one_ended(tmp_path: Path, batch: int, kill: int) -> None:
    def script(folder: Path, kill: int | None) -> bytes:
        seeded()
        own = parts()
        loader = torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4), batch or 1, shuffle=True)
        with ckptool.Run(folder, say=str, **own) as run:
            for upto in (6, 12):
                pairs = ((step, torch.ones(4, 4)) for step in run.steps(upto))
                for step, rows in run.batches(loader, steps=upto) if batch else pairs:
                    train(rows.repeat(4, 1), **own)
                    if step in (3, 9):
                        run.save()
                    kill_at(run, kill)
                torch.rand(2)
        return last(folder, 12)

    whole, again = ended(script, tmp_path, kill)
    assert whole == again


def test_a_parameter_of_no_module_is_refused(tmp_path: Path) -> None:
    model, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    with pytest.raises(UsageError, match="optimizer trains 1 parameter of no module that was given"):
        ckptool.Run(tmp_path / "run", model=model, optimizer=optimizer)
    ckptool.Run(tmp_path / "held", model=model, scale=nn.ParameterList([scale]), optimizer=optimizer).close()


@pytest.mark.parametrize("value", [numpy.float64(1), numpy.ones(2), deque([1]), {"a": b""}, frozenset([1])])
def test_a_state_that_could_not_be_read_again_is_refused_before_it_is_written(tmp_path: Path, value: Any) -> None:
    model = nn.Linear(2, 1)
    run = ckptool.Run(tmp_path / "run", model=model, early=Holder(value))
    with pytest.raises(UsageError, match="the state of early holds"):
        run.save()
    run = ckptool.Run(tmp_path / "values", model=model)
    run["found"] = [1]
    run["found"].append(value)
    with pytest.raises(UsageError, match=r"run\['found'\] holds"):
        run.save()


def test_optimizers_with_states_of_other_shapes_and_with_names_end_with_the_same_bytes(tmp_path: Path) -> None:
    makes = {
        "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
        "named": lambda model: torch.optim.AdamW(model.named_parameters()),
    }
    for name, make in makes.items():

        def script(folder: Path, kill: int | None, make: Any = make) -> bytes:
            seeded()
            model = nn.Linear(4, 2)
            optimizer = make(model)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.ones(3, 4)).pow(2).mean()
                loss.backward()
                return loss

            with ckptool.Run(folder, say=str, model=model, optimizer=optimizer) as run:
                for step in run.steps(6):
                    optimizer.step(closure)
                    if step == 3:
                        run.save()
                    kill_at(run, kill)
            return last(folder, 6)

        whole, again = ended(script, tmp_path / name, 4)
        assert whole == again, name


def test_a_loader_that_gives_more_than_its_length_loses_no_batch(tmp_path: Path) -> None:
    class Longer:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            return (torch.full((4, 4), float(number)) for number in range(4))

    own = parts()
    run = ckptool.Run(tmp_path / "run", say=str, **own)
    seen = [int(batch[0, 0]) for _, batch in run.batches(Longer(), epochs=2) if train(batch, **own) is not None]
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_run_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = parts()
    run = ckptool.Run("run", say=str, **own)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for _ in run.steps(1):
        train(torch.ones(4, 4), **own)
    assert last(tmp_path / "run", 1)


def test_a_failure_of_the_last_async_save_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    run = ckptool.Run(tmp_path / "run", say=said.append, save_async=True, **parts())

    def full(*args: Any) -> None:
        raise DiskFull("no room", "")

    monkeypatch.setattr(type(run.folder), "commit", full)
    run.save()
    run.close()
    assert said[-1].startswith("the last save failed: no room")


def test_a_child_neither_writes_nor_closes_files_of_others(tmp_path: Path) -> None:
    run = ckptool.Run(tmp_path / "run", say=str, **parts())
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


def test_tied_weights_are_written_once_also_from_a_copy(tmp_path: Path) -> None:
    written = []
    for background in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        with ckptool.Run(tmp_path / str(background), say=str, save_async=background, model=model) as run:
            run.save()
        written.append(last(tmp_path / str(background), 0))
    assert written[0] == written[1]


def test_a_schedule_of_another_library_is_not_said_to_be_missing_and_what_is_frozen_is_named(tmp_path: Path) -> None:
    own = parts()
    own["scheduler"] = Holder({"count": 0})
    said: list[str] = []
    run = ckptool.Run(tmp_path / "run", say=said.append, **own)
    for step in run.steps(3):
        train(torch.ones(4, 4), own["model"], own["optimizer"])
        own["model"][0].weight.requires_grad_(step < 2)
        run.save()
    assert said[1:] == ["requires_grad of model.0.weight (value) changes during training and is not saved"]


def test_words_that_would_be_taken_for_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="verify is 'sha256'"):
        ckptool.Run(tmp_path / "run", verify="sha256", **parts())
    run = ckptool.Run(tmp_path / "run", say=str, **parts())
    with pytest.raises(UsageError, match=r"run\.log was given dict as the step"):
        run.log({"loss": 1.0})  # type: ignore[arg-type]


def test_other_classes_of_optimizers_and_schedules_and_another_dtype_are_refused(tmp_path: Path) -> None:
    with ckptool.Run(tmp_path / "run", say=str, **parts()) as run:
        run.save()
    changed: list[tuple[dict[str, Any], str]] = []
    own = parts()
    changed.append(({**own, "optimizer": torch.optim.Adam(own["model"].parameters())}, "AdamW; the script gives Adam"))
    own = parts()
    changed.append(({**own, "scheduler": torch.optim.lr_scheduler.StepLR(own["optimizer"], 3)}, "gives StepLR"))
    own = parts()
    own["model"].double()
    changed.append((own, "model was saved with 0.weight as torch.float32; the script's is torch.float64"))
    for objects, words in changed:
        with pytest.raises(Conflict, match=words):
            ckptool.Run(tmp_path / "run", say=str, **objects)


def test_an_emptied_sidecar_is_a_damaged_checkpoint_of_this_run(tmp_path: Path) -> None:
    with ckptool.Run(tmp_path / "run", say=str, **parts()) as run:
        run.save()
        run.step = 1
        run.save()
    (tmp_path / "run" / "checkpoints" / "step-00000001.json").write_text("{}")
    said: list[str] = []
    with ckptool.Run(tmp_path / "run", say=said.append, **parts()) as run:
        assert run.step == 0
    assert "step-00000001.pt" in said[0] and said[0].startswith("skipped")


def test_a_metric_that_is_never_given_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    run = ckptool.Run(tmp_path / "run", say=said.append, keep_best=("val_acc", "max"), **parts())
    run.save(val=1)
    run.save(val=2)
    assert said[:1] == ["run.save was given no val_acc, or NaN, so keep_best cannot rank this checkpoint"]
    assert len(said) == 2 and said[1] == "the checkpoint of step 0 holds model, optimizer, scheduler"


def test_a_scaler_that_is_disabled(tmp_path):
    import ckptool

    for end in (2, 4):  # the second goes on where the first ended
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        run = ckptool.Run(tmp_path / "run", model=model, optimizer=optimizer, scaler=scaler)
        steps = []
        for step in run.steps(end):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            steps.append(step)
        assert steps == [end - 1, end]
