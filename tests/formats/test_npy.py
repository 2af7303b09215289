"""`npy`: one array as numpy writes it, in every version of its header, and headers that numpy never writes."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.numpy_arrays import array, array_entry
from ckptool.errors import Ambiguous, BadTensor, CkptoolError, Corrupt, LimitExceeded, Truncated, Unsupported
from ckptool.formats import npy, read
from ckptool.pickles.plain import plain
from tests.support.files import written
from tests.support.looped import looped

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def npy_file(value: Any, path: Path, **options: Any) -> Path:
    np.save(path, value, **options)
    return path


def raw(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


def header(text: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """A file with a header of our own making."""
    body = text.encode("utf-8" if version[0] == 3 else "latin-1")
    size = struct.pack("<H" if version[0] == 1 else "<I", len(body))
    return npy.MAGIC + bytes(version) + size + body + data


def tree_of(data: bytes, folder: Path) -> Any:
    return read(written(data, folder / "a.npy")).tree


# What numpy writes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("code", NUMBERS)
def test_numbers_bit_for_bit(code: str, order: str, tmp_path: Path) -> None:
    given = np.arange(24, dtype="f8").reshape(2, 3, 4).astype(np.dtype(code).newbyteorder(order))
    checkpoint = read(npy_file(given, tmp_path / "a.npy"))
    entry = checkpoint.tree
    assert checkpoint.container == "npy" and checkpoint.tensors_only and isinstance(entry, TensorEntry)
    found = entry.numpy()
    native = given.astype(given.dtype.newbyteorder("="))
    assert found.dtype == native.dtype and found.shape == native.shape
    assert found.tobytes() == native.tobytes() == entry.bytes()


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800001, 0xFF800000], dtype="u4")
    for given in (bits.view("<f4"), bits.byteswap().view(">f4")):
        assert read(npy_file(given, tmp_path / "a.npy")).tree.bytes() == bits.tobytes()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_header(version: tuple[int, int], tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy says that older readers know no version 2
        np.lib.format.write_array(buffer, np.arange(5), version=version)
    assert tree_of(buffer.getvalue(), tmp_path).numpy().tolist() == [0, 1, 2, 3, 4]


# What is no tensor ---------------------------------------------------------------------------------------------------

OTHERS = {
    "texts": np.array(["ab", "cde", ""]),
    "big-endian texts": np.array(["ab", "cde"]).astype(">U3"),
    "bytes": np.array([b"ab", b"c"]),
    "dates": np.array(["2020-01-01", "1969-12-31"], "M8[D]"),
    "durations": np.array([1, -2], "m8[3s]"),
    "raw": np.array([b"\1\2", b"\3\4"]).view("V2"),
    "records": np.array([(1.5, "ab"), (2.5, "c")], [("x", "<f4"), ("y", "U2")]),
    "records in records": np.zeros(2, [("a", [("b", "i2"), ("c", "U1")]), ("d", ">f8")]),
    "aligned records": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "fortran texts": np.asfortranarray(np.array([["a", "bc"], ["d", "e"]])),
    "no texts": np.empty((0, 2), "U4"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_arrays_are_what_a_pickle_has_for_them(kind: str, tmp_path: Path) -> None:
    given = OTHERS[kind]
    checkpoint = read(npy_file(given, tmp_path / "a.npy"))
    node = checkpoint.tree
    assert isinstance(node, Object) and array_entry(node) is None and plain(node) == array(node)
    ckptool.save(checkpoint, tmp_path / "b.pt")
    loaded = ckptool.load(tmp_path / "b.pt")
    assert loaded.dtype == given.dtype
    assert loaded.shape == given.shape and loaded.tolist() == given.tolist()
    import torch

    again = torch.load(tmp_path / "b.pt", weights_only=False)  # a file of our own
    assert again.tolist() == given.tolist() and again.flags.f_contiguous == given.flags.f_contiguous


def random_dtype(random: Random, depth: int = 0) -> Any:
    """A type of numbers, texts or dates, or records of such, or of arrays of such."""
    if depth == 3 or random.random() < 0.4:
        return random.choice(["f4", ">f8", "i2", "?", "U3", "S2", "V4", "M8[s]", "c8"])
    shapes = [(), (), (), (2,), (2, 3), (0,)]
    return [(f"f{n}", random_dtype(random, depth + 1), random.choice(shapes)) for n in range(random.randint(1, 3))]


def test_of_what_numpy_writes_nothing_is_said_to_be_none_of_its_own(tmp_path: Path) -> None:
    for seed in range(300):
        kind = np.dtype(random_dtype(random := Random(seed)), align=random.random() < 0.3)
        file = npy_file(np.zeros(2, kind), tmp_path / "a.npy")
        try:
            assert read(file).container == "npy"
        except Unsupported as error:
            assert "a numpy type of nested arrays" in str(error), kind


def test_an_array_of_objects_is_refused_and_nothing_is_called(tmp_path: Path) -> None:
    class Marker:
        def __reduce__(self) -> Any:
            return print, ("it ran",)

    with pytest.raises(Unsupported, match="Python objects"):
        read(npy_file(np.array([{"a": 1}, Marker()], dtype=object), tmp_path / "a.npy"))


# Hostile -------------------------------------------------------------------------------------------------------------


DESCRS = """'<f16' '<c32' 'f3' '>' '' '|O8' '<M8[xx]' '<U999999999999' 'V' 'float32' 'numpy.float32' 7 None {} ()
[('a','<f4',(2,))] [(('title','a'),'<f4')] [('a','<f4'),('a','<f4')] [['a','<f4']] [(1,'<f4')]""".split()


@looped("descr", [*DESCRS, "'" + "<f4," * 1000 + "'", "[('a', " * 14 + "'<f4'" + ")]" * 14])
def test_dtypes_that_are_not_read_are_refused_by_name(descr: str, tmp_path: Path) -> None:
    data = header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}\n", bytes(8))
    with pytest.raises((Unsupported, Ambiguous, Corrupt, LimitExceeded, Truncated)) as caught:
        tree_of(data, tmp_path)
    assert caught.value.what.startswith(str(tmp_path)) and len(caught.value.what) < 400


def said(shape: str, descr: str = "'<f4'", fortran: object = False, more: str = "") -> str:
    return f"{{'descr': {descr}, {more}'fortran_order': {fortran}, 'shape': {shape}}}"


HEADERS: dict[type[CkptoolError], list[str]] = {
    BadTensor: [said(shape) for shape in ("(-1,)", "[1]", "(True,)", "(1)", "(1.0,)", "(" + "1," * 65 + ")")]
    + [said("(99999999999999999999,)"), said(f"(0, {1 << 61})")],  # numpy counts a dimension of 0 as one of 1
    Truncated: [said("(9999999999999,)"), said("(2,)")],
    Corrupt: [
        *("", "{", "{'descr': '<f4'}", said("(1,)", more="'more': 1, "), said("(1,)", more="'descr': '<f8', ")),
        *(said("(1,)", fortran=0), said("(" + "9" * 5000 + ",)"), said("()") + " 1", said("(1,), **{}")),
        *("__import__('os').system('true')", said("(1,)", r"'\x3cf4'"), "(" * 60_000, "-" * 60_000 + "1"),
        *("1" + "+1" * 30_000, "[" * 20 + "]" * 20, "{'\x1b[31m': 1}", "\x1b[31m", said("(1,)") + "\xa0"),
    ],
}


@looped(("text", "error"), [(text, error) for error, texts in HEADERS.items() for text in texts])
def test_headers_that_numpy_never_writes(text: str, error: type[CkptoolError], tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        tree_of(header(text + "\n", bytes(4)), tmp_path)
    assert caught.value.code == error.code and "\x1b" not in str(caught.value)


def test_a_right_magic_with_a_wrong_sequel_is_refused(tmp_path: Path) -> None:
    for data, error in (
        (npy.MAGIC, Truncated),
        (npy.MAGIC + b"\1", Truncated),
        (npy.MAGIC + b"\4\0" + bytes(20), Unsupported),
        (npy.MAGIC + b"\1\0\xff\xff" + bytes(20), Truncated),
        (npy.MAGIC + b"\2\0\xff\xff\xff\xff" + bytes(20), LimitExceeded),
        (npy.MAGIC + b"\1\0\x04\0" + bytes(20), Corrupt),
        (npy.MAGIC + b"\3\0\x04\0\0\0" + b"\xff\xfe\xfd\xfc", Corrupt),
    ):
        with pytest.raises(error):
            tree_of(data, tmp_path)


def test_several_arrays_in_one_file_are_not_the_first_alone(tmp_path: Path) -> None:
    with pytest.raises(Ambiguous, match="bytes after the end of the array") as caught:
        tree_of(raw(np.arange(3)) + raw(np.arange(4)), tmp_path)
    assert "several arrays" in caught.value.why
    with pytest.raises(Ambiguous) as caught:
        tree_of(raw(np.arange(3)) + b"x", tmp_path)
    assert caught.value.why == "They belong to no array."
