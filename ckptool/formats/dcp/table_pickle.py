"""The pickle of `.metadata`, as torch's own writer would make it, opcode by opcode.

There may be 400,000 chunks, so no tree of objects is made of them first. Equal sizes and names are written once.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`), torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import pack

from ckptool.checkpoint.dtypes import DType
from ckptool.formats.dcp.tables import Saved
from ckptool.pickles.encode import integer

VERSION = "1.0.0"
_MODULE = "torch.distributed.checkpoint.metadata"
_Field = str | int | tuple[int, ...] | None


def table_pickle(values: Mapping[str, Saved]) -> bytes:
    """The pickle of a `Metadata` of these values, by their flat names."""
    out = _Pickle()
    out.begin("Metadata")
    out.value("state_dict_metadata")
    out.raw += b"}"
    for name, value in values.items():
        out.value(name)
        if value.dtype is None:
            out.new("BytesStorageMetadata")
        else:
            out.begin("TensorStorageMetadata")
            out.value("properties")
            out.properties(value.dtype, value.requires_grad)
            out.value("size")
            out.value(value.shape)
            out.value("chunks")
            out.raw += b"]("
            for chunk in value.chunks:
                out.new("ChunkStorageMetadata", offsets=chunk.offsets, sizes=chunk.sizes)
            out.raw += b"eub"
        out.raw += b"s"
    out.value("planner_data")
    out.raw += b"}"
    for name, value in values.items():
        out.value(name)
        out.raw += b"("
        for key in value.path:
            out.value(key)
        out.raw += b"ts"
    out.value("storage_data")
    out.raw += b"}"
    for name, value in values.items():
        for number, chunk in enumerate(value.chunks):
            if value.dtype is None:
                out.new("MetadataIndex", fqn=name, index=None)
            else:
                out.new("MetadataIndex", fqn=name, offset=chunk.offsets, index=number)
            at, module = chunk.place, "torch.distributed.checkpoint.filesystem"
            out.new("_StorageInfo", module, relative_path=at.relative_path, offset=at.offset, length=at.length)
            out.raw += b"s"
    out.value("storage_meta")
    # What says nothing of the values: torch's own has a random number of the writer, and the path of the folder.
    out.begin("StorageMeta")
    for key in ("checkpoint_id", "save_id", "load_id"):
        out.value(key)
        out.value(None)
    out.value("modules")
    out.raw += b"]ub"
    out.value("version")
    out.value(VERSION)
    return bytes(out.raw) + b"ub."


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

    def name(self, module: str, name: str) -> None:
        if not self.recall((module, name)):
            self.raw += f"c{module}\n{name}\n".encode()
            self.keep((module, name))

    def begin(self, name: str, module: str = _MODULE) -> None:
        """An object made without arguments, and the beginning of its fields, which `ub` ends."""
        self.name(module, name)
        self.raw += b")\x81}("

    def new(self, name: str, module: str = _MODULE, **fields: _Field) -> None:
        """An object made without arguments, with these fields; without any, it gets no state."""
        self.name(module, name)
        self.raw += b")\x81"
        if fields:
            self.raw += b"}("
            for key, value in fields.items():
                self.value(key)
                self.value(value)
            self.raw += b"ub"

    def value(self, value: _Field) -> None:
        """A text, a number, None, or a tuple as a `torch.Size`."""
        if value is None:
            self.raw += b"N"
        elif isinstance(value, int):
            self.raw += integer(value)
        elif not self.recall(key := value if isinstance(value, str) else ("size", *value)):
            if isinstance(value, str):
                encoded = value.encode("utf-8", "surrogatepass")
                self.raw += b"X" + pack("<I", len(encoded)) + encoded
            else:
                self.name("torch", "Size")
                self.raw += b"(" + b"".join(map(integer, value)) + b"t\x85R"
            self.keep(key)

    def properties(self, dtype: DType, requires_grad: bool) -> None:
        """The `TensorProperties`: dtype, layout, requires_grad, memory format, pinned."""
        if self.recall(key := ("properties", dtype.name, requires_grad)):
            return
        self.new("TensorProperties")
        self.raw += b"("
        self.name("torch", dtype.torch)
        self.name("torch.serialization", "_get_layout")
        self.value("torch.strided")
        self.raw += b"\x85R" + (b"\x88" if requires_grad else b"\x89")
        self.name(_MODULE, "_MEM_FORMAT_ENCODING")
        self.raw += b"K\x00\x85R\x89tb"
        self.keep(key)
