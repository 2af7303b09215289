"""Torch zips put together otherwise, and the judge of what comes out: stock torch and Python's `zipfile`.

`mutant(seed)` takes a benign archive (torch's own, re-zipped ones, in-place edits, finished and interrupted) or lays
one out anew, splices others into it, and lies in its headers. `Tally` says whether readers agree about the result.
"""

from __future__ import annotations

import contextlib
import errno
import io
import random
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ckptool
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Source
from ckptool.errors import CkptoolError
from ckptool.formats import read, torch_zip
from ckptool.formats.zip.directory import END, END64, LOCATOR, read_archive
from tests.support.files import torch_bytes
from tests.support.same import assert_same_objects
from tests.support.zips import Entry, Layout, any_layout, honest, records_of

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
            zipfile.BadZipFile, ValueError, RuntimeError, zlib.error, OSError, EOFError, struct.error
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
                data = read_record(reading, name, archive.headers.has_checksums)
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError) as error:
                return f"zipfile cannot read {name} ({error!s:.120})"
            if data != contents:
                return f"zipfile reads other bytes of {name}"
    return ""


def tree(tensors: int, salt: int) -> dict[str, Any]:
    """A small checkpoint; the same numbers of tensors give archives of the same lengths, with other values."""
    dtypes = (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
    values = {f"w{n}": (torch.arange(3 + n) + salt).to(dtypes[n % len(dtypes)]) for n in range(tensors)}
    return values | {"epoch": salt, "note": "n" * 20}


def by_torch(value: Any, root: str = "archive") -> bytes:
    """As torch writes it to a file of that name."""
    if root == "archive":
        return torch_bytes(value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{root}.pt"
        torch.save(value, path)
        return path.read_bytes()


def without_checksums(value: Any) -> bytes:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        return by_torch(value)
    finally:
        torch.serialization.set_crc32_options(before)


class _Pipe:
    """A file that cannot be rewound: `zipfile` puts descriptors behind what it writes there."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self.parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass


def rezipped_mutant(data: bytes, compression: int, *, streamed: bool = False, wide: bool = False) -> bytes:
    """The same records as Python's `zipfile` writes them."""
    out: Any = _Pipe() if streamed else io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w", compression) as again:
        for info in archive.infolist():
            new = zipfile.ZipInfo(info.filename)
            new.compress_type = compression
            with again.open(new, "w", force_zip64=wide) as file:
                file.write(read_record(archive, info.filename, has_checksums=False))
    return b"".join(out.parts) if streamed else out.getvalue()


def edited(data: bytes, folder: Path, times: int = 1) -> bytes:
    """The archive after edits in place."""
    for number in range(times):
        data, tail, _ = _edit(data, folder, number)
        data += tail
    return data


def _edit(data: bytes, folder: Path, number: int) -> tuple[bytes, bytes, bytes]:
    """What an edit in place keeps, what it appends, and the guard that it puts behind that until the commit."""
    path = folder / "edited.pt"
    path.write_bytes(data)
    checkpoint = read(path)
    changed = {**checkpoint.tree, f"edit{number}": number}
    plan = torch_zip.append(
        Checkpoint(changed, torch_zip.NAME, checkpoint.metadata, checkpoint.source, checkpoint.origin)
    )
    assert plan is not None
    new = b"".join(_bytes(segment) for segment in plan.files[""])
    return data[: plan.keep], new, plan.guard


def _bytes(segment: Any) -> bytes:
    data = getattr(segment, "data", segment)
    if hasattr(segment, "make"):
        return segment.make()  # type: ignore[no-any-return]
    raw = data.read(0, data.length)
    if hasattr(segment, "total"):
        segment.total.value = zlib.crc32(raw, segment.total.value)
    return bytes(raw)


def interrupted(data: bytes, folder: Path, rng: random.Random) -> bytes:
    """The archive with an edit in place that stopped somewhere, by a kill or a power cut."""
    before, new, guard = _edit(data, folder, 7)
    stretched = bytearray(before + bytes(len(new)) + guard)
    if rng.random() < 0.3:  # while it was being stretched
        return bytes(stretched[: rng.randint(len(before) + 1, len(stretched))])
    if rng.random() < 0.5:  # a kill: a beginning is there
        written = rng.choice([len(new), rng.randint(0, len(new))])
        stretched[len(before) : len(before) + written] = new[:written]
    else:  # a power cut: any blocks are
        first = -len(before) % 512
        for at in (0, *range(first, len(new), 512)):
            if rng.random() < 0.5:
                end = min(at + 512, len(new)) if at >= first else first
                stretched[len(before) + at : len(before) + end] = new[at:end]
    return bytes(stretched)


@cache
def benign(folder: Path) -> tuple[bytes, ...]:
    """Healthy archives of all kinds, small."""
    plain = by_torch(tree(2, 1))
    made = [
        *_zipped(1),
        by_torch(tree(3, 2), "m"),
        without_checksums(tree(2, 3)),
        rezipped_mutant(plain, zipfile.ZIP_STORED, streamed=True),
        rezipped_mutant(plain, zipfile.ZIP_DEFLATED, streamed=True),
        rezipped_mutant(plain, zipfile.ZIP_STORED, wide=True),
        rezipped_mutant(plain, zipfile.ZIP_DEFLATED, streamed=True, wide=True),
        edited(plain, folder),
        edited(plain, folder, 3),
        edited(rezipped_mutant(plain, zipfile.ZIP_STORED), folder, 2),
        edited(rezipped_mutant(plain, zipfile.ZIP_DEFLATED), folder),
        by_torch({"inner": torch.frombuffer(bytearray(plain), dtype=torch.uint8), "w": torch.ones(2)}),
    ]
    return tuple(made)


Rng = random.Random


@cache
def _zipped(salt: int) -> tuple[bytes, ...]:
    """Small checkpoints as torch writes them, stored again and deflated."""
    made = [by_torch(tree(tensors, salt)) for tensors in range(5)]
    ways = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    return tuple(each for plain in made for each in (plain, *(rezipped_mutant(plain, way) for way in ways)))


def other(rng: Rng) -> bytes:
    """Another benign archive, with other values."""
    return rng.choice(_zipped(50))


def read_record(archive: zipfile.ZipFile, name: str, has_checksums: bool) -> bytes:
    with archive.open(name) as file:
        if not has_checksums:
            file._expected_crc = None  # type: ignore[attr-defined]
        return file.read()
