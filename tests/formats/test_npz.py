"""`npz`: what numpy writes is read, what is written numpy reads, and what numpy cannot say is refused by name."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import ckptool
from ckptool.checkpoint import Checkpoint, FileRange, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import DTYPES, by_name
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.numpy_arrays import LazyBytes
from ckptool.errors import Ambiguous, CkptoolError, Conflict, Corrupt, LimitExceeded, Truncated, Unsupported, UsageError
from ckptool.formats import npz, read
from ckptool.formats.checksums import crc_combine, crc_of_rest
from ckptool.pickles.plain import plain
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.formats import contract
from tests.support.files import carry_out, load, saved, weights, written
from tests.support.processes import quickest
from tests.support.zip_mutants import OF_PIECES, apart, around, lie

SAVERS = {"stored": np.savez, "deflated": np.savez_compressed}
each = pytest.mark.parametrize("how", SAVERS)


def arrays() -> dict[str, Any]:
    return {
        "w": np.arange(12, dtype="f4").reshape(3, 4),
        "W": np.ones((2, 3), ">f8"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.float32(3),
        "empty": np.zeros((0, 3)),
        "truths": np.array([True, False]),
        "complex": np.array([1 + 2j], "c8"),
        "layer/0/kernel": np.arange(5, dtype="u2"),
        "ключ": np.arange(3, dtype="i8"),
        "large": np.arange(100_000, dtype="i8"),
    }


def numpy_file(path: Path, how: str = "stored", **contents: Any) -> Path:
    SAVERS[how](path, **contents)
    return path


def stock(path: Path, **options: Any) -> dict[str, Any]:
    """What numpy itself loads; a warning is an error."""
    with np.load(path, **options) as opened:
        return {name: opened[name] for name in opened.files}


def same(found: Any, expected: Any) -> bool:
    expected = np.asarray(expected)
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.dtype == native.dtype and found.shape == native.shape and found.tobytes() == native.tobytes()


# Reading -------------------------------------------------------------------------------------------------------------


@each
def test_what_numpy_writes(how: str, tmp_path: Path) -> None:
    checkpoint = read(numpy_file(tmp_path / "a.npz", how, **arrays()))
    assert (checkpoint.container, checkpoint.tensors_only, checkpoint.notes) == ("npz", True, ())
    assert list(checkpoint.tree) == list(arrays())
    for name, given in arrays().items():
        assert same(checkpoint.tree[name].numpy(), given), name
        assert isinstance(checkpoint.tree[name].storage.data, FileRange) == (how == "stored" and name != "W")
    assert checkpoint.tree["fortran"].stride == (1, 2)


@each
def test_every_tensor_has_the_checksum_of_its_own_bytes(how: str, tmp_path: Path) -> None:
    for entry in read(numpy_file(tmp_path / "a.npz", how, **arrays())).tree.values():
        storage = entry.storage
        if storage.crc is None:  # turned: what it is made of has one
            (storage,) = storage.data.inputs
        assert storage.crc == zlib.crc32(storage.data.read(0, storage.nbytes))


def test_sums_of_joined_and_parted_bytes() -> None:
    for first, second in ((b"", b""), (b"a", b""), (b"", b"a"), (b"abc", bytes(1000)), (bytes(70_000), b"\xff" * 4099)):
        whole = zlib.crc32(first + second)
        assert crc_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == whole
        assert crc_of_rest(whole, zlib.crc32(first), len(second)) == zlib.crc32(second)


def test_unseekable_output_of_numpy(tmp_path: Path) -> None:
    """Sizes and sums then follow the data, in 64 bits, though the directory says nothing of that."""

    class Pipe(io.RawIOBase):
        def __init__(self, path: Path) -> None:
            self.file = path.open("wb")

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            return self.file.write(data)

    with Pipe(tmp_path / "a.npz") as pipe:
        np.savez(pipe, **arrays())
        pipe.file.close()
    found = read(tmp_path / "a.npz").tree
    assert all(same(found[name].numpy(), given) for name, given in arrays().items())


def test_positional_arrays_and_nothing_at_all(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(3), np.arange(4))
    assert list(read(tmp_path / "a.npz").tree) == ["arr_0", "arr_1"]
    np.savez(tmp_path / "b.npz")
    assert read(tmp_path / "b.npz").tree == {}
    assert "no tensors" in str(ckptool.inspect(tmp_path / "b.npz"))


@each
def test_other_arrays_are_listed_never_dropped(how: str, tmp_path: Path) -> None:
    others = {
        "labels": np.array(["cat", "dog"]),
        "when": np.array(["2020-01-01"], "M8[D]"),
        "rows": np.zeros(2, [("a", "<f4")]),
        "options": np.array({"lr": 0.1}, dtype=object),
        "many": np.array(["x" * 100] * 1000),
    }
    file = numpy_file(tmp_path / "a.npz", how, w=np.ones(3), **others)
    checkpoint = read(file)
    assert [type(value) for value in checkpoint.tree.values()] == [TensorEntry, *[Object] * 5]
    assert str(plain(checkpoint.tree["labels"])) == "<numpy array U3[2]>"
    assert plain(checkpoint.tree["labels"]).values() == ["cat", "dog"]
    assert isinstance(plain(checkpoint.tree["many"]).data, LazyBytes)
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


def test_records_that_are_no_arrays_are_bytes_as_numpy_has_them(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", w=np.ones(2))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("readme.txt", "hello")
    assert read(file).tree["readme.txt"] == b"hello" == stock(file)["readme.txt"]
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large.bin", bytes(npz.MAX_OTHERS))
    with pytest.raises(LimitExceeded, match=r"large\.bin"):
        read(file)


def test_an_array_is_one_whatever_its_record_is_called(tmp_path: Path) -> None:
    file, other = numpy_file(tmp_path / "a.npz", "stored", w=np.ones(2)), io.BytesIO()
    np.save(other, np.arange(3.0))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("version", other.getvalue())
    assert read(file).tree["version"].numpy().tolist() == stock(file)["version"].tolist() == [0, 1, 2]


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
            found = {
                name: part.bytes() if isinstance(part, TensorEntry) else part for name, part in checkpoint.tree.items()
            }
        except CkptoolError:
            continue
        seen += checkpoint.container == "npz"
        if checkpoint.container == "npz":
            expected = {name: part if isinstance(part, bytes) else part.tobytes() for name, part in stock(file).items()}
            assert found == expected, seed
    assert seen > 30


def mutated(data: bytes, rng: random.Random) -> bytes:
    pieces = apart(data)
    for _ in range(rng.choice([0, 1, 1, 2])):
        if pieces.lines and pieces.records:
            pieces = rng.choice(OF_PIECES)(pieces, rng)
    data = pieces.build()
    if rng.random() < 0.3:
        data = around(data, rng)
    for _ in range(rng.choice([0, 0, 1, 2])):
        data = lie(data, rng)
    return data


# Writing -------------------------------------------------------------------------------------------------------------


@each
def test_round_trip(how: str, tmp_path: Path) -> None:
    checkpoint = read(numpy_file(tmp_path / "a.npz", how, **arrays() | {"labels": np.array(["a", "b"])}))
    out = tmp_path / "b.npz"
    again = contract.round_trip(npz, checkpoint, out)
    assert all(same(given, arrays().get(name, np.array(["a", "b"]))) for name, given in stock(out).items())
    assert list(again.tree) == [*arrays(), "labels"]
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("name", TRAPS)
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
    for key, array in stock(out).items():
        entry = again.tree[key]
        assert same(entry.numpy(), array) and same(checkpoint.tree[key].numpy(), array), key


def test_which_types_are_written(tmp_path: Path) -> None:
    kept = {}
    for dtype in DTYPES:
        entry = TensorEntry(Storage(InlineBytes(bytes(dtype.itemsize * 2))), dtype, (2,), (1,))
        plan: Any = None
        error = contract.refusal(lambda: npz.write(Checkpoint({"w": entry}, "live")))  # noqa: B023
        if error is None:
            plan = npz.write(Checkpoint({"w": entry}, "live"))
            kept[dtype.name] = stock(carry_out(plan, tmp_path / "a.npz"))["w"].dtype
        else:
            assert f"w (type {dtype.name})" in error.what and "ckptool cast" in error.fix
    assert kept == {
        name: by_name(name).to_numpy() for name in "f64 f32 f16 i64 i32 i16 i8 u64 u32 u16 u8 bool c128 c64".split()
    }


def test_arrays_are_aligned_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "a.npz"
    ckptool.save(arrays(), out)
    for entry in read(out).tree.values():
        assert entry.storage.data.offset % 64 == 0
    assert all(same(found, arrays()[name]) for name, found in stock(out).items())


def test_the_same_tree_is_the_same_bytes(tmp_path: Path) -> None:
    ckptool.save(arrays(), tmp_path / "a.npz")
    ckptool.save(arrays(), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"a": torch.ones(2, dtype=torch.bfloat16)}, "a (type bf16)"),
        ({"a": torch.ones(2, dtype=torch.float8_e5m2)}, "a (type f8_e5m2)"),
        ({1: torch.ones(2)}, "1 (a int as a name)"),
        ({"a.npy": torch.ones(2)}, "a.npy (a name that ends with .npy)"),
        ({"a\0b": torch.ones(2)}, r"a\x00b (a name that is not Unicode text)"),
        ({"a\ud800": torch.ones(2)}, r"a\ud800 (a name that is not Unicode text)"),
        ({"a" * 70_000: torch.ones(2)}, "a name that is too long"),
        ({"a": 3}, "a (3, no array"),
        ({"a": torch.ones(2).to_sparse()}, "a (sparse coo tensor)"),
        ([torch.ones(2)], "a dictionary of arrays"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tree: Any, named: str, tmp_path: Path) -> None:
    checkpoint = read(saved(tree, tmp_path / "a.pt"))
    with pytest.raises(Unsupported) as caught:
        npz.write(checkpoint)
    assert named in caught.value.what and caught.value.fix


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


@each
def test_damage_to_an_npz_is_noticed_when_it_is_converted(how: str, tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", how, **arrays())
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        record = archive.getinfo("large.npy")
    place = record.header_offset + record.compress_size // 2
    data[place] ^= 1
    damaged = written(bytes(data), tmp_path / "b.npz")
    for out in ("out.safetensors", "out.npz", "out.pt"):
        with pytest.raises(Corrupt):
            ckptool.convert(damaged, tmp_path / out)


# Converting ----------------------------------------------------------------------------------------------------------


def test_convert_one_root(tmp_path: Path) -> None:
    file, out = make("training.pt", tmp_path), tmp_path / "weights.npz"
    done = ckptool.convert(file, out, verify=True)
    state = load(file)["model_state_dict"]
    assert done.container == "npz" and done.facts["tensors"] == len(state)
    assert "left behind: optimizer_state_dict" in done.details
    assert all(same(found, state[name].numpy()) for name, found in stock(out).items())
    assert ckptool.diff(f"{file}#model_state_dict", out).same
    ckptool.convert(out, tmp_path / "back.pt")
    assert all(torch.equal(tensor, state[name]) for name, tensor in load(tmp_path / "back.pt").items())


def test_ties_are_written_once_for_each_name_and_said(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    file = saved({"a.weight": shared, "b.weight": shared, "c.weight": torch.ones(2)}, tmp_path / "a.pt")
    done = ckptool.convert(file, tmp_path / "a.npz", verify=True)
    assert [note.code for note in done.notes] == ["ties-copied"] and "a.weight = b.weight" in done.notes[0].message
    found = stock(tmp_path / "a.npz")
    assert found["a.weight"].tolist() == found["b.weight"].tolist() == [0, 1, 2, 3]


def test_expanded_views_are_asked_about(tmp_path: Path) -> None:
    file = saved({"a.weight": torch.ones(1).expand(1000)}, tmp_path / "a.pt")
    with pytest.raises(Conflict, match="expanded view") as caught:
        ckptool.convert(file, tmp_path / "a.npz")
    assert "npz has no strides" in caught.value.why
    ckptool.convert(file, tmp_path / "a.npz", materialize=True)
    assert stock(tmp_path / "a.npz")["a.weight"].shape == (1000,)


def test_all_is_for_safetensors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="all=True writes safetensors, not npz"):
        ckptool.convert(saved(weights("a.weight"), tmp_path / "a.pt"), tmp_path / "a.npz", all=True)


def test_between_npz_and_safetensors(tmp_path: Path) -> None:
    numbers = {name: given for name, given in arrays().items() if name != "truths"}
    file = numpy_file(tmp_path / "a.npz", "deflated", **numbers)
    ckptool.convert(file, tmp_path / "a.safetensors", verify=True)
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert all(same(found[name], given) for name, given in numbers.items())
    ckptool.convert(tmp_path / "a.safetensors", tmp_path / "b.npz", verify=True)
    assert ckptool.diff(file, tmp_path / "b.npz").same


def test_verbs_write_npz_to_npz(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", **{"module.w": np.ones(3), "module.b": np.zeros(2)})
    ckptool.strip_module(file, tmp_path / "b.npz", verify=True)
    assert sorted(stock(tmp_path / "b.npz")) == ["b", "w"]
    ckptool.add_module(tmp_path / "b.npz", in_place=True, verify=True)
    assert sorted(stock(tmp_path / "b.npz")) == ["module.b", "module.w"]
    with pytest.raises(Unsupported, match="bf16"):
        ckptool.cast(file, tmp_path / "c.npz", dtype="bf16")
    ckptool.cast(file, tmp_path / "c.npz", dtype="f16")
    assert stock(tmp_path / "c.npz")["module.w"].dtype == np.float16


# Hostile -------------------------------------------------------------------------------------------------------------


def small(folder: Path, how: str = "stored") -> bytes:
    return numpy_file(folder / "small.npz", how, a=np.arange(3.0), b=np.array(["x"])).read_bytes()


def values_of(tree: Any) -> dict[str, Any]:
    return {
        name: value.bytes() if isinstance(value, TensorEntry) else plain(value).values() for name, value in tree.items()
    }


@each
def test_an_archive_cut_at_any_byte_is_refused(how: str, tmp_path: Path) -> None:
    whole = small(tmp_path, how)
    for length in range(4, len(whole)):
        with pytest.raises(CkptoolError) as caught:
            read(written(whole[:length], tmp_path / "a.npz"))
        assert length < 60 or isinstance(caught.value, (Truncated, Corrupt, Ambiguous))


@each
def test_no_flipped_byte_gives_another_value_without_a_word(how: str, tmp_path: Path) -> None:
    whole = small(tmp_path, how)
    expected = values_of(read(written(whole, tmp_path / "a.npz")).tree)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << random.Random(place).randrange(8)
        try:
            tree = read(written(bytes(damaged), tmp_path / "a.npz")).tree
            found = values_of(tree)
        except CkptoolError:
            continue
        for name, entry in tree.items():
            wrong = found[name] != expected[name]
            assert not wrong or (isinstance(entry, TensorEntry) and zlib.crc32(found[name]) != entry.storage.crc)


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

    assert quickest(work) < 1.5


def test_a_storage_that_stands_for_much_is_not_loaded(tmp_path: Path) -> None:
    """Fifty zeros of a deflated gigabyte are fifty zeros."""
    file = numpy_file(tmp_path / "a.npz", "deflated", a=np.zeros(1 << 24))
    assert file.stat().st_size < 1 << 18
    entry = read(file).tree["a"]
    assert ckptool.show(file, at="a", slice=":3").values.tolist() == [0, 0, 0] and entry.nbytes == 1 << 27
