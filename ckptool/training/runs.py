"""A run's folder: its configuration, what happened to it, its metrics, its lock and its checkpoints.

No file that the run itself did not write is ever changed or deleted: it is named, and the run does not begin.
"""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ckptool import __version__
from ckptool.checkpoint.commands import Advice, command
from ckptool.checkpoint.files import read_small_text
from ckptool.checkpoint.paths import file_problem
from ckptool.errors import CkptoolError, Conflict, FileProblem, UsageError, listed, printable
from ckptool.output import make_folder
from ckptool.training import CHECKPOINTS, CONFIG, HISTORY, METRICS, configfile
from ckptool.training.config import Config
from ckptool.training.store import (
    Lines,
    Retention,
    SavedState,
    Store,
    has_checkpoints,
    last_config,
    read_json,
    remove_file,
    write_text,
)

if TYPE_CHECKING:
    import torch

_ID = re.compile(r"# ckptool run ([0-9a-f]{32})\n")
_SIDECAR = re.compile(r"step-\d{8,}\.json")


@dataclass(slots=True)
class Run:
    """An open run. Only its first process holds the lock and writes.

    revision: how often its configuration was changed.  fingerprint: of the user's files and the data that it runs with.
    """

    folder: str
    id: str
    config: Config
    lock: Lock | None
    revision: int = 0
    fingerprint: dict[str, Any] = field(default_factory=dict)
    store: Store = field(init=False)
    history: Lines = field(init=False)
    metrics: Lines = field(init=False)

    def __post_init__(self) -> None:
        self.store = Store(self.folder, self.id)
        self.history, self.metrics = (Lines(os.path.join(self.folder, name)) for name in (HISTORY, METRICS))

    def note(self, event: str, **facts: Any) -> None:
        """Adds an event to the history, with the time of day, synced."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.history.add({"event": event, **facts, "time": now, "run": self.id}, sync=True)

    def claim(self, name: str) -> None:
        """Notes another file that the run writes. Raises `Conflict` where one is there, not known to the history."""
        if any(fact.get("event") == "writes" and fact.get("name") == name for fact in self.history.read()):
            return
        if os.path.lexists(os.path.join(self.folder, name)):
            raise _not_ours(self.folder, [name])
        self.note("writes", name=name)

    @property
    def retention(self) -> Retention:
        """The checkpoints that the configuration wants to keep."""
        save, by = self.config.save, self.config.eval
        return Retention(save.keep_last, save.keep_best, save.keep_every, by.metric, by.mode)

    def prune(self) -> list[SavedState]:
        """Deletes the checkpoints that retention does not keep; returns them."""
        _, gone = self.retention.divide(self.store.all())
        for saved in gone:
            self.store.remove(saved)
        return gone

    def close(self) -> None:
        """Gives up the lock."""
        if self.lock is not None:
            self.lock.release()


# Opening -------------------------------------------------------------------------------------------------------------


def create(config: Config) -> Run:
    """A new run in its folder, also where one was begun that never saved anything.

    Raises `Conflict` where there is one already, `FileProblem` where it cannot be made.
    """
    folder = config.run
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise FileProblem(
            f"cannot make the run {printable(folder)}: it is a file",
            "A run is a folder.",
            "Name another: --set run=OTHER",
        )
    _refuse_run(folder)
    _leftovers(folder)
    make_folder(folder)
    lock = Lock(folder)
    try:
        _refuse_run(folder)  # it may have saved before it gave up the lock
        run = Run(folder, uuid.uuid4().hex, config, lock)
        for path in _leftovers(folder)[:-1]:
            remove_file(path)
        # The configuration comes last, and makes it a run: one that is killed here begins again.
        run.store.make()
        write_text(os.path.join(folder, CONFIG), _signed(run.id, config))
    except BaseException:
        lock.release()
        raise
    return run


def reopen(folder: str, config: Config, *, write: bool = True) -> Run:
    """An existing run, with a configuration that fits it. Raises `Conflict` where its files are something else's."""
    lines = ((HISTORY, "event"), (METRICS, "step"))
    if wrong := [name for name, key in lines if not _is_of(os.path.join(folder, name), key)]:
        raise _not_ours(folder, wrong)
    number, _, revision = _recorded(folder)
    return Run(folder, number, config, Lock(folder) if write else None, revision)


def reopen_changed(folder: str, changes: Sequence[str], *, write: bool) -> Run:
    """An existing run, its configuration changed for this once."""
    _, config = read_config(folder)
    changed = configfile.changed({**config.dumped(), "run": folder}, changes, os.path.join(folder, CONFIG))
    return reopen(folder, changed, write=write)


def is_run(folder: str) -> bool:
    """True for a folder with a configuration that a run wrote."""
    path = os.path.join(folder, CONFIG)
    return os.path.isfile(path) and _run_of(read_small_text(path, "a configuration", configfile.MAX_FILE)) is not None


def read_config(folder: str) -> tuple[str, Config]:
    """The id of a run, and its configuration as last changed. Raises `UsageError` for a folder that is no run."""
    number, config, _ = _recorded(folder)
    return number, config


def _recorded(folder: str) -> tuple[str, Config, int]:
    """The id of a run, its configuration, and how often that was changed."""
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        if has_checkpoints(folder):
            raise _without_config(folder)
        raise UsageError(
            f"{printable(folder)} is not a run: it has no run.yaml", "", "Start one: ckptool train run.yaml"
        )
    text = read_small_text(path, "the configuration of a run", configfile.MAX_FILE)
    number = _run_of(text)
    if number is None:
        raise Conflict(f"{printable(path)} does not say which run it is", "Its first line was changed.")
    config = configfile.parsed(text, path)
    revision, values = last_config(folder, number, {})
    return number, configfile.checked({**values, "run": config.run}, path) if values else config, revision


def _refuse_run(folder: str) -> None:
    """Raises `Conflict` for a folder with checkpoints, whichever run they are of."""
    if not has_checkpoints(folder):
        return
    if is_run(folder):
        raise Conflict(
            f"{printable(folder)} is a run already",
            "It was left as it is.",
            Advice("Resume it: ", command("resume", folder), "; or name another folder: --set run=OTHER"),
        )
    raise _without_config(folder)


def _without_config(folder: str) -> Conflict:
    return Conflict(
        f"{printable(folder)} holds checkpoints, but no run.yaml of their run",
        "Without it, nobody knows how they were trained. They were left as they are.",
        "Put run.yaml back, or name another folder: --set run=OTHER",
    )


# Whose files they are ------------------------------------------------------------------------------------------------


def _run_of(text: str) -> str | None:
    """The id of the run that wrote a configuration; None for any other text."""
    found = _ID.search(text)
    return found[1] if found else None


def _signed(number: str, config: Config) -> str:
    """A configuration as it lies in the folder of its run."""
    return f"# ckptool run {number}\n{configfile.written(config)}"


def _leftovers(folder: str) -> list[str]:
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
    known |= {METRICS: ours and os.path.lexists(history) and _is_of(metrics, "step"), HISTORY: ours, CONFIG: number}
    there = [name for name in known if os.path.lexists(os.path.join(folder, name))]
    if foreign := [name for name in there if not known[name]]:
        raise _not_ours(folder, foreign)
    return [os.path.join(folder, name) for name in there]


def _not_ours(folder: str, names: Sequence[str]) -> Conflict:
    them = "them" if len(names) > 1 else "it"
    return Conflict(
        f"{printable(folder)} holds {listed([printable(name) for name in names])}, which this run did not write",
        f"It would overwrite {them}. Nothing was changed.",
        f"Give the run a folder of its own: --set run=OTHER; or move {them} away",
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
        text = read_small_text(path, "a configuration", configfile.MAX_FILE)
        number = _run_of(text)
        return number if number and _signed(number, configfile.parsed(text, path)) == text else None
    except CkptoolError:
        return None


# Who writes ----------------------------------------------------------------------------------------------------------


PATIENCE = 2.0  # seconds: a process that was killed gives its lock up only when all of it is gone
_HELD: set[int] = set()
_HOLDER = re.compile(rb"pid [0-9]+[^\n]*\n?")


def _close_in_child() -> None:
    """A loader's worker outlives a trainer that was killed by some seconds, and must not hold the run meanwhile."""
    for fd in _HELD:
        os.close(fd)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Lock:
    """The right to write to a run's folder; held until the process ends, however it ends."""

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, "lock")
        there = os.path.lexists(path)
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise file_problem(error, path, "write") from error
        try:
            self._take(path, there)
        except OSError as error:
            os.close(self.fd)
            raise FileProblem(
                f"cannot lock {printable(path)}: {error.strerror}", "Without a lock two trainers could mix their files."
            ) from error
        except BaseException:
            os.close(self.fd)
            raise
        _HELD.add(self.fd)

    def _take(self, path: str, there: bool) -> None:
        self._wait(path)
        held = os.pread(self.fd, 300, 0)
        if held and not _HOLDER.fullmatch(held):
            raise Conflict(
                f"{printable(path)} is not the lock of a run",
                "A run would overwrite it. It was left as it is.",
                "Move it away, or give the run a folder of its own: --set run=OTHER",
            )
        if held or not there:  # an empty one may be anybody's: a lock works without a name in it
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _wait(self, path: str) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    break
                time.sleep(0.05)
        holder = os.pread(self.fd, 200, 0).decode("utf-8", "replace").strip()
        folder = printable(os.path.dirname(path))
        raise Conflict(
            f"{folder} is being written by another process ({printable(holder) or 'unknown'})",
            "Two trainers on one run would mix their checkpoints.",
            "Wait for it, stop it, or name another folder: --set run=OTHER",
        )

    def release(self) -> None:
        """Gives the right up."""
        if self.fd >= 0:
            _HELD.discard(self.fd)
            os.close(self.fd)
            self.fd = -1


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
