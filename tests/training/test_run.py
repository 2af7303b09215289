"""`ckptool.Run`: what it saves and restores, what it refuses by name, and what it says."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import ckptool
from ckptool.errors import Conflict, DiskFull, NoneValid, UsageError
from ckptool.training.store import RunFolder
from tests.support.looped import sliced
from tests.support.own_loops import parts, seeded, train
from tests.support.programs import python
from tests.support.ranks import torchrun
from tests.support.same import first_difference
from tests.support.small_runs import flip_a_bit


class Killed(Exception):
    """Stands for the end of a process."""


class Noisy(Dataset[Any]):
    """Samples that are augmented by every global generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(4) + random.random() + float(numpy.random.rand())
        return noise + index


Make = Callable[[], Any]
LOADERS: dict[str, Make] = {
    "shuffled, drawing": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "with a generator": lambda: DataLoader(
        Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "with replacement": lambda: DataLoader(Noisy(), batch_size=2, sampler=RandomSampler(Noisy(), True, 10)),
    "workers": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork"),
    "a function": lambda: lambda: (torch.rand(4, 4) + number for number in range(5)),
    "a list": lambda: [torch.full((4, 4), float(number)) for number in range(3)],
}


def run_to(folder: Path, steps: int, loader: Make, upto: int | None = None, **options: Any) -> ckptool.Run:
    """A script of its own, that is killed in the step after `upto`."""
    seeded()
    own = parts()
    run = ckptool.Run(folder, say=str, **own, **options)
    with suppress(Killed):
        for step, batch in run.batches(loader(), steps=steps):
            if upto is not None and step > upto:
                raise Killed
            run.log(step, loss=train(batch, **own))
            run["last"] = float(step)
            if step == upto:
                run.save()
    return run


def end(folder: Path, steps: int) -> Any:
    return torch.load(folder / "checkpoints" / f"step-{steps:08d}.pt", weights_only=True)


@pytest.mark.parametrize(("seed", "name", "at"), sliced(product([None, 11], LOADERS, [1, 4, 5, 7]), 16))
def test_a_run_that_goes_on_in_the_middle_of_an_epoch_ends_the_same(
    tmp_path: Path, name: str, at: int, seed: int | None
) -> None:
    if name == "workers" and at != 7:
        pytest.skip("one place is enough for workers")
    run_to(tmp_path / "whole", 12, LOADERS[name], seed=seed)
    run_to(tmp_path / "two", 12, LOADERS[name], upto=at, seed=seed)
    run = run_to(tmp_path / "two", 12, LOADERS[name], seed=seed)
    assert run.resumed
    assert first_difference(end(tmp_path / "whole", 12), end(tmp_path / "two", 12)) == ""
    names = [tmp_path / each / "checkpoints/step-00000012.pt" for each in ("whole", "two")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_epochs_end_where_they_end_and_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    seeded()
    own = parts()
    run = ckptool.Run(tmp_path / "run", say=str, **own)
    seen = []
    for step, batch in run.batches(LOADERS["shuffled, drawing"](), epochs=2):
        train(batch, **own)
        seen.append((step, run.epoch))
    assert seen == [(step, (step - 1) // 5) for step in range(1, 11)]
    said: list[str] = []
    run = ckptool.Run(tmp_path / "run", say=said.append, **parts())
    assert list(run.batches(LOADERS["shuffled, drawing"](), epochs=2)) == []
    assert run.step == 10
    assert said[1:] == ["finished: 2 epochs of 2 are done; the loop goes on only if you ask for more"]


def test_generators_that_are_given_are_restored_and_others_are_named(tmp_path: Path) -> None:
    def loop(given: bool, upto: int) -> tuple[list[float], list[str]]:
        seeded()
        model, own = nn.Linear(4, 1), torch.Generator().manual_seed(5)
        model.noise = own
        model.register_buffer("passing", torch.zeros(1), persistent=False)
        model.calls = 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        said: list[str] = []
        given_too = {"noise": own, "pcg": numpy.random.default_rng(3), "plain": random.Random(4)} if given else {}
        run = ckptool.Run(tmp_path / str(given), model=model, optimizer=optimizer, say=said.append, **given_too)
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


def test_a_schedule_that_was_not_given_is_named(tmp_path: Path) -> None:
    own, said = parts(), list[str]()
    scheduler = own["scheduler"]  # of which one note says enough
    run = ckptool.Run(tmp_path / "run", model=own["model"], optimizer=own["optimizer"], say=said.append)
    for _ in run.steps(1):
        train(torch.rand(4, 4), **own)
    noted = [line for line in said if "schedule" in line.lower()]
    assert scheduler and len(noted) == 1 and "has a learning rate schedule, which was not given" in noted[0]


def test_an_object_that_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vocabulary is a dict, which has no state_dict"):
        ckptool.Run(tmp_path / "run", vocabulary={})
    run = ckptool.Run(tmp_path / "run", model=nn.Linear(1, 1), say=str)
    with pytest.raises(UsageError, match=r"holds numpy\.float64"):
        run["best"] = numpy.float64(1)
    run["best"] = {"a": [1, 2.5, None, ("x", torch.ones(2))]}
    assert run.get("other", 3) == 3 and "best" in run


@pytest.mark.parametrize(
    "given",
    [
        {"verify": "sha"},
        {"signals": ("BOGUS",)},
        {"seed": "x"},
        {"stop_after": 0},
        {"keep_every": -3},
        {"keep_last": 0},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_setting_that_means_nothing_is_refused_before_anything_is_made(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        ckptool.Run(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_what_was_saved_and_is_not_given_is_an_error_and_the_reverse(tmp_path: Path) -> None:
    run_to(tmp_path / "run", 2, LOADERS["a list"])
    own = parts()
    with pytest.raises(Conflict, match="holds the state of scheduler, which this script does not give"):
        ckptool.Run(tmp_path / "run", model=own["model"], optimizer=own["optimizer"], say=str)
    with pytest.raises(Conflict, match="holds no state of ema"):
        ckptool.Run(tmp_path / "run", **parts(), ema=nn.Linear(1, 1), say=str)
    other = nn.Linear(4, 9)
    with pytest.raises(Conflict, match="the state of model does not fit"):
        ckptool.Run(tmp_path / "run", **{**parts(), "model": other}, say=str)
    with pytest.raises(Conflict, match="seed=None, the script has seed=3"):
        ckptool.Run(tmp_path / "run", **parts(), seed=3, say=str)


def test_swapped_groups_of_an_optimizer_are_refused(tmp_path: Path) -> None:
    def optimizer(model: Any, order: tuple[int, int]) -> Any:
        return torch.optim.AdamW([{"params": model[number].parameters()} for number in order], lr=0.1)

    for order in ((0, 1), (1, 0)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        own = {"model": model, "optimizer": optimizer(model, order)}
        if order == (1, 0):
            with pytest.raises(Conflict, match="the optimizer has the groups"):
                ckptool.Run(tmp_path / "run", say=str, **own)
            return
        run = ckptool.Run(tmp_path / "run", say=str, **own)
        for _ in run.steps(1):
            train(torch.rand(4, 4), **own)


def test_an_option_that_the_script_changed_is_named(tmp_path: Path) -> None:
    for fused in (False, True):
        model, said = nn.Linear(4, 1), list[str]()
        own = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1 + fused, fused=fused)}
        run = ckptool.Run(tmp_path / "run", say=said.append, **own)
        for _ in run.steps(1 + fused):
            train(torch.rand(4, 4), **own)
    assert [line for line in said if "fused of group 0 is True in the script, but was False when the run began" in line]
    assert [line for line in said if "lr of group 0 is 1.1 in the script, but was 0.1" in line]


def test_a_stop_waits_for_the_update_of_a_window_of_steps(tmp_path: Path) -> None:
    """Gradients that were accumulated over several steps of the loop would be lost."""
    own = parts()
    run = ckptool.Run(tmp_path / "run", say=str, **own)
    with pytest.raises(SystemExit):
        for step in run.steps(12):
            own["model"](torch.rand(4, 4)).sum().backward()
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if step % 4 == 0:
                own["optimizer"].step()
                own["optimizer"].zero_grad()
    assert end(tmp_path / "run", 8)["step"] == 8


def test_a_schedule_free_optimizer_in_evaluation_mode_is_refused(tmp_path: Path) -> None:
    own = parts()
    own["optimizer"].param_groups[0]["train_mode"] = False
    run = ckptool.Run(tmp_path / "run", say=str, **own)
    with pytest.raises(UsageError, match="optimizer is in evaluation mode"):
        for _ in run.steps(1):
            train(torch.rand(4, 4), **own)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, None)])
def test_a_signal_saves_and_leaves_the_program(tmp_path: Path, number: int, code: int | None) -> None:
    own, before = parts(), signal.getsignal(number)
    run = ckptool.Run(tmp_path / "run", say=str, **own)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        for step in run.steps(9):
            train(torch.rand(4, 4), **own)
            if step == 3:
                os.kill(os.getpid(), number)
            assert run.stopping == (step == 3)
    assert getattr(caught.value, "code", None) == code
    assert signal.getsignal(number) is before
    assert end(tmp_path / "run", 3)["step"] == 3
    events = [json.loads(line)["event"] for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert events == ["start", "save", "stop"]


def test_a_run_that_is_started_again_to_end_where_it_was_stopped_is_saved_as_finished(tmp_path: Path) -> None:
    def sidecar(steps: int) -> dict[str, Any]:
        own = parts()
        run = ckptool.Run(tmp_path / "run", say=str, **own)
        with suppress(SystemExit):
            for step in run.steps(steps):
                train(torch.rand(4, 4), **own)
                run.save(every=3)
                if step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
        run.close()
        found: dict[str, Any] = json.loads((tmp_path / "run/checkpoints/step-00000005.json").read_text())
        return found

    stopped, finished = sidecar(9), sidecar(5)
    assert (stopped["stop"], stopped["parent"]) == (True, 3)
    assert (finished.get("stop"), finished["parent"], finished["sha256"]) == (None, 3, stopped["sha256"])


def test_what_is_logged_of_a_run_without_its_loop_is_kept(tmp_path: Path) -> None:
    def test(times: int) -> int:
        run = ckptool.Run(tmp_path / "run", say=str, **parts())
        if not run.resumed:
            run.save()
        for _ in range(times):
            run.log(acc=0.5)
        run.close()
        return len((tmp_path / "run/metrics.jsonl").read_text().splitlines())

    assert [test(1), test(2)] == [1, 2]


def test_time_that_is_over_stops_a_run_with_exit_code_0(tmp_path: Path) -> None:
    own = parts()
    run = ckptool.Run(tmp_path / "run", say=str, stop_after=1e-9, **own)
    with pytest.raises(SystemExit) as caught:
        for _ in run.steps(9):
            train(torch.rand(4, 4), **own)
    assert caught.value.code == 0
    assert run.step == 1


def test_an_evaluation_changes_nothing_however_often_it_is_done(tmp_path: Path) -> None:
    for every in (1, 3):
        seeded()
        own = parts()
        run = ckptool.Run(tmp_path / str(every), say=str, **own)
        for step, batch in run.batches(LOADERS["shuffled, drawing"](), steps=9):
            train(batch, **own)
            if step % every == 0:
                with run.evaluating():
                    assert not own["model"][1].training and not torch.is_grad_enabled()
                    next(iter(LOADERS["shuffled, drawing"]()))
                    torch.rand(3)
                assert own["model"][1].training
    assert first_difference(end(tmp_path / "1", 9), end(tmp_path / "3", 9)) == ""


def test_retention_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    own = parts()
    run = ckptool.Run(tmp_path / "run", say=str, keep_last=1, keep_best=("acc", "max"), **own)
    for step in run.steps(6):
        train(torch.rand(4, 4), **own)
        run.save(acc={2: 0.9}.get(step, 0.1 * (step == 4)))
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("*.pt"))
    assert left == ["step-00000002.pt", "step-00000006.pt"]
    run.close()
    report = ckptool.inspect_run(tmp_path / "run")
    assert (report.metric, report.mode, report.resumes) == ("acc", "max", 6)
    assert ckptool.prune(tmp_path / "run", ["save.keep_best=0"]).deleted[0][0] == 2


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    said: list[str] = []
    run_to(tmp_path / "run", 2, LOADERS["a list"])
    run_to(tmp_path / "run", 4, LOADERS["a list"])
    newest = tmp_path / "run/checkpoints/step-00000004.pt"
    flip_a_bit(newest)
    run = ckptool.Run(tmp_path / "run", say=said.append, **parts())
    assert run.step == 2
    assert "does not match its sha256" in said[0]
    flip_a_bit(tmp_path / "run/checkpoints/step-00000002.pt")
    run.close()
    with pytest.raises(NoneValid):
        ckptool.Run(tmp_path / "run", say=str, **parts())


def test_a_cell_that_is_run_again_takes_its_run_over_and_another_process_cannot(tmp_path: Path) -> None:
    run = ckptool.Run(tmp_path / "run", say=str, **parts())
    again = ckptool.Run(tmp_path / "run", say=str, **parts())
    with pytest.raises(UsageError, match="the run is closed"):
        run.save()
    script = f"import ckptool, torch; ckptool.Run({str(tmp_path / 'run')!r}, model=torch.nn.Linear(1, 1))"
    other = python(script)
    assert "is being written by another process" in other.stderr
    again.close()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("mine\n")
    with pytest.raises(Conflict, match="which this run did not write") as caught:
        ckptool.Run(tmp_path / "run", **parts())
    assert "ckptool.Run('OTHER', …)" in str(caught.value)
    with pytest.raises(UsageError, match=r"is a run of ckptool\.Run in"):
        run_to(tmp_path / "other", 1, LOADERS["a list"])
        ckptool.resume(tmp_path / "other")


def test_two_loops_at_once_and_an_iterator_are_refused(tmp_path: Path) -> None:
    run = ckptool.Run(tmp_path / "run", say=str, model=nn.Linear(1, 1))
    for _ in run.steps(1):
        with pytest.raises(UsageError, match=r"run\.steps was called inside run\.steps"):
            next(iter(run.steps(1)))
    with pytest.raises(UsageError, match="ends with its first epoch"):
        run.batches(iter([1]), steps=3)
    with pytest.raises(UsageError, match="exactly one of steps and epochs"):
        run.batches([1])


def test_data_that_became_shorter_is_named(tmp_path: Path) -> None:
    run_to(tmp_path / "run", 9, lambda: lambda: iter(torch.ones(5, 4, 4)), upto=4)
    with pytest.raises(Conflict, match="gave 3 batches of an epoch in which 4 were trained on"):
        run_to(tmp_path / "run", 9, lambda: lambda: iter(torch.ones(3, 4, 4)))


def test_the_failure_of_an_async_save_surfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = parts()
    run = ckptool.Run(tmp_path / "run", say=str, save_async=True, **own)

    def full(*args: Any) -> None:
        raise DiskFull("no space", "", "")

    with pytest.raises(DiskFull, match="no space") as caught:
        for step in run.steps(9):
            train(torch.rand(4, 4), **own)
            if step == 3:
                monkeypatch.setattr(RunFolder, "commit", full)
            run.save()
    assert run.step == 4
    assert "run the script again" in str(caught.value)


def held() -> int:
    """The bytes of all storages that tensors are alive of."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [each for each in gc.get_objects() if type(each) in plain and each.layout is torch.strided]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize("background", [False, True])
def test_saving_holds_at_most_one_copy_of_the_state(tmp_path: Path, background: bool) -> None:
    """After a few and after many saves: the model's own tensors, and in the background one copy of them more."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    run = ckptool.Run(tmp_path / "run", model=model, optimizer=optimizer, say=str, save_async=background, keep_last=1)
    sizes = []
    for step in run.steps(50):
        optimizer.zero_grad()
        model(torch.rand(4, 64)).sum().backward()
        optimizer.step()
        run.save()
        if step in (6, 7, 30, 50):
            sizes.append(held())
    state = 3 * 65 * 64 * 4
    assert max(sizes) - min(sizes) <= state * background + 30_000  # random states, too


RANKS = """
import os, sys, torch
import ckptool
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(100)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
torch.manual_seed(rank)
data = torch.utils.data.TensorDataset(torch.arange(96.0).reshape(24, 4))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler)
seed = None if sys.argv[3] == "None" else int(sys.argv[3])
run = ckptool.Run(sys.argv[1], model=ddp, optimizer=optimizer, seed=seed)
for step, (batch,) in run.batches(loader, steps=9):
    optimizer.zero_grad()
    ddp(batch).pow(2).mean().backward()
    optimizer.step()
    run.log(step, loss=step)
    if step in (4, 9):
        run.save()
    if step > int(sys.argv[2]):
        os._exit(0)
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads abort the process at times while the interpreter is taken down
"""


@pytest.mark.parametrize("seed", [None, pytest.param(5, marks=pytest.mark.soak)])
def test_every_rank_goes_on_with_its_own_random_state(tmp_path: Path, seed: int | None) -> None:
    torchrun(2, RANKS, str(tmp_path / "whole"), "9", str(seed), scratch=tmp_path)
    torchrun(2, RANKS, str(tmp_path / "two"), "6", str(seed), scratch=tmp_path)
    torchrun(2, RANKS, str(tmp_path / "two"), "9", str(seed), scratch=tmp_path)
    whole = end(tmp_path / "whole", 9)
    assert first_difference(whole, end(tmp_path / "two", 9)) == ""
    assert list(whole["model_state_dict"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert len(whole["rng_state"]["ranks"]) == 2
