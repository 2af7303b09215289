"""The result of `recover`: what of a damaged file was written, and what was not."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.checkpoint import Note
from ckptool.checkpoint.registry import Report
from ckptool.formats.damaged import LostRecord


@dataclass(frozen=True, slots=True)
class LostTensorRow:
    """A tensor that did not come back. record, offset: of its data (offset None: unknown).  nbytes: of its values."""

    address: str
    record: str
    offset: int | None
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Recovery(Report):
    """The parts of a damaged file that were written to `output`, and those that were not.

    damage: what was wrong when it was opened; empty if nothing was.  how: what was done.
    tensors: how many there were (None: unknown).  back: how many the file itself gave.  records, whole: the same of
    records.
    lost: tensors that are not in the output.  dropped: what had to go along with them.
    filled: (address, address in `filled_from`).  refused: (address, why it could not be filled).
    proven: by checksums.  raw: the pickle is lost, records are given as bytes.  notes: on the writing.
    """

    verdict = "complete"

    damage: str
    how: str
    tensors: int | None
    back: int
    records: int
    whole: int
    lost: tuple[LostTensorRow, ...]
    dropped: tuple[str, ...]
    filled: tuple[tuple[str, str], ...]
    filled_from: str
    refused: tuple[tuple[str, str], ...]
    lost_records: tuple[LostRecord, ...]
    proven: bool
    raw: bool
    file: str = ""
    output: str = ""
    container: str = ""
    file_bytes: int = 0
    dry_run: bool = False
    notes: tuple[Note, ...] = ()

    @property
    def complete(self) -> bool:
        """True if everything came back from the file itself."""
        return not (self.lost or self.filled or self.raw)
