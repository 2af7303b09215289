"""Remote files and folders: written locally first, complete and verified, then sent.

A store shows an object only when all of it has arrived: there a file is sent under its own name, in parts, which are
dropped if one fails. Elsewhere it is sent under a hidden name, and renamed. A hub takes all files of a folder in one
commit; elsewhere they are sent in the plan's order, in which the index is last, and removed again if one fails.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Note
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.files import Input, unchanged
from ckptool.checkpoint.jobs import signals_held
from ckptool.checkpoint.paths import foreign, named_urls, temporary_files
from ckptool.checkpoint.remote import file_system, forget, is_kind, is_web
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

PART, AT_ONCE = 5 << 20, 4  # bytes that are sent at once, and how often at a time; S3 wants no less
MOST_PARTS, GRAIN = 9_000, 256 << 10  # of one object: S3 takes 10,000; Google's are multiples of this
# What shows an object whole or not at all, with the options of its `put_file` that bound the memory.
_STORES = {"s3": ("chunksize", "max_concurrency"), "gs": ("chunksize",), "abfs": ()}


def check_upload(url: str, *, overwrite: bool, names: Collection[str] = ()) -> tuple[Any, str, bool]:
    """The file system of a URL, the path in it, and whether something is replaced; raises where it must not be written.

    names: of the files, where it is a folder. Raises `OutputExists` where something is there that is not to be
    replaced, or cannot be, `UsageError` for web servers, `FileProblem`.
    """
    if is_web(url := named_urls(url)):
        fix = f"Write to s3://, gs:// or hf://, or write a file and upload it: {arg(out=FILE)}"
        raise UsageError(f"cannot write {url}: a web server only serves files", "Nothing was written.", fix)
    for mark, meaning in (("#", "begins an address"), ("::", "chains file systems")):
        if mark in url:
            raise UsageError(f"cannot write {url}", f"In a URL, {mark} {meaning}.", f"Choose a name without {mark}.")
    with _problems(url):
        fs, place = file_system(url)
        fs.invalidate_cache()
        kind = ""  # of what is there: `file`, `directory`, or nothing
        try:
            kind = str(fs.info(place)["type"])
        except FileNotFoundError as error:
            if error.__cause__ is not None:  # the bucket or the repository is not there, either
                raise
        existing = fs.ls(place, detail=False) if names and kind == "directory" else [place] * bool(kind)
        if names and fs.protocol == "hf":  # whose folders hold more than a checkpoint, and change in one step
            existing = [path for path in existing if posixpath.basename(path) in names]
    if kind == ("file" if names else "directory") or (not names and posixpath.basename(url) in ("", ".", "..")):
        what, fix = ("file", "Choose another name.") if names else ("folder", "Name a file in it.")
        raise FileProblem(f"cannot write {url}: it is a {what}", "", fix)
    if existing and names and fs.protocol != "hf":
        why = "Its files could only be replaced one by one: until the last, they would be a mix of two checkpoints."
        what = f"the folder {url} already exists, with {counted(len(existing), 'file')} in it"
        raise OutputExists(what, why, "Choose another name, or remove the folder first.")
    if existing and not overwrite:
        raise OutputExists(f"{url} already exists", fix=f"Overwrite it: {arg(overwrite=True)}, or choose another name.")
    return fs, place, bool(existing)


def upload(
    plan: Plan,
    url: str,
    *,
    overwrite: bool = False,
    inputs: Iterable[Input] = (),
    verify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> tuple[Note, ...]:
    """Writes a plan to a URL, by way of a temporary folder of the user's own: a file, or a folder where it has several.

    inputs: must not have changed until all is read.  verify: called with the file or folder before it is sent.
    progress: at half when all is written locally. Raises what `check_upload` and writing locally raise; then nothing
    is left at the URL. There are no notes.
    """
    url, names = named_urls(url), () if set(plan.files) == {""} else tuple(plan.files)
    check_upload(url, overwrite=overwrite, names=names)
    name, size, tell = "" if names else posixpath.basename(url), plan.nbytes, progress or (lambda done, total: None)
    with temporary_files():
        local = os.path.join(tempfile.gettempdir(), "ckptool")
    folder = NewFolder(local)  # which removes what killed runs left
    try:
        try:
            with write_problems(url):
                check_space(size, local)
                folder.begin()
                os.fchmod(folder.fd, 0o700)
                with unchanged(*inputs):
                    files = replace(plan, files={name: plan.files[""]}) if name else plan
                    write_files(files, folder, lambda done, _: tell(done // 2, size))
                    if verify is not None:
                        verify(os.path.join(folder.path, name))
        except DiskFull as error:
            what = f"cannot write {url}: it is written to {os.path.dirname(local)} first, which is full"
            raise DiskFull(what, "Nothing was sent.", "Make room there, or set TMPDIR to another folder.") from error
        fs, place, existed = check_upload(url, overwrite=overwrite, names=names)
        paths = {os.path.join(folder.path, file): f"{place}/{file}" if names else place for file in files.files}
        with _problems(url):
            if fs.protocol == "hf":
                from huggingface_hub import CommitOperationAdd
                from huggingface_hub.utils import disable_progress_bars

                disable_progress_bars()
                targets = [fs.resolve_path(path) for path in paths.values()]
                added = [CommitOperationAdd(to.path_in_repo, path) for path, to in zip(paths, targets, strict=True)]
                repo, message = targets[0], f"Upload {posixpath.basename(targets[0].path_in_repo)} with ckptool"
                fs._api.create_commit(
                    repo.repo_id, added, commit_message=message, repo_type=repo.repo_type, revision=repo.revision
                )
            else:
                _send(fs, paths, existed, lambda sent: tell((size + sent) // 2, size))
            fs.invalidate_cache()
        forget(url)
    finally:
        folder.close()
    return ()


# Sending -------------------------------------------------------------------------------------------------------------


def _send(fs: Any, places: dict[str, str], existed: bool, tell: Callable[[int], None]) -> None:
    """Sends files, each to its place; removes what was sent if one fails."""
    store = next((protocol for protocol in _STORES if is_kind(fs, protocol)), "")
    sent, sent_before, folder = list[str](), 0, fs._parent(next(iter(places.values())))
    is_new = not store and not fs.exists(folder)

    def passed(done: int) -> None:
        tell(sent_before + done)

    try:
        if is_new:
            fs.makedirs(folder, exist_ok=True)
        for path, place in places.items():
            size = os.path.getsize(path)
            part = max(PART, (size // MOST_PARTS // GRAIN + 1) * GRAIN)
            bounds = {"chunksize": part, "max_concurrency": AT_ONCE}
            options = {name: bounds[name] for name in _STORES.get(store, ())}
            hidden = "" if store else f"{folder}/.ckptool-{secrets.token_hex(8)}.tmp"
            if hidden:
                sent.append(hidden)
            _put(fs, path, hidden or place, sent, passed, options)
            if hidden:
                fs.invalidate_cache()
                sent += [] if fs.exists(place) else [place]  # what another writer put there meanwhile stays
                fs.mv(hidden, place)
            sent_before += size
    except BaseException:
        for place in reversed(sent):
            with suppress(Exception):
                if not existed or place not in places.values():
                    fs.rm_file(place)
        if is_new:
            with suppress(Exception):
                fs.rmdir(folder)
        raise


def _put(fs: Any, path: str, place: str, sent: list[str], tell: Callable[[int], None], options: dict[str, int]) -> None:
    """Sends one file. A signal ends it between two parts, so that the store drops those that were sent.

    sent: gets the place once all parts have arrived; until then nothing is there, or what another writer put there.
    """
    from fsspec.callbacks import Callback

    stopped = list[BaseException]()

    def passed(size: int, done: int) -> None:
        if done == size:
            sent.append(place)
        if stopped:
            raise InterruptedError
        tell(done)

    callback = Callback(hooks={"sent": passed})
    if not fs.async_impl:
        fs.put_file(path, place, callback=callback, **options)
        return
    job = None
    try:
        with signals_held():  # until `job` says what has to be waited for
            job = asyncio.run_coroutine_threadsafe(fs._put_file(path, place, callback=callback, **options), fs.loop)
        job.result()
        sent.append(place)
    except BaseException as error:
        stopped.append(error)
        if job is not None:
            job.exception()  # until it has ended
        raise


@contextmanager
def _problems(url: str) -> Iterator[None]:
    """Raises one of our errors in place of a file system's."""
    try:
        yield
    except CkptoolError:
        raise
    except Exception as error:
        kinds: dict[Any, type[FileProblem]] = {FileNotFoundError: FileMissing, PermissionError: NoPermission}
        kind, number = kinds.get(type(error), FileProblem), getattr(error, "errno", None)
        what = f"cannot write {url}: {foreign(str(error)) or type(error).__name__}"
        raise kind(what, "Nothing was written there.").about(number, url) from error
