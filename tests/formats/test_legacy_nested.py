"""Legacy streams inside of bytes, as torch pickles tensors by themselves: read to the second level, and no further."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.checkpoint import FileRange
from ckptool.checkpoint.nodes import Object
from ckptool.errors import Corrupt, LimitExceeded, Truncated
from ckptool.formats import read, torch_zip
from ckptool.pickles.calls import uses_of
from tests.support.files import carry_out, load, torch_bytes, written
from tests.support.legacy_streams import (
    Made,
    Rebuilt,
    elements,
    legacy_refused,
    opened_legacy,
    pickle_bytes,
    storage_id,
    stream,
)
from tests.support.processes import soon


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
    assert {name: entry.shape for name, entry in checkpoint.tree.items()} == {
        "small": (4,),
        "large": (1 << 17,),
        "odd": (200_000,),
    }
    if protocol > 2:  # protocol 2 spells bytes as text
        assert isinstance(checkpoint.tree["large"].storage.data, FileRange)
    assert not list(uses_of(checkpoint))
    out = carry_out(torch_zip.write(checkpoint), tmp_path / "out.pt")
    again = load(out)
    assert all(torch.equal(again[name], tensor) for name, tensor in value.items())


def test_tensors_in_bytes_in_a_zip(tmp_path: Path) -> None:
    class Hidden:
        def __reduce__(self) -> Any:
            return pickle.loads, (b"",)

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
    with soon(1):
        error = legacy_refused(stream(value, {}), tmp_path)
    assert isinstance(error, LimitExceeded)
