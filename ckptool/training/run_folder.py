"""The folder of a run: created, or opened; who may write to it, and whose its files are; what it holds, for `inspect`
and `scan`; the environment of a run.

Nothing here needs torch but `environment`.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from ckptool import __version__
from ckptool.checkpoint.files import read_small_text
from ckptool.checkpoint.paths import file_problem
from ckptool.commands import Command, command
from ckptool.errors import CkptoolError, Conflict, Corrupt, FileProblem, UsageError
from ckptool.formats import PathLike
from ckptool.output import make_folder, sweep_folder
from ckptool.output.durable import write_problems
from ckptool.training import CHANGED, CONFIG, HISTORY, LOOP, METRICS
from ckptool.training import is_run as seems_run
from ckptool.training.reports import GOOD, RunCheckpoint, RunReport
from ckptool.training.store import OTHER_RUN, Retention, RunFolder, check, checkpoints_in, not_ours, size_of, write_text

if TYPE_CHECKING:
    import torch

    from ckptool.training.parallel import World

MAX_CONFIG = 1 << 20
_ID = re.compile(r"# ckptool run ([0-9a-f]{32})\n")


def to_stderr(text: str) -> None:
    """Prints a note of a run in a user's own loop."""
    sys.stderr.write(f"ckptool: {text}\n")


def create(folder: str, settings: dict[str, Any], retention: Retention) -> RunFolder:
    """A new run in its folder; one that was begun there and never saved begins again. settings: recorded in run.yaml.

    Raises `Conflict` where there is one already, or files that no run wrote, `FileProblem` where it cannot be made.
    """
    run = RunFolder(folder, secrets.token_hex(16), retention, by_script=LOOP in settings)
    elsewhere = run.elsewhere
    if os.path.lexists(folder) and not os.path.isdir(folder):
        what = f"cannot make the run {folder}: it is a file"
        raise FileProblem(what, "A run is a folder.", f"Name another: {elsewhere}")
    _refuse_run(folder, elsewhere)
    if is_run(folder):  # which was begun here, and never saved
        run.id = recorded(folder)[0]
    elif names := [name for name in (METRICS, HISTORY, CONFIG) if os.path.lexists(os.path.join(folder, name))]:
        raise not_ours(folder, names, elsewhere)
    make_folder(folder)
    run.lock = Lock(folder, elsewhere)
    try:
        _refuse_run(folder, elsewhere)  # another process may have saved before it released the lock
        make_folder(run.checkpoints)
        # The history of a run that never saved is dropped, but for the names of the files that it wrote.
        run.history.keep(lambda fact: fact.get("event") == "writes")
        # The configuration comes last, and makes the folder a run: a process killed before it begins again.
        write_text(os.path.join(folder, CONFIG), f"# ckptool run {run.id}\n{dumped(settings)}")
    except BaseException:
        run.close()
        raise
    return run


def reopen(folder: str, retention: Retention, *, write: bool = True) -> RunFolder:
    """An existing run."""
    run_id, values = recorded(folder)
    run = RunFolder(folder, run_id, retention, by_script=LOOP in values)
    if write:
        run.lock = Lock(folder, run.elsewhere)
        make_folder(run.checkpoints)
        sweep_folder(run.checkpoints)
    return run


def opened(folder: str, settings: dict[str, Any], retention: Retention, world: World, *, goes_on: bool) -> RunFolder:
    """A new run, or with `goes_on` an existing one. Only the first process creates it and has its lock."""
    begin = partial(reopen, folder) if goes_on else partial(create, folder, settings)
    runs: list[RunFolder] = []
    world.first(lambda: runs.append(begin(retention)))
    return runs[0] if runs else reopen(folder, retention, write=False)


def is_run(folder: str) -> bool:
    """True for a folder with a configuration that a run wrote."""
    path = os.path.join(folder, CONFIG)
    return os.path.isfile(path) and _ID.search(read_small_text(path, "a configuration", MAX_CONFIG)) is not None


def recorded(folder: str) -> tuple[str, dict[str, Any]]:
    """The id of a run, and its configuration as it was last changed; run.yaml is written only once.

    Each change is in the history before a checkpoint is saved with it, whose sidecar has it too; so nothing is lost
    with a history that was deleted. Raises `UsageError` for a folder that is no run, `Corrupt` for a damaged run.yaml.
    """
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        if os.path.isdir(folder) and checkpoints_in(folder):
            raise _without_config(folder, OTHER_RUN)
        raise _no_run(folder, "it has no run.yaml", f"Start one: {command('train', 'run.yaml')}")
    text = read_small_text(path, "the configuration of a run", MAX_CONFIG)
    if (match := _ID.search(text)) is None:
        raise Corrupt(f"{path} is not a run's configuration", "It does not begin with the run's id.")
    if not (values := values_of(text)):
        raise Corrupt(f"{path} is not a run's configuration", "It was changed, or damaged.")
    run = RunFolder(folder, match[1])
    facts = [saved.sidecar or {} for saved in run.all()]
    facts += (fact for fact in run.history.read() if fact.get("event") == CHANGED)
    return match[1], [values, *(changed for fact in facts if isinstance(changed := fact.get("config"), dict))][-1]


# Whose files they are ------------------------------------------------------------------------------------------------


def _refuse_run(folder: str, elsewhere: str | Command) -> None:
    """Raises `Conflict` for a folder with checkpoints, whichever run they are of."""
    if not checkpoints_in(folder):
        return
    if is_run(folder):
        what = f"{folder} is a run already"
        why = "It was left as it is."
        raise Conflict(what, why, f"Resume it: {command('resume', folder)}; or name another folder: {elsewhere}")
    raise _without_config(folder, elsewhere)


def _without_config(folder: str, elsewhere: str | Command) -> Conflict:
    return Conflict(
        f"{folder} holds checkpoints, but no run.yaml of their run",
        "Without it, nothing says how they were trained. They were left as they are.",
        f"Put run.yaml back, or name another folder: {elsewhere}",
    )


def dumped(settings: dict[str, Any]) -> str:
    """Settings as YAML."""
    text: str = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)
    return text


def values_of(text: str) -> dict[str, Any]:
    """The values of a run.yaml; none if it is damaged, which is for the caller to report."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


# The right to write --------------------------------------------------------------------------------------------------

PATIENCE = 2.0  # seconds: a killed process holds its lock until all of it is gone
_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Releases locks in a child: a loader's worker may outlive a killed trainer by seconds."""
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


class Lock:
    """The right to write to a run's folder: one process at a time, on every machine that sees the folder; held until
    the process ends, however it ends. elsewhere: what to type for another folder.
    """

    def __init__(self, folder: str, elsewhere: str | Command = OTHER_RUN) -> None:
        path = os.path.join(folder, "lock")
        with write_problems(path):
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        _HELD.add(self)
        deadline = time.monotonic() + PATIENCE
        try:
            while True:
                try:
                    fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        holder = os.pread(self.fd, 300, 0).decode("utf-8", "replace").strip()
                        what = f"{folder} is being written by another process ({holder or 'unknown'})"
                        fix = f"Wait for it, stop it, or name another folder: {elsewhere}"
                        raise Conflict(what, "Two trainers in one run would mix their checkpoints.", fix) from None
                    time.sleep(0.05)
            content = os.pread(self.fd, 300, 0)
            if not content or content.startswith(b"pid "):  # else it is not ours: a lock works without a name in it
                os.ftruncate(self.fd, 0)
                os.pwrite(self.fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.release()
            why = "Without a lock, two trainers could mix their files."
            raise FileProblem(f"cannot lock {path}: {error.strerror}", why) from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Releases the lock."""
        if self.fd >= 0:
            _HELD.discard(self)
            os.close(self.fd)
            self.fd = -1


# What it holds --------------------------------------------------------------------------------------------------------


def inspect_run(run: PathLike, *, full: bool = False) -> RunReport:
    """The checkpoints of a run, oldest first, and why each is kept; `full` compares their sha256 too, which reads them.

    Raises `UsageError` for a folder that is not a run, `Corrupt` for one whose run.yaml cannot be read.
    """
    name = folder_of(run)
    run_id, config = recorded(name)
    folder = RunFolder(name, run_id)
    history = list(folder.history.read())
    sections = {key: value for key, value in config.items() if isinstance(value, dict)}
    save, evaluation, train = (sections.get(key, {}) for key in ("save", "eval", "train"))
    metric, mode = str(evaluation.get("metric", "")), str(evaluation.get("mode", "min"))
    last, best, every = (_count(save, key) for key in ("keep_last", "keep_best", "keep_every"))
    checkpoints, rows = folder.all(), list[RunCheckpoint]()
    rules, _ = Retention(last, best, every, metric, mode).divide(checkpoints)
    for saved in checkpoints:
        state, problem, reasons, size = GOOD, "", tuple(rules.get(saved.step, ())), 0
        try:
            check(saved, "full" if full else "size")
        except CkptoolError as error:
            if not os.path.lexists(saved.path):  # the run has deleted it meanwhile
                continue
            state, problem, reasons = error.code, error.what, ("damaged",)
        with suppress(CkptoolError):  # if a part is gone, `problem` says so
            size = size_of(saved.path)
        facts = saved.sidecar or {}
        epoch, loss = facts.get("epoch"), facts.get("loss")
        epoch, loss = epoch if isinstance(epoch, int) else None, loss if isinstance(loss, float) else None
        rows.append(RunCheckpoint(saved.step, saved.path, state, problem, epoch, loss, saved.metrics, size, reasons))
    event = history[-1] if history else {}
    times = (fact.get("total_seconds") for fact in reversed(history))
    return RunReport(
        name,
        run_id,
        metric,
        mode,
        event=str(event.get("event", "")),
        step=step if isinstance(step := event.get("step"), int) else None,
        resumes=max((row.step for row in rows if row.state == GOOD), default=None),
        checkpoints=tuple(rows),
        epochs=_count(train, "epochs") or None,
        seconds=next((value for value in times if type(value) is float and 0 < value < 1e10), None),
        script=script if isinstance(script := config.get(LOOP), str) else "",
    )


def folder_of(run: PathLike) -> str:
    """The name of a run's folder. Raises `UsageError` for one that is no run."""
    name = os.fspath(run)
    if not seems_run(name):
        raise _no_run(name, "it lacks run.yaml or checkpoints", f"Look: {command('scan', name)}")
    return name


def _no_run(folder: str, why: str, fix: str) -> CkptoolError:
    """The error for a folder that is no run."""
    if not os.path.exists(folder):
        return file_problem(FileNotFoundError(errno.ENOENT, ""), folder, "find")  # at a URL nobody looked
    parents = [os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))]
    fix = next((f"It is a part of a run: name {parent}" for parent in parents if parent and seems_run(parent)), fix)
    return UsageError(f"{folder} is not a run: {why}", "", fix)


def _count(section: dict[str, Any], key: str) -> int:
    value = section.get(key)
    return value if type(value) is int and value > 0 else 0


# The environment -----------------------------------------------------------------------------------------------------


def environment(world_size: int, device: torch.device) -> dict[str, Any]:
    """Facts that change bits, or help to explain why they differ: versions, device, threads, host."""
    import platform

    import torch

    return {
        "ckptool": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
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
        process = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None
