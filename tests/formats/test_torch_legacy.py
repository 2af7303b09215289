"""Legacy files: of every vector and producer against torch's own reader, of torch before 0.4 and of Python 2,
hostile ones, and streams inside of bytes, which are read to the second level."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint import FileRange
from ckptool.checkpoint.nodes import ByteString, Global, Object
from ckptool.errors import BadTensor, Corrupt, LimitExceeded, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import read, torch_zip
from ckptool.formats import torch_legacy as legacy
from ckptool.pickles.calls import uses_of
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.support.budget import meets_budget
from tests.support.files import carry_out, load, torch_bytes, written
from tests.support.legacy_streams import (
    INFO,
    INPUTS,
    LEGACY,
    SMALL,
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
    given = pickle_bytes((Pid(storage_id()), 1, (3,), (1,)))
    head, state = given[:2], given[2:-1]
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


ODD = ((True, False), (True, False, {"hook": 1}), ("yes", False, None), (Pid(storage_id()), 3, (4,), (1,)))


@pytest.mark.parametrize("state", [*ODD, 5, {"data": 1}], ids=str)
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
    found = {name: elements(entry) for name, entry in tree.items()}
    assert found == {"whole": [*range(8)], "front": [2, 3, 4, 5], "back": [5, 6, 7], "again": [5, 6, 7]}
    real = load(tmp_path / "legacy.pt", weights_only=False)
    assert {name: tensor.flatten().tolist() for name, tensor in real.items()} == found


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


def test_the_source_of_a_class_is_passed_over(tmp_path: Path) -> None:
    source = "class Net(Module):\n    raise SystemExit\n"
    cls = Pid(("module", torch.nn.Linear, "/home/me/net.py", source))
    other, file = (Pid(("module", *each, None)) for each in ((torch.nn.ReLU, None), (torch.nn.GELU, "gelu.py")))
    value = pickle_bytes({"model": cls, "other": other, "file": file})
    checkpoint = opened_legacy(stream(value, {}), tmp_path)
    assert checkpoint.tree["model"] is Global("torch.nn.modules.linear", "Linear")
    assert "sources" not in checkpoint.metadata


# Byte order -----------------------------------------------------------------------------------------------------------

BIG = {**INFO, "little_endian": False}


def test_what_torch_writes_on_a_big_endian_machine_is_little_endian(tmp_path: Path) -> None:
    """torch/csrc/serialization.cpp turns elements and counts when it writes there; torch here reads the same values."""
    checkpoint = opened_legacy(stream(Rebuilt(storage_id(), (4,)), info=BIG), tmp_path)
    assert elements(checkpoint.tree) == [0, 1, 2, 3] == load(tmp_path / "legacy.pt").tolist()


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


# Headers, keys, counts and views that do not fit ----------------------------------------------------------------------


def of(*ids: Any, sizes: tuple[int, ...] = (1,)) -> bytes:
    """A stream of tensors on these storages."""
    return stream([Rebuilt(each, sizes) for each in ids])


SIZES = INFO["type_sizes"]
# What is not as torch writes it: the error, words of it, the streams.
REFUSED: dict[tuple[Any, str], list[bytes]] = {
    (Corrupt, ""): [
        *(stream(Pid(pid)) for pid in ("text", 7, (), ("storage",), ("module", "not a class", None, None),
            ("module", torch.nn.Linear, 5, None), ("module", torch.nn.Linear),
            ("weights", torch.FloatStorage, "1", "cpu", 4, None), storage_id(kind="FloatStorage"), storage_id(key=1),
            storage_id(location=None), storage_id(numel=4.0), storage_id()[:5])),
        stream(b"Pstorage\n.", {}),  # of protocol 0
        # A storage described in two ways; the last of as many bytes.
        *(of(storage_id(), other) for other in (storage_id(kind=torch.DoubleStorage), storage_id(numel=5),
            storage_id(location="cuda:0"), storage_id(kind=torch.ByteStorage, numel=16))),
        of(storage_id(kind=torch.ByteStorage), storage_id(kind=torch.UntypedStorage, numel=5)),
        of(storage_id("1", 4, ("2", 0, 3)), storage_id("1", 4, ("2", 1, 3))),
    ],
    (Unsupported, "Linear"): [of(storage_id(kind=torch.nn.Linear))],
    (Unsupported, "FloatTensor"): [of(storage_id(kind=torch.FloatTensor))],
    (Unsupported, "outside of a tensor"): [stream(Pid(storage_id("1", 4, ("2", 0, 4))))],
    ((Truncated, Corrupt), ""): [of(storage_id(numel=1 << 62))],
    (BadTensor, ""): [
        *(of(storage_id(numel=-1), sizes=(0,)), of(storage_id(), sizes=(5,))),
        *(of(storage_id(view=view)) for view in (("2", 2, 3), ("2", -1, 2), ("2", 0, -1), ("2", 1 << 62, 1),
            ("2", 0.0, 1), (2, 0, 1), ("2", 0), "2", ("1", 0, 4))),  # outside its storage
        of(storage_id("1", 4, ("2", 0, 4)), storage_id("2", 4, ("1", 0, 4))),  # in a cycle
        # It would lie inside of the root, but not of the part that the file gives it.
        of(storage_id("1", 4, ("2", 0, 2)), sizes=(3,)),
    ],
    (NotACheckpoint, "magic number"): [
        stream({}, {}, magic=magic) for magic in (0, -1, 1 << 77, "magic", None, [0x1950A86A20F9469CFC6C])],
    (Corrupt, "version"): [
        stream({}, {}, version=version) for version in (1000, 1002, -1, None, "1001", True, 1001.0, [1001])],
    (Corrupt, "machine"): [
        *(stream({}, {}, info=info) for info in ({}, [], None, INFO | {"little_endian": 1},
            INFO | {"little_endian": None}, INFO | {"protocol_version": 1000})),
        *(stream({}, {}, info=INFO | {"type_sizes": sizes}) for sizes in (None, SIZES | {"long": 1 << 40},
            SIZES | {"short": 1}, {"short": 2, "int": 4}, SIZES | {"long": []}))],
    (Corrupt, "list of storages"): [
        stream(Rebuilt(storage_id(), (4,)), keys=b"N." if keys is None else keys)
        for keys in (["1", "2"], [], ["1", "1"], ["2"], None, "1", {"1": 1}, [1], [["1"]], [None])],
    (Corrupt, "4 elements"): [
        stream(Rebuilt(storage_id(), (4,)), {"1": struct.pack("<q", numel) + bytes(16)})
        for numel in (3, 5, 0, -4, 1 << 40, 4 << 56)],
}  # fmt: skip


@looped(("data", "kind", "words"), [(data, *told) for told, each in REFUSED.items() for data in each])
def test_what_torch_does_not_write_is_refused_as_what_it_is(data: bytes, kind: Any, words: str, tmp_path: Path) -> None:
    error = legacy_refused(data, tmp_path)
    assert isinstance(error, kind) and words in error.what


def test_what_torch_writes_in_front_is_known_at_sight() -> None:
    data = torch_bytes(SMALL, **LEGACY)
    assert data.startswith(legacy._USUAL) and b"".join(map(pickle_bytes, (legacy.MAGIC, 1001, INFO))) == legacy._USUAL


def test_twenty_thousand_extra_keys_are_refused_within_a_second(tmp_path: Path) -> None:
    with soon(1):
        legacy_refused(stream(Rebuilt(storage_id(), (4,)), keys=["1", *map(str, range(20_000)), "7"] * 2), tmp_path)


def test_bytes_after_the_last_storage_are_noted(tmp_path: Path) -> None:
    checkpoint = opened_legacy(stream(Rebuilt(storage_id(), (4,))) + b"more bytes", tmp_path)
    note = next(note for note in checkpoint.notes if note.code == "trailing-bytes")
    assert "10 bytes" in note.message and elements(checkpoint.tree) == [0, 1, 2, 3]


# Streams inside of bytes ----------------------------------------------------------------------------------------------


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
    checkpoint = opened_legacy(data, tmp_path)
    assert {n: e.shape for n, e in checkpoint.tree.items()} == {n: tuple(t.shape) for n, t in value.items()}
    if protocol > 2:  # protocol 2 spells bytes as text
        assert isinstance(checkpoint.tree["large"].storage.data, FileRange)
    assert not list(uses_of(checkpoint))
    out = carry_out(torch_zip.write(checkpoint), tmp_path / "out.pt")
    again = load(out)
    assert all(torch.equal(again[name], tensor) for name, tensor in value.items())


def test_tensors_in_bytes_in_a_zip(tmp_path: Path) -> None:
    data = stream({"a": Rebuilt(storage_id(), (4,))})
    inner = Made(torch.storage._load_from_bytes, (data,))
    file = written(torch_bytes({"inner": inner}), tmp_path / "a.pt")
    checkpoint = read(file)
    assert checkpoint.container == "torch-zip" and elements(checkpoint.tree["inner"]["a"]) == [0, 1, 2, 3]


def test_streams_nested_three_deep_exceed_the_limit(tmp_path: Path) -> None:
    inner = stream(Rebuilt(storage_id(), (4,)))
    tree = opened_legacy(stream(nested(inner, 2), {}), tmp_path).tree
    assert elements(tree) == [0, 1, 2, 3]
    error = legacy_refused(stream(nested(inner, 3), {}), tmp_path)
    assert isinstance(error, LimitExceeded) and "nested" in error.what


def test_bytes_that_are_no_stream_stay_a_call(tmp_path: Path) -> None:
    for content in (b"", b"\x80\x02.", pickle.dumps({"a": 1}), b"PK\x03\x04"):
        checkpoint = opened_legacy(stream(Made(torch.storage._load_from_bytes, (content,)), {}), tmp_path)
        assert isinstance(checkpoint.tree, Object) and checkpoint.tree.args == (content,)
        assert [use.name for use, _ in uses_of(checkpoint)] == ["torch.storage._load_from_bytes"]


def test_a_call_hidden_in_a_nested_stream_is_named(tmp_path: Path) -> None:
    thrown_away = b"\x80\x02cos\nmkdir\n(X\x01\0\0\0xtR0N."
    checkpoint = opened_legacy(stream(Made(torch.storage._load_from_bytes, (stream(thrown_away, {}),)), {}), tmp_path)
    assert [use.name for use, _ in uses_of(checkpoint)] == ["torch.storage._load_from_bytes"]
    kept = b"\x80\x02cos\nmkdir\n(X\x01\0\0\0xtR."
    checkpoint = opened_legacy(stream(Made(torch.storage._load_from_bytes, (stream(kept, {}),)), {}), tmp_path)
    assert [use.name for use, _ in uses_of(checkpoint)] == ["os.mkdir"]


def test_a_damaged_nested_stream_is_refused(tmp_path: Path) -> None:
    inner = stream(Rebuilt(storage_id(), (4,)))
    for content in (inner[:-1], inner + b"x"):
        error = legacy_refused(stream(Made(torch.storage._load_from_bytes, (content,)), {}), tmp_path)
        assert isinstance(error, (Truncated, Corrupt))


def test_one_nested_stream_used_many_times_exceeds_the_limit_quickly(tmp_path: Path) -> None:
    content = stream([None] * 1000, {})
    call = pickle_bytes(torch.storage._load_from_bytes)[2:-1]
    value = b"\x80\x04" + call + b"B" + struct.pack("<I", len(content)) + content
    value += b"\x9400(" + b"h\x00h\x01\x85R" * 100_000 + b"t."
    with soon(1):
        error = legacy_refused(stream(value, {}), tmp_path)
    assert isinstance(error, LimitExceeded)


# What costs little ----------------------------------------------------------------------------------------------------


@looped(("name", "contents"), INPUTS.items(), here=45)
def test_what_is_hostile_costs_little(name: str, contents: bytes | Callable[[], bytes]) -> None:
    outcome = meets_budget(contents() if callable(contents) else contents, ".tar" if name.startswith("tar") else ".pt")
    assert outcome.code or ("torch-tar" if name.startswith("tar") else "torch-legacy") in outcome.text
