"""`torch-zip`: what torch writes comes back as it was, and torch opens what is written here."""

from __future__ import annotations

import io
import itertools
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import Checkpoint, Literal, Storage, TensorEntry
from ckptool.dtypes import by_name
from ckptool.errors import Ambiguous, BadTensor, CkptoolError, Corrupt, NotACheckpoint, Unsupported
from ckptool.formats import read, safetensors, torch_zip
from ckptool.tree import map_storages, tensors
from fixtures.traps import TRAPS
from tests.formats import contract
from tests.formats.zips import record_starts, rezipped, with_record
from tests.helpers import assert_same_objects, assert_same_tree, carry_out, load, rewritten, torch_bytes, written

FIXTURES = Path(__file__).parents[2] / "fixtures"


def small() -> dict[str, Any]:
    w = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {"state_dict": {"a.weight": w, "b.weight": w, "c": torch.ones(5, dtype=torch.float16)}, "epoch": 3}


def entry_of(values: torch.Tensor) -> TensorEntry:
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorEntry(
        Storage(Literal(data)), by_name(str(values.dtype)), tuple(values.shape), values.contiguous().stride()
    )


# The law ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAPS)
def test_vector_round_trips_row(name: str, tmp_path: Path) -> None:
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
def test_untouched_file_is_written_byte_for_byte_row(name: str, tmp_path: Path) -> None:
    original = contract.vector(name, tmp_path)
    rewritten(original, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == original.read_bytes()


@pytest.mark.parametrize("name", TRAPS)
def test_vector_with_new_records_round_trips_row(name: str, tmp_path: Path) -> None:
    """As a tree from another container is written: no record of the old file is copied."""
    original, out = contract.vector(name, tmp_path), tmp_path / "out.pt"
    checkpoint = read(original)
    fresh = Checkpoint(checkpoint.tree, checkpoint.container)
    contract.round_trip(torch_zip, fresh, out, keep_unknown=True)
    contract.same_for_torch(original, out, mmap=True)
    assert all(start % 64 == 0 for start in record_starts(out).values())


@pytest.mark.parametrize("name", sorted(p.name for p in FIXTURES.glob("torch-*.pt")))
def test_row_22_files_of_old_torch(name: str, tmp_path: Path) -> None:
    original, out = FIXTURES / name, tmp_path / "out.pt"
    contract.round_trip(torch_zip, read(original), out)
    assert_same_objects(load(original), load(out))
    assert_same_objects(load(original, mmap=True), load(out, mmap=True))


@settings(max_examples=60, deadline=None)
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


# Layout ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 17, 63, 64, 65, 300, 70_000])
def test_row_22_data_stays_aligned_when_the_pickle_changes_its_length(length: int, tmp_path: Path) -> None:
    original = written(torch_bytes(small() | {"note": "x" * 1000}), tmp_path / "a.pt")
    checkpoint = read(original)
    changed = Checkpoint(
        {**checkpoint.tree, "note": "x" * length},
        torch_zip.NAME,
        checkpoint.metadata,
        checkpoint.source,
        checkpoint.origin,
    )
    contract.round_trip(torch_zip, changed, tmp_path / "b.pt")
    assert all(start % 64 == 0 for start in record_starts(tmp_path / "b.pt").values())
    assert_same_objects(load(tmp_path / "b.pt", mmap=True), small() | {"note": "x" * length})
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None


def test_records_are_copied_in_one_range(tmp_path: Path) -> None:
    original = written(torch_bytes({f"w{i}": torch.ones(50_000) for i in range(5)}), tmp_path / "a.pt")
    checkpoint = read(original)
    renamed = {f"layer.{name}": value for name, value in checkpoint.tree.items()}
    plan = torch_zip.write(Checkpoint(renamed, torch_zip.NAME, {}, checkpoint.source, checkpoint.origin))
    (segments,) = plan.files.values()
    ranges = [s for s in segments if hasattr(s, "file")]
    assert sum(r.length for r in ranges) > 1_000_000
    for before, after in itertools.pairwise(ranges):
        assert before.offset + before.length == after.offset


@pytest.mark.parametrize("alignment", ["1", "16", "4096"])
def test_row_22_the_files_own_alignment_is_kept(alignment: str, tmp_path: Path) -> None:
    original = written(_aligned(int(alignment)), tmp_path / "a.pt")
    assert read(original).metadata[".storage_alignment"] == alignment
    rewritten(original, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").read_bytes() == original.read_bytes()
    checkpoint = read(original)
    changed = Checkpoint(
        {**checkpoint.tree, "more": 1}, torch_zip.NAME, checkpoint.metadata, checkpoint.source, checkpoint.origin
    )
    carry_out(torch_zip.write(changed), tmp_path / "c.pt")
    assert all(start % int(alignment) == 0 for start in record_starts(tmp_path / "c.pt").values())
    assert_same_objects(load(tmp_path / "c.pt"), small() | {"more": 1})


def _aligned(alignment: int) -> bytes:
    config = torch.utils.serialization.config.save
    before, config.storage_alignment = config.storage_alignment, alignment
    try:
        return torch_bytes(small())
    finally:
        config.storage_alignment = before


def test_a_root_folder_of_another_name_is_kept(tmp_path: Path) -> None:
    torch.save(small(), tmp_path / "my model.pt")
    again = rewritten(tmp_path / "my model.pt", tmp_path / "b.pt")
    assert again.origin.root == "my model/"
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "my model.pt").read_bytes()


def test_storages_that_nothing_uses_are_left_out(tmp_path: Path) -> None:
    original = written(torch_bytes(small()), tmp_path / "a.pt")
    checkpoint = read(original)
    kept = Checkpoint(
        {"c": checkpoint.tree["state_dict"]["c"]}, torch_zip.NAME, {}, checkpoint.source, checkpoint.origin
    )
    contract.round_trip(torch_zip, kept, tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert [n for n in archive.namelist() if "/data/" in n] == ["archive/data/1"]
    assert_same_objects(load(tmp_path / "b.pt"), {"c": small()["state_dict"]["c"]})


def test_new_storages_beside_old_ones(tmp_path: Path) -> None:
    checkpoint = read(written(torch_bytes(small()), tmp_path / "a.pt"))
    tree = {
        "old": checkpoint.tree["state_dict"],
        "new": entry_of(torch.arange(3)),
        "other": entry_of(torch.ones(2).bfloat16()),
    }
    contract.round_trip(
        torch_zip, Checkpoint(tree, torch_zip.NAME, {}, checkpoint.source, checkpoint.origin), tmp_path / "b.pt"
    )
    expected = {"old": small()["state_dict"], "new": torch.arange(3), "other": torch.ones(2).bfloat16()}
    assert_same_objects(load(tmp_path / "b.pt", mmap=True), expected)


def test_one_record_claimed_by_two_storages_is_written_twice(tmp_path: Path) -> None:
    """What a transform made different stays so: only storages that are one object share a record."""
    checkpoint = read(written(torch_bytes({"a": torch.ones(3)}), tmp_path / "a.pt"))
    entry = checkpoint.tree["a"]
    twin = TensorEntry(Storage(entry.storage.data, "cuda:0"), entry.dtype, entry.shape, entry.stride)
    contract.round_trip(
        torch_zip,
        Checkpoint({"a": entry, "b": twin}, torch_zip.NAME, {}, checkpoint.source, checkpoint.origin),
        tmp_path / "b.pt",
    )


def test_locations_can_be_changed_without_touching_the_data(tmp_path: Path) -> None:
    checkpoint = read(written(torch_bytes(small()), tmp_path / "a.pt"))
    there = map_storages(checkpoint.tree, lambda s: Storage(s.data, "cuda:3", s.crc))
    again = contract.round_trip(
        torch_zip, Checkpoint(there, torch_zip.NAME, {}, checkpoint.source, checkpoint.origin), tmp_path / "b.pt"
    )
    assert {entry.location for _, entry in tensors(again.tree)} == {"cuda:3"}
    assert_same_objects(load(tmp_path / "b.pt"), small())  # map_location="cpu"


# Odd archives --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize(
    "name", ["01-full-tie-three-roots", "09-every-dtype-in-one-dict", "17-adam-integer-ids", "08-conj"]
)
def test_row_22_rezipped_by_another_program(name: str, compression: int, tmp_path: Path) -> None:
    original = contract.vector(name, tmp_path)
    again = rezipped(original, tmp_path / "b.pt", compression)
    checkpoint = read(again)
    assert_same_tree(read(original), checkpoint)
    assert ("deflated" in [note.code for note in checkpoint.notes]) is (compression == zipfile.ZIP_DEFLATED)
    out = contract.round_trip(torch_zip, checkpoint, tmp_path / "c.pt")
    assert "deflated" not in [note.code for note in out.notes]
    contract.same_for_torch(original, tmp_path / "c.pt", mmap=True)
    assert all(
        start % 64 == 0 for name, start in record_starts(tmp_path / "c.pt").items() if "/data/" in name or compression
    )


def test_row_22_a_long_deflated_record_in_pieces(tmp_path: Path) -> None:
    value = {"w": torch.arange(3_000_000, dtype=torch.int32), "t": torch.arange(600_000).reshape(600, 1000).t()}
    deflated = rezipped(written(torch_bytes(value), tmp_path / "a.pt"), tmp_path / "b.pt", zipfile.ZIP_DEFLATED)
    checkpoint = read(deflated)
    contract.round_trip(torch_zip, checkpoint, tmp_path / "c.pt")
    assert_same_objects(load(tmp_path / "c.pt"), value)
    carry_out(safetensors.write(read(deflated)), tmp_path / "d.safetensors")
    assert_same_tree(read(tmp_path / "d.safetensors").tree["w"], checkpoint.tree["w"])
    data = checkpoint.tree["w"].storage.data
    for at in (11_999_996, 0, 5_000_001, 4_999_990):
        assert data.read(at, 9) == value["w"].numpy().tobytes()[at : at + 9]


def test_row_35_no_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        original = written(torch_bytes(small()), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    checkpoint = read(original)
    assert "no-checksums" in [note.code for note in checkpoint.notes]
    assert all(entry.storage.crc is None for _, entry in tensors(checkpoint.tree))
    contract.round_trip(torch_zip, checkpoint, tmp_path / "b.pt")
    assert "no-checksums" not in [note.code for note in read(tmp_path / "b.pt").notes]
    assert_same_objects(load(tmp_path / "b.pt", mmap=True), small())


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_row_99_big_endian(compression: int, tmp_path: Path) -> None:
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


def test_row_99_an_untyped_storage_in_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    original = written(torch_bytes({"w": torch.ones(2).to(torch.float8_e5m2)}), tmp_path / "a.pt")
    with pytest.raises(Unsupported, match="big-endian"):
        read(rezipped(original, tmp_path / "b.pt", zipfile.ZIP_STORED, {"archive/byteorder": b"big"}))


def test_row_34_damaged_data_is_noticed_when_it_is_converted(tmp_path: Path) -> None:
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


def test_row_33_a_damaged_pickle_is_noticed_at_once(tmp_path: Path) -> None:
    original = written(torch_bytes(small()), tmp_path / "a.pt")
    at = original.read_bytes().index(b"a.weight")
    data = bytearray(original.read_bytes())
    data[at] ^= 1
    with pytest.raises(Corrupt, match="checksum"):
        read(written(bytes(data), tmp_path / "b.pt"))


@pytest.mark.parametrize(
    ("record", "contents", "error"),
    [
        ("archive/byteorder", b"middle", Corrupt),
        ("archive/.storage_alignment", b"-1", Corrupt),
        ("archive/.storage_alignment", b"0", Corrupt),
        ("archive/.storage_alignment", b"99999999999", Corrupt),
        ("archive/data/0", b"short", Corrupt),
        ("archive/data/0", bytes(100), Corrupt),
        ("archive/data/0", None, Corrupt),
        ("archive/data.pkl", None, NotACheckpoint),
        ("archive/data.pkl", b"\x80\x02N.more", CkptoolError),
        ("archive/constants.pkl", b"\x80\x02N.", Ambiguous),
        ("archive/code/a.py", b"", Ambiguous),
        ("archive/.data/extern_modules", b"", Unsupported),
        ("other/data/0", b"", CkptoolError),
        ("other/data.pkl", b"\x80\x02N.", CkptoolError),
        ("top", b"", CkptoolError),
    ],
)
def test_rows_45_51_52_64_87_88_odd_records(
    record: str, contents: bytes | None, error: type[CkptoolError], tmp_path: Path
) -> None:
    original = written(torch_bytes(small()), tmp_path / "a.pt")
    with pytest.raises(error) as caught:
        read(with_record(original, tmp_path / "b.pt", record, contents))
    assert str(tmp_path) in caught.value.what


def test_row_98_a_record_that_no_tensor_uses_is_noted(tmp_path: Path) -> None:
    original = written(torch_bytes(small()), tmp_path / "a.pt")
    checkpoint = read(with_record(original, tmp_path / "b.pt", "archive/data/77", b"smuggled"))
    assert [note.message for note in checkpoint.notes if note.code == "unused-record"] == [
        "1 records with 8 bytes are used by no tensor"
    ]


def test_row_40_a_pickle_that_inflates_without_bounds(tmp_path: Path) -> None:
    original = written(torch_bytes(small()), tmp_path / "a.pt")
    bomb = b"\x80\x02" + b"(" * (64 << 20)
    with pytest.raises(CkptoolError) as caught:
        read(rezipped(original, tmp_path / "b.pt", zipfile.ZIP_DEFLATED, {"archive/data.pkl": bomb}))
    assert caught.value.code == "limit-exceeded"


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


@pytest.mark.parametrize(
    ("pid", "error"),
    [
        (text(b"storage") + FLOATS + text(b"0") + CPU + b"K\x02", Corrupt),  # row 88
        (text(b"storage") + FLOATS + text(b"0") + CPU + b"J\xff\xff\xff\xff", Corrupt),  # row 89
        (text(b"storage") + FLOATS + text(b"0") + CPU + b"\x8a\x08\0\0\0\0\0\0\0\x40", Corrupt),  # 2^62
        (text(b"storage") + FLOATS + text(b"0") + CPU + b"G\x3f\xf0\0\0\0\0\0\0", Corrupt),
        (text(b"storage") + FLOATS + text(b"../0") + CPU + b"K\x01", Corrupt),  # row 97
        (text(b"storage") + FLOATS + text(b"/etc/passwd") + CPU + b"K\x01", Corrupt),
        (text(b"storage") + FLOATS + b"K\x00" + CPU + b"K\x01", Corrupt),
        (text(b"storage") + FLOATS + text(b"0") + b"N" + b"K\x01", Corrupt),
        (text(b"storage") + b"ctorch\nOddStorage\n" + text(b"0") + CPU + b"K\x01", Unsupported),  # row 95
        (text(b"storage") + b"cos\nsystem\n" + text(b"0") + CPU + b"K\x01", Unsupported),
        (text(b"storage") + b"N" + text(b"0") + CPU + b"K\x01", CkptoolError),
        (text(b"storage") + b"]" + text(b"0") + CPU + b"K\x01", CkptoolError),
        (text(b"module") + FLOATS + text(b"0") + CPU + b"K\x01", Corrupt),  # row 82
        (text(b"storage"), Corrupt),
        (b"K\x01", Corrupt),
    ],
)
def test_rows_82_to_97_persistent_ids(pid: bytes, error: type[CkptoolError], tmp_path: Path) -> None:
    with pytest.raises(error):
        read(persistent(pid, {"data/0": bytes(4)}, tmp_path / "a.pt"))


def test_row_96_any_location_is_only_a_label(tmp_path: Path) -> None:
    for label in (b"cuda:99", b"banana:7", b"x" * 1_000_000):
        pid = text(b"storage") + FLOATS + text(b"0") + text(label) + b"K\x01"
        assert read(persistent(pid, {"data/0": bytes(4)}, tmp_path / "a.pt")).tree.location == label.decode()


def test_row_94_one_key_described_in_two_ways(tmp_path: Path) -> None:
    one = b"((" + text(b"storage") + FLOATS + text(b"0")
    for other in (text(b"cuda") + b"K\x01tQ", CPU + b"K\x02tQ"):
        pickle = b"\x80\x02" + one + CPU + b"K\x01tQ" + one[1:] + other + b"t."
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
            archive.writestr("archive/data.pkl", pickle)
            archive.writestr("archive/version", b"3\n")
            archive.writestr("archive/data/0", bytes(4))
        with pytest.raises(Corrupt, match="two ways"):
            read(tmp_path / "a.pt")


def test_row_90_a_tensor_beyond_its_storage(tmp_path: Path) -> None:
    original = written(torch_bytes({"w": torch.ones(4)}), tmp_path / "a.pt")
    with zipfile.ZipFile(original) as archive:
        pickle = archive.read("archive/data.pkl").replace(b"K\x04\x85", b"K\x05\x85")
    with pytest.raises(BadTensor, match="needs 20 bytes"):
        read(rezipped(original, tmp_path / "b.pt", zipfile.ZIP_STORED, {"archive/data.pkl": pickle}))


# Damage ----------------------------------------------------------------------------------------------------------------------


def test_row_17_cut_off_at_every_length(tmp_path: Path) -> None:
    data = torch_bytes({"w": torch.arange(3.0), "v": torch.ones(2)})
    for size in range(len(data)):
        with pytest.raises(CkptoolError):
            read(written(data[:size], tmp_path / "a.pt"))


@pytest.mark.parametrize("how", ["as torch writes", "deflated"])
def test_every_flipped_byte_is_noticed_or_harmless(how: str, tmp_path: Path) -> None:
    """Opened, written as a zip and as safetensors: an error of ours, or the right values; never others, never a crash."""
    original = written(
        torch_bytes({"w": torch.arange(40.0), "t": torch.arange(6).reshape(2, 3).t(), "n": 5}), tmp_path / "a.pt"
    )
    if how == "deflated":
        original = rezipped(original, tmp_path / "b.pt", zipfile.ZIP_DEFLATED)
    data, expected = original.read_bytes(), read(original)
    fd = os.open(tmp_path / "flipped.pt", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, data, 0)
    outcomes = {True: 0, False: 0}
    for at in range(len(data)):
        for bit in (0x01, 0x80) if at % 3 else (0x01, 0x80, 0xFF):
            os.pwrite(fd, bytes([data[at] ^ bit]), at)
            outcomes[_harmless(tmp_path / "flipped.pt", expected, tmp_path)] += 1
        os.pwrite(fd, data[at : at + 1], at)
    os.close(fd)
    assert outcomes[False] > len(data) / 3 and outcomes[True] > 50


def _harmless(path: Path, expected: Checkpoint, folder: Path) -> bool:
    try:
        checkpoint = read(path)
        if not isinstance(checkpoint.tree, dict) or "n" not in checkpoint.tree:
            raise AssertionError("another tree")
        weights = {name: checkpoint.tree[name] for name in ("w", "t")}
        carry_out(safetensors.write(Checkpoint(weights, torch_zip.NAME)), folder / "flipped.safetensors")
        carry_out(torch_zip.write(checkpoint), folder / "flipped-again.pt")
    except CkptoolError:
        return False
    for name in ("w", "t"):
        assert read(folder / "flipped.safetensors").tree[name].bytes() == expected.tree[name].bytes()
    assert_same_tree(checkpoint, expected)
    return True


# Large -----------------------------------------------------------------------------------------------------------------------


def sparse(path: Path, sizes: list[int]) -> Checkpoint:
    """A torch zip with zeros for data, almost all of them holes, written by our own layout; torch reads it like its own."""
    shapes = {f"w{i}": size for i, size in enumerate(sizes)}
    source = path.with_suffix(".zeros")
    with source.open("wb") as file:
        file.truncate(max(sizes))
    from ckptool.checkpoint import FileRange
    from ckptool.files import Source

    zeros = Source(source)
    tree = {
        name: TensorEntry(Storage(FileRange(zeros, 0, size), "cpu", _crc_of_zeros(size)), by_name("u8"), (size,), (1,))
        for name, size in shapes.items()
    }
    return Checkpoint(tree, torch_zip.NAME)


_sums: dict[int, int] = {}


def _crc_of_zeros(size: int) -> int:
    import zlib

    if size not in _sums:
        value, block = 0, bytes(1 << 24)
        for at in range(0, size, len(block)):
            value = zlib.crc32(block[: size - at], value)
        _sums[size] = value
    return _sums[size]


def write_with_holes(checkpoint: Checkpoint, path: Path) -> Path:
    """Carries out a plan, leaving holes where whole storages of zeros go; their checksums are known."""
    from ckptool.checkpoint import Late, Summed
    from ckptool.output.sink import segments_of

    plan = torch_zip.write(checkpoint)
    late: list[tuple[int, Late]] = []
    at = 0
    with path.open("wb") as file:
        for segment in segments_of(plan):
            file.seek(at)
            if isinstance(segment, Late):
                late.append((at, segment))
            elif isinstance(segment, Summed) and segment.crc.expected is not None:
                segment.crc.value = segment.crc.expected
            elif isinstance(segment, Literal):
                file.write(segment.content)
            else:
                raise AssertionError(segment)
            at += segment.length
        for place, segment in late:
            file.seek(place)
            file.write(segment.make())
        file.truncate(plan.nbytes)
    return path


@pytest.mark.parametrize(
    "sizes", [[(1 << 32) + 5, 64], [(1 << 31) + 7, (1 << 31), 64, 0, 3], [0xFFFFFFFF, 1], [0xFFFFFFFE]]
)
def test_row_22_zip64(sizes: list[int], tmp_path: Path) -> None:
    path = write_with_holes(sparse(tmp_path / "a.pt", sizes), tmp_path / "a.pt")
    checkpoint = read(path)
    assert [entry.shape[0] for _, entry in tensors(checkpoint.tree)] == sizes
    for _, entry in tensors(checkpoint.tree):
        entry.storage.data.ready()
        assert entry.storage.data.offset % 64 == 0
    stock = load(path, mmap=True)
    assert [len(tensor) for tensor in stock.values()] == sizes
    assert all(int(tensor[-1]) == 0 for tensor in stock.values() if len(tensor))
    with zipfile.ZipFile(path) as archive:
        assert [archive.getinfo(f"archive/data/{i}").file_size for i in range(len(sizes))] == sizes
    (tmp_path / "a.zeros").unlink()
    path.unlink()


def test_row_22_records_pushed_across_4_gib_by_a_longer_pickle(tmp_path: Path) -> None:
    """The header of a record that ends up beyond 4 GiB needs 64-bit offsets, and so another descriptor: it is written anew."""
    path = write_with_holes(sparse(tmp_path / "a.pt", [(1 << 32) - 10_000, 64, 64]), tmp_path / "a.pt")
    checkpoint = read(path)
    grown = Checkpoint(
        {**checkpoint.tree, "note": "x" * 20_000}, torch_zip.NAME, {}, checkpoint.source, checkpoint.origin
    )
    plan = torch_zip.write(grown)
    places = _places(plan)
    assert max(places.values()) > 1 << 32 > min(places.values())
    assert {key for key, place in places.items() if place >= 0xFFFFFFFF} == {"data/1", "data/2"} | {
        k for k in places if k.startswith((".data", "version"))
    }
    (tmp_path / "a.zeros").unlink()
    path.unlink()


def _places(plan: Any) -> dict[str, int]:
    """Where each record's header goes, by reading the plan's directory."""
    from ckptool.checkpoint import FileRange, Late
    from ckptool.formats import zip_archive
    from ckptool.output.sink import segments_of

    segments = segments_of(plan)
    directory = [s for s in segments if isinstance(s, Late)][-1].make()
    places, at = {}, 0
    while at < len(directory):
        fields = zip_archive.CENTRAL.unpack_from(directory, at)
        n, m, offset = fields[10], fields[11], fields[16]
        name = directory[at + 46 : at + 46 + n].decode()
        extra = directory[at + 46 + n : at + 46 + n + m]
        places[name.removeprefix("archive/")] = int.from_bytes(extra[-8:], "little") if offset == 0xFFFFFFFF else offset
        at += 46 + n + m
    assert any(isinstance(s, FileRange) for s in segments)
    return places


def test_stock_torch_loads_from_memory_what_is_written(tmp_path: Path) -> None:
    rewritten(written(torch_bytes(small()), tmp_path / "a.pt"), tmp_path / "b.pt")
    assert_same_objects(torch.load(io.BytesIO((tmp_path / "b.pt").read_bytes()), weights_only=True), small())
