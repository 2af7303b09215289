"""The files that a format wants written, as segments that the sink carries out: formats make plans, `output/` knows no format."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckptool.checkpoint import Computed, Data, FileRange, InlineBytes, Storage
from ckptool.errors import Corrupt, printable


class Crc:
    """The running CRC-32 of bytes that pass through the sink; `expected` is what it must come to, `name` what the bytes are."""

    __slots__ = ("expected", "name", "value")

    def __init__(self, value: int = 0, expected: int | None = None, name: str = "") -> None:
        self.value = value
        self.expected = expected
        self.name = name

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self.value = zlib.crc32(data, self.value)

    def check(self) -> None:
        """Raises `Corrupt` when all bytes have passed and the sum is not the expected one."""
        if self.expected is not None and self.value != self.expected:
            raise Corrupt(
                f"{printable(self.name)} does not match its checksum (stored {self.expected:08x}, found {self.value:08x})",
                "Its bytes were damaged after the file was written. Nothing was written.",
            )


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
    """The files that a format wants written: names (`""` for a single file) to segments, in order, to be gone through more than once.

    checks: storages that are read in part, whose checksums are to be checked as a whole.
    keep > 0: append to a file after its first `keep` bytes instead. `guard` is then what has to be the last thing in the
    file for the old state to be found, and `guard_every` the distance within which readers search for it.
    """

    files: Mapping[str, Iterable[Segment]]
    checks: list[Storage] = field(default_factory=list)
    keep: int = 0
    guard: bytes = b""
    guard_every: int = 0
    nbytes: int = field(init=False)  # to be written, all files together

    def __post_init__(self) -> None:
        total = sum(segment.length for segments in self.files.values() for segment in segments)
        object.__setattr__(self, "nbytes", total)
