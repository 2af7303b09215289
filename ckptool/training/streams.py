"""Streams: data that come one after the other, and are not asked for by a number.

Every process reads the whole stream and keeps its own part: so a step has the same samples on any number of processes
and with any number of workers. What takes time belongs into `collate`, which is called for the part that is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ckptool.errors import UsageError, counted
from ckptool.training.rng import CPU, derived, seed_all

Position = dict[str, Any]
Share = tuple[list[Any], int, int]  # of a micro-batch: the samples, how many count, how many all processes have


def is_stream(dataset: Any) -> bool:
    """True for an `IterableDataset`, and what can be iterated again and again and has no items by number."""
    kind = type(dataset)
    again = hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__") and not hasattr(kind, "__next__")
    return isinstance(dataset, IterableDataset) or again


class Reader:
    """Reads a stream, one epoch after the other. `epoch`, `taken`: the samples before the next one.

    A stream with `state_dict` and `load_state_dict` goes on from its state at the last save, others from the beginning
    of the epoch; the samples from there to the position are read again. Randomness follows from epoch and number.
    """

    def __init__(self, dataset: Any, seed: int, position: Position | None = None) -> None:
        self.dataset, self.seed = dataset, derived(seed, "stream")
        self.random = bool(getattr(dataset, "random", True))
        self.keeps = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        position = position or {"epoch": 0, "samples": 0}
        self._begin(position["epoch"], position.get("state") if self.keeps else None)
        for _ in range(position["samples"] - self.taken):
            if not self._next():
                raise UsageError(
                    f"data: epoch {self.epoch} ends after {counted(self.taken, 'sample')}, not {position['samples']:,}",
                    "The stream has changed, so the run cannot resume at its place.",
                )

    def _begin(self, epoch: int, state: Any = None) -> None:
        self.epoch, self.taken = epoch, 0
        seed_all(CPU, self.seed, epoch, "begin")
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self.mark()
        if state is not None:  # before it is read, a stream may not know the state that it was given
            self.state, self.taken = state, state["samples"]
            self.dataset.load_state_dict(copy.deepcopy(state["of"]))
        self.samples = iter(self.dataset)

    def mark(self) -> None:
        """Takes the stream's state, to go on from there."""
        of = copy.deepcopy(self.dataset.state_dict()) if self.keeps else None
        self.state = {"samples": self.taken, "of": of} if self.keeps else None

    def rewind(self) -> None:
        """Puts the stream back into the state that was taken last."""
        if self.state is not None:
            self.dataset.load_state_dict(self.state["of"])

    @property
    def position(self) -> Position:
        """The place of the next sample, as it is saved."""
        return {"epoch": self.epoch, "samples": self.taken} | ({"state": self.state} if self.keeps else {})

    def _next(self) -> list[Any]:
        """The next sample of the epoch, in a list; none at its end."""
        if self.random:
            seed_all(CPU, self.seed, self.epoch, self.taken)
        for sample in self.samples:
            self.taken += 1
            return [sample]
        return []

    def rest(self, count: int) -> list[Any]:
        """The next samples of this epoch, at most `count`."""
        found: list[Any] = []
        while len(found) < count and (sample := self._next()):
            found += sample
        return found

    def take(self, batch: int, drop_last: bool) -> list[Any]:
        """The samples of a step, of the next epoch where this one is at its end."""
        while len(found := self.rest(batch)) < batch:
            if self.taken < (batch if drop_last else 1):
                raise UsageError(
                    f"data: the stream ends after {counted(self.taken, 'sample')}",
                    f"There is no batch of {batch} in it.",
                )
            self._begin(self.epoch + 1)  # at once: the state of a stream that has ended may be its first
            if found and not drop_last:
                break
        return found


@dataclass(eq=False)
class Steps(IterableDataset[Any]):
    """The steps of a run: for each, the micro-batches of this process as (data, size, total), and the position after.

    A worker reads all and gives every n-th step. saved: the multiple of steps at which the stream's state is taken.
    """

    reader: partial[Reader]
    shard: Callable[[list[Any]], list[Any]]
    collate: Callable[[list[Any]], Any]
    steps: range
    batch: int
    drop_last: bool
    parts: int
    saved: int

    def __iter__(self) -> Iterator[tuple[list[tuple[Any, int, int]], Position]]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if worker is not None:
            own_numbers(self.reader.args[0])
        # A stream that divides itself among the workers would give each of them a part of its part.
        torch.utils.data._utils.worker._worker_info = None
        reader = self.reader()
        for step in self.steps:
            samples = reader.take(self.batch, self.drop_last)
            if (step + 1) % self.saved == 0 or step + 1 == self.steps.stop:
                reader.mark()
            if (step - self.steps.start) % count == number:
                parts = shares(samples, self.parts, self.shard)
                yield [(self.collate(own), size, total) for own, size, total in parts], reader.position


def shares(samples: list[Any], parts: int, shard: Callable[[list[Any]], list[Any]]) -> list[Share]:
    """A process's shares of a step's samples, one of each micro-batch that has any.

    A process without a sample takes one with the weight of none: all must take part in every step.
    """
    windows = [window for micro in range(parts) if (window := samples[micro::parts])]
    return [(own or window[:1], len(own), len(window)) for window in windows for own in [shard(window)]]


def own_numbers(dataset: Any) -> None:
    """Gives a worker its own copy of numbers in shared memory, such as the epoch: another may be in another epoch."""
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.untyped_storage().is_shared():
            setattr(dataset, name, value.clone())


def unchanged(step: Any) -> Any:
    """A step as it is: without this, a `DataLoader` makes lists of tuples and tensors of arrays."""
    return step
