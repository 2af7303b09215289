"""Samples, and the order in which a run goes through them.

Which samples a step sees follows from the seed and the step alone: the order of an epoch is a permutation that its number gives, a step
takes the next `batch` of them, a micro-step its slice, a process every `world`-th of these. So a run that is resumed, on any number of
processes and with any number of workers, sees the samples that it would have seen.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from ckptool.errors import UsageError, printable
from ckptool.training import datasets
from ckptool.training.config import Data
from ckptool.training.named import called, load_named
from ckptool.training.seeds import derived, generator, order, seed_all
from ckptool.training.signals import held_back, ignore_in_worker

if TYPE_CHECKING:
    from ckptool.training.trainer import Trainer

Collate = Callable[[list[Any]], Any]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on the device. size: its samples.  total: how many samples it stands for among all processes."""

    data: Any
    size: int
    total: int


class Samples:
    """A data set divided into training and validation."""

    def __init__(self, dataset: Dataset[Any], settings: Data, seed: int) -> None:
        self.dataset, self.settings, self.seed = dataset, settings, seed
        count = len(dataset)  # type: ignore[arg-type]
        shuffled = torch.randperm(count, generator=generator(seed, "split")).tolist()
        kept = count - math.floor(count * settings.val_fraction)
        self.train, self.held = sorted(shuffled[:kept]), sorted(shuffled[kept:])
        self.collate = collate_of(settings.collate)

    @property
    def train_count(self) -> int:
        return len(self.train)

    @property
    def about(self) -> dict[str, Any]:
        """What the data set says about itself for models that ask: sizes, classes."""
        found = getattr(self.dataset, "about", {})
        if not isinstance(found, dict):
            raise UsageError(
                f"data: the attribute about of {printable(self.settings.name)} is {type(found).__name__}, not a dictionary",
                "It gives models their sizes by name: {'inputs': [4], 'classes': 3}.",
            )
        return found

    def batches(self, batch: int, drop_last: bool) -> int:
        """The steps of an epoch."""
        return len(self.train) // batch if drop_last else -(-len(self.train) // batch)

    def stream(self, trainer: Trainer) -> Generator[list[Batch]]:
        """The micro-batches of each step, from the trainer's step to the end of the run. Close it, and its workers end."""
        device, begin = trainer.world.device, trainer.step
        asked: deque[list[_Share]] = deque()  # the loader is some steps ahead
        loader = self._loader(_Order(lambda: _places(self._shares(trainer, begin), asked)), device)
        try:
            for _ in range(begin, trainer.total_steps):
                first = to_device(self._next(loader), device)
                rest = [to_device(self._next(loader), device) for _ in asked[0][1:]]
                yield [
                    Batch(data, len(share.places) if share.counts else 0, share.total)
                    for data, share in zip((first, *rest), asked.popleft(), strict=True)
                ]
        finally:
            if hasattr(loader, "_shutdown_workers"):
                loader._shutdown_workers()  # left to the garbage collector, it takes ten seconds

    def _shares(self, trainer: Trainer, begin: int) -> Iterator[list[_Share]]:
        """What this process takes of each step from `begin` on: a share of each micro-batch that has samples at all."""
        world, parts = trainer.world, trainer.config.train.accumulate
        batch, per_epoch = self.settings.batch, self.batches(self.settings.batch, self.settings.drop_last)
        for step in range(begin, trainer.total_steps):
            epoch, place = divmod(step, per_epoch)
            if place == 0 or step == begin:
                ordered = order(self.seed, epoch, len(self.train))
            samples = [self.train[i] for i in ordered[place * batch : (place + 1) * batch]]
            windows = [window for micro in range(parts) if (window := samples[micro::parts])]
            # A process without a sample takes one with the weight of none: all must take part in every step.
            yield [
                _Share([(epoch, i) for i in world.share(window) or window[:1]], len(window), len(window) > world.rank)
                for window in windows
            ]

    def _loader(self, places: _Order, device: torch.device) -> Iterator[Any]:
        dataset = _Seeded(self.dataset, self.seed)
        if not self.settings.workers:
            return map(self.collate, map(dataset.__getitems__, places))
        loader = DataLoader(
            dataset,
            batch_sampler=places,
            num_workers=self.settings.workers,
            collate_fn=self.collate,
            worker_init_fn=ignore_in_worker,
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            pin_memory=device.type == "cuda",
        )
        with held_back():  # workers begin with what their parent lets through
            return iter(loader)

    def _next(self, loader: Iterator[Any]) -> Any:
        """The next batch; what the user's own data set or collate function raises comes with its traceback."""
        return called(next, "data", self.settings.name, loader)

    def validation(self, device: torch.device) -> Iterator[Batch]:
        """The held-out samples, in order."""
        dataset = _Seeded(self.dataset, self.seed)
        for begin in range(0, len(self.held), self.settings.batch):
            part = self.held[begin : begin + self.settings.batch]
            made = called(dataset.__getitems__, "data", self.settings.name, [(-1, i) for i in part])
            data = called(self.collate, "data", self.settings.name, made)
            yield Batch(to_device(data, device), len(part), len(part))


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process takes of a micro-batch: (epoch, index) of its samples; total: of all processes; counts: False for a stand-in."""

    places: list[tuple[int, int]]
    total: int
    counts: bool


class _Order:
    """The batches of a run as a loader wants them: one after the other, made when they are asked for."""

    def __init__(self, made: Callable[[], Iterator[list[tuple[int, int]]]]) -> None:
        self.made = made

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.made()


def _places(steps: Iterator[list[_Share]], asked: deque[list[_Share]]) -> Iterator[list[tuple[int, int]]]:
    """The samples of each micro-batch; `asked` is told of each step as it is begun."""
    for step in steps:
        asked.append(step)
        for share in step:
            yield share.places


class _Seeded(Dataset[Any]):
    """The data set, with randomness (augmentation) that follows from epoch and index, whichever worker draws it."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, derived(seed, "sample")
        self.random = bool(getattr(dataset, "random", True))

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        if self.random:
            seed_all(CPU, self.seed, epoch, index)
        return self.dataset[index]

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        if not self.random and hasattr(self.dataset, "__getitems__"):
            found: list[Any] = self.dataset.__getitems__([index for _, index in places])
            return found
        return [self[place] for place in places]


def to_device(data: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dictionaries, on the device."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    return type(data)(to_device(part, device) for part in data) if type(data) in (tuple, list) else data


def load_data(settings: Data, seed: int) -> Samples:
    """The data that a configuration names. Raises `UsageError` for an unknown name, or arguments that it does not take."""
    made = load_named(settings.name, datasets.IN_THE_BOX, "data", settings.args)
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
        raise UsageError(
            f"data: {settings.name} made {type(made).__name__}, which is no Dataset", "It has no length, or no items."
        )
    samples: Samples = called(Samples, "data", settings.name, made, settings, seed)
    return samples


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
            "Pad sequences: --set data.collate=pad; or name a function of your own: --set data.collate=file.py:NAME",
        ) from error


def pad(samples: list[Any]) -> Any:
    """Sequences of several lengths, padded with zeros to the longest; their lengths are the last part (`lengths`, in a dictionary)."""
    if isinstance(samples[0], dict):
        columns = {key: [sample[key] for sample in samples] for key in samples[0]}
        lengths = _lengths(next(iter(columns.values())))
        return {**{key: _padded(column) for key, column in columns.items()}, "lengths": lengths}
    several = isinstance(samples[0], tuple)
    parts = [list(column) for column in zip(*samples, strict=True)] if several else [samples]
    return (*(_padded(column) for column in parts), _lengths(parts[0]))


def _lengths(sequences: list[Any]) -> torch.Tensor:
    return torch.tensor([len(sequence) for sequence in sequences])


def _padded(column: list[Any]) -> Any:
    tensors = [torch.as_tensor(part) if isinstance(part, list) else part for part in column]
    if all(isinstance(part, torch.Tensor) and part.dim() for part in tensors):
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    return default(column)


_COLLATES: dict[str, Collate] = {"default": default, "pad": pad}


def collate_of(name: str) -> Collate:
    """The function that makes a batch of samples: `default`, `pad`, or the user's own."""
    if name in _COLLATES:
        return _COLLATES[name]
    from ckptool.training.named import find_named

    found: Collate = find_named(name, _COLLATES, "collate")
    return found
