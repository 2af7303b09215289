"""Zip archives taken apart and put together otherwise than torch does."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path


def rezipped(path: Path, out: Path, compression: int, replaced: dict[str, bytes] | None = None) -> Path:
    """The same records as another program zips them, some with other contents."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w", compression) as again:
        for info in archive.infolist():
            again.writestr(info.filename, (replaced or {}).get(info.filename, archive.read(info)))
    return out


def with_record(path: Path, out: Path, name: str, contents: bytes | None) -> Path:
    """The same records with one more, or another, or (None) without it."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as again:
        for info in archive.infolist():
            if info.filename != name:
                again.writestr(info.filename, archive.read(info))
        if contents is not None:
            again.writestr(name, contents)
    return out


def record_starts(path: Path) -> dict[str, int]:
    """Where the data of each record begins, by its own header."""
    starts = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<2H", file.read(4))
            starts[info.filename] = info.header_offset + 30 + name + extra
    return starts
