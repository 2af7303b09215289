"""The files that a format wants written, as segments: formats make plans, `output/` carries them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Note, Storage
from ckptool.checkpoint.blocks import Crc


@dataclass(frozen=True, slots=True, eq=False)
class Checksummed:
    """Data whose CRC-32 is wanted: the sink adds it up in `crc` while the bytes pass."""

    data: Data
    crc: Crc

    @property
    def length(self) -> int:
        return self.data.length


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """`length` bytes that can only be made when everything before them has passed (a checksum, a directory)."""

    length: int
    make: Callable[[], bytes]


Segment = InlineBytes | FileRange | Computed | Checksummed | Deferred


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Files to write: names (`""` for a single file) to segments, in order, to be gone through more than once.

    checks: storages that are read in part, whose checksums are to be checked as a whole.
    notes: what the user should know of how the container holds the tree.
    keep > 0: append to a file after its first `keep` bytes instead. `guard` is then what has to be the last thing in
    the file for the old state to be found, and `guard_every` the distance within which readers search for it.
    """

    files: Mapping[str, Iterable[Segment]]
    checks: list[Storage] = field(default_factory=list)
    keep: int = 0
    guard: bytes = b""
    guard_every: int = 0
    notes: tuple[Note, ...] = ()
    nbytes: int = field(init=False)  # to be written, all files together

    def __post_init__(self) -> None:
        total = sum(segment.length for segments in self.files.values() for segment in segments)
        object.__setattr__(self, "nbytes", total)
