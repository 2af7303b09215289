"""A position in any data: which epoch, how many batches into it, and how to return to it with the same random draws.

`iter(DataLoader)` draws from the global generator, and so does the first batch of a shuffled one. So the random state
at the beginning of an epoch is saved, too: a resumed run begins the epoch again with it, fetches the batches that were
trained on without training on them, and only then takes the random state of the checkpoint. The data set then draws
the same numbers in the same order, in this process and in workers. A loader with a `state_dict` (torchdata's
StatefulDataLoader) resumes from that instead, and fetches nothing again.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ckptool.errors import Conflict, UsageError, counted
from ckptool.training import rng
from ckptool.training.data import signals_blocked

if TYPE_CHECKING:
    from ckptool.training.run import Run

_END = object()


class Position:
    """The place of the next batch. epoch: from 0.  batch: how many of this epoch were yielded.

    began: the steps done before this epoch.  length: the batches of this epoch, where the loader knows it.  start: the
    random state with which it began.  body: that with which the enclosing body of `run.epochs` began.
    """

    def __init__(self) -> None:
        self.epoch = self.batch = self.began = 0
        self.length: int | None = None
        self.start: rng.State | None = None
        self.body: rng.State | None = None
        self.loader_state: Any = None
        self.loader: Any = None
        self.parts: dict[str, Any] = {}  # the states of saved parts of the loader when the epoch began

    def next_epoch(self, completed: int) -> None:
        """Moves to the beginning of the next epoch. completed: the steps so far."""
        self.epoch, self.batch, self.began = self.epoch + 1, 0, completed
        self.start = self.body = self.loader_state = self.length = None
        self.parts = {}

    def rank_state(self) -> dict[str, Any]:
        """The part of the position that belongs to each process; empty between two epochs."""
        inside = bool(self.batch)
        state = self.loader.state_dict() if inside and has_state(self.loader) else None
        optional: dict[str, Any] = {"parts": self.parts} if inside and self.parts else {}
        if inside and self.start and self.body and rng.moved(self.body, self.start):
            optional["body_start"] = self.body
        return {"epoch_start": self.start if inside else None, "loader": state, **optional}

    def common_state(self) -> dict[str, Any]:
        """The part of the position that is the same in all processes."""
        return {"epoch": self.epoch, "batch": self.batch, "began": self.began, "length": self.length}

    def restore(self, saved: dict[str, Any], rank: dict[str, Any]) -> None:
        """Returns to a saved position. rank: what `rank_state` gave in this process."""
        self.epoch, self.batch, self.began = saved["epoch"], saved["batch"], saved["began"]
        self.length = saved.get("length")
        self.start, self.loader_state = rank.get("epoch_start"), rank.get("loader")
        self.parts, self.body = rank.get("parts", {}), rank.get("body_start", self.start)


def saves(value: Any) -> bool:
    """True for an object that can save and load its state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def has_state(loader: Any) -> bool:
    """True for a loader that saves its own position, and with it the draws of its workers: see `hold_draws`.

    An iterable without a state, which torchdata reads again from its start, or one without a `__dict__` holds no draws.
    Loaders of accelerate have the methods, but a state only if they are told to.
    """
    workers: int = getattr(loader, "num_workers", 0)
    data = loader.dataset if saves(loader) and workers else None
    restarts = isinstance(data, torch.utils.data.IterableDataset) and not saves(data)
    is_told = getattr(loader, "use_stateful_dataloader", True)
    return saves(loader) and is_told and (data is None or (hasattr(data, "__dict__") and not restarts))


def make_ready(loader: Any) -> None:
    """Prepares a loader for a new iterator: its workers start afresh, and hold their draws if it saves its position."""
    if isinstance(loader, torch.utils.data.DataLoader) and loader._iterator is not None:
        loader._iterator = None  # its workers would go on with random states that cannot be restored
        loader._initial_iter_for_state_dict = False
    draws = getattr(loader, "num_workers", 0) and getattr(loader.worker_init_fn, "func", None) is not hold_draws
    if draws and has_state(loader):
        loader.worker_init_fn = partial(hold_draws, loader.worker_init_fn)


def parts_of(loader: Any) -> dict[str, Any]:
    """A loader and the parts of it, by name, that may have a state, a generator, or `set_epoch`."""
    parts = {
        "loader": loader,
        **{name: getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")},
    }
    return {**parts, "batch_sampler.sampler": getattr(parts["batch_sampler"], "sampler", None)}


def generators_of(loader: Any) -> dict[str, Any]:
    """The generators that a loader and its samplers draw from, by name."""
    generators: dict[str, Any] = {}
    for name, owner in parts_of(loader).items():
        generator = getattr(owner, "generator", None) if name != "dataset" else None
        if rng.is_generator(generator) and all(generator is not known for known in generators.values()):
            generators[f"{name}.generator"] = generator
    return generators


def batches_of(run: Run, loader: Any, saved: rng.State | None) -> Generator[Any]:
    """The rest of the batches of a run's current epoch. saved: the random state to continue with.

    Restores the random states, and the objects that fetching changes. Raises `Conflict` for other data than before.
    """
    position, generators, skipped = run.position, run._generators(), run.position.batch
    if skipped and position.start is not None:
        run._restore_random(position.start, generators)
    elif saved is not None:
        run._restore_random(saved, generators)
    position.start = run._capture(generators)
    length, position.length = position.length, None
    with suppress(TypeError, NotImplementedError):  # it may not know it
        position.length = len(loader)
    if skipped and length != position.length and length and position.length:
        run._say_once(
            f"the loader has {counted(position.length, 'batch', 'batches')}, and had {length:,} when this epoch began: "
            f"the {skipped:,} that are left out are other samples than were trained on"
        )
    run._reseed("epoch", position.epoch)
    position.parts = position.parts if skipped else run.objects.parts_of(loader)
    refetched = 0 if has_state(loader) else skipped
    batches: Any = None
    try:
        with run.objects.refetching(position.parts) if refetched else nullcontext():
            batches = _epoch_iterator(loader, position)
            for number in range(refetched):
                run._reseed("step", position.began + number)
                if next(batches, _END) is _END:
                    yielded = f"{counted(number, 'batch', 'batches')} of an epoch in which {skipped:,} were trained on"
                    raise Conflict(f"the loader gave {yielded}", "That is not the data that the run was trained on.")
        if skipped and saved is not None:
            run._restore_random(saved, generators)
        run._reseed("step", run.step)
        while (batch := next(batches, _END)) is not _END:
            position.batch += 1
            yield batch
            run._reseed("step", run.step)
        if not position.batch:
            raise UsageError("the loader yielded no batch at all", "Its epochs would never end.")
    finally:
        if getattr(loader, "num_workers", 0) and batches is not None:
            end_workers(batches)
            if not has_state(loader):
                make_ready(loader)  # the script may iterate over it again


def _epoch_iterator(loader: Any, position: Position) -> Iterator[Any]:
    """The iterator of an epoch; calls `set_epoch` of loader, samplers and data set."""
    for part in {id(part): part for part in parts_of(loader).values()}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(position.epoch)
    make_ready(loader)
    if position.loader_state is not None and has_state(loader):
        try:
            loader.load_state_dict(position.loader_state)
        except (AssertionError, KeyError, ValueError) as error:
            what = f"the loader cannot load its saved state: {str(error) or type(error).__name__}"
            why = "StatefulDataLoader resumes only with the number of workers that it was saved with."
            raise Conflict(what, why, "Use the same num_workers") from error
    position.loader_state = None
    return _spared(loader, lambda data: iter(data() if callable(data) and not hasattr(data, "__iter__") else data))


def hold_draws(initialize: Callable[[int], Any] | None, worker_id: int) -> None:
    """Initializes a worker so that its random states are part of its data set's state.

    A StatefulDataLoader saves that state for each worker with every batch, and loads it before the next one.
    """
    if initialize is not None:
        initialize(worker_id)
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
    """Starts the workers of every loader afresh, also inside of functions and wrappers, and for a validation, which
    needs them to its end: so signals are blocked in them."""
    loaders: Any = torch.utils.data.DataLoader
    begin = loaders.__iter__
    loaders.__iter__ = lambda loader: _spared(loader, begin)
    try:
        yield
    finally:
        loaders.__iter__ = begin


def _spared(loader: Any, begin: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """The iterator that `begin` makes of a loader, with workers of its own, in which signals are blocked."""
    if not getattr(loader, "num_workers", 0):
        return begin(loader)
    make_ready(loader)
    with signals_blocked():
        batches = begin(loader)
    _WORKING.add(batches)
    return batches


def end_workers(*which: Any) -> None:
    """Ends the workers of these iterators of loaders, or of all."""
    for batches in which or list(_WORKING):
        batches._shutdown_workers()


# Before the interpreter's own exit handler, which would send workers a signal that is blocked, and wait.
atexit.register(end_workers)
