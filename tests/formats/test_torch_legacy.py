"""Legacy files: those of every vector and producer against torch's own reader, and those of torch before 0.4 and of
Python 2."""

from __future__ import annotations

import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint import FileRange
from ckptool.checkpoint.nodes import ByteString, Global
from ckptool.errors import Corrupt
from ckptool.formats import read, torch_zip
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.support.files import carry_out, load, torch_bytes, written
from tests.support.legacy_streams import (
    INFO,
    LEGACY,
    Made,
    Pid,
    Rebuilt,
    elements,
    floats,
    legacy_refused,
    opened_legacy,
    pickle_bytes,
    storage_id,
    stream,
)
from tests.support.looped import looped
from tests.support.processes import soon
from tests.support.same import assert_same_objects, assert_same_tree

FIXTURES = Path(__file__).parents[2] / "fixtures"


# Against torch --------------------------------------------------------------------------------------------------------

PROTOCOL_OF = {name: (1, 2, 3, 4, 5)[number % 5] for number, name in enumerate(TRAPS)}


@looped("name", TRAPS, here=1 / 3)
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
    with soon(3):
        assert len(read(file).tree) == 5_000


# Older than any torch that installs -----------------------------------------------------------------------------------


RECONSTRUCTED = b"ccopy_reg\n_reconstructor\n(ctorch\nFloatTensor\nc__builtin__\nobject\nNtR"


NEWOBJ = b"ccopy_reg\n__newobj__\n(ctorch\nFloatTensor\ntR"


@pytest.mark.parametrize("spelled", [RECONSTRUCTED, NEWOBJ, b"ctorch\nFloatTensor\n)\x81", b"(ctorch\nFloatTensor\no"])
def test_tensors_given_a_state_in_other_spellings(spelled: bytes, tmp_path: Path) -> None:
    head, state = (
        pickle_bytes((Pid(storage_id()), 1, (3,), (1,)))[:2],
        pickle_bytes((Pid(storage_id()), 1, (3,), (1,)))[2:-1],
    )
    # The same tensor twice: it was stored before its state.
    value = head + b"]q\xf0(" + spelled + b"q\xf1" + state + b"bh\xf1e."
    first, second = opened_legacy(stream(value), tmp_path).tree
    assert first is second and elements(first) == [1, 2, 3]


def test_gradients_inside_of_parameters_are_told(tmp_path: Path) -> None:
    """Later torches do not read them either; whoever rewrites the file is told."""
    data, gradient = (Made(torch._utils._rebuild_tensor, (Pid(storage_id()), 0, (4,), (1,))) for _ in range(2))
    value = {name: Made(torch.nn.Parameter, (), (data, gradient, OrderedDict(), True, False)) for name in ("a", "b")}
    path = written(stream(value), tmp_path / "old.pt")
    assert [note.message.split(",")[0] for note in read(path).notes if note.code == "old-gradients"] == [
        "2 gradients inside of parameters"
    ]
    done = ckptool.convert(path, tmp_path / "new.pt", all=True, verify=True)
    assert "old-gradients" in [note.code for note in done.notes]
    assert torch.load(tmp_path / "new.pt")["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "state",
    [
        (True, False),
        (True, False, {"hook": 1}),
        ("yes", False, None),
        (Pid(storage_id()), 3, (4,), (1,)),
        5,
        {"data": 1},
    ],
    ids=str,
)
def test_a_parameter_with_an_odd_state_is_corrupt(state: Any, tmp_path: Path) -> None:
    data = Made(torch._utils._rebuild_tensor, (Pid(storage_id()), 0, (4,), (1,)))
    assert isinstance(legacy_refused(stream(Made(torch.nn.Parameter, (data,), state)), tmp_path), Corrupt)


def test_views_share_the_storage_that_they_are_of(tmp_path: Path) -> None:
    pids = {name: storage_id("1", 8, (name, begin, size)) for name, begin, size in (("2", 2, 4), ("3", 4, 4))}
    value = {
        "whole": Rebuilt(storage_id("1", 8), (8,)),
        "front": Rebuilt(pids["2"], (2, 2), (2, 1)),
        "back": Rebuilt(pids["3"], (3,), (1,), 1),
        "again": Rebuilt(pids["3"], (3,), (1,), 1),
    }
    tree = opened_legacy(stream(value, {"1": floats(*range(8))}), tmp_path).tree
    assert len({id(entry.storage) for entry in tree.values()}) == 1
    assert {name: elements(entry) for name, entry in tree.items()} == {
        "whole": [0, 1, 2, 3, 4, 5, 6, 7],
        "front": [2, 3, 4, 5],
        "back": [5, 6, 7],
        "again": [5, 6, 7],
    }
    real = load(tmp_path / "legacy.pt", weights_only=False)
    assert {name: tensor.flatten().tolist() for name, tensor in real.items()} == {
        name: elements(entry) for name, entry in tree.items()
    }


# Python 2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [1, 2])
def test_files_of_python_2_are_read(protocol: int) -> None:
    """Keys and texts that are bytes; made with Python 2.7.18 by fixtures/make_python2.py."""
    checkpoint = read(FIXTURES / f"python-2.7-protocol-{protocol}.pt")
    tree = checkpoint.tree
    assert list(tree) == ["weight", "bias", "epoch", "big", "caf\xe9", "text", "utf-8", "names", "nested"]
    assert elements(tree["weight"]) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5] and tree["weight"].shape == (2, 3)
    assert elements(tree["bias"]) == [0.5, 1.0] and tree["bias"].storage is tree["weight"].storage
    assert tree["epoch"] == 7 and tree["big"] == 1 << 70
    assert tree["text"] == ByteString(b"na\xefve") and tree["utf-8"] == "na\xefve" and tree["names"] == ["a", "b"]
    assert tree["nested"] == {"lr": 0.1, "on": True}
    note = next(note for note in checkpoint.notes if note.code == "python2-text")
    assert "2 texts" in note.message
    real = load(FIXTURES / f"python-2.7-protocol-{protocol}.pt", weights_only=False, encoding="latin1")
    assert list(real) == list(tree) and torch.equal(real["weight"], torch.arange(6).reshape(2, 3) / 2)


def test_a_persistent_id_in_bytes(tmp_path: Path) -> None:
    """What `encoding="bytes"` and Python 2 leave: the words of a persistent id are bytes."""
    pid = storage_id(tag=b"storage", key=b"1", location=b"cpu")
    entry = opened_legacy(stream(Rebuilt(pid, (4,)), keys=[b"1"], protocol=3), tmp_path).tree
    assert elements(entry) == [0, 1, 2, 3] and entry.location == "cpu"


# Whole modules --------------------------------------------------------------------------------------------------------


def test_the_source_of_a_class_is_kept_as_text(tmp_path: Path) -> None:
    source = "class Net(Module):\n    raise SystemExit\n"
    cls = Pid(("module", torch.nn.Linear, "/home/me/net.py", source))
    value = pickle_bytes(
        {
            "model": cls,
            "other": Pid(("module", torch.nn.ReLU, None, None)),
            "file": Pid(("module", torch.nn.GELU, "gelu.py", None)),
        }
    )
    checkpoint = opened_legacy(stream(value, {}), tmp_path)
    assert checkpoint.tree["model"] is Global("torch.nn.modules.linear", "Linear")
    assert checkpoint.metadata["sources"] == {
        "torch.nn.modules.linear.Linear": {"file": "/home/me/net.py", "source": source},
        "torch.nn.modules.activation.GELU": {"file": "gelu.py", "source": None},
    }
    assert "class-source" in {note.code for note in checkpoint.notes}


# Byte order -----------------------------------------------------------------------------------------------------------

BIG = {**INFO, "little_endian": False}


def test_what_torch_writes_on_a_big_endian_machine_is_little_endian(tmp_path: Path) -> None:
    """torch/csrc/serialization.cpp turns elements and counts when it writes there; torch here reads the same values."""
    checkpoint = opened_legacy(stream(Rebuilt(storage_id(), (4,)), info=BIG), tmp_path)
    assert elements(checkpoint.tree) == [0, 1, 2, 3] == load(tmp_path / "legacy.pt").tolist()
    assert "little-endian" in next(note.message for note in checkpoint.notes if note.code == "big-endian")


def test_big_endian_numbers_are_refused(tmp_path: Path) -> None:
    value = [Rebuilt(storage_id("1", 2), (2,)), Rebuilt(storage_id("2", 2), (2,))]
    for first, second in ("<>", "><", ">>"):
        data = stream(value, {"1": floats(1, 2, order=first), "2": floats(3, 4, order=second)}, info=BIG)
        assert isinstance(legacy_refused(data, tmp_path), Corrupt)


# Texts and bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [1, 2, 4, 5])
def test_long_values_that_belong_to_no_tensor_stay_values(protocol: int, tmp_path: Path) -> None:
    value = {"b": b"\xff" * 70_000, "t": "\xe9" * 70_000, "k" * 70_000: bytearray(b"\x80" * 100_000)}
    checkpoint = opened_legacy(stream(value, {}, protocol=protocol), tmp_path)
    assert checkpoint.tree == value and type(checkpoint.tree["k" * 70_000]) is bytearray


def test_a_place_of_a_megabyte(tmp_path: Path) -> None:
    """HOSTILE 96: a location is a label, whatever its length."""
    entry = opened_legacy(stream(Rebuilt(storage_id(location="x" * 1_000_000), (4,))), tmp_path).tree
    assert entry.location == "x" * 1_000_000
