"""The pickle of `.metadata`, as torch's own writer would make it, opcode by opcode.

There may be 400,000 chunks, so no tree of objects is made of them first. Equal sizes and names are written once.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`), torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from struct import pack
from typing import NamedTuple

from ckptool.checkpoint.dtypes import DType
from ckptool.pickles.encode import integer

VERSION = "1.0.0"
_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")


class SavedChunk(NamedTuple):
    """A block of a tensor (or an object, without sizes), and the file and range of bytes that it is in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(slots=True, eq=False)
class SavedValue:
    """A value as the table describes it; an object has no dtype and one chunk. path: its keys and indices."""

    path: tuple[str | int, ...]
    dtype: DType | None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    chunks: list[SavedChunk] = field(default_factory=list)


def table_pickle(values: Mapping[str, SavedValue]) -> bytes:
    """The pickle of a `Metadata` of these values, by their flat names."""
    out = _Pickle()
    out.new(_MODULE, "Metadata")
    out.raw += b"}("
    out.text("state_dict_metadata")
    out.raw += b"}"
    for name, value in values.items():
        out.text(name)
        _describe(out, value)
        out.raw += b"s"
    out.text("planner_data")
    out.raw += b"}"
    for name, value in values.items():
        out.text(name)
        out.raw += b"("
        for key in value.path:
            out.text(key) if isinstance(key, str) else out.number(key)
        out.raw += b"ts"
    out.text("storage_data")
    out.raw += b"}"
    for name, value in values.items():
        for index, chunk in enumerate(value.chunks):
            _place(out, name, index if value.dtype else None, chunk)
            out.raw += b"s"
    _rest(out)
    return bytes(out.raw)


def _describe(out: _Pickle, value: SavedValue) -> None:
    if value.dtype is None:
        out.new(_MODULE, "BytesStorageMetadata")
        return
    out.new(_MODULE, "TensorStorageMetadata")
    out.raw += b"}("
    out.text("properties")
    _properties(out, value.dtype, value.requires_grad)
    out.text("size")
    out.size(value.shape)
    out.text("chunks")
    out.raw += b"]("
    for chunk in value.chunks:
        out.new(_MODULE, "ChunkStorageMetadata")
        out.raw += b"}("
        out.text("offsets")
        out.size(chunk.offsets)
        out.text("sizes")
        out.size(chunk.sizes)
        out.raw += b"ub"
    out.raw += b"eub"


def _properties(out: _Pickle, dtype: DType, requires_grad: bool) -> None:
    """The `TensorProperties`: dtype, layout, requires_grad, memory format, pinned."""
    if out.recall(key := ("properties", dtype.name, requires_grad)):
        return
    out.new(_MODULE, "TensorProperties")
    out.raw += b"("
    out.name("torch", dtype.torch)
    out.name("torch.serialization", "_get_layout")
    out.text("torch.strided")
    out.raw += b"\x85R" + (b"\x88" if requires_grad else b"\x89")
    out.name(_MODULE, "_MEM_FORMAT_ENCODING")
    out.raw += b"K\x00\x85R\x89tb"
    out.keep(key)


def _place(out: _Pickle, name: str, index: int | None, chunk: SavedChunk) -> None:
    out.new(_MODULE, "MetadataIndex")
    out.raw += b"}("
    out.text("fqn")
    out.text(name)
    if index is not None:
        out.text("offset")
        out.size(chunk.offsets)
    out.text("index")
    out.raw += b"N" if index is None else integer(index)
    out.raw += b"ub"
    out.new(*_STORAGE_INFO)
    out.raw += b"}("
    out.text("relative_path")
    out.text(chunk.file)
    out.text("offset")
    out.number(chunk.begin)
    out.text("length")
    out.number(chunk.length)
    out.raw += b"ub"


def _rest(out: _Pickle) -> None:
    """What says nothing of the values: torch's own has a random number of the writer, and the path of the folder."""
    out.text("storage_meta")
    out.new(_MODULE, "StorageMeta")
    out.raw += b"}("
    for key in ("checkpoint_id", "save_id", "load_id"):
        out.text(key)
        out.raw += b"N"
    out.text("modules")
    out.raw += b"]ub"
    out.text("version")
    out.text(VERSION)
    out.raw += b"ub."


class _Pickle:
    """A pickle of protocol 2 in the making; what is said again is recalled."""

    def __init__(self) -> None:
        self.raw = bytearray(b"\x80\x02")
        self.recalls: dict[object, bytes] = {}

    def recall(self, key: object) -> bool:
        found = self.recalls.get(key)
        if found is not None:
            self.raw += found
        return found is not None

    def keep(self, key: object) -> None:
        """Memoizes what is on top of the stack under `key`."""
        number = pack("<I", len(self.recalls))
        self.raw += b"r" + number
        self.recalls[key] = b"j" + number

    def text(self, text: str) -> None:
        if not self.recall(text):
            encoded = text.encode("utf-8", "surrogatepass")
            self.raw += b"X" + pack("<I", len(encoded)) + encoded
            self.keep(text)

    def number(self, number: int) -> None:
        self.raw += integer(number)

    def name(self, module: str, name: str) -> None:
        if not self.recall((module, name)):
            self.raw += f"c{module}\n{name}\n".encode()
            self.keep((module, name))

    def new(self, module: str, name: str) -> None:
        """An object made without arguments."""
        self.name(module, name)
        self.raw += b")\x81"

    def size(self, sizes: Iterable[int]) -> None:
        """A `torch.Size`."""
        key = ("size", *sizes)
        if not self.recall(key):
            self.name("torch", "Size")
            self.raw += b"(" + b"".join(map(integer, sizes)) + b"t\x85R"
            self.keep(key)
