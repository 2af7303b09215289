"""A run's folder: its configuration, what happened to it, its metrics, its lock and its checkpoints."""

from __future__ import annotations

import functools
import os
import platform
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ckptool import __version__
from ckptool.commands import Advice, command
from ckptool.errors import Conflict, FileProblem, UsageError, printable
from ckptool.files import read_small_text
from ckptool.output import make_folder
from ckptool.training import configfile
from ckptool.training.config import Config
from ckptool.training.layout import CONFIG, HISTORY, METRICS
from ckptool.training.owned import left_behind, named, not_ours, refuse_others, run_of
from ckptool.training.recorded import last_config
from ckptool.training.retention import Policy, best, every, keep, last
from ckptool.training.store import Lines, Lock, Saved, Store, has_checkpoints, has_its_size, remove_file, write_text

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Run:
    """An open run. Only its first process holds the lock and writes.

    revision: how often its configuration was changed.  fingerprint: of the user's files and the data that it runs with.
    """

    folder: str
    id: str
    config: Config
    store: Store
    history: Lines
    metrics: Lines
    lock: Lock | None
    revision: int = 0
    fingerprint: dict[str, Any] = field(default_factory=dict)

    def note(self, event: str, **facts: Any) -> None:
        """Adds an event to the history, with the time of day, synced."""
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.history.add({"event": event, **facts, "time": time, "run": self.id}, sync=True)

    def claim(self, name: str) -> None:
        """Notes a file that the run writes besides. Raises `Conflict` where one is there of which the history knows nothing."""
        if any(fact.get("event") == "writes" and fact.get("name") == name for fact in self.history.read()):
            return
        if os.path.lexists(os.path.join(self.folder, name)):
            raise not_ours(self.folder, [name])
        self.note("writes", name=name)

    def policies(self) -> dict[str, Policy]:
        """What the configuration wants to keep."""
        save, metric = self.config.save, self.config.eval
        return {
            "last": last(save.keep_last),
            "best": best(save.keep_best, metric.metric, metric.mode),
            "every": every(save.keep_every),
        }

    def prune(self) -> list[Saved]:
        """Deletes what no policy keeps; returns it."""
        _, gone = kept_of(self)
        for saved in gone:
            self.store.remove(saved)
        return gone


def kept_of(run: Run) -> tuple[dict[int, list[str]], list[Saved]]:
    """The steps that stay, each with why, and the checkpoints that no policy keeps.

    Damaged ones stay, and do not count: they are for a person to look at.
    """
    whole = [saved for saved in run.store.all() if has_its_size(saved)]
    kept = keep([saved.kept for saved in whole], run.policies())
    return kept, [saved for saved in whole if saved.step not in kept]


def opened_for_change(folder: str, changes: Sequence[str], *, write: bool) -> Run:
    """A run that is there, its configuration changed for once."""
    _, config = read_config(folder)
    values = {**config.dumped(), "run": folder}
    return reopen(folder, configfile.changed(values, changes, os.path.join(folder, CONFIG)), write=write)


def is_run(folder: str) -> bool:
    """True for a folder with a configuration that a run wrote."""
    path = os.path.join(folder, CONFIG)
    return os.path.isfile(path) and run_of(read_small_text(path, "a configuration", configfile.MAX_FILE)) is not None


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
    left_behind(folder)
    make_folder(folder)
    lock = Lock(folder)
    try:
        _refuse_run(folder)  # it may have saved before it gave up the lock
        number = uuid.uuid4().hex
        run = Run(folder, number, config, *_files(folder, number, lock))
        for path in left_behind(folder)[:-1]:
            remove_file(path)
        # The configuration comes last, and makes it a run: one that is killed here begins again.
        run.store.make()
        write_text(os.path.join(folder, CONFIG), named(run.id, config))
    except BaseException:
        lock.release()
        raise
    return run


def _refuse_run(folder: str) -> None:
    """Raises `Conflict` for a folder with checkpoints, whichever run they are of."""
    if not has_checkpoints(folder):
        return
    if is_run(folder):
        raise Conflict(
            f"{printable(folder)} is a run already",
            "It was left as it is.",
            Advice("Go on with it: ", command("resume", folder), "; or name another folder: --set run=OTHER"),
        )
    raise _without_config(folder)


def _without_config(folder: str) -> Conflict:
    return Conflict(
        f"{printable(folder)} holds checkpoints, and no run.yaml of their run",
        "Without it nothing says how they were trained. They were left as they are.",
        "Put run.yaml back, or name another folder: --set run=OTHER",
    )


def read_config(folder: str) -> tuple[str, Config]:
    """The id and the configuration of a run, as it was last changed. Raises `UsageError` for a folder that is none."""
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
    number = run_of(text)
    if number is None:
        raise Conflict(f"{printable(path)} does not say which run it is", "Its first line was changed.")
    config = configfile.parsed(text, path)
    revision, values = last_config(folder, number, {})
    return number, configfile.checked({**values, "run": config.run}, path) if values else config, revision


def reopen(folder: str, config: Config, *, write: bool = True) -> Run:
    """A run that is there, with a configuration that was found to fit it. Raises `Conflict` where its files are something else's."""
    refuse_others(folder)
    number, _, revision = _recorded(folder)
    lock = Lock(folder) if write else None
    return Run(folder, number, config, *_files(folder, number, lock), revision)


def _files(folder: str, number: str, lock: Lock | None) -> tuple[Store, Lines, Lines, Lock | None]:
    history, metrics = (Lines(os.path.join(folder, name)) for name in (HISTORY, METRICS))
    return Store(folder, number), history, metrics, lock


def environment(world_size: int, device: torch.device) -> dict[str, Any]:
    """What changes bits, or helps to find out why: versions, device, threads, where it ran."""
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
