"""A place in any data: which epoch, how many batches into it, and how to get back there with the same random draws.

`iter(DataLoader)` draws from the global generator, and so does the first batch of a shuffled one. So the random state
at the beginning of an epoch is saved too: a resumed run begins the epoch again with it, fetches the batches that were
trained on without training on them, and only then takes the random state of the checkpoint. So the data set draws the
same numbers in the same order, in this process and in workers. A loader with a `state_dict` (torchdata's
StatefulDataLoader) resumes from that instead, and fetches nothing again.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ckptool.errors import Conflict, UsageError, counted
from ckptool.training import rng
from ckptool.training.data import signals_blocked
from ckptool.training.seeds import seed_all

if TYPE_CHECKING:
    from ckptool.training.run import Run

Seeding = Callable[..., None]
_EPOCH_AWARE = ("sampler", "batch_sampler", "dataset")  # parts of a loader that may have `set_epoch`, or a state
_END = object()


class Position:
    """The place of the next batch. epoch: from 0.  batch: how many of this epoch were yielded.

    began: the steps done before this epoch.  start: the random state with which it began.
    """

    def __init__(self) -> None:
        self.epoch = self.batch = self.began = 0
        self.start: rng.State | None = None
        self.loader_state: Any = None
        self.loader: Any = None
        self.parts: dict[str, Any] = {}  # the states with which given parts of the loader began the epoch

    def next_epoch(self, completed: int) -> None:
        """Goes to the beginning of the next epoch, after so many steps in all."""
        self.epoch, self.batch, self.began = self.epoch + 1, 0, completed
        self.start = self.loader_state = None
        self.parts = {}

    def shared_state(self) -> dict[str, Any]:
        """The place, the same in every process."""
        return {"epoch": self.epoch, "batch": self.batch, "began": self.began}

    def rank_state(self) -> dict[str, Any]:
        """The part of the place that each process has for itself; none between two epochs."""
        inside = bool(self.batch)
        state = self.loader.state_dict() if inside and has_state(self.loader) else None
        parts = {"parts": self.parts} if inside and self.parts else {}
        return {"epoch_start": self.start if inside else None, "loader": state, **parts}

    def keep_loader_state(self) -> None:
        """Keeps the state of a stateful loader, for another loop in the middle of the epoch."""
        self.loader_state = self.rank_state()["loader"]

    def restore(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
        """Takes a place that was saved."""
        self.epoch, self.batch, self.began = saved["epoch"], saved["batch"], saved["began"]
        self.start, self.loader_state = own.get("epoch_start"), own.get("loader")
        self.parts = own.get("parts", {})
        if saved.get("over") and self.batch:  # of 0.1.0: the epoch has no more batches
            self.next_epoch(self.began + self.batch)


def saves(value: Any) -> bool:
    """True for what has a state, and takes it back."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def has_state(loader: Any) -> bool:
    """True for a loader that saves its own place, and with it what its workers draw: see `HoldingDraws`.

    Data without a state that torchdata reads again from its start, and objects that take no attribute, hold no draws.
    """
    workers: int = getattr(loader, "num_workers", 0)
    data = loader.dataset if saves(loader) and workers else None
    again = isinstance(data, torch.utils.data.IterableDataset) and not saves(data)
    return saves(loader) and (data is None or (hasattr(data, "__dict__") and not again))


def make_ready(loader: Any) -> None:
    """Before an iterator of a loader is made: its workers begin anew, and hold their draws where it saves its place."""
    if isinstance(loader, torch.utils.data.DataLoader) and loader._iterator is not None:
        loader._iterator = None  # its workers would go on with random states that cannot be restored
        loader._initial_iter_for_state_dict = False
    works = getattr(loader, "num_workers", 0) and not isinstance(loader.worker_init_fn, HoldingDraws)
    if works and has_state(loader):
        loader.worker_init_fn = HoldingDraws(loader.worker_init_fn)


def generators_of(loader: Any) -> dict[str, Any]:
    """The generators that a loader and its samplers draw from, by name."""
    found: dict[str, Any] = {}
    batch_sampler = getattr(loader, "batch_sampler", None)
    places = {"loader": loader, "sampler": getattr(loader, "sampler", None), "batch_sampler": batch_sampler}
    places["batch_sampler.sampler"] = getattr(batch_sampler, "sampler", None)
    for name, owner in places.items():
        generator = getattr(owner, "generator", None)
        if rng.is_generator(generator) and all(generator is not known for known in found.values()):
            found[f"{name}.generator"] = generator
    return found


def epochs_of(loader: Any) -> list[str]:
    """The names of the attribute `epoch` in everything with `set_epoch`."""
    parts = {"loader": loader, **{f"loader.{name}": getattr(loader, name, None) for name in _EPOCH_AWARE}}
    parts |= {"loader.batch_sampler.sampler": getattr(parts["loader.batch_sampler"], "sampler", None)}
    return [f"{name}.epoch" for name, part in parts.items() if callable(getattr(part, "set_epoch", None))]


class Batches:
    """The batches of a loader, epoch after epoch, from a place on.

    loader: anything that can be iterated again for each epoch, or a function that gives an iterator for one.
    run: whose place in it, and whose random states and objects are restored.
    """

    def __init__(self, loader: Any, run: Run) -> None:
        self.loader, self.run, self.position, self.seeding = loader, run, run.position, run._seeding
        self.generators = {**run.objects.generators, **generators_of(loader)}
        run.position.loader = loader
        if hasattr(loader, "__next__"):
            raise UsageError(
                f"run.batches was given {type(loader).__name__}, an iterator, which ends with its first epoch",
                "It cannot start again, neither for the next epoch nor to resume.",
                "Give the loader itself, or a function that returns an iterator: run.batches(lambda: zip(a, b))",
            )

    def epoch(self, saved: rng.State | None) -> Generator[Any]:
        """The batches of the epoch that the position is in, from there on."""
        position, skipped = self.position, self.position.batch
        if skipped and position.start is not None:
            self.run._restore_random(position.start, self.generators)
        elif saved is not None:
            self.run._restore_random(saved, self.generators)
        position.start = self.run._capture(self.generators)
        if self.seeding is not None:
            self.seeding("epoch", position.epoch)
        position.parts = position.parts if skipped else self.run.objects.parts_of(self.loader)
        again = 0 if has_state(self.loader) else skipped
        batches: Any = None
        try:
            with self.run.objects.refetching(position.parts) if again else nullcontext():
                batches = self._begin(position.epoch)
                for number in range(again):
                    if self._next(batches, position.began + number) is _END:
                        raise self._shorter(number, skipped)
            if skipped and saved is not None:
                self.run._restore_random(saved, self.generators)
            while (batch := self._next(batches, self.run.step)) is not _END:
                position.batch += 1
                yield batch
            if not position.batch:
                raise UsageError("the loader yielded no batch at all", "Its epochs would never end.")
        finally:
            if getattr(self.loader, "num_workers", 0) and batches is not None:
                end_workers(batches)

    def _next(self, batches: Iterator[Any], step: int) -> Any:
        if self.seeding is not None:
            self.seeding("step", step)
        return next(batches, _END)

    def _begin(self, epoch: int) -> Iterator[Any]:
        """The iterator of an epoch; calls `set_epoch` of loader, samplers and data set."""
        loader, position = self.loader, self.position
        for owner in (loader, *(getattr(loader, name, None) for name in _EPOCH_AWARE)):
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)
        make_ready(loader)
        if position.loader_state is not None and has_state(loader):
            try:
                loader.load_state_dict(position.loader_state)
            except (AssertionError, KeyError, ValueError) as error:
                raise Conflict(
                    f"the loader does not load its saved state: {str(error) or type(error).__name__}",
                    "StatefulDataLoader resumes only with the number of workers that it was saved with.",
                    "Use the same num_workers",
                ) from error
        position.loader_state = None
        if not getattr(loader, "num_workers", 0):
            return iter(loader() if (callable(loader) and not hasattr(loader, "__iter__")) else loader)
        with signals_blocked():
            begun: Iterator[Any] = iter(loader)
        _WORKING.add(begun)
        return begun

    def _shorter(self, number: int, skipped: int) -> Conflict:
        return Conflict(
            f"the loader gave {counted(number, 'batch', 'batches')} of an epoch in which {skipped:,} were trained on",
            "This is not the data that the run was trained on.",
        )


class HoldingDraws:
    """Starts a worker whose random states are part of its data set's state.

    A StatefulDataLoader saves that for each worker, with each batch, and gives it back before the next one.
    """

    def __init__(self, given: Callable[[int], Any] | None) -> None:
        self.given = given

    def __call__(self, number: int) -> None:
        if self.given is not None:
            self.given(number)
        worker = torch.utils.data.get_worker_info()
        data: Any = worker.dataset if worker else None  # the worker's own
        save, load = (data.state_dict, data.load_state_dict) if saves(data) else (lambda: None, lambda state: None)

        def load_with_draws(state: Any) -> None:
            load(state["data"])
            rng.restore(state["random"], {})

        data.state_dict = lambda: {"data": save(), "random": rng.capture({})}
        data.load_state_dict = load_with_draws


_WORKING: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def workers_spared() -> Iterator[None]:
    """Blocks signals in the workers of all loaders that begin: a script's validation also needs its own to its end."""
    loaders: Any = torch.utils.data.DataLoader
    begin = loaders._get_iterator

    def begun(loader: Any) -> Any:
        if not loader.num_workers:
            return begin(loader)
        with signals_blocked():
            batches = begin(loader)
        _WORKING.add(batches)
        return batches

    loaders._get_iterator = begun
    try:
        yield
    finally:
        loaders._get_iterator = begin


def end_workers(*which: Any) -> None:
    """Ends the workers of these iterators of loaders, or of all."""
    for batches in which or list(_WORKING):
        batches._shutdown_workers()


# Before the interpreter does: it would send them a signal that is blocked, and wait.
atexit.register(end_workers)


def by_place(seed: int, rank: int, device: torch.device) -> Seeding:
    """Seeds all generators from a seed and a place, as the harness does."""
    return lambda *place: seed_all(device, seed, *place, rank)
