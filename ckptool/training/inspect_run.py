"""A run's folder, for `inspect` and `scan`: its checkpoints, their sidecars, and why each is kept. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ckptool.commands import command
from ckptool.errors import CkptoolError, Corrupt, UsageError
from ckptool.formats.opening import PathLike
from ckptool.training import CONFIG, LOOP, is_run
from ckptool.training.reports import GOOD, RunCheckpoint, RunReport
from ckptool.training.run_folder import last_config, recorded, values_of
from ckptool.training.store import Retention, RunFolder, SavedState, check, size_of


def inspect_run(run: PathLike, *, full: bool = False) -> RunReport:
    """The checkpoints of a run, oldest first, and why each is kept; `full` compares their sha256 too, which reads them.

    Raises `UsageError` for a folder that is no run, `Corrupt` for one whose run.yaml cannot be read.
    """
    name = folder_of(run)
    number, text = recorded(name)
    if not (config := values_of(text)):
        path = os.path.join(name, CONFIG)
        raise Corrupt(f"{path} is not the configuration of a run", "It was changed, or damaged.")
    folder = RunFolder(name, number)
    history = list(folder.history.read())
    _, config = last_config(name, number, config)
    sections = {key: value for key, value in config.items() if isinstance(value, dict)}
    save, by, train = (sections.get(key, {}) for key in ("save", "eval", "train"))
    metric, mode = str(by.get("metric", "")), str(by.get("mode", "min"))
    last, best, every = (_count(save, key) for key in ("keep_last", "keep_best", "keep_every"))
    there = folder.all()
    kept, _ = Retention(last, best, every, metric, mode).divide(there)
    rows = tuple(_row(saved, full, kept.get(saved.step, ())) for saved in there)
    event = history[-1] if history else {}
    times = (fact.get("total_seconds") for fact in reversed(history))
    return RunReport(
        name,
        number,
        metric,
        mode,
        event=str(event.get("event", "")),
        step=step if isinstance(step := event.get("step"), int) else None,
        resumes=max((row.step for row in rows if row.state == GOOD), default=None),
        checkpoints=rows,
        epochs=_count(train, "epochs") or None,
        seconds=next((value for value in times if type(value) is float and 0 < value < 1e10), None),
        script=script if isinstance(script := config.get(LOOP), str) else "",
    )


def folder_of(run: PathLike) -> str:
    """The name of a run's folder. Raises `UsageError` for one that is no run."""
    name = os.fspath(run)
    if not is_run(name):
        raise UsageError(f"{name} is not a run: it lacks run.yaml or checkpoints", "", f"Look: {command('scan', name)}")
    return name


def _count(section: dict[str, Any], key: str) -> int:
    value = section.get(key)
    return value if type(value) is int and value > 0 else 0


def _row(saved: SavedState, full: bool, kept: Iterable[str]) -> RunCheckpoint:
    state, problem, size = GOOD, "", 0
    try:
        check(saved, "full" if full else "size")
    except CkptoolError as error:
        state, problem, kept = error.code, error.what, ("damaged",)
    with suppress(CkptoolError):  # where it is gone, `problem` says so
        size = size_of(saved.path)
    facts = saved.sidecar or {}
    epoch, loss = facts.get("epoch"), facts.get("loss")
    epoch, loss = epoch if isinstance(epoch, int) else None, loss if isinstance(loss, float) else None
    return RunCheckpoint(saved.step, saved.path, state, problem, epoch, loss, saved.metrics, size, tuple(kept))
