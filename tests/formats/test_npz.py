"""`npz`: what numpy writes is read, what is written numpy reads, and what numpy cannot say is refused by name."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.numpy_arrays import LongValue, array, array_entry
from ckptool.errors import (
    Ambiguous,
    BadTensor,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    Truncated,
    UnsafeObject,
    Unsupported,
    UsageError,
)
from ckptool.formats import npy, npz, read
from ckptool.formats.npy import ALIGNMENT, spelled
from ckptool.pickles.plain import plain
from fixtures.traps import TRAPS
from tests.formats import contract
from tests.support.errors import refused
from tests.support.files import carry_out, saved, weights, written
from tests.support.looped import looped
from tests.support.processes import is_quick
from tests.support.zip_mutants import around, lie
from tests.support.zips import (
    SAVERS,
    Entry,
    Layout,
    any_layout,
    each_saver,
    numpy_file,
    numpy_sees,
    records_of,
    same_bits,
    sample_arrays,
)

# Reading -------------------------------------------------------------------------------------------------------------


@each_saver
def test_every_tensor_has_the_checksum_of_its_own_bytes(how: str, tmp_path: Path) -> None:
    for entry in read(numpy_file(tmp_path / "a.npz", how, **sample_arrays())).tree.values():
        storage = entry.storage
        if storage.crc is None:  # turned: what it is made of has one
            (storage,) = storage.data.inputs
        assert storage.crc == zlib.crc32(storage.data.read(0, storage.nbytes))


def test_positional_arrays_and_nothing_at_all(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(3), np.arange(4))
    assert list(read(tmp_path / "a.npz").tree) == ["arr_0", "arr_1"]
    np.savez(tmp_path / "b.npz")
    assert read(tmp_path / "b.npz").tree == {}
    assert "no tensors" in str(ckptool.inspect(tmp_path / "b.npz"))


@each_saver
def test_other_arrays_are_listed_never_dropped(how: str, tmp_path: Path) -> None:
    others = {
        "labels": np.array(["cat", "dog"]),
        "when": np.array(["2020-01-01"], "M8[D]"),
        "rows": np.zeros(2, [("a", "<f4")]),
        "many": np.array(["x" * 100] * 1000),
    }
    file = numpy_file(tmp_path / "a.npz", how, w=np.ones(3), **others)
    checkpoint = read(file)
    assert [type(value) for value in checkpoint.tree.values()] == [TensorEntry, *[Object] * 4]
    assert str(plain(checkpoint.tree["labels"])) == "<numpy array U3[2]>"
    assert plain(checkpoint.tree["labels"]).values() == ["cat", "dog"]
    assert isinstance(plain(checkpoint.tree["many"]).data, LongValue)
    (note,) = checkpoint.notes
    assert note.code == "other-arrays" and "labels (numpy array U3[2])" in note.message
    assert ckptool.diff(file, numpy_file(tmp_path / "b.npz", "stored", w=np.ones(3), **others)).same
    changed = ckptool.diff(
        file, numpy_file(tmp_path / "c.npz", "stored", w=np.ones(3), **others | {"labels": np.array(["cat", "dot"])})
    )
    assert not changed.same and changed.equal == 1
    ckptool.convert(file, tmp_path / "a.pt")
    again = torch.load(tmp_path / "a.pt", weights_only=False)  # a file of our own
    assert all(again[name].tolist() == given.tolist() for name, given in others.items())
    assert all(again[name].dtype == given.dtype for name, given in others.items())


def test_arrays_of_objects_are_left_out_noted_and_may_run_anything(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", w=np.ones(3), options=np.array({"lr": 0.1}, dtype=object))
    checkpoint = read(file)
    assert list(checkpoint.tree) == ["w", "options"] and "not read: options" in checkpoint.notes[0].message
    before = file.read_bytes()
    with pytest.raises(Unsupported, match="cannot hold options"):  # which would be lost
        ckptool.edit(file, set={"w2": 1}, in_place=True)
    assert file.read_bytes() == before
    other = numpy_file(tmp_path / "b.npz", "stored", w=np.ones(3), options=np.array({"lr": 0.2}, dtype=object))
    assert ckptool.diff(file, file).same and not ckptool.diff(file, other).same
    assert [call.name for call in ckptool.scan(file).files[0].calls] == ["numpy.load"]
    refused(UnsafeObject, tmp_path, lambda: ckptool.convert(file, tmp_path / "a.pt"), r"numpy\.load")
    ckptool.convert(file, tmp_path / "a.safetensors")
    assert list(read(tmp_path / "a.safetensors").tree) == ["w"]
    (way,) = [command for each in ckptool.doctor(file).findings for command in each.commands]
    assert "--weights-only" in way  # which leaves out the call, so that it runs as it stands


def test_a_record_that_is_no_array_is_refused_by_name(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", w=np.ones(2))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("readme.txt", "hello, this is no array")
    refused(Corrupt, tmp_path, lambda: read(file), r"readme\.txt: no numpy array")


def test_readers_agree_about_mutated_archives_with_arrays(tmp_path: Path) -> None:
    """What torch zips are tested by, with numpy as the judge: whatever is read, numpy reads alike."""
    file, seen = tmp_path / "mutant.npz", 0
    benign = [
        numpy_file(tmp_path / f"{how}.npz", how, a=np.arange(3.0), b=np.ones(4, "i4")).read_bytes() for how in SAVERS
    ]
    for seed in range(500):
        rng = random.Random(seed)
        data = mutated(rng.choice(benign), rng)
        try:
            checkpoint = read(written(data, file))
            found = {n: part.bytes() if isinstance(part, TensorEntry) else part for n, part in checkpoint.tree.items()}
        except CkptoolError:
            continue
        if checkpoint.container == "npz":
            seen += 1
            expected = {n: part if isinstance(part, bytes) else part.tobytes() for n, part in numpy_sees(file).items()}
            assert found == expected, seed
    assert seen > 30


def mutated(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        method = rng.choice([0, 8])
        entries = tuple(Entry(name.encode(), content, method) for name, content in records_of(data).items())
        data = any_layout(rng, Layout(entries)).build()
    data = around(data, rng) if rng.random() < 0.3 else data
    for _ in range(rng.choice([0, 0, 1, 2])):
        data = lie(data, rng)
    return data


# Writing -------------------------------------------------------------------------------------------------------------


@looped("name", TRAPS, here=1 / 3)
def test_every_trap_is_written_bit_for_bit_or_refused_by_name(name: str, tmp_path: Path) -> None:
    checkpoint = read(contract.vector(name, tmp_path))
    error = contract.refusal(lambda: npz.write(checkpoint))
    if error is not None:
        assert error.code == "unsupported"
        return
    out = carry_out(npz.write(checkpoint), tmp_path / "a.npz")
    again = contract.round_trip(npz, read(out), tmp_path / "b.npz")
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    for name, entry in checkpoint.tree.items() if isinstance(checkpoint.tree, dict) else ():
        if isinstance(entry, TensorEntry):
            header, *_ = spelled(entry) or (bytes(ALIGNMENT),)
            assert len(header) % ALIGNMENT == 0, name
    for key, expected in numpy_sees(out).items():
        entry = again.tree[key]
        assert same_bits(entry.numpy(), expected) and same_bits(checkpoint.tree[key].numpy(), expected), key


def test_the_same_tree_is_the_same_bytes_and_numpys_words(tmp_path: Path) -> None:
    ckptool.save({"w": np.ones(3, "<f4"), "b": np.ones(3, "u1")}, tmp_path / "w.npz")
    assert all(word in (tmp_path / "w.npz").read_bytes() for word in (b"'descr': '<f4'", b"'descr': '|u1'"))
    ckptool.save(sample_arrays(), tmp_path / "a.npz")
    ckptool.save(sample_arrays(), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"a": torch.ones(2, dtype=torch.bfloat16)}, "a (type bf16)"),
        ({"a": torch.ones(2, dtype=torch.float8_e5m2)}, "a (type f8_e5m2)"),
        ({1: torch.ones(2)}, "1 (an int as a name)"),
        ({"a.npy": torch.ones(2)}, "a.npy (a name that ends with .npy)"),
        ({"a\0b": torch.ones(2)}, r"a\x00b (a name that is not Unicode text)"),
        ({"a\ud800": torch.ones(2)}, r"a\ud800 (a name that is not Unicode text)"),
        ({"a" * 70_000: torch.ones(2)}, "a name that is too long"),
        ({"a": 3}, "a (3, not a tensor"),
        ({"a": torch.ones(2).to_sparse()}, "a (sparse coo tensor)"),
        ([torch.ones(2)], "a dictionary of arrays"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tree: Any, named: str, tmp_path: Path) -> None:
    checkpoint = read(saved(tree, tmp_path / "a.pt"))
    error = refused(Unsupported, tmp_path, lambda: npz.write(checkpoint))
    assert named in error.what and error.fix


def test_damage_to_the_input_is_noticed_while_it_is_written(tmp_path: Path) -> None:
    file = saved({"w": torch.arange(100_000.0), "v": torch.arange(10.0).reshape(2, 5).t()}, tmp_path / "a.pt")
    checkpoint = read(file)
    place = checkpoint.tree["w"].storage.data.offset
    for damaged in (place + 5, checkpoint.tree["v"].storage.data.offset + 1):
        data = bytearray(file.read_bytes())
        data[damaged] ^= 1
        copy = written(bytes(data), tmp_path / "b.pt")
        with pytest.raises(Corrupt, match="checksum"):
            ckptool.convert(copy, tmp_path / "out.npz")
        assert not (tmp_path / "out.npz").exists()


# Converting ----------------------------------------------------------------------------------------------------------


def test_all_is_for_safetensors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="all=True writes safetensors, not npz"):
        ckptool.convert(saved(weights("a.weight"), tmp_path / "a.pt"), tmp_path / "a.npz", all=True)


# Archives that contradict themselves or ask for much ------------------------------------------------------------------


def small(folder: Path, how: str = "stored") -> bytes:
    return numpy_file(folder / "small.npz", how, a=np.arange(3.0), b=np.array(["x"])).read_bytes()


def test_names_that_numpy_takes_for_one(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", a=np.ones(1))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("a", b"bytes")
    refused(Ambiguous, tmp_path, lambda: read(file), "has the records")
    np.savez(tmp_path / "b.npz", **{"a": np.ones(1), "a.npy": np.zeros(1)})
    refused(Ambiguous, tmp_path, lambda: read(tmp_path / "b.npz"), "has the records")


def test_arrays_beside_a_checkpoint_are_ambiguous(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", a=np.ones(1))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\0.")
    refused(Ambiguous, tmp_path, lambda: read(file), r"beside archive/data\.pkl")


@pytest.mark.parametrize("kind", ["many headers", "many texts"])
def test_small_files_that_ask_for_much_are_read_within_the_budget(kind: str, tmp_path: Path) -> None:
    numbers = io.BytesIO()
    np.save(numbers, np.zeros(9))
    texts = io.BytesIO()
    np.save(texts, np.array(["" * 1000] * 15, "U1000"))
    contents = {"many headers": [numbers.getvalue()] * 3_000, "many texts": [texts.getvalue()] * 3_000}[kind]
    file = tmp_path / "a.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, content in enumerate(contents):
            archive.writestr(f"{number}.npy", content)
    assert file.stat().st_size <= 1 << 20

    def work() -> None:
        assert len(read(file).tree) == 3_000

    assert is_quick(work, 1.5)


def test_a_storage_that_stands_for_much_is_not_loaded(tmp_path: Path) -> None:
    """Fifty zeros of a deflated gigabyte are fifty zeros."""
    file = numpy_file(tmp_path / "a.npz", "deflated", a=np.zeros(1 << 24))
    assert file.stat().st_size < 1 << 18
    entry = read(file).tree["a"]
    assert ckptool.show(file, at="a", slice=":3").values.tolist() == [0, 0, 0] and entry.nbytes == 1 << 27


# One array ------------------------------------------------------------------------------------------------------------
# `npy`: one array as numpy writes it, in every version of its header, and headers that numpy never writes.


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
    for rest in (raw(np.arange(4)), b"x"):
        with pytest.raises(Ambiguous, match=r"bytes? after the end of the array"):
            tree_of(raw(np.arange(3)) + rest, tmp_path)
