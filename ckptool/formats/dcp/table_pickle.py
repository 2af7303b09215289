"""The pickle of `.metadata`, as torch's own writer would make it, opcode by opcode.

There may be 400,000 chunks, so no tree of objects is made of them first. Equal sizes and names are written once.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`), torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from struct import pack
from typing import Any

from ckptool.checkpoint.dtypes import DType
from ckptool.formats.dcp.tables import Saved
from ckptool.pickles.encode import integer

VERSION = "1.0.0"
_MODULE = "torch.distributed.checkpoint.metadata"


def table_pickle(values: Mapping[str, Saved]) -> bytes:
    """The pickle of a `Metadata` of these values, by their flat names."""
    out = _Pickle()

    def mapping(items: Iterable[tuple[Callable[[], None], Callable[[], None]]]) -> None:
        out.raw += b"}"
        for key, value in items:
            key()
            value()
            out.raw += b"s"

    def described(value: Saved) -> None:
        if value.dtype is None:
            out.new(_MODULE, "BytesStorageMetadata")
            return
        properties = partial(_properties, out, value.dtype, value.requires_grad)
        chunks = partial(listed, value)
        out.new(_MODULE, "TensorStorageMetadata", properties=properties, size=value.shape, chunks=chunks)

    def listed(value: Saved) -> None:
        out.raw += b"]("
        for chunk in value.chunks:
            out.new(_MODULE, "ChunkStorageMetadata", offsets=chunk.offsets, sizes=chunk.sizes)
        out.raw += b"e"

    def path(value: Saved) -> None:
        out.raw += b"("
        for key in value.path:
            out.value(key)
        out.raw += b"t"

    def index(name: str, value: Saved, number: int) -> None:
        where = {} if value.dtype is None else {"offset": value.chunks[number].offsets}
        out.new(_MODULE, "MetadataIndex", fqn=name, **where, index=None if value.dtype is None else number)

    def place(value: Saved, number: int) -> None:
        at = value.chunks[number].place
        module = "torch.distributed.checkpoint.filesystem"
        out.new(module, "_StorageInfo", relative_path=at.relative_path, offset=at.offset, length=at.length)

    def modules() -> None:
        out.raw += b"]"

    chunks = ((name, value, number) for name, value in values.items() for number in range(len(value.chunks)))
    out.new(
        _MODULE,
        "Metadata",
        state_dict_metadata=lambda: mapping((partial(out.text, k), partial(described, v)) for k, v in values.items()),
        planner_data=lambda: mapping((partial(out.text, name), partial(path, value)) for name, value in values.items()),
        storage_data=lambda: mapping((partial(index, *each), partial(place, *each[1:])) for each in chunks),
        # What says nothing of the values: torch's own has a random number of the writer, and the path of the folder.
        storage_meta=lambda: out.new(
            _MODULE, "StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=modules
        ),
        version=VERSION,
    )
    return bytes(out.raw) + b"."


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

    def name(self, module: str, name: str) -> None:
        if not self.recall((module, name)):
            self.raw += f"c{module}\n{name}\n".encode()
            self.keep((module, name))

    def new(self, module: str, name: str, **fields: Any) -> None:
        """An object made without arguments, with these fields: texts, numbers, sizes, None, or what writes the value.

        Without any, it gets no state.
        """
        self.name(module, name)
        self.raw += b")\x81"
        if fields:
            self.raw += b"}("
            for key, value in fields.items():
                self.text(key)
                self.value(value)
            self.raw += b"ub"

    def value(self, value: Any) -> None:
        if value is None:
            self.raw += b"N"
        elif isinstance(value, str):
            self.text(value)
        elif isinstance(value, int):
            self.raw += integer(value)
        elif isinstance(value, tuple):
            self.size(value)
        else:
            value()

    def size(self, sizes: Iterable[int]) -> None:
        """A `torch.Size`."""
        key = ("size", *sizes)
        if not self.recall(key):
            self.name("torch", "Size")
            self.raw += b"(" + b"".join(map(integer, sizes)) + b"t\x85R"
            self.keep(key)
