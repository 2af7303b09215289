"""Samples, and the order in which a run goes through them.

The samples of a step follow from the seed and the step alone: the order of an epoch is a permutation given by its
number, a step takes the next `batch` of them, a micro-step its slice, a process every `world`-th of these. So a resumed
run, on any number of processes and with any number of workers, sees the samples that it would have seen.

A stream gives samples one after the other, and not by number: every process and worker reads all of it and keeps its
own part. What takes time belongs in `collate`, which is called only for that part.
"""

from __future__ import annotations

import copy
import math
import operator
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from ckptool.bridge.user_code import call_user_code
from ckptool.commands import arg
from ckptool.errors import UsageError, counted
from ckptool.training.extensions import Choice
from ckptool.training.rng import CPU, derived, generator, seed_all
from ckptool.training.toys import blobs, digits

if TYPE_CHECKING:
    from ckptool.training.config import Data, HeldOut
    from ckptool.training.trainer import Trainer

Collate = Callable[[list[Any]], Any]
Position = dict[str, Any]
Share = tuple[list[Any], int, int]  # of a micro-batch: the samples, how many count, how many all processes have
Parts = list[tuple[Any, int, int]]  # the shares of a step, collated
_END = object()


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on the device. size: its samples.  total: those of the micro-batch in all processes together."""

    data: Any
    size: int
    total: int


def is_stream(dataset: Any) -> bool:
    """True for an `IterableDataset`, or an object that can be iterated repeatedly and has no items by number."""
    kind = type(dataset)
    repeatable = hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__") and not hasattr(kind, "__next__")
    return isinstance(dataset, IterableDataset) or repeatable


class Samples:
    """A data set divided into training and validation.

    train, train_count: the indices to train on (none for a stream), and their number.  epoch_count: the samples of an
    epoch, 0 if unknown.  val, held_out: the data set to evaluate on, and the indices in it.
    """

    def __init__(self, dataset: Any, settings: Data, seed: int) -> None:
        self.dataset, self.settings, self.seed = dataset, settings, seed
        self.collate: Collate = COLLATES.find(settings.collate)
        self.is_stream = is_stream(dataset)
        self.position: Position | None = None  # in a stream, after the last step that was yielded
        self.train: list[int] = []
        self.val: Any = dataset
        self.held_out: list[int] = []
        if self.is_stream:
            if settings.val_fraction or settings.sampler:
                what = f"data: {settings.name} is a stream, so nothing can be held out or chosen by a sampler"
                ways = (arg(set=way) for way in ("data.val.name=file.py:NAME", "data.val_fraction=0"))
                raise UsageError(what, "", "Name a validation set: {}; or none: {}".format(*ways))
            self.val, self.train_count = [], len(dataset) if hasattr(dataset, "__len__") else 0
        else:
            if hasattr(dataset, "state_dict"):
                what = f"data: {settings.name} has a state_dict, but gives samples by index"
                raise UsageError(what, "Its state would not be saved.", "Make it an IterableDataset.")
            count = len(dataset)
            shuffled = torch.randperm(count, generator=generator(seed, "split")).tolist()
            train_count = count - math.floor(count * settings.val_fraction)
            self.train, self.held_out = sorted(shuffled[:train_count]), sorted(shuffled[train_count:])
            self.train_count = train_count
        self.epoch_count = len(self._order(0)) if settings.sampler else self.train_count
        if settings.val is not None:
            self.val, self.held_out = _held_out(settings.val)

    @property
    def about(self) -> dict[str, Any]:
        """The data set's facts for models that take them: sizes, classes."""
        about = getattr(self.dataset, "about", {})
        return about if isinstance(about, dict) else {}

    @property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch; for a stream of unknown length more than any run has."""
        if self.is_stream and not self.epoch_count:
            return sys.maxsize
        batch = self.settings.batch
        return self.epoch_count // batch if self.settings.drop_last else -(-self.epoch_count // batch)

    def stream(self, trainer: Trainer) -> Generator[list[Batch]]:
        """The micro-batches of each step, from the trainer's next to the run's last. Closing it ends its workers."""
        world, micro_steps = trainer.world, trainer.config.train.accumulate
        steps, of_rank = range(trainer.step, trainer.total_steps), slice(world.rank, None, world.size)
        source: Any = Picked(self.dataset, self.collate, self.seed)
        requests: Iterable[Any] | None = self._shares(steps, micro_steps, of_rank)
        if self.is_stream:
            seed, position = derived(self.seed, "stream"), self.position or {"epoch": 0, "samples": 0}
            of_run = steps, self.settings, micro_steps, trainer.config.save.every
            source, requests = Steps(self.dataset, seed, position, of_rank, self.collate, *of_run), None
        with closing(self._loaded(source, requests, world.device)) as loader:
            for step, self.position in loader:
                yield [Batch(to_device(data, world.device), size, total) for data, size, total in step]

    def _shares(self, steps: range, micro_steps: int, of_rank: slice) -> Iterator[list[Share]]:
        """This process's shares of each of the steps: one of each micro-batch that has samples at all."""
        batch, per_epoch = self.settings.batch, self.steps_per_epoch
        ordered: Sequence[int] | None = None
        for step in steps:
            epoch, index = divmod(step, per_epoch)
            if index == 0 or ordered is None:
                ordered = self._order(epoch)
            samples = [(epoch, self.train[i]) for i in ordered[index * batch : (index + 1) * batch]]
            yield shares(samples, micro_steps, of_rank)

    def _order(self, epoch: int) -> list[int]:
        """The samples of an epoch, as indices into `train`: a permutation, or what the sampler yields."""
        name, draws = self.settings.sampler, generator(self.seed, "order", epoch)
        if name is None:
            return torch.randperm(len(self.train), generator=draws).tolist()
        is_all = len(self.train) == len(self.dataset)
        dataset: Any = self.dataset if is_all else Subset(self.dataset, self.train)

        def sampled() -> list[int]:
            """The indices from the user's sampler: a function of seed and epoch, whatever it draws from."""
            seed_all(CPU, self.seed, "sampler", epoch)
            sampler = SAMPLERS.find(name)(dataset, draws)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            return [operator.index(index) for index in sampler]

        indices: list[int] = call_user_code(sampled, "data.sampler", name)
        fits = all(0 <= index < len(dataset) for index in indices)
        if not fits or (epoch and len(indices) != self.epoch_count):
            what = f"data.sampler: {name} gave {counted(len(indices), 'place')} of {len(dataset):,} in epoch {epoch}"
            raise UsageError(what, "Indices have to be below that length, and every epoch as long as the first.")
        return indices

    def _loaded(self, dataset: Any, requests: Iterable[Any] | None, device: torch.device) -> Generator[Any]:
        """What `dataset` yields for each request, loaded by workers if there are any. Closing it ends them.

        requests: None for a stream.  Errors of the user's own data set or collate function come with their traceback.
        """
        workers = self.settings.workers
        batches: Any = iter(dataset if requests is None else map(dataset.__getitems__, requests))
        if workers:
            loader = DataLoader(
                dataset,
                **({"batch_size": None} if requests is None else {"batch_sampler": requests}),
                collate_fn=unchanged,
                num_workers=workers,
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                pin_memory=device.type == "cuda",
            )
            with signals_blocked():
                batches = iter(loader)
        try:
            while (batch := call_user_code(next, "data", self.settings.name, batches, _END)) is not _END:
                yield batch
        finally:
            if workers:
                batches._shutdown_workers()  # left to the garbage collector, it takes ten seconds

    def validation(self, device: torch.device, epoch: int = 0, on: str = "val") -> Generator[Batch]:
        """The batches to evaluate on, in order, with the randomness of an epoch. Closing it ends its workers."""
        dataset, indices = _held_out(self.settings.test) if on == "test" else (self.val, self.held_out)
        batch = self.settings.batch
        pairs = [[(epoch, i) for i in indices[begin : begin + batch]] for begin in range(0, len(indices), batch)]
        requests = [[(chunk, len(chunk), len(chunk))] for chunk in pairs]
        source = Picked(dataset, self.collate, self.seed, evaluated=True)
        with closing(self._loaded(source, requests, device)) as loader:
            for ((data, size, total),), _ in loader:
                yield Batch(to_device(data, device), size, total)


class Picked(Dataset[Any]):
    """Steps of a data set, with randomness (augmentation) that follows from epoch and index, whichever worker draws it.

    The first sample of a new epoch calls `set_epoch`: a call from outside would not reach a worker.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, *, evaluated: bool = False) -> None:
        self.dataset, self.collate, self.evaluated = dataset, collate, evaluated
        self.seed, self.epoch = derived(seed, "sample"), -1

    def __getitems__(self, shares: list[Share]) -> tuple[Parts, None]:
        """The collated micro-batches of a step, without a position: a stream has one here."""
        # In a generator a StopIteration of the user's code is an error, and not the end of the data.
        return [*((self._collated(pairs), size, total) for pairs, size, total in shares)], None

    def _collated(self, pairs: list[tuple[int, int]]) -> Any:
        """The collated samples of a micro-batch, all of one epoch."""
        epoch = pairs[0][0]
        if epoch != self.epoch:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            self.epoch = epoch
        plain = getattr(type(self.dataset), "__getitem__", None) is TensorDataset.__getitem__  # draws nothing
        columns: Any = getattr(self.dataset, "tensors", ())
        if plain and self.collate is stacked and all(isinstance(column, torch.Tensor) for column in columns):
            return list(self.dataset[[index for _, index in pairs]])  # one look-up in each column
        samples = []
        for _, index in pairs:
            seed_all(CPU, self.seed, -1 if self.evaluated else epoch, index)
            samples.append(self.dataset[index])
        return self.collate(samples)


# Streams -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Steps(IterableDataset[Any]):
    """The steps of a stream: for each, the micro-batches of this process as (data, size, total), and the position
    after it. A worker reads all and yields every n-th step.

    A stream with `state_dict` and `load_state_dict` goes on from its state at the last save, others from the beginning
    of the epoch; the samples from there to the position are read again. Randomness follows from epoch and number.
    position: where to begin.  save_every: steps from one record of the stream's state to the next.
    taken: the samples of this epoch that were read.
    """

    dataset: Any
    seed: int
    position: Position
    of_rank: slice
    collate: Collate
    steps: range
    settings: Data
    micro_steps: int
    save_every: int

    def __iter__(self) -> Iterator[tuple[Parts, Position]]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        # Hidden from streams that divide themselves among workers: each worker would get a part of its part.
        torch.utils.data._utils.worker._worker_info = None
        self.is_resumable = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        self._begin(self.position["epoch"], self.position.get("state") if self.is_resumable else None)
        while self.taken < (end := self.position["samples"]):
            if not self._next_samples(1):
                ends = f"epoch {self.epoch} ends after {counted(self.taken, 'sample')}, not {end:,}"
                raise UsageError(f"data: {ends}", "The stream has changed, so the run cannot resume at its place.")
        for step in self.steps:
            samples = self._take(self.settings.batch, self.settings.drop_last)
            if (step + 1) % self.save_every == 0 or step + 1 == self.steps.stop:
                self._mark()
            if (step - self.steps.start) % count == number:
                windows = shares(samples, self.micro_steps, self.of_rank)
                position = {"epoch": self.epoch, "samples": self.taken, **self.state}
                yield [(self.collate(share), size, total) for share, size, total in windows], position

    def _begin(self, epoch: int, state: Any = None) -> None:
        self.epoch, self.taken = epoch, 0
        seed_all(CPU, self.seed, epoch, "begin")
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._mark()
        if state is not None:  # a stream may not report the state that it loaded before it is read
            self.state, self.taken = {"state": state}, state["samples"]
            self.dataset.load_state_dict(copy.deepcopy(state["of"]))
        self.samples = iter(self.dataset)

    def _mark(self) -> None:
        """Records the stream's state, to go on from there."""
        of = copy.deepcopy(self.dataset.state_dict()) if self.is_resumable else None
        self.state = {"state": {"samples": self.taken, "of": of}} if self.is_resumable else {}

    def _next_samples(self, count: int) -> list[Any]:
        """The next samples of this epoch, at most `count`."""
        samples: list[Any] = []
        while len(samples) < count:
            seed_all(CPU, self.seed, self.epoch, self.taken)
            if (sample := next(self.samples, _END)) is _END:
                break
            self.taken += 1
            samples.append(sample)
        return samples

    def _take(self, batch: int, drop_last: bool) -> list[Any]:
        """The samples of a step, from the next epoch if this one is at its end."""
        while len(samples := self._next_samples(batch)) < batch:
            if self.taken < (batch if drop_last else 1):
                ends = f"the stream ends after {counted(self.taken, 'sample')}"
                raise UsageError(f"data: {ends}", f"It has no batch of {batch}.")
            self._begin(self.epoch + 1)  # at once: a stream that has ended may report its initial state
            if samples and not drop_last:
                break
        return samples


def shares(samples: list[Any], micro_steps: int, of_rank: slice) -> list[Share]:
    """A process's shares of a step's samples, one of each micro-batch that has any: `of_rank` of its samples.

    A process without samples takes one that does not count: all must take part in every step.
    """
    windows = [window for micro in range(micro_steps) if (window := samples[micro::micro_steps])]
    return [(share or window[:1], len(share), len(window)) for window in windows for share in [window[of_rank]]]


def unchanged(step: Any) -> Any:
    """A step as it is: the default of a `DataLoader` turns tuples into lists and arrays into tensors."""
    return step


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks signals, for good in workers that start inside: a signal to the whole process group is for the trainer,
    which still needs its workers."""
    names = ("TERM", "INT", "USR1", "USR2", "HUP")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[f"SIG{name}"] for name in names])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def to_device(data: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device, at any depth of tuples, lists and dictionaries."""
    return tree_map_only(torch.Tensor, lambda value: value.to(device, non_blocking=True), data)


# By name -------------------------------------------------------------------------------------------------------------


def stacked(samples: list[Any]) -> Any:
    """Samples of one shape, as torch's `default_collate` stacks them. Raises `UsageError` where shapes differ."""
    try:
        return default_collate(samples)
    except RuntimeError as error:
        fix = f"Name a function of your own, which pads them: {arg(set='data.collate=file.py:NAME')}"
        raise UsageError(f"data: the samples of a batch cannot be stacked: {error}", "", fix) from error


COLLATES = Choice("collate", "is called with a list of samples and gives a batch", {"default": stacked})
SAMPLERS = Choice("data.sampler", "is called with (data set, generator) in each epoch and gives indices")
DATA = Choice(
    "data",
    "is called with args and gives a Dataset or an IterableDataset",
    {"digits": digits, "blobs": blobs},
    gives=(
        "a Dataset (with a length and items) or an IterableDataset",
        lambda value: is_stream(value) or (hasattr(value, "__len__") and hasattr(value, "__getitem__")),
    ),
)


def load_data(settings: Data, seed: int) -> Samples:
    """The data that a configuration names. Raises `UsageError` for an unknown name, or arguments it does not take."""
    dataset = DATA.make(settings.name, settings.args)
    samples: Samples = call_user_code(Samples, "data", settings.name, dataset, settings, seed)
    if not samples.steps_per_epoch:
        what = f"data.batch is {settings.batch}, but there are {samples.epoch_count} samples to train on"
        raise UsageError(what, "With drop_last there would be no step.")
    return samples


def _held_out(settings: HeldOut | None) -> tuple[Any, list[int]]:
    """A data set to evaluate on, and the indices in it. Raises `UsageError` for a stream."""
    if settings is None:
        raise UsageError("there is no test set", "data.test is not set.", arg(set="data.test.name=file.py:NAME"))
    dataset = DATA.make(settings.name, settings.args)
    if is_stream(dataset):
        what = f"data: {settings.name} is a stream, but a data set for evaluation needs a length and items"
        raise UsageError(what, "", "Give a Dataset, or make a short stream a list: list(stream)")
    return dataset, list(range(len(dataset)))
