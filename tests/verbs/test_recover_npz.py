"""`recover` of a damaged `.npz`: what comes back, under which names, and what is said of it. Numpy is the judge."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import Run
from tests.support.looped import looped


@looped("seed", range(12))
def test_the_whole_arrays_of_a_damaged_npz_come_back(seed: int, tmp_path: Path, run: Run) -> None:
    """Numpy is the judge of what came back; the file is cut, or a byte of one array's numbers is another."""
    rng = random.Random(seed)
    arrays = {
        f"layer.{i}": np.asarray(np.random.default_rng(seed + i).normal(size=(rng.randint(1, 5), 3)), kind)
        for i, kind in enumerate(rng.choices(["f4", "f8", "i2", "?"], k=rng.randint(2, 6)))
    }
    whole, out = tmp_path / f"{seed}.npz", tmp_path / f"back{seed}.npz"
    rng.choice([np.savez, np.savez_compressed])(whole, **arrays)
    data = bytearray(whole.read_bytes())
    with zipfile.ZipFile(whole) as archive:
        records = archive.infolist()
    gone = rng.randrange(1, len(records))  # of the first, nothing is lost
    end = records[gone + 1].header_offset if gone + 1 < len(records) else archive.start_dir
    if rng.random() < 0.5:
        data[end - 1] ^= 1
        lost = {records[gone].filename[:-4]}
    else:
        del data[end - 1 :]
        lost = {each.filename[:-4] for each in records[gone:]}
    whole.write_bytes(data)
    ran = run("recover", whole, "-o", out, "--json")
    assert ran.code == 1, ran.err
    said = json.loads(ran.out)
    assert {each["address"] for each in said["lost"]} <= lost and said["back"] == len(arrays) - len(lost)
    back = np.load(out)
    assert {name for name in back.files if isinstance(back[name], np.ndarray)} == arrays.keys() - lost
    for name in arrays.keys() - lost:
        assert back[name].dtype == arrays[name].dtype and np.array_equal(back[name], arrays[name])


NAMES = (b"alpha", b"beta", b"gamma")


@pytest.mark.parametrize("damage", [*NAMES, "in the directory", "cut before a record", "a record left out"])
def test_nothing_of_an_npz_is_under_another_name_or_missing_in_silence(damage: Any, tmp_path: Path, run: Run) -> None:
    arrays = {name.decode(): np.arange(3 * i, 5 * i) for i, name in enumerate(NAMES, 1)}
    np.savez(tmp_path / "a.npz", **arrays)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        begins = [each.header_offset for each in archive.infolist()]
    if damage == "cut before a record":
        del data[begins[2] :]
    elif damage == "a record left out":
        del data[begins[1] : begins[2]]
    else:
        data[data.rindex(NAMES[0]) if damage == "in the directory" else data.index(damage)] ^= 2
    (tmp_path / "a.npz").write_bytes(data)
    ran = run("recover", tmp_path / "a.npz", "-o", tmp_path / "b.npz")
    assert ran.code == 1 and "incomplete" in ran.out and "everything" not in ran.out
    back = np.load(tmp_path / "b.npz")
    whole = {name: back[name] for name in back.files if isinstance(back[name], np.ndarray)}
    assert len(whole) == 2
    for name, array in whole.items():
        assert np.array_equal(array, arrays[name])
    assert "recovered" in run("inspect", tmp_path / "b.npz").out


@pytest.mark.parametrize("damage", ["the end record is cut off", "the last header is broken", "and a size before it"])
def test_an_array_that_another_was_copied_over_is_lost_by_its_name(damage: str, tmp_path: Path, run: Run) -> None:
    """Only the directory knows it, whose lines are there while it cannot be read as a whole, or lies out of reach."""
    np.savez(tmp_path / "a.npz", **{f"l{i}": np.arange(12.0) + i for i in range(6)})
    data = bytearray((tmp_path / "a.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        begins = [each.header_offset for each in archive.infolist()]
    data[begins[4] : begins[5]] = data[begins[2] : begins[3]]
    lost = {"l4"}
    if damage == "the end record is cut off":
        del data[-30:]
    else:
        data[begins[5]] ^= 1
        lost.add("l5")
    if damage == "and a size before it":
        data[begins[1] + 20] ^= 1
        lost.add("l1")
    (tmp_path / "a.npz").write_bytes(data)
    ran = run("recover", tmp_path / "a.npz", "-o", tmp_path / "b.npz", "--json")
    said = json.loads(ran.out)
    assert ran.code == 1 and {each["address"] for each in said["lost"]} == lost, ran.out
    back = np.load(tmp_path / "b.npz")
    assert all(np.array_equal(back[f"l{i}"], np.arange(12.0) + i) for i in range(6) if f"l{i}" not in lost)


@pytest.mark.parametrize("damage", ["an ending in the directory", "a header, and the lines from there on"])
def test_what_is_lost_is_never_called_recovered(damage: str, tmp_path: Path, run: Run) -> None:
    """A name without `.npy` may be a damaged one; half a directory does not say how many there were."""
    np.savez(tmp_path / "a.npz", **{f"l{i}": np.arange(12.0) + i for i in range(6)})
    data = bytearray((tmp_path / "a.npz").read_bytes())
    if damage == "an ending in the directory":
        data[data.rindex(b"l4.npy") + 3] ^= 1
    else:
        with zipfile.ZipFile(tmp_path / "a.npz") as archive:
            data[archive.infolist()[4].header_offset] ^= 1
        data[data.rindex(b"PK\x01\x02", 0, data.rindex(b"l4.npy"))] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    ran = run("recover", tmp_path / "a.npz", "-o", tmp_path / "b.npz")
    assert ran.code == 1 and "incomplete" in ran.out, ran.out


def test_what_was_recovered_once_is_recovered_again(tmp_path: Path, run: Run) -> None:
    """An archive with ckptool's own record beside the arrays."""
    np.savez(tmp_path / "a.npz", **{name.decode(): np.arange(9.0) for name in NAMES})
    for number, (old, new) in enumerate((("a", "b"), ("b", "c")), 1):
        data = bytearray((tmp_path / f"{old}.npz").read_bytes())
        with zipfile.ZipFile(tmp_path / f"{old}.npz") as archive:
            first = archive.infolist()[0].header_offset
        size, more = int.from_bytes(data[first + 26 : first + 28], "little"), data[first + 28]
        data[first + 30 + size + more + 130] ^= 1  # of the numbers of the first array
        (tmp_path / f"{old}.npz").write_bytes(data)
        ran = run("recover", tmp_path / f"{old}.npz", "-o", tmp_path / f"{new}.npz")
        back = np.load(tmp_path / f"{new}.npz")
        whole = [name for name in back.files if isinstance(back[name], np.ndarray)]
        assert ran.code == 1 and "incomplete" in ran.out and len(whole) == len(NAMES) - number, ran.out
        assert all(np.array_equal(back[name], np.arange(9.0)) for name in whole)
    assert "recovered" in run("inspect", tmp_path / "c.npz").out
