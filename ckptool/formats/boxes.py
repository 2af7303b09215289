"""A piece of a tensor as somebody saved it, and where in the whole it lies."""

from __future__ import annotations

from typing import Any, Protocol

from ckptool.checkpoint import FileRange, Storage, TensorEntry
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.nodes import Object
from ckptool.facts import dataclass, replace

MAX_DIMENSIONS = 64

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset of a block on every axis, and its sizes."""


class Original(Protocol):
    """A tensor that was read in full. begin: where its bytes begin, from its place by the table; those of others like
    it begin as far from theirs."""

    @property
    def entry(self) -> TensorEntry: ...
    @property
    def begin(self) -> int: ...


class Stored:
    """A tensor like the original's, in other bytes of a file. There may be hundreds of thousands, so its entry is made
    once, when it is asked for, and then takes the place of the original.
    at: its place by the table.  crc: the checksum of its bytes."""

    __slots__ = ("at", "crc", "file", "original")

    def __init__(self, original: Original, file: Source, at: int, crc: int) -> None:
        self.file, self.at, self.crc = file, at, crc
        self.original: Original | TensorEntry = original

    @property
    def like(self) -> TensorEntry:
        return self.original if isinstance(self.original, TensorEntry) else self.original.entry

    @property
    def entry(self) -> TensorEntry:
        if not isinstance(self.original, TensorEntry):
            like = self.original.entry
            place = FileRange(self.file, self.at + self.original.begin, like.storage.nbytes)
            self.original = like.with_storage(Storage(place, like.location, self.crc))
        return self.original


@dataclass(slots=True, eq=False)
class Piece:
    """A tensor that is a block of a larger one; `offsets`: where it begins in that, in elements.

    owner: who saved it, for people (`rank 3`).  replicas: blocks of the same place by others, to be compared with it.
    """

    tensor: TensorEntry | Stored
    offsets: tuple[int, ...]
    owner: str = "a block"
    replicas: tuple[Piece, ...] = ()

    @property
    def entry(self) -> TensorEntry:
        return self.tensor if isinstance(self.tensor, TensorEntry) else self.tensor.entry

    @property
    def like(self) -> TensorEntry:
        """A tensor of its type, shape and strides."""
        return self.tensor if isinstance(self.tensor, TensorEntry) else self.tensor.like

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for pieces that are the same values at the same place."""
        tensor = self.tensor.view if isinstance(self.tensor, TensorEntry) else id(self.tensor)
        return self.offsets, tensor, len(self.replicas)

    @property
    def box(self) -> Box:
        return self.offsets, self.like.shape

    def part(self, box: Box) -> TensorEntry:
        """The part of it that is in a box which lies within it."""
        entry = self.entry
        steps = zip(box[0], self.offsets, entry.stride, strict=True)
        return replace(entry, shape=box[1], offset=entry.offset + sum((lo - at) * step for lo, at, step in steps))


def overlap(one: Box, other: Box) -> Box | None:
    """The overlap of two boxes; None without one."""
    edges = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(*one, *other, strict=True)]
    if any(lo >= hi for lo, hi in edges):
        return None
    return tuple(lo for lo, _ in edges), tuple(hi - lo for lo, hi in edges)


def sizes_of(node: Any, limit: int = MAX_DIMENSIONS) -> tuple[int, ...] | None:
    """The numbers in a `torch.Size`, a tuple or a list; None where it is anything else, or has more than `limit`."""
    if isinstance(node, Object) and str(node.fn) == "torch.Size" and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, (list, tuple)) or len(node) > limit:
        return None
    return tuple(node) if all(type(n) is int and 0 <= n < 1 << 62 for n in node) else None
