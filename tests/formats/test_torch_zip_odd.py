"""`torch-zip` files that are odd or damaged: re-zipped, without checksums, of the other byte order, cut off, with
records that lie."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.tree import tensors
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, NotACheckpoint, Unsupported
from ckptool.formats import read, safetensors, torch_zip
from tests.formats import contract
from tests.support.files import carry_out, load, rewritten, torch_bytes, written
from tests.support.looped import looped
from tests.support.same import assert_same_objects, assert_same_tree
from tests.support.zips import record_starts, rezipped, with_record


def tied_state() -> dict[str, Any]:
    w = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {"state_dict": {"a.weight": w, "b.weight": w, "c": torch.ones(5, dtype=torch.float16)}, "epoch": 3}


def test_stock_torch_loads_from_memory_what_is_written(tmp_path: Path) -> None:
    rewritten(written(torch_bytes(tied_state()), tmp_path / "a.pt"), tmp_path / "b.pt")
    assert_same_objects(torch.load(io.BytesIO((tmp_path / "b.pt").read_bytes()), weights_only=True), tied_state())


# Odd archives ---------------------------------------------------------------------------------------------------------


def test_a_file_without_checksums_is_read_and_noted(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        original = written(torch_bytes(tied_state()), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    checkpoint = read(original)
    assert "no-checksums" in [note.code for note in checkpoint.notes]
    assert all(entry.storage.crc is None for _, entry in tensors(checkpoint.tree))
    contract.round_trip(torch_zip, checkpoint, tmp_path / "b.pt")
    assert "no-checksums" not in [note.code for note in read(tmp_path / "b.pt").notes]
    assert_same_objects(load(tmp_path / "b.pt", mmap=True), tied_state())


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_a_big_endian_file_is_byte_swapped(compression: int, tmp_path: Path) -> None:
    value = {
        "f": torch.arange(5.0),
        "c": torch.tensor([1 + 2j, 3 - 4j]),
        "i": torch.arange(3),
        "h": torch.ones(3).half(),
        "b": torch.ones(2, dtype=torch.uint8),
    }
    original = written(torch_bytes(value), tmp_path / "a.pt")
    turned = {"archive/byteorder": b"big"}
    with zipfile.ZipFile(original) as archive:
        for key, tensor in enumerate(value.values()):
            raw = archive.read(f"archive/data/{key}")
            width = tensor.element_size() // (2 if tensor.is_complex() else 1)
            turned[f"archive/data/{key}"] = b"".join(raw[i : i + width][::-1] for i in range(0, len(raw), width))
    big = rezipped(original, tmp_path / "b.pt", compression, turned)
    assert_same_objects(load(big), value)  # torch agrees that this is the file
    checkpoint = read(big)
    assert "big-endian" in [note.code for note in checkpoint.notes]
    assert_same_tree(checkpoint, read(original))
    out = contract.round_trip(torch_zip, checkpoint, tmp_path / "c.pt")
    assert out.metadata["byteorder"] == "little"
    assert_same_objects(load(tmp_path / "c.pt", mmap=True), value)
    assert torch_zip.append(checkpoint) is None


def test_damaged_data_is_noticed_when_it_is_converted(tmp_path: Path) -> None:
    original = written(
        torch_bytes({"w": torch.ones(100_000), "t": torch.ones(300, 300).t(), "part": torch.ones(1000)[:7]}),
        tmp_path / "a.pt",
    )
    data = original.read_bytes()
    for name, start in record_starts(original).items():
        if "/data/" in name:
            damaged = written(data[: start + 40] + b"\x55" + data[start + 41 :], tmp_path / "b.pt")
            with pytest.raises(Corrupt, match="checksum"):
                carry_out(
                    safetensors.write(Checkpoint(dict(read(damaged).tree), torch_zip.NAME)), tmp_path / "c.safetensors"
                )


@looped(
    ("record", "contents", "error"),
    [
        ("archive/data/0", b"short", Corrupt),
        ("archive/data/0", bytes(100), Corrupt),
        ("archive/data/0", None, Corrupt),
        ("archive/data.pkl", None, NotACheckpoint),
        ("archive/data.pkl", b"\x80\x02N.more", CkptoolError),
        ("archive/constants.pkl", b"\x80\x02N.", Ambiguous),
        ("archive/code/a.py", b"", Ambiguous),
        ("archive/.data/extern_modules", b"", Unsupported),
    ],
)
def test_odd_records_are_refused(
    record: str, contents: bytes | None, error: type[CkptoolError], tmp_path: Path
) -> None:
    original = written(torch_bytes(tied_state()), tmp_path / "a.pt")
    with pytest.raises(error) as caught:
        read(with_record(original, tmp_path / "b.pt", record, contents))
    assert str(tmp_path) in caught.value.what


def persistent(pid: bytes, records: dict[str, bytes], path: Path) -> Path:
    """A torch zip whose pickle is one tensor on the storage that `pid` names."""
    pickle = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
        + pid
        + b"tQK\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR."
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", b"3\n")
        for name, data in records.items():
            archive.writestr(f"archive/{name}", data)
    return path


def text(value: bytes) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value


FLOATS, CPU = b"ctorch\nFloatStorage\n", text(b"cpu")


@looped(
    ("pid", "error"),
    [
        (text(b"storage") + FLOATS + text(b"0") + CPU + b"K\x02", Corrupt),
        (text(b"storage") + FLOATS + text(b"0") + CPU + b"J\xff\xff\xff\xff", Corrupt),
        (text(b"storage") + FLOATS + text(b"0") + CPU + b"\x8a\x08\0\0\0\0\0\0\0\x40", Corrupt),  # 2^62
        (text(b"storage") + FLOATS + text(b"0") + CPU + b"G\x3f\xf0\0\0\0\0\0\0", Corrupt),
        (text(b"storage") + FLOATS + text(b"../0") + CPU + b"K\x01", Corrupt),
        (text(b"storage") + FLOATS + text(b"/etc/passwd") + CPU + b"K\x01", Corrupt),
        (text(b"storage") + FLOATS + b"K\x00" + CPU + b"K\x01", Corrupt),
        (text(b"storage") + FLOATS + text(b"0") + b"N" + b"K\x01", Corrupt),
        (text(b"storage") + b"ctorch\nOddStorage\n" + text(b"0") + CPU + b"K\x01", Unsupported),
        (text(b"storage") + b"cos\nsystem\n" + text(b"0") + CPU + b"K\x01", Unsupported),
        (text(b"storage") + b"N" + text(b"0") + CPU + b"K\x01", CkptoolError),
        (text(b"storage") + b"]" + text(b"0") + CPU + b"K\x01", CkptoolError),
        (text(b"module") + FLOATS + text(b"0") + CPU + b"K\x01", Corrupt),
        (text(b"storage"), Corrupt),
        (b"K\x01", Corrupt),
    ],
)
def test_odd_persistent_ids_are_refused(pid: bytes, error: type[CkptoolError], tmp_path: Path) -> None:
    with pytest.raises(error):
        read(persistent(pid, {"data/0": bytes(4)}, tmp_path / "a.pt"))
