"""Torch zips put together otherwise, and the judge of what comes out: stock torch and Python's `zipfile`.

`mutant(seed)` takes a benign archive (torch's own, re-zipped ones, in-place edits, finished and interrupted) or lays
one out anew, splices others into it, and lies in its headers. `Tally` says whether readers agree about the result.
"""

from __future__ import annotations

import contextlib
import errno
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool.checkpoint.files import Source
from ckptool.errors import CkptoolError
from ckptool.formats.zip.directory import read_archive
from ckptool.formats.zip.record import END, END64, LOCATOR
from tests.support.same import assert_same_objects
from tests.support.zip_benign import Rng, benign, interrupted, other, read_record
from tests.support.zip_layouts import Entry, Layout, any_layout, honest, records_of

# Splices of two archives ---------------------------------------------------------------------------------------------


def two_in_one(data: bytes, rng: Rng) -> bytes:
    """Two archives, one before, behind, inside or in the comment of the other, offsets corrected or not."""
    second = any_layout(rng) if rng.random() < 0.5 else honest(zip64=rng.random() < 0.5)
    way = rng.randrange(5)
    if way == 0:
        return data + replace(second, shift=rng.choice([0, len(data)])).build()
    if way == 1:
        return second.build() + replace(honest(), shift=rng.choice([0, len(second.build())])).build()
    inner = replace(second, shift=rng.choice([0, 100, len(data)])).build()
    if way == 4:
        directory = data.index(b"PK\x01\x02") if b"PK\x01\x02" in data else 0
        return data[:directory] + inner + data[directory:]
    return honest(**{("gap", "comment")[way - 2]: inner}).build()


def behind_a_guard(data: bytes, rng: Rng) -> bytes:
    """As if an in-place edit had been interrupted: another archive's records and directory, then a copy of the first
    one's end records.

    A reader that looks for the directory right before the end record finds the second, one that goes by its offset the
    first.
    """
    contents = [b"\x80\x02}q\0.", bytes(12), b"little", b"3\n", b"x"]
    second = Layout(tuple(Entry(name.encode(), rng.choice(contents)) for name in records_of(data)))
    second = replace(second, zip64=rng.random() < 0.3)
    wide = data[-END.size - LOCATOR.size :][:4] == b"PK\x06\x07"
    if rng.random() < 0.8:  # one thing in it that a strict reader refuses, and a lenient one may not
        odd = {"flags": 0x0801, "name": b"\xff", "crc": 1 << 31, "method": 12, "disk": 1, "listed": 2}
        what = rng.choice([*odd])
        entries = list(second.entries)
        at = rng.randrange(len(entries))
        entries[at] = replace(entries[at], **{what: odd[what]})  # type: ignore[arg-type]
        second = replace(second, entries=tuple(entries))
    begin = len(data) + rng.choice([0, 0, 1, 64])
    inner = replace(second, shift=begin).build()
    tail = END.size + (LOCATOR.size + END64.size if second.zip64 else 0)
    guard = data[-END.size - LOCATOR.size :] if wide else data[-END.size :]
    keep = rng.choice([inner[:-tail], inner[:-tail], inner, inner[:-tail] + inner[-tail:][: END64.size]])
    return data + bytes(begin - len(data)) + keep + guard


def around(data: bytes, rng: Rng) -> bytes:
    """Bytes before or behind the archive, or some of it again."""
    guard = data[-END.size - LOCATOR.size :]
    more = rng.choice(
        [
            *(b"\0", bytes(rng.randint(1, 70_000)), b"\n", rng.randbytes(16), b"PK\x05\x06", data[-END.size :]),
            *(
                guard,
                guard[: rng.randint(1, 41)],
                bytes(rng.randint(1, 200)) + guard,
                bytes(100) + guard[: rng.randint(1, 41)],
            ),
            *(data[-rng.randint(1, len(data)) :], other(rng)[:-22]),
        ]
    )
    return more + data if rng.random() < 0.3 else data + more


# Lies in the fields --------------------------------------------------------------------------------------------------

_LOCAL = ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2))
_CENTRAL = (*((at + 2, width) for at, width in _LOCAL), (32, 2), (34, 2), (36, 2), (38, 4), (42, 4), (4, 2))
_FIELDS = {
    b"PK\x03\x04": _LOCAL,
    b"PK\x01\x02": _CENTRAL,
    b"PK\x07\x08": ((4, 4), (8, 4), (12, 4), (8, 8), (16, 8)),
    b"PK\x06\x06": ((4, 8), (12, 2), (14, 2), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\x06\x07": ((4, 4), (8, 8), (16, 4)),
    b"PK\x05\x06": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}


def structures(data: bytes) -> list[int]:
    """Where anything with a signature is."""
    found, at = [], data.find(b"PK")
    while at >= 0:
        if data[at : at + 4] in _FIELDS:
            found.append(at)
        at = data.find(b"PK", at + 2)
    return found


def lie(data: bytes, rng: Rng) -> bytes:
    """Another value in one field of one header."""
    places = structures(data)
    if not places:
        return data
    ends = [place for place in places if data[place : place + 3] != b"PK\x03"]
    place = rng.choice(ends if rng.random() < 0.5 and ends else places)
    at, width = rng.choice(_FIELDS[data[place : place + 4]])
    at += place
    if at + width > len(data):
        return data
    old = int.from_bytes(data[at : at + width], "little")
    near = [old + rng.choice([-1, 1]) * step for step in (1, 2, 4, 8, 16, 22, 30, 42, 46, 56, 60, 62, 64, 76, 98)]
    values = [
        *near, 0, 1, 8, 0x800, 0x808, 0xFFFF, 0xFFFFFFFF, (1 << 8 * width) - 1, old ^ 1 << rng.randrange(8 * width),
        len(data),
        rng.choice(places), rng.choice(places),
        *(int.from_bytes(data[p + 16 : p + 20], "little") for p in rng.sample(places, 1)),
    ]  # fmt: skip
    new = rng.choice(values) % (1 << 8 * width)
    return data[:at] + new.to_bytes(width, "little") + data[at + width :]


def mutant(seed: int, folder: Path) -> tuple[str, bytes]:
    """What was done, and the archive; the same for the same seed."""
    rng = random.Random(seed)
    data, done = rng.choice(benign(folder)), list[str]()
    if rng.random() < 0.25:
        data = interrupted(data, folder, rng)
        done.append("interrupted")
    elif rng.random() < 0.6:
        data = any_layout(rng).build()
        done.append("laid out")
    if rng.random() < 0.35:
        whole: Callable[[bytes, Rng], bytes] = rng.choice([two_in_one, behind_a_guard, behind_a_guard, around])
        with contextlib.suppress(
            zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, zlib.error, EOFError, struct.error
        ):  # no longer to be taken apart
            data = whole(data, rng)
            done.append(whole.__name__)
    for _ in range(rng.choice([0, 0, 1, 1, 2]) if done else rng.choice([0, 1, 2, 3])):
        data = lie(data, rng)
        done.append("lie")
    return f"{seed}: {', '.join(done) or 'nothing'}", data


# The judge -----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How many archives were read and how many refused, by code; and what readers disagreed about."""

    read: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, data: bytes, path: Path) -> None:
        path.write_bytes(data)
        try:
            ours = ckptool.load(path, mmap=False)
        except CkptoolError as error:
            self.refused[error.code] = self.refused.get(error.code, 0) + 1
            return
        self.read += 1
        if problem := disagreement(path, ours):
            self.wrong.append(f"{what}: {problem}")


def disagreement(path: Path, ours: Any) -> str:
    """What torch or `zipfile` makes of an archive otherwise than ckptool did; empty where all agree."""
    archive = read_archive(Source(path))
    torn = any(note.code == "interrupted-edit" for note in archive.notes)
    try:
        theirs = torch.load(path, map_location="cpu", weights_only=False)
    except (
        OSError
    ) as error:  # in an archive of less than 4 KB with a long hole behind it, torch seeks to before its beginning
        return "" if torn and error.errno == errno.EINVAL else f"torch cannot read it ({error!s:.120})"
    except Exception as error:  # noqa: BLE001
        return f"torch cannot read it ({error!s:.120})"
    try:
        assert_same_objects(ours, theirs)
    except AssertionError as error:
        return f"torch reads other values ({error!s:.200})"
    try:
        reading = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
        return "" if torn else f"zipfile cannot read it ({error!s:.120})"  # of a torn edit it sees that it is torn
    with reading:
        if sorted(reading.namelist()) != sorted(archive.records):
            return f"zipfile sees other records: {reading.namelist()}"
        for name, mine in archive.records.items():
            try:
                contents = mine.contents(1 << 20)
            except CkptoolError:
                continue  # a record that nothing uses, and that is refused when it is
            try:
                data = read_record(reading, name, archive.has_checksums)
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError) as error:
                return f"zipfile cannot read {name} ({error!s:.120})"
            if data != contents:
                return f"zipfile reads other bytes of {name}"
    return ""
