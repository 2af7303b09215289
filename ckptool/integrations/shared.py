"""What the adapters share: checkpoint folders that another library writes, and the way back to a place in its data.

A folder is staged under a hidden name, synced, and renamed. Its sidecar has the size and sha256 of every file, and is
written last, so if it exists the others are whole.

A library may fetch a batch before it trains on the last one, and data sets draw. So three random states are saved:
that with which the epoch began, that before the newest fetch, and that of the moment. A resumed run begins the epoch
with the first, fetches again what was trained on, the newest batch with the second, and goes on with the third.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ckptool.errors import Conflict, counted
from ckptool.output import make_folder
from ckptool.output.folders import move_folder
from ckptool.training import rng
from ckptool.training.batches import generators_of, make_ready
from ckptool.training.saving import to_cpu
from ckptool.training.store import SavedState, described, files_of, read_json, write_json

SIDECAR = "ckptool.json"
STAGING = ".ckptool-staging"


# Folders --------------------------------------------------------------------------------------------------------------


@contextmanager
def _staging(folder: str) -> Iterator[str]:
    """A new hidden folder, in place of one that a killed run left; deleted afterwards, with its content."""
    hidden = os.path.join(folder, STAGING)
    shutil.rmtree(hidden, ignore_errors=True)
    make_folder(hidden)
    yield hidden
    shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def committed(target: str, step: int, main: bool, wait: Callable[[], Any]) -> Iterator[str]:
    """The path where all processes write a checkpoint, which is complete when the body ends, and is then renamed.

    main: True in the process that makes folders.  wait: waits for all processes.
    """
    folder, name = os.path.split(target)
    with _staging(folder) if main else nullcontext(os.path.join(folder, STAGING)) as hidden:
        temporary = os.path.join(hidden, name)
        wait()
        yield temporary
        wait()
        if main:
            write_json(os.path.join(temporary, SIDECAR), {"step": step, "files": described(files_of(temporary))})
            move_folder(temporary, target)
    wait()


def rotate(folder: str, name: re.Pattern[str], step: int, keep: int, stay: Collection[str] = ()) -> None:
    """Deletes all but the last `keep` checkpoints up to a step. Each is moved away first: no kill leaves a part of one
    visible. name: see `saved_folders`.  stay: paths among those `keep` that stay in any case.
    """
    paths = [saved.path for saved in saved_folders(folder, name) if saved.step <= step and saved.path not in stay]
    for path in paths[: max(0, len(paths) - max(0, keep - len(stay)))]:
        with _staging(folder) as hidden:
            os.rename(path, os.path.join(hidden, os.path.basename(path)))


def saved_folders(folder: str, name: re.Pattern[str]) -> list[SavedState]:
    """The checkpoints in a folder, oldest first, whole or not. name: matches theirs, with the step as its group."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    paths = {os.path.join(folder, match[0]): int(match[1]) for match in map(name.fullmatch, names) if match}
    checkpoints = [SavedState(step, path, read_json(os.path.join(path, SIDECAR))) for path, step in paths.items()]
    return sorted(checkpoints, key=lambda saved: saved.step)


# Batches --------------------------------------------------------------------------------------------------------------


class Fetches:
    """The fetches of one process in an epoch. saved: the state of a checkpoint, until the first batch after it.

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
            self.generators |= {f"{number}.{name}": generator for name, generator in generators_of(loader).items()}
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
            is_newest = self.fetched == self.saved["fetched"]
            if state := self.saved["before" if is_newest else "now"]:
                rng.restore(state, self.generators)
            self.saved = self.saved if is_newest else None
        self.before = rng.capture(self.generators)

    def epoch(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch, in a resumed run without those that were trained on."""
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
        """Restores the saved random states in a resumed run that has no more batches to fetch."""
        if self.saved is not None:
            rng.restore(self.saved["now"] or self.saved["start"], self.generators)

    def state(self, trained: int, *, again: bool = True) -> rng.State:
        """The state to save. trained: the batches of the epoch that were trained on; 0 between two epochs.

        again: whether a resumed run fetches them again; else the loaders resume from their own places.
        """
        if self.saved is not None:
            return self.saved
        now = rng.capture(self.generators)
        if trained and again:
            return {"start": self.start, "before": self.before, "now": now, "fetched": self.fetched, "trained": trained}
        return {"start": now, "before": None, "now": now if trained else None, "fetched": 0, "trained": 0}

    def resume(self, states: list[Any], rank: int, size: int, where: str) -> None:
        """Takes the states of all processes. Raises `Conflict` for another number of processes."""
        if len(states) != size:
            what = f"{where} was saved by {counted(len(states), 'process', 'processes')}, and this run has {size:,}"
            why = "Random states and data positions depend on the number of processes."
            raise Conflict(what, why, f"Start {len(states):,}")
        self.saved = to_cpu(states[rank], copied=True)
