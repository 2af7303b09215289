"""`torch-zip`: what torch writes comes back as it was, and torch opens what is written here."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.tree import tensors
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, NotACheckpoint, Unsupported
from ckptool.formats import read, torch_zip
from fixtures.traps import TRAPS
from tests.formats import contract
from tests.support.files import load, rewritten, torch_bytes, written
from tests.support.looped import examples, looped
from tests.support.same import assert_same_objects, assert_same_tree
from tests.support.zips import record_starts, rezipped, with_record

# The law --------------------------------------------------------------------------------------------------------------


@looped("name", TRAPS, here=1 / 3)
def test_every_trap_comes_back_as_the_same_tree(name: str, tmp_path: Path) -> None:
    original, out = contract.vector(name, tmp_path), tmp_path / "out.pt"
    checkpoint = read(original)
    unknown = name in contract.UNKNOWN_CALLS
    error = contract.refusal(lambda: torch_zip.write(checkpoint))
    named = error is not None and any(module in error.what for module in ("fixtures.traps", "torch.masked"))
    assert (error is not None and error.code == "unsafe-global" and named) is unknown
    contract.round_trip(torch_zip, checkpoint, out, keep_unknown=unknown)
    for mmap in (False, True):
        contract.same_for_torch(original, out, mmap=mmap)
    if _pickle(original) == _pickle(out):
        assert out.read_bytes() == original.read_bytes()


def _pickle(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize("name", ["01-full-tie", "09-every-dtype-in-one-dict", "17-adam-tensor-lr", "06-channels-last"])
def test_an_untouched_file_is_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    original = contract.vector(name, tmp_path)
    rewritten(original, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == original.read_bytes()


@looped("name", TRAPS, here=1 / 3)
def test_every_trap_comes_back_with_new_records(name: str, tmp_path: Path) -> None:
    """As a tree from another container is written: no record of the old file is copied."""
    original, out = contract.vector(name, tmp_path), tmp_path / "out.pt"
    checkpoint = read(original)
    fresh = Checkpoint(checkpoint.tree, checkpoint.container)
    contract.round_trip(torch_zip, fresh, out, keep_unknown=True)
    contract.same_for_torch(original, out, mmap=True)
    assert all(start % 64 == 0 for start in record_starts(out).values())


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_views_of_any_storages(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("views")
    bases = [
        torch.arange(n, dtype=torch.float32) for n in data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=3))
    ]
    tree: dict[str, Any] = {}
    for i in range(data.draw(st.integers(1, 6))):
        base = data.draw(st.sampled_from(bases))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        stride = [data.draw(st.integers(0, 4)) for _ in shape]
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else -1
        if reach < len(base):
            tree[f"t{i}"] = base.as_strided(shape, stride, data.draw(st.integers(0, max(0, len(base) - 1 - reach))))
    original = written(torch_bytes(tree), folder / "a.pt")
    contract.round_trip(torch_zip, read(original), folder / "b.pt")
    assert_same_objects(load(original), load(folder / "b.pt"))


# Odd or damaged -------------------------------------------------------------------------------------------------------


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


def test_what_torch_leaves_to_be_filled_in_has_no_checksums(tmp_path: Path) -> None:
    """`skip_data`: the directory's sums of tensors are 0; then another program writes their bytes (GPUDirect)."""
    tree = {"m": {"a.weight": torch.randn(3, 4), "b": torch.arange(3), "c": torch.zeros(0)}, "epoch": 1}
    file, out = tmp_path / "a.pt", tmp_path / "out.pt"
    with torch.serialization.skip_data():
        torch.save(tree, file)
    with file.open("r+b") as writing, zipfile.ZipFile(file) as archive:
        for number, tensor in enumerate(tree["m"].values()):
            info = archive.getinfo(f"a/data/{number}")
            writing.seek(info.header_offset + 26)
            lengths = writing.read(4)
            writing.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), 1)
            writing.write(tensor.numpy().tobytes())
    assert_same_objects(tree, torch.load(file), storages=False)
    assert_same_objects(tree, ckptool.load(file, mmap=False), storages=False)
    assert "no-checksums" in {note.code for note in ckptool.inspect(file).notes}
    checked, recovered = ckptool.verify(file), ckptool.recover(file, out)
    assert checked.fine and checked.checksums == "some" and not (recovered.lost or recovered.proven)
    assert_same_objects(tree, torch.load(out), storages=False)
    for change in (
        lambda: ckptool.convert(file, out, overwrite=True),
        lambda: ckptool.add_module(file, out, overwrite=True),
        lambda: ckptool.cast(file, out, dtype="f64", overwrite=True),
    ):
        change()
        assert ckptool.verify(out).checksums == "all" and ckptool.load(out)["epoch"] == 1
        assert [t.tolist() for t in torch.load(out)["m"].values()] == [t.tolist() for t in tree["m"].values()]
    for change in (
        lambda: ckptool.add_module(file, in_place=True),
        lambda: ckptool.cast(file, dtype="f64", in_place=True),
    ):
        change()
        assert ckptool.verify(file).fine and torch.equal(torch.load(file)["m"]["module.b"], tree["m"]["b"])


def test_data_without_a_byte_has_its_checksum(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.zeros(0, 4)}, tmp_path / "a.pt")
    assert ckptool.verify(tmp_path / "a.pt").checksums == "all" and not ckptool.inspect(tmp_path / "a.pt").notes
    ckptool.add_module(tmp_path / "a.pt", in_place=True)
    assert ckptool.verify(tmp_path / "a.pt").checksums == "all"


@pytest.mark.parametrize("alignment", [1, 4096, 1 << 15, 1 << 16])
def test_files_of_any_alignment(alignment: int, tmp_path: Path) -> None:
    with torch.utils.serialization.config.patch({"save.storage_alignment": alignment}):
        torch.save({"a.weight": torch.randn(3, 4), "b": torch.arange(3)}, tmp_path / "a.pt")
    for name, in_place in (("out.pt", False), ("a.pt", True)):
        out = None if in_place else tmp_path / name
        ckptool.add_module(tmp_path / "a.pt", out, in_place=in_place)
        assert ckptool.verify(tmp_path / name).fine
        assert torch.equal(torch.load(tmp_path / name, mmap=True)["module.b"], torch.arange(3))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_a_big_endian_file_is_byte_swapped(compression: int, tmp_path: Path) -> None:
    value = {"f": torch.arange(5.0), "c": torch.tensor([1 + 2j, 3 - 4j]), "i": torch.arange(3)}
    value |= {"h": torch.ones(3).half(), "b": torch.ones(2, dtype=torch.uint8)}
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
        ("archive/.data/extern_modules", b"", Ambiguous),
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
    pickle = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((" + pid + b"tQK\x00K\x01\x85K\x01\x85\x89ccollections\n"
    pickle += b"OrderedDict\n)RtR."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", b"3\n")
        for name, data in records.items():
            archive.writestr(f"archive/{name}", data)
    return path


def text(value: bytes) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value


FLOATS, CPU, STORAGE, KEY = b"ctorch\nFloatStorage\n", text(b"cpu"), text(b"storage"), text(b"0")
PIDS: dict[type[CkptoolError], list[tuple[bytes, ...]]] = {
    Corrupt: [
        *((STORAGE, FLOATS, KEY, CPU, count) for count in (b"K\x02", b"J\xff\xff\xff\xff", b"G\x3f\xf0" + bytes(6))),
        (STORAGE, FLOATS, KEY, CPU, b"\x8a\x08\0\0\0\0\0\0\0\x40"),  # 2^62
        *((STORAGE, FLOATS, key, CPU, b"K\x01") for key in (text(b"../0"), text(b"/etc/passwd"), b"K\x00")),
        *(
            (STORAGE, FLOATS, KEY, b"N", b"K\x01"),
            (text(b"module"), FLOATS, KEY, CPU, b"K\x01"),
            (STORAGE,),
            (b"K\x01",),
        ),
    ],
    Unsupported: [(STORAGE, kind, KEY, CPU, b"K\x01") for kind in (b"ctorch\nOddStorage\n", b"cos\nsystem\n")],
    CkptoolError: [(STORAGE, kind, KEY, CPU, b"K\x01") for kind in (b"N", b"]")],
}


@looped(("pid", "error"), [(b"".join(pid), error) for error, pids in PIDS.items() for pid in pids])
def test_odd_persistent_ids_are_refused(pid: bytes, error: type[CkptoolError], tmp_path: Path) -> None:
    with pytest.raises(error):
        read(persistent(pid, {"data/0": bytes(4)}, tmp_path / "a.pt"))
