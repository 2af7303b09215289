"""Input files: opened once, read with `pread`, never mapped.

A mapped file that another process cuts short kills the reader with SIGBUS; a read that comes back short is an error
with words. The descriptor stays open for as long as anything refers to it, so a checkpoint stays readable after its
file was replaced or unlinked. A checkpoint of several files is a `Folder`, which opens each of them once.
"""

from __future__ import annotations

import errno
import os
import stat

from ckptool.errors import (
    Corrupt,
    FileChanged,
    FileProblem,
    LimitExceeded,
    NotACheckpoint,
    Truncated,
    UsageError,
    printable,
)

MAX_FILES = 100_000  # that one looks at in a folder


class Source:
    """A regular file that is open for reading. `size` is in bytes, as it was when the file was opened."""

    __slots__ = ("__weakref__", "_identity", "fd", "path", "size")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens `path`; raises `FileProblem` (missing, no permission), `NotACheckpoint` (a folder) or `UsageError` (a device)."""
        self.fd = -1
        self.path = os.fspath(path)
        try:
            # O_NONBLOCK: a FIFO without a writer would otherwise hang here.
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self.fd)
        except (OSError, ValueError) as error:
            raise file_problem(error, self.path, "read") from error
        if stat.S_ISDIR(status.st_mode):
            raise NotACheckpoint(
                f"{self} is a folder, not a checkpoint file",
                "ckptool looked for one file of tensors.",
                f"Name the file: ls {printable(self.path)}",
            )
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(
                f"{self} is not a regular file", "A checkpoint is read at many places; a pipe or device cannot be."
            )
        self.size = status.st_size
        self._identity = _identity(status)

    def __str__(self) -> str:
        return printable(self.path)

    def __repr__(self) -> str:
        return f"Source({self.path!r})"

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; raises `Truncated` past the end, `FileChanged` if the file shrank."""
        if length < 0 or offset < 0 or offset + length > self.size:
            raise Truncated(
                f"{self} ends at byte {self.size:,}; bytes {offset:,} to {offset + length:,} were promised",
                "The file was cut off, or its own tables are wrong.",
            )
        data = self._pread(offset, length)
        if len(data) == length:
            return data
        parts = [data]
        while (got := sum(map(len, parts))) < length:
            part = self._pread(offset + got, length - got)
            if not part:
                raise self.changed()
            parts.append(part)
        return b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `offset`."""
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self.fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise file_problem(error, self.path, "read") from error
            if not got:
                raise self.changed()
            done += got

    def _pread(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self.fd, length, offset)
        except OSError as error:
            raise file_problem(error, self.path, "read") from error

    def changed(self) -> FileChanged:
        """The error for a file that somebody else changed in the meantime."""
        return FileChanged(
            f"{self} changed while it was being read",
            "Another process wrote to it or cut it short; nothing was written.",
            "Run the command again when the other process is done.",
        )

    def check_unchanged(self) -> None:
        """Raises `FileChanged` if anyone wrote to the file since it was opened."""
        if _identity(os.fstat(self.fd)) != self._identity:
            raise self.changed()

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """True if `path` leads to this very file, by whatever name or link."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.fd))
        except OSError:
            return False


class Folder:
    """A folder of which some files together are one checkpoint. `size`: the bytes of those that were opened."""

    __slots__ = ("__weakref__", "_files", "names", "path", "shown")

    def __init__(self, path: str | os.PathLike[str], shown: str | os.PathLike[str] = "") -> None:
        """Looks at what is in `path`; raises `FileProblem`, or `LimitExceeded` for a folder of very many files.

        shown: what the user called it, where that is not the folder (an index file in it).
        """
        self.path = os.fspath(path) or "."
        self.shown = os.fspath(shown) or self.path
        self._files: dict[str, Source] = {}
        self.names: list[str] = []  # of everything in it, sorted
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    self.names.append(entry.name)
                    if len(self.names) > MAX_FILES:
                        raise LimitExceeded(f"{self} holds more than {MAX_FILES:,} files", "Name a file in it.")
        except OSError as error:
            raise file_problem(error, self.path, "read") from error
        self.names.sort()

    def __str__(self) -> str:
        return printable(self.shown)

    def __repr__(self) -> str:
        return f"Folder({self.path!r})"

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def open(self, name: str) -> Source:
        """The file of that name in it, opened once. A name that could lead elsewhere raises `Corrupt`.

        A link in the folder is followed: hubs keep their files as links into a cache.
        """
        found = self._files.get(name)
        if found is None:
            if not name or name in (".", "..") or any(c in name for c in "/\\\0:"):
                raise Corrupt(
                    f"{self} names a file outside of its folder: {printable(name)}", "Such a name is never followed."
                )
            found = self._files[name] = Source(os.path.join(self.path, name))
        return found

    @property
    def files(self) -> dict[str, Source]:
        """The files that were opened, by name."""
        return dict(self._files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self._files.values())

    def check_unchanged(self) -> None:
        """Raises `FileChanged` if anyone wrote to one of its files since it was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """True if `path` leads to this folder, or to a file that was opened in it."""
        try:
            if os.path.samefile(path, self.path):
                return True
        except OSError:
            return False
        return any(file.is_at(path) for file in self._files.values())


Input = Source | Folder


def open_input(path: str | os.PathLike[str]) -> Input:
    """What is at `path`: a file, or a folder. Raises what `Source` and `Folder` raise."""
    return Folder(path) if os.path.isdir(path) else Source(path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def file_problem(error: OSError | ValueError, path: str | os.PathLike[str], doing: str) -> FileProblem:
    """The system's refusal as one of our errors: `doing` is the verb that failed (`read`, `write to`)."""
    name = printable(os.fspath(path))
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else str(error)
    fix = ""
    if number == errno.ENOENT:
        folder = os.path.dirname(os.path.abspath(path))
        fix = (
            f"Look at what is there: ls {printable(folder)}"
            if os.path.isdir(folder)
            else f"There is no folder {printable(folder)} either."
        )
    return FileProblem(f"cannot {doing} {name}: {reason}", _MEANINGS.get(number or 0, ""), fix)


_MEANINGS = {
    errno.ENOENT: "No such file.",
    errno.EACCES: "The permissions of the file or its folder do not allow it.",
    errno.EPERM: "The permissions of the file or its folder do not allow it.",
    errno.ENOTDIR: "A part of the path is a file, not a folder.",
    errno.ELOOP: "The name is a link that leads to itself.",
    errno.ENAMETOOLONG: "The name is longer than this file system allows.",
    errno.EROFS: "The file system is mounted read-only.",
    errno.EIO: "The disk reported an error; what is on it may be damaged.",
}
