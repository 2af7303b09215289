"""Salvaging a file that was built to exhaust its reader takes little time and memory."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptool.checkpoint.files import Source
from ckptool.errors import CkptoolError
from ckptool.formats import damaged, read
from ckptool.formats.zip.record import CENTRAL, LOCAL
from ckptool.formats.zip.writer import local_header
from tests.support.files import written
from tests.support.looped import looped
from tests.support.processes import soon
from tests.support.zips import PLAIN


def header(name: bytes = b"a/data/1", flags: int = 0x808, stored: int = 0, crc: int = 0) -> bytes:
    return LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, crc, stored, stored, len(name), 0) + name


CENTRAL_LINE = CENTRAL.pack(b"PK\x01\x02", 0, 0, 0x808, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0) + b"a/data/1"


MEGABYTE = 1_000_000


def filled(part: bytes, start: bytes = b"") -> bytes:
    return start + part * ((MEGABYTE - len(start)) // len(part))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "signatures of headers": lambda: filled(b"PK\x03\x04"),
    "headers": lambda: filled(header()),
    "headers of pickles": lambda: filled(header(b"a/data.pkl")),
    "signatures of descriptors": lambda: filled(b"PK\x07\x08", header()),
    "headers and descriptors": lambda: filled(header() + b"PK\x07\x08" + bytes(12)),
    "directory entries": lambda: filled(CENTRAL_LINE, PLAIN[:-99]),
    "signatures of entries": lambda: filled(b"PK\x01\x02", header()),
    "whole archives": lambda: filled(PLAIN)[:-9],
    "ends": lambda: filled(PLAIN[-22:], PLAIN),
    "headers behind a pickle": lambda: filled(header(b"archive/data/0"), PLAIN[:1400]),
    "records that contain each other": lambda: b"".join(
        header(b"n/%d" % i, 0, MEGABYTE - 40 * i, 5) for i in range(MEGABYTE // 40)
    ),
    "a size of four gigabytes": lambda: filled(header(b"a/data.pkl", 0, 0xFFFFFFFE, 5)),
    "padding": lambda: filled(local_header("a/data/1", 0, 0, 64)),
}


@looped("name", HOSTILE)
def test_salvaging_a_hostile_megabyte_takes_less_than_a_second(name: str, tmp_path: Path) -> None:
    path = written(HOSTILE[name](), tmp_path / "hostile.pt")
    with soon(1), pytest.raises(CkptoolError) as caught:
        read(path)
    with soon(1), contextlib.suppress(CkptoolError):
        damaged.salvage(Source(path), caught.value)


@pytest.mark.parametrize("name", ["a size of four gigabytes", "records that contain each other"])
def test_nothing_is_allocated_that_a_header_promises(name: str, tmp_path: Path) -> None:
    source = Source(written(HOSTILE[name](), tmp_path / "hostile.pt"))
    tracemalloc.start()
    try:
        with pytest.raises(CkptoolError):
            damaged.salvage(source)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
