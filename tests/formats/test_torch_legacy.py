"""Legacy files: those of every vector and producer against torch's own reader, and those that nobody should send."""

from __future__ import annotations

import io
import pickle
import struct
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint import Checkpoint, FileRange, StorageRef, TensorEntry
from ckptool.errors import (
    BadTensor,
    CkptoolError,
    Conflict,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    Truncated,
    UnsafeObject,
    Unsupported,
)
from ckptool.formats import read, torch_zip
from ckptool.nodes import ByteString, Global, Object
from ckptool.pickles import legacy
from ckptool.tree import tensors, unknown_calls
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.formats.streams import INFO, Made, Pid, Rebuilt, block, floats, pickled, storage, stream
from tests.helpers import assert_same_objects, assert_same_tree, carry_out, load, torch_bytes, written

FIXTURES = Path(__file__).parents[2] / "fixtures"
LEGACY: dict[str, Any] = {"_use_new_zipfile_serialization": False}


def opened(data: bytes, folder: Path) -> Checkpoint:
    checkpoint = read(written(data, folder / "legacy.pt"))
    assert checkpoint.container == "torch-legacy"
    return checkpoint


def refused(data: bytes, folder: Path) -> CkptoolError:
    with pytest.raises(CkptoolError) as caught:
        opened(data, folder)
    assert "legacy.pt" in caught.value.what and (caught.value.why or caught.value.fix)
    return caught.value


def values(entry: Any) -> list[Any]:
    assert isinstance(entry, TensorEntry)
    return list(entry.numpy().reshape(-1).tolist())


# Against torch ---------------------------------------------------------------------------------------------------------

PROTOCOL_OF = {name: (1, 2, 3, 4, 5)[number % 5] for number, name in enumerate(TRAPS)}


@pytest.mark.parametrize("name", TRAPS)
def test_every_vector_is_read_as_from_a_zip_and_written_as_torch_loads_it(name: str, tmp_path: Path) -> None:
    value, protocol = TRAPS[name](), PROTOCOL_OF[name]
    original = written(torch_bytes(value, pickle_protocol=protocol, **LEGACY), tmp_path / "legacy.pt")
    checkpoint = read(original)
    assert checkpoint.container == "torch-legacy" and "no-checksums" in {note.code for note in checkpoint.notes}
    assert_same_tree(read(written(torch_bytes(value, pickle_protocol=protocol), tmp_path / "zip.pt")), checkpoint)
    out = carry_out(torch_zip.write(checkpoint, keep_unknown=True), tmp_path / "out.pt")
    assert_same_tree(checkpoint, read(out))
    assert torch_zip.append(checkpoint) is None
    try:
        before = load(original, weights_only=False)
    except AttributeError as error:  # torch 2.13 cannot read untyped storages of the streams that it writes
        assert "UntypedStorage" in str(error)
        return
    except RuntimeError as error:  # nor nested tensors, whose sizes it looks at before it has read them
        assert name == "11-nested", error
        return
    if name != "11-nested":
        assert_same_objects(before, load(out, weights_only=False))


LEGACY_PRODUCERS = [name for name in PRODUCERS if "legacy" in name]


@pytest.mark.parametrize("name", LEGACY_PRODUCERS)
def test_every_legacy_producer(name: str, tmp_path: Path) -> None:
    file = make(name, tmp_path)
    out = carry_out(torch_zip.write(read(file)), tmp_path / "out.pt")
    assert_same_objects(load(file, weights_only=False), load(out, weights_only=False))


def test_verbs_take_legacy_files(tmp_path: Path) -> None:
    model = {"module.weight": torch.arange(6.0).reshape(2, 3), "module.bias": torch.ones(2)}
    file = written(torch_bytes({"state_dict": model, "epoch": 3}, **LEGACY), tmp_path / "legacy.pth")
    listing = ckptool.inspect(file).listing
    assert (listing.container, len(listing.tensors)) == ("torch-legacy", 2)
    ckptool.strip_module(file, tmp_path / "stripped.pt")
    stripped = load(tmp_path / "stripped.pt")
    assert list(stripped["state_dict"]) == ["weight", "bias"] and stripped["epoch"] == 3
    assert torch.equal(stripped["state_dict"]["weight"], model["module.weight"])
    ckptool.convert(file, tmp_path / "same.pt")
    assert ckptool.diff(file, tmp_path / "same.pt").same
    ckptool.convert(file, tmp_path / "weights.safetensors")
    assert torch.equal(ckptool.load(file)["state_dict"]["module.bias"], torch.ones(2))


def test_nothing_is_loaded_and_data_stay_ranges_of_the_file(tmp_path: Path) -> None:
    big = {f"{i}": torch.full((1 << 18,), float(i)) for i in range(16)}
    file = written(torch_bytes(big, **LEGACY), tmp_path / "big.pt")
    checkpoint = read(file)
    for name, entry in checkpoint.tree.items():
        data = entry.storage.data
        assert isinstance(data, FileRange) and data.file is checkpoint.source and data.length == 1 << 20
        assert data.read(1 << 19, 4) == struct.pack("<f", float(name))


def test_many_tensors_in_linear_time(tmp_path: Path) -> None:
    many = {f"layers.{i}.weight": torch.zeros(2) for i in range(5_000)}
    file = written(torch_bytes(many, **LEGACY), tmp_path / "many.pt")
    begin = time.process_time()
    assert len(read(file).tree) == 5_000
    assert time.process_time() - begin < 3


# Older than any torch that installs ------------------------------------------------------------------------------------


def test_tensors_made_empty_and_given_a_state(tmp_path: Path) -> None:
    """TRAPS 33: `torch.cuda.FloatTensor()` and a state, as pickles of torch 0.1 have them, in each of the ways to make an object."""
    place = storage("1", 6, location="cuda:0", kind=torch.cuda.FloatStorage)
    state = (Pid(place), 2, torch.Size([2, 2]), (2, 1))
    made = {
        "call": Made(torch.FloatTensor, (), (Pid(storage("2", 2)), 1, (1,), (1,))),
        "cuda": Made(torch.cuda.FloatTensor, (), state),
        "without": Made(torch.FloatTensor, ()),
    }
    value = pickled(made).replace(b"ctorch._C\nFloatTensor", b"ctorch\nFloatTensor")
    tree = opened(stream(value, {"1": floats(0, 1, 2, 3, 4, 5), "2": floats(7, 8)}), tmp_path).tree
    assert values(tree["cuda"]) == [2, 3, 4, 5] and tree["cuda"].shape == (2, 2) and tree["cuda"].location == "cuda:0"
    assert values(tree["call"]) == [8] and values(tree["without"]) == [] and tree["without"].shape == (0,)


RECONSTRUCTED = b"ccopy_reg\n_reconstructor\n(ctorch\nFloatTensor\nc__builtin__\nobject\nNtR"
NEWOBJ = b"ccopy_reg\n__newobj__\n(ctorch\nFloatTensor\ntR"


@pytest.mark.parametrize("spelled", [RECONSTRUCTED, NEWOBJ, b"ctorch\nFloatTensor\n)\x81", b"(ctorch\nFloatTensor\no"])
def test_tensors_given_a_state_in_other_spellings(spelled: bytes, tmp_path: Path) -> None:
    head, state = pickled((Pid(storage()), 1, (3,), (1,)))[:2], pickled((Pid(storage()), 1, (3,), (1,)))[2:-1]
    value = (
        head + b"]q\xf0(" + spelled + b"q\xf1" + state + b"bh\xf1e."
    )  # the same tensor twice: it was stored before its state
    first, second = opened(stream(value), tmp_path).tree
    assert first is second and values(first) == [1, 2, 3]


def test_parameters_and_variables_of_0_3(tmp_path: Path) -> None:
    data = Made(torch._utils._rebuild_tensor, (Pid(storage()), 0, (4,), (1,)))
    value = {
        "parameter": Made(torch.nn.Parameter, (data,), (True, False, OrderedDict())),
        "frozen": Made(torch.nn.Parameter, (data,), (False, False, None)),
        "with its tensor": Made(torch.nn.Parameter, (), (data, None, OrderedDict(), True, False)),
        "variable": Made(torch.autograd.Variable, (data,), (False, False, OrderedDict())),
    }
    tree = opened(stream(value), tmp_path).tree
    flags = {name: (entry.flags.parameter, entry.flags.requires_grad) for name, entry in tree.items()}
    assert flags == {
        "parameter": (True, True),
        "frozen": (True, False),
        "with its tensor": (True, True),
        "variable": (False, False),
    }
    assert all(values(entry) == [0, 1, 2, 3] for entry in tree.values())


@pytest.mark.parametrize(
    "state",
    [(True, False), (True, False, {"hook": 1}), ("yes", False, None), (Pid(storage()), 3, (4,), (1,)), 5, {"data": 1}],
    ids=str,
)
def test_row_057_a_tensor_with_another_state_is_refused(state: Any, tmp_path: Path) -> None:
    data = Made(torch._utils._rebuild_tensor, (Pid(storage()), 0, (4,), (1,)))
    assert isinstance(refused(stream(Made(torch.nn.Parameter, (data,), state)), tmp_path), Corrupt)


def test_views_share_the_storage_that_they_are_of(tmp_path: Path) -> None:
    pids = {name: storage("1", 8, (name, begin, size)) for name, begin, size in (("2", 2, 4), ("3", 4, 4))}
    value = {
        "whole": Rebuilt(storage("1", 8), (8,)),
        "front": Rebuilt(pids["2"], (2, 2), (2, 1)),
        "back": Rebuilt(pids["3"], (3,), (1,), 1),
        "again": Rebuilt(pids["3"], (3,), (1,), 1),
    }
    tree = opened(stream(value, {"1": floats(*range(8))}), tmp_path).tree
    assert len({id(entry.storage) for entry in tree.values()}) == 1
    assert {name: values(entry) for name, entry in tree.items()} == {
        "whole": [0, 1, 2, 3, 4, 5, 6, 7],
        "front": [2, 3, 4, 5],
        "back": [5, 6, 7],
        "again": [5, 6, 7],
    }
    real = load(tmp_path / "legacy.pt", weights_only=False)
    assert {name: tensor.flatten().tolist() for name, tensor in real.items()} == {
        name: values(entry) for name, entry in tree.items()
    }


def test_a_view_that_stands_by_itself_is_a_storage_of_its_own(tmp_path: Path) -> None:
    view = storage("1", 8, ("2", 2, 4))
    value = {"storage": Pid(view), "tensor": Rebuilt(storage("1", 8), (8,)), "part": Rebuilt(view, (4,))}
    checkpoint = opened(stream(value, {"1": floats(*range(8))}), tmp_path)
    ref = checkpoint.tree["storage"]
    assert isinstance(ref, StorageRef) and ref.storage.data.read(0, 16) == struct.pack("<4f", 2, 3, 4, 5)
    assert values(checkpoint.tree["part"]) == [2, 3, 4, 5]
    assert "views-apart" in {note.code for note in checkpoint.notes}


# Python 2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [1, 2])
def test_row_086_a_file_of_python_2(protocol: int) -> None:
    """Keys and texts that are bytes; made with Python 2.7.18 by fixtures/make_python2.py."""
    checkpoint = read(FIXTURES / f"python-2.7-protocol-{protocol}.pt")
    tree = checkpoint.tree
    assert list(tree) == ["weight", "bias", "epoch", "big", "caf\xe9", "text", "utf-8", "names", "nested"]
    assert values(tree["weight"]) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5] and tree["weight"].shape == (2, 3)
    assert values(tree["bias"]) == [0.5, 1.0] and tree["bias"].storage is tree["weight"].storage
    assert tree["epoch"] == 7 and tree["big"] == 1 << 70
    assert tree["text"] == ByteString(b"na\xefve") and tree["utf-8"] == "na\xefve" and tree["names"] == ["a", "b"]
    assert tree["nested"] == {"lr": 0.1, "on": True}
    note = next(note for note in checkpoint.notes if note.code == "python2-text")
    assert "2 texts" in note.message
    real = load(FIXTURES / f"python-2.7-protocol-{protocol}.pt", weights_only=False, encoding="latin1")
    assert list(real) == list(tree) and torch.equal(real["weight"], torch.arange(6).reshape(2, 3) / 2)


def test_a_persistent_id_in_bytes(tmp_path: Path) -> None:
    """What `encoding="bytes"` and Python 2 leave: the words of a persistent id are bytes."""
    pid = storage(tag=b"storage", key=b"1", location=b"cpu")
    entry = opened(stream(Rebuilt(pid, (4,)), keys=[b"1"], protocol=3), tmp_path).tree
    assert values(entry) == [0, 1, 2, 3] and entry.location == "cpu"


# Whole modules ---------------------------------------------------------------------------------------------------------


def test_row_082_the_source_of_a_class_is_kept_as_text(tmp_path: Path) -> None:
    source = "class Net(Module):\n    raise SystemExit\n"
    cls = Pid(("module", torch.nn.Linear, "/home/me/net.py", source))
    value = pickled({"model": cls, "other": Pid(("module", torch.nn.ReLU, None, None))})
    checkpoint = opened(stream(value, {}), tmp_path)
    assert checkpoint.tree["model"] is Global("torch.nn.modules.linear", "Linear")
    assert checkpoint.metadata["sources"] == {
        "torch.nn.modules.linear.Linear": {"file": "/home/me/net.py", "source": source}
    }
    assert "class-source" in {note.code for note in checkpoint.notes}


def test_a_module_pickled_whole_is_read_without_its_class(tmp_path: Path) -> None:
    data = torch_bytes(torch.nn.Linear(2, 3), **LEGACY).replace(
        b"torch.nn.modules.linear\nLinear", b"models.not_here_anywhere\nL"
    )
    checkpoint = opened(data, tmp_path)
    assert checkpoint.tree.name == "models.not_here_anywhere.L"
    assert {path[-1]: entry.shape for path, entry in tensors(checkpoint.tree)} == {"weight": (3, 2), "bias": (3,)}
    assert "class Linear(Module)" in checkpoint.metadata["sources"]["models.not_here_anywhere.L"]["source"]


@pytest.mark.parametrize(
    "pid",
    [
        "text",
        7,
        (),
        ("storage",),
        ("module", "not a class", None, None),
        ("module", torch.nn.Linear, 5, None),
        ("module", torch.nn.Linear),
        ("weights", torch.FloatStorage, "1", "cpu", 4, None),
        storage(kind="FloatStorage"),
        storage(key=1),
        storage(location=None),
        storage(numel=4.0),
        storage()[:5],
    ],
    ids=str,
)
def test_row_082_another_persistent_id_is_refused(pid: Any, tmp_path: Path) -> None:
    assert isinstance(refused(stream(Pid(pid)), tmp_path), Corrupt)


def test_row_082_a_persistent_id_of_protocol_0_is_refused(tmp_path: Path) -> None:
    assert isinstance(refused(stream(b"Pstorage\n.", {}), tmp_path), Corrupt)


@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.FloatTensor])
def test_row_095_an_unknown_storage_type_is_named(kind: Any, tmp_path: Path) -> None:
    error = refused(stream(Rebuilt(storage(kind=kind), (4,))), tmp_path)
    assert isinstance(error, Unsupported) and kind.__name__ in error.what


@pytest.mark.parametrize(
    "other", [storage(kind=torch.DoubleStorage), storage(numel=5), storage(location="cuda:0")], ids=str
)
def test_row_094_a_storage_described_in_two_ways(other: Any, tmp_path: Path) -> None:
    value = [Rebuilt(storage(), (1,)), Rebuilt(other, (1,))]
    assert isinstance(refused(stream(value), tmp_path), Corrupt)


def test_row_089_numbers_of_elements_that_cannot_be(tmp_path: Path) -> None:
    assert isinstance(refused(stream(Rebuilt(storage(numel=-1), (0,))), tmp_path), BadTensor)
    assert isinstance(refused(stream(Rebuilt(storage(numel=1 << 62), (1,))), tmp_path), (Truncated, Corrupt))
    assert isinstance(refused(stream(Rebuilt(storage(), (5,))), tmp_path), BadTensor)


# The rows of HOSTILE.md for this format --------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", [0, -1, 1 << 77, "magic", None, [0x1950A86A20F9469CFC6C]], ids=str)
def test_row_109_another_magic_number(magic: Any, tmp_path: Path) -> None:
    error = refused(stream({}, {}, magic=magic), tmp_path)
    assert isinstance(error, NotACheckpoint) and "magic number" in error.what


def test_row_109_a_magic_number_computed_by_a_call(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    call = b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR"
    right = pickled(0x1950A86A20F9469CFC6C)[2:]
    for magic in (call + b".", call + b"0" + right):  # its result taken as the number, or thrown away
        error = refused(stream({}, {}, magic=magic), tmp_path)
        assert isinstance(error, UnsafeObject) and "os.mkdir" in error.what
    assert not mark.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_the_magic_number_in_every_protocol(protocol: int, tmp_path: Path) -> None:
    assert opened(stream({"a": 1}, {}, protocol=protocol), tmp_path).tree == {"a": 1}


def test_what_torch_writes_in_front_is_known_at_sight() -> None:
    data = torch_bytes(SMALL, **LEGACY)
    assert data.startswith(legacy._USUAL) and b"".join(map(pickled, (legacy.MAGIC, 1001, INFO))) == legacy._USUAL


@pytest.mark.parametrize("version", [1000, 1002, -1, None, "1001", True, 1001.0, [1001]], ids=repr)
def test_row_110_another_version(version: Any, tmp_path: Path) -> None:
    error = refused(stream({}, {}, version=version), tmp_path)
    assert isinstance(error, Corrupt) and "version" in error.what


@pytest.mark.parametrize(
    "info",
    [
        {},
        [],
        None,
        {**INFO, "little_endian": 1},
        {**INFO, "little_endian": None},
        {**INFO, "protocol_version": 1000},
        {**INFO, "type_sizes": None},
        {**INFO, "type_sizes": {"short": 2, "int": 4, "long": 1 << 40}},
        {**INFO, "type_sizes": {"short": 1, "int": 4, "long": 4}},
        {**INFO, "type_sizes": {"short": 2, "int": 4}},
        {**INFO, "type_sizes": {"short": 2, "int": 4, "long": []}},
    ],
    ids=repr,
)
def test_row_110_odd_words_about_the_machine(info: Any, tmp_path: Path) -> None:
    error = refused(stream({}, {}, info=info), tmp_path)
    assert isinstance(error, Corrupt) and "machine" in error.what


@pytest.mark.parametrize(
    "keys", [["1", "2"], [], ["1", "1"], ["2"], None, "1", {"1": 1}, [1], [["1"]], [None]], ids=repr
)
def test_row_111_another_list_of_keys(keys: Any, tmp_path: Path) -> None:
    data = stream(Rebuilt(storage(), (4,)), keys=b"N." if keys is None else keys)
    error = refused(data, tmp_path)
    assert isinstance(error, Corrupt) and "list of storages" in error.what


def test_row_111_keys_repeated_ten_thousand_times(tmp_path: Path) -> None:
    begin = time.process_time()
    refused(stream(Rebuilt(storage(), (4,)), keys=["1", *map(str, range(20_000)), "7"] * 2), tmp_path)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("numel", [3, 5, 0, -4, 1 << 40, 4 << 56])
def test_row_112_the_number_in_front_of_the_data_disagrees(numel: int, tmp_path: Path) -> None:
    data = stream(Rebuilt(storage(), (4,)), {"1": struct.pack("<q", numel) + bytes(16)})
    error = refused(data, tmp_path)
    assert isinstance(error, Corrupt) and "4 elements" in error.what


def test_row_113_bytes_after_the_last_storage(tmp_path: Path) -> None:
    checkpoint = opened(stream(Rebuilt(storage(), (4,))) + b"more bytes", tmp_path)
    note = next(note for note in checkpoint.notes if note.code == "trailing-bytes")
    assert "10 bytes" in note.message and values(checkpoint.tree) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "view",
    [
        ("2", 2, 3),
        ("2", -1, 2),
        ("2", 0, -1),
        ("2", 1 << 62, 1),
        ("2", 0.0, 1),
        (2, 0, 1),
        ("2", 0),
        "2",
        ("1", 0, 4),
    ],
    ids=repr,
)
def test_row_114_a_view_outside_of_its_root_or_of_itself(view: Any, tmp_path: Path) -> None:
    assert isinstance(refused(stream(Rebuilt(storage(view=view), (1,))), tmp_path), BadTensor)


def test_row_114_views_of_views_and_cycles(tmp_path: Path) -> None:
    cycle = [Rebuilt(storage("1", 4, ("2", 0, 4)), (1,)), Rebuilt(storage("2", 4, ("1", 0, 4)), (1,))]
    assert isinstance(refused(stream(cycle), tmp_path), BadTensor)
    two_ways = [Rebuilt(storage("1", 4, ("2", 0, 3)), (1,)), Rebuilt(storage("1", 4, ("2", 1, 3)), (1,))]
    assert isinstance(refused(stream(two_ways), tmp_path), Corrupt)


def test_row_114_a_tensor_larger_than_its_view(tmp_path: Path) -> None:
    """It would lie inside of the root, but not of the part that the file gives it."""
    value = Rebuilt(storage("1", 4, ("2", 0, 2)), (3,))
    assert isinstance(refused(stream(value), tmp_path), BadTensor)


SMALL = {"weight": torch.tensor([1.5, -2.0, 3.25]), "n": torch.tensor([7, 9]), "epoch": 3}


def test_row_115_every_flipped_byte_is_refused_or_said_to_be_unnoticeable(tmp_path: Path) -> None:
    """The format has no checksums: a note says so. What flips in the pickles or numbers must not crash, and in the data only
    changes the data."""
    data = torch_bytes(SMALL, **LEGACY)
    file = tmp_path / "flipped.pt"
    whole = opened(data, tmp_path)
    assert any(note.code == "no-checksums" for note in whole.notes)
    begin = len(data) - 8 - 16 - 8 - 12
    read_anyway = 0
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        try:
            checkpoint = read(file)
        except CkptoolError as error:
            assert error.what and error.code != "error"
            continue
        for _, entry in tensors(checkpoint.tree):
            if isinstance(entry, TensorEntry):
                entry.bytes()
        read_anyway += at >= begin
    assert 20 <= read_anyway <= 28  # each byte of the data, none of the numbers in front of it


def test_truncated_anywhere(tmp_path: Path) -> None:
    data = torch_bytes(SMALL, **LEGACY)
    for length in range(1, len(data)):
        with pytest.raises(CkptoolError) as caught:
            read(written(data[:length], tmp_path / "cut.pt"))
        assert isinstance(caught.value, (Truncated, NotACheckpoint, Unsupported, Corrupt)), length
        if length > 40:
            assert isinstance(caught.value, Truncated), (length, caught.value)


# Byte order ------------------------------------------------------------------------------------------------------------

BIG = {**INFO, "little_endian": False}


def test_row_099_a_big_endian_file_is_turned(tmp_path: Path) -> None:
    """All numbers big-endian, as they lay in memory: elements, and the count in front of them."""
    value = {
        "f": Rebuilt(storage("1", 3), (3,)),
        "c": Rebuilt(storage("2", 1, kind=torch.ComplexFloatStorage), (1,)),
        "b": Rebuilt(storage("3", 2, kind=torch.ByteStorage), (2,)),
    }
    blocks = {
        "1": floats(1, 2.5, -3, order=">"),
        "2": block(struct.pack(">2f", 1, 2), 1, ">"),
        "3": block(b"\1\2", 2, ">"),
    }
    checkpoint = opened(stream(value, blocks, info=BIG), tmp_path)
    assert values(checkpoint.tree["f"]) == [1, 2.5, -3]
    assert values(checkpoint.tree["c"]) == [1 + 2j] and values(checkpoint.tree["b"]) == [1, 2]
    assert checkpoint.metadata["byteorder"] == "big" and "big-endian" in {note.code for note in checkpoint.notes}
    ckptool.convert(tmp_path / "legacy.pt", tmp_path / "out.pt")
    assert load(tmp_path / "out.pt")["f"].tolist() == [1, 2.5, -3]


def test_row_099_what_torch_writes_on_a_big_endian_machine_is_little_endian(tmp_path: Path) -> None:
    """torch/csrc/serialization.cpp turns elements and counts when it writes there; torch here reads the same values."""
    checkpoint = opened(stream(Rebuilt(storage(), (4,)), info=BIG), tmp_path)
    assert values(checkpoint.tree) == [0, 1, 2, 3] == load(tmp_path / "legacy.pt").tolist()
    assert "little-endian" in next(note.message for note in checkpoint.notes if note.code == "big-endian")


def test_row_099_big_endian_counts_in_a_little_endian_file(tmp_path: Path) -> None:
    data = stream(Rebuilt(storage(), (4,)), {"1": floats(0, 1, 2, 3, order=">")})
    assert isinstance(refused(data, tmp_path), Corrupt)


def test_row_099_both_orders_in_one_file(tmp_path: Path) -> None:
    value = [Rebuilt(storage("1", 2), (2,)), Rebuilt(storage("2", 2), (2,))]
    for first, second in ("<>", "><"):
        data = stream(value, {"1": floats(1, 2, order=first), "2": floats(3, 4, order=second)}, info=BIG)
        assert isinstance(refused(data, tmp_path), Corrupt)


def test_row_099_untyped_storages_cannot_be_turned(tmp_path: Path) -> None:
    value = Pid(storage("1", 8, kind=torch.UntypedStorage))
    data = stream(value, {"1": block(bytes(8), 8, ">")}, info=BIG)
    assert isinstance(refused(data, tmp_path), Unsupported)


# Streams in bytes ------------------------------------------------------------------------------------------------------


def nested(value: Any, levels: int) -> Any:
    """A value in a stream in bytes, in a stream in bytes, …"""
    for _ in range(levels):
        value = Made(torch.storage._load_from_bytes, (value if type(value) is bytes else stream(value, {}),))
    return value


@pytest.mark.parametrize("protocol", range(2, 6))
def test_tensors_in_bytes(protocol: int, tmp_path: Path) -> None:
    """What plain pickling of a tensor gives: `_load_from_bytes` of a stream that holds its storage."""
    value = {"small": torch.arange(4.0), "large": torch.arange(1 << 17), "odd": torch.arange(200_000).to(torch.uint8)}
    data = stream(pickle.dumps(value, protocol), {}, protocol=protocol)
    checkpoint = opened(data, tmp_path)
    assert {name: entry.shape for name, entry in checkpoint.tree.items()} == {
        "small": (4,),
        "large": (1 << 17,),
        "odd": (200_000,),
    }
    if protocol > 2:  # protocol 2 spells bytes as text
        assert isinstance(checkpoint.tree["large"].storage.data, FileRange)
    assert not unknown_calls(checkpoint)
    out = carry_out(torch_zip.write(checkpoint), tmp_path / "out.pt")
    again = load(out)
    assert all(torch.equal(again[name], tensor) for name, tensor in value.items())


def test_tensors_in_bytes_in_a_zip(tmp_path: Path) -> None:
    class Hidden:
        def __reduce__(self) -> Any:
            return pickle.loads, (b"",)

    data = stream({"a": Rebuilt(storage(), (4,))})
    inner = Made(torch.storage._load_from_bytes, (data,))
    file = written(torch_bytes({"inner": inner}), tmp_path / "a.pt")
    checkpoint = read(file)
    assert checkpoint.container == "torch-zip" and values(checkpoint.tree["inner"]["a"]) == [0, 1, 2, 3]


def test_row_083_streams_in_streams_end_at_the_second_level(tmp_path: Path) -> None:
    inner = stream(Rebuilt(storage(), (4,)))
    tree = opened(stream(nested(inner, 2), {}), tmp_path).tree
    assert values(tree) == [0, 1, 2, 3]
    error = refused(stream(nested(inner, 3), {}), tmp_path)
    assert isinstance(error, LimitExceeded) and "nested" in error.what


def test_row_083_bytes_that_are_no_stream_stay_a_call(tmp_path: Path) -> None:
    for content in (b"", b"\x80\x02.", pickle.dumps({"a": 1}), b"PK\x03\x04"):
        checkpoint = opened(stream(Made(torch.storage._load_from_bytes, (content,)), {}), tmp_path)
        assert isinstance(checkpoint.tree, Object) and checkpoint.tree.args == (content,)
        assert [call.name for _, call in unknown_calls(checkpoint)] == ["torch.storage._load_from_bytes"]


def test_row_083_a_call_hidden_in_bytes_is_still_named(tmp_path: Path) -> None:
    thrown_away = b"\x80\x02cos\nmkdir\n(X\x01\0\0\0xtR0N."
    checkpoint = opened(stream(Made(torch.storage._load_from_bytes, (stream(thrown_away, {}),)), {}), tmp_path)
    assert [call.name for _, call in unknown_calls(checkpoint)] == ["torch.storage._load_from_bytes"]
    kept = b"\x80\x02cos\nmkdir\n(X\x01\0\0\0xtR."
    checkpoint = opened(stream(Made(torch.storage._load_from_bytes, (stream(kept, {}),)), {}), tmp_path)
    assert [call.name for _, call in unknown_calls(checkpoint)] == ["os.mkdir"]


def test_row_083_a_damaged_stream_in_bytes_is_refused(tmp_path: Path) -> None:
    inner = stream(Rebuilt(storage(), (4,)))
    for content in (inner[:-1], inner + b"x"):
        error = refused(stream(Made(torch.storage._load_from_bytes, (content,)), {}), tmp_path)
        assert isinstance(error, (Truncated, Corrupt))


def test_row_083_the_same_stream_opened_over_and_over(tmp_path: Path) -> None:
    content = stream([None] * 1000, {})
    call = pickled(torch.storage._load_from_bytes)[2:-1]
    value = (
        b"\x80\x04"
        + call
        + b"B"
        + struct.pack("<I", len(content))
        + content
        + b"\x9400("
        + b"h\x00h\x01\x85R" * 100_000
        + b"t."
    )
    begin = time.process_time()
    error = refused(stream(value, {}), tmp_path)
    assert isinstance(error, LimitExceeded) and time.process_time() - begin < 1


# Texts and bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [1, 2, 4, 5])
def test_long_values_that_belong_to_no_tensor_stay_values(protocol: int, tmp_path: Path) -> None:
    value = {"b": b"\xff" * 70_000, "t": "\xe9" * 70_000, "k" * 70_000: bytearray(b"\x80" * 100_000)}
    checkpoint = opened(stream(value, {}, protocol=protocol), tmp_path)
    assert checkpoint.tree == value and type(checkpoint.tree["k" * 70_000]) is bytearray


def test_a_key_given_twice_is_a_conflict(tmp_path: Path) -> None:
    latin1, utf8 = b"U\x01\xe9", b"U\x02\xc3\xa9"
    assert isinstance(refused(stream(b"\x80\x02}(" + latin1 + b"K\x01" + utf8 + b"K\x02u.", {}), tmp_path), Conflict)


def test_a_place_of_a_megabyte(tmp_path: Path) -> None:
    """HOSTILE 96: a location is a label, whatever its length."""
    entry = opened(stream(Rebuilt(storage(location="x" * 1_000_000), (4,))), tmp_path).tree
    assert entry.location == "x" * 1_000_000


def test_reading_is_the_same_through_any_buffer(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(SMALL, buffer, **LEGACY)
    assert_same_tree(opened(buffer.getvalue(), tmp_path), read(tmp_path / "legacy.pt"))
