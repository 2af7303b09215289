"""Files of other formats, and without one, that stock `torch.load` runs as pickles from their first byte."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.files import Source
from ckptool.errors import CkptoolError
from ckptool.pickles.decode import reaches_a_call
from tests.support.cli import Run

PROGRAM = b"cposix\nmkdir\n(V%b\ntR0"
# What stands before a program: values that are dropped again.
VALUES = (b"N0", b"K\x010", b"\x8c\x01a0", b"Vtext\n0", b"I7\n0", b")0", b"}0", b"\x880", b"G\0\0\0\0\0\0\0\0000",
          b"\x95\2\0\0\0\0\0\0\0N0", b"(lp0\n0", b"\x8a\1\0010", b"C\2ab0", b"X\1\0\0\0a0")  # fmt: skip


def runs(path: Path, mark: Path, *, as_stream: bool = False) -> bool:
    """Whether stock torch runs the program of the file, in a child."""
    child = os.fork()
    if not child:
        try:
            torch.load(io.BytesIO(path.read_bytes()) if as_stream else path, weights_only=False)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return mark.exists()


def disguised(folder: Path, dice: random.Random) -> Iterator[tuple[Path, Path, bool]]:
    """Each kind: a file, what its program makes, and whether torch only runs it from a stream."""
    for number, value in enumerate(VALUES):
        mark = folder / f"ran-{number}"
        head = b"".join(dice.choices(VALUES, k=dice.randrange(3))) + value
        path = folder / f"{number}.dat"
        path.write_bytes(head + PROGRAM % os.fsencode(mark) + b".")
        yield path, mark, False
    for number in range(3):  # V takes in the header of a safetensors file
        mark = folder / f"ran-safetensors-{number}"
        data = b"\n" + b"0" + PROGRAM % os.fsencode(mark)
        data = data.ljust(-(-len(data) // 4) * 4, b"\0")
        size = 0x56 + 256 * dice.randrange(1, 4)
        table = json.dumps({"w": {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [0, len(data)]}})
        path = folder / f"{number}.bin"
        path.write_bytes(struct.pack("<Q", size) + table.encode().ljust(size) + data)
        yield path, mark, False
    os.mkdir(short := Path("/tmp") / f"ckptool-{os.getpid()}")
    path, mark = folder / "old.tar", short / "t"
    with tarfile.open(path, "w") as tar:  # the name of its first member is a program
        for name in ((PROGRAM % os.fsencode(mark)).decode(), "storages", "tensors", "pickle"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    yield path, mark, True


def test_what_torch_runs_is_said(tmp_path: Path, run: Run) -> None:
    for path, mark, as_stream in disguised(tmp_path, random.Random(4)):
        assert runs(path, mark, as_stream=as_stream), path
        mark.rmdir()
        if mark.parent != tmp_path:
            mark.parent.rmdir()
        scanned = run("scan", path)
        assert scanned.code in (1, 2) and "nothing in it" not in scanned.out, path
        with pytest.raises(CkptoolError):
            ckptool.convert(path, tmp_path / "out.safetensors")
        assert not mark.exists()


def test_beside_weights_they_are_seen_whatever_they_are_called(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    for path, _, _ in disguised(tmp_path, random.Random(5)):
        if path.suffix == ".dat":
            found = ckptool.scan(tmp_path)
            (row,) = [row for row in found.files if row.path.endswith(path.name)]
            assert row.state != "good", row
        path.unlink()
    (Path("/tmp") / f"ckptool-{os.getpid()}").rmdir()


class Caller(pickle.Unpickler):
    """Python's own machine; what a program names is found, and calling it is kept."""

    called = False

    def find_class(self, module: str, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self.called = True

        return type("Named", (), {"__new__": call, "__setstate__": call})

    def persistent_load(self, pid: Any) -> Any:
        return None


class InMemory(InlineBytes):
    """A file's bytes, of its size."""

    size = InlineBytes.length


PARTS = (*VALUES, b"cos\nsystem\n", b"\x8c\2os\x8c\6system\x93", b"(ios\nsystem\n", b"\x85", b"\x94", b"q\0", b"h\0",
         b"\x8f", b"\x90", b"\x81", b"\x92", *(bytes([each]) for each in b"()Rob}suea02tQ"))  # fmt: skip


def test_a_call_that_pickle_makes_is_reached(tmp_path: Path) -> None:
    """Random programs, some with random bytes in them: none is walked without an end, and no call is overlooked."""
    dice, calls = random.Random(6), 0
    for _ in range(4000):
        parts = dice.choices(PARTS, k=dice.randrange(1, 14))
        if dice.random() < 0.3:
            parts.insert(dice.randrange(len(parts)), dice.randbytes(dice.randrange(1, 4)))
        program = b"".join(parts) + b"."
        machine = Caller(io.BytesIO(program))
        with contextlib.suppress(Exception):
            machine.load()
        calls += machine.called
        assert reaches_a_call(cast(Source, InMemory(program))) >= machine.called, program
    assert calls > 100
