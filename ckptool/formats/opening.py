"""`FILE#address`: which file, and which part of it. What that means to a verb stands in `commands`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from ckptool import formats
from ckptool.checkpoint import Checkpoint, FileRange, PartKind, PartOf
from ckptool.checkpoint.files import Folder, Input, Source, open_input, source_of, while_open
from ckptool.checkpoint.paths import may_exist, named_urls
from ckptool.checkpoint.tree import find
from ckptool.commands import OUT_PT, Command, arg, command
from ckptool.errors import OnlyAPart, Truncated, UsageError, quoted
from ckptool.formats import marks

if TYPE_CHECKING:
    from torch.nn import Module
else:
    Module = type("Module", (), {})  # the signatures of verbs are read where torch is not installed

PathLike = str | os.PathLike[str]
CheckpointLike: TypeAlias = PathLike | IO[bytes] | Mapping[Any, Any] | Checkpoint | Module
"""A path or `FILE#ADDRESS`, an open binary file, a dictionary of tensors or arrays, a checkpoint, a module."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint, and the address of the part of it that was named (None for the whole).

    path: of its file; empty for what is in memory.
    """

    checkpoint: Checkpoint
    at: str | None
    path: str

    @property
    def name(self) -> str:
        """What to call it: its path, if it has one."""
        return self.path or "the checkpoint"

    @property
    def taken(self) -> Checkpoint:
        """The whole or the part that was named, as a checkpoint. Raises `UsageError` where nothing is at the
        address."""
        return self.checkpoint if self.at is None else part_of(self.checkpoint, self.at)


def part_of(checkpoint: Checkpoint, at: str) -> Checkpoint:
    """The part of a checkpoint at an address; all of it for an empty one. Raises `UsageError` where nothing is
    there."""
    path, node = find(checkpoint.tree, at)
    if not path:
        return checkpoint
    metadata = {key: value for key, value in checkpoint.metadata.items() if key != marks.RECOVERED}
    metadata |= marks.recovered(checkpoint.metadata, path)
    alone: dict[str, Any] = {"discarded": (), "extras": {}, "origin": None, "memory": None}
    return replace(checkpoint, tree=node, metadata=metadata, base=(*checkpoint.base, *path), **alone)


def in_memory(given: object) -> bool:
    """True for what is no file: objects in memory, and checkpoints that are open already."""
    is_read = given is None or isinstance(given, (str, os.PathLike)) or callable(getattr(given, "read", None))
    return isinstance(given, (Mapping, Checkpoint)) or not is_read


def shown(given: CheckpointLike) -> str:
    """What to call an input: its path, or its type."""
    return named_urls(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else type(given).__name__


def open_file(file: CheckpointLike, at: str | None = None) -> Opened:
    """Opens `FILE` or `FILE#address` (a file that exists under the whole name wins). at: the part behind `#`.

    An open file is read from its position on, and stands at its end afterwards (see `source_of`), or where
    the next of torch's legacy streams begins. What is in memory is not copied: see `memory`.
    """
    if isinstance(file, Checkpoint):
        # A part is in no file by itself: none may be copied in its place.
        whole = replace(file, base=(), source=None) if file.base else file
        return Opened(whole, at, whole.source.path if whole.source is not None else "")
    if in_memory(file):
        from ckptool.formats.in_memory import checkpoint_in_memory

        return Opened(checkpoint_in_memory(file), at, "")
    with while_open(), counting_whole():
        source, place = open_source(file)
        checkpoint = formats.read_source(source)
    if isinstance(file, (str, os.PathLike)):
        return Opened(checkpoint, at if at is not None else place, source.path)
    given: Any = file
    follows = checkpoint.container == "torch-legacy" and any(note.code == "trailing-bytes" for note in checkpoint.notes)
    if follows and isinstance(source, Source):  # another stream, which torch reads next
        from ckptool.formats.torch_legacy import read_stream

        _, end = read_stream(FileRange(source, 0, source.size), name=f"{source}")
        with suppress(OSError, ValueError):  # a pipe stays at its end
            given.seek(end - source.size, os.SEEK_CUR)
    return Opened(checkpoint, at, source.path if may_exist(source.path) else "")


def open_source(file: CheckpointLike) -> tuple[Input, str | None]:
    """The file or folder behind a path or an open file, not read yet, and the address behind `#`.

    Raises `UsageError` for what is in memory.
    """
    if not isinstance(file, (str, os.PathLike)):
        return source_of(file), None
    path, place = split(file)
    return open_input(path), place


@contextmanager
def counting_whole() -> Iterator[None]:
    """Adds to the error for a zip that was cut off how much of it could be saved, which takes a walk through the
    file."""
    try:
        yield
    except Truncated as error:
        from ckptool.formats.damaged import with_whole_count

        raise with_whole_count(error) from None


def open_whole(file: CheckpointLike, at: str | None = None, *, part: bool = False) -> Opened:
    """Opens a file for a verb that takes it for a whole checkpoint. part: one that is only a part will do.

    Raises `OnlyAPart` for a rank's share, one shard of several, placeholders, a folder of which members are missing or
    damaged.
    """
    opened = open_file(file, at)
    refuse_part(opened.checkpoint, part=part)
    return opened


def refuse_part(checkpoint: Checkpoint, *, part: bool = False) -> None:
    """Raises `OnlyAPart` for a checkpoint that is only a part, unless a part will do."""
    found = checkpoint.part
    if found is None or part:
        return
    take = f"take it as it is: {arg(part=True)}"
    if found.kind is PartKind.MEMBERS:
        raise _of_members(checkpoint, found, take)
    what = f"{checkpoint.source or 'the checkpoint'} is only a part of a checkpoint: {found.label}"
    way = f"See the whole: {command('inspect', found.whole)}; or {take}" if found.whole else f"T{take[1:]}"
    raise OnlyAPart(what, found.sentence(), way)


def _of_members(checkpoint: Checkpoint, found: PartOf, otherwise: str | Command) -> OnlyAPart:
    """The error for a folder of which members are missing, damaged or not joined. otherwise: the other way on."""
    source = checkpoint.source
    first = next(iter(source.files), "").partition("/")[0] if isinstance(source, Folder) else ""
    member = source.path if isinstance(source, Source) else os.path.join(found.whole, first)
    fix = f"Name one of its files: {quoted(member)}; or {otherwise}"
    if found.join:
        how = found.join if isinstance(found.join, Command) else Command(found.join)
        fix = f"Say how: {how} (docs/formats.md has rules to start from); or n{fix[1:]}"
    what = f"{found.whole} is a folder, of which {found.label} are there and whole"
    return OnlyAPart(what, found.sentence(), fix)


def open_to_change(file: CheckpointLike, at: str | None = None) -> Opened:
    """Opens a file for a verb that changes keys, types or entries: not one shard, which has to go on fitting its index.

    Raises `OnlyAPart` for a file that the index beside it names, and for a folder of members that are not all there, or
    are not joined.
    """
    opened = open_file(file, at)
    found = opened.checkpoint.part
    if found is not None and found.kind is PartKind.MEMBERS and isinstance(opened.checkpoint.source, Folder):
        raise _of_members(opened.checkpoint, found, command("convert", opened.path, part=True, out=OUT_PT))
    if found is not None and found.index:
        what = f"{opened.checkpoint.source} is {found.label} of {os.path.join(found.whole, found.index)}"
        why = "Changed alone, it would no longer fit the index and the other shards. Nothing was written."
        raise OnlyAPart(what, why, f"Name the folder instead: {quoted(found.whole)}")
    return opened


def split(file: PathLike) -> tuple[str, str | None]:
    """The path and address in `FILE#address`; of a URL with a secret in it, the name that it has here."""
    name = named_urls(os.fspath(file))
    if "#" not in name or os.path.lexists(name):
        return name, None
    for i in reversed([i for i, c in enumerate(name) if c == "#"]):
        if os.path.lexists(name[:i]):
            return name[:i], name[i + 1 :]
    path, _, place = name.partition("#")
    return path, place


def refuse_address(verb: str, file: CheckpointLike) -> None:
    """Raises `UsageError` where a verb that is about whole files was given a part of one, or objects in memory."""
    if in_memory(file):
        what = f"{verb} looks at files, and was given {shown(file)}"
        raise UsageError(what, "In memory there is nothing of the kind.", "Name a file.")
    if not isinstance(file, (str, os.PathLike)):
        return
    path, place = split(file)
    if place is not None and may_exist(path):
        what = f"{shown(file)} is a part of a file, and {verb} takes whole files"
        raise UsageError(what, "", f"Name the file: {path}")
