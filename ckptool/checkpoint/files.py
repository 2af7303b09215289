"""Input files: opened once, read with `pread`, never mapped.

A mapped file that another process cuts short kills the reader with SIGBUS; a read that comes back short is an error
with words. The descriptor stays open for as long as anything refers to it, so a checkpoint stays readable after its
file was replaced or unlinked. A checkpoint of several files is a `Folder`, which opens each of them once. Only so many
files of folders are open at a time: a system allows a process some hundreds, and an engine may write thousands. The
others are opened again when they are read, and must still be the same.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any, SupportsIndex

from ckptool.checkpoint.paths import file_problem, is_url
from ckptool.commands import command, other_program
from ckptool.errors import (
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

MAX_FILES = 100_000  # in a folder that is opened

# File modes that are not a regular file's, as people call them.
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

# O_NONBLOCK: a FIFO without a writer would otherwise hang here.  O_NOCTTY: a terminal is not taken over.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def open_descriptor(path: str) -> tuple[int, str, os.stat_result]:
    """A descriptor of what is at a path, what it is if no regular file (`a pipe`), its status. Opening never blocks."""
    try:
        try:
            fd = os.open(path, _FLAGS)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            shared.clear()
            fd = os.open(path, _FLAGS)
        status = os.fstat(fd)
    except (OSError, ValueError) as error:
        raise file_problem(error, path, "read") from error
    return fd, _KINDS.get(stat.S_IFMT(status.st_mode), ""), status


class Descriptor(int):
    """A file descriptor that is closed when nothing refers to it any more."""

    __slots__ = ()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        try:  # noqa: SIM105 (when the interpreter ends, this module's names may be gone: builtins stay)
            close(self)
        except OSError:  # it was only read
            pass


# Descriptors of the files of folders, by the `id` of their sources. All are dropped when there are too many; one that
# is in use stays open until its reader is done.
shared: dict[int, Descriptor] = {}


@cache
def most_shared() -> int:
    """How many files of folders may be open at once: a quarter of the system's limit, since outputs, other libraries
    and the program around ckptool need descriptors too."""
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(512, max(4, allowed // 4)) if allowed != resource.RLIM_INFINITY else 512


# Files ---------------------------------------------------------------------------------------------------------------


class Source:
    """A regular file that is open for reading. `size` is in bytes, as it was when the file was opened.

    begin: the byte where its contents begin, of an open file that stood there; code that reads `descriptor` adds it.
    is_edited: this process is changing it, under a lock, behind all that is read here.
    """

    __slots__ = ("__weakref__", "_descriptor", "_identity", "_path", "begin", "is_edited", "path", "size")
    start = 0  # where its bytes begin in its `file`: see `Part`
    far = False  # every read is a request to another machine, and there is no descriptor
    failures: Sequence[CkptoolError] = ()  # the last, of a server that did not send a part

    def __new__(cls, path: str | os.PathLike[str] = "", fd: int | None = None, begin: int = 0) -> Source:
        """A `RemoteSource`, read by ranges, for a URL."""
        if fd is None and is_url(path):
            from ckptool.checkpoint.remote import RemoteSource

            return object.__new__(RemoteSource)
        return object.__new__(cls)

    def __init__(self, path: str | os.PathLike[str], fd: int | None = None, begin: int = 0) -> None:
        """Opens `path`; raises `FileProblem`, `NotACheckpoint` (a folder) or `UsageError` (a device).

        fd: a descriptor of a regular file that is open already, which this object closes; `path` only names it then.
        """
        self._descriptor: Descriptor | None = None
        self.path, self.begin, self.is_edited = os.fspath(path), begin, False
        fd, kind, status = open_descriptor(self.path) if fd is None else (fd, "", os.fstat(fd))
        self._descriptor = Descriptor(fd)
        if kind == "a folder":
            raise is_a_folder(self)
        if kind:
            why = "Reading a checkpoint takes random access, which a pipe or device does not allow."
            raise UsageError(f"{self} is {kind}, not a regular file", why, "Write it to a file first.")
        self.size = status.st_size - begin
        self._identity: tuple[Any, ...] = _identity(status)

    def __str__(self) -> str:
        return printable(self.path)

    def __repr__(self) -> str:
        return f"Source({self.path!r})"

    def __deepcopy__(self, _: object) -> Source:
        return self  # one object closes a descriptor

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        """Another process opens the file again when it reads, and it has to be the same. Raises `UsageError` where it
        has lost its name, and for `torch.save`, whose file would have that name in the place of the values."""
        path = os.path.abspath(self.path) if self._descriptor is not None else self._path
        if not self.is_at(path) or sys._getframe(1).f_globals.get("__name__") == "torch.serialization":
            fix = "Write them by ckptool.save(tree, PATH), or read them first: ckptool.load(FILE), entry.torch()"
            raise UsageError(f"values that are still in {self} cannot be pickled", "They were not read yet.", fix)
        parts: Any = super().__reduce_ex__(2)
        return *parts[:2], (None, {**parts[2][1], "_descriptor": None, "_path": path})

    def __del__(self, forget: Callable[[int, None], object] = shared.pop) -> None:
        if self._descriptor is None:
            forget(id(self), None)

    def descriptor(self) -> Descriptor:
        """A descriptor of the open file: while somebody holds it, it is neither closed nor used for another file.

        Raises `FileChanged` where it was closed meanwhile and its name leads to another file now.
        """
        descriptor = self._descriptor or shared.get(id(self))
        if descriptor is None:
            try:
                fd, _, status = open_descriptor(self._path)
            except FileProblem as error:
                raise error if os.path.lexists(self._path) else self.changed() from error
            descriptor = Descriptor(fd)
            if _identity(status) != self._identity:
                raise self.changed()
            self._share(descriptor)
        return descriptor

    def _share(self, descriptor: Descriptor) -> None:
        if len(shared) >= most_shared():
            shared.clear()
        shared[id(self)] = descriptor

    def share_descriptors(self) -> None:
        """Lets it be closed while nobody reads it, so that many can be in use at once. Its path must stay valid."""
        descriptor = self._descriptor
        if descriptor is not None:
            self._path = os.path.abspath(self.path)  # the working directory may change
            self._share(descriptor)
            self._descriptor = None

    def close(self) -> None:
        """Closes it if it can be opened again: its path still leads to it."""
        if self._descriptor is not None and self.is_at(self.path):
            self.share_descriptors()
        if self._descriptor is None:
            shared.pop(id(self), None)

    @property
    def file(self) -> Source:
        return self

    @property
    def modified(self) -> float:
        """When it was last changed, in seconds since 1970; 0 if unknown."""
        return os.fstat(self.descriptor()).st_mtime

    def part(self, offset: int, length: int) -> Part:
        """`length` bytes of the file from `offset`, readable as a file; raises `Truncated` past the end."""
        if not 0 <= offset <= offset + length <= self.size:
            raise self.past_end(offset, length)
        return Part(self, offset, length)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announces ranges that will be read soon: a remote file fetches them with few requests."""

    def past_end(self, offset: int, length: int) -> Truncated:
        """The error for bytes that are not there."""
        what = f"{self} ends at byte {self.size:,}; bytes {offset:,} to {offset + length:,} were expected"
        return Truncated(what, "The file was cut off, or its own tables are wrong.")

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; raises `Truncated` past the end, `FileChanged` if the file shrank."""
        if not 0 <= offset <= offset + length <= self.size:
            raise self.past_end(offset, length)
        try:
            data = os.pread(self.descriptor(), length, self.begin + offset)
        except OSError as error:
            raise file_problem(error, self.path, "read") from error
        if len(data) < length:
            rest = bytearray(length - len(data))
            self.read_into(offset + len(data), memoryview(rest))
            data += rest
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes from `offset`."""
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self.descriptor(), [buffer[filled:]], self.begin + offset + filled)
            except OSError as error:
                raise file_problem(error, self.path, "read") from error
            if not count:
                raise self.changed()
            filled += count

    def changed(self) -> FileChanged:
        """The error for a file that somebody else changed in the meantime."""
        return file_changed(self.path)

    def check_unchanged(self) -> None:
        """Raises `FileChanged` if anyone wrote to the file since it was opened, or put another in the place of a file
        of a folder: those of the folder that were opened later may belong to that."""
        try:
            status = os.stat(self._path) if self._descriptor is None else os.fstat(self._descriptor)
        except OSError as error:
            raise self.changed() from error
        if _identity(status) != self._identity and not self.is_edited:
            raise self.changed()

    def is_same(self, other: Source) -> bool:
        """True if both are open on the same file, by whatever names, from the same byte on."""
        return self._identity[:2] == other._identity[:2] and self.begin == other.begin

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """True if `path` leads to this very file, by whatever name or link."""
        try:
            return self.is_of(os.stat(path))
        except (OSError, ValueError):  # nothing is there, or no such name can be
            return False

    def is_of(self, status: os.stat_result) -> bool:
        """True if that is the status of this very file."""
        return self._identity[:2] == (status.st_dev, status.st_ino)


def file_changed(path: str) -> FileChanged:
    """The error for a file that somebody else changed since it was opened."""
    why = "Another process wrote to it or truncated it; nothing was written."
    fix = "Run the command, or open it, again when that process is done."
    return FileChanged(f"{path} changed since it was opened", why, fix)


def is_a_folder(source: Source) -> NotACheckpoint:
    """The error for a folder in the place of a file."""
    what, fix = f"{source} is a folder, not a checkpoint file", f"Name the file: {other_program('ls', source.path)}"
    return NotACheckpoint(what, "A single file of tensors is needed here.", fix)


def open_regular(path: str | os.PathLike[str], what: str) -> int:
    """A descriptor of a named file that is no checkpoint: rules, an array, a configuration.

    what: what it should be (`a file of rules`), for the errors. Raises `FileProblem` where it cannot be read,
    `UsageError` for a folder, a pipe or a device.
    """
    if is_url(path):
        raise UsageError(f"{os.fspath(path)} is a URL, not {what}", "It has to be on this machine.", "Fetch it first.")
    fd, kind, _ = open_descriptor(os.fspath(path))
    if kind:
        os.close(fd)
        why = "Only a regular file can be read here: anything else might never end."
        raise UsageError(f"{os.fspath(path)} is {kind}, not {what}", why, "Name a file.")
    return fd


def read_small(path: str | os.PathLike[str], what: str, limit: int) -> bytes:
    """All bytes of such a file. Raises `LimitExceeded` beyond `limit` bytes, and what `open_regular` raises."""
    try:
        if is_url(path):
            data = (source := Source(path)).read(0, min(source.size, limit + 1))
        else:
            with open(open_regular(path, what), "rb") as file:
                data = file.read(limit + 1)
    except OSError as error:
        raise file_problem(error, path, "read") from error
    if len(data) > limit:
        what = f"{os.fspath(path)} is larger than {what} can be: it has more than {limit:,} bytes"
        raise LimitExceeded(what, "It is probably not the file that you meant.")
    return data


def read_json(path: str | os.PathLike[str], what: str, limit: int) -> Any:
    """The value in a JSON file, NaN allowed. Raises `Corrupt` for a damaged one, and what `read_small` raises."""
    data = read_small(path, what, limit)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        what = f"{os.fspath(path)} is not JSON: {str(error)[:100]}"
        raise Corrupt(what, "It is truncated, or was never written completely.") from None


def json_or_none(path: str | os.PathLike[str], limit: int) -> Any:
    """The same for a file that may be anything: None where it cannot be read as JSON."""
    try:
        return read_json(path, "a table", limit)
    except CkptoolError:
        return None


def read_small_text(path: str | os.PathLike[str], what: str, limit: int) -> str:
    """The same as text. Raises `UsageError` for what is not UTF-8."""
    try:
        return read_small(path, what, limit).decode()
    except UnicodeDecodeError as error:
        why = f"It should be {what}; byte {error.start:,} is not UTF-8."
        fix = f"See what it is: {command('doctor', os.fspath(path))}"
        raise UsageError(f"{os.fspath(path)} is not a text file", why, fix) from None


class Part:
    """Bytes in the middle of a file that are a file of their own (a zip); offsets count from the first of them.

    Ranges that are kept for later refer to the `file` itself, with `start` added.
    """

    __slots__ = ("file", "size", "start")

    def __init__(self, file: Source, start: int, size: int) -> None:
        self.file, self.start, self.size = file, start, size

    def __str__(self) -> str:
        return f"{self.file} (the {self.size:,} bytes from {self.start:,})"

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `Source.expect`."""
        self.file.expect((self.start + start, self.start + stop) for start, stop in ranges)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; raises `Truncated` past the end of the part."""
        if length < 0 or offset < 0 or offset + length > self.size:
            what = f"{self}: bytes {offset:,} to {offset + length:,} of it were expected"
            raise Truncated(what, "Its tables are wrong.")
        return self.file.read(self.start + offset, length)


Readable = Source | Part


class Folder:
    """A folder of which some files together are one checkpoint. `size`: the bytes of those that were opened."""

    __slots__ = ("__weakref__", "_files", "names", "path", "shown")
    far = False  # as that of its files

    def __new__(cls, path: str | os.PathLike[str] = "", shown: str | os.PathLike[str] = "") -> Folder:
        """A `RemoteFolder`, whose files are read by ranges, for a URL."""
        if is_url(path):
            from ckptool.checkpoint.remote import RemoteFolder

            return object.__new__(RemoteFolder)
        return object.__new__(cls)

    def __init__(self, path: str | os.PathLike[str], shown: str | os.PathLike[str] = "") -> None:
        """Lists what is in `path`; raises `FileProblem`, or `LimitExceeded` for a folder of very many files.

        shown: what the user called it, where that is not the folder (an index file in it).
        """
        self.path = os.fspath(path) or "."
        self.shown = os.fspath(shown) or self.path
        self._files: dict[str, Source] = {}
        try:
            with os.scandir(self.path) as entries:  # files, folders and whatever else
                names = [entry.name for entry in islice(entries, MAX_FILES + 1)]
        except (OSError, ValueError) as error:
            raise file_problem(error, self.path, "read") from error
        if len(names) > MAX_FILES:
            raise LimitExceeded(f"{self} holds more than {MAX_FILES:,} files", "Name a file in it.")
        self.names = sorted(without_resource_forks(names))

    def __str__(self) -> str:
        return printable(self.shown)

    def __repr__(self) -> str:
        return f"Folder({self.path!r})"

    def __deepcopy__(self, _: object) -> Folder:
        return self

    def __reduce__(self) -> tuple[type[Folder], tuple[str, str]]:
        """Another process gets its path, not the files that were opened."""
        return Folder, (self.path, self.shown)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def open(self, name: str) -> Source:
        """The file of that name in it, opened once. A name that could lead elsewhere raises `Corrupt`.

        A link in the folder is followed: hubs keep their files as links into a cache.
        """
        source = self._files.get(name)
        if source is None:
            self._check(name)
            source = self._files[name] = Source(os.path.join(self.path, name))
            source.share_descriptors()
        return source

    def each(self, names: Sequence[str]) -> Iterator[Source]:
        """The files of these names, in order, opened one after the other."""
        return map(self.open, names)

    def adopt(self, name: str, source: Input) -> None:
        """Adds a file or folder below it, which was opened separately, to its own files."""
        if isinstance(source, Folder):
            self._files |= {f"{name}/{inner}": file for inner, file in source.files.items()}
        else:
            self._files[name] = source
            source.share_descriptors()

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are not in it, sorted. A name that could lead elsewhere raises `Corrupt`."""
        absent = set(names).difference(self.names)
        for name in absent:
            self._check(name)
        return sorted(absent)

    def _check(self, name: str) -> None:
        if not name or name in (".", "..") or any(c in name for c in "/\\\0:"):
            raise Corrupt(f"{self} names a file outside its folder: {name[:200]}", "Such names are never followed.")

    @property
    def files(self) -> dict[str, Source]:
        """The files that were opened, by name."""
        return dict(self._files)

    @property
    def failures(self) -> Sequence[CkptoolError]:
        return [error for file in self._files.values() for error in file.failures]

    @property
    def size(self) -> int:
        return sum(file.size for file in self._files.values())

    def close(self) -> None:
        """Closes its files, which are opened again where they are read."""
        for file in self._files.values():
            file.close()

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


def without_resource_forks(names: Iterable[str]) -> Iterator[str]:
    """The names without those of macOS, which writes a `._NAME` beside each file on disks of other systems."""
    return (name for name in names if not name.startswith("._"))


Input = Source | Folder


opened: ContextVar[dict[str, Any] | None] = ContextVar("opened", default=None)  # by their URLs, see `while_open`


@contextmanager
def while_open() -> Iterator[None]:
    """Inside this, a remote file is requested once, however often it is opened."""
    token = opened.set({} if opened.get() is None else opened.get())
    try:
        yield
    finally:
        opened.reset(token)


def folder_at(path: str | os.PathLike[str]) -> bool:
    """True where a folder is at `path`."""
    if is_url(path):
        from ckptool.checkpoint import remote

        return remote.folder_at(os.fspath(path))
    return os.path.isdir(path)


def entries_of(folder: str) -> list[tuple[str, bool, bool]]:
    """The names in a folder, sorted, each with whether it is a folder, and a file; a link to a folder is neither.

    Raises `FileProblem`.
    """
    if is_url(folder):
        with while_open():
            kinds = [(name, folder_at(os.path.join(folder, name))) for name in Folder(folder).names]
        return [(name, is_folder, not is_folder) for name, is_folder in kinds]
    try:
        with os.scandir(folder) as entries:
            # A link that leads to itself is no file: `isfile` says so, where the entry's own `is_file` raises.
            return sorted((entry.name, entry.is_dir(follow_symlinks=False), os.path.isfile(entry)) for entry in entries)
    except OSError as error:
        raise file_problem(error, folder, "read") from error


def size_at(path: str) -> tuple[int, float]:
    """The size in bytes (of a folder: its files) and when it was changed, in seconds since 1970; 0 if unknown."""
    with suppress(OSError, CkptoolError):
        if is_url(path):
            source = open_input(path)
            return source.size, source.modified if isinstance(source, Source) else 0.0
        status = os.stat(path)
        if not os.path.isdir(path):
            return status.st_size, status.st_mtime
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries), status.st_mtime
    return 0, 0.0


def open_input(path: str | os.PathLike[str]) -> Input:
    """The file or folder at `path`. Raises what `Source` and `Folder` raise."""
    with while_open():
        return Folder(path) if folder_at(path) else Source(path)


@contextmanager
def unchanged(*inputs: Input | None) -> Iterator[None]:
    """Raises `FileChanged` if anyone wrote to one of the inputs meanwhile, or the error of a server that did not send
    a part of one: in place of any error that this led to, and of damage that it was taken for."""

    def failures() -> list[CkptoolError]:
        return [error for source in inputs if source is not None for error in source.failures]

    before, failed = failures(), None
    try:
        yield
    except CkptoolError as error:
        failed = error
    for source in inputs:
        if source is not None:
            source.check_unchanged()
    failed = next((error for error in failures() if error not in before), failed)
    if failed is not None:
        raise failed


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
