"""Files that somebody changes while a checkpoint of them is open: never new values for old, nor called damaged."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save

import ckptool
from ckptool.errors import FileChanged


def content(kind: str, seed: int, rows: int = 64) -> bytes:
    """A file of two tensors, as its own library writes it."""
    numbers, stream = torch.Generator().manual_seed(seed), io.BytesIO()
    state = {"a": torch.randn(rows, 4, generator=numbers), "b": torch.randn(3, generator=numbers)}
    if kind == "safetensors":
        return save(state)
    if kind.startswith("npz"):
        write: Any = numpy.savez_compressed if kind == "npz, compressed" else numpy.savez
        write(stream, **{name: tensor.numpy() for name, tensor in state.items()})
    else:
        torch.save(state, stream, _use_new_zipfile_serialization=kind == "zip")
    return stream.getvalue()


CHANGES: dict[str, Callable[[Path, str], Any]] = {
    "other values": lambda path, kind: path.write_bytes(content(kind, 2)),
    "other shapes": lambda path, kind: path.write_bytes(content(kind, 3, 100)),
    "cut": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "something else": lambda path, _: path.write_bytes(b"something else" * 200),
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(64, 4)), torch.nn.Parameter(torch.zeros(3))


ZEROS = {"a": torch.zeros(64, 4), "b": torch.zeros(3)}
READS: dict[str, Callable[[Any, Path], Any]] = {
    "numpy": lambda ckpt, _: ckpt["a"].numpy(),
    "bytes": lambda ckpt, _: ckpt["a"].bytes(),
    "torch": lambda ckpt, _: ckpt["a"].torch(),
    "a slice": lambda ckpt, _: ckpt["a"][3:5],
    "a cast": lambda ckpt, _: ckpt["a"].to("bf16")[0],
    "load": lambda ckpt, _: ckptool.load(ckpt),
    "load a copy": lambda ckpt, _: ckptool.load(ckpt, mmap=False),
    "load_into": lambda ckpt, _: ckptool.load_into(Model(), ckpt),
    "save": lambda ckpt, out: ckptool.save(ckpt, out / "o.safetensors"),
    "verify": lambda ckpt, _: ckptool.verify(ckpt, finite=True),
    "diff": lambda ckpt, _: ckptool.diff(ckpt, ZEROS),
    "statistics": lambda ckpt, _: ckptool.inspect(ckpt, stats=True),
    "cast": lambda ckpt, out: ckptool.cast(ckpt, out / "o.pt", dtype="f16", verify=True),
}


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "npz", "npz, compressed"])
def test_a_changed_file(kind: str, tmp_path: Path) -> None:
    path, out, wrong = tmp_path / "a.bin", tmp_path / "out", []
    out.mkdir()
    for how, change in CHANGES.items():
        for name, read in READS.items():
            path.write_bytes(content(kind, 1))
            with ckptool.open(path) as ckpt:
                change(path, kind)
                try:
                    wrong.append((how, name, str(read(ckpt, out))[:80]))
                except FileChanged:
                    pass
                except Exception as error:  # noqa: BLE001
                    wrong.append((how, name, repr(error)[:80]))
    assert not wrong and not list(out.iterdir())


def test_a_file_that_lost_its_name_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "a.pt").write_bytes(content("zip", 1))
    expected, ckpt = torch.load(path), ckptool.open(path)
    (new := tmp_path / "b.pt").write_bytes(content("zip", 2))
    new.replace(path)
    assert torch.equal(ckpt["a"].torch(), expected["a"]) and ckptool.verify(ckpt).fine
