"""A run's folder: history, metrics, lock and checkpoints.

No file that the run itself did not write is ever changed or deleted: it is named, and the run does not begin.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import yaml

from ckptool import __version__
from ckptool.checkpoint.files import read_small_text
from ckptool.commands import Command, command
from ckptool.errors import CkptoolError, Conflict, FileProblem, UsageError, listed, printable
from ckptool.output import make_folder
from ckptool.training import CHECKPOINTS, CONFIG, HISTORY, METRICS
from ckptool.training.lock import OTHER_RUN, Lock
from ckptool.training.store import (
    Lines,
    Retention,
    SavedState,
    Store,
    has_checkpoints,
    read_json,
    remove_file,
    write_text,
)

if TYPE_CHECKING:
    import torch

MAX_CONFIG = 1 << 20
_ID = re.compile(r"# ckptool run ([0-9a-f]{32})\n")
_SIDECAR = re.compile(r"step-\d{8,}\.json")
_CLAIMED = re.compile(r"\w[\w.-]*\.(?:csv|txt|json|json\.gz)")


def to_stderr(text: str) -> None:
    """Says a note of a run in somebody's own loop."""
    sys.stderr.write(f"ckptool: {text}\n")


@dataclass(slots=True)
class RunFolder:
    """An open run. Only its first process holds the lock and writes.

    retention: the checkpoints that it keeps.  elsewhere: what to type for a run in another folder.
    """

    folder: str
    id: str
    retention: Retention
    lock: Lock | None
    elsewhere: str | Command = OTHER_RUN
    store: Store = field(init=False)
    history: Lines = field(init=False)
    metrics: Lines = field(init=False)
    clock: float | None = field(init=False, default=None)
    before: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.store = Store(self.folder, self.id, self.elsewhere)
        self.history, self.metrics = (Lines(os.path.join(self.folder, name)) for name in (HISTORY, METRICS))

    def note(self, event: str, **facts: Any) -> None:
        """Adds an event to the history, synced, with the time of day and the seconds since the run was started or
        resumed, and of all its starts together."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if event in ("start", "resume"):
            self.clock, self.before = time.monotonic(), self._seconds_before()
        if self.clock is not None:
            seconds = time.monotonic() - self.clock
            facts |= {"seconds": round(seconds, 3), "total_seconds": round(self.before + seconds, 3)}
        self.history.add({"event": event, **facts, "time": now, "run": self.id}, sync=True)

    def _seconds_before(self) -> float:
        """The time that earlier starts took, each up to the last event that it noted."""
        found = [fact["total_seconds"] for fact in self.history.read() if "total_seconds" in fact]
        return next((value for value in reversed(found) if isinstance(value, (int, float))), 0.0)

    def claim(self, name: str) -> None:
        """Notes another file that the run writes. Raises `Conflict` where one is there, not known to the history."""
        if any(fact.get("event") == "writes" and fact.get("name") == name for fact in self.history.read()):
            return
        if os.path.lexists(os.path.join(self.folder, name)):
            raise _not_ours(self.folder, [name], self.elsewhere)
        self.note("writes", name=name)

    def newest_valid(self, verify: str, say: Callable[[str], Any], *, note: bool) -> SavedState | None:
        """The newest whole checkpoint, None before the first; says which it skipped, and with `note` records it.

        Raises `NoneValid` where all are damaged, `Conflict` where all are another run's.
        """

        def damaged(saved: SavedState, error: CkptoolError) -> None:
            say(f"skipped {printable(saved.path)}: {error.what}")
            if note:
                self.note("skip-damaged", step=saved.step, path=saved.path, why=error.what)

        newest = self.store.newest_valid(verify, damaged)
        if newest is None and has_checkpoints(self.folder):
            raise Conflict(
                f"{self.folder} holds checkpoints, and none of them belongs to this run",
                "They belong to the run whose run.yaml was here before. They were left as they are.",
                f"Put that run.yaml back, or start this run in another folder: {self.elsewhere}",
            )
        return newest

    def prune(self) -> list[SavedState]:
        """Deletes the checkpoints that retention does not keep; returns them."""
        _, gone = self.retention.divide(self.store.all())
        for saved in gone:
            self.store.remove(saved)
        return gone

    def close(self) -> None:
        """Releases the lock."""
        self.history.close()
        self.metrics.close()
        if self.lock is not None:
            self.lock.release()


# Opening -------------------------------------------------------------------------------------------------------------


def create(
    folder: str, settings: dict[str, Any], retention: Retention, elsewhere: str | Command = OTHER_RUN
) -> RunFolder:
    """A new run in its folder, also where one was begun that never saved anything. settings: recorded in run.yaml.

    Raises `Conflict` where there is one already, `FileProblem` where it cannot be made.
    """
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise FileProblem(
            f"cannot make the run {folder}: it is a file", "A run is a folder.", f"Name another: {elsewhere}"
        )
    _refuse_run(folder, elsewhere)
    _leftovers(folder, elsewhere)
    make_folder(folder)
    lock = Lock(folder, elsewhere)
    try:
        _refuse_run(folder, elsewhere)  # it may have saved before it gave up the lock
        run = RunFolder(folder, uuid.uuid4().hex, retention, lock, elsewhere)
        for path in _leftovers(folder, elsewhere)[:-1]:
            remove_file(path)
        # The configuration comes last, and makes it a run: one that is killed here begins again.
        run.store.make()
        write_text(os.path.join(folder, CONFIG), _signed(run.id, settings))
    except BaseException:
        lock.release()
        raise
    return run


def reopen(folder: str, retention: Retention, *, write: bool = True, elsewhere: str | Command = OTHER_RUN) -> RunFolder:
    """An existing run. Raises `Conflict` where its files are something else's."""
    lines = ((HISTORY, "event"), (METRICS, "step"))
    if wrong := [name for name, key in lines if not _is_of(os.path.join(folder, name), key)]:
        raise _not_ours(folder, wrong, elsewhere)
    number, _ = recorded(folder)
    run = RunFolder(folder, number, retention, Lock(folder, elsewhere) if write else None, elsewhere)
    if write:
        run.store.sweep()
    return run


def is_run(folder: str) -> bool:
    """True for a folder with a configuration that a run wrote."""
    path = os.path.join(folder, CONFIG)
    return os.path.isfile(path) and _run_of(read_small_text(path, "a configuration", MAX_CONFIG)) is not None


def recorded(folder: str) -> tuple[str, str]:
    """The id of a run, and its run.yaml. Raises `UsageError` for a folder that is no run."""
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        if has_checkpoints(folder):
            raise _without_config(folder, OTHER_RUN)
        raise UsageError(f"{folder} is not a run: it has no run.yaml", "", f"Start one: {command('train', 'run.yaml')}")
    text = read_small_text(path, "the configuration of a run", MAX_CONFIG)
    number = _run_of(text)
    if number is None:
        raise Conflict(f"{path} does not say which run it is", "Its first line was changed.")
    return number, text


def _refuse_run(folder: str, elsewhere: str | Command) -> None:
    """Raises `Conflict` for a folder with checkpoints, whichever run they are of."""
    if not has_checkpoints(folder):
        return
    if is_run(folder):
        raise Conflict(
            f"{folder} is a run already",
            "It was left as it is.",
            f"Resume it: {command('resume', folder)}; or name another folder: {elsewhere}",
        )
    raise _without_config(folder, elsewhere)


def _without_config(folder: str, elsewhere: str | Command) -> Conflict:
    return Conflict(
        f"{folder} holds checkpoints, but no run.yaml of their run",
        "Without it, nobody knows how they were trained. They were left as they are.",
        f"Put run.yaml back, or name another folder: {elsewhere}",
    )


# Whose files they are ------------------------------------------------------------------------------------------------


def _run_of(text: str) -> str | None:
    """The id of the run that wrote a configuration; None for any other text."""
    found = _ID.search(text)
    return found[1] if found else None


def _signed(number: str, settings: dict[str, Any]) -> str:
    """Settings as they lie in the folder of their run."""
    return f"# ckptool run {number}\n{dumped(settings)}"


def dumped(settings: dict[str, Any]) -> str:
    """Settings as YAML."""
    text: str = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)
    return text


def _leftovers(folder: str, elsewhere: str | Command) -> list[str]:
    """The files of a run that was begun and never saved; last its configuration, which says whose the others are.

    Raises `Conflict` for files of these names that no run wrote, or that were changed since.
    """
    number = _written_by(os.path.join(folder, CONFIG))
    history, metrics = os.path.join(folder, HISTORY), os.path.join(folder, METRICS)
    place = os.path.join(folder, CHECKPOINTS)
    sidecars = sorted(filter(_SIDECAR.fullmatch, os.listdir(place))) if os.path.isdir(place) else []
    known: dict[str, Any] = {
        os.path.join(CHECKPOINTS, name): number and (read_json(os.path.join(place, name)) or {}).get("run") == number
        for name in sidecars
    }
    ours = number is not None and _is_of(history, "run", number)
    names = [str(fact.get("name")) for fact in Lines(history).read() if fact.get("event") == "writes"] if ours else []
    known |= dict.fromkeys(filter(_CLAIMED.fullmatch, names), True)
    known |= {METRICS: ours and os.path.lexists(history) and _is_of(metrics, "step"), HISTORY: ours, CONFIG: number}
    there = [name for name in known if os.path.lexists(os.path.join(folder, name))]
    if foreign := [name for name in there if not known[name]]:
        raise _not_ours(folder, foreign, elsewhere)
    return [os.path.join(folder, name) for name in there]


def _not_ours(folder: str, names: Sequence[str], elsewhere: str | Command) -> Conflict:
    them = "them" if len(names) > 1 else "it"
    return Conflict(
        f"{folder} holds {listed(names)}, which this run did not write",
        f"It would overwrite {them}. Nothing was changed.",
        f"Give the run a folder of its own: {elsewhere}; or move {them} away",
    )


def _is_of(path: str, key: str, value: str | None = None) -> bool:
    """True unless a file has lines, and none of them is a run's: with this key, and this value where one is given."""
    if not os.path.lexists(path) or (os.path.isfile(path) and not os.path.getsize(path)):
        return True
    try:
        lines = list(Lines(path).read())
        torn = read_small_text(path, "lines", 1 << 20) if not lines else ""
    except CkptoolError:
        return False
    if lines:
        return any(key in line and value in (None, line[key]) for line in lines)
    return torn.startswith('{"') and "\n" not in torn  # a run was killed in its first line


def _written_by(path: str) -> str | None:
    """The id of the run that wrote a configuration just as it is; None for one that a person wrote, or changed."""
    try:
        text = read_small_text(path, "a configuration", MAX_CONFIG)
        number = _run_of(text)
        return number if number and _signed(number, yaml.safe_load(text)) == text else None
    except (CkptoolError, yaml.YAMLError, ValueError, RecursionError):
        return None


# The environment -----------------------------------------------------------------------------------------------------


def environment(world_size: int, device: torch.device) -> dict[str, Any]:
    """Facts that change bits, or help to find out why they differ: versions, device, threads, host."""
    import torch

    return {
        "ckptool": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "device": str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "world": world_size,
        "argv": sys.argv,
        "git": _git(),
    }


@functools.cache
def _git() -> str | None:
    """The commit of the working folder, if it is in a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
