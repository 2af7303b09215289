"""Where a path leads from the working directory, which may be gone."""

from __future__ import annotations

import os

from ckptool.errors import FileProblem, printable


def absolute(path: str | os.PathLike[str]) -> str:
    """The path from the root on. Raises `FileProblem` for a name that no file can have, and for a relative one where the working
    directory was removed.
    """
    if "\0" in os.fspath(path):
        raise FileProblem(
            f"cannot use {printable(os.fspath(path))}: it has a NUL character", "No file can have such a name."
        )
    try:
        return os.path.abspath(path)
    except OSError as error:
        raise FileProblem(
            f"cannot find {printable(os.fspath(path))}: the working directory is gone",
            "The folder that this was started in has been removed, or replaced by another of the same name.",
            'Enter it again: cd "$PWD"; or name files from the root on.',
        ) from error
