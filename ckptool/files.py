"""Input files: opened once, read with `pread`, never mapped.

A mapped file that another process cuts short kills the reader with SIGBUS; a read that comes back short is an error
with words. The descriptor stays open for as long as anything refers to it, so a checkpoint stays readable after its
file was replaced or unlinked.
"""

from __future__ import annotations

import errno
import os
import stat

from ckptool.errors import FileChanged, FileProblem, NotACheckpoint, Truncated, UsageError, printable


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
