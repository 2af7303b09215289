"""Back to a place inside an epoch of another library's loop, with the same random draws.

A library may fetch a batch before it trains on the last one, and data sets draw. So three random states are saved:
that with which the epoch began, that before the newest fetch, and that of the moment. A resumed run begins the epoch
with the first, fetches again what was trained on, the newest batch with the second, and goes on with the third.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.errors import Conflict, counted
from ckptool.training import rng
from ckptool.training.batches import generators_of, make_ready
from ckptool.training.saving import to_cpu


class Fetches:
    """What one process fetches in an epoch. saved: of a checkpoint, until the first batch after it.

    generators: those to save beside the global ones, by name.
    """

    def __init__(self) -> None:
        self.generators: dict[str, Any] = {}
        self.saved: rng.State | None = None
        self.start: rng.State | None = None
        self.before: rng.State | None = None
        self.fetched = 0

    def begin(self, loaders: Iterable[Any]) -> None:
        """Called before the iterators of an epoch are made."""
        for number, loader in enumerate(loaders):
            self.generators |= {f"{number}.{name}": each for name, each in generators_of(loader).items()}
            make_ready(loader)
        if self.saved is not None:
            rng.restore(self.saved["start"], self.generators)
        self.fetched, self.start = 0, rng.capture(self.generators)

    @property
    def trained(self) -> int:
        """The batches that a resumed run fetches again."""
        return int(self.saved["trained"]) if self.saved else 0

    def fetch(self) -> None:
        """Called before each batch is fetched."""
        self.fetched += 1
        if self.saved is not None and self.fetched >= self.saved["fetched"]:
            again = self.fetched == self.saved["fetched"]
            if state := self.saved["before" if again else "now"]:
                rng.restore(state, self.generators)
            self.saved = self.saved if again else None
        self.before = rng.capture(self.generators)

    def epoch(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch, in a resumed run those after the ones that were trained on."""
        shared = getattr(loader, "synchronized_generator", None)  # of accelerate
        self.generators |= {"shared": shared} if rng.is_generator(shared) else {}
        self.begin([getattr(loader, "base_dataloader", loader)])
        trained, batches = self.trained, iter(loader)
        while True:
            self.fetch()
            try:
                batch = next(batches)
            except StopIteration:
                self.fetched = 0
                return
            if self.fetched > trained:
                yield batch

    def go_on(self) -> None:
        """Restores the random states of a run that has no more batches."""
        if self.saved is not None:
            rng.restore(self.saved["now"] or self.saved["start"], self.generators)

    def state(self, trained: int, *, again: bool = True) -> rng.State:
        """What to save. trained: the batches of the epoch that were trained on; 0 between two epochs.

        again: whether a resumed run fetches them again; else the loaders go back to their places by themselves.
        """
        if self.saved is not None:
            return self.saved
        now = rng.capture(self.generators)
        if trained and again:
            return {"start": self.start, "before": self.before, "now": now, "fetched": self.fetched, "trained": trained}
        return {"start": now, "before": None, "now": now if trained else None, "fetched": 0, "trained": 0}

    def resume(self, states: list[Any], rank: int, size: int, where: str) -> None:
        """Takes what the processes saved. Raises `Conflict` for another number of processes."""
        if len(states) != size:
            saved = counted(len(states), "process", "processes")
            raise Conflict(
                f"{where} was saved by {saved}, and this run has {size:,}",
                "Random states and places in the data belong to a number of processes.",
                f"Start {len(states):,}",
            )
        if "trained" not in states[rank]:
            raise Conflict(f"{where} was saved by an older ckptool", "", "Start again, or resume it with that one")
        self.saved = to_cpu(states[rank], copied=True)
