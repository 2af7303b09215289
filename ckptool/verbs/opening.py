"""`FILE#address`: which file, and which part of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptool import formats
from ckptool.checkpoint import Checkpoint
from ckptool.commands import Advice, command
from ckptool.errors import OnlyAPart, printable, quoted

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint, and the address of the part of it that was named (None for the whole)."""

    checkpoint: Checkpoint
    at: str | None
    path: str


def open_file(file: PathLike, at: str | None = None) -> Opened:
    """Opens `FILE` or `FILE#address`; a file that exists under the whole name wins. `at` is the same as the part behind `#`."""
    path, place = split(file)
    return Opened(formats.read(path), at if at is not None else place, path)


def open_whole(file: PathLike, at: str | None = None, *, part: bool = False) -> Opened:
    """The same for a verb that takes what it opens for a whole checkpoint. part: one that is only a part is taken, too.

    Raises `OnlyAPart` for a rank's share, one shard of several, placeholders, a folder of which members are missing or damaged.
    """
    opened = open_file(file, at)
    refuse_part(opened.checkpoint, part=part)
    return opened


def refuse_part(checkpoint: Checkpoint, *, part: bool = False) -> None:
    """Raises `OnlyAPart` for a checkpoint that is only a part, unless a part will do."""
    found = checkpoint.part
    if found is None or part:
        return
    take = "take this part as it is: --part (in Python: part=True)"
    raise OnlyAPart(
        f"{checkpoint.source or 'the checkpoint'} is only a part of a checkpoint: {found.label}",
        f"{found.meaning[:1].upper()}{found.meaning[1:]}.",
        Advice("See the whole: ", command("inspect", found.whole), f"; or {take}")
        if found.whole
        else take[:1].upper() + take[1:],
    )


def open_to_change(file: PathLike, at: str | None = None) -> Opened:
    """The same for a verb that changes keys, types or entries: not of one shard, which has to go on fitting to its index.

    Raises `OnlyAPart` for a file that the index beside it names.
    """
    opened = open_file(file, at)
    found = opened.checkpoint.part
    if found is not None and found.index:
        raise OnlyAPart(
            f"{opened.checkpoint.source} is {found.label} of {printable(os.path.join(found.whole, found.index))}",
            "Changed alone, it would no longer fit to the index and the other shards. Nothing was written.",
            f"Name the folder instead: {quoted(found.whole)}",
        )
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
