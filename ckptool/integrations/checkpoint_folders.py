"""Checkpoint folders written by another library: staged under a hidden name, synced, then renamed.

A sidecar in the folder has the size and sha256 of every file. It is written last, so it says that the others are whole.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ckptool.checkpoint.paths import file_problem
from ckptool.errors import Corrupt, printable
from ckptool.output import make_folder
from ckptool.output.folders import move_folder
from ckptool.training.store import SavedState, file_digest, newest_whole, read_json, write_json

SIDECAR = "ckptool.json"
STAGING = ".ckptool-staging"


def staged(target: str, *, make: bool = True) -> str:
    """The path to write a checkpoint to until it is complete, without what a killed run left there.

    make: make the folder that it is in, which one process does, before the others write.
    """
    folder = os.path.join(os.path.dirname(target), STAGING)
    if make:
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
    return os.path.join(folder, os.path.basename(target))


def commit_folder(temporary: str, target: str, step: int) -> None:
    """Makes a complete checkpoint, written to the path that `staged` gave, visible; one that is there is replaced."""
    describe(temporary, step)
    move_folder(temporary, target)
    with suppress(OSError):
        os.rmdir(os.path.dirname(temporary))


def describe(folder: str, step: int) -> None:
    """Writes the sidecar of a folder. Raises `FileProblem`."""
    paths = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names if name != SIDECAR]
    files = {}
    for path in sorted(paths):
        files[os.path.relpath(path, folder)] = {"bytes": os.path.getsize(path), "sha256": file_digest(path)}
        _sync(path)
    write_json(os.path.join(folder, SIDECAR), {"step": step, "files": files})


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise file_problem(error, path, "write") from error
    finally:
        os.close(fd)


def remove_checkpoint(path: str) -> None:
    """Deletes a checkpoint. It loses its name first: no kill leaves a part of it visible."""
    hidden = staged(path)
    with suppress(FileNotFoundError):
        os.rename(path, hidden)
    shutil.rmtree(os.path.dirname(hidden), ignore_errors=True)


def saved_folders(folder: str, name: re.Pattern[str]) -> list[SavedState]:
    """The checkpoints in a folder, oldest first, whole or not. name: matches theirs, with the step as its group."""
    found = []
    for each in os.listdir(folder) if os.path.isdir(folder) else ():
        if match := name.fullmatch(each):
            path = os.path.join(folder, each)
            found.append(SavedState(int(match[1]), path, read_json(os.path.join(path, SIDECAR))))
    return sorted(found, key=lambda saved: saved.step)


def newest_folder(folder: str, name: re.Pattern[str], say: Callable[[str], Any]) -> SavedState | None:
    """The newest whole checkpoint in a folder, None where there is none at all; says which it skipped, and why.

    Raises `NoneValid` where all are damaged or incomplete.
    """
    there = saved_folders(folder, name)
    return newest_whole(
        folder, there, check_folder, lambda saved, error: say(f"skipped {printable(saved.path)}: {error.what}")
    )


def check_folder(saved: SavedState) -> None:
    """Raises `Corrupt` unless every file of a checkpoint is what its sidecar says."""
    files = (saved.sidecar or {}).get("files")
    if not isinstance(files, dict):
        raise Corrupt(f"{saved.path} has no {SIDECAR}", "It is incomplete, or was not committed by ckptool.")
    if (saved.sidecar or {}).get("step") != saved.step:
        raise Corrupt(f"the sidecar of {saved.path} belongs to another step", "Folders were renamed.")
    for name, facts in files.items():
        path = os.path.join(saved.path, name)
        if os.path.isabs(name) or ".." in name.split(os.sep) or not isinstance(facts, dict):
            raise Corrupt(f"the sidecar of {saved.path} names {name}", "That is not a file of it.")
        try:
            status = os.lstat(path)
        except (OSError, ValueError) as error:
            raise Corrupt(f"{path} is missing", "The checkpoint was changed after it was saved.") from error
        if not stat.S_ISREG(status.st_mode) or status.st_size != facts.get("bytes"):
            raise Corrupt(
                f"{path} has {status.st_size:,} bytes, not those of its sidecar", "It was truncated, or overwritten."
            )
        if file_digest(path) != facts.get("sha256"):
            raise Corrupt(f"{path} does not match its sha256", "Its bytes were damaged after it was saved.")
