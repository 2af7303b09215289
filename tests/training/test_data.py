"""Data: the samples of a step, randomness by place, streams, samplers, workers that survive signals, padding."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from ckptool.bridge.user_code import import_user_code
from ckptool.errors import CkptoolError, UsageError
from ckptool.training import toys
from ckptool.training.data import Picked, stacked, to_device
from ckptool.training.parallel import World
from ckptool.training.trainer import Trainer
from examples.data import pad
from tests.support.looped import sliced
from tests.support.several_processes import processes
from tests.support.small_runs import last, own, run_to_end, take, toy, trainer

CPU = torch.device("cpu")


def made(name: str, *changes: str, world: World | None = None, **data: Any) -> Trainer:
    settings = {"name": own(name), "batch": 8, "val_fraction": 0, **data}
    return trainer("train.steps=10", "save.every=3", *changes, world=world, data=settings)


def steps_of(trainer: Trainer) -> list[list[Any]]:
    """The data of the steps that are left; of each step the parts that count."""
    return [[batch.data for batch in step if batch.size] for step in trainer.data.stream(trainer)]


def numbers(steps: list[list[Any]]) -> list[list[int]]:
    return [[i for part in step for i in part[2].tolist()] for step in steps]


STREAMS = ("Stream", "Stateful", "Sized")
KINDS = {name: {"name": name} for name in (*STREAMS, "Items")}
KINDS |= {name: {"name": "Items", "sampler": own(name)} for name in ("weighted", "Curriculum")}


# The samples of a step -----------------------------------------------------------------------------------------------


def test_an_epoch_takes_every_sample_once_in_an_order_of_its_own() -> None:
    found = made("Items", val_fraction=0.1)
    steps = numbers(steps_of(found))
    first, second = ([i % 1000 for step in part for i in step] for part in (steps[:5], steps[5:]))
    assert sorted(first) == sorted(second) == found.data.train
    assert first != second
    assert sorted(found.data.train + found.data.held_out) == list(range(40))
    assert [{i // 1000 for i in step} for step in steps] == [{0}] * 5 + [{1}] * 5


def test_a_stream_is_read_from_end_to_end_and_again() -> None:
    found = numbers(steps_of(made("Stream")))
    assert found[:3] == [list(range(8)), list(range(8, 16)), list(range(16, 21))]
    assert found[3:6] == [[100 + i for i in step] for step in found[:3]]
    dropped = numbers(steps_of(made("Stream", "data.drop_last=true")))
    assert dropped[:3] == [*found[:2], found[3]]
    assert made("Sized").data.steps_per_epoch == 3
    assert made("Sized", "train.steps=null", "train.epochs=2").total_steps == 6


@pytest.mark.parametrize(("kind", "begin", "workers"), sliced(product(KINDS, [1, 3, 4, 6, 9], [0, 2]), 20))
def test_a_run_that_goes_on_sees_what_it_would_have_seen(kind: str, begin: int, workers: int) -> None:
    """With any number of workers, before the state of a save and after it; batches keep their form."""
    data = {**KINDS[kind], "collate": own("together")}
    whole = steps_of(made(**data))
    assert len(whole) == 10 and type(whole[0][0]) is tuple
    first = made(**data, workers=2 - workers)
    batches = first.data.stream(first)
    for _ in range(begin):
        next(batches)
    position = first.data.position
    batches.close()
    torch.rand(begin)
    second = made(**data, workers=workers)
    second.step = begin
    second.data.position = position
    assert str(steps_of(second)) == str(whole[begin:])


def test_a_stream_with_a_state_is_read_from_there() -> None:
    first = made("Stateful", "train.steps=200", "save.every=2")
    batches = first.data.stream(first)
    for _ in range(2):
        next(batches)
    second = made("Stateful", "save.every=2")
    second.step = 2
    second.data.position = first.data.position
    next(second.data.stream(second))
    assert second.data.dataset.read == 5  # the rest of the epoch, and nothing of what was before
    shorter = made("Stream")
    shorter.data.position = {"epoch": 0, "samples": 30}
    with pytest.raises(UsageError, match="epoch 0 ends after 21 samples, not 30"):
        steps_of(shorter)


@pytest.mark.parametrize(("kind", "size", "parts"), [*product(["Items", "Stateful"], [2, 3, 5], [1, 3])])
def test_processes_divide_the_samples_of_a_step(kind: str, size: int, parts: int) -> None:
    """The same samples, augmented alike, whatever the number of processes and of micro-steps; each counts once."""
    alone = steps_of(made(kind))
    together: list[dict[int, torch.Tensor]] = [{} for _ in alone]
    changes = (f"train.accumulate={parts}", f"data.workers={size % 2}")
    for rank in range(size):
        found = made(kind, *changes, world=World(rank=rank, size=size))
        for number, step in enumerate(found.data.stream(found)):
            assert sum(batch.total for batch in step) == len(alone[number][0][0])
            for batch in step:
                points, _, places = batch.data
                taken = {int(i): point for i, point in zip(places[: batch.size], points, strict=False)}
                assert not together[number].keys() & taken
                together[number].update(taken)
    for number, [(points, _, places)] in enumerate(alone):
        assert set(places.tolist()) == set(together[number])
        assert all(torch.equal(together[number][int(i)], point) for i, point in zip(places, points, strict=True))


def test_a_process_without_a_sample_takes_part_with_no_weight() -> None:
    found = made("Items", "train.steps=2", batch=35, val_fraction=0.1, world=World(rank=1, size=2))
    assert [[(len(b.data[0]), b.size, b.total) for b in step] for step in found.data.stream(found)] == [
        [(17, 17, 35)],
        [(1, 0, 1)],
    ]


def test_numbers_differ_between_epochs_and_samples() -> None:
    drawn: dict[int, list[tuple[float, ...]]] = {}
    for step in steps_of(made("Items")):
        for points, _, places in step:
            for i, point in zip(places.tolist(), points, strict=True):
                drawn.setdefault(i % 1000, []).append(tuple((point - i % 1000).tolist()))
    assert all(len(two) == 2 and two[0] != two[1] for two in drawn.values())
    assert len({two[0] for two in drawn.values()}) == len(drawn)


def test_a_sampler_sees_what_is_trained_on_and_is_told_the_epoch() -> None:
    half = made("Items", sampler=own("Curriculum"), val_fraction=0.5)
    assert half.data.steps_per_epoch == 3
    found = numbers(steps_of(half))
    assert [found[step][0] % 1000 for step in (0, 3, 6)] == half.data.train[:3]
    assert {i % 1000 for step in found for i in step} == set(half.data.train)


# Validation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_validation_set_of_ones_own(workers: int) -> None:
    settings = {"name": own("Items"), "batch": 8, "workers": workers, "val": {"name": own("Items")}}
    found = trainer(data=settings)
    assert found.data.train_count == 40
    once, again = ([batch.data for batch in found.data.validation(CPU, 3)] for _ in range(2))
    assert str(once) == str(again)
    assert [i % 100 for part in once for i in part[2].tolist()] == list(range(40))
    assert {int(i) // 100 for part in once for i in part[2]} <= {3, 30}


def test_nothing_is_held_out_of_a_stream() -> None:
    found = made("Stateful", test={"name": own("Stream")})
    assert list(found.data.validation(CPU)) == []
    assert found.data.dataset.read == 0
    with pytest.raises(UsageError, match="Stream is a stream, but a data set for evaluation needs a length and items"):
        next(found.data.validation(CPU, on="test"))
    assert trainer(data={"name": "blobs", "val": {"name": "blobs"}}).config.data.val_fraction == 0


# Runs ----------------------------------------------------------------------------------------------------------------


def test_a_run_ends_the_same_with_workers_and_without(tmp_path: Path) -> None:
    run_to_end(tmp_path / "a")
    for changes in (["train.steps=7"], ["data.workers=2", "train.steps=12"], ["data.workers=1"]):
        run_to_end(tmp_path / "b", *changes)
    assert last(tmp_path / "a") == last(tmp_path / "b")


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(CkptoolError, match=r"the state of data .*Odd holds builtins\.object"):
        run_to_end(tmp_path, "train.steps=3", data={"name": own("Odd"), "val_fraction": 0})
    assert not multiprocessing.active_children()


POINTS = {"name": own("Points"), "batch": 8, "val": {"name": own("PointItems")}}


def test_a_stream_goes_on_in_another_number_of_processes(tmp_path: Path) -> None:
    """The same samples: the state that is saved is that of a single process."""
    changes = ("models.main.args.dropout=0.0", "save.every=3", "save.keep_last=9")
    run_to_end(tmp_path / "alone", *changes, "train.steps=9", data=POINTS)
    two = ("strategy=ddp", "train.steps=5")
    processes(2, lambda rank: run_to_end(tmp_path / "two", *changes, *two, data=POINTS))
    run_to_end(tmp_path / "two", *changes, "train.steps=9", data=POINTS)
    one, other = (torch.load(sorted((tmp_path / name).glob("run/*/*.pt"))[-1]) for name in ("alone", "two"))
    assert str(one["data_state"]) == str(other["data_state"])
    torch.testing.assert_close(one["model_state_dict"], other["model_state_dict"])


# Workers and signals -------------------------------------------------------------------------------------------------


def test_signals_do_not_reach_the_workers_and_still_reach_the_trainer() -> None:
    """Not even one that comes as they start: they are forked deaf. Closing the stream ends them."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        found = made("Items", "data.workers=2")
        batches = found.data.stream(found)
        next(batches)
        workers = [child.pid for child in multiprocessing.active_children()]
        assert len(workers) == 2
        for pid, name in product(workers, ("TERM", "INT", "USR1", "USR2", "HUP")):
            os.kill(pid or 0, signal.Signals[f"SIG{name}"])
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
        assert sum(1 for _ in batches) == found.total_steps - 1
        batches.close()
    finally:
        signal.signal(signal.SIGUSR2, before)
    ends = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < ends:
        time.sleep(0.02)
    assert not multiprocessing.active_children()


# Collating -----------------------------------------------------------------------------------------------------------


def test_padding() -> None:
    one, two = torch.tensor([1, 2, 3]), torch.tensor([4])
    codes, labels, lengths = pad([(one, torch.tensor(0)), (two, torch.tensor(1))])
    assert (codes.tolist(), labels.tolist(), lengths.tolist()) == ([[1, 2, 3], [4, 0, 0]], [0, 1], [3, 1])
    data = {"name": toy("data.py:Sequences"), "args": {"samples": 40}, "collate": toy("data.py:pad"), "batch": 8}
    losses = take(trainer("optim.main.lr=0.05", data=data, models={"main": {"name": toy("models.py:Tagger")}}), 20)
    assert min(losses[10:]) < losses[0]


def test_a_collate_function_of_ones_own() -> None:
    plain, doubled = (steps_of(trainer(f"data.collate={name}")) for name in ("default", own("doubled")))
    assert all(torch.equal(a[0][0] * 2, b[0][0]) for a, b in zip(plain, doubled, strict=True))


def test_to_device_keeps_the_form_of_a_batch() -> None:
    moved = to_device({"a": (torch.ones(2), "text"), "b": [torch.zeros(1), 3]}, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"][0].device.type == "meta"
    assert (moved["a"][1], moved["b"][1]) == ("text", 3)


@pytest.mark.parametrize("name", ["blobs", "text", "Sequences"])
def test_toy_data_are_the_same_every_time_and_in_one_piece(name: str) -> None:
    make = toys.blobs if name == "blobs" else import_user_code(toy(f"data.py:{name}"), "data")
    one, other = make(), make()
    torch.rand(1)
    assert str([one[i] for i in range(5)]) == str([other[i] for i in range(5)])
    if isinstance(one, toys.Arrays):
        found = Picked(one, stacked, 0).__getitems__([([(0, 3), (0, 1), (0, 3)], 3, 3)])
        assert str(found) == str(([(default_collate([one[3], one[1], one[3]]), 3, 3)], None))
