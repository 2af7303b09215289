"""`npz`: what numpy writes is read, what is written numpy reads, and what numpy cannot say is refused by name."""

from __future__ import annotations

import io
import random
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
from ckptool.errors import CkptoolError, Conflict, Corrupt, LimitExceeded, Unsupported, UsageError
from ckptool.formats import npz, read
from ckptool.pickles.plain import plain
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.formats import contract
from tests.support.files import carry_out, load, saved, weights, written
from tests.support.looped import looped
from tests.support.npz_files import SAVERS, each_saver, numpy_file, numpy_sees, same_bits, sample_arrays
from tests.support.zip_mutants import around, lie
from tests.support.zip_pieces import OF_PIECES, apart

# Reading -------------------------------------------------------------------------------------------------------------


@each_saver
def test_what_numpy_writes(how: str, tmp_path: Path) -> None:
    checkpoint = read(numpy_file(tmp_path / "a.npz", how, **sample_arrays()))
    assert (checkpoint.container, checkpoint.tensors_only, checkpoint.notes) == ("npz", True, ())
    assert list(checkpoint.tree) == list(sample_arrays())
    for name, given in sample_arrays().items():
        assert same_bits(checkpoint.tree[name].numpy(), given), name
        assert isinstance(checkpoint.tree[name].storage.data, FileRange) == (how == "stored" and name != "W")
    assert checkpoint.tree["fortran"].stride == (1, 2)


@each_saver
def test_every_tensor_has_the_checksum_of_its_own_bytes(how: str, tmp_path: Path) -> None:
    for entry in read(numpy_file(tmp_path / "a.npz", how, **sample_arrays())).tree.values():
        storage = entry.storage
        if storage.crc is None:  # turned: what it is made of has one
            (storage,) = storage.data.inputs
        assert storage.crc == zlib.crc32(storage.data.read(0, storage.nbytes))


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
        np.savez(pipe, **sample_arrays())
        pipe.file.close()
    found = read(tmp_path / "a.npz").tree
    assert all(same_bits(found[name].numpy(), given) for name, given in sample_arrays().items())


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
    assert read(file).tree["readme.txt"] == b"hello" == numpy_sees(file)["readme.txt"]
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large.bin", bytes(npz.MAX_OTHERS))
    with pytest.raises(LimitExceeded, match=r"large\.bin"):
        read(file)


def test_an_array_is_one_whatever_its_record_is_called(tmp_path: Path) -> None:
    file, other = numpy_file(tmp_path / "a.npz", "stored", w=np.ones(2)), io.BytesIO()
    np.save(other, np.arange(3.0))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("version", other.getvalue())
    assert read(file).tree["version"].numpy().tolist() == numpy_sees(file)["version"].tolist() == [0, 1, 2]


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
            expected = {
                name: part if isinstance(part, bytes) else part.tobytes() for name, part in numpy_sees(file).items()
            }
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


@each_saver
def test_round_trip(how: str, tmp_path: Path) -> None:
    checkpoint = read(numpy_file(tmp_path / "a.npz", how, **sample_arrays() | {"labels": np.array(["a", "b"])}))
    out = tmp_path / "b.npz"
    again = contract.round_trip(npz, checkpoint, out)
    assert all(
        same_bits(given, sample_arrays().get(name, np.array(["a", "b"]))) for name, given in numpy_sees(out).items()
    )
    assert list(again.tree) == [*sample_arrays(), "labels"]
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None


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
    for key, array in numpy_sees(out).items():
        entry = again.tree[key]
        assert same_bits(entry.numpy(), array) and same_bits(checkpoint.tree[key].numpy(), array), key


def test_which_types_are_written(tmp_path: Path) -> None:
    kept = {}
    for dtype in DTYPES:
        entry = TensorEntry(Storage(InlineBytes(bytes(dtype.itemsize * 2))), dtype, (2,), (1,))
        plan: Any = None
        error = contract.refusal(lambda: npz.write(Checkpoint({"w": entry}, "live")))  # noqa: B023
        if error is None:
            plan = npz.write(Checkpoint({"w": entry}, "live"))
            kept[dtype.name] = numpy_sees(carry_out(plan, tmp_path / "a.npz"))["w"].dtype
        else:
            assert f"w (type {dtype.name})" in error.what and "ckptool cast" in error.fix
    assert kept == {
        name: by_name(name).to_numpy() for name in "f64 f32 f16 i64 i32 i16 i8 u64 u32 u16 u8 bool c128 c64".split()
    }


def test_arrays_are_aligned_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "a.npz"
    ckptool.save(sample_arrays(), out)
    for entry in read(out).tree.values():
        assert entry.storage.data.offset % 64 == 0
    assert all(same_bits(found, sample_arrays()[name]) for name, found in numpy_sees(out).items())


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
        ({1: torch.ones(2)}, "1 (a int as a name)"),
        ({"a.npy": torch.ones(2)}, "a.npy (a name that ends with .npy)"),
        ({"a\0b": torch.ones(2)}, r"a\x00b (a name that is not Unicode text)"),
        ({"a\ud800": torch.ones(2)}, r"a\ud800 (a name that is not Unicode text)"),
        ({"a" * 70_000: torch.ones(2)}, "a name that is too long"),
        ({"a": 3}, "a (3, not an array"),
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


@each_saver
def test_damage_to_an_npz_is_noticed_when_it_is_converted(how: str, tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", how, **sample_arrays())
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
    assert any("left out" in line and " optimizer_state_dict (" in line for line in done.details)
    assert all(same_bits(found, state[name].numpy()) for name, found in numpy_sees(out).items())
    assert ckptool.diff(f"{file}#model_state_dict", out).same
    ckptool.convert(out, tmp_path / "back.pt")
    assert all(torch.equal(tensor, state[name]) for name, tensor in load(tmp_path / "back.pt").items())


def test_ties_are_written_once_for_each_name_and_said(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    file = saved({"a.weight": shared, "b.weight": shared, "c.weight": torch.ones(2)}, tmp_path / "a.pt")
    done = ckptool.convert(file, tmp_path / "a.npz", verify=True)
    assert [note.code for note in done.notes] == ["ties-copied"] and "a.weight = b.weight" in done.notes[0].message
    found = numpy_sees(tmp_path / "a.npz")
    assert found["a.weight"].tolist() == found["b.weight"].tolist() == [0, 1, 2, 3]


def test_expanded_views_are_written_out_and_said(tmp_path: Path) -> None:
    file = saved({"a.weight": torch.ones(1).expand(1000)}, tmp_path / "a.pt")
    done = ckptool.convert(file, tmp_path / "a.npz")
    assert [note.code for note in done.notes] == ["resolved-views"] and "a.weight" in done.notes[0].message
    assert numpy_sees(tmp_path / "a.npz")["a.weight"].tolist() == [1] * 1000
    with pytest.raises(Conflict, match="expanded view"):  # a few bytes that would become gigabytes
        ckptool.convert(saved({"a.weight": torch.ones(1).expand(1 << 29)}, tmp_path / "b.pt"), tmp_path / "b.npz")


def test_all_is_for_safetensors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="all=True writes safetensors, not npz"):
        ckptool.convert(saved(weights("a.weight"), tmp_path / "a.pt"), tmp_path / "a.npz", all=True)


def test_between_npz_and_safetensors(tmp_path: Path) -> None:
    numbers = {name: given for name, given in sample_arrays().items() if name != "truths"}
    file = numpy_file(tmp_path / "a.npz", "deflated", **numbers)
    ckptool.convert(file, tmp_path / "a.safetensors", verify=True)
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert all(same_bits(found[name], given) for name, given in numbers.items())
    ckptool.convert(tmp_path / "a.safetensors", tmp_path / "b.npz", verify=True)
    assert ckptool.diff(file, tmp_path / "b.npz").same


def test_verbs_write_npz_to_npz(tmp_path: Path) -> None:
    file = numpy_file(tmp_path / "a.npz", "stored", **{"module.w": np.ones(3), "module.b": np.zeros(2)})
    ckptool.strip_module(file, tmp_path / "b.npz", verify=True)
    assert sorted(numpy_sees(tmp_path / "b.npz")) == ["b", "w"]
    ckptool.add_module(tmp_path / "b.npz", in_place=True, verify=True)
    assert sorted(numpy_sees(tmp_path / "b.npz")) == ["module.b", "module.w"]
    with pytest.raises(Unsupported, match="bf16"):
        ckptool.cast(file, tmp_path / "c.npz", dtype="bf16")
    ckptool.cast(file, tmp_path / "c.npz", dtype="f16")
    assert numpy_sees(tmp_path / "c.npz")["module.w"].dtype == np.float16
