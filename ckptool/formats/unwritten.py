"""Tensors without checksums that become zeros half-way, as a download leaves them that made its file at full size first
and was broken off, and a power failure before the data was on the disk."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.checkpoint import FileRange, Note, TensorEntry
from ckptool.checkpoint.files import Folder, Input, Source
from ckptool.checkpoint.tree import address, stored_parts, walk
from ckptool.facts import size

HALF_WAY = "zeros-half-way"
PAGE = 4096  # bytes; what reaches the disk together, and fewer zeros tell nothing
BLOCK = 1 << 16


class Located(NamedTuple):
    """Bytes of a file that hold a tensor. item, row: the sizes of an element, and of a row in the file or 0."""

    begin: int
    end: int
    item: int
    row: int
    name: str


def zero_notes(source: Input | None, tree: Any) -> list[Note]:
    """A note for each file that ends in zeros which begin within a tensor, in the middle of a row or with a page: those
    of padding, and of what was never trained, begin with a row, or at the same place in each row."""
    files = [] if source is None or source.far else source.files.values() if isinstance(source, Folder) else [source]
    zeros = {file: begin for file in files if (begin := _zeros_at_end(file)) + PAGE <= file.size}
    places: dict[Source, Located] = {}  # the last in each file that begins before its zeros
    for path, node in walk(tree) if zeros else ():
        for part in stored_parts(node):
            for storage in part.storage.below():
                data = storage.data
                if not isinstance(data, FileRange) or storage.crc is not None or data.file not in zeros:
                    continue
                start, stop, item, row = 0, data.length, 1, 0
                if isinstance(part, TensorEntry) and storage is part.storage:
                    (start, stop), item = part.span(), part.dtype.itemsize
                    steps = zip(part.shape, part.stride, strict=True)
                    row = item * min((step for count, step in steps if count > 1 and step > 1), default=0)
                place = Located(data.offset + start, data.offset + stop, item, row, address(path) or "its values")
                if place.begin < zeros[data.file]:
                    places[data.file] = max(places.get(data.file, place), place)
    notes = []
    for file, place in places.items():
        if _is_half_way(file, place, begin := zeros[file]):
            what = f"{size(file.size - begin)} of {file} are zeros that begin in the middle of {place.name}"
            why = "as in a download that was broken off; compare its SHA-256 with the source's"
            notes.append(Note(HALF_WAY, f"{what} (byte {begin:,}), {why}"))
    return notes


def _is_half_way(file: Source, place: Located, begin: int) -> bool:
    """True for zeros that begin in a place where those of a model seldom do."""
    if not place.begin < begin < place.end:
        return False
    element = -(-(begin - place.begin) // place.item) * place.item  # whose last bytes may be zero
    if not place.row or not element % place.row:
        return (file.begin + begin) % PAGE == 0
    rest = min(place.row - element % place.row, BLOCK)
    return element < place.row or any(file.read(place.begin + element - place.row, rest))  # else: padded columns


def _zeros_at_end(file: Source) -> int:
    """Where the zeros at the end of a file begin."""
    begin, rest = file.size, 0
    while begin and not rest:
        block = file.read(max(0, begin - BLOCK), min(BLOCK, begin))
        rest = len(block.rstrip(b"\0"))
        begin += rest - len(block)
    return begin
