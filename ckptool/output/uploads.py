"""Files and folders elsewhere: written here first, whole and proven, then sent. So are those for open files.

A store shows an object when all of it has come: there a file is sent under its own name, in parts, which are given up
where one fails. Elsewhere it is sent under a hidden name, and renamed. A hub takes all files of a folder in one commit;
elsewhere they are sent in the plan's order, in which the index is last, and taken back where one fails.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.files import Input, unchanged
from ckptool.checkpoint.plan import Plan
from ckptool.commands import FILE, arg
from ckptool.errors import (
    CkptoolError,
    DiskFull,
    FileMissing,
    FileProblem,
    NoPermission,
    OutputExists,
    UsageError,
    counted,
)
from ckptool.output.durable import check_space, write_problems
from ckptool.output.folders import NewFolder, write_files
from ckptool.output.sink import Progress

PART = 8 << 20  # bytes that are sent at once, of which
AT_ONCE = 4  # are on their way
GRAIN = 256 << 10  # which Google's parts are multiples of
MOST_PARTS = 9_000  # of one object: S3 takes 10,000
# What shows an object whole or not at all, with the options of its `put_file` that bound the memory.
_STORES = {"s3": ("chunksize", "max_concurrency"), "gs": ("chunksize",), "abfs": ()}


def check_upload(url: str, *, overwrite: bool, names: Collection[str] = ()) -> str:
    """The URL, if a file, or a folder with files of these names, may be written there.

    Raises `OutputExists` where something is there that is not to be replaced, or cannot be, `FileProblem`.
    """
    _looked(url, overwrite, names)
    return url


def _looked(url: str, overwrite: bool, names: Collection[str]) -> tuple[Any, str, bool]:
    """The file system of the same, the path in it, and whether something is replaced."""
    if url.partition(":")[0].lower() in ("http", "https"):
        fix = f"Write a file, then upload it: {arg(out=FILE)}; or write to s3://, gs://, hf://."
        raise UsageError(f"cannot write {url}: a web server only hands out files", "Nothing was written.", fix)
    with _problems(url):
        fs, place = file_system(url)
        kind = _kind(fs, place)
        held: Collection[str] = [place] if kind else []
        if names and _is_hub(fs):  # whose folders hold more than a checkpoint, and change in one step
            held = [name for name in names if _kind(fs, f"{place}/{name}")]
        elif names and kind == "directory":
            held = fs.ls(place, detail=False)
    if kind == ("file" if names else "directory") or (not names and posixpath.basename(url) in ("", ".", "..")):
        what, fix = ("file", "Choose another name.") if names else ("folder", "Name a file in it.")
        raise FileProblem(f"cannot write {url}: it is a {what}", "", fix)
    if held and names and not _is_hub(fs):
        why = "Its files could only be replaced one by one: until the last, it would be a mix of two checkpoints."
        what = f"the folder {url} exists already, with {counted(len(held), 'file')} in it"
        raise OutputExists(what, why, "Choose another name, or remove the folder first.")
    if held and not overwrite:
        raise OutputExists(f"{url} exists already", fix=f"Overwrite it: {arg(overwrite=True)}, or choose another name.")
    return fs, place, bool(held)


def upload(
    plan: Plan,
    url: str,
    *,
    overwrite: bool = False,
    inputs: Iterable[Input] = (),
    verify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> tuple[Note, ...]:
    """Writes a plan to a URL: a file, or a folder where it has several. No notes are made.

    inputs: must not have changed until all is read.  verify: called with the file or folder before it is sent.
    Raises what `check_upload` and writing here raise; then nothing is left there.
    """
    names = () if set(plan.files) == {""} else tuple(plan.files)
    _looked(url, overwrite, names)

    def tell(done: int, sent: int = 0) -> None:  # every byte is written here, and then sent
        if progress is not None:
            progress(done + sent, 2 * plan.nbytes)

    name = "" if names else posixpath.basename(url)
    with staged(plan, name, url, inputs, verify, lambda done, _: tell(done)) as files:
        fs, place, existed = _looked(url, overwrite, names)
        places = {path: f"{place}/{name}" if names else place for name, path in files.items()}
        with _problems(url):
            if _is_hub(fs):
                _commit(fs, places)
            else:
                _send(fs, places, existed, lambda before, sent: tell(plan.nbytes, before + sent))
            fs.invalidate_cache()
    return ()


@contextmanager
def staged(
    plan: Plan,
    name: str,
    url: str,
    inputs: Iterable[Input] = (),
    verify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Iterator[dict[str, str]]:
    """The files of a plan, by their names, in a temporary folder of the user's own. name: that of a single one.

    What killed runs left is cleared away first. Raises `DiskFull`, and what writing and verifying raise.
    """
    place = os.path.join(tempfile.gettempdir(), "ckptool")
    folder = NewFolder(place)
    try:
        try:
            with write_problems(url):
                check_space(plan.nbytes, place)
                folder.begin()
                os.fchmod(folder.fd, 0o700)
                with unchanged(*inputs):
                    write_files(replace(plan, files={name: plan.files[""]}) if name else plan, folder, progress)
                    if verify is not None:
                        verify(os.path.join(folder.path, name))
        except DiskFull as error:
            what = f"cannot write {url}: it is put together in {os.path.dirname(place)} first, where it has no room"
            raise DiskFull(what, "Nothing was sent.", "Make room, or set TMPDIR to a folder that has it.") from error
        yield {each: os.path.join(folder.path, each) for each in ([name] if name else plan.files)}
    finally:
        folder.close()


def write_out(plan: Plan, file: Any, inputs: Iterable[Input] = ()) -> None:
    """Writes a plan of one file to an object that is open for writing in binary, once it is complete.

    Raises `UsageError` where it takes no bytes, and what `staged` raises.
    """
    shown = f"<{type(file).__name__}>"
    with staged(plan, "checkpoint", shown, inputs) as files, open(files["checkpoint"], "rb") as content:
        try:
            shutil.copyfileobj(content, file, 1 << 20)
        except (TypeError, ValueError) as error:
            fix = "Open it for writing in binary: open(PATH, 'wb')"
            raise UsageError(f"{shown} takes no bytes", str(error), fix) from None


# Sending -------------------------------------------------------------------------------------------------------------


def _send(fs: Any, places: dict[str, str], existed: bool, tell: Callable[[int, int], None]) -> None:
    """Sends files, each to its place; takes back what was sent where one fails."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    store = next((each for each in _STORES if each in protocols), None)
    sent, done, folder = list[str](), 0, fs._parent(next(iter(places.values())))
    is_new = not store and not fs.exists(folder)
    try:
        if is_new:
            fs.makedirs(folder, exist_ok=True)
        for path, place in places.items():
            size = os.path.getsize(path)
            values = {"chunksize": max(PART, size // MOST_PARTS // GRAIN * GRAIN + GRAIN), "max_concurrency": AT_ONCE}
            sent.append(place if store else f"{folder}/.ckptool-{secrets.token_hex(8)}.tmp")
            _put(fs, path, sent[-1], partial(tell, done), {name: values[name] for name in _STORES.get(store or "", ())})
            if not store:
                sent.append(place)
                fs.mv(sent[-2], place)
            done += size
    except BaseException:
        for place in reversed(sent):
            with suppress(Exception):
                if not existed or place not in places.values():
                    fs.rm_file(place)
        if is_new:
            with suppress(Exception):
                fs.rmdir(folder)
        raise


def _put(fs: Any, path: str, place: str, tell: Callable[[int], None], options: dict[str, Any]) -> None:
    """Sends one file. A signal ends it between two parts, so that those which were sent are given up."""
    from fsspec.callbacks import Callback  # type: ignore[import-untyped]

    stopped = list[BaseException]()

    def passed(_: int, sent: int) -> None:
        if stopped:
            raise InterruptedError("stopped")
        tell(sent)

    options["callback"] = Callback(hooks={"sent": passed})
    if not fs.async_impl:
        fs.put_file(path, place, **options)
        return
    job = asyncio.run_coroutine_threadsafe(fs._put_file(path, place, **options), fs.loop)
    try:
        job.result()
    except BaseException as error:
        stopped.append(error)
        job.exception()  # until it has ended
        raise


def _commit(fs: Any, places: dict[str, str]) -> None:
    """Gives files to a hub in one commit."""
    from huggingface_hub import CommitOperationAdd  # type: ignore[import-not-found]
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[import-not-found]

    disable_progress_bars()
    at = {path: fs.resolve_path(place) for path, place in places.items()}
    first = next(iter(at.values()))
    fs._api.create_commit(
        first.repo_id,
        [CommitOperationAdd(each.path_in_repo, path) for path, each in at.items()],
        commit_message=f"Upload {posixpath.basename(first.path_in_repo)} with ckptool",
        repo_type=first.repo_type,
        revision=first.revision,
    )


def _is_hub(fs: Any) -> bool:
    return bool(fs.protocol == "hf")


def _kind(fs: Any, place: str) -> str:
    """What is at a path: `file`, `directory`, or "" for nothing."""
    fs.invalidate_cache()
    try:
        return str(fs.info(place)["type"])
    except FileNotFoundError as error:
        if error.__cause__ is not None:  # the bucket or the repository is not there, either
            raise
        return ""


@contextmanager
def _problems(url: str) -> Iterator[None]:
    """Raises an error with words in place of a file system's."""
    try:
        yield
    except CkptoolError:
        raise
    except Exception as error:
        kind = {FileNotFoundError: FileMissing, PermissionError: NoPermission}.get(type(error), FileProblem)
        what = f"cannot write {url}: {without_secrets(str(error)) or type(error).__name__}"
        raise kind(what, "Nothing was written there.").about(getattr(error, "errno", None), url) from error


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    fs, place = url_to_fs(url)
    return fs, place


def without_secrets(text: str) -> str:
    return text
