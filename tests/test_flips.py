"""Every byte of a small file changed, and every length of it: an error of ours or the right values, and no other
exception.

A zip carries checksums, so that no value may come out wrong. A safetensors file carries none: what is changed in its
data is seen in that tensor and nowhere else, and a changed header means what the stock library takes it to mean.
"""

import io
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.tree import tensors
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import read
from ckptool.verbs.convert import convert
from fixtures.torch_tar import tar_bytes, tar_members
from tests.support.files import torch_bytes, written
from tests.support.same import assert_same_tree
from tests.support.zips import Layout, honest

TREE = {"w": torch.arange(3.0), "b": torch.tensor([1, -2], dtype=torch.int16), "n": 3}
STATE = {name: value for name, value in TREE.items() if isinstance(value, torch.Tensor)}


def zips() -> dict[str, bytes]:
    layout = honest()
    return {
        "torch": torch_bytes(TREE),
        "python": layout.build(),
        "deflated": _all(layout, method=8).build(),
        "streamed": _all(layout, descriptor="bare").build(),
    }


def _all(layout: Layout, **changes: Any) -> Layout:
    return replace(layout, entries=tuple(replace(entry, **changes) for entry in layout.entries))


ZIPS = zips()


def seeded(length: int, each: int) -> Iterable[tuple[int, int]]:
    """Every place, with some of the 255 ways to change a byte."""
    chosen = random.Random(length)
    for place in range(length):
        for mask in chosen.sample(range(1, 256), each):
            yield place, mask


def bits(length: int) -> Iterable[tuple[int, int]]:
    return ((place, 1 << bit) for place in range(length) for bit in range(8))


each_bit = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.soak)])


def changes(data: bytes, each: int, whole: bool) -> Iterable[tuple[int, int]]:
    """So many of each place; where it is whole, every bit of it too."""
    return [*seeded(len(data), 6 if whole else each), *(bits(len(data)) if whole else ())]


def sweep(
    data: bytes, masks: Iterable[tuple[int, int]], path: Path, check: Callable[[Path, int], None]
) -> tuple[int, int]:
    """How many of the changed files were refused, and how many were read. `check` looks at every one that is not
    refused."""
    refused = passed = 0
    with path.open("wb") as file:
        file.write(data)
        for place, mask in masks:
            file.seek(place)
            file.write(bytes([data[place] ^ mask]))
            file.flush()
            try:
                check(path, place)
                passed += 1
            except CkptoolError:
                refused += 1
            file.seek(place)
            file.write(data[place : place + 1])
    return refused, passed


def same_as(expected: Checkpoint) -> Callable[[Path, int], None]:
    """Reads every tensor as a user does, so that checksums are looked at, and compares the trees as well."""

    def check(path: Path, place: int) -> None:
        found = read(path)
        taken = [entry.bytes() for _, entry in tensors(found.tree) if isinstance(entry, TensorEntry)]
        assert taken == [entry.bytes() for _, entry in tensors(expected.tree) if isinstance(entry, TensorEntry)], place
        assert_same_tree(expected, found)

    return check


@each_bit
@pytest.mark.parametrize("name", ZIPS)
def test_any_byte_of_a_zip_changed(name: str, whole: bool, tmp_path: Path) -> None:
    data = ZIPS[name]
    check = same_as(read(written(data, tmp_path / "right.pt")))
    refused, passed = sweep(data, changes(data, 2 if name == "torch" else 1, whole), tmp_path / "a.pt", check)
    assert refused > passed > 0  # what is read has changed in a date, in padding, or in a hint


def test_any_changed_byte_of_data_stops_a_conversion(tmp_path: Path) -> None:
    data = torch_bytes(STATE)
    right = written(data, tmp_path / "right.pt")
    expected = {name: entry.bytes() for name, entry in read(right).tree.items()}
    out = tmp_path / "out.safetensors"

    def check(path: Path, place: int) -> None:
        convert(path, out, overwrite=True)
        assert {name: entry.bytes() for name, entry in read(out).tree.items()} == expected, place

    chosen = random.Random(7)
    places = [(place, 1 << chosen.randrange(8)) for place in sorted(chosen.sample(range(len(data)), 120))]
    start = data.index(bytes(STATE["w"].numpy()))
    refused, passed = sweep(data, [*places, *((start + n, 1) for n in range(12))], tmp_path / "a.pt", check)
    assert refused >= 12 and passed


# safetensors ----------------------------------------------------------------------------------------------------------


def plain_file(path: Path) -> Path:
    from safetensors.torch import save_file

    save_file(STATE, path, {"format": "pt"})
    return path


def whole_tree_file(folder: Path) -> Path:
    out = folder / "whole.safetensors"
    convert(written(torch_bytes(TREE), folder / "whole.pt"), out, all=True)
    return out


def as_stock_reads(data: bytes) -> Callable[[Path, int], None]:
    begin = 8 + int.from_bytes(data[:8], "little")

    def check(path: Path, place: int) -> None:
        found = read(path).tree
        with safe_open(path, "pt") as stock:
            names = stock.keys()
            assert place < begin or sorted(names) == sorted(STATE)
            for name in names:
                tensor = stock.get_tensor(name)
                raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
                assert (found[name].bytes(), found[name].shape) == (raw, tuple(tensor.shape)), place

    return check


@each_bit
def test_any_byte_of_a_safetensors_file_changed(whole: bool, tmp_path: Path) -> None:
    data = plain_file(tmp_path / "right.safetensors").read_bytes()
    refused, passed = sweep(data, changes(data, 6, whole), tmp_path / "a.safetensors", as_stock_reads(data))
    assert refused > passed > 0


def test_any_byte_of_the_data_changed_is_seen_there_and_nowhere_else(tmp_path: Path) -> None:
    path = plain_file(tmp_path / "right.safetensors")
    data, right = path.read_bytes(), {name: entry.bytes() for name, entry in read(path).tree.items()}
    begin = 8 + int.from_bytes(data[:8], "little")

    def check(path: Path, place: int) -> None:
        found = {name: entry.bytes() for name, entry in read(path).tree.items()}
        different = [(a, b) for name in right for a, b in zip(right[name], found[name], strict=True) if a != b]
        assert len(different) == (place >= begin), place

    places = [(place, mask) for place, mask in bits(len(data)) if place >= begin]
    assert sweep(data, places, tmp_path / "a.safetensors", check) == (0, 8 * (len(data) - begin))


def readable(path: Path, place: int) -> None:
    """Whatever it is now: reading it, and all of its values, raises nothing but errors of ours."""
    for _, entry in tensors(read(path).tree):
        if isinstance(entry, TensorEntry):
            entry.bytes()


@each_bit
def test_any_byte_of_a_whole_tree_in_safetensors_changed(whole: bool, tmp_path: Path) -> None:
    data = whole_tree_file(tmp_path).read_bytes()
    refused, _ = sweep(data, changes(data, 1, whole), tmp_path / "a.safetensors", readable)
    assert refused > len(data) // 2


@pytest.mark.parametrize("kind", ["plain", "whole tree", *ZIPS])
def test_any_length_of_a_file(kind: str, tmp_path: Path) -> None:
    path = written(ZIPS[kind], tmp_path / "a.pt") if kind in ZIPS else whole_tree_file(tmp_path)
    path = plain_file(tmp_path / "right.safetensors") if kind == "plain" else path
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(CkptoolError) as caught:
            read(path)
        assert kind not in ZIPS or type(caught.value) is (NotACheckpoint if 0 < size < 4 else Truncated), size


# Other containers, which have no checksums or few ---------------------------------------------------------------------


def saved_by(save: Callable[..., object], *values: Any, **named: Any) -> bytes:
    save(buffer := io.BytesIO(), *values, **named)
    return buffer.getvalue()


def script() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3, bias=False)), buffer)
    return buffer.getvalue()


def arrays(save: Callable[..., object]) -> bytes:
    return saved_by(save, a=np.arange(3.0), b=np.array(["x"]))


TAR = tar_bytes(tar_members(STATE), pax=False)
# The file, and from which length on it is cut off and nothing else.
OTHERS: dict[str, tuple[bytes, int]] = {
    "npy": (saved_by(np.save, np.arange(6.0)), 10),
    "npz": (arrays(np.savez), 60),
    "npz, deflated": (arrays(np.savez_compressed), 60),
    "legacy": (torch_bytes(TREE, _use_new_zipfile_serialization=False), 41),
    "tar": (TAR[: -(-len(TAR.rstrip(b"\0")) // 512) * 512 + 1024], 512),
    "script": (script(), 4),
    **{
        f"pickle of protocol {protocol}": (
            pickle.dumps({"m": {"a.w": np.arange(3), "t": torch.ones(2)}}, protocol),
            9 if protocol > 1 else 513,
        )
        for protocol in range(6)
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_any_byte_of_other_files_changed(name: str, tmp_path: Path) -> None:
    data, _ = OTHERS[name]
    check: Callable[[Path, int], None] = readable
    if name.startswith("npz"):  # whose values have checksums
        check = same_as(read(written(data, tmp_path / "right.npz")))
    step = max(1, len(data) // 350)
    refused, passed = sweep(data, [*seeded(len(data), 1)][::step], tmp_path / "a.bin", check)
    assert refused and passed


@pytest.mark.parametrize("name", OTHERS)
def test_any_length_of_other_files(name: str, tmp_path: Path) -> None:
    data, cut_off = OTHERS[name]
    whole = data.rstrip(b"\0") if name == "tar" else data  # blocks of zeros end it
    for size in range(1, len(whole), max(1, len(whole) // 250)):
        with pytest.raises((Truncated, Corrupt, NotACheckpoint, Unsupported, Ambiguous)) as caught:
            read(written(data[:size], tmp_path / "a.bin"))
        assert size < cut_off or isinstance(caught.value, (Truncated, Corrupt)), (size, caught.value)
