"""`FILE#address`: which file, and which part of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptool import formats
from ckptool.checkpoint import Checkpoint

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
