"""Samples, and the order in which a run goes through them.

The samples of a step follow from the seed and the step alone: the order of an epoch is a permutation given by its
number, a step takes the next `batch` of them, a micro-step its slice, a process every `world`-th of these. So a resumed
run, on any number of processes and with any number of workers, sees the samples that it would have seen.
"""

from __future__ import annotations

import math
import operator
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg
from ckptool.errors import UsageError, counted
from ckptool.training.extensions import Choice
from ckptool.training.rng import CPU, derived, generator, order
from ckptool.training.rng import seed_all as seed_all
from ckptool.training.streams import Position, Reader, Share, Steps, is_stream, own_numbers, shares, unchanged
from ckptool.training.toys import Arrays, blobs, digits

if TYPE_CHECKING:
    from ckptool.training.config import Data, HeldOut
    from ckptool.training.trainer import Trainer

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on the device. size: its samples.  total: how many samples it stands for among all processes."""

    data: Any
    size: int
    total: int


class Samples:
    """A data set divided into training and validation. `epoch_count`: the samples of an epoch, 0 where nobody knows.

    val, held: the data set to evaluate on, and the places in it, none for a stream.
    """

    val: Any
    held: list[int]

    def __init__(self, dataset: Any, settings: Data, seed: int) -> None:
        self.dataset, self.settings, self.seed = dataset, settings, seed
        self.collate: Collate = COLLATES.find(settings.collate)
        self._divide()
        if settings.val is not None:
            self.val, self.held = _held_out(settings.val)

    def _divide(self) -> None:
        count = len(self.dataset)
        shuffled = torch.randperm(count, generator=generator(self.seed, "split")).tolist()
        kept = count - math.floor(count * self.settings.val_fraction)
        self.val, self.train, self.held = self.dataset, sorted(shuffled[:kept]), sorted(shuffled[kept:])
        self.train_count = len(self.train)
        self.epoch_count = len(self._order(0)) if self.settings.sampler else self.train_count

    @property
    def about(self) -> dict[str, Any]:
        """The data set's facts for models that ask: sizes, classes."""
        found = getattr(self.dataset, "about", {})
        if not isinstance(found, dict):
            name, kind = self.settings.name, type(found).__name__
            raise UsageError(
                f"data: the attribute about of {name} is {kind}, not a dictionary",
                "It gives models their sizes by name: {'inputs': [4], 'classes': 3}.",
            )
        return found

    def batches(self, batch: int, drop_last: bool) -> int:
        """The steps of an epoch."""
        return self.epoch_count // batch if drop_last else -(-self.epoch_count // batch)

    def state(self, step: int) -> dict[str, Any]:
        """The state of the data after a step, beside the seed: of a data set that has one."""
        return {"dataset": self.dataset.state_dict()} if hasattr(self.dataset, "state_dict") else {}

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
        if "dataset" in state and hasattr(self.dataset, "load_state_dict"):
            call_user_code(self.dataset.load_state_dict, "data", self.settings.name, state["dataset"])

    def stream(self, trainer: Trainer) -> Generator[list[Batch]]:
        """The micro-batches of each step, from the trainer's to the last of the run. Closing it ends its workers."""
        device = trainer.world.device
        with closing(self._loaded(*self._source(trainer), device)) as loader:
            for step, (parts, position) in enumerate(loader, trainer.step):
                self._at(step, position)
                yield [Batch(to_device(data, device), size, total) for data, size, total in parts]

    def _source(self, trainer: Trainer) -> tuple[Any, Iterable[Any] | None]:
        """The data set that gives steps, and what it is asked for; None for a stream, which is asked for nothing."""
        shared = self.settings.workers or self.settings.val_fraction or trainer.world.size > 1
        if hasattr(self.dataset, "state_dict") and shared:
            raise UsageError(
                f"data: {self.settings.name} has a state_dict, and would have several states",
                "Each worker and each process has its own, and evaluation on a part of it changes it.",
                "Take one process, data.workers=0 and data.val_fraction=0; or make it an IterableDataset.",
            )
        return _Seeded(self.dataset, self.collate, self.seed), self._shares(trainer)

    def _at(self, step: int, position: Position | None) -> None:
        """Takes note of the place of a step; here it follows from the step."""

    def _shares(self, trainer: Trainer) -> Iterator[list[Share]]:
        """This process's shares of each step that is left: one of each micro-batch that has samples at all."""
        batch, per_epoch = self.settings.batch, self.batches(self.settings.batch, self.settings.drop_last)
        ordered: Sequence[int] | None = None
        for step in range(trainer.step, trainer.total_steps):
            epoch, place = divmod(step, per_epoch)
            if place == 0 or ordered is None:
                ordered = self._order(epoch)
            samples = [(epoch, self.train[i]) for i in ordered[place * batch : (place + 1) * batch]]
            yield shares(samples, trainer.config.train.accumulate, trainer.world.shard)

    def _order(self, epoch: int) -> list[int]:
        """The samples of an epoch, as places in `train`: a permutation, or what the sampler gives."""
        name = self.settings.sampler
        if name is None:
            return order(self.seed, epoch, len(self.train))
        whole = len(self.train) == len(self.dataset)
        dataset: Any = self.dataset if whole else Subset(self.dataset, self.train)
        found: list[int] = call_user_code(_sampled, "data.sampler", name, name, dataset, self.seed, epoch)
        if wrong := [index for index in found if not 0 <= index < len(dataset)]:
            raise UsageError(
                f"data.sampler: {name} gave {wrong[0]:,}, and there are {counted(len(dataset), 'sample')}",
                "It gives places in the data set that it is called with: the part that is trained on.",
            )
        if epoch and len(found) != self.epoch_count:
            raise UsageError(
                f"data.sampler: {name} gave {counted(self.epoch_count, 'sample')} in epoch 0, "
                f"and {len(found):,} in epoch {epoch}",
                "The step of a run follows from its epoch, so all epochs have the same length.",
            )
        return found

    def _loaded(self, dataset: Any, asked: Iterable[Any] | None, device: torch.device) -> Generator[Any]:
        """What `dataset` gives for all that it is asked for, by workers where there are. Closing it ends them."""
        if not self.settings.workers:
            yield from self._guarded(iter(dataset if asked is None else map(dataset.__getitems__, asked)))
            return
        loader = DataLoader(
            dataset,
            **({"batch_size": None} if asked is None else {"batch_sampler": asked}),
            collate_fn=unchanged,
            num_workers=self.settings.workers,
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            pin_memory=device.type == "cuda",
        )
        with signals_blocked():
            batches: Any = iter(loader)
        try:
            yield from self._guarded(batches)
        finally:
            batches._shutdown_workers()  # left to the garbage collector, it takes ten seconds

    def _guarded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; what the user's own data set or collate function raises comes with its traceback."""
        end = object()
        while (batch := call_user_code(next, "data", self.settings.name, batches, end)) is not end:
            yield batch

    def validation(self, device: torch.device, epoch: int = 0, on: str = "val") -> Generator[Batch]:
        """The samples to evaluate on, in order, as they are in an epoch. Closing it ends its workers."""
        dataset, held = _held_out(self.settings.test) if on == "test" else (self.val, self.held)
        if is_stream(dataset):
            reader = Reader(dataset, derived(self.seed, on), {"epoch": epoch, "samples": 0})
            try:
                while samples := call_user_code(reader.rest, "data", self.settings.name, self.settings.batch):
                    data = call_user_code(self.collate, "data", self.settings.name, samples)
                    yield Batch(to_device(data, device), len(samples), len(samples))
            finally:
                reader.rewind()  # the next evaluation begins as this one did
            return
        batch = self.settings.batch
        places = [[(epoch, i) for i in held[begin : begin + batch]] for begin in range(0, len(held), batch)]
        asked = [[(part, len(part), len(part))] for part in places]
        seeded = _Seeded(dataset, self.collate, self.seed, evaluated=True)
        with closing(self._loaded(seeded, asked, device)) as loader:
            for ((data, size, total),), _ in loader:
                yield Batch(to_device(data, device), size, total)


class Streamed(Samples):
    """Training samples that come one after the other, and validation samples of their own."""

    def _divide(self) -> None:
        if self.settings.val_fraction or self.settings.sampler:
            raise UsageError(
                f"data: {self.settings.name} is a stream, without samples by number",
                "No part of it can be held out, and no sampler chooses from it.",
                f"Name a validation set: {arg(set='data.val.name=file.py:NAME')}; "
                f"or none: {arg(set='data.val_fraction=0')}",
            )
        self.val, self.held = [], []
        self.epoch_count = self.train_count = len(self.dataset) if hasattr(self.dataset, "__len__") else 0
        self.positions: dict[int, Position | None] = {}

    def batches(self, batch: int, drop_last: bool) -> int:
        """The steps of an epoch; more than any run has, where the stream does not know its length."""
        return super().batches(batch, drop_last) if self.epoch_count else sys.maxsize

    def state(self, step: int) -> dict[str, Any]:
        """The place in the stream after a step."""
        return {"stream": position} if (position := self.positions.get(step)) else {}

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        """Goes on from a place in the stream."""
        self.positions = {step: state.get("stream")}

    def _source(self, trainer: Trainer) -> tuple[Any, Iterable[Any] | None]:
        steps = Steps(
            partial(Reader, self.dataset, self.seed, self.positions.get(trainer.step)),
            trainer.world.shard,
            self.collate,
            range(trainer.step, trainer.total_steps),
            self.settings.batch,
            self.settings.drop_last,
            trainer.config.train.accumulate,
            trainer.config.save.every,
        )
        return steps, None

    def _at(self, step: int, position: Position | None) -> None:
        # Until the step is done, the state is that of the step before.
        self.positions = {step: self.positions.get(step), step + 1: position}


class _Seeded(Dataset[Any]):
    """Steps of a data set, with randomness (augmentation) that follows from epoch and index, whichever worker draws it.

    It is told each new epoch with the first sample of it: from outside, that would not reach a worker.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, *, evaluated: bool = False) -> None:
        self.dataset, self.collate, self.evaluated = dataset, collate, evaluated
        self.seed, self.random = derived(seed, "sample"), bool(getattr(dataset, "random", True))
        self.epoch: int | None = None

    def __getitems__(self, asked: list[Share]) -> tuple[list[tuple[Any, int, int]], None]:
        """The micro-batches of a step, collated; it has no position of its own."""
        return [(self._collated(places), size, total) for places, size, total in asked], None

    def _collated(self, places: list[tuple[int, int]]) -> Any:
        if self.collate is not default or self.random or not isinstance(self.dataset, Arrays):
            return self.collate(self._samples(places))
        self._begin(places[0][0])
        return self.dataset.batch([index for _, index in places])

    def _samples(self, places: list[tuple[int, int]]) -> list[Any]:
        """The samples of a part of a step, all of one epoch."""
        self._begin(places[0][0])
        indices = [index for _, index in places]
        if self.random:
            return [self._sample(epoch, index) for epoch, index in places]
        several = getattr(self.dataset, "__getitems__", None)
        return several(indices) if several is not None else [self.dataset[index] for index in indices]

    def _sample(self, epoch: int, index: int) -> Any:
        seed_all(CPU, self.seed, -1 if self.evaluated else epoch, index)
        return self.dataset[index]

    def _begin(self, epoch: int) -> None:
        if self.epoch is None and torch.utils.data.get_worker_info() is not None:
            own_numbers(self.dataset)
        if epoch != self.epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self.epoch = epoch


def to_device(data: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dictionaries, on the device."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    return type(data)(to_device(part, device) for part in data) if type(data) in (tuple, list) else data


def load_data(settings: Data, seed: int) -> Samples:
    """The data that a configuration names. Raises `UsageError` for an unknown name, or arguments it does not take."""
    made = DATA.make(settings.name, settings.args)
    kind = Streamed if is_stream(made) else Samples
    samples: Samples = call_user_code(kind, "data", settings.name, made, settings, seed)
    if not samples.batches(settings.batch, settings.drop_last):
        raise UsageError(
            f"data.batch is {settings.batch}, but there are {samples.epoch_count} samples to train on",
            "With drop_last there would be no step.",
            f"Make the batch smaller: {arg(set='data.batch=NUMBER')}",
        )
    return samples


def _held_out(settings: HeldOut | None) -> tuple[Any, list[int]]:
    """A data set to evaluate on, and the places in it."""
    if settings is None:
        raise UsageError("there is no test set", "data.test is not given.", arg(set="data.test.name=file.py:NAME"))
    made = DATA.make(settings.name, settings.args)
    return made, [] if is_stream(made) else list(range(len(made)))


def _sampled(name: str, dataset: Any, seed: int, epoch: int) -> list[int]:
    """The order of an epoch from a sampler of the user's own: a function of seed and epoch, whatever it draws from."""
    seed_all(CPU, seed, "sampler", epoch)
    sampler = SAMPLERS.find(name)(dataset, generator(seed, "order", epoch))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return [operator.index(index) for index in sampler]


# Collating -----------------------------------------------------------------------------------------------------------


def default(samples: list[Any]) -> Any:
    """Samples of one shape, stacked. Raises `UsageError` where their shapes differ."""
    from torch.utils.data import default_collate

    try:
        return default_collate(samples)
    except RuntimeError as error:
        raise UsageError(
            f"data: the samples of a batch cannot be stacked: {error}",
            "They have several shapes.",
            f"Pad sequences: {arg(set='data.collate=pad')}; "
            f"or name a function of your own: {arg(set='data.collate=file.py:NAME')}",
        ) from error


def pad(samples: list[Any]) -> Any:
    """Sequences, padded with zeros to the longest; their lengths are the last part (`lengths`, in a dictionary)."""
    first = samples[0]
    keys = first if isinstance(first, dict) else range(len(first)) if isinstance(first, tuple) else ()
    columns = {key: [sample[key] for sample in samples] for key in keys} or {0: samples}
    padded = {key: _padded(column) for key, column in columns.items()}
    lengths = torch.tensor([len(sequence) for sequence in next(iter(columns.values()))])
    return {**padded, "lengths": lengths} if isinstance(first, dict) else (*padded.values(), lengths)


def _padded(column: list[Any]) -> Any:
    tensors = [torch.as_tensor(part) if isinstance(part, list) else part for part in column]
    if all(isinstance(part, torch.Tensor) and part.dim() for part in tensors):
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    return default(column)


COLLATES = Choice("collate", "is called with a list of samples and gives a batch", {"default": default, "pad": pad})
SAMPLERS = Choice("data.sampler", "is called with (data set, generator) in each epoch and gives indices")
DATA = Choice(
    "data",
    "is called with args and gives a Dataset or an IterableDataset",
    {"digits": digits, "blobs": blobs},
    gives=(
        "a Dataset (with a length and items) or an IterableDataset",
        lambda made: is_stream(made) or (hasattr(made, "__len__") and hasattr(made, "__getitem__")),
    ),
)


_ALL = ("TERM", "INT", "USR1", "USR2", "HUP")


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks signals, for good in workers that are begun here: one to the whole process group is for the trainer, which
    still needs its workers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[f"SIG{name}"] for name in _ALL])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
