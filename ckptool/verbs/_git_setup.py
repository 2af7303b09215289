"""git with checkpoints: its configuration, and the text that it compares in their place."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import Annotated, Any, get_args

from ckptool import formats
from ckptool.analysis.digests import tensor_digests
from ckptool.analysis.git_setup import GitSetup
from ckptool.analysis.inspect import EntryRow, listing
from ckptool.analysis.train import Page
from ckptool.analysis.words import value_text
from ckptool.checkpoint import Data, InlineBytes, Note, Storage, StorageRef, Tensor
from ckptool.checkpoint.blocks import sha256_of
from ckptool.checkpoint.files import Source, unchanged
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.numpy_arrays import Array, LazyBytes, array_entry
from ckptool.checkpoint.plan import Plan
from ckptool.checkpoint.tree import Path, address, item_at
from ckptool.errors import (
    CkptoolError,
    Conflict,
    FileProblem,
    NotACheckpoint,
    RunFailed,
    counted,
    listed,
    printable,
)
from ckptool.facts import WHOLE
from ckptool.options import option, verb
from ckptool.output import check_target, digest_of, make_folder, replace_file
from ckptool.pickles.plain.values import expand
from ckptool.verbs._options import DryRun

# What is never anything but a checkpoint or an array, and the names that trainers give to `.bin` and `.tar`.
PATTERNS = (
    *("*.pt", "*.pth", "*.ckpt", "*.th", "*.safetensors", "*.sft", "*.npz", "*.npy", "*.pt.tar", "*.pth.tar"),
    *("pytorch_model*.bin", "adapter_model.bin", "diffusion_pytorch_model*.bin"),
)
DRIVER = "diff=ckptool"
CACHE = "refs/notes/textconv/ckptool"


def git(*words: str, ok: Collection[int] = (0,), given: bytes = b"", at: str | None = None) -> str | None:
    """The output of a git command; None where it ends with another code of `ok` than 0.

    Raises `RunFailed` with what git says, `FileProblem` where there is no git.
    """
    try:
        done = subprocess.run(["git", *words], input=given, capture_output=True, cwd=at, check=False)
    except OSError as error:
        raise FileProblem("git could not be started", str(error), "Install git.") from error
    if done.returncode not in ok:
        said = os.fsdecode(done.stderr).strip().partition("\n")[0]
        raise RunFailed(f"git {words[0]} ended with code {done.returncode}: {said}")
    return None if done.returncode else os.fsdecode(done.stdout)


# Set-up --------------------------------------------------------------------------------------------------------------


def settings() -> dict[str, str]:
    """The settings that git needs, with this program by its full path: git is also started where it is on no path."""
    own = shutil.which("ckptool", path=sysconfig.get_path("scripts")) or shutil.which("ckptool") or "ckptool"
    program = shlex.quote(own)
    return {
        "diff.ckptool.textconv": f"{program} git-setup --textconv",
        "diff.ckptool.cachetextconv": "true",
        "diff.ckptool.binary": "true",
        "difftool.ckptool.cmd": f'{program} diff "$LOCAL" "$REMOTE"',
    }


def _of_git(textconv: Annotated[str | None, option("--textconv FILE", "For git.", hidden=True)] = None) -> Page | None:
    if textconv is None:
        return None
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # the same text on every machine, which git keeps
    return Page(text_for_git(textconv))


@verb(
    ("ckptool git-setup -n", "what it would do"),
    ("ckptool git-setup --remove", "git as it was before"),
    instead=_of_git,
)
def git_setup(
    *,
    everywhere: Annotated[bool, option("--global", "Set up all your repositories, not only this one.")] = False,
    remove: Annotated[bool, option("--remove", "Remove exactly what git-setup added.")] = False,
    dry_run: DryRun = False,
) -> GitSetup:
    """Makes git compare checkpoints by their tensors, in this repository or everywhere; or undoes that.

    Raises `RunFailed` outside of a repository, `Conflict` where our lines in the attributes were edited.
    """
    scope = "--global" if everywhere else "--local"
    commands: list[tuple[str, ...]] = []
    path = _attributes_file(everywhere)
    for key, value in settings().items():
        old = git("config", scope, "--get-all", key, ok=(0, 1))
        if remove and old is not None:
            commands.append(("git", "config", scope, "--unset-all", key))
        elif not remove and old != f"{value}\n":
            commands.append(("git", "config", scope, "--replace-all", key, value))
    if remove and not everywhere and git("rev-parse", "-q", "--verify", CACHE, ok=(0, 1)) is not None:
        commands.append(("git", "update-ref", "-d", CACHE))
    if not everywhere and not remove and os.path.islink(path):
        why = "git does not follow a link of that name, and would see none of our lines."
        raise Conflict(f"{path} is a link", why, "For all your repositories: ckptool git-setup --global")
    before = _content(path)
    after = _without_block(before, path) if remove else _with_block(before, path)
    if not dry_run:
        for words in commands:
            git(*words[1:])
        if after != before:
            _write(path, after)
    patterns = _patterns(before if remove else after) if after != before else ()
    notes = () if remove or everywhere else tuple(_overridden(dry_run))
    return GitSetup(tuple(commands), path, patterns, remove, dry_run, notes)


def _attributes_file(everywhere: bool) -> str:
    if not everywhere:
        return os.path.join((git("rev-parse", "--show-toplevel") or "").removesuffix("\n"), ".gitattributes")
    named = git("config", "--type=path", "--get", "core.attributesFile", ok=(0, 1), at="/")
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return named.removesuffix("\n") if named else os.path.join(config, "git", "attributes")


def _content(path: str) -> bytes | None:
    """The bytes of a file; None where there is none."""
    if not os.path.lexists(path):
        return None
    check_target(path, overwrite=True)
    source = Source(path)
    return source.read(0, source.size)


def _write(path: str, content: bytes | None) -> None:
    if content is None:
        os.unlink(path)
        return
    make_folder(os.path.dirname(path))
    replace_file(Plan({"": [InlineBytes(content)]}), path, overwrite=True)


# Of the block: what the file was before it.
_NEW, _OPEN = b" (a new file)", b" (after a line without an end)"
_BEGIN, _END = b"# >>> ckptool git-setup", b"# <<< ckptool git-setup"
_OURS, _OURS_CRLF = f" {DRIVER}\n".encode(), f" {DRIVER}\r\n".encode()  # an editor or autocrlf may end lines so
_BLOCK = re.compile(rb"^" + _BEGIN + rb"(| \([a-z ]+\))\r?\n((?:(?!# [<>]{3}).*\n)*)" + _END + rb"\r?\n", re.MULTILINE)


def _with_block(content: bytes | None, path: str) -> bytes:
    """The attributes with our lines at their end, where they win over `diff=lfs` before them."""
    found = _BLOCK.search(content or b"")
    rest = _without_block(content, path)
    own = b"".join(pattern.encode() + _OURS for pattern in PATTERNS)
    if content is not None and found and content.endswith(found[0]) and found[2] == own:
        return content
    before = _NEW if rest is None else _OPEN if rest and not rest.endswith(b"\n") else b""
    return (rest or b"") + b"\n" * (before is _OPEN) + _BEGIN + before + b"\n" + own + _END + b"\n"


def _without_block(content: bytes | None, path: str) -> bytes | None:
    """The attributes as they were before our lines; None for no file at all. A line between ours that is not (`git lfs
    track` changes the one with its pattern) stays."""
    found = _BLOCK.search(content or b"")
    if content is None or found is None:
        if _BEGIN in (content or b""):
            raise Conflict(
                f"the end marker of ckptool's lines in {path} is missing",
                "Lines that are not its own are never changed.",
                f"Delete them by hand, and the line: {_BEGIN.decode()}",
            )
        return content
    before, after = content[: found.start()], content[found.end() :]
    theirs = b"".join(line for line in found[2].splitlines(keepends=True) if not line.endswith((_OURS, _OURS_CRLF)))
    if found[1] == _OPEN and not theirs + after:
        before = before.removesuffix(b"\n").removesuffix(b"\r")
    return None if found[1] == _NEW and not before + theirs + after else before + theirs + after


def _patterns(content: bytes | None) -> tuple[str, ...]:
    found = _BLOCK.search(content or b"")
    return tuple(os.fsdecode(line) for line in found[2].replace(_OURS_CRLF, _OURS).split(_OURS)[:-1]) if found else ()


def _overridden(dry_run: bool) -> Iterator[Note]:
    """A note on checkpoints of the repository that other attributes give another driver."""
    files = git("ls-files", "-z", "--", *(f":(top){'**/' * (p[0] != '*')}{p}" for p in PATTERNS)) or ""
    said = (git("check-attr", "-z", "--stdin", "diff", given=os.fsencode(files)) or "").split("\0")
    others = [f"{name} ({value})" for name, value in zip(said[::3], said[2::3], strict=False) if value != "ckptool"]
    if others and not dry_run:
        count = counted(len(others), "checkpoint has", "checkpoints have")
        which = listed(others, 3)
        yield Note("other-driver", f"{count} another diff driver, set by other attributes: {which}")


# What git compares ----------------------------------------------------------------------------------------------------

SMALL = 1024  # bytes, which no pointer of git-lfs has
DIGITS = 12
_OF_WRITERS = re.compile(r"format$|ckptool\.")  # metadata that says who wrote a file, and not what is in it
TEXT = 1 << 20  # bytes: what is no checkpoint, and no longer than this, is shown if it is a text
WIDTH = 200  # characters of a value
POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)


def text_for_git(path: str) -> str:
    """The tensors and entries of a file, sorted, a line each, so that git can compare them.

    A line says address, dtype, shape and the first twelve digits of the tensor's digest, which are equal for equal
    values in any container. For a damaged file, a git-lfs pointer, or what is no checkpoint the text says so. Raises
    only `FileProblem`: git caches the text, and a passing trouble of this machine must not be cached.
    """
    source = Source(path)
    pointer = POINTER.match(source.read(0, min(source.size, SMALL)))
    if pointer:
        oid = pointer[1].decode()
        here = os.path.join((git("rev-parse", "--git-common-dir", ok=(0, 128)) or "").strip(), "lfs/objects")
        path = os.path.join(here, oid[:2], oid[2:4], oid)
        if not os.path.isfile(path):
            return (
                f"a git-lfs pointer: the file itself is not here\noid sha256:{oid}\nsize {int(pointer[2])}\n"
                f"To compare the files: git lfs pull; git update-ref -d {CACHE}\n"
            )
        source = Source(path)
    try:
        with unchanged(source):
            lines = _tensor_lines(source)
    except FileProblem:
        raise
    except CkptoolError as error:
        lines = _other_lines(source, error)
    return "".join(f"{line}\n" for line in lines)


def _tensor_lines(source: Source) -> list[str]:
    checkpoint = formats.read_alone(source)
    found = listing(checkpoint)
    entries = list(_entries([row for row in found.entries if row.same_as is None], checkpoint.tree))
    arrays = [(row.path, array) for row in entries if (array := array_entry(row.value)) is not None]
    pairs: list[tuple[Path, Tensor]] = [*((row.path, row.tensor) for row in found.tensors), *arrays]
    as_arrays = [""] * len(found.tensors) + ["numpy "] * len(arrays)
    lines = [
        f"{_name(path)}  {kind}{tensor.dtype} {list(tensor.shape or ())}  {tensor.sha256[:DIGITS]}"
        for (path, _), tensor, kind in zip(pairs, tensor_digests(checkpoint.tree, pairs), as_arrays, strict=True)
    ]
    lines += [f"{_name(row.path)}  {_value(row.value)}" for row in entries if array_entry(row.value) is None]
    if found.unlisted:  # a change of one of them is to be seen, too
        more = counted(found.unlisted, "more entry", "more entries")
        lines.append(f"… and {more}, in a file with the digest  {digest_of(source.path)[:DIGITS]}")
    if formats.named(checkpoint.container).tensors_only:
        said = {str(key): value for key, value in found.metadata.items()}
        lines += [f"metadata {printable(key)}  {_value(said[key])}" for key in said if not _OF_WRITERS.match(key)]
    return sorted(lines)


def _name(path: Path) -> str:
    return printable(address(path)) or WHOLE


def _entries(rows: Sequence[EntryRow], tree: Any) -> Iterator[EntryRow]:
    """The plain values: not what an object is made of that is shown as a value, nor a state dict's versions of
    modules, which no other container has."""
    above: Path | None = None
    versions: dict[Path, bool] = {}
    for row in rows:
        if "_metadata" in row.path:  # as an attribute of the state dict: an entry called so is one like others
            base = row.path[: row.path.index("_metadata")]
            if base not in versions:
                node = item_at(tree, base)
                versions[base] = not (isinstance(node, dict) and "_metadata" in node)
            if versions[base]:
                continue
        if above is not None and row.path[: len(above)] == above:
            continue
        above = row.path if isinstance(row.value, Object) and not isinstance(expand(row.value), Object) else None
        yield row


def _value(value: Any) -> str:
    """A value in a line; with a digest where the line cannot hold all of it."""
    content: Any = expand(value) if isinstance(value, Object) else value
    while isinstance(content, (StorageRef, Storage, Array, LazyBytes)):
        content = content.storage if isinstance(content, StorageRef) else content.data
    if isinstance(content, str) and (len(content) > WIDTH // 2 or "\\" in content):  # which escapes others, too
        content = content.encode("utf-8", "surrogatepass")
    if isinstance(content, (bytes, bytearray)):
        content = InlineBytes(bytes(content))
    digest = f"  {sha256_of(content).hexdigest()[:DIGITS]}" if isinstance(content, get_args(Data)) else ""
    return value_text(value, WIDTH) + digest


def _other_lines(source: Source, error: CkptoolError) -> list[str]:
    """A text as it is; of anything else why it is not shown, with a digest. The file's name, which is git's, is left
    out."""
    if isinstance(error, NotACheckpoint) and source.size <= TEXT:
        content = source.read(0, source.size)
        with suppress(UnicodeDecodeError):
            if b"\0" not in content:
                return [printable(line) for line in content.decode().replace("\t", "    ").splitlines()]
    said = error.what.replace(printable(source.path), "this file")
    return [f"{error.code}: {said}", f"{source.size:,} bytes  {digest_of(source.path)[:DIGITS]}"]
