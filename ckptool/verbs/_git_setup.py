"""git with checkpoints: its configuration, and the text that it compares in their place."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Annotated, Any, get_args

from ckptool import formats
from ckptool.analysis.digests import tensor_digests
from ckptool.analysis.git import POINTER, SMALL, git
from ckptool.analysis.inspect import listing
from ckptool.analysis.words import value_text
from ckptool.checkpoint import Data, InlineBytes, Storage, StorageRef
from ckptool.checkpoint.blocks import sha256_of
from ckptool.checkpoint.files import Source, unchanged
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.numpy_arrays import Array, LazyBytes, array_entry
from ckptool.checkpoint.tree import Path, address, item_at
from ckptool.commands import option, verb
from ckptool.errors import CkptoolError, Conflict, FileProblem, NotACheckpoint, counted, listed, printable
from ckptool.errors import quoted as shell_word
from ckptool.facts import WHOLE, Note, Page, Report, Told, bold
from ckptool.output import check_target, make_folder, replace_file
from ckptool.output.sink import digest_of
from ckptool.pickles.plain import expand
from ckptool.verbs._options import DryRun

# What is never anything but a checkpoint or an array, and the names that trainers give to `.bin` and `.tar`.
PATTERNS = (
    *("*.pt", "*.pth", "*.ckpt", "*.th", "*.safetensors", "*.sft", "*.npz", "*.npy", "*.pt.tar", "*.pth.tar"),
    *("pytorch_model*.bin", "adapter_model.bin", "diffusion_pytorch_model*.bin"),
)
CACHE = "refs/notes/textconv/ckptool"
# Of our lines among the attributes. The first says what the file was before them; an editor or autocrlf may end lines
# with CRLF, and `git lfs track` replaces the line with its pattern.
_NEW, _OPEN = b" (a new file)", b" (after a line without an end)"
_BEGIN, _END, _OURS = b"# >>> ckptool git-setup", b"# <<< ckptool git-setup", b" diff=ckptool"
_BLOCK = re.compile(rb"^" + _BEGIN + rb"(| \([a-z ]+\))\r?\n((?:(?!# [<>]{3}).*\n)*)" + _END + rb"\r?\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GitSetup(Report):
    """Changes to git's configuration and to a file of attributes.

    commands: those that change the configuration, as argv.  attributes: the file.  patterns: that were put in it,
    or taken out of it.  removed: this was the way back.  dry_run: nothing was changed.
    """

    schema = "git-setup/2"

    commands: tuple[tuple[str, ...], ...]
    attributes: str
    patterns: tuple[str, ...]
    removed: bool
    dry_run: bool
    notes: tuple[Note, ...] = ()

    def told(self) -> Told:
        head = "removed" if self.removed else "git compares checkpoints by their tensors"
        if not self.commands and not self.patterns:
            head = "nothing to remove" if self.removed else "set up already"
        elif self.dry_run:
            head = "would remove" if self.removed else "would set up"
        yield bold("git-setup"), f": {head}"
        yield from (f"  {' '.join(map(shell_word, command))}" for command in self.commands)
        if self.patterns:
            what = "without" if self.removed else "with"
            yield f"  {self.attributes}: {what} diff=ckptool for {listed(self.patterns, 99)}"
        yield from self.notes


def _of_git(textconv: Annotated[str | None, option("--textconv FILE", "For git.", hidden=True)] = None) -> Page | None:
    if textconv is None:
        return None
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # the same text on every machine, which git keeps
    return Page("\n".join([*text_for_git(textconv), ""]))


@verb(
    ("ckptool git-setup -n", "what it would do"),
    ("ckptool git-setup --remove", "git as it was before"),
    first_try=_of_git,
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
    if everywhere:
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        named = git("config", "--type=path", "--get", "core.attributesFile", ok=(0, 1), at="/")
        path = named.removesuffix("\n") if named else os.path.join(config, "git", "attributes")
    else:
        path = os.path.join((git("rev-parse", "--show-toplevel") or "").removesuffix("\n"), ".gitattributes")
    # This program by its full path: git is also started where it is on no path.
    own = shutil.which("ckptool", path=sysconfig.get_path("scripts")) or shutil.which("ckptool") or "ckptool"
    commands: list[tuple[str, ...]] = []
    for key, value in {
        "diff.ckptool.textconv": f"{shlex.quote(own)} git-setup --textconv",
        "diff.ckptool.cachetextconv": "true",
        "diff.ckptool.binary": "true",
        "difftool.ckptool.cmd": f'{shlex.quote(own)} diff "$LOCAL" "$REMOTE"',
    }.items():
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
    before: bytes | None = None
    if os.path.lexists(path):
        check_target(path, overwrite=True)
        before = (source := Source(path)).read(0, source.size)
    # What was there before our lines, None for no file at all. A line between ours that is not stays.
    after, ours, block = before, list[bytes](), _BLOCK.search(before or b"")
    if before is not None and block is not None:
        lines_there = block[2].splitlines(keepends=True)
        others = [line for line in lines_there if not line.rstrip(b"\r\n").endswith(_OURS)]
        ours = [line.rstrip(b"\r\n").removesuffix(_OURS) for line in lines_there if line not in others]
        above, theirs = before[: block.start()], b"".join(others) + before[block.end() :]
        if block[1] == _OPEN and not theirs:
            above = above.removesuffix(b"\n").removesuffix(b"\r")
        after = None if block[1] == _NEW and not above + theirs else above + theirs
    elif _BEGIN in (before or b""):
        what = f"the end marker of ckptool's lines in {path} is missing"
        why = "Lines that are not its own are never changed."
        raise Conflict(what, why, f"Delete them by hand, and the line: {_BEGIN.decode()}")
    patterns = tuple(map(os.fsdecode, ours))
    lines = b"".join(pattern.encode() + _OURS + b"\n" for pattern in PATTERNS) + _END + b"\n"
    if not remove and (before or b"").endswith(lines):
        after, patterns = before, ()
    elif not remove:  # at the end, where they win over `diff=lfs` before them
        mark = _NEW if after is None else _OPEN if after and not after.endswith(b"\n") else b""
        after, patterns = (after or b"") + b"\n" * (mark is _OPEN) + _BEGIN + mark + b"\n" + lines, PATTERNS
    for words in () if dry_run else commands:
        git(*words[1:])
    if after is None and before is not None and not dry_run:
        os.unlink(path)
    elif after is not None and after != before and not dry_run:
        make_folder(os.path.dirname(path))
        replace_file(after, path, overwrite=True)
    notes: tuple[Note, ...] = ()
    if not (remove or everywhere or dry_run):
        anywhere = [f":(top){pattern}" if pattern[0] == "*" else f":(top)**/{pattern}" for pattern in PATTERNS]
        files = git("ls-files", "-z", "--", *anywhere) or ""
        said = (git("check-attr", "-z", "--stdin", "diff", given=os.fsencode(files)) or "").split("\0")
        drivers = [
            f"{name} ({value})" for name, value in zip(said[::3], said[2::3], strict=False) if value != "ckptool"
        ]
        count = counted(len(drivers), "checkpoint has", "checkpoints have")
        message = f"{count} another diff driver, set by other attributes: {listed(drivers, 3)}"
        notes = (Note("other-driver", message),) if drivers else ()
    return GitSetup(tuple(commands), path, patterns, remove, dry_run, notes)


# What git compares ----------------------------------------------------------------------------------------------------

DIGITS = 12
TEXT = 1 << 20  # bytes: what is no checkpoint, and no longer than this, is shown if it is a text
WIDTH = 200  # characters of a value


def text_for_git(path: str) -> list[str]:
    """The tensors and entries of a file, sorted, a line each, so that git can compare them.

    A line says address, dtype, shape and the first twelve digits of the tensor's digest, which are equal for equal
    values in any container. For a damaged file, a git-lfs pointer, or what is no checkpoint the text says so; the name
    of the file, which is git's, is left out. Raises only `FileProblem`: git caches the text, and a passing trouble of
    this machine must not be cached.
    """
    source = Source(path)
    if pointer := POINTER.match(source.read(0, min(source.size, SMALL))):
        oid = pointer[1].decode()
        here = os.path.join((git("rev-parse", "--git-common-dir", ok=(0, 128)) or "").strip(), "lfs/objects")
        path = os.path.join(here, oid[:2], oid[2:4], oid)
        if not os.path.isfile(path):
            head = ["a git-lfs pointer: the file itself is not here", f"oid sha256:{oid}", f"size {int(pointer[2])}"]
            return [*head, f"To compare the files: git lfs pull; git update-ref -d {CACHE}"]
        source = Source(path)
    try:
        with unchanged(source):
            return sorted(_lines(source))
    except FileProblem:
        raise
    except CkptoolError as error:
        if isinstance(error, NotACheckpoint) and source.size <= TEXT:
            content = source.read(0, source.size)
            with suppress(UnicodeDecodeError):
                if b"\0" not in content:
                    return [printable(line) for line in content.decode().replace("\t", "    ").splitlines()]
        said = error.what.replace(printable(source.path), "this file")
        return [f"{error.code}: {said}", f"{source.size:,} bytes  {digest_of(source.path)[:DIGITS]}"]


def _lines(source: Source) -> Iterator[str]:
    checkpoint = formats.read_alone(source)
    found = listing(checkpoint)
    pairs = [(row.path, row.tensor) for row in found.tensors]
    kinds = [""] * len(pairs)
    inside: Path | None = None  # of an object that is shown as one value
    for row in found.entries:
        if row.same_as is not None or (inside is not None and row.path[: len(inside)] == inside):
            continue
        if "_metadata" in row.path:  # versions of modules, which no other container has: an attribute, not an entry
            node = item_at(checkpoint.tree, row.path[: row.path.index("_metadata")])
            if not (isinstance(node, dict) and "_metadata" in node):
                continue
        inside = row.path if isinstance(row.value, Object) and not isinstance(expand(row.value), Object) else None
        array = array_entry(row.value)
        if array is None:
            yield f"{_name(row.path)}  {_value(row.value)}"
        else:
            pairs.append((row.path, array))
            kinds.append("numpy ")
    digests = tensor_digests(checkpoint.tree, pairs)
    for (path, _), tensor, kind in zip(pairs, digests, kinds, strict=True):
        yield f"{_name(path)}  {kind}{tensor.dtype} {list(tensor.shape or ())}  {tensor.sha256[:DIGITS]}"
    if found.unlisted:  # a change of one of them is to be seen, too
        more = counted(found.unlisted, "more entry", "more entries")
        yield f"… and {more}, in a file with the digest  {digest_of(source.path)[:DIGITS]}"
    for key, value in found.metadata.items() if formats.named(checkpoint.container).tensors_only else ():
        if not re.match(r"format$|ckptool\.", str(key)):  # which say who wrote a file, and not what is in it
            yield f"metadata {printable(str(key))}  {_value(value)}"


def _name(path: Path) -> str:
    return printable(address(path)) or WHOLE


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
