"""Checkpoint folders written by another library: staged under a hidden name, synced, then renamed.

A sidecar in the folder has the size and sha256 of every file. It is written last, so it says that the others are whole.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckptool.checkpoint.paths import file_problem
from ckptool.errors import Corrupt, printable
from ckptool.output import make_folder
from ckptool.output.folders import move_folder
from ckptool.training.store import SavedState, file_digest, newest_whole, read_json, write_json

SIDECAR = "ckptool.json"
STAGING = ".ckptool-staging"
Say = Callable[[str], Any]


@contextmanager
def committed(target: str, step: int, main: bool, wait: Callable[[], Any]) -> Iterator[str]:
    """The path where all processes write a checkpoint, which is complete when the body ends, and gets its name.

    main: true in the process that makes folders, and removes what a killed run left.  wait: waits for all processes.
    """
    hidden = os.path.join(os.path.dirname(target), STAGING)
    temporary = os.path.join(hidden, os.path.basename(target))
    if main:
        shutil.rmtree(hidden, ignore_errors=True)
        make_folder(hidden)
    wait()
    yield temporary
    wait()
    if main:
        describe(temporary, step)
        move_folder(temporary, target)
        shutil.rmtree(hidden, ignore_errors=True)
    wait()


def rotate(paths: Sequence[str], keep: int) -> None:
    """Deletes all but the last `keep` checkpoints. Each loses its name first: no kill leaves a part of it visible."""
    for path in paths[: max(0, len(paths) - max(0, keep))]:
        hidden = os.path.join(os.path.dirname(path), STAGING)
        shutil.rmtree(hidden, ignore_errors=True)
        make_folder(hidden)
        os.rename(path, os.path.join(hidden, os.path.basename(path)))
        shutil.rmtree(hidden, ignore_errors=True)


def describe(folder: str, step: int) -> None:
    """Syncs the files of a folder, and writes its sidecar. Raises `FileProblem`."""
    files = _files(folder)
    for path in files.values():
        try:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise file_problem(error, path, "write") from error
    facts = {name: {"bytes": os.path.getsize(path), "sha256": file_digest(path)} for name, path in files.items()}
    write_json(os.path.join(folder, SIDECAR), {"step": step, "files": facts})


def _files(folder: str) -> dict[str, str]:
    """The paths of the files in a folder, and in those in it, by their names there."""
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names if name != SIDECAR)
    return {os.path.relpath(path, folder): path for path in sorted(paths) if stat.S_ISREG(os.lstat(path).st_mode)}


def saved_folders(folder: str, name: re.Pattern[str]) -> list[SavedState]:
    """The checkpoints in a folder, oldest first, whole or not. name: matches theirs, with the step as its group."""
    matches = [
        found for each in (os.listdir(folder) if os.path.isdir(folder) else ()) if (found := name.fullmatch(each))
    ]
    paths = {os.path.join(folder, found[0]): int(found[1]) for found in matches}
    there = [SavedState(step, path, read_json(os.path.join(path, SIDECAR))) for path, step in paths.items()]
    return sorted(there, key=lambda saved: saved.step)


def newest_folder(folder: str, name: re.Pattern[str], say: Say) -> str | None:
    """The newest whole checkpoint in a folder; see `newest`."""
    return newest(folder, saved_folders(folder, name), check_folder, say)


def newest(folder: str, there: list[SavedState], check: Callable[[SavedState], Any], say: Say) -> str | None:
    """The newest of a folder's checkpoints, oldest first, that `check` does not refuse; None where there are none.

    say: called with which it skipped, and why. Raises `NoneValid` where all are damaged or incomplete.
    """
    found = newest_whole(
        folder, there, check, lambda saved, error: say(f"skipped {printable(saved.path)}: {error.what}")
    )
    return found.path if found else None


def check_folder(saved: SavedState) -> None:
    """Raises `Corrupt` unless every file of a checkpoint is what its sidecar says."""
    sidecar, there = saved.sidecar or {}, _files(saved.path)
    if not isinstance(files := sidecar.get("files"), dict):
        raise Corrupt(f"{saved.path} has no {SIDECAR}", "It is incomplete, or was not committed by ckptool.")
    if sidecar.get("step") != saved.step:
        raise Corrupt(f"the sidecar of {saved.path} belongs to another step", "Folders were renamed.")
    for name, facts in files.items():
        path, known = os.path.join(saved.path, name), facts if isinstance(facts, dict) else {}
        if name not in there:
            raise Corrupt(f"{path} is missing", "The checkpoint was changed after it was saved.")
        if (size := os.path.getsize(path)) != known.get("bytes"):
            raise Corrupt(f"{path} has {size:,} bytes, not those of its sidecar", "It was truncated, or overwritten.")
        if file_digest(path) != known.get("sha256"):
            raise Corrupt(f"{path} does not match its sha256", "Its bytes were damaged after it was saved.")
