"""Archives of arrays that are cut, damaged, contradict themselves or ask for much."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.errors import Ambiguous, Corrupt, LimitExceeded, Truncated
from ckptool.formats import read
from ckptool.pickles.plain import plain
from tests.support.files import written
from tests.support.npz_files import numpy_file
from tests.support.processes import is_quick


def small(folder: Path, how: str = "stored") -> bytes:
    return numpy_file(folder / "small.npz", how, a=np.arange(3.0), b=np.array(["x"])).read_bytes()


def values_of(tree: Any) -> dict[str, Any]:
    return {
        name: value.bytes() if isinstance(value, TensorEntry) else plain(value).values() for name, value in tree.items()
    }


def test_zip64_sizes_in_numpys_local_headers_must_agree(tmp_path: Path) -> None:
    """numpy puts the sizes of each record into a 64-bit field of its own header."""
    whole = bytearray(small(tmp_path))
    name, extra = struct.unpack_from("<2H", whole, 26)
    assert extra == 20 and struct.unpack_from("<2H2Q", whole, 30 + name) == (1, 16, 152, 152)
    struct.pack_into("<Q", whole, 30 + name + 4, 151)
    with pytest.raises(Corrupt, match="another size"):
        read(written(bytes(whole), tmp_path / "a.npz"))


def test_two_arrays_of_one_name_are_ambiguous(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            for number in range(2):
                buffer = io.BytesIO()
                np.save(buffer, np.array(number))
                archive.writestr("a.npy", buffer.getvalue())
    with pytest.raises(Ambiguous, match="two records"):
        read(tmp_path / "a.npz")


def test_names_that_numpy_takes_for_one(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", a=np.ones(1))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("a", b"bytes")
    with pytest.raises(Ambiguous, match="same name"):
        read(file)
    np.savez(tmp_path / "b.npz", **{"a": np.ones(1), "a.npy": np.zeros(1)})
    with pytest.raises(Ambiguous, match="same name"):
        read(tmp_path / "b.npz")


def test_arrays_beside_a_checkpoint_are_ambiguous(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", a=np.ones(1))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\0.")
    with pytest.raises(Ambiguous, match=r"beside archive/data\.pkl"):
        read(file)


def test_a_deflated_array_of_another_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.arange(1000.0))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", buffer.getvalue() + bytes(8))
    with pytest.raises(Ambiguous, match="after the end of the array"):
        read(file)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", buffer.getvalue()[:-8])
    with pytest.raises(Truncated):
        read(file)


def object_array(body: bytes) -> bytes:
    """A file of numpy with an array of objects whose pickle is `body`."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([None], dtype=object))
    whole = buffer.getvalue()
    return whole[: whole.index(b"\n") + 1] + body


@pytest.mark.parametrize("kind", ["one large pickle", "many pickles", "many headers", "many texts"])
def test_small_files_that_ask_for_much_are_refused_within_the_budget(kind: str, tmp_path: Path) -> None:
    body = object_array(b"\x80\x02]" + b"(" + b"N" * (1 << 20) + b"e.")
    numbers = io.BytesIO()
    np.save(numbers, np.zeros(9))
    texts = io.BytesIO()
    np.save(texts, np.array(["" * 1000] * 15, "U1000"))
    contents = {
        "one large pickle": [object_array(b"\x80\x02" + b"N0" * (1 << 26) + b"N.")],
        "many pickles": [body] * 200,
        "many headers": [numbers.getvalue()] * 3_000,
        "many texts": [texts.getvalue()] * 3_000,
    }[kind]
    file = tmp_path / "a.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, content in enumerate(contents):
            archive.writestr(f"{number}.npy", content)
    assert file.stat().st_size <= 1 << 20

    def work() -> None:
        if "pickle" in kind:
            with pytest.raises(LimitExceeded):
                read(file)
        else:
            assert len(read(file).tree) == 3_000

    assert is_quick(work, 1.5)


def test_a_storage_that_stands_for_much_is_not_loaded(tmp_path: Path) -> None:
    """Fifty zeros of a deflated gigabyte are fifty zeros."""
    file = numpy_file(tmp_path / "a.npz", "deflated", a=np.zeros(1 << 24))
    assert file.stat().st_size < 1 << 18
    entry = read(file).tree["a"]
    assert ckptool.show(file, at="a", slice=":3").values.tolist() == [0, 0, 0] and entry.nbytes == 1 << 27
