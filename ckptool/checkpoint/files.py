"""Input files: opened once, read with `pread`, never mapped.

A mapped file that another process cuts short kills the reader with SIGBUS; a read that comes back short is an error
with words. The descriptor stays open for as long as anything refers to it, so a checkpoint stays readable after its
file was replaced or unlinked. A checkpoint of several files is a `Folder`, which opens each of them once.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from ckptool.checkpoint.commands import Advice, Command, command, other_program
from ckptool.errors import (
    BrokenLink,
    CkptoolError,
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
MANY_NAMES = 2_000  # of a folder, that are compared with one that is missing


class Source:
    """A regular file that is open for reading. `size` is in bytes, as it was when the file was opened."""

    __slots__ = ("__weakref__", "_identity", "fd", "path", "size")
    start = 0  # where its bytes begin in its `file`: see `Part`

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens `path`; raises `FileProblem`, `NotACheckpoint` (a folder) or `UsageError` (a device)."""
        self.fd = -1
        self.path = os.fspath(path)
        self.fd, kind, status = _opened(self.path)
        if kind == "a folder":
            raise NotACheckpoint(
                f"{self} is a folder, not a checkpoint file",
                "ckptool looked for one file of tensors.",
                Advice("Name the file: ", other_program("ls", self.path)),
            )
        if kind:
            raise UsageError(
                f"{self} is {kind}, not a regular file",
                "A checkpoint is read in many places, which a pipe or device does not allow.",
                "Write it to a file first, and name that.",
            )
        self.size = status.st_size
        self._identity = _identity(status)

    def __str__(self) -> str:
        return printable(self.path)

    def __repr__(self) -> str:
        return f"Source({self.path!r})"

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            try:  # noqa: SIM105 (when the interpreter ends, this module's names may be gone: builtins stay)
                close(self.fd)
            except OSError:  # it was only read
                pass

    @property
    def file(self) -> Source:
        return self

    def part(self, offset: int, length: int) -> Part:
        """`length` bytes of the file from `offset`, readable as a file; raises `Truncated` past the end."""
        if length < 0 or offset < 0 or offset + length > self.size:
            raise self._short(offset, length)
        return Part(self, offset, length)

    def _short(self, offset: int, length: int) -> Truncated:
        return Truncated(
            f"{self} ends at byte {self.size:,}; bytes {offset:,} to {offset + length:,} were expected",
            "The file was cut off, or its own tables are wrong.",
        )

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; raises `Truncated` past the end, `FileChanged` if the file shrank."""
        if length < 0 or offset < 0 or offset + length > self.size:
            raise self._short(offset, length)
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

    def is_same(self, other: Source) -> bool:
        """True if both are open on one file, by whatever names."""
        return self is other or os.path.samestat(os.fstat(self.fd), os.fstat(other.fd))

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """True if `path` leads to this very file, by whatever name or link."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.fd))
        except (OSError, ValueError):  # nothing is there, or no such name can be
            return False


def open_regular(path: str | os.PathLike[str], what: str) -> int:
    """A descriptor of a named file that is no checkpoint: rules, an array, a configuration.

    what: what it was to be (`a file of rules`), for the errors. Raises `FileProblem` where it cannot be read,
    `UsageError` for a folder, a pipe or a device.
    """
    fd, kind, _ = _opened(os.fspath(path))
    if kind:
        os.close(fd)
        raise UsageError(
            f"{printable(os.fspath(path))} is {kind}, not {what}",
            "Only a regular file is read here: anything else might never end.",
            "Name a file." if kind == "a folder" else "Write it to a file first, and name that.",
        )
    return fd


def read_small(path: str | os.PathLike[str], what: str, most: int) -> bytes:
    """All bytes of such a file. Raises `LimitExceeded` for more than `most` bytes, and what `open_regular` raises."""
    try:
        with open(open_regular(path, what), "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise file_problem(error, path, "read") from error
    if len(data) > most:
        raise LimitExceeded(
            f"{printable(os.fspath(path))} is larger than {what} can be: it has more than {most:,} bytes",
            "It is probably not the file that you meant.",
        )
    return data


def read_small_text(path: str | os.PathLike[str], what: str, most: int) -> str:
    """The same as text. Raises `UsageError` for what is not UTF-8."""
    try:
        return read_small(path, what, most).decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{printable(os.fspath(path))} is not a text file",
            f"It should be {what}; byte {error.start:,} is not UTF-8.",
            Advice("See what it is: ", command("doctor", os.fspath(path))),
        ) from None


# File modes that are not a regular file's, as people call them.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _opened(path: str) -> tuple[int, str, os.stat_result]:
    """A descriptor of what is at a path, and what it is where that is no regular file. It never waits for anyone."""
    fd = -1
    try:
        # O_NONBLOCK: a FIFO without a writer would otherwise hang here.  O_NOCTTY: a terminal stays whose it is.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        status = os.fstat(fd)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ENXIO:
            raise UsageError(
                f"{printable(path)} is a socket, not a regular file",
                "A socket has nothing to read at once.",
                "Name a file.",
            ) from None
        raise file_problem(error, path, "read") from error
    return fd, _KINDS.get(stat.S_IFMT(status.st_mode), ""), status


class Part:
    """Bytes in the middle of a file that are a file by themselves (a zip); offsets count from their first.

    What is kept of it for later refers to the `file` itself, with `start` added.
    """

    __slots__ = ("file", "size", "start")

    def __init__(self, file: Source, start: int, size: int) -> None:
        self.file, self.start, self.size = file, start, size

    def __str__(self) -> str:
        return f"{self.file} (the {self.size:,} bytes from {self.start:,})"

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; raises `Truncated` past the end of the part."""
        if length < 0 or offset < 0 or offset + length > self.size:
            raise Truncated(
                f"{self}: bytes {offset:,} to {offset + length:,} of it were expected", "Its tables are wrong."
            )
        return self.file.read(self.start + offset, length)


Readable = Source | Part


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
        except (OSError, ValueError) as error:
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
            self._check(name)
            found = self._files[name] = Source(os.path.join(self.path, name))
        return found

    def adopt(self, name: str, source: Input) -> None:
        """Counts a file or folder below it, which was opened by itself, among its own."""
        if isinstance(source, Folder):
            self._files |= {f"{name}/{inner}": file for inner, file in source.files.items()}
        else:
            self._files[name] = source

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are not in it, sorted. A name that could lead elsewhere raises `Corrupt`."""
        absent = set(names).difference(self.names)
        for name in absent:
            self._check(name)
        return sorted(absent)

    def _check(self, name: str) -> None:
        if not name or name in (".", "..") or any(c in name for c in "/\\\0:"):
            raise Corrupt(
                f"{self} names a file outside its folder: {printable(name[:200])}", "Such names are never followed."
            )

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
        except (OSError, ValueError):
            return False
        return any(file.is_at(path) for file in self._files.values())


Input = Source | Folder


def open_input(path: str | os.PathLike[str]) -> Input:
    """The file or folder at `path`. Raises what `Source` and `Folder` raise."""
    return Folder(path) if os.path.isdir(path) else Source(path)


@contextmanager
def unchanged(*inputs: Input | None) -> Iterator[None]:
    """Raises `FileChanged` if anyone wrote to one of the inputs meanwhile, whatever else that has led to."""
    try:
        yield
    except CkptoolError:
        _check_unchanged(inputs)
        raise
    _check_unchanged(inputs)


def _check_unchanged(inputs: Iterable[Input | None]) -> None:
    for source in inputs:
        if source is not None:
            source.check_unchanged()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


# How people fetch what is at an address, by its beginning.
_FETCH = {
    "s3": ("an address in S3", "aws s3 cp", "."),
    "gs": ("an address in Google Cloud Storage", "gcloud storage cp", "."),
    "az": ("an address in Azure", "azcopy copy", "."),
    "http": ("an address on the web", "curl -LO", ""),
    "https": ("an address on the web", "curl -LO", ""),
    "ftp": ("an address on the web", "curl -LO", ""),
    "hf": ("an address on the Hugging Face hub", "hf download", ""),
}
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}")


def refused_place(path: str | os.PathLike[str], writing: bool = False) -> FileProblem | None:
    """The error for a path that is no place on this machine (a remote address, `-`); None for what is there."""
    name = os.fspath(path)
    if os.path.lexists(name):
        return None
    if name == "-":
        return FileProblem(
            f"- stands for standard {'output' if writing else 'input'}, which is not a file",
            "A checkpoint is read in many places, and gets its name only when it is complete; a stream allows neither.",
            "Name a file: -o FILE" if writing else "Save it first: cat > FILE; then name FILE",
        )
    found = _ADDRESS.match(name)
    if found is None:
        return None
    kind, program, rest = _FETCH.get(found[1].lower(), ("a remote address", "", ""))
    fetched = Command((*program.split(), name.removeprefix("hf://"), *rest.split()))  # hf takes ORGANISATION/MODEL
    fix = Advice("Fetch it first: ", fetched) if program else Advice("Copy it to this machine first.")
    return FileProblem(
        f"{printable(name)} is {kind}, not a file",
        "ckptool works on local files.",
        "Write a file here, then copy it there." if writing else fix,
    )


def file_problem(error: OSError | ValueError, path: str | os.PathLike[str], doing: str) -> FileProblem:
    """The system's refusal as one of our errors: `doing` is the verb that failed (`read`, `write to`)."""
    if isinstance(error, FileNotFoundError) and (elsewhere := refused_place(path, doing != "read")):
        return elsewhere
    name = printable(os.fspath(path))
    if getattr(error, "errno", None) == errno.ENOENT and os.path.islink(path):
        return _broken_link(os.fspath(path), doing)
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else str(error)
    fix = ""
    why = "No file can have such a name." if "null byte" in reason else _MEANINGS.get(number or 0, "")
    if number == errno.ENOENT:
        folder = os.path.dirname(absolute(path))
        there = os.path.isdir(folder)
        why = (
            f"Its folder has nothing by that name{_meant(folder, os.path.basename(path))}" if there else "No such file."
        )
        fix = (
            Advice("Look at what is there: ", other_program("ls", os.fsdecode(folder)))
            if there
            else f"There is no folder {printable(folder)} either."
        )
    return FileProblem(f"cannot {doing} {name}: {reason}", why, fix)


def _broken_link(path: str, doing: str) -> BrokenLink:
    return BrokenLink(
        f"cannot {doing} {printable(path)}: it is a link to {printable(os.readlink(path))}, which is not there",
        "Hubs keep files as links into a cache: what it led to was deleted or not copied along, or lies on another "
        "machine.",
        Advice(
            "See where it leads: ", other_program("ls -l", path), "; then download the file again, or copy with cp -L."
        ),
    )


def _meant(folder: str, name: str | bytes) -> str:
    """The end of a sentence that names what is most like a name that is not in the folder."""
    import difflib

    with suppress(OSError), os.scandir(folder) as entries:
        there = [entry.name for entry in islice(entries, MANY_NAMES)]
        close = difflib.get_close_matches(os.fsdecode(name), there, 1, 0.75)
        return f"; did you mean {printable(close[0])}?" if close else "."
    return "."


_MEANINGS = {
    errno.EACCES: "The permissions of the file or its folder do not allow it.",
    errno.EPERM: "The permissions of the file or its folder do not allow it.",
    errno.ENOTDIR: "A part of the path is a file, not a folder.",
    errno.ELOOP: "The name is a link that leads to itself.",
    errno.ENAMETOOLONG: "The name is longer than this file system allows.",
    errno.EROFS: "The file system is mounted read-only.",
    errno.EIO: "The disk reported an error; what is on it may be damaged.",
}


def absolute(path: str | os.PathLike[str]) -> str:
    """The path from the root on. Raises `FileProblem` for a name that no file can have, and for a relative one where
    the working directory was removed.
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
            'Enter it again: cd "$PWD"; or use absolute paths.',
        ) from error


_INNER_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".th", ".pkl", ".safetensors", ".index")


def parted(path: str) -> tuple[str, str]:
    """The path without its suffix, and that: `.pth.tar` is one, and so is `.safetensors.index.json`."""
    stem, suffix = os.path.splitext(path)
    while os.path.splitext(stem)[1] in _INNER_SUFFIXES and suffix in (".tar", ".json", ".index.json"):
        stem, before = os.path.splitext(stem)
        suffix = before + suffix
    return stem, suffix
