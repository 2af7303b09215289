"""Large pickles take little memory: their arrays stay in the file."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.support.memory import LIMIT, peak_of
from tests.support.pickle_files import pickle_to

_ARRAY = (  # the opcodes before and behind the data of an array of f4, without a memo
    (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        b"(K\x01J%b\x85cnumpy\ndtype\nX\x02\0\0\0f4\x89\x88\x87R"
        b"(K\x03X\x01\0\0\0<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89B%b"
    ),
    b"tb",
)


def sparse_pickle(path: Path, size: int, count: int) -> Path:
    """A pickle of `count` arrays of zeros, together of `size` bytes, that are holes in the file."""
    numel = size // count // 4
    with path.open("wb") as file:
        file.write(b"\x80\x03}(X\x05\0\0\0model}(")
        for number in range(count):
            name = f"layer{number}.weight".encode()
            file.write(b"X" + struct.pack("<I", len(name)) + name)
            file.write(_ARRAY[0] % (struct.pack("<i", numel), struct.pack("<I", 4 * numel)))
            file.seek(4 * numel, 1)
            file.write(_ARRAY[1])
        file.write(b"uu.")
    return path


@pytest.mark.parametrize("nbytes", [200_000_000, pytest.param(2_000_000_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("verb", ["inspect", "convert to safetensors", "convert to npz", "diff"])
def test_a_large_pickle_takes_little_memory(verb: str, nbytes: int, tmp_path: Path) -> None:
    file = sparse_pickle(tmp_path / "a.pkl", nbytes, 20)
    found = peak_of(
        {
            "inspect": f"ckptool.inspect({str(file)!r})",
            "convert to safetensors": f"ckptool.convert({str(file)!r}, {str(tmp_path / 'a.safetensors')!r})",
            "convert to npz": f"ckptool.convert({str(file)!r}, {str(tmp_path / 'a.npz')!r})",
            "diff": f"assert ckptool.diff({str(file)!r}, {str(file)!r}).same",
        }[verb],
        tmp_path,
    )
    assert found <= LIMIT, f"{found:,}"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_of_20_mb_take_little_memory(protocol: int, tmp_path: Path) -> None:
    given = {"model": {f"{n}.w": np.full(1_250_000, n, "f4") for n in range(4)}}
    file = pickle_to(given, tmp_path / "a.pkl", protocol)
    assert peak_of(f"ckptool.inspect({str(file)!r})", tmp_path) <= LIMIT
    assert peak_of(f"ckptool.convert({str(file)!r}, {str(tmp_path / 'a.npz')!r})", tmp_path) <= LIMIT
    with np.load(tmp_path / "a.npz") as again:
        assert all(np.array_equal(again[f"{n}.w"], given["model"][f"{n}.w"]) for n in range(4))


@pytest.mark.soak
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_of_300_mb_take_little_memory(protocol: int, tmp_path: Path) -> None:
    given = {"model": {f"{n}.w": np.zeros(25_000_000, "f4") for n in range(3)}}
    file = pickle_to(given, tmp_path / "a.pkl", protocol)
    assert peak_of(f"ckptool.inspect({str(file)!r})", tmp_path) <= LIMIT
    assert peak_of(f"ckptool.convert({str(file)!r}, {str(tmp_path / 'a.npz')!r})", tmp_path) <= LIMIT
