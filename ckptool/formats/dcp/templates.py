"""The zips of chunks, of which there may be hundreds of thousands, by comparison with one that was read in full.

`torch.save` writes the same bytes around the values of every tensor of a shape and type, but for the checksum of those
and a number that names the contents. What differs in nothing else means the same as the zip that it is compared with.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.files import Part
from ckptool.formats.boxes import Stored
from ckptool.formats.torch_zip import Origin
from ckptool.formats.zip.record import Record

ALL = 1 << 17  # bytes of a zip that is read at once
TAIL = 1 << 16 | 1 << 7  # bytes at the end in which the reader of zips looks for other ends
MOST = 4_096  # templates
_END, _CENTRAL = b"PK\x05\x06", b"PK\x01\x02"
_DIGITS = 40


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A zip that was read in full. entry: its tensor.  begin, end: the bytes of the values.

    after: what follows them, zeros in place of what differs.  sums, id_sums: where the checksum of the values and that
    of the number stand in that.  id_at: where the number does.
    """

    entry: TensorEntry
    begin: int
    end: int
    head: bytes
    after: bytes
    sums: tuple[int, int]
    id_sums: tuple[int, int]
    id_at: int

    def entry_of(self, part: Part) -> Stored | None:
        """The tensor in another zip of the same size; None where that differs."""
        if part.size <= ALL:
            data = part.read(0, part.size)
            head, last = data[: self.begin], data[self.begin :]
        else:
            head, last = part.read(0, self.begin), part.read(at := max(self.begin, part.size - TAIL), part.size - at)
        after = last[self.end - part.size :]
        crc = self._sum_in(after)
        if head != self.head or crc is None or last.count(_END) != 1:
            return None
        return Stored(self.entry, part.file, part.start + self.begin, crc)

    def _sum_in(self, after: bytes) -> int | None:
        """The checksum of the values, where everything else is as in the template."""
        one, other = (after[at : at + 4] for at in self.sums)
        number = after[self.id_at : self.id_at + _DIGITS]
        known = zlib.crc32(number).to_bytes(4, "little")
        if one != other or not number.isdigit() or any(after[at : at + 4] != known for at in self.id_sums):
            return None
        return int.from_bytes(one, "little") if _blanked(after, self) == self.after else None


NEAREST = 16  # zips of one size that a new one is compared with: where all of them differ, none of the rest helps


class Templates:
    """Those of one folder, by the size of the zip."""

    def __init__(self) -> None:
        self.known: dict[int, list[Template]] = {}
        self.count = 0

    def entry_of(self, part: Part) -> Stored | None:
        """The tensor in a zip that is like one of them; None where it has to be read in full."""
        for template in self.known.get(part.size, ()):
            if (entry := template.entry_of(part)) is not None:
                return entry
        return None

    def learn(self, part: Part, checkpoint: Checkpoint) -> None:
        """Remembers a zip that was read in full and of which there is nothing to be said, if others may be like it."""
        entry, origin = checkpoint.tree, checkpoint.origin
        if self.count >= MOST or not isinstance(entry, TensorEntry) or not isinstance(origin, Origin):
            return
        records = origin.archive.records
        values, number = records.get(f"{origin.root}data/0"), records.get(f"{origin.root}.data/serialization_id")
        if values is None or number is None or checkpoint.notes or checkpoint.discarded or entry.storage.crc is None:
            return
        if not values.stored or values.method or values.header > number.header or number.size != _DIGITS:
            return
        begin, end = values.data_at, values.data_at + values.stored
        after, head = part.read(end, part.size - end), part.read(0, begin)
        sums, id_sums = _sums(values, after, end), _sums(number, after, end)
        if sums is None or id_sums is None:
            return
        blank = Template(entry, begin, end, head, b"", sums, id_sums, number.data_at - end)
        template = Template(entry, begin, end, head, _blanked(after, blank), sums, id_sums, blank.id_at)
        if template._sum_in(after) == entry.storage.crc:
            alike = self.known.setdefault(part.size, [])
            alike.append(template)
            del alike[:-NEAREST]
            self.count += 1


def _sums(record: Record, after: bytes, end: int) -> tuple[int, int] | None:
    """Where a record's checksum stands behind the values: in its descriptor, and in the directory."""
    central = after.find(record.central)
    if central < 0 or not record.descriptor_size or record.central[:4] != _CENTRAL:
        return None
    return record.data_at + record.stored - end + 4, central + 16


def _blanked(after: bytes, template: Template) -> bytes:
    blank = bytearray(after)
    for at in (*template.sums, *template.id_sums):
        blank[at : at + 4] = bytes(4)
    blank[template.id_at : template.id_at + _DIGITS] = bytes(_DIGITS)
    return bytes(blank)
