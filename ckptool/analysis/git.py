"""Git as both of its verbs ask it; what git-lfs puts in the place of a large file; the text that git compares in the
place of a checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any, get_args

from ckptool import formats
from ckptool.analysis.digests import tensor_digests
from ckptool.analysis.inspect import listing
from ckptool.analysis.words import value_text
from ckptool.checkpoint import Data, FileRange, InlineBytes, Storage, StorageRef
from ckptool.checkpoint.blocks import sha256_of
from ckptool.checkpoint.files import Source, unchanged
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.numpy_arrays import Array, LongValue, array_entry
from ckptool.checkpoint.tree import address
from ckptool.errors import CkptoolError, FileProblem, NotACheckpoint, RunFailed, counted, printable
from ckptool.facts import WHOLE
from ckptool.pickles.plain import expand

CACHE = "refs/notes/textconv/ckptool"
DIGITS = 12
TEXT = 1 << 20  # bytes: a file that is no checkpoint is shown up to this size, if it is text
WIDTH = 200  # characters of a value
SMALL = 1024  # bytes, more than any git-lfs pointer has
POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)


def git(*words: str, ok: Collection[int] = (0,), at: str = "") -> str | None:
    """The output of a git command in the folder `at`; None where it ends with a code of `ok` other than 0.
    Raises `RunFailed` with what git says, `FileProblem` where there is no git."""
    try:
        process = subprocess.run(["git", "-C", at, *words], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        fix = "Install git." if isinstance(error, FileNotFoundError) else ""
        raise FileProblem("git could not be started", error.strerror or "", fix) from error
    first, _, rest = os.fsdecode(process.stderr).strip().partition("\n")
    if process.returncode not in ok or "safe.directory" in rest:  # a repository of another user: nothing is known
        raise RunFailed(f"git {words[0]} ended with code {process.returncode}: {first}", "", rest.partition("\n\t")[2])
    return None if process.returncode else os.fsdecode(process.stdout)


def text_for_git(path: str) -> list[str]:
    """The tensors and entries of a file, sorted, a line each, so that git can compare them.
    A line says address, dtype, shape and the first digits of the tensor's digest, which are equal for equal values in
    any container. What is no checkpoint, or a damaged one, is said without the name of the file, which is git's.
    Raises only `FileProblem`: git caches the text, and a passing trouble of this machine must not be cached."""
    source = Source(path)
    if pointer := POINTER.match(source.read(0, min(source.size, SMALL))):
        oid = pointer[1].decode()
        objects = os.path.join((git("rev-parse", "--git-common-dir", ok=(0, 128)) or "").strip(), "lfs/objects")
        path = os.path.join(objects, oid[:2], oid[2:4], oid)
        if not os.path.isfile(path):
            head = ["a git-lfs pointer: the file is not here", f"oid sha256:{oid}", f"size {int(pointer[2])}"]
            return [*head, f"To compare the files: git lfs pull; git update-ref -d {CACHE}"]
        source = Source(path)
    try:
        with unchanged(source):
            return sorted(_content_lines(source))
    except FileProblem:
        raise
    except CkptoolError as error:
        content = source.read(0, source.size) if isinstance(error, NotACheckpoint) and source.size <= TEXT else b"\0"
        with suppress(UnicodeDecodeError):
            if b"\0" not in content:
                return [printable(line) for line in content.decode().replace("\t", "    ").splitlines()]
        message = error.what.replace(printable(source.path), "this file")
        return [f"{error.code}: {message}", f"{source.size:,} bytes  {_digest(source)}"]


def _content_lines(source: Source) -> Iterator[str]:
    checkpoint = formats.read_alone(source)
    contents = listing(checkpoint)
    pairs = [(row.path, row.tensor) for row in contents.tensors]
    kinds = [""] * len(pairs)
    for row in contents.entries:
        # Versions of modules are in no other container.
        if row.same_as is not None or "_metadata" in row.path:
            continue
        array = array_entry(row.value)
        if array is None:
            yield f"{printable(row.address) or WHOLE}  {_value_line(row.value)}"
        else:
            pairs.append((row.path, array))
            kinds.append("numpy ")
    digests = tensor_digests(checkpoint.tree, pairs)
    for (path, _), tensor, kind in zip(pairs, digests, kinds, strict=True):
        shape, digest = list(tensor.shape or ()), tensor.sha256[:DIGITS]
        yield f"{printable(address(path)) or WHOLE}  {kind}{tensor.dtype} {shape}  {digest}"
    if contents.unlisted:  # so that a change in one of them shows, too
        more = counted(contents.unlisted, "more entry", "more entries")
        yield f"… and {more}, in a file with the digest  {_digest(source)}"
    for key, value in contents.metadata.items() if formats.named(checkpoint.container).tensors_only else ():
        if not re.match(r"format$|ckptool\.", str(key)):  # which say who wrote a file, and not what is in it
            yield f"metadata {printable(str(key))}  {_value_line(value)}"


def _digest(source: Source) -> str:
    return sha256_of(FileRange(source, 0, source.size)).hexdigest()[:DIGITS]


def _value_line(value: Any) -> str:
    """A value in a line; with a digest where the line cannot hold all of it."""
    content: Any = expand(value) if isinstance(value, Object) else value
    while isinstance(content, (StorageRef, Storage, Array, LongValue)):
        content = content.storage if isinstance(content, StorageRef) else content.data
    if isinstance(content, str) and (len(content) > WIDTH // 2 or "\\" in content):  # which escapes others, too
        content = content.encode("utf-8", "surrogatepass")
    if isinstance(content, (bytes, bytearray)):
        content = InlineBytes(bytes(content))
    digest = f"  {sha256_of(content).hexdigest()[:DIGITS]}" if isinstance(content, get_args(Data)) else ""
    return value_text(value, WIDTH) + digest
