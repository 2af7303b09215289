"""Checkpoints written for tests, by torch and by ckptool, and opened again."""

import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ckptool.checkpoint import Checkpoint, Flags, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.dtypes import BY_TORCH
from ckptool.formats import read, torch_zip
from ckptool.output.sink import Sink


def written(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder, and in those below, by its path from there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def torch_bytes(value: Any, **options: Any) -> bytes:
    """What `torch.save` writes, as if into a file called `archive.pt`."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, buffer, **options)
    return buffer.getvalue()


def saved(value: Any, path: Path, **options: Any) -> Path:
    """The path, at which torch has saved `value`."""
    return written(torch_bytes(value, **options), path)


def opened(value: Any, folder: Path) -> Checkpoint:
    """What ckptool reads of a file in `folder` that torch has saved `value` to."""
    return read(saved(value, folder / "opened.pt"))


def weights(*names: str) -> dict[str, torch.Tensor]:
    """A dictionary of tensors, each with values of its own."""
    return {name: torch.arange(6, dtype=torch.float32).reshape(2, 3) + 10 * number for number, name in enumerate(names)}


def load(path: Path, **options: Any) -> Any:
    """`torch.load` on the CPU, without the warnings of features that are going away."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", **{"weights_only": True} | options)


def carry_out(plan: Plan, path: Path) -> Path:
    """Executes a plan of one new file, without the care that a user's file needs."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        Sink(fd, 0, plan.nbytes, None).write(plan.files[""], plan.checks)
    finally:
        os.close(fd)
    assert path.stat().st_size == plan.nbytes
    return path


def rewritten(path: Path, out: Path, **options: Any) -> Checkpoint:
    """`path` read, written to `out` as a torch zip, and read again."""
    carry_out(torch_zip.write(read(path), **options), out)
    return read(out)


CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"


def entry_of(tensor: torch.Tensor) -> TensorEntry:
    dtype = BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
    storage = Storage(InlineBytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()))
    flags = Flags(conj=tensor.is_conj(), neg=tensor.is_neg())
    return TensorEntry(storage, dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), flags)
