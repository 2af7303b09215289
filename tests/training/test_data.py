"""Data: the samples of a step, randomness by place, workers that survive signals, padding, the user's own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.bridge.user_code import import_user_code
from ckptool.errors import UsageError, UserCodeFailed
from ckptool.training import toys
from ckptool.training.data import default, pad, to_device
from ckptool.training.parallel import World
from tests.support.small_runs import last, run_to_end, take, toy, trainer

RANDOM = """
import random
import torch
class Noisy:
    about = {"inputs": [3], "classes": 2}
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.rand(3) + index, torch.tensor(random.randrange(2)), index
"""


@pytest.fixture
def noisy(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "noisy.py").write_text(RANDOM)
    return {"name": f"{tmp_path / 'noisy.py'}:Noisy", "batch": 8, "val_fraction": 0.1}


def seen(*changes: str, world: World | None = None, **sections: Any) -> list[list[Any]]:
    """The data of each step."""
    made = trainer(*changes, world=world, **sections)
    return [[batch.data for batch in step] for step in made.data.stream(made)]


def indices(steps: list[list[Any]]) -> list[list[int]]:
    return [sorted(i for _, _, part in step for i in part.tolist()) for step in steps]


# The samples of a step -----------------------------------------------------------------------------------------------


def test_an_epoch_takes_every_sample_once_in_an_order_of_its_own(noisy: dict[str, Any]) -> None:
    steps = indices(seen("train.steps=10", data=noisy))
    first, second = ([i for step in part for i in step] for part in (steps[:5], steps[5:]))
    made = trainer(data=noisy)
    assert sorted(first) == sorted(second) == made.data.train
    assert first != second
    assert sorted(made.data.train + made.data.held) == list(range(40))


@pytest.mark.parametrize("begin", [0, 3, 5, 7])
def test_a_run_that_goes_on_sees_what_it_would_have_seen(noisy: dict[str, Any], begin: int) -> None:
    whole = seen("train.steps=10", data=noisy)
    made = trainer("train.steps=10", data=noisy)
    made.step = begin
    rest = [[batch.data for batch in step] for step in made.data.stream(made)]
    assert str(rest) == str(whole[begin:])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_processes_divide_the_samples_of_a_step(noisy: dict[str, Any], size: int, parts: int) -> None:
    """The same samples, augmented alike, whatever the number of processes and of micro-steps; each counts once."""
    changes = ("train.steps=6", f"train.accumulate={parts}")
    alone = seen("train.steps=6", data=noisy)
    together: list[dict[int, torch.Tensor]] = [{} for _ in alone]
    for rank in range(size):
        made = trainer(*changes, data=noisy, world=World(rank=rank, size=size))
        for number, step in enumerate(made.data.stream(made)):
            assert sum(batch.total for batch in step) == len(alone[number][0][0])
            for batch in step:
                points, _, places = batch.data
                taken = {int(i): point for i, point in zip(places[: batch.size], points, strict=False)}
                assert not together[number].keys() & taken
                together[number].update(taken)
    for number, [(points, _, places)] in enumerate(alone):
        assert set(places.tolist()) == set(together[number])
        assert all(torch.equal(together[number][int(i)], point) for i, point in zip(places, points, strict=True))


def test_a_process_without_a_sample_takes_part_with_no_weight(noisy: dict[str, Any]) -> None:
    made = trainer("data.batch=35", "train.steps=2", data={**noisy, "batch": 35}, world=World(rank=1, size=2))
    assert [[(len(b.data[0]), b.size, b.total) for b in step] for step in made.data.stream(made)] == [
        [(17, 17, 35)],
        [(1, 0, 1)],
    ]


# Workers -------------------------------------------------------------------------------------------------------------


def test_workers_draw_the_same_numbers(noisy: dict[str, Any]) -> None:
    alone, helped = (seen("train.steps=7", f"data.workers={n}", data=noisy) for n in (0, 2))
    assert str(alone) == str(helped)
    assert len(alone) == 7


def test_numbers_differ_between_epochs_and_samples(noisy: dict[str, Any]) -> None:
    steps = seen("train.steps=10", data=noisy)
    drawn: dict[int, list[tuple[float, ...]]] = {}
    for step in steps:
        for points, _, places in step:
            for i, point in zip(places.tolist(), points, strict=True):
                drawn.setdefault(i, []).append(tuple((point - i).tolist()))
    assert all(len(two) == 2 and two[0] != two[1] for two in drawn.values())
    assert len({two[0] for two in drawn.values()}) == len(drawn)


def test_a_run_ends_the_same_with_workers_and_without(tmp_path: Path) -> None:
    run_to_end(tmp_path / "a")
    run_to_end(tmp_path / "b", "train.steps=7")
    run_to_end(tmp_path / "b", "data.workers=2", "train.steps=12")
    run_to_end(tmp_path / "b", "data.workers=1")
    assert last(tmp_path / "a") == last(tmp_path / "b")


def test_signals_do_not_reach_the_workers(noisy: dict[str, Any], tmp_path: Path) -> None:
    """Not even one that comes as they start: they are forked deaf."""
    text = RANDOM.replace("return torch", "import os; open(f'{FOLDER}/{os.getpid()}', 'w'); return torch")
    (tmp_path / "told.py").write_text(text.replace("{FOLDER}", str(tmp_path / "pids")))
    (tmp_path / "pids").mkdir()
    made = trainer("data.workers=2", data={**noisy, "name": f"{tmp_path / 'told.py'}:Noisy"})
    batches = made.data.stream(made)
    next(batches)
    workers = [int(name) for name in os.listdir(tmp_path / "pids")]
    assert workers
    assert os.getpid() not in workers
    for name in ("TERM", "INT", "USR1", "USR2", "HUP"):
        for pid in workers:
            os.kill(pid, signal.Signals[f"SIG{name}"])
    assert sum(1 for _ in batches) == made.total_steps - 1
    batches.close()
    ends = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not any(map(alive, workers))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_trainer_itself_still_hears_signals_when_its_workers_have_started() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        made = trainer("data.workers=1")
        batches = made.data.stream(made)
        next(batches)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
        batches.close()
    finally:
        signal.signal(signal.SIGUSR2, before)


# The user's own ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_raises_shows_its_traceback(tmp_path: Path, workers: int) -> None:
    (tmp_path / "bad.py").write_text(
        RANDOM.replace("return torch.rand(3)", "raise KeyError('no such picture')").replace("') +", "')  #")
    )
    with pytest.raises(UserCodeFailed, match=r"(?s)bad.py:Noisy raised KeyError.*no such picture"):
        take(trainer(f"data.workers={workers}", data={"name": f"{tmp_path / 'bad.py'}:Noisy"}), 1)
    assert not multiprocessing.active_children()


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("def none():\n    return iter([1])\ndef fails(n):\n    return 1 / n\n")
    with pytest.raises(UsageError, match="not a Dataset"):
        trainer(data={"name": f"{tmp_path / 'none.py'}:none"})
    with pytest.raises(UserCodeFailed, match="ZeroDivisionError"):
        trainer(data={"name": f"{tmp_path / 'none.py'}:fails", "args": {"n": 0}})
    with pytest.raises(UsageError, match=r"(?s)does not take.*It takes: n"):
        trainer(data={"name": f"{tmp_path / 'none.py'}:fails", "args": {"m": 0}})
    with pytest.raises(UsageError, match="there is no file"):
        trainer(data={"name": f"{tmp_path / 'gone.py'}:none"})


def test_a_collate_function_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\ndef own(samples):\n    return torch.stack([s[0] * 2 for s in samples]), torch.tensor([int(s[1])"
        " for s in samples])\n"
    )
    plain, own = seen(), seen(f"data.collate={tmp_path / 'own.py'}:own")
    assert all(torch.equal(a[0][0] * 2, b[0][0]) for a, b in zip(plain, own, strict=True))


def test_a_batch_larger_than_the_data_with_drop_last_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.batch is 64, but there are 48 samples"):
        trainer("data.batch=64", "data.drop_last=true")


# Collating -----------------------------------------------------------------------------------------------------------


def test_padding() -> None:
    one, two = torch.tensor([1, 2, 3]), torch.tensor([4])
    codes, labels, lengths = pad([(one, torch.tensor(0)), (two, torch.tensor(1))])
    assert codes.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert (labels.tolist(), lengths.tolist()) == ([0, 1], [3, 1])
    codes, lengths = pad([[1, 2], [3]])
    assert (codes.tolist(), lengths.tolist()) == ([[1, 2], [3, 0]], [2, 1])
    found = pad([{"codes": one, "label": 0}, {"codes": two, "label": 1}])
    assert {key: value.tolist() for key, value in found.items()} == {
        "codes": [[1, 2, 3], [4, 0, 0]],
        "label": [0, 1],
        "lengths": [3, 1],
    }


def test_sequences_that_are_not_padded_are_an_error_that_says_so() -> None:
    with pytest.raises(UsageError, match=r"(?s)cannot be stacked.*data.collate=pad"):
        default([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(UsageError, match=r"data.collate=pad"):
        seen(data={"name": toy("data.py:Sequences"), "args": {"samples": 20}})


def test_padded_sequences_train_a_recurrent_model() -> None:
    data = {"name": toy("data.py:Sequences"), "args": {"samples": 40}, "collate": "pad", "batch": 8}
    losses = take(trainer("optim.main.lr=0.05", data=data, models={"main": {"name": toy("models.py:Tagger")}}), 20)
    assert min(losses[10:]) < losses[0]


def test_to_device_keeps_the_form_of_a_batch() -> None:
    batch = {"a": (torch.ones(2), "text"), "b": [torch.zeros(1), 3]}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"][0].device.type == "meta"
    assert (moved["a"][1], moved["b"][1]) == ("text", 3)


# The toys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "blobs images linear modadd ring spirals text Sequences".split())
def test_toy_data_are_the_same_every_time(name: str) -> None:
    make = toys.blobs if name == "blobs" else import_user_code(toy(f"data.py:{name}"), "data")
    one, other = make(), make()
    torch.rand(1)
    assert str([one[i] for i in range(5)]) == str([other[i] for i in range(5)])
    if isinstance(one, toys.Arrays):
        assert str(one.batch([3, 1, 3])) == str(default([one[3], one[1], one[3]]))
