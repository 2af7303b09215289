"""Zip archives taken apart and put together otherwise than torch does, and what several readers make of them."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from ckptool.checkpoint import Checkpoint
from ckptool.formats import read
from ckptool.formats.zip.directory import END, END64, LOCATOR
from tests.support.files import load, torch_bytes


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


def damaged(path: Path, *records: str | int) -> Path:
    """The file with a flipped bit in the data of these records, or storages."""
    starts, data = record_starts(path), bytearray(path.read_bytes())
    for record in records:
        data[starts[record if isinstance(record, str) else f"archive/data/{record}"]] ^= 1
    path.write_bytes(data)
    return path


# Hostile ones -------------------------------------------------------------------------------------------------------

TENSORS = {"w": torch.arange(1.0, 4.0), "v": torch.tensor([7.0, 8.0])}
FILE = torch_bytes(TENSORS)  # as torch writes it: streamed, with descriptors and zip64 end records
END_AT = len(FILE) - END.size
END64_AT = END_AT - LOCATOR.size - END64.size
DIRECTORY = struct.unpack_from("<Q", FILE, END64_AT + 48)[0]
W = bytes(TENSORS["w"].numpy())
EXPECTED = {name: bytes(tensor.numpy()) for name, tensor in TENSORS.items()}


def bytes_by_name(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: entry.bytes() for name, entry in checkpoint.tree.items()}


def accepted(path: Path, *codes: str) -> Checkpoint:
    """The checkpoint, which has the right values and these notes."""
    checkpoint = read(path)
    assert bytes_by_name(checkpoint) == EXPECTED
    assert {note.code for note in checkpoint.notes} == set(codes)
    return checkpoint


def python_sees(data: bytes, name: str) -> bytes:
    """What Python's zipfile reads."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(name)


def torch_sees(path: Path) -> dict[str, bytes]:
    return {name: bytes(tensor.numpy()) for name, tensor in load(path).items()}


def at(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def block_state() -> dict[str, Any]:
    """Tensors of one size, as a transformer's blocks have: where one record can pass for another."""
    torch.manual_seed(0)
    return {f"l{i}.w": torch.randn(4, 3) for i in range(12)} | {"big": torch.randn(40)}


PLAIN = torch_bytes({"model": block_state(), "epoch": 3})
