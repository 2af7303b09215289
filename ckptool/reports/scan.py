"""What the checkpoints of a folder are, one row each; and what one file's pickles would call."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Checkpoint, PartOf
from ckptool.errors import CkptoolError
from ckptool.nodes import Object
from ckptool.reports.calls import Call
from ckptool.reports.listing import Listing
from ckptool.roots import kinds_of
from ckptool.tree import children

GOOD, PART = "good", "part"

# Where training scripts keep how far they have come: the keys, the most exact first, then what stands in file names.
_STEP_KEYS = (
    "global_step",
    "global_steps",
    "step",
    "steps",
    "iteration",
    "iterations",
    "iter",
    "num_updates",
    "trainer_step",
)
_EPOCH_KEYS = ("epoch", "epochs", "current_epoch")
_STEP_IN_NAME = re.compile(r"(?:global_?step|checkpoint|step|iter(?:ation)?)[-_=]?0*(\d{1,15})(?!\d)", re.IGNORECASE)
_EPOCH_IN_NAME = re.compile(r"(?:epoch|ep)[-_=]?0*(\d{1,9})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """One checkpoint of a folder.

    state: `good`, `part` (whole bytes of an incomplete checkpoint), or the code of the error that opening or verifying it gave, with its
    sentence in `problem`.  part: of what it is only a part.
    step, epoch: how far the training was; None where neither the file nor its name says.  bytes: its size.  modified: seconds since 1970.
    holds: what its parts are.  notes: codes of what one should know.  calls: names that ckptool does not know.
    """

    path: str
    state: str
    problem: str
    container: str
    step: int | None
    epoch: int | None
    bytes: int
    modified: float
    holds: tuple[str, ...]
    notes: tuple[str, ...]
    calls: tuple[Call, ...]
    part: PartOf | None = None

    @property
    def is_good(self) -> bool:
        return self.state == GOOD


@dataclass(frozen=True, slots=True)
class Scan:
    """The checkpoints of a folder, or one file. latest: the newest good one, None where there is none; by: how that was told."""

    path: str
    is_folder: bool
    files: tuple[ScannedFile, ...]
    others: int
    latest: ScannedFile | None
    by: str

    @property
    def findings(self) -> int:
        """Files that are not good, or whose pickles would call what ckptool does not know. Of one file that was named, only the latter."""
        return sum(1 for file in self.files if (not file.is_good and self.is_folder) or file.calls)


def scanned(path: str, checkpoint: Checkpoint, found: Listing, calls: Iterable[Call]) -> ScannedFile:
    """The row of a checkpoint that was opened."""
    size, modified = _size_of(path)
    step, epoch = progress_of(checkpoint.tree, os.path.basename(path))
    holds = tuple(kinds_of(found.roots))
    notes = tuple(dict.fromkeys(note.code for note in found.notes if note.code != "unsafe-global"))
    part = checkpoint.part
    state, problem = (GOOD, "") if part is None else (PART, f"{part.label}: {part.meaning}")
    row = (checkpoint.container, step, epoch, size, modified, holds, notes, tuple(calls), part)
    return ScannedFile(path, state, problem, *row)


def damaged(path: str, error: CkptoolError) -> ScannedFile:
    """The row of a file that could not be opened, or was found wrong."""
    size, modified = _size_of(path)
    step, epoch = progress_of(None, os.path.basename(path))
    return ScannedFile(path, error.code, error.what, "", step, epoch, size, modified, (), (), ())


def _size_of(path: str) -> tuple[int, float]:
    try:
        status = os.stat(path)
        size = sum(entry.stat().st_size for entry in os.scandir(path)) if os.path.isdir(path) else status.st_size
    except OSError:
        return 0, 0.0
    return size, status.st_mtime


def progress_of(tree: Any, name: str) -> tuple[int | None, int | None]:
    """The step and the epoch that a tree says it was saved at, else those in the file's name."""
    step, epoch = _counter(tree, _STEP_KEYS), _counter(tree, _EPOCH_KEYS)
    stem = os.path.splitext(name)[0]
    if step is None and (found := _STEP_IN_NAME.search(stem)):
        step = int(found[1])
    if epoch is None and (found := _EPOCH_IN_NAME.search(stem)):
        epoch = int(found[1])
    return step, epoch


def _counter(tree: Any, keys: Iterable[str]) -> int | None:
    """A whole number under one of these keys, at the top or one level below it."""
    if not isinstance(tree, (dict, Object)):
        return None
    top = dict(_named(tree))
    for level in (top, *(dict(_named(value)) for value in top.values() if isinstance(value, (dict, Object)))):
        for key in keys:
            value = level.get(key)
            if type(value) is int and value >= 0:
                return value
    return None


def _named(node: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in children(node) if type(key) is str and "." not in key)


def latest_good(files: Iterable[ScannedFile]) -> tuple[ScannedFile | None, str]:
    """The newest good file, and how that was told: by step where every one has it, else by epoch, else by time.

    A copy or a download changes times, so what the files themselves say goes first.
    """
    good = [file for file in files if file.is_good]
    if not good:
        return None, ""
    if all(file.step is not None for file in good):
        return max(good, key=lambda file: (file.step or 0, file.modified)), "step"
    if all(file.epoch is not None for file in good):
        return max(good, key=lambda file: (file.epoch or 0, file.modified)), "epoch"
    return max(good, key=lambda file: file.modified), "time"
