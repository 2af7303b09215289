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
from ckptool.checkpoint.nodes import Object
from ckptool.errors import BadTensor, Corrupt, LimitExceeded, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import read, torch_zip
from ckptool.pickles.calls import uses_of
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.support.budget import meets_budget
from tests.support.files import carry_out, load, torch_bytes, written
from tests.support.legacy_streams import (
    INFO,
    INPUTS,
    LEGACY,
    Made,
    Pid,
    Rebuilt,
    elements,
    legacy_refused,
    opened_legacy,
    pickle_bytes,
    storage_id,
    stream,
)
from tests.support.looped import looped
from tests.support.processes import soon
from tests.support.same import assert_same_objects, assert_same_tree

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


def test_twenty_thousand_extra_keys_are_refused_within_a_second(tmp_path: Path) -> None:
    with soon(1):
        legacy_refused(stream(Rebuilt(storage_id(), (4,)), keys=["1", *map(str, range(20_000)), "7"] * 2), tmp_path)


# Streams inside of bytes ----------------------------------------------------------------------------------------------


def nested(value: Any, levels: int) -> Any:
    """A value in a stream in bytes, in a stream in bytes, …"""
    for _ in range(levels):
        value = Made(torch.storage._load_from_bytes, (value if type(value) is bytes else stream(value, {}),))
    return value


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
