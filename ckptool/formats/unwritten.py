"""Tensors without checksums that become zeros half-way, as a download leaves them that made its file at full size first
and was broken off, and a power failure before the data was on the disk."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ckptool.checkpoint import FileRange, Note, TensorEntry
from ckptool.checkpoint.files import Folder, Input, Source
from ckptool.checkpoint.tree import address, stored_parts, walk
from ckptool.errors import listed
from ckptool.facts import size

PAGE = 4096  # bytes; what reaches the disk together, and fewer zeros tell nothing
BLOCK = 1 << 16
MOST_HOLES = 1000

Place = tuple[int, int, int, int, str]  # begin and end in the file, bytes of an element and of a row (0: none), address


def zero_notes(source: Input | None, tree: Any) -> list[Note]:
    """A note for each file with zeros that begin within a tensor, in the middle of a row or with a page: of padding and
    of rows that were never trained, zeros begin with a row."""
    files = [] if source is None or source.far else source.files.values() if isinstance(source, Folder) else [source]
    zeros = {file: stretches for file in files if (stretches := list(_zeros(file)))}
    places: dict[Source, dict[int, Place]] = defaultdict(dict)
    for path, node in walk(tree) if zeros else ():
        for part in stored_parts(node):
            for storage in part.storage.below():
                data, item, row = storage.data, 1, 0
                if not isinstance(data, FileRange) or storage.crc is not None or data.file not in zeros:
                    continue
                if isinstance(part, TensorEntry) and storage is part.storage and len(part.shape) > 1:
                    item, row = part.dtype.itemsize, part.dtype.itemsize * part.shape[-1]
                end = data.offset + data.length
                places[data.file].setdefault(data.offset, (data.offset, end, item, row, address(path)))
    notes = []
    for file, by_offset in places.items():
        spans, half_way = sorted(by_offset.values()), list[tuple[int, int, str]]()
        for begin, end in zeros[file]:
            first, last, item, row, name = spans[max(bisect_right(spans, (begin,)) - 1, 0)]
            element = -(-(begin - first) // item) * item  # whose last bytes may be zero
            if first < begin < last and ((row and element % row) or begin % PAGE == 0):
                half_way.append((begin, end, name))
        if half_way:
            nbytes = size(sum(end - begin for begin, end, _ in half_way))
            where = listed([f"{name} (byte {begin:,})" for begin, _, name in half_way], 3)
            what = f"{nbytes} of {file} are zeros that begin in the middle of {where}"
            why = "as in a download that was broken off; compare its SHA-256 with the source's"
            notes.append(Note("zeros-half-way", f"{what}, {why}"))
    return notes


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
        hole, end = file.size, file.size
        try:
            hole = os.lseek(file.descriptor(), file.begin + at, os.SEEK_HOLE) - file.begin
            end = os.lseek(file.descriptor(), file.begin + hole, os.SEEK_DATA) - file.begin
        except (AttributeError, OSError):
            pass  # nothing but the hole follows; or the system does not tell
        yield hole, end
        at = end
