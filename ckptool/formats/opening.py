"""`FILE#address`: which file, and which part of it. What that means to a verb stands in `checkpoint.commands`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ckptool import formats
from ckptool.checkpoint import Checkpoint, PartKind, PartOf
from ckptool.checkpoint.commands import OUT_PT, Advice, Command, command
from ckptool.checkpoint.files import Folder, Source
from ckptool.checkpoint.tree import find
from ckptool.errors import OnlyAPart, Truncated, UsageError, printable, quoted
from ckptool.formats import marks

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint, and the address of the part of it that was named (None for the whole)."""

    checkpoint: Checkpoint
    at: str | None
    path: str

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
    metadata |= marks.recovered_in_part(checkpoint.metadata, path)
    return replace(
        checkpoint, tree=node, metadata=metadata, discarded=(), extras={}, base=(*checkpoint.base, *path), origin=None
    )


def open_file(file: PathLike, at: str | None = None) -> Opened:
    """Opens `FILE` or `FILE#address` (a file that exists under the whole name wins). at: the part behind `#`."""
    path, place = split(file)
    with counting_whole():
        return Opened(formats.read(path), at if at is not None else place, path)


@contextmanager
def counting_whole() -> Iterator[None]:
    """Adds to the error for a zip that was cut off how much of it could be saved, which takes a walk through the
    file."""
    try:
        yield
    except Truncated as error:
        from ckptool.formats.damaged import with_whole_count

        raise with_whole_count(error) from None


def open_whole(file: PathLike, at: str | None = None, *, part: bool = False) -> Opened:
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
    take = "take it as it is: --part"
    if found.kind is PartKind.MEMBERS:
        raise _of_members(checkpoint, found, take)
    raise OnlyAPart(
        f"{checkpoint.source or 'the checkpoint'} is only a part of a checkpoint: {found.label}",
        f"{found.meaning[:1].upper()}{found.meaning[1:]}.",
        Advice("See the whole: ", command("inspect", found.whole), f"; or {take}")
        if found.whole
        else take[:1].upper() + take[1:],
    )


def _of_members(checkpoint: Checkpoint, found: PartOf, otherwise: str | Command) -> OnlyAPart:
    """The error for a folder of which members are missing, damaged or not joined. otherwise: the other way on."""
    what = f"{printable(found.whole)} is a folder, of which {found.label} are there and whole"
    why = f"{found.meaning[:1].upper()}{found.meaning[1:]}."
    name = f"ame one of its files: {quoted(_member(checkpoint))}; or "
    join = ("Say how: ", Command(found.join), f" (docs/formats.md has rules to start from); or n{name}")
    return OnlyAPart(what, why, Advice(*(join if found.join else [f"N{name}"]), otherwise))


def _member(checkpoint: Checkpoint) -> str:
    """The path of one member of a folder: its weights, or the first."""
    if isinstance(checkpoint.source, Source):
        return checkpoint.source.path
    folder = checkpoint.part.whole if checkpoint.part is not None else ""
    first = next(iter(checkpoint.source.files), "") if checkpoint.source is not None else ""
    return os.path.join(folder, first.partition("/")[0])


def open_to_change(file: PathLike, at: str | None = None) -> Opened:
    """Opens a file for a verb that changes keys, types or entries: not one shard, which has to go on fitting its index.

    Raises `OnlyAPart` for a file that the index beside it names, and for a folder of members that are not all there, or
    are not joined.
    """
    opened = open_file(file, at)
    found = opened.checkpoint.part
    if found is not None and found.kind is PartKind.MEMBERS and isinstance(opened.checkpoint.source, Folder):
        raise _of_members(opened.checkpoint, found, command("convert", opened.path, part=True, out=OUT_PT))
    if found is not None and found.index:
        what = f"{opened.checkpoint.source} is {found.label} of {printable(os.path.join(found.whole, found.index))}"
        why = "Changed alone, it would no longer fit the index and the other shards. Nothing was written."
        raise OnlyAPart(what, why, f"Name the folder instead: {quoted(found.whole)}")
    return opened


def split(file: PathLike) -> tuple[str, str | None]:
    """The path and address in `FILE#address`."""
    name = os.fspath(file)
    if "#" not in name or os.path.lexists(name):
        return name, None
    for i in reversed([i for i, c in enumerate(name) if c == "#"]):
        if os.path.lexists(name[:i]):
            return name[:i], name[i + 1 :]
    path, _, place = name.partition("#")
    return path, place


def refuse_address(verb: str, file: PathLike) -> None:
    """Raises `UsageError` where a part of a file was named to a verb that is about whole files."""
    path, place = split(file)
    if place is not None and os.path.lexists(path):
        what = f"{printable(os.fspath(file))} is a part of a file, and {verb} takes whole files"
        raise UsageError(what, "", f"Name the file: {printable(path)}")
