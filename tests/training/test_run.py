"""`ckptool.Run`: what it saves and restores, what it refuses by name, what it says, and how it ends.

That a loop of any shape, killed at any line, ends with the same files is in `test_run_shapes.py`.
"""

from __future__ import annotations

import json
import random
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
from ckptool.errors import Conflict, NoneValid, UsageError
from ckptool.training import rng
from tests.support.own_loops import Holder, Killed, bytes_at, end, kill_at, parts, seeded, train, trained
from tests.support.same import first_difference
from tests.support.small_runs import flip_a_bit


class Noisy(Dataset[Any]):
    """Samples that are augmented by every global generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4) + random.random() + float(numpy.random.rand()) + index


def noisy() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


def ended_alike(script: Callable[[Path, int | None], Any], tmp_path: Path, kill: int, steps: int) -> bool:
    """Whether a script that is killed and started again leaves the checkpoint of one that ran through."""
    script(tmp_path / "whole", None)
    with pytest.raises(Killed):
        script(tmp_path / "killed", kill)
    script(tmp_path / "killed", None)
    return bytes_at(tmp_path / "whole", steps) == bytes_at(tmp_path / "killed", steps)


# What is refused ------------------------------------------------------------------------------------------------------


def of_no_module() -> dict[str, Any]:
    model, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    return {"model": model, "optimizer": torch.optim.SGD([*model.parameters(), scale], lr=0.1)}


MEANINGLESS: dict[str, dict[str, Any]] = {
    "vocabulary is a dict, which has no state_dict": {"vocabulary": {}},
    r"optimizers is a list(?s:.*)Give each of them: ckptool\.Run\(…, optimizers_1=…": {"optimizers": [of_no_module()]},
    "keep_lst is an int, which has no state_dict": {"keep_lst": 2},
    "optimizer trains 1 parameter of no module that was passed": of_no_module(),
    "verify is 'sha256'": {"verify": "sha256"},
    "signals is": {"signals": ("BOGUS",)},
    "seed is 'x'": {"seed": "x"},
    "stop_after is 0": {"stop_after": 0},
    "keep_every is -3": {"keep_every": -3},
    "keep_last is 0": {"keep_last": 0},
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
    "holds the state of scheduler, which this script does not pass": lambda own: own.pop("scheduler"),
    "holds no state of ema": lambda own: own.update(ema=nn.Linear(1, 1)),
    "the state of model does not fit": lambda own: own.update(model=nn.Linear(4, 9)),
    "seed=None, the script has seed=3": lambda own: own.update(seed=3),
    r"optimizer \(AdamW\); the script gives Adam": lambda own: own.update(
        optimizer=torch.optim.Adam(own["model"].parameters())
    ),
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


@pytest.mark.parametrize("value", [numpy.float32(1), numpy.ones(2), deque([1]), {"a": b""}, frozenset([1])])
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


def test_numbers_of_numpy_that_compute_as_those_of_python_are_saved_as_those(tmp_path: Path) -> None:
    """A rate from `numpy.linspace`, a mean of losses, a count."""
    ends = []
    for kill in (None, 2, None):
        folder = tmp_path / str(len(ends) == 0)
        seeded()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - numpy.float64(step) / 7)
        with suppress(Killed), Run(folder, say=str, model=model, optimizer=optimizer, schedule=schedule) as run:
            run["best"] = run.get("best", numpy.inf)
            for step in run.steps(4):
                (model.weight.sum() ** 2).backward()
                optimizer.step()
                schedule.step()
                run["best"] = numpy.mean([run["best"], model.weight.item()])
                run["seen"] = {numpy.int64(step): {numpy.bool_(True), step}}
                optimizer.zero_grad()
                run.save()
                if step == kill:
                    raise Killed
        ends.append(bytes_at(folder, 4) if kill is None else b"")
    assert ends[0] == ends[2]
    values = end(tmp_path / "True", 4)["values"]
    assert {type(each) for each in (values["best"], *values["seen"], *values["seen"][4])} <= {float, int, bool}


def test_of_a_value_that_lies_in_a_larger_storage_its_part_alone_is_saved(tmp_path: Path) -> None:
    """As a mean of torch's does: the rest is whatever memory held. Values that share a storage go on sharing it."""
    for background in (False, True):
        with Run(tmp_path / str(background), say=str, model=nn.Linear(2, 1), save_async=background) as run:
            rows = torch.rand(4, 3)
            run["loss"] = nn.functional.mse_loss(torch.rand(8, 1), torch.rand(8, 1))
            run["rows"], run["row"], run["learns"] = rows, rows[1], torch.ones(2, requires_grad=True)
            run.save()
        saved = end(tmp_path / str(background), 0)["values"]
        assert saved["loss"].untyped_storage().nbytes() == 4
        assert saved["row"].data_ptr() == saved["rows"][1].data_ptr()
        assert saved["loss"] == run["loss"]
        with Run(tmp_path / str(background), say=str, model=nn.Linear(2, 1)) as run:
            assert run["learns"].requires_grad and not run["rows"].requires_grad


WRONG: dict[str, Callable[[Run], Any]] = {
    "run.epochs was called inside run.steps": lambda run: [next(iter(run.epochs(2))) for _ in run.steps(2)],
    "run.steps was called inside run.epochs": lambda run: [list(run.steps(2)) for _ in run.epochs(2)],
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
    assert said[-1] == "finished: 2 epochs of 2 are done; to train on, ask for more"


class Stateless(DataLoader[Any]):
    """A loader with the methods for a state, and none, as accelerate's are."""

    use_stateful_dataloader = False

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("dl_state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AttributeError("dl_state_dict")


def test_a_loader_that_has_no_state_in_spite_of_its_methods_is_read_again(tmp_path: Path) -> None:
    def script(folder: Path, kill: int | None) -> None:
        trained(folder, 9, kill, Stateless(Noisy(), batch_size=4, shuffle=True))

    for folder, kill in (("whole", None), ("killed", 5), ("killed", None)):
        script(tmp_path / folder, kill)
    assert bytes_at(tmp_path / "whole", 9) == bytes_at(tmp_path / "killed", 9)


def test_a_sampler_is_told_each_epoch_once_wherever_it_is_in_the_loader(tmp_path: Path) -> None:
    data, told = Noisy(), list[int]()
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
    sampler.set_epoch = told.append
    inside = torch.utils.data.BatchSampler(sampler, 4, drop_last=False)
    for number, loader in enumerate((DataLoader(data, 4, sampler=sampler), DataLoader(data, batch_sampler=inside))):
        list(Run(tmp_path / str(number), say=str, model=nn.Linear(1, 1)).batches(loader, epochs=2))
    assert told == [0, 1, 0, 1]


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
    found = [line.partition(" changes during training and is not saved; ")[::2] for line in said]
    assert sorted(pair for pair in found if pair[1] and "variable" not in pair[0]) == [
        (
            "model.calls (module attribute)",
            "make it a buffer, or give the module get_extra_state() and set_extra_state()",
        ),
        ("model.noise (generator)", "give it: ckptool.Run(…, noise=model.noise)"),
        ("model.passing (non-persistent buffer)", "write: register_buffer(…, persistent=True)"),
    ]


def test_a_seed_and_a_place_decide_what_each_library_draws() -> None:
    def drawn(*place: object) -> tuple[float, ...]:
        rng.seed_all(torch.device("cpu"), 7, *place)
        return random.random(), torch.rand(()).item(), numpy.random.rand()

    assert drawn("step", 3) == drawn("step", 3)
    assert all(a != b for a, b in zip(drawn("step", 3), drawn("step", 4), strict=True))


def test_nan_is_the_same_as_nan_and_as_nothing_else() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    assert rng.same([nan], [nan.clone()]) and not rng.same(nan, one) and not rng.same(one, nan)
    sparse = one.to_sparse()
    assert not rng.same(sparse, sparse.clone())  # torch cannot tell: it is taken from the checkpoint again


def test_a_script_may_begin_a_loader_again_whose_workers_stay(tmp_path: Path) -> None:
    loader = DataLoader(torch.rand(8, 4), batch_size=4, num_workers=1, persistent_workers=True)
    run = Run(tmp_path, model=nn.Linear(4, 1), say=str)
    for _ in run.epochs(2):
        for _ in run.batches(loader):
            pass
        assert len(list(loader)) == 2


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        state = self.state["all"] or {"steps": 0, "sums": [torch.zeros(2)]}
        self.state["all"] = {"steps": state["steps"] + 1, "sums": [state["sums"][-1] + 1]}  # type: ignore[index]
        self.param_groups[0]["lr"] = 1 / (1 + float(self.state["all"]["sums"][0].sum()))  # type: ignore[index]
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
    "named": lambda model: torch.optim.AdamW(model.named_parameters()),
    "of the whole optimizer": lambda model: Counting(model.parameters(), lr=0.1),
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


def test_what_is_logged_of_a_run_without_its_loop_is_kept(tmp_path: Path) -> None:
    for times in (1, 2):
        with Run(tmp_path, say=str, **parts()) as run:
            if not run.resumed:
                run.save()
            for _ in range(times):
                run.log(acc=0.5)
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == times


def test_what_is_logged_between_epochs_is_there_once(tmp_path: Path) -> None:
    for kill in (2, 5, 8, None):  # inside of the second epoch, the third, the last; then to the end
        with suppress(Killed), Run(tmp_path, say=str, **parts()) as run:
            for epoch in run.epochs(3):
                for step, _ in run.batches(range(3)):
                    run.save()
                    if step == kill:
                        raise Killed
                run.log(val=epoch)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["val"] for line in lines] == [0, 1, 2]


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
    assert str(ckptool.inspect(tmp_path)) == str(report) == str(ckptool.inspect([tmp_path])[0])
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


def test_tied_weights_are_written_once_also_from_a_copy(tmp_path: Path) -> None:
    for background in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        with Run(tmp_path / str(background), say=str, save_async=background, model=model) as run:
            run.save()
    assert bytes_at(tmp_path / "True", 0) == bytes_at(tmp_path / "False", 0)
    assert len(bytes_at(tmp_path / "True", 0)) < 2 * 8 * 8 * 4 + 20_000
