"""Open files in the place of paths: of the system, in memory, compressed, a part of an archive."""

from __future__ import annotations

import io
import os
import shutil
import stat
from typing import Any

from ckptool.checkpoint.files import Source
from ckptool.errors import FileProblem, Truncated, UsageError

_BINARY = "Open it for reading in binary: open(PATH, 'rb')"


def source_of(file: Any) -> Source:
    """What an open binary file holds from its position on, which is at the end afterwards.

    A regular file of the system that stands at its start is shared, not copied, and stays readable when `file` is
    closed; of anything else (a `BytesIO`, a gzip file, a pipe, a file that stands further on) the rest is copied once
    into memory outside of the heap. Raises `UsageError` for a text file and one that is closed or cannot be read,
    `FileProblem` where reading fails.
    """
    name = getattr(file, "name", None)
    shown = name if type(name) is str and name else f"<{type(file).__name__}>"
    if not callable(getattr(file, "read", None)):
        raise UsageError(f"{repr(file)[:80]} is neither a path nor an open file", "", "Name a file.")
    if isinstance(file, io.TextIOBase) or getattr(file, "encoding", None):
        raise UsageError(f"{shown} is open as text", "A checkpoint is bytes.", _BINARY)
    try:
        fd = _shared(file)
        if fd is not None:
            file.seek(0, os.SEEK_END)
            return Source(shown, fd)
        return Source(shown, _copied(file, shown))
    except (OSError, ValueError) as error:
        why = str(error)[:200]
        if isinstance(error, io.UnsupportedOperation) or not isinstance(error, OSError):
            raise UsageError(f"{shown} cannot be read from", why, _BINARY) from None
        raise FileProblem(f"cannot read {shown}", why) from error


def _shared(file: Any) -> int | None:
    """A second descriptor of a regular file that stands at its start; None for anything else."""
    raw = getattr(file, "raw", file)  # of a buffer; files in memory, archives and compressors have another, or none
    if not isinstance(raw, io.FileIO) or not stat.S_ISREG(os.fstat(raw.fileno()).st_mode) or file.tell():
        return None
    if not file.readable():
        raise io.UnsupportedOperation("it is open for writing only")
    if file.writable():
        file.flush()
    return os.dup(raw.fileno())


def _copied(file: Any, shown: str) -> int:
    """A descriptor of a nameless file with the rest of what `file` holds."""
    import tempfile  # with all kinds of random numbers

    in_memory = hasattr(os, "memfd_create")  # of Linux
    with open(os.memfd_create("ckptool"), "wb") if in_memory else tempfile.TemporaryFile() as copy:
        try:
            shutil.copyfileobj(file, copy, 1 << 20)
        except TypeError:
            raise UsageError(f"{shown} gives no bytes", "A checkpoint is bytes.", _BINARY) from None
        copy.flush()
        if not copy.tell() and file.seekable() and file.tell():
            what = f"{shown} is at its end, so there is nothing to read"
            raise Truncated(what, "An open file is read from its current position.", "Rewind it: file.seek(0)")
        return os.dup(copy.fileno())
