"""Remote files and folders, behind URLs: read by ranges, through fsspec.

Of an object only what its tables need is requested: its first 128 KB, with which its size and tag come, its last, and
what a reader announces (`expect`). Values that are read front to back are requested ahead, several ranges at once.
Every answer has to be of the same object as the first. Only so much is kept, of all objects together.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from bisect import bisect_right, insort
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from email.utils import parsedate_to_datetime
from errno import EACCES, ENOENT
from functools import cache, partial
from html import unescape
from typing import Any, NamedTuple, SupportsIndex, TypeVar
from urllib.parse import unquote
from urllib.request import getproxies
from weakref import ref

from ckptool.checkpoint import files
from ckptool.checkpoint.files import MAX_FILES, Folder, Source, file_changed, is_a_folder, without_resource_forks
from ckptool.checkpoint.paths import KINDS, file_problem, foreign, free_name, given_url, named_urls
from ckptool.commands import other_program
from ckptool.errors import CkptoolError, FileMissing, FileProblem, LimitExceeded, MissingExtra, UsageError

END = 128 << 10  # bytes of each end of an object that are read at once: most tables are in them
STEP, BEFORE = 16 << 10, 4 << 10  # bytes read where fewer are wanted, and in front of them
NEAR = 4 << 10  # bytes that may lie between two reads of one that goes front to back
PART, AT_ONCE = 1 << 20, 16  # bytes of a range of values, and the ranges that are requested at once
WINDOW = PART * AT_ONCE // 2  # bytes that one reader is read ahead of
KEPT, MOST_KEPT = PART * AT_ONCE, 1_024  # bytes and pieces of all objects that are kept, or on their way
TABLE = 64 << 20  # bytes that are requested as one range
TRIES, WAIT, PATIENCE = 3, 0.25, 60  # WAIT: seconds before the second try, doubled before the third


class Served(NamedTuple):
    """The bytes of a range, the size of their object, a tag that tells it from another of the same name (its ETag, or
    when it was changed), and when it was changed."""

    data: bytes
    size: int
    tag: str
    when: Any


Ask = Callable[[int, int], Awaitable[Served]]
Result = TypeVar("Result")


class _Again(Exception):
    """A failure that may be gone a moment later: it is tried again. after: not before so many seconds have passed."""

    def __init__(self, why: str, after: int = 0) -> None:
        super().__init__(why)
        self.after = after


class _IsFolder(Exception):
    """There is no object at the URL, but a folder."""


# Requests, for each kind of file system ------------------------------------------------------------------------------


def file_system(url: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the object's path in it. Raises `MissingExtra`, `UsageError`."""
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(given_url(url), **(_web_settings() if is_web(url) else {}))
    except ImportError as error:
        match = re.search(r"""(?:[Ii]nstall (?:the )?|requires ['"])([\w-]+)""", str(error))  # as fsspec says it
        what = f"{url.partition(':')[0]}:// needs a package that is not installed"
        package = match[1] if match else "'ckptool[remote]'"
        raise MissingExtra(what, str(error), f"pip install {package}") from error
    except Exception as error:  # whatever a file system rejects in a URL, or in its settings
        raise UsageError(f"cannot use {url}", foreign(str(error))) from error
    return fs, path


def _web_settings() -> dict[str, Any]:
    """The settings of fsspec for web servers, through the proxies and with the passwords that the environment names."""
    from fsspec.config import conf

    settings = {**conf.get("http", {}), **conf.get("https", {})}.get("client_kwargs", {})
    netrc = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    is_set = bool(getproxies()) or os.path.exists(netrc)  # aiohttp looks anew for each range, in threads of its own
    return {"client_kwargs": {"trust_env": is_set, **settings}}


def is_kind(fs: Any, *kinds: str) -> bool:
    """True for a file system of one of these protocols."""
    return not {fs.protocol, *fs.protocol}.isdisjoint(kinds)


def asking(url: str) -> tuple[Ask, bool]:
    """A function that requests ranges of an object, and whether each answer says which object it is of."""
    fs, path = file_system(url)
    if is_kind(fs, "http", "https"):
        return partial(_get, fs, path, url, {}), True
    if is_kind(fs, "s3"):
        return lambda start, stop: _answer_of(url, _get_object(fs, path, url, start, stop)), True
    info: dict[str, Any] = {}  # as the file system gave it before the first range

    async def ask(start: int, stop: int) -> Served:
        if not info or stop <= start:
            fs.invalidate_cache()
            info.update(await _answer_of(url, asyncio.to_thread(fs.info, path)))
        if info.get("type") == "directory":
            raise _IsFolder
        if is_kind(fs, "hf"):
            from fsspec import filesystem
            from huggingface_hub.utils import build_hf_headers

            web, headers = filesystem("https", **_web_settings()), build_hf_headers(token=fs.token)
            info.setdefault("url", fs.url(path))
            return await _get(web, info["url"], url, headers, start, stop)
        if not isinstance(size := info.get("size"), int):
            raise UsageError(f"cannot use {url}", "Its file system does not say how large it is.", "Copy it first.")
        stop = min(stop, size)
        data = await _answer_of(url, asyncio.to_thread(fs.cat_file, path, start, stop)) if start < stop else b""
        facts = [info[name] for name in _FACTS if info.get(name)]  # of which some stay when others change
        return Served(data, size, str(facts), facts[-1] if facts else "")

    return ask, is_kind(fs, "hf")


_FACTS = "ETag etag generation md5Hash created mtime LastModified last_modified updated modified".split()


async def _answer_of(url: str, answer: Awaitable[Result]) -> Result:
    """A file system's answer. Raises `FileProblem` where nothing is there or it may not be read, else `_Again`."""
    try:
        return await answer
    except FileNotFoundError as error:
        raise file_problem(FileNotFoundError(ENOENT, ""), url, "read") from error
    except IsADirectoryError:
        raise _IsFolder from None
    except CkptoolError:
        raise
    except Exception as error:
        message = foreign(f"{type(error).__name__}: {error}")
        if type(error) in (ValueError, TypeError, NotImplementedError):  # of what was asked, not of the moment
            raise UsageError(f"cannot use {url}", message) from error
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if isinstance(error, PermissionError) or "Credentials" in message[:40] or status in (401, 403):
            raise _denied(url, message) from error
        raise _Again(message) from error


async def _get_object(fs: Any, path: str, url: str, start: int, stop: int) -> Served:
    """A range of an object in S3, with the size and tag from the same answer. Raises `FileProblem` for another one."""
    bucket, key, version = fs.split_path(path)
    if not key:
        raise IsADirectoryError(path)
    request = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {}), **fs.req_kw}
    try:
        response = await fs._call_s3("get_object", Range=f"bytes={start}-{stop - 1}", **request)
    except OSError as error:
        if "InvalidRange" not in f"{error!r} {error.__cause__!r}":
            raise
        head = await fs._call_s3("head_object", **request)  # no bytes in that range: the object is empty, or was cut
        return Served(b"", head["ContentLength"], head["ETag"], 0)
    async with response["Body"] as body:
        place = response.get("ContentRange", "bytes 0-")  # not every store knows ranges
        if not place.startswith(f"bytes {start}-") or response["ContentLength"] > stop - start:
            raise _no_ranges(url, f"It was asked for bytes from {start:,}, and answered with {place[:80]!r}.")
        size = int(place.rpartition("/")[2]) if "/" in place else response["ContentLength"]
        return Served(await body.read(), size, response["ETag"], response["LastModified"])


async def _get(fs: Any, path: str, url: str, headers: dict[str, str], start: int, stop: int) -> Served:
    """A range of a web server's file. Raises `FileProblem`, also where it serves no ranges, `_Again`."""
    from aiohttp import ClientError, ClientPayloadError, ClientTimeout, ServerDisconnectedError, TooManyRedirects

    session, options = await fs.set_session(), {**fs.kwargs}
    request = {"Accept-Encoding": "identity", **options.pop("headers", {}), **headers}
    options.setdefault("timeout", ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE))
    request["Range"] = f"bytes={start}-{stop - 1}"
    options["auto_decompress"] = False  # a few bytes may become any number
    try:
        async with session.get(fs.encode_url(path), headers=request, **options) as answer:
            status, fields = answer.status, answer.headers
            place = fields.get("Content-Range", "")
            size = total[1] if (total := re.search(r"/([0-9]{1,18})$", place)) else ""
            when = fields.get("Last-Modified", "")
            tag = fields.get("ETag", "").removeprefix("W/") or when
            if status == 416 and size:
                return Served(b"", int(size), tag, when)
            if status in (200, 206):
                full_size = answer.content_length if status == 200 else None
                if answer.url.path.endswith("/"):
                    raise _IsFolder
                if (encoded := fields.get("Content-Encoding", "identity")) != "identity":
                    raise _no_ranges(url, f"It was asked for plain bytes, and sent them as {encoded[:80]!r}.")
                if status == 200 and (start or full_size is None or full_size > stop):
                    raise _no_ranges(url, "ckptool reads parts of a file; this server can only send all of it.")
                if status == 206 and not (place.startswith(f"bytes {start}-") and size):
                    raise _no_ranges(url, f"It was asked for bytes from {start:,}, and answered with {place[:80]!r}.")
                blocks, length = [], 0
                async for block in answer.content.iter_any():
                    blocks.append(block)
                    if (length := length + len(block)) > stop - start:
                        raise _no_ranges(url, f"It was asked for {stop - start:,} bytes, but sent more.")
                return Served(b"".join(blocks), int(size) if full_size is None else full_size, tag, when)
            if status in (404, 410):
                raise file_problem(FileNotFoundError(ENOENT, ""), url, "read")
            message = foreign(fields.get("X-Error-Message") or f"{status} {answer.reason or ''}".rstrip())
            if status in (401, 403, 407):
                raise _denied(url, message)
            if status in (408, 425, 429) or status >= 500:
                after = fields.get("Retry-After", "")  # it may be a date, too
                raise _Again(f"the server says {message}", int(after) if re.fullmatch("[0-9]{1,9}", after) else 0)
            raise FileProblem(f"cannot read {url}: the server says {message}")
    except ValueError as error:  # of the URL, or of one that it is redirected to
        raise UsageError(f"cannot use {url}", f"No web server is asked for that: {foreign(str(error))}") from error
    except TooManyRedirects as error:
        raise FileProblem(f"cannot read {url}: too many redirects") from error
    except ClientPayloadError as error:
        raise _Again("the response was cut short") from error
    except ServerDisconnectedError as error:
        raise _Again("the server closed the connection") from error
    except (ClientError, asyncio.TimeoutError) as error:
        said = str(getattr(error, "message", error)).partition("\n")[0].rstrip(":")  # then the bytes that are no HTTP
        raise _Again(foreign(said) or f"no response for {PATIENCE} seconds") from error


def _denied(url: str, message: str) -> CkptoolError:
    why = "It needs a token or key with read access, or a signed URL that has not expired."
    return KINDS[EACCES][0](f"cannot read {url}: not allowed ({message})", why).about(EACCES, url)


def _no_ranges(url: str, why: str) -> FileProblem:
    name = free_name(os.path.basename(url.partition("?")[0]) or "checkpoint", ".new")  # curl replaces what is there
    program = other_program("curl -Lo", name, url) if is_web(url) else other_program("aws s3 cp", url, name)
    fix = f"Download it, and name the file: {program}"
    return FileProblem(f"{url}: its server does not support range requests", why, fix)


_at_once = cache(lambda process: asyncio.Semaphore(AT_ONCE))  # a process has a loop of its own


async def _tried(url: str, call: Callable[[], Awaitable[Result]]) -> Result:
    """The result of a call, tried at most three times, not sooner than the server asks. Raises `FileProblem`."""
    async with _at_once(os.getpid()):
        for number in range(TRIES):
            try:
                return await call()
            except _Again as error:
                why, pause = str(error), max(WAIT * 2**number, error.after)
            if number == TRIES - 1 or pause > PATIENCE:
                break
            await asyncio.sleep(pause)
    tried = f"Tried {TRIES} times." if pause <= PATIENCE else f"It asks for a wait of {pause:,} s."
    raise FileProblem(f"cannot read {url}: {why}", tried, "Try again later.")


def _begun(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """The work, started in fsspec's thread."""
    from fsspec.asyn import get_loop

    return asyncio.run_coroutine_threadsafe(work, get_loop())


# Objects -------------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """The bytes of an object from `start` to `stop`, here or on their way. once: dropped when their end has been
    read."""

    start: int
    stop: int
    data: Future[bytes]
    once: bool


_lock = threading.RLock()
_parents: list[Ask] = []  # from before a fork: closing their connections here would change the epoll set that is shared
_cache: dict[int, tuple[ref[RemoteObject], _Piece]] = {}  # of all objects, the least recently used first


class RemoteObject:
    """What is behind a URL: its size and tag, and the pieces of it that are kept. Shared by all that have it open."""

    def __init__(self, url: str) -> None:
        self.url, self.size, self.tag, self.modified = url, -1, "", 0.0
        self.process, (self.ask, self.is_tagged) = os.getpid(), asking(url)
        self.pieces: list[_Piece] = []  # sorted by `start`
        self.failures: Sequence[CkptoolError] = ()  # the last, of what was read
        self.readers: dict[int, tuple[int, int]] = {}  # by thread: from where to where it has read in one go
        head: Future[bytes] = Future()
        head.set_result(_begun(self.fetch(0, END)).result())
        if self.size:
            self._keep(_Piece(0, min(END, self.size), head, False))

    def __del__(self, cache: dict[int, Any] = _cache) -> None:
        for piece in getattr(self, "pieces", ()):
            cache.pop(id(piece), None)

    async def fetch(self, start: int, stop: int) -> bytes:
        """The bytes of a range, in at most three tries. Raises `FileChanged`, `FileProblem`."""

        async def once() -> bytes:
            answer = await self.ask(start, stop)
            if self.size < 0:
                self.size, self.tag = answer.size, answer.tag
                with suppress(ValueError, TypeError, AttributeError):
                    when = parsedate_to_datetime(answer.when) if isinstance(answer.when, str) else answer.when
                    self.modified = float(when) if isinstance(when, (int, float)) else when.timestamp()
            if (answer.size, answer.tag) != (self.size, self.tag):
                raise file_changed(self.url)
            expected = max(0, min(stop, self.size) - start)
            if len(answer.data) != expected:
                raise _Again(f"{len(answer.data):,} bytes arrived, not {expected:,}")
            return answer.data

        return await _tried(self.url, once)

    def check_unchanged(self) -> None:
        """Raises `FileChanged` if it is another object now; asks only where not every answer is checked for that."""
        if not self.is_tagged:
            _begun(self.fetch(0, 0)).result()

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Requests tables that will be read soon, near ones as one range, and does not wait for them."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            begin, end = joined[-1] if joined else (start, start)
            if joined and (start - end <= NEAR or (start - end <= STEP and stop - begin <= END)):
                joined[-1] = begin, max(stop, end)
            else:
                joined.append((start, stop))
        with _lock:
            for start, stop in joined:
                if stop - start <= TABLE:
                    self._ask_for(start, min(stop, self.size), TABLE)

    def read_into(self, offset: int, buffer: memoryview, *, table: bool = False) -> None:
        """Fills `buffer` with the bytes from `offset`. table: they are requested as one range."""
        at, end, ahead = offset, offset + len(buffer), 0
        if self.process != os.getpid():  # forked: the connections are the parent's
            _parents.append(self.ask)
            self.process, (self.ask, self.is_tagged) = os.getpid(), asking(self.url)
            self.pieces = [piece for piece in self.pieces if piece.data.done()]
        if not table or len(buffer) > STEP:  # else it is a header between values
            with _lock:
                begin, last_stop = self.readers.pop(threading.get_ident(), (0, -1))
                if 0 <= at - last_stop <= NEAR:  # as much as it has read already, but not what another has read
                    others = (start for start, _ in self.readers.values() if start >= end)
                    ahead = min(max(at - begin, END), WINDOW, min(others, default=self.size) - at)
                self.readers[threading.get_ident()] = begin if ahead else at, end
        while at < end:
            with _lock:
                piece = self._at(at)[0]  # before a table that is larger than the cache takes its place
                self._ask_ahead(at, end, ahead, table)
                piece = piece or self._at(at)[0]
            assert piece is not None
            try:
                data = memoryview(piece.data.result())
            except BaseException as error:
                self._drop(piece)
                self.failures = [error] if isinstance(error, CkptoolError) else ()
                raise
            stop = min(end, piece.stop)
            buffer[at - offset : stop - offset] = data[at - piece.start : stop - piece.start]
            at = stop
            if piece.once and at == piece.stop:
                self._drop(piece)

    # Under the lock --------------------------------------------------------------------------------------------

    def _ask_ahead(self, at: int, end: int, ahead: int, table: bool) -> None:
        """Requests what is missing from `at`, and what will probably be read next."""
        piece, after = self._at(at)
        limit = TABLE if table and ahead <= PART else PART
        start, stop = at, min(self.size, max(end, at + ahead), at + (WINDOW if limit == PART else TABLE))
        if piece is not None and (stop - at <= PART or self._at(stop - PART)[0] is not None):
            return
        if not ahead and end - at < (TABLE if table else PART):  # a read elsewhere: with what is around it
            start, stop = max(0, at - BEFORE), max(end, at + STEP)
            if stop > self.size - END:
                start, stop = max(0, min(start, self.size - END)), self.size
        if limit == TABLE:  # what follows may be there
            stop = min(stop, after if piece is None else max(end, after))
        if limit == PART and end < stop < self.size:  # whole parts: the rest comes with the next ones
            missing = start  # the first byte that was not requested
            while (piece := self._at(missing)[0]) is not None and missing < self.size:
                missing = piece.stop
            stop = max(end, stop - (stop - missing) % PART)
        self._ask_for(start, stop, limit)

    def _at(self, at: int) -> tuple[_Piece | None, int]:
        """The piece with the byte `at` and where it ends; or None, and where the next one begins."""
        number = bisect_right(self.pieces, at, key=lambda each: each.start)
        if number and self.pieces[number - 1].stop > at:
            piece = self.pieces[number - 1]
            _cache[id(piece)] = _cache.pop(id(piece), (ref(self), piece))  # the last used
            return piece, piece.stop
        return None, self.pieces[number].start if number < len(self.pieces) else self.size

    def _ask_for(self, start: int, stop: int, limit: int) -> None:
        """Requests what is missing of a range, at most `limit` bytes at once."""
        while start < stop:
            piece, after = self._at(start)
            if piece is None:
                after = min(stop, after, start + limit)
                self._keep(_Piece(start, after, _begun(self.fetch(start, after)), limit == PART))
            start = after

    def _keep(self, piece: _Piece) -> None:
        insort(self.pieces, piece, key=lambda each: each.start)
        with _lock:
            _cache[id(piece)] = ref(self), piece
            cached = [*_cache.values()]  # an object that ends meanwhile drops its own
            total = sum(each.stop - each.start for _, each in cached)
            while len(cached) > 1 and (total > KEPT or len(cached) > MOST_KEPT):
                owner, oldest = cached.pop(0)
                total -= oldest.stop - oldest.start
                if (holder := owner()) is not None:
                    holder._drop(oldest)
                _cache.pop(id(oldest), None)

    def _drop(self, piece: _Piece) -> None:
        with _lock:
            if _cache.pop(id(piece), None) is not None and piece in self.pieces:  # a forked process has fewer
                self.pieces.remove(piece)


# As files and folders ------------------------------------------------------------------------------------------------


class _Listing(dict[str, bool]):
    """The names in a folder; True for those of folders. is_known: the folder could be listed.  together: as many of its
    files were open when none had changed."""

    is_known, together = True, 1


def _cached(url: str, ask: Callable[[str], Result]) -> Result:
    """What `ask` gave for a URL inside this `while_open`, or gives now."""
    cache = {} if (opened := files.opened.get()) is None else opened
    if url not in cache:
        cache[url] = ask(url)
    answer: Result = cache[url]
    return answer


def _object(url: str) -> RemoteObject:
    return _cached(url, RemoteObject)


def _listing(folder: str) -> _Listing:
    """The names in a folder, whose URL ends in a slash. Raises `FileProblem` where it cannot be listed,
    `LimitExceeded`."""
    url = folder.rstrip("/")
    if "::" in url:
        raise UsageError(f"cannot use {url} as a folder", "Through a chain of URLs, only single files can be read.")
    fs, path = file_system(url)
    path = path.rstrip("/") + "/" * is_web(url)
    fs.invalidate_cache()
    listing, pattern = _Listing(), r"[^/?#]+/?" if is_web(url) else r"[^/]+"  # not the links that sort the page
    listed = _tried(url, lambda: _answer_of(url, asyncio.to_thread(fs.ls, path, detail=True)))
    for row in _begun(listed).result():
        name: str = row["name"].rstrip("/").rpartition("/")[2]
        if is_web(url):
            name = unescape(row["name"].removeprefix(path)).removeprefix("./")
        plain = unquote(name.rstrip("/")) if is_web(url) else name  # unless that would be another URL, or path
        is_below = row["name"].strip("/") != path.strip("/") and plain not in (".", "..")
        if is_below and re.fullmatch(pattern, name):
            listing[name if re.search(r"[/#?%\\\x00-\x1f\x7f\ufffd]", plain) else plain] = row["type"] == "directory"
    if len(listing) > MAX_FILES:
        raise LimitExceeded(f"{url} holds more than {MAX_FILES:,} files", "Name a file in it.")
    return listing


def forget(url: str) -> None:
    """Drops what is cached for a URL and for the folder that it is in: something was written there."""
    name = named_urls(url).rstrip("/")
    for place in (name, f"{name.rpartition('/')[0]}/"):
        (files.opened.get() or {}).pop(place, None)


def folder_at(url: str) -> bool:
    """True for a URL that ends in a slash, and for one with no object at it but others below it."""
    name = named_urls(url)
    above, _, leaf = name.rpartition("/")
    if not leaf:
        return True
    listing: _Listing | None = (files.opened.get() or {}).get(f"{above}/")
    if listing is not None and listing.is_known:
        return listing.get(leaf, False)
    try:
        _object(name)
    except _IsFolder:
        return True
    except FileMissing:
        with suppress(CkptoolError):
            return not is_web(name) and bool(_cached(f"{name}/", _listing))
    return False


def is_web(url: str) -> bool:
    """True for web servers, which accept no uploads and have no folders but those whose URLs end in a slash."""
    return url.partition(":")[0].lower() in ("http", "https")


class RemoteSource(Source):
    """A remote file, read by ranges. It has no descriptor."""

    __slots__ = ("_object",)
    far = True

    def __init__(self, path: str | os.PathLike[str], fd: int | None = None, begin: int = 0) -> None:
        self._descriptor, self.begin, self.path = None, 0, named_urls(os.fspath(path))
        try:
            self._object = _object(self.path)
        except _IsFolder:
            raise is_a_folder(self) from None
        self.size = self._object.size
        self._identity = self.path, self._object.tag, self.size

    @property
    def modified(self) -> float:
        return self._object.modified

    @property
    def failures(self) -> Sequence[CkptoolError]:  # type: ignore[override]
        return self._object.failures

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._object.expect(ranges)

    def read(self, offset: int, length: int) -> bytes:
        if not 0 <= offset <= offset + length <= self.size:
            raise self.past_end(offset, length)
        data = bytearray(length)
        self._object.read_into(offset, memoryview(data), table=True)
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > self.size:
            raise self.changed()
        self._object.read_into(offset, buffer)

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        return RemoteSource, (self.path,)

    def check_unchanged(self) -> None:
        self._object.check_unchanged()

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        return named_urls(os.fspath(path)) == self.path


class RemoteFolder(Folder):
    """A remote folder of files, read by ranges. One that cannot be listed has those that its index names."""

    __slots__ = ("_listing", "_unopened")
    far = True

    def __init__(self, path: str | os.PathLike[str], shown: str | os.PathLike[str] = "") -> None:
        self.path = named_urls(os.fspath(path)).rstrip("/")
        self.shown = named_urls(os.fspath(shown)) or self.path
        self._files, self._unopened = {}, list[CkptoolError]()
        try:
            self._listing = _cached(f"{self.path}/", _listing)
        except FileProblem:
            if not shown:
                raise
            self._listing = _Listing()
        index = os.path.basename(self.shown) if shown else ""
        self._listing.is_known = not shown or index in self._listing
        self.names = sorted(without_resource_forks(self._listing)) if self._listing.is_known else [index]

    @property
    def failures(self) -> Sequence[CkptoolError]:
        return [*self._unopened, *super().failures]

    def open(self, name: str) -> Source:
        try:
            return super().open(name)
        except FileProblem as error:
            self._unopened = [] if isinstance(error, FileMissing) else [error]
            raise

    def check_unchanged(self) -> None:
        """Asks once for each that is open: those opened later may belong to what has replaced the first."""
        super().check_unchanged()
        objects = [file._object for file in self._files.values() if isinstance(file, RemoteSource)]
        if len(objects) > self._listing.together:
            self._listing.together = len(objects)
            for answer in [_begun(each.fetch(0, 1)) for each in objects if each.is_tagged]:
                answer.result()

    def missing(self, names: Iterable[str]) -> list[str]:
        return super().missing(names) if self._listing.is_known else []

    def each(self, names: Sequence[str]) -> Iterator[Source]:
        def begin(context: Context, url: str) -> None:
            with suppress(CkptoolError, _IsFolder):  # whoever opens it gets the error
                source = context.run(_object, url)
                source.expect([(max(0, source.size - END), source.size)])  # where every reader looks for a zip's end

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for at in range(0, len(names), AT_ONCE):
                urls = [os.path.join(self.path, name) for name in names[at : at + AT_ONCE]]
                if files.opened.get() is not None:
                    list(pool.map(begin, [copy_context() for _ in urls], urls))
                yield from map(self.open, names[at : at + AT_ONCE])

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        name = named_urls(os.fspath(path)).rstrip("/")
        return name == self.path or any(file.is_at(name) for file in self._files.values())
