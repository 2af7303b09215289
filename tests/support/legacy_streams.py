"""Legacy streams made by hand: each of the five pickles and each number can be another than torch would write."""

import io
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.errors import CkptoolError
from ckptool.formats import read
from tests.support.errors import three_parts, unreadable
from tests.support.files import written

MAGIC = 0x1950A86A20F9469CFC6C
INFO = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


@dataclass(frozen=True, eq=False)
class Pid:
    """Stands in a value for what a persistent id stands for."""

    pid: Any


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """A tensor as torch pickles it, of a storage given by its persistent id."""

    pid: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    offset: int = 0

    def __reduce__(self) -> Any:
        args = (Pid(self.pid), self.offset, self.shape, self.stride, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, args


@dataclass(frozen=True, eq=False)
class Made:
    """A call in a pickle: `fn(*args)`, and the state that its result is given."""

    fn: Any
    args: tuple[Any, ...]
    state: Any = None

    def __reduce__(self) -> Any:
        return (self.fn, self.args) if self.state is None else (self.fn, self.args, self.state)


class Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Pid) else None


def pickle_bytes(value: Any, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    Writer(out, protocol).dump(value)
    return out.getvalue()


def storage_id(key: str = "1", numel: int = 4, view: Any = None, **changes: Any) -> tuple[Any, ...]:
    """A persistent id as torch writes it."""
    parts = {"tag": "storage", "kind": torch.FloatStorage, "key": key, "location": "cpu", "numel": numel, "view": view}
    return tuple((parts | changes).values())


def block(values: bytes, numel: int, order: str = "<") -> bytes:
    """A storage's data behind its number of elements."""
    return struct.pack(f"{order}q", numel) + values


def floats(*values: float, order: str = "<") -> bytes:
    return block(struct.pack(f"{order}{len(values)}f", *values), len(values), order)


def stream(
    value: Any,
    blocks: dict[Any, bytes] | None = None,
    *,
    magic: Any = MAGIC,
    version: Any = 1001,
    info: Any = INFO,
    keys: Any = None,
    protocol: int = 2,
) -> bytes:
    """A stream of a value and its storages. What is given as bytes is taken as a pickle."""
    blocks = {"1": floats(0, 1, 2, 3)} if blocks is None else blocks
    keys = list(blocks) if keys is None else keys
    parts = [
        part if type(part) is bytes else pickle_bytes(part, protocol) for part in (magic, version, info, value, keys)
    ]
    return b"".join((*parts, *blocks.values()))


# Old files opened -----------------------------------------------------------------------------------------------------


LEGACY: dict[str, Any] = {"_use_new_zipfile_serialization": False}


def opened_legacy(data: bytes, folder: Path, name: str = "legacy.pt", container: str = "torch-legacy") -> Checkpoint:
    checkpoint = read(written(data, folder / name))
    assert checkpoint.container == container
    return checkpoint


def opened_tar(data: bytes, folder: Path) -> Checkpoint:
    return opened_legacy(data, folder, "old.pth.tar", "torch-tar")


def legacy_refused(data: bytes, folder: Path, name: str = "legacy.pt") -> CkptoolError:
    three_parts(error := unreadable(written(data, folder / name)))
    return error


def tar_refused(data: bytes, folder: Path) -> CkptoolError:
    return legacy_refused(data, folder, "old.pth.tar")


def elements(entry: Any) -> list[Any]:
    assert isinstance(entry, TensorEntry)
    return list(entry.numpy().reshape(-1).tolist())


SMALL = {"weight": torch.tensor([1.5, -2.0, 3.25]), "n": torch.tensor([7, 9]), "epoch": 3}
