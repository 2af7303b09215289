"""A tree as tensors and a record: every node once, what cannot be changed once made after what it is made of."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Computed, Storage, StorageRef, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.numpy_arrays import LazyBytes
from ckptool.checkpoint.strided import flipped, in_storage_order, row_major
from ckptool.checkpoint.tree import address, walk
from ckptool.commands import ADDRESS, FILE, OUT, arg, command
from ckptool.errors import LimitExceeded, Unsupported, is_text, listed
from ckptool.formats import marks
from ckptool.formats.tree_record import KEY, RESERVED, SCHEMA, STAND_INS
from ckptool.pickles.calls import is_quiet
from ckptool.pickles.torch_objects import JAGGED

MAX_REPEATED = 16 << 20  # bytes of texts that stand in the record already


def pack(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a flat dictionary of tensors that safetensors can hold, and the record that leads back.

    Raises `Unsupported` for objects of unknown classes, and for names that are not Unicode text.
    """

    _refuse_unknown(checkpoint)
    packer = Packer(checkpoint.tree, names_of(checkpoint.tree), dense_tensors(checkpoint.tree))
    record = packer.record()
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    if not is_text(text):
        text = json.dumps(record, separators=(",", ":"))
    metadata = {KEY: text} | {key: mark for key, mark in checkpoint.metadata.items() if key == marks.RECOVERED}
    return Checkpoint(packer.stored, checkpoint.container, metadata, checkpoint.source, tensors_only=True)


def _refuse_unknown(checkpoint: Checkpoint) -> None:
    unknown = [
        f"{node.name} at {address(path) or 'the top'}"
        for path, node in walk(checkpoint.tree)
        if isinstance(node, Object) and not is_quiet(node)
    ]
    if unknown or checkpoint.discarded:
        raise Unsupported(
            f"objects of classes that ckptool does not know cannot be carried: {listed(unknown)}",
            "Only a pickle can restore them, by running their code.",
            f"Leave them out: {command('edit', FILE, drop=ADDRESS, out=OUT)}; "
            f"or convert only the weights: without {arg(all=True)}",
        )


class Packer:
    """Makes the record of one tree (`record`), and the tensors that it speaks of (`stored`).

    names: of the tensors, by their id.  dense: of storages by their id, the tensor that each is stored as.
    """

    def __init__(self, tree: Any, names: dict[int, str], dense: dict[int, TensorEntry]) -> None:
        self.tree = tree
        self.names = names
        self.indices: dict[int, int] = {}
        self.nodes: list[Any] = []
        self.queue: list[tuple[int, Any]] = []
        self.stored: dict[str, TensorEntry] = {}
        self.storages: list[Any] = []
        self.storage_indices: dict[int, int] = {}
        self.tensors: list[Any] = []
        self.dense = dense
        self.long: dict[int, Any] = {}  # texts, bytes and numbers that take some room, by id (and kept alive for it)
        self.room = MAX_REPEATED

    def record(self) -> dict[str, Any]:
        root = self.value(self.tree)
        while self.queue:
            index, node = self.queue.pop()
            self.nodes[index] = self._node(node)
        return {"schema": SCHEMA, "root": root, "nodes": self.nodes, "storages": self.storages, "tensors": self.tensors}

    # Values ------------------------------------------------------------------------------------------------------

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in (str, int, bytes, ByteString):
            self._count(value)
        if value is None or kind in (str, int, bool):
            return value
        if kind is float:
            return value if value - value == 0.0 else {"f": _float_bits(value)}
        if kind is bytes or kind is ByteString:
            return {"b" if kind is bytes else "p": base64.b64encode(value).decode()}
        if kind is LazyBytes and not value.mutable:
            return {"b": base64.b64encode(value.whole()).decode()}
        if kind is complex:
            return {"c": [_float_bits(value.real), _float_bits(value.imag)]}
        if kind is Global:
            return {"g": [value.module, value.name]}
        if value is MISSING:
            return {"x": 0}
        if kind is TensorEntry:
            return {"t": self._tensor(value)}
        if kind is StorageRef:
            return {"s": [self._storage(value.storage), value.dtype.name if value.dtype else None]}
        return {"n": self._index(value)}

    def _count(self, value: Any) -> None:
        """Raises `LimitExceeded` where repeated long texts would make the record many times longer than the file."""
        size = value.bit_length() // 4 if type(value) is int else len(value)
        if size <= 256:
            return
        if id(value) in self.long:
            self.room -= size
        self.long[id(value)] = value
        if self.room < 0:
            what = f"one string occurs so often that its copies would take more than {MAX_REPEATED:,} bytes"
            why = "A pickle stores it once and refers to it; this record has to repeat it."
            raise LimitExceeded(what, why, f"Convert only the weights: without {arg(all=True)}")

    def _index(self, node: Any) -> int:
        index = self.indices.get(id(node))
        if index is not None:
            return index
        if not isinstance(node, _MADE_OF_PARTS):
            return self._reserve(node)
        stack = [node]
        while stack:
            pending = [
                part
                for part in _made_of(stack[-1])
                if isinstance(part, _MADE_OF_PARTS) and id(part) not in self.indices
            ]
            if pending:
                stack += pending
                continue
            top = stack.pop()
            if id(top) in self.indices:
                continue
            if isinstance(top, Object):
                for part in _made_of(top):
                    self.value(part)  # what it is called with has its place before it
                self._reserve(top)
            else:
                encoded = self._immutable(top)
                self.indices[id(top)] = len(self.nodes)
                self.nodes.append(encoded)
        return self.indices[id(node)]

    def _reserve(self, node: Any) -> int:
        index = self.indices[id(node)] = len(self.nodes)
        self.nodes.append(None)
        self.queue.append((index, node))
        return index

    def _immutable(self, node: Any) -> list[Any]:
        if isinstance(node, tuple):
            return ["tuple", [self.value(part) for part in node]]
        made = ["composite", self.value(node.made.fn), [self.value(part) for part in node.made.args]]
        # Of a jagged nested tensor the call does not say the type until all is read: its parts are in a dictionary.
        return [*made, node.dtype.name] if node.kind == JAGGED and node.dtype is not None else made

    def _node(self, node: Any) -> list[Any]:
        value = self.value
        if isinstance(node, OrderedDict):
            return ["odict", [[value(k), value(v)] for k, v in node.items()], value(node.attributes)]
        if isinstance(node, dict):
            return ["dict", [[value(k), value(v)] for k, v in node.items()]]
        if isinstance(node, list):
            return ["list", [value(part) for part in node]]
        if isinstance(node, Set):
            return ["set", [value(part) for part in node.items], node.frozen]
        if isinstance(node, (bytearray, LazyBytes)):
            return ["bytearray", base64.b64encode(bytes(node)).decode()]
        if isinstance(node, Object):
            return ["object", node.how, *(value(getattr(node, name)) for name in _OBJECT_FIELDS), node.adds]
        raise Unsupported(f"a value of type {type(node).__name__} cannot be carried")

    # Tensors -----------------------------------------------------------------------------------------------------

    def _tensor(self, entry: TensorEntry) -> int:
        index = self.indices.get(id(entry))
        if index is None:
            index = self.indices[id(entry)] = len(self.tensors)
            storage = self._storage(entry.storage)
            fields: list[Any] = [storage, sum(bit << i for i, bit in enumerate(entry.flags))]
            dense = self.dense.get(id(entry.storage))
            if dense is None or dense.layout != entry.layout or entry.stride != row_major_strides(entry.shape):
                fields += [entry.dtype.name, list(entry.shape), list(entry.stride), entry.offset]
            self.tensors.append(fields)
        return index

    def _storage(self, storage: Storage) -> int:
        index = self.storage_indices.get(id(storage))
        if index is None:
            index = self.storage_indices[id(storage)] = len(self.storages)
            dense = self.dense.get(id(storage))
            self.storages.append(self._as_bytes(storage, index) if dense is None else self._as_tensor(dense))
        return index

    def _as_bytes(self, storage: Storage, index: int) -> list[Any]:
        name = f"{RESERVED}{index}"
        self.stored[name] = TensorEntry(storage, by_name("u8"), (storage.nbytes,), (1,))
        return [name, storage.location, None]

    def _as_tensor(self, entry: TensorEntry) -> list[Any]:
        name = self.names[id(entry)]
        how = [entry.dtype.name, list(entry.shape), axes_of(entry), int(entry.flags.conj), int(entry.flags.neg)]
        self.stored[name] = stand_in(entry)
        return [name, entry.location, how]


_OBJECT_FIELDS = ("fn", "args", "kwargs", "items", "elements", "state")
_MADE_OF_PARTS = (tuple, Composite, Object)


def _made_of(node: Any) -> tuple[Any, ...]:
    """The values that must be there before `node` can be made."""
    if isinstance(node, tuple):
        return node
    return (node.fn, node.args, node.kwargs) if isinstance(node, Object) else node.made.args


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()  # every bit: a nan has a sign and a payload


def dense_tensors(tree: Any) -> dict[int, TensorEntry]:
    """For each storage the first tensor that covers it: every element once, of a type that can be stored."""
    found: dict[int, TensorEntry] = {}
    for _, node in walk(tree):
        if isinstance(node, TensorEntry) and id(node.storage) not in found and _is_dense(node):
            found[id(node.storage)] = node
    return found


def _is_dense(entry: TensorEntry) -> bool:
    if entry.nbytes != entry.storage.nbytes or entry.offset or not entry.nbytes:
        return False
    if entry.dtype.safetensors is None and entry.dtype.name not in STAND_INS:
        return False
    if entry.dtype.name == "f4_e2m1fn_x2" and (not entry.shape or not entry.is_contiguous):
        return False
    return entry.is_contiguous or in_storage_order(entry) is not None


def axes_of(entry: TensorEntry) -> list[int] | None:
    """The axes from the widest stride to the narrowest, as they lie in the storage; None for row-major."""
    if entry.is_contiguous:
        return None
    return sorted(range(len(entry.shape)), key=lambda axis: (-entry.stride[axis], -entry.shape[axis], axis))


def stand_in(entry: TensorEntry) -> TensorEntry:
    """The tensor as safetensors can hold it; conjugate and negative bits stay flags, for the writer to resolve."""
    if entry.dtype.safetensors is not None:
        return entry
    name, width = STAND_INS[entry.dtype.name]
    data = row_major(entry)
    if entry.flags.conj or entry.flags.neg:
        data = flipped(data, entry.dtype, entry.flags.conj, entry.flags.neg, entry.storage)
    whole = data is not entry.storage.data and isinstance(data, Computed)
    storage = Storage(
        data, entry.location, None if whole else entry.storage.crc, deduplicated=entry.storage.deduplicated
    )
    shape = (*entry.shape, width) if width > 1 else entry.shape
    stride = (*(s * width for s in row_major_strides(entry.shape)), 1) if width > 1 else row_major_strides(entry.shape)
    return TensorEntry(storage, by_name(name), shape, stride)


def names_of(tree: Any) -> dict[int, str]:
    """A name for each tensor: its key where the tree is a dictionary of tensors, else its address."""
    flat = isinstance(tree, dict) and any(isinstance(value, TensorEntry) for value in tree.values())
    names: dict[int, str] = {}
    taken: set[str] = set()
    entries = [(path, node) for path, node in walk(tree) if isinstance(node, TensorEntry)]
    # Keys that are text come first: of 0 and '0' the latter gets the plain name.
    for path, node in sorted(entries, key=lambda found: not all(type(part) is str for part in found[0])):
        if id(node) in names:
            continue
        name = path[0] if flat and len(path) == 1 and type(path[0]) is str else address(path)
        if not is_text(name):
            what = f"the tensor {name} has a name that is not Unicode text"
            raise Unsupported(what, "No other program could read it.", "Rename it first.")
        name = f"_{name}" if name.startswith(RESERVED) or name == "__metadata__" else name
        while name in taken:
            name += f"~{type(path[-1]).__name__ if path else 'tensor'}"
        taken.add(name)
        names[id(node)] = name
    return names
