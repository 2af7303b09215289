"""Tensors without checksums that become zeros half-way, as a download leaves them that made its file at full size first
and was broken off, and a power failure before the data was on the disk."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from ckptool.checkpoint import FileRange, Note, TensorEntry
from ckptool.checkpoint.files import Folder, Input, Source
from ckptool.checkpoint.tree import address, stored_parts, walk
from ckptool.errors import listed
from ckptool.facts import size

HALF_WAY = "zeros-half-way"
PAGE = 4096  # bytes; what reaches the disk together, and fewer zeros tell nothing
BLOCK = 1 << 16
MOST_HOLES = 1000


class Located(NamedTuple):
    """Bytes of a file that hold a tensor. item, row: the sizes of an element, and of a row in the file or 0."""

    begin: int
    end: int
    item: int
    row: int
    name: str


def zero_notes(source: Input | None, tree: Any) -> list[Note]:
    """A note for each file with zeros that begin within a tensor, in the middle of a row or with a page: those of
    padding, and of what was never trained, begin with a row, or at the same place in each row."""
    files = [] if source is None or source.far else source.files.values() if isinstance(source, Folder) else [source]
    zeros = {file: stretches for file in files if (stretches := list(_zeros(file)))}
    places: dict[Source, dict[int, Located]] = defaultdict(dict)
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
                other = places[data.file].get(place.begin, place)  # a smaller view, or an empty tensor
                places[data.file][place.begin] = max(other, place, key=lambda each: each.end)
    notes = []
    for file, by_begin in places.items():
        spans = sorted(by_begin.values())
        pairs = [(spans[max(bisect_right(spans, (begin,)) - 1, 0)], begin, end) for begin, end in zeros[file]]
        half_way = [(place, begin, end) for place, begin, end in pairs if _is_half_way(file, place, begin)]
        if half_way:
            nbytes = size(sum(end - begin for _, begin, end in half_way))
            where = listed([f"{place.name} (byte {begin:,})" for place, begin, _ in half_way], 3)
            what = f"{nbytes} of {file} are zeros that begin in the middle of {where}"
            why = "as in a download that was broken off; compare its SHA-256 with the source's"
            notes.append(Note(HALF_WAY, f"{what}, {why}"))
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


def _zeros(file: Source) -> Iterator[tuple[int, int]]:
    """Begin and end of the zeros before each hole of a file, and before its end, with the hole."""
    before = 0
    for hole, end in islice(_holes(file), MOST_HOLES):
        begin, is_zero = hole, True
        while is_zero and begin > before:
            block = file.read(max(before, begin - BLOCK), min(BLOCK, begin - before))
            rest = len(block.rstrip(b"\0"))
            begin, is_zero = begin - len(block) + rest, not rest
        before = end
        if end - begin >= PAGE:
            yield begin, end


def _holes(file: Source) -> Iterator[tuple[int, int]]:
    """Begin and end of the holes of a sparse file, and of the one that is behind each file's last byte."""
    at = 0
    while at < file.size:
        hole, end, descriptor = file.size, file.size, file.descriptor()
        position = os.lseek(descriptor, 0, os.SEEK_CUR)  # of a file that the caller has open, too
        try:
            hole = os.lseek(descriptor, file.begin + at, os.SEEK_HOLE) - file.begin
            end = os.lseek(descriptor, file.begin + hole, os.SEEK_DATA) - file.begin
        except (AttributeError, OSError):
            pass  # nothing but the hole follows; or the system does not tell
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
        yield hole, end
        at = end
