"""Files and folders that are elsewhere, behind URLs: read by ranges, through fsspec.

Of an object is asked for what its tables need: its first 128 KB, with which its size and tag come, its last, and what
a reader says that it will want (`expect`). Values that are read front to back are asked for ahead, 16 ranges at once.
Every answer has to be of the object that the first one was of. Only so much is kept, of all objects together.
"""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from errno import EACCES, ENOENT
from functools import cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote
from weakref import WeakValueDictionary, ref

from ckptool.checkpoint import files
from ckptool.checkpoint.files import MAX_FILES, Descriptor, Folder, Source, file_changed, is_a_folder
from ckptool.checkpoint.paths import KINDS, file_problem
from ckptool.commands import other_program
from ckptool.errors import (
    CkptoolError,
    FileMissing,
    FileProblem,
    LimitExceeded,
    MissingExtra,
    Unsupported,
    UsageError,
    given_url,
    named_urls,
    without_secrets,
)

END = 128 << 10  # bytes of each end of an object that are read at once: most tables are in them
STEP, BEFORE = 16 << 10, 4 << 10  # bytes read where fewer are wanted, and in front of them
NEAR = 64 << 10  # bytes that it costs less to read through than to ask again
PART, AT_ONCE = 512 << 10, 16  # bytes of a range of values, and the ranges that are asked for at once
KEPT, MOST_KEPT = 2 * AT_ONCE * PART, 1_024  # bytes and pieces of all objects that are kept, or on their way
TABLE = 64 << 20  # bytes that are asked for as one range
TRIES, WAIT, PATIENCE = 3, 0.25, 60  # WAIT: seconds before the second try, doubled before the third
PROBED = 5  # seconds that an object is kept which was looked at to learn whether it is one
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs",
             "abfs": "adlfs", "abfss": "adlfs", "adl": "adlfs", "sftp": "paramiko", "ssh": "paramiko"}  # fmt: skip


class Served(NamedTuple):
    """The bytes of a range, the size of the object that they are of, and what tells it from another of the same name
    (its ETag, or when it was changed)."""

    data: bytes | bytearray
    size: int
    tag: str


Ask = Callable[[int, int], Served]
Result = TypeVar("Result")


class _Again(Exception):
    """Something that may go better a moment later."""


class _IsFolder(Exception):
    """It is no object, but a folder of them."""


# How each kind of file system is asked -------------------------------------------------------------------------------


def file_system(url: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the object's path in it. Raises `MissingExtra`, `UsageError`."""
    scheme = url.partition(":")[0].lower()
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(given_url(url))
    except ImportError as error:
        package = "'ckptool[remote]'" if error.name in ("fsspec", "aiohttp") else _PACKAGES.get(scheme, "")
        what = f"{scheme}:// needs a package that is not installed"
        raise MissingExtra(what, without_secrets(str(error)), f"pip install {package or _OF_WEB}") from error
    except Exception as error:  # whatever a file system does not like in a URL, or in its settings
        raise UsageError(f"cannot use {url}", without_secrets(str(error))) from error
    return fs, path


_OF_WEB = "'ckptool[remote]'"


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}


def asking(url: str) -> tuple[Ask, bool]:
    """The way to ask for ranges of an object, and whether each answer says of which object it is."""
    from fsspec.asyn import sync

    fs, path = file_system(url)
    kinds = _protocols(fs)
    if kinds & {"http", "https"}:
        return lambda start, stop: sync(fs.loop, _get, fs, path, url, {}, start, stop), True
    if "s3" in kinds:
        return lambda start, stop: _asked(url, sync, fs.loop, _get_object, fs, path, start, stop), True
    known: list[Any] = []  # what was said of it before the first range

    def of_hub(start: int, stop: int) -> Served:
        if not known:
            from fsspec import filesystem
            from huggingface_hub.utils import build_hf_headers

            if _asked(url, fs.info, path)["type"] == "directory":
                raise _IsFolder
            known[:] = filesystem("https"), fs.url(path), build_hf_headers(token=fs.token)
        web, page, headers = known
        answer: Served = sync(web.loop, _get, web, page, url, headers, start, stop)
        return answer

    def of_any(start: int, stop: int) -> Served:
        if not known or stop <= start:
            fs.invalidate_cache()
            known[:] = [_asked(url, fs.info, path)]
        if known[0]["type"] == "directory":
            raise _IsFolder
        size: int = known[0]["size"]
        data = _asked(url, fs.cat_file, path, start=start, end=min(stop, size)) if start < min(stop, size) else b""
        return Served(data, size, next((str(known[0][tag]) for tag in _TAGS if known[0].get(tag)), ""))

    return (of_hub, True) if "hf" in kinds else (of_any, False)


_TAGS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "modified")


def _asked(url: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a file system answers. Raises `FileProblem` where nothing is there or it may not be read, else `_Again`."""
    try:
        return call(*args, **options)
    except FileNotFoundError as error:
        raise file_problem(FileNotFoundError(ENOENT, ""), url, "read") from error
    except IsADirectoryError:
        raise _IsFolder from None
    except Exception as error:
        said = without_secrets(f"{type(error).__name__}: {error}")
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if isinstance(error, PermissionError) or "Credentials" in said[:40] or status in (401, 403):
            raise _denied(url, said) from error
        raise _Again(said) from error


async def _get_object(fs: Any, path: str, start: int, stop: int) -> Served:
    """A range of an object in S3, with the size and the tag that the same answer has."""
    bucket, key, version = fs.split_path(path)
    if not key:
        raise IsADirectoryError(path)
    asked = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {}), **fs.req_kw}
    try:
        found = await fs._call_s3("get_object", Range=f"bytes={start}-{stop - 1}", **asked)
    except OSError as error:
        if "InvalidRange" not in f"{error!r} {error.__cause__!r}":
            raise
        head = await fs._call_s3("head_object", **asked)  # there are no bytes there: it is empty, or was cut
        return Served(b"", head["ContentLength"], head["ETag"])
    async with found["Body"] as body:
        return Served(await body.read(), int(found["ContentRange"].rpartition("/")[2]), found["ETag"])


async def _get(fs: Any, path: str, url: str, headers: dict[str, str], start: int, stop: int) -> Served:
    """A range of what a web server has. Raises `FileProblem`, `Unsupported` where it gives no ranges, `_Again`."""
    from asyncio import TimeoutError as SlowError

    from aiohttp import ClientError, ClientTimeout

    session, options = await fs.set_session(), {**fs.kwargs}
    asked = {"Accept-Encoding": "identity", **options.pop("headers", {}), **headers}
    options.setdefault("timeout", ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE))
    asked["Range"] = f"bytes={start}-{stop - 1}"
    try:
        async with session.get(fs.encode_url(path), headers=asked, **options) as answer:
            status, given = answer.status, answer.headers
            place, _, size = given.get("Content-Range", "").rpartition("/")
            tag = given.get("ETag", "").removeprefix("W/") or given.get("Last-Modified", "")
            if status == 416 and size.isdigit():
                return Served(b"", int(size), tag)
            if status in (200, 206):
                whole = answer.content_length if status == 200 else None
                if answer.url.path.endswith("/"):
                    raise _IsFolder
                if status == 200 and (start or whole is None or whole > stop):
                    raise _no_ranges(url, "It was asked for a range, and answers with everything.")
                if status == 206 and not (place.startswith(f"bytes {start}-") and size.isdigit()):
                    raise _no_ranges(url, f"It was asked for bytes from {start:,}, and says {place[:80]!r}.")
                data = bytearray()
                async for chunk in answer.content.iter_chunked(1 << 16):
                    data += chunk
                    if len(data) > stop - start:
                        raise _no_ranges(url, f"It was asked for {stop - start:,} bytes, and gives more.")
                return Served(data, int(size) if whole is None else whole, tag)
            if status in (404, 410):
                raise file_problem(FileNotFoundError(ENOENT, ""), url, "read")
            said = given.get("X-Error-Message") or f"{status} {answer.reason}"
            if status in (401, 403, 407):
                raise _denied(url, said)
            if status in (408, 425, 429) or status >= 500:
                raise _Again(f"the server says {said}")
            raise FileProblem(f"cannot read {url}: the server says {said}")
    except (ClientError, SlowError) as error:
        why = without_secrets(str(error)) or f"nothing came for {PATIENCE} seconds"
        raise _Again(f"{type(error).__name__}: {why}") from error


def _denied(url: str, said: str) -> CkptoolError:
    kind, _ = KINDS[EACCES]
    why = "It needs a token or a key that may read it, or a signed URL whose time is not over."
    return kind(f"cannot read {url}: not allowed ({said})", why).about(EACCES, url)


def _no_ranges(url: str, why: str) -> CkptoolError:
    fix = f"Fetch the file, and name that: {other_program('curl -LO', url)}"
    return Unsupported(f"{url}: its server does not serve parts of files", why, fix)


def _tried(url: str, call: Callable[[], Result]) -> Result:
    """What a call gives, in at most three tries. Raises `FileProblem`."""
    for number in range(TRIES):
        try:
            return call()
        except _Again as error:
            why = str(error)
        if number < TRIES - 1:
            time.sleep(WAIT * 2**number)
    raise FileProblem(f"cannot read {url}: {why}", f"It was tried {TRIES} times.", "Try again later.")


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="remote")


# Objects -------------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """The bytes of an object from `start` to `stop`, there or on their way. once: dropped when its end was read."""

    start: int
    stop: int
    bytes: Future[bytes | bytearray]
    once: bool


class _Reader:
    """Somebody who reads front to back. next: where it goes on.  read: the bytes in one go, so far.  ahead: how many
    may be read ahead.  front: the end of what was asked for."""

    __slots__ = ("ahead", "front", "next", "read")

    def __init__(self) -> None:
        self.next, self.read, self.ahead, self.front = -1, 0, 0, 0


_lock = threading.RLock()
_kept: dict[int, tuple[ref[RemoteObject], _Piece]] = {}  # of all objects, the least recently used first
_busy: deque[int] = deque(maxlen=32)  # the ids of those who read values lately


class RemoteObject:
    """What is behind a URL: its size and tag, and the pieces of it that are kept. Shared by all who have it open."""

    def __init__(self, url: str) -> None:
        self.url, self.size, self.tag = url, -1, ""
        self.ask, self.is_told = asking(url)
        self.pieces: list[_Piece] = []  # by their places
        self.readers: list[_Reader] = []  # the last used is the last
        first: Future[bytes | bytearray] = Future()
        first.set_result(self.fetch(0, END))
        if self.size:
            self._keep(_Piece(0, len(first.result()), first, False))

    def __del__(self) -> None:
        for piece in getattr(self, "pieces", ()):
            _kept.pop(id(piece), None)

    def fetch(self, start: int, stop: int) -> bytes | bytearray:
        """The bytes of a range, in at most three tries. Raises `FileChanged`, `FileProblem`."""

        def once() -> bytes | bytearray:
            answer = self.ask(start, stop)
            if self.size < 0:
                self.size, self.tag = answer.size, answer.tag
            if (answer.size, answer.tag) != (self.size, self.tag):
                raise file_changed(self.url)
            wanted = max(0, min(stop, self.size) - start)
            if len(answer.data) != wanted:
                raise _Again(f"{len(answer.data):,} bytes came of {wanted:,}")
            return answer.data

        return _tried(self.url, once)

    def check_unchanged(self) -> None:
        """Raises `FileChanged` if it is another object now, where its answers do not say of which they are."""
        if not self.is_told:
            self.fetch(0, 0)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Asks for tables that will be read soon, near ones as one range, and does not wait for them."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if joined and start - joined[-1][1] <= NEAR:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        with _lock:
            for start, stop in joined:
                if stop - start <= TABLE:
                    self._ask_for(start, min(stop, self.size), TABLE)

    def read_into(self, offset: int, buffer: memoryview, *, table: bool = False) -> None:
        """Fills `buffer` with the bytes from `offset`. table: they are asked for as one range."""
        at, end = offset, offset + len(buffer)
        reader = self._reader_of(at, end)
        while at < end:
            with _lock:
                self._look_ahead(reader, at, end, table and len(buffer) <= TABLE)
                piece = self._at(at)[0]
            assert piece is not None
            try:
                data = memoryview(piece.bytes.result())[at - piece.start : end - piece.start]
            except BaseException:
                self._drop(piece)
                raise
            buffer[at - offset : at - offset + len(data)] = data
            at += len(data)
            if piece.once and at == piece.stop:
                self._drop(piece)

    def _reader_of(self, at: int, end: int) -> _Reader:
        """The reader who goes on at a place, else a new one."""
        with _lock:
            reader = next((each for each in self.readers if 0 <= at - each.next <= NEAR), None)
            if reader is None:
                reader = _Reader()
            else:
                self.readers.remove(reader)
                reader.ahead = reader.read
            reader.next, reader.read = end, reader.read + end - at
            self.readers = [*self.readers[-3:], reader]
            return reader

    # Under the lock --------------------------------------------------------------------------------------------

    def _look_ahead(self, reader: _Reader, at: int, end: int, table: bool) -> None:
        """Asks for what is missing from `at`, and for what its reader will probably want next."""
        if reader.read > PART:
            _busy.append(id(reader))
        window = AT_ONCE * PART // max(1, len(set(_busy)))
        ahead = min(max(reader.ahead, END), window) if reader.ahead else 0
        piece, after = self._at(at)
        if piece is not None:
            enough = min(self.size, at + window // 2, end + ahead // 2)
            if reader.read <= PART or reader.front >= enough:
                return
        start, stop = at, min(self.size, end + ahead, max(at + window, end if table else 0))
        if not ahead and end - at < PART:
            stop = min(self.size, max(end, at + STEP))
            start = max(0, at - BEFORE) if stop <= self.size - END else max(0, min(at - BEFORE, self.size - END))
            stop = stop if stop <= self.size - END else self.size
            number = bisect_right(self.pieces, at, key=lambda each: each.start)
            start = max(start, self.pieces[number - 1].stop if number else 0)
        if piece is None and reader.read <= PART:  # what follows is there already
            stop = min(stop, max(end, after))
        self._ask_for(start, stop, TABLE if table and ahead <= PART else PART)
        reader.front = max(reader.front, stop)

    def _at(self, at: int) -> tuple[_Piece | None, int]:
        """The piece with the byte `at`, or None, and then where the next one begins."""
        number = bisect_right(self.pieces, at, key=lambda each: each.start)
        if number and self.pieces[number - 1].stop > at:
            piece = self.pieces[number - 1]
            _kept[id(piece)] = _kept.pop(id(piece), (ref(self), piece))  # the last used
            return piece, piece.stop
        return None, self.pieces[number].start if number < len(self.pieces) else self.size

    def _ask_for(self, start: int, stop: int, most: int) -> None:
        """Asks for what is missing of a range, at most so many bytes at once."""
        while start < stop:
            piece, after = self._at(start)
            if piece is None:
                after = min(stop, after, start + most)
                later = _pool(os.getpid()).submit(self.fetch, start, after)
                self._keep(_Piece(start, after, later, most == PART))
            start = after

    def _keep(self, piece: _Piece) -> None:
        insort(self.pieces, piece, key=lambda each: each.start)
        _kept[id(piece)] = ref(self), piece
        total = sum(each.stop - each.start for _, each in _kept.values())
        for owner, oldest in [*_kept.values()][:-1]:
            if total <= KEPT and len(_kept) <= MOST_KEPT:
                break
            total -= oldest.stop - oldest.start
            if (other := owner()) is not None:
                other._drop(oldest)
            _kept.pop(id(oldest), None)

    def _drop(self, piece: _Piece) -> None:
        with _lock:
            if _kept.pop(id(piece), None) is not None:
                self.pieces.remove(piece)


# As files and folders ------------------------------------------------------------------------------------------------


class _Listing(dict[str, bool]):
    """The names in a folder; True for those of folders. is_known: it could be listed."""

    is_known = True


_objects: WeakValueDictionary[str, RemoteObject] = WeakValueDictionary()
_listings: WeakValueDictionary[str, _Listing] = WeakValueDictionary()
_probed: dict[str, tuple[float, RemoteObject]] = {}


def _object(url: str) -> RemoteObject:
    """The object at a URL, asked for once while somebody has it open, or until the command ends."""
    found = _objects.get(url)
    if found is None:
        found = _objects[url] = RemoteObject(url)
        files.opened.append(found)
    return found


def _listing(url: str) -> _Listing:
    """The names in a folder. Raises `FileProblem` where it cannot be listed, `LimitExceeded`."""
    if (found := _listings.get(url)) is not None:
        return found
    fs, path = file_system(url)
    is_web = bool(_protocols(fs) & {"http", "https"})
    path = path.rstrip("/") + "/" * is_web

    def rows() -> list[dict[str, Any]]:
        fs.invalidate_cache()
        return list(_asked(url, fs.ls, path, detail=True))

    found = _Listing()
    for row in _tried(url, rows):
        name: str = row["name"].removeprefix(path) if is_web else row["name"].rstrip("/").rpartition("/")[2]
        if re.fullmatch(r"[^/?#]+/?", name) and row["name"].strip("/") != path.strip("/"):  # not what sorts a page
            found[unquote(name.rstrip("/")) if is_web else name] = row["type"] == "directory"
    if len(found) > MAX_FILES:
        raise LimitExceeded(f"{url} holds more than {MAX_FILES:,} files", "Name a file in it.")
    _listings[url] = found
    files.opened.append(found)
    return found


def folder_at(url: str) -> bool:
    """True for a URL that ends in a slash, and for one at which no object is, but others below it."""
    name = named_urls(url)
    above, _, last = name.rpartition("/")
    if not last or last in (known := _listings.get(above, _Listing())):
        return not last or known[last]
    try:
        _probed[name] = time.monotonic(), _object(name)
        return False
    except _IsFolder:
        return True
    except FileMissing:
        with suppress(CkptoolError):
            return not is_web(name) and bool(_listing(name))
        return False


def is_web(url: str) -> bool:
    """True for web servers, which take nothing and have no folders but those whose URLs end in a slash."""
    return url.partition(":")[0].lower() in ("http", "https")


class RemoteSource(Source):
    """A file that is read by ranges."""

    __slots__ = ("_object",)
    far = True

    def __init__(self, path: str | os.PathLike[str], fd: int | None = None) -> None:
        self._descriptor, self.path = None, named_urls(os.fspath(path))
        for name, (since, _) in [*_probed.items()]:
            if time.monotonic() - since > PROBED:
                _probed.pop(name, None)
        try:
            _, self._object = _probed.pop(self.path, None) or (0, _object(self.path))
        except _IsFolder:
            raise is_a_folder(self) from None
        self.size = self._object.size
        self._identity = self.path, self._object.tag, self.size

    def descriptor(self) -> Descriptor:
        raise AssertionError(f"{self} has no descriptor")

    def share_descriptors(self) -> None:
        """It has none."""

    def close(self) -> None:
        """Nothing is open."""

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._object.expect(ranges)

    def read(self, offset: int, length: int) -> bytes:
        self._check(offset, length)
        data = bytearray(length)
        self._object.read_into(offset, memoryview(data), table=True)
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > self.size:
            raise self.changed()
        self._object.read_into(offset, buffer)

    def check_unchanged(self) -> None:
        self._object.check_unchanged()

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        return named_urls(os.fspath(path)) == self.path

    def is_of(self, status: os.stat_result) -> bool:
        return False


class RemoteFolder(Folder):
    """A folder of files that are read by ranges. One that cannot be listed has those that its index names."""

    __slots__ = ("_listing",)
    far = True

    def __init__(self, path: str | os.PathLike[str], shown: str | os.PathLike[str] = "") -> None:
        self.path = named_urls(os.fspath(path)).rstrip("/")
        self.shown = named_urls(os.fspath(shown)) or self.path
        self._files = {}
        try:
            self._listing = _listing(self.path)
        except FileProblem:
            if not shown:
                raise
            self._listing = _Listing()
        index = os.path.basename(self.shown) if shown else ""
        self._listing.is_known = not shown or index in self._listing
        self.names = sorted(self._listing) if self._listing.is_known else [index]

    def missing(self, names: Iterable[str]) -> list[str]:
        return super().missing(names) if self._listing.is_known else []

    def each(self, names: Sequence[str]) -> Iterator[Source]:
        def begin(name: str) -> RemoteObject | None:
            with suppress(CkptoolError, _IsFolder):  # who opens it is told
                found = _object(os.path.join(self.path, name))
                found.expect([(found.size - END, found.size)])  # every reader looks for a zip's end there
                return found
            return None

        for at in range(0, len(names), AT_ONCE):
            some = names[at : at + AT_ONCE]
            held = [*_pool(os.getpid()).map(begin, some)]
            yield from map(self.open, some)
            del held

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        name = named_urls(os.fspath(path)).rstrip("/")
        return name == self.path or any(file.is_at(name) for file in self._files.values())
