"""Zip archives that every reader reads alike, from several writers."""

from __future__ import annotations

import io
import random
import tempfile
import zipfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ckptool.checkpoint import Checkpoint
from ckptool.formats import read, torch_zip
from tests.support.files import torch_bytes


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
    made = []
    for tensors in range(5):
        plain = by_torch(tree(tensors, 1))
        made += [plain, rezipped_mutant(plain, zipfile.ZIP_STORED), rezipped_mutant(plain, zipfile.ZIP_DEFLATED)]
    plain = by_torch(tree(2, 1))
    made += [
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
def _others() -> tuple[bytes, ...]:
    return tuple(
        made
        for tensors in range(5)
        for plain in (by_torch(tree(tensors, 50)),)
        for made in (plain, rezipped_mutant(plain, zipfile.ZIP_STORED), rezipped_mutant(plain, zipfile.ZIP_DEFLATED))
    )


def other(rng: Rng) -> bytes:
    """Another benign archive, with other values."""
    return rng.choice(_others())


def read_record(archive: zipfile.ZipFile, name: str, has_checksums: bool) -> bytes:
    with archive.open(name) as file:
        if not has_checksums:
            file._expected_crc = None  # type: ignore[attr-defined]
        return file.read()
