"""What is left of a damaged file: all that is proven comes back, and nothing that comes back is wrong."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.tree import address, walk
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, NotACheckpoint, Truncated, form
from ckptool.formats import damaged, read
from ckptool.formats.damaged import Salvaged
from ckptool.formats.zip.directory import CENTRAL, LOCAL
from ckptool.verbs.convert import convert
from ckptool.verbs.edit import edit
from fixtures.make import make
from tests.support.errors import refused
from tests.support.files import torch_bytes, written
from tests.support.looped import examples, looped
from tests.support.processes import soon
from tests.support.zips import PLAIN

Values = dict[str, bytes]


INNER = torch.frombuffer(bytearray(PLAIN), dtype=torch.uint8)


NESTED = torch_bytes({"a": torch.randn(5), "nest": INNER.clone(), "b": torch.randn(5), "c": torch.randn(7)})


def rezipped(data: bytes, compression: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w", compression) as again:
        for info in archive.infolist():
            again.writestr(info.filename, archive.read(info))
    return out.getvalue()


FILES = {
    "by torch": PLAIN,
    "a zip inside of a tensor": NESTED,
    "deflated": rezipped(PLAIN, zipfile.ZIP_DEFLATED),
    "rezipped": rezipped(PLAIN, zipfile.ZIP_STORED),
}


def values(tree: Any) -> Values:
    return {address(path): node.bytes() for path, node in walk(tree) if isinstance(node, TensorEntry)}


def salvaged(data: bytes, path: Path) -> Salvaged:
    """What is left of a file with these bytes; it must not be written to, nor changed."""
    found = damaged.salvage(Source(written(data, path)))
    assert path.read_bytes() == data
    return found


def came_back(found: Salvaged) -> Values:
    """The tensors that are not lost."""
    return {
        address(path): node.bytes()
        for path, node in walk(found.checkpoint.tree)
        if isinstance(node, TensorEntry) and damaged.lost_of(node.storage) is None
    }


ORIGINALS: dict[str, Values] = {}


def originals(name: str, path: Path) -> Values:
    if name not in ORIGINALS:
        ORIGINALS[name] = values(read(written(FILES[name], path)).tree)
    return ORIGINALS[name]


def whole_before(data: bytes, cut: int) -> dict[str, bytes]:
    """The records that end, descriptor included, before byte `cut`: told by Python's zipfile from the whole file."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
            end = (
                info.header_offset + LOCAL.size + name + extra + info.compress_size + (16 if info.flag_bits & 8 else 0)
            )
            if end <= cut:
                found[info.filename] = archive.read(info)
    return found


# Cuts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("step", [211, pytest.param(1, marks=pytest.mark.soak)])
def test_cut_at_many_lengths(name: str, step: int, tmp_path: Path) -> None:
    path, data = tmp_path / "cut.pt", FILES[name]
    expected, seen = originals(name, path), set()
    for cut in range(4, len(data), step):
        whole = {raw for key, raw in whole_before(data, cut).items() if "/data/" in key}
        try:
            found = salvaged(data[:cut], path)
        except (Truncated, Corrupt):
            assert not whole_before(data, cut)
            continue
        back = came_back(found)
        assert back == {key: expected[key] for key in back}, cut
        assert set(back.values()) == whole or "deflated" in name, cut
        seen.add(len(back))
    assert {0, len(expected)} <= seen if name != "a zip inside of a tensor" else {0, 1} <= seen


def test_a_cut_file_says_how_many_storages_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    for cut in [*range(1, 64), *range(64, len(PLAIN), 37), *range(len(PLAIN) - 120, len(PLAIN))]:
        with pytest.raises((Truncated, NotACheckpoint)) as caught:
            ckptool.open(written(PLAIN[:cut], path))
        if cut < 4:
            continue
        assert caught.type is Truncated, cut
        whole = sum(1 for name in whole_before(PLAIN, cut) if "/data/" in name)
        if "archive/data.pkl" in whole_before(PLAIN, cut):
            assert f"{whole} of its 13 storages {form(whole, 'looks', 'look')} whole" in caught.value.why, cut
            assert f"ckptool recover {path} -o OUT" in caught.value.fix


def test_counting_the_whole_records_of_a_cut_file_reads_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch_bytes({f"w{i}": torch.zeros(1 << 18) for i in range(20)})
    path = written(data[: len(data) // 2], tmp_path / "cut.pt")
    read_bytes, original = 0, Source.read

    def counted(self: Source, offset: int, length: int) -> bytes:
        nonlocal read_bytes
        read_bytes += length
        return original(self, offset, length)

    monkeypatch.setattr(Source, "read", counted)
    expected = sum(1 for name in whole_before(data, len(data) // 2) if "/data/" in name)
    assert 8 < expected < 12
    with pytest.raises(Truncated, match=f"{expected} of its 20 storages"):
        ckptool.open(path)
    assert read_bytes < 1 << 18


# Damage ---------------------------------------------------------------------------------------------------------------


def nothing_wrong(name: str, data: bytes, path: Path) -> int:
    """Fails if a tensor comes back that is not the original's; how many came back."""
    try:
        found = salvaged(data, path)
    except CkptoolError as error:
        assert error.what and error.why
        return 0
    back, expected = came_back(found), originals(name, path.with_name("original.pt"))
    assert back == {key: expected.get(key) for key in back}
    return len(back)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(FILES)))
def test_nothing_that_comes_back_differs(data: st.DataObject, name: str, tmp_path: Path) -> None:
    original = FILES[name]
    damaged = bytearray(original[: data.draw(st.integers(100, len(original)), "cut")])
    for _ in range(data.draw(st.integers(0, 3), "changes")):
        at = data.draw(st.integers(0, len(damaged) - 1), "at")
        kind = data.draw(st.sampled_from(["flip", "byte", "zeros", "missing"]), "kind")
        size = data.draw(st.integers(1, 600), "size")
        if kind == "flip":
            damaged[at] ^= 1 << size % 8
        elif kind == "byte":
            damaged[at] = size % 256
        elif kind == "zeros":
            damaged[at : at + size] = bytes(len(damaged[at : at + size]))
        elif len(damaged) > size + 100:
            del damaged[at : at + (size | 1)]  # whole records that are missing at the very end leave no trace
    nothing_wrong(name, bytes(damaged), tmp_path / "damaged.pt")


@pytest.mark.soak
@pytest.mark.parametrize("name", FILES)
def test_nothing_that_comes_back_differs_at_length(name: str, tmp_path: Path) -> None:
    chosen = random.Random(11)
    for _ in range(5_000):
        data = bytearray(FILES[name][: chosen.randrange(100, len(FILES[name]) + 1)])
        for _ in range(chosen.randrange(4)):
            at = chosen.randrange(len(data))
            data[at] ^= 1 << chosen.randrange(8)
            if chosen.random() < 0.3 and len(data) > 400:
                del data[at : at + chosen.choice([1, 63, 77, 199, 300])]
        nothing_wrong(name, bytes(data), tmp_path / "damaged.pt")


def test_a_flip_anywhere_loses_at_most_what_it_hits(tmp_path: Path) -> None:
    """The directory and the records' own headers say the same: where one is damaged, the other is believed."""
    pickle_end, line = PLAIN.index(b"PK\x07\x08") + 16, PLAIN.index(b"PK\x01\x02")
    for at in range(pickle_end, len(PLAIN), 29):
        if at in range(line + 16, line + 20):  # the checksum of the pickle
            continue
        data = bytearray(PLAIN)
        data[at] ^= 0x10
        assert nothing_wrong("by torch", bytes(data), tmp_path / "flip.pt") >= 12, at


@pytest.mark.parametrize("record", ["data.pkl", "data/1", "data/2"])
def test_a_block_of_an_older_file_is_not_taken_for_the_new_one(record: str, tmp_path: Path) -> None:
    """A write that a disk lost leaves data, and the checksum behind it, as they were; the directory has the new one."""
    torch.manual_seed(0)
    old, new = ({f"w{i}": torch.randn(40) for i in range(4)} | {"epoch": epoch} for epoch in (1, 2))
    before, data = torch_bytes(old), bytearray(torch_bytes(new))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        place = names.index(f"archive/{record}")
        begin, end = (archive.infolist()[i].header_offset for i in (place, place + 1))
    data[begin:end] = before[begin:end]
    if record == "data.pkl":
        with pytest.raises(Corrupt, match="its pickle is lost"):
            salvaged(bytes(data), tmp_path / "a.pt")
        return
    found = salvaged(bytes(data), tmp_path / "a.pt")
    lost = f"w{record[-1]}"
    assert came_back(found) == {f"w{i}": new[f"w{i}"].numpy().tobytes() for i in range(4) if f"w{i}" != lost}
    assert found.checkpoint.tree["epoch"] == 2


def header_of(name: str) -> int:
    return PLAIN.index(name.encode()) - LOCAL.size


HEADERS: dict[str, Callable[[bytearray], None]] = {
    "its name is another's": lambda d: d.__setitem__(header_of("archive/data/5") + LOCAL.size + 13, ord("7")),
    "its extra field leads into the next record": lambda d: d.__setitem__(
        slice(header_of("archive/data/5") + 28, header_of("archive/data/5") + 30),
        struct.pack("<H", struct.unpack_from("<H", PLAIN, header_of("archive/data/5") + 28)[0] + 128),
    ),
    "its magic": lambda d: d.__setitem__(header_of("archive/data/5"), 0),
    "its flags": lambda d: d.__setitem__(header_of("archive/data/5") + 6, 0),
    "its descriptor": lambda d: d.__setitem__(header_of("archive/data/6") - 16, 0),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_damaged_header_behind_which_the_directory_is_cut_off(what: str, tmp_path: Path) -> None:
    """No checksum covers a name; without a directory only the order of the records proves it, up to where it ends."""
    data = bytearray(PLAIN[: header_of("archive/data/7")])
    HEADERS[what](data)
    found = came_back(salvaged(bytes(data), tmp_path / "cut.pt"))
    expected = originals("by torch", tmp_path / "o.pt")
    whole = {"its name is another's": (0, 1, 2, 3), "its descriptor": (0, 1, 2, 3, 4, 6)}.get(what, (0, 1, 2, 3, 4))
    assert found == {f"model/l{i}.w": expected[f"model/l{i}.w"] for i in whole}


@pytest.mark.parametrize("what", HEADERS)
def test_a_damaged_header_that_the_directory_makes_up_for(what: str, tmp_path: Path) -> None:
    """A name that header and directory do not agree on is not proven."""
    data = bytearray(PLAIN)
    HEADERS[what](data)
    lost = ["model/l5.w"] if what in ("its name is another's", "its magic") else []
    expected = originals("by torch", tmp_path / "o.pt")
    assert came_back(salvaged(bytes(data), tmp_path / "h.pt")) == {k: v for k, v in expected.items() if k not in lost}


def test_bytes_missing_from_the_middle_join_no_header_with_the_data_of_another(tmp_path: Path) -> None:
    """Four records of one length are gone: the header of one stands before the data, and the valid checksum, of
    another."""
    begin = header_of("archive/data/3") + 70
    stride = header_of("archive/data/4") - header_of("archive/data/3")
    data = PLAIN[:begin] + PLAIN[begin + 4 * stride :]
    back = came_back(salvaged(data, tmp_path / "cut.pt"))
    expected = originals("by torch", tmp_path / "o.pt")
    assert back == {key: expected[key] for key in back} and "model/l2.w" in back and "model/l3.w" not in back


def test_a_zip_in_a_tensor_is_not_taken_for_the_file(tmp_path: Path) -> None:
    """The header of the tensor that holds it is gone, and the end of the file: its own records look like the file's."""
    at = NESTED.index(b"archive/data/1") - LOCAL.size
    data = bytearray(NESTED[:-1200])
    data[at : at + 4] = bytes(4)
    found = salvaged(bytes(data), tmp_path / "cut.pt")
    expected = originals("a zip inside of a tensor", tmp_path / "o.pt")
    back = came_back(found)
    assert back == {key: expected[key] for key in back} and "a" in back and "nest" not in back
    data[:4] = bytes(4)  # and so is the pickle
    with pytest.raises(CkptoolError):
        read(written(bytes(data), tmp_path / "cut.pt"))


def test_the_order_of_a_rezipped_file_is_its_own(tmp_path: Path) -> None:
    """Records in the order of their names, sizes in their headers: believed where the directory's lines are there."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(PLAIN)) as archive, zipfile.ZipFile(out, "w") as again:
        for name in sorted(archive.namelist(), key=lambda name: name[::-1]):
            again.writestr(name, archive.read(name))
    expected = originals("by torch", tmp_path / "o.pt")
    back = came_back(salvaged(out.getvalue(), tmp_path / "odd.pt"))
    assert back == expected
    assert came_back(salvaged(out.getvalue()[:-22], tmp_path / "odd.pt")) == expected
    with pytest.raises(CkptoolError):
        salvaged(out.getvalue()[:-30], tmp_path / "odd.pt")


@pytest.mark.parametrize("kept", [0.5, 0.75, 0.99])
def test_a_cut_file_of_an_older_torch_whose_records_are_in_the_order_of_texts(kept: float, tmp_path: Path) -> None:
    """Up to torch 2.2: data/0, data/1, data/10, data/11, data/2."""
    state = {f"w{i}": torch.randn(4, 3) for i in range(25)}
    path = tmp_path / "old.pt"
    writer = torch._C.PyTorchFileWriter(str(path))
    with zipfile.ZipFile(io.BytesIO(torch_bytes(state))) as archive:
        storages = sorted(name for name in archive.namelist() if name.rpartition("/")[2].isdigit())
        for name in ("archive/data.pkl", *storages):
            content = archive.read(name)
            writer.write_record(name.partition("/")[2], content, len(content))
    writer.write_end_of_file()
    data, expected = path.read_bytes(), values(read(path).tree)
    cut = int(len(data) * kept)
    back = came_back(salvaged(data[:cut], path))
    assert back == {key: expected[key] for key in back}
    assert len(back) == sum("/data/" in name for name in whole_before(data, cut)) > 2


def test_the_byte_order(tmp_path: Path) -> None:
    path = make("big_endian.pt", tmp_path)
    data, expected = path.read_bytes(), values(read(path).tree)
    found = salvaged(data[:-30], tmp_path / "cut.pt")
    assert came_back(found) == expected
    at = data.index(b"PK\x07\x08", data.index(b"byteorder")) - 3
    assert data[at : at + 3] == b"big"
    with pytest.raises(Corrupt, match="byteorder"):
        salvaged(data[:at] + b"bug" + data[at + 3 : -30], tmp_path / "cut.pt")
    for name in (b"/byte/rder", b".byteorder", b"/byteordes"):  # no checksum covers a name
        with pytest.raises(Corrupt, match="byteorder"):
            salvaged(data[:-30].replace(b"/byteorder", name), tmp_path / "cut.pt")


def test_without_checksums_nothing_is_proven(tmp_path: Path) -> None:
    path = make("crc_off.pt", tmp_path)
    data, expected = path.read_bytes(), values(read(path).tree)
    found = salvaged(data[:-30], tmp_path / "cut.pt")
    assert not found.proven and came_back(found) == expected


@pytest.mark.parametrize("name", ["protocol4.pt", "old_zip.pt", "rezipped_deflated.pt", "rezipped_zip64.pt"])
def test_other_writers(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path)
    data, expected = path.read_bytes(), values(read(path).tree)
    assert came_back(salvaged(data, tmp_path / "whole.pt")) == expected
    assert came_back(salvaged(data[:-30], tmp_path / "cut.pt")) == expected  # only the end record is gone
    half = came_back(salvaged(data[: 2 * len(data) // 3], tmp_path / "cut.pt"))
    assert half and half == {key: expected[key] for key in half}


# In-place edits -------------------------------------------------------------------------------------------------------


def edited(path: Path) -> tuple[bytes, bytes]:
    """A file before and after an in-place edit."""
    before = written(PLAIN, path).read_bytes()
    edit(path, set={"epoch": 4}, in_place=True)
    return before, path.read_bytes()


def test_an_edited_file_whose_old_directory_is_damaged(tmp_path: Path) -> None:
    before, after = edited(tmp_path / "e.pt")
    data = bytearray(after)
    data[len(before) - 10] ^= 1
    with pytest.raises(Corrupt, match="end records"):  # which of its two states is the last?
        salvaged(bytes(data), tmp_path / "d.pt")


def test_two_archives_are_not_an_edit(tmp_path: Path) -> None:
    other = torch_bytes({"model": {f"l{i}.w": torch.zeros(4, 3) for i in range(12)}})
    path = written(PLAIN + other, tmp_path / "two.pt")
    with pytest.raises(CkptoolError) as caught:
        read(path)
    with pytest.raises(CkptoolError) as again:
        damaged.salvage(Source(path), caught.value)
    assert again.value is caught.value
    for tail in (b"X" * 16, b"PK\x03\x04" + bytes(40)):
        assert came_back(salvaged(PLAIN + tail, path)) == originals("by torch", tmp_path / "o.pt")
    with pytest.raises((Ambiguous, Truncated)):
        read(path)


# Safetensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_tree", [False, True])
def test_a_cut_safetensors_file(whole_tree: bool, tmp_path: Path) -> None:
    source, path = written(PLAIN, tmp_path / "in.pt"), tmp_path / "a.safetensors"
    convert(source, path, all=whole_tree)
    data, expected = path.read_bytes(), values(read(path).tree)
    header = 8 + int.from_bytes(data[:8], "little")
    seen = set()
    for cut in range(header, len(data), 23):
        found = salvaged(data[:cut], tmp_path / "cut.safetensors")
        back = came_back(found)
        assert not found.proven and back == {key: expected[key] for key in back}
        assert whole_tree or len(back) == min(12, (cut - header) // 48) + (cut - header >= 12 * 48 + 160)
        seen.add(len(back))
        with pytest.raises(Truncated) as caught:
            read(tmp_path / "cut.safetensors")
        assert "of 13. " in caught.value.why and "ckptool recover" in caught.value.fix
    assert len(seen) > 10
    with pytest.raises(Truncated):
        salvaged(data[: header - 1], tmp_path / "cut.safetensors")
    assert came_back(salvaged(data + b"more", tmp_path / "long.safetensors")) == expected


# Files that were built to exhaust their reader ------------------------------------------------------------------------


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
    "whole pickles": lambda: filled(header(b"a/data.pkl", 0)),
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
    "padding": lambda: filled(LOCAL.pack(b"PK\x03\x04", 0, 0x0808, *[0] * 6, 8, 26) + b"a/data/1FB\x16\0" + b"Z" * 22),
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
        refused(CkptoolError, tmp_path, lambda: damaged.salvage(source))
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
