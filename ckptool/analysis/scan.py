"""The checkpoints of a folder, one row each; and the names that one file's pickles would call."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ckptool.analysis.inspect import Listing
from ckptool.checkpoint import Checkpoint, PartOf
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.registry import Report
from ckptool.checkpoint.state_dicts import kinds_of
from ckptool.checkpoint.tree import children
from ckptool.errors import CkptoolError
from ckptool.formats import marks
from ckptool.formats.files_beside import all_uses
from ckptool.formats.members import BESIDE_WEIGHTS
from ckptool.formats.parts import MEMBERS
from ckptool.pickles.calls import CALLED, CUSTOM, MADE, NAMED

GOOD, PART, MEMBER = "good", "part", "member"

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
_EPOCH_IN_NAME = re.compile(r"(?:epoch|(?<![a-z])ep)[-_=]?0*(\d{1,9})(?!\d)", re.IGNORECASE)  # but not in `step-2`


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A checkpoint of a folder.

    state: `good`, `part` (whole bytes of an incomplete checkpoint), `member` (what lies beside weights: optimizer,
    random states), `recovered-file`, `unsafe-global` (loading it would run unknown code), or the code of the error that
    opening or verifying it gave; in `problem` the sentence.  part: of what it is only a part.
    members: of how many files it is, where those are a folder of several kinds.
    step, epoch: how far the training was; None where neither the file nor its name says.  bytes: its size.  modified:
    seconds since 1970.
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
    members: int = 0

    @property
    def is_good(self) -> bool:
        return self.state == GOOD

    @property
    def modified_at(self) -> str:
        """The time as ISO 8601 has it, in UTC."""
        return datetime.fromtimestamp(self.modified, timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, repr=False)
class Scan(Report):
    """The checkpoints of a folder, or one file. latest: the newest good one or None; by: the criterion.

    full: the data was read and compared with its checksums; otherwise good means that tables and structure are whole.
    latest_only: the question was which is the newest good one, and whether there is one.
    """

    verdict = "findings"

    path: str
    is_folder: bool
    files: tuple[ScannedFile, ...]
    others: int
    latest: ScannedFile | None
    by: str
    full: bool = False
    latest_only: bool = False

    def exit(self) -> int:
        """1 where something is damaged or would run code; with `latest_only` where none is good."""
        return int(self.latest is None if self.latest_only else bool(self.findings))

    @property
    def findings(self) -> int:
        """Files that are not good, or whose pickles would call something unknown; of one named file only the latter."""
        return sum(1 for file in self.files if (file.state not in (GOOD, MEMBER) and self.is_folder) or file.calls)


def scanned(
    path: str,
    checkpoint: Checkpoint,
    found: Listing,
    calls: Iterable[Call],
    said: Mapping[str, Any] | None = None,
    beside: int = 0,
) -> ScannedFile:
    """The row of a checkpoint that was opened. said: how far the training was, as a file beside it has it.  beside:
    members of its folder."""
    size, modified = _size_of(path)
    if isinstance(checkpoint.source, Folder):
        size = checkpoint.source.size
    known = {key: value for key, value in checkpoint.metadata.items() if key == "step"} | dict(said or {})
    step, epoch = progress_of({**known, "": checkpoint.tree} if known else checkpoint.tree, os.path.basename(path))
    holds = tuple(kinds_of(found.roots))
    said_elsewhere = ("unsafe-global", PART, MEMBERS)
    notes = tuple(dict.fromkeys(note.code for note in found.notes if note.code not in said_elsewhere))
    state, problem = _state(path, checkpoint, found)
    row = (checkpoint.container, step, epoch, size, modified, holds, notes, tuple(calls), checkpoint.part, beside)
    return ScannedFile(path, state, problem, *row)


def _state(path: str, checkpoint: Checkpoint, found: Listing) -> tuple[str, str]:
    part = checkpoint.part
    if part is not None and not part.is_complete:
        return PART, f"{part.label}: {part.meaning}"
    if BESIDE_WEIGHTS.fullmatch(os.path.basename(path)) and not any(root.is_model for root in found.roots):
        return MEMBER, "belongs beside weights, and is not a checkpoint by itself"
    for note in marks.recovered_notes(checkpoint.metadata):
        return note.code, note.message
    unsafe = (note.message for note in found.notes if note.code == "unsafe-global")
    return ("unsafe-global", message) if (message := next(unsafe, "")) else (GOOD, "")


def damaged(path: str, error: CkptoolError) -> ScannedFile:
    """The row of a file that could not be opened, or was found wrong."""
    size, modified = _size_of(path)
    step, epoch = progress_of(None, os.path.basename(path))
    return ScannedFile(path, error.code, error.what, "", step, epoch, size, modified, (), (), ())


def _size_of(path: str) -> tuple[int, float]:
    try:
        status = os.stat(path)
        if not os.path.isdir(path):
            return status.st_size, status.st_mtime
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries), status.st_mtime
    except OSError:
        return 0, 0.0


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

    A copy or a download changes times, so what the files themselves say goes first; of two of the same step, the one
    that holds more.
    """
    good = [file for file in files if file.is_good]
    if not good:
        return None, ""
    if all(file.step is not None for file in good):
        return max(good, key=lambda file: (file.step or 0, *_richness(file))), "step"
    if all(file.epoch is not None for file in good):
        return max(good, key=lambda file: (file.epoch or 0, *_richness(file))), "epoch"
    return max(good, key=lambda file: file.modified), "time"


def _richness(file: ScannedFile) -> tuple[int, int, float]:
    """The kinds of contents and members of a checkpoint, its bytes, its time: the larger one is the richer."""
    return len(file.holds) + file.members, file.bytes, file.modified


@dataclass(frozen=True, slots=True)
class Call:
    """A name that is not known to be inert. how: `called` (or a class with arguments), `made`, `named` (by itself).

    is_custom: an object of a class of the file's own, filled with plain values; else it would run unknown code.
    places: addresses in the tree, the first of `count`.
    """

    name: str
    how: str
    places: tuple[str, ...]
    count: int
    is_custom: bool = False


MAX_PLACES = 5


def unknown_names(checkpoint: Checkpoint) -> list[Call]:
    """Every name that is not known to be inert where it stands, the most dangerous use first."""
    found: dict[tuple[str, str, str], list[str]] = {}
    counts: dict[tuple[str, str, str], int] = {}
    for use, place in all_uses(checkpoint):
        kind = (use.name, use.how, use.verdict)
        counts[kind] = counts.get(kind, 0) + 1
        places = found.setdefault(kind, [])
        if len(places) < MAX_PLACES and place not in places:
            places.append(place)
    calls = [
        Call(name, how, tuple(places), counts[name, how, verdict], verdict == CUSTOM)
        for (name, how, verdict), places in found.items()
    ]
    return sorted(calls, key=lambda call: (call.is_custom, (CALLED, MADE, NAMED).index(call.how)))
