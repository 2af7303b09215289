"""Data beside plain data sets: streams, states, samplers, the epoch, validation sets of one's own."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.errors import CkptoolError, UsageError
from ckptool.training.parallel import World
from ckptool.training.trainer import Trainer
from tests.support.fork_server import ForkServer
from tests.support.killed_runs import ends_the_same, lab
from tests.support.looped import sliced
from tests.support.several_processes import processes
from tests.support.small_runs import last, run_to_end, trainer

OWN = """
import random
import torch
from torch.utils.data import IterableDataset, WeightedRandomSampler, get_worker_info

ABOUT = {"inputs": [3], "classes": 2}

def sample(i):
    return torch.rand(3) + i, torch.tensor(random.randrange(2)), i

class Stream(IterableDataset):
    about = ABOUT
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, 21, step):
            yield sample(100 * self.epoch + i)

class Stateful(IterableDataset):
    about = ABOUT
    at, drawn, read = 0, 0, 0
    def state_dict(self):
        return {"at": self.at, "drawn": torch.tensor(self.drawn)}
    def load_state_dict(self, state):
        self.at, self.drawn = state["at"], int(state["drawn"])
    def __iter__(self):
        while self.at < 21:
            self.drawn = (self.drawn * 31 + self.at + random.randrange(9)) % 1000
            self.at += 1
            self.read += 1
            yield sample(self.drawn)
        self.at = 0

class Sized(Stream):
    def __len__(self):
        return 21

class Points(Stateful):
    def __iter__(self):
        for points, label, _ in super().__iter__():
            yield points % 7, label

class PointItems:
    about = ABOUT
    def __init__(self, count=30):
        self.count, self.seen = count, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        return torch.rand(3) + self.epoch % 3, torch.tensor(random.randrange(2))

class PointCounts(PointItems):
    def state_dict(self):
        return {"seen": torch.tensor(self.seen)}
    def load_state_dict(self, state):
        self.seen = int(state["seen"])
    def __getitem__(self, i):
        self.seen += 1
        points, label = super().__getitem__(i)
        return points + self.seen % 5, label

def together(samples):
    return tuple(torch.as_tensor([part.tolist() if hasattr(part, "tolist") else part for part in column])
                 for column in zip(*samples))

class Empty(Stream):
    def __iter__(self):
        return iter(())

class Items:
    about = ABOUT
    epoch = None
    def __init__(self, count=40):
        self.count = count
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        points, label, i = sample(i)
        return points, label, 1000 * self.epoch + i

class Counting(Items):
    taken = 0
    def state_dict(self):
        return {"taken": self.taken}
    def load_state_dict(self, state):
        self.taken = state["taken"]
    def __getitem__(self, i):
        self.taken += 1
        return torch.rand(3), torch.tensor(0), self.taken

def weighted(dataset, generator):
    return WeightedRandomSampler([1.0 + (i % 3) for i in range(len(dataset))], 24, generator=generator)

class Curriculum:
    def __init__(self, dataset, generator):
        self.count = len(dataset)
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        places = list(range(self.count))
        random.shuffle(places)
        return iter([self.epoch, *places[:19]])

def longer(dataset, generator):
    longer.calls = getattr(longer, "calls", 0) + 1
    return range(longer.calls)

def outside(dataset, generator):
    return [len(dataset)]
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def made(own: str, name: str, *changes: str, world: World | None = None, **data: Any) -> Trainer:
    settings = {"name": f"{own}:{name}", "batch": 8, "val_fraction": 0, **data}
    return trainer("train.steps=10", "save.every=3", *changes, world=world, data=settings)


def steps_of(trainer: Trainer) -> list[list[Any]]:
    """The data of the steps that are left; of each step the parts that count."""
    return [[batch.data for batch in step if batch.size] for step in trainer.data.stream(trainer)]


def numbers(steps: list[list[Any]]) -> list[list[int]]:
    return [[i for part in step for i in part[2].tolist()] for step in steps]


STREAMS = ("Stream", "Stateful", "Sized")


# Streams -------------------------------------------------------------------------------------------------------------


def test_a_stream_is_read_from_end_to_end_and_again(own: str) -> None:
    found = numbers(steps_of(made(own, "Stream")))
    assert found[:3] == [list(range(8)), list(range(8, 16)), list(range(16, 21))]
    assert found[3:6] == [[100 + i for i in step] for step in found[:3]]
    dropped = numbers(steps_of(made(own, "Stream", "data.drop_last=true")))
    assert dropped[:3] == [*found[:2], found[3]]


@pytest.mark.parametrize("name", STREAMS)
def test_workers_read_the_same(own: str, name: str) -> None:
    """Even of a stream that would divide itself among them; batches keep their form."""
    collate = f"{own}:together"
    alone, helped = (steps_of(made(own, name, f"data.workers={n}", collate=collate)) for n in (0, 2))
    assert type(alone[0][0]) is type(helped[0][0]) is tuple
    assert len(alone) == 10
    assert str(alone) == str(helped)


@pytest.mark.parametrize(("name", "begin", "workers"), sliced(product(STREAMS, [1, 3, 4, 6, 9], [0, 2]), 12))
def test_a_stream_goes_on_where_it_was(own: str, name: str, begin: int, workers: int) -> None:
    """With any number of workers, before the state of a save and after it."""
    whole = steps_of(made(own, name))
    first = made(own, name, f"data.workers={2 - workers}")
    batches = first.data.stream(first)
    for _ in range(begin):
        next(batches)
    state = first.data.state(begin)
    batches.close()
    second = made(own, name, f"data.workers={workers}")
    second.step = begin
    second.data.load_state(begin, state)
    assert str(steps_of(second)) == str(whole[begin:])


def test_a_stream_with_a_state_is_read_from_there(own: str) -> None:
    first = made(own, "Stateful", "train.steps=200", "save.every=2")
    batches = first.data.stream(first)
    for _ in range(2):
        next(batches)
    second = made(own, "Stateful", "save.every=2")
    second.step = 2
    second.data.load_state(2, first.data.state(2))
    next(second.data.stream(second))
    assert second.data.dataset.read == 5  # the rest of the epoch, and nothing of what was before


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("size", [2, 5])
def test_processes_divide_a_stream(own: str, size: int, parts: int) -> None:
    alone = numbers(steps_of(made(own, "Stateful")))
    changes = (f"train.accumulate={parts}", f"data.workers={size % 2}")
    together: list[list[int]] = [[] for _ in alone]
    for rank in range(size):
        rank_of = made(own, "Stateful", *changes, world=World(rank=rank, size=size))
        for number, step in enumerate(rank_of.data.stream(rank_of)):
            assert sum(batch.total for batch in step) == len(alone[number])
            together[number] += [i for batch in step for i in batch.data[2][: batch.size].tolist()]
    assert [sorted(step) for step in together] == [sorted(step) for step in alone]


def test_the_length_of_a_stream_makes_its_epochs(own: str) -> None:
    assert made(own, "Sized").steps_per_epoch == 3
    sized = made(own, "Sized", "train.steps=null", "train.epochs=2")
    assert sized.total_steps == 6


def test_what_a_stream_cannot_do_is_refused(own: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)is a stream.*data\.val\.name"):
        made(own, "Stream", val_fraction=0.2)
    with pytest.raises(UsageError, match="is a stream"):
        made(own, "Stream", sampler=f"{own}:weighted")
    with pytest.raises(UsageError, match="ends after 0 samples"):
        steps_of(made(own, "Empty"))
    with pytest.raises(UsageError, match=r"ends after 21 samples(?s:.*)no batch of 32"):
        steps_of(made(own, "Stream", "data.batch=32", "data.drop_last=true"))
    shorter = made(own, "Stream")
    shorter.data.load_state(0, {"stream": {"epoch": 0, "samples": 30}})
    with pytest.raises(UsageError, match="epoch 0 ends after 21 samples, not 30"):
        steps_of(shorter)


def test_a_stream_without_a_length_has_no_epochs(own: str) -> None:
    for change in ("train.steps=null", "eval.every=epoch"):
        with pytest.raises(UsageError, match=r"has no length(?s:.*)train\.steps"):
            made(own, "Stream", change, *(["train.epochs=2"] if "null" in change else []))


# Items ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_data_are_told_the_epoch_wherever_they_are(own: str, workers: int) -> None:
    found = numbers(steps_of(made(own, "Items", f"data.workers={workers}")))
    assert [{i // 1000 for i in step} for step in found] == [{0}] * 5 + [{1}] * 5


def test_a_data_set_with_a_state_goes_on_from_it(own: str) -> None:
    whole = numbers(steps_of(made(own, "Counting")))
    first = made(own, "Counting")
    batches = first.data.stream(first)
    for _ in range(3):
        next(batches)
    second = made(own, "Counting")
    second.step = 3
    second.data.load_state(3, first.data.state(3))
    assert numbers(steps_of(second)) == whole[3:]
    assert whole[3][0] == 25


@pytest.mark.parametrize("change", ["data.workers=1", "data.val_fraction=0.1"])
def test_a_state_that_there_would_be_several_of_is_refused(own: str, change: str) -> None:
    with pytest.raises(UsageError, match=r"Counting has a state_dict"):
        steps_of(made(own, "Counting", change))
    with pytest.raises(UsageError, match=r"Counting has a state_dict"):
        steps_of(made(own, "Counting", world=World(rank=1, size=2)))


# Samplers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampler", "begin"), sliced(product(["weighted", "Curriculum"], [0, 2, 4, 7]), 4))
def test_a_sampler_is_a_function_of_seed_and_epoch(own: str, sampler: str, begin: int) -> None:
    settings = {"sampler": f"{own}:{sampler}"}
    whole = steps_of(made(own, "Items", **settings))
    torch.rand(begin)
    rest = made(own, "Items", f"data.workers={begin % 3}", **settings)
    rest.step = begin
    assert str(steps_of(rest)) == str(whole[begin:])
    assert whole[0][0][2].tolist() != whole[rest.steps_per_epoch][0][2].tolist()


def test_a_sampler_sees_what_is_trained_on_and_is_told_the_epoch(own: str) -> None:
    half = made(own, "Items", sampler=f"{own}:Curriculum", val_fraction=0.5)
    assert half.steps_per_epoch == 3
    found = numbers(steps_of(half))
    assert [found[step][0] % 1000 for step in (0, 3, 6)] == half.data.train[:3]
    assert {i % 1000 for step in found for i in step} == set(half.data.train)


def test_a_sampler_that_does_not_fit_is_refused(own: str) -> None:
    with pytest.raises(UsageError, match="gave 1 sample in epoch 0, and 3 in epoch 1"):
        steps_of(made(own, "Items", sampler=f"{own}:longer"))
    with pytest.raises(UsageError, match="gave 40, and there are 40 samples"):
        made(own, "Items", sampler=f"{own}:outside")
    with pytest.raises(CkptoolError, match="has no none"):
        made(own, "Items", sampler=f"{own}:none")


# Validation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["Items", "Sized"])
def test_a_validation_set_of_ones_own(own: str, name: str, workers: int) -> None:
    settings = {"name": f"{own}:Items", "batch": 8, "workers": workers, "val": {"name": f"{own}:{name}"}}
    found = trainer(data=settings)
    assert found.data.train_count == 40
    cpu = torch.device("cpu")
    once, again = ([batch.data for batch in found.data.validation(cpu, 3)] for _ in range(2))
    assert str(once) == str(again)
    count = 40 if name == "Items" else 21
    assert [i % 100 for part in once for i in part[2].tolist()] == list(range(count))
    assert {int(i) // 100 for part in once for i in part[2]} <= {3, 30}


def test_workers_evaluate_the_same(own: str) -> None:
    cpu = torch.device("cpu")
    found = [
        str([batch.data for batch in made(own, "Items", f"data.workers={n}", val_fraction=0.5).data.validation(cpu, 0)])
        for n in (0, 2)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("on", ["val", "test"])
def test_nothing_is_held_out_of_a_stream(own: str, on: str) -> None:
    found = made(own, "Stateful", test={"name": f"{own}:Stream"})
    assert len(list(found.data.validation(torch.device("cpu"), 0, on))) == (3 if on == "test" else 0)
    assert found.data.dataset.read == 0


def test_a_state_that_cannot_be_saved_is_named(own: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "from own import *\nclass Odd(Points):\n    def state_dict(self):\n        return {'odd': object()}\n"
    )
    data = {"name": f"{tmp_path}/odd.py:Odd", "val_fraction": 0}
    with pytest.raises(CkptoolError, match=r"the state of data .*Odd holds builtins\.object"):
        run_to_end(tmp_path, "train.steps=3", data=data)


def test_one_of_the_two_is_held_out(own: str) -> None:
    with pytest.raises(UsageError, match="give val or val_fraction, one of the two"):
        made(own, "Items", val={"name": f"{own}:Items"}, val_fraction=0.2)
    assert trainer(data={"name": "blobs", "val": {"name": "blobs"}}).config.data.val_fraction == 0


# Kills ---------------------------------------------------------------------------------------------------------------

PARTS: dict[str, dict[str, Any]] = {
    "stream": {"name": "Points", "val": "PointItems"},
    "epochs": {"name": "PointItems", "val": "Points"},
    "state": {"name": "PointCounts", "val": "PointItems", "workers": "0"},
    "sampler": {"name": "PointItems", "sampler": "weighted", "val": "PointItems"},
}


def section(own: str, part: str) -> dict[str, Any]:
    data = {key: f"{own}:{value}" for key, value in PARTS[part].items() if key in ("name", "sampler")}
    return {**data, "batch": 8, "val": {"name": f"{own}:{PARTS[part]['val']}"}}


@pytest.mark.parametrize("part", PARTS)
def test_killed_and_resumed(own: str, tmp_path: Path, server: ForkServer, part: str) -> None:
    """With 2 workers and none in turn, evaluating the average: the same bytes at the end."""
    sections: dict[str, Any] = {"data": section(own, part), "train": {"steps": 40, "ema": 0.9}}
    sections["eval"] = {"every": 4 if part == "stream" else "epoch", "ema": True}
    workers = f"data.workers={PARTS[part].get('workers', 2)}"
    proof = lab(tmp_path, server, **sections)
    ends_the_same(proof, [(7, "KILL", (workers,)), (16, "KILL in save", ()), (29, "TERM", (workers,))])


@pytest.mark.long("several runs of several processes")
@pytest.mark.parametrize("part", ["stream", pytest.param("sampler", marks=pytest.mark.soak)])
def test_two_processes_end_where_they_would_have(own: str, tmp_path: Path, part: str) -> None:
    def work(folder: str, steps: int, workers: int) -> Any:
        changes = (f"train.steps={steps}", f"data.workers={workers}", "strategy=ddp", "eval.every=3", "save.every=3")
        return lambda rank: run_to_end(tmp_path / folder, *changes, data=section(own, part))

    processes(2, work("whole", 11, 0), work("parts", 4, 2), work("parts", 7, 0), work("parts", 11, 2))
    assert last(tmp_path / "whole") == last(tmp_path / "parts")


def test_a_stream_goes_on_in_another_number_of_processes(own: str, tmp_path: Path) -> None:
    """The same samples: the state that is saved is that of a single process."""
    changes = ("models.main.args.dropout=0.0", "save.every=3", "save.keep_last=9")
    run_to_end(tmp_path / "alone", *changes, "train.steps=9", data=section(own, "stream"))
    two = ("strategy=ddp", "train.steps=5")
    processes(2, lambda rank: run_to_end(tmp_path / "two", *changes, *two, data=section(own, "stream")))
    run_to_end(tmp_path / "two", *changes, "train.steps=9", data=section(own, "stream"))
    one, other = (torch.load(sorted((tmp_path / name).glob("run/*/*.pt"))[-1]) for name in ("alone", "two"))
    assert str(one["data_state"]) == str(other["data_state"])
    torch.testing.assert_close(one["model_state_dict"], other["model_state_dict"])
