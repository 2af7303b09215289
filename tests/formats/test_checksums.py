"""CRC-32 of many stretches at once."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from ckptool.checkpoint import Computed, FileRange, InlineBytes, blocks
from ckptool.checkpoint.files import Source
from ckptool.errors import Corrupt, FileChanged, Truncated
from ckptool.formats import checksums as module
from ckptool.formats.checksums import checksums, crc_combine


@pytest.mark.parametrize("length", [0, 1, 2, 31, 1000, 70_001])
def test_joined(length: int) -> None:
    chosen = random.Random(length)
    a, b = chosen.randbytes(77), chosen.randbytes(length)
    assert crc_combine(zlib.crc32(a), zlib.crc32(b), length) == zlib.crc32(a + b)
    assert crc_combine(0, zlib.crc32(b), length) == zlib.crc32(b)
    assert crc_combine(zlib.crc32(a), zlib.crc32(a + b), length) == zlib.crc32(b)  # and parted


@pytest.mark.parametrize("alone", [0, 1 << 30])
def test_of_files_and_of_what_is_computed(alone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALONE", alone)
    monkeypatch.setattr(module, "PIECE", 1000)
    monkeypatch.setattr(blocks, "BLOCK", 300)
    monkeypatch.setattr(module, "BATCH", 2000)
    data = random.Random(1).randbytes(100_000)
    path = tmp_path / "data"
    path.write_bytes(data)
    source = Source(path)
    sizes = [0, 1, 299, 300, 301, 999, 1000, 1001, 5000, 40_000, *[7] * 600]
    ranges, at = [], 0
    for size in sizes:
        ranges.append(FileRange(source, at, size))
        at += size
    lazy = Computed(5000, lambda offset, n: data[offset : offset + n])
    done: list[int] = []
    sums = checksums([*ranges, lazy, InlineBytes(b"abc")], done.append)
    expected = [zlib.crc32(data[part.offset : part.offset + part.length]) for part in ranges]
    assert sums == [*expected, zlib.crc32(data[:5000]), zlib.crc32(b"abc")]
    assert alone or sum(done) == sum(sizes) + 5003


def test_what_cannot_be_read_stands_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    source = Source(path)

    def broken(offset: int, length: int) -> bytes:
        raise Corrupt("broken")

    good, bad, short = checksums([InlineBytes(b"x"), Computed(4, broken), Computed(4, lambda offset, n: b"")])
    assert good == zlib.crc32(b"x") and isinstance(bad, Corrupt) and isinstance(short, Corrupt)
    path.write_bytes(b"")
    with pytest.raises((FileChanged, Truncated)):
        checksums([FileRange(source, 0, 3)])
