"""Legacy files that nobody should send: what stands in front of the data, keys, counts and views that do not fit, and
damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

from ckptool.errors import BadTensor, Corrupt, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import torch_legacy as legacy
from tests.support.files import torch_bytes
from tests.support.legacy_streams import (
    INFO,
    LEGACY,
    SMALL,
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


def of(*ids: Any, sizes: tuple[int, ...] = (1,)) -> bytes:
    """A stream of tensors on these storages."""
    return stream([Rebuilt(each, sizes) for each in ids])


SIZES = INFO["type_sizes"]
# What is not as torch writes it: the stream, the error, words of it.
REFUSED: list[tuple[bytes, Any, str]] = [
    *[
        (stream(Pid(pid)), Corrupt, "")
        for pid in (
            "text",
            7,
            (),
            ("storage",),
            ("module", "not a class", None, None),
            ("module", torch.nn.Linear, 5, None),
            ("module", torch.nn.Linear),
            ("weights", torch.FloatStorage, "1", "cpu", 4, None),
            storage_id(kind="FloatStorage"),
            storage_id(key=1),
            storage_id(location=None),
            storage_id(numel=4.0),
            storage_id()[:5],
        )
    ],
    (stream(b"Pstorage\n.", {}), Corrupt, ""),  # of protocol 0
    *[(of(storage_id(kind=kind)), Unsupported, kind.__name__) for kind in (torch.nn.Linear, torch.FloatTensor)],
    *[
        (of(storage_id(), other), Corrupt, "")  # a storage described in two ways
        for other in (
            *(storage_id(kind=torch.DoubleStorage), storage_id(numel=5), storage_id(location="cuda:0")),
            storage_id(kind=torch.ByteStorage, numel=16),  # as many bytes
        )
    ],
    (of(storage_id(kind=torch.ByteStorage), storage_id(kind=torch.UntypedStorage, numel=5)), Corrupt, ""),
    (of(storage_id(numel=-1), sizes=(0,)), BadTensor, ""),
    (of(storage_id(numel=1 << 62)), (Truncated, Corrupt), ""),
    (of(storage_id(), sizes=(5,)), BadTensor, ""),
    *[
        (stream({}, {}, magic=magic), NotACheckpoint, "magic number")
        for magic in (0, -1, 1 << 77, "magic", None, [0x1950A86A20F9469CFC6C])
    ],
    *[
        (stream({}, {}, version=version), Corrupt, "version")
        for version in (1000, 1002, -1, None, "1001", True, 1001.0, [1001])
    ],
    *[
        (stream({}, {}, info=info), Corrupt, "machine")
        for info in (
            {},
            [],
            None,
            INFO | {"little_endian": 1},
            INFO | {"little_endian": None},
            INFO | {"protocol_version": 1000},
            *[INFO | {"type_sizes": sizes} for sizes in (None, SIZES | {"long": 1 << 40}, SIZES | {"short": 1})],
            *[INFO | {"type_sizes": sizes} for sizes in ({"short": 2, "int": 4}, SIZES | {"long": []})],
        )
    ],
    *[
        (stream(Rebuilt(storage_id(), (4,)), keys=b"N." if keys is None else keys), Corrupt, "list of storages")
        for keys in (["1", "2"], [], ["1", "1"], ["2"], None, "1", {"1": 1}, [1], [["1"]], [None])
    ],
    *[
        (stream(Rebuilt(storage_id(), (4,)), {"1": struct.pack("<q", numel) + bytes(16)}), Corrupt, "4 elements")
        for numel in (3, 5, 0, -4, 1 << 40, 4 << 56)
    ],
    *[
        (of(storage_id(view=view)), BadTensor, "")  # outside of its storage
        for view in (
            *(("2", 2, 3), ("2", -1, 2), ("2", 0, -1), ("2", 1 << 62, 1), ("2", 0.0, 1)),
            *((2, 0, 1), ("2", 0), "2", ("1", 0, 4)),
        )
    ],
    (of(storage_id("1", 4, ("2", 0, 4)), storage_id("2", 4, ("1", 0, 4))), BadTensor, ""),  # in a cycle
    (of(storage_id("1", 4, ("2", 0, 3)), storage_id("1", 4, ("2", 1, 3))), Corrupt, ""),  # in two ways
    (stream(Pid(storage_id("1", 4, ("2", 0, 4)))), Unsupported, "by itself"),
    # It would lie inside of the root, but not of the part that the file gives it.
    (of(storage_id("1", 4, ("2", 0, 2)), sizes=(3,)), BadTensor, ""),
]


@looped("row", REFUSED)
def test_what_torch_does_not_write_is_refused_as_what_it_is(row: tuple[bytes, Any, str], tmp_path: Path) -> None:
    data, kind, words = row
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
