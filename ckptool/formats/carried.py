"""A whole tree inside a safetensors file: what `convert --all` writes, and what gives it back bit for bit.

Tensors that cover their storage are stored as themselves under their address, so that every safetensors reader sees their
values; what the container cannot say is one JSON text in its metadata. A storage that no single tensor covers (overlaps,
slices, expanded views) is stored once, as bytes, under a reserved name. complex128 and complex32 are stored as pairs of floats,
quantized values as their integers.

    {"schema": "ckptool.tree/1", "root": value, "nodes": [[kind, …], …],
     "storages": [[name, location, how], …], "tensors": [[storage, …], …]}

A value is a JSON scalar, or an object with one key: n (a node's index), t (a tensor's), s (a storage by itself), b (bytes, base64), g (a
name), f (the bits of a nan or inf as hex), c (those of a complex number), p (Python 2 bytes), x (missing). Nodes that cannot be
changed once made (tuples, composites, what is called to make an object) come after what they are made of.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from typing import Any

from ckptool.checkpoint import (
    Checkpoint,
    Composite,
    Computed,
    Data,
    Flags,
    LongBytes,
    Storage,
    StorageRef,
    TensorEntry,
    row_major_strides,
)
from ckptool.dtypes import DType, by_name
from ckptool.errors import CkptoolError, Conflict, Corrupt, LimitExceeded, Unsupported, is_text, listed, printable
from ckptool.files import Source
from ckptool.formats import recovered
from ckptool.gather import row_major
from ckptool.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set, check_depth
from ckptool.pickles.known import is_known_call
from ckptool.pickles.torch_objects import check_view, rebuilt
from ckptool.tree import address, walk

KEY = "ckptool"
SCHEMA = "ckptool.tree/1"
RESERVED = "~storage/"

# How a type that safetensors lacks is stored: another type with the same bits, and how many of it make one element.
_STAND_INS = {
    "c128": ("f64", 2),
    "c32": ("f16", 2),
    "qi8": ("i8", 1),
    "qu8": ("u8", 1),
    "qi32": ("i32", 1),
    "bits16": ("u16", 1),
}


MAX_REPEATED = 16 << 20


def pack(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a flat dictionary of tensors that safetensors can hold, and the record that leads back.

    Raises `Unsupported` for objects of unknown classes, and for names that are not Unicode text.
    """
    _refuse_unknown(checkpoint)
    packer = _Packer(checkpoint.tree)
    record = packer.record()
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    if not is_text(text):
        text = json.dumps(record, separators=(",", ":"))
    metadata = {KEY: text} | {key: mark for key, mark in checkpoint.metadata.items() if key == recovered.KEY}
    return Checkpoint(packer.stored, checkpoint.container, metadata, checkpoint.source, tensors_only=True)


def _refuse_unknown(checkpoint: Checkpoint) -> None:
    unknown = [
        f"{printable(node.name)} at {printable(address(path)) or 'the top'}"
        for path, node in walk(checkpoint.tree)
        if isinstance(node, Object) and not is_known_call(node.fn, node.args)
    ]
    if unknown or checkpoint.discarded:
        raise Unsupported(
            f"objects of classes that ckptool does not know cannot be carried: {listed(unknown)}",
            "Only a pickle can make them again, by running their code.",
            "Leave them out with ckptool edit --drop, or convert only the weights: without --all",
        )


class _Packer:
    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.names = _names(tree)
        self.indices: dict[int, int] = {}
        self.nodes: list[Any] = []
        self.queue: list[tuple[int, Any]] = []
        self.alive: list[Any] = []
        self.stored: dict[str, TensorEntry] = {}
        self.storages: list[Any] = []
        self.storage_indices: dict[int, int] = {}
        self.tensors: list[Any] = []
        self.covers = _covers(tree)
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
        if kind is LongBytes and not value.mutable:
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
        """Raises `LimitExceeded` where long texts are repeated so often that the record would be many times longer than the file."""
        size = value.bit_length() // 4 if type(value) is int else len(value)
        if size <= 256:
            return
        if id(value) in self.long:
            self.room -= size
        self.long[id(value)] = value
        if self.room < 0:
            raise LimitExceeded(
                f"one text stands in so many places that they would take more than {MAX_REPEATED:,} bytes",
                "A pickle refers to it, this record has to repeat it.",
                "Convert only the weights: without --all",
            )

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
        return ["composite", self.value(node.made.fn), [self.value(part) for part in node.made.args]]

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
        if isinstance(node, (bytearray, LongBytes)):
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
            covering = self.covers.get(id(entry.storage))
            if covering is None or not _same_view(covering, entry) or entry.stride != row_major_strides(entry.shape):
                fields += [entry.dtype.name, list(entry.shape), list(entry.stride), entry.offset]
            self.tensors.append(fields)
        return index

    def _storage(self, storage: Storage) -> int:
        index = self.storage_indices.get(id(storage))
        if index is None:
            index = self.storage_indices[id(storage)] = len(self.storages)
            covering = self.covers.get(id(storage))
            self.storages.append(self._as_bytes(storage, index) if covering is None else self._as_tensor(covering))
        return index

    def _as_bytes(self, storage: Storage, index: int) -> list[Any]:
        name = f"{RESERVED}{index}"
        self.stored[name] = TensorEntry(storage, by_name("u8"), (storage.nbytes,), (1,))
        return [name, storage.location, None]

    def _as_tensor(self, entry: TensorEntry) -> list[Any]:
        name = self.names[id(entry)]
        how = [entry.dtype.name, list(entry.shape), _axes(entry), int(entry.flags.conj), int(entry.flags.neg)]
        self.stored[name] = _stand_in(entry)
        return [name, entry.location, how]


_OBJECT_FIELDS = ("fn", "args", "kwargs", "items", "elements", "state")
_MADE_OF_PARTS = (tuple, Composite, Object)


def _made_of(node: Any) -> tuple[Any, ...]:
    """What must be there before `node` can be made."""
    if isinstance(node, tuple):
        return node
    return (node.fn, node.args, node.kwargs) if isinstance(node, Object) else node.made.args


def _names(tree: Any) -> dict[int, str]:
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
            raise Unsupported(
                f"the tensor {printable(name)} has a name that is not Unicode text",
                "No other program could read it.",
                "Rename it first.",
            )
        name = f"_{name}" if name.startswith(RESERVED) or name == "__metadata__" else name
        while name in taken:
            name += f"~{type(path[-1]).__name__ if path else 'tensor'}"
        taken.add(name)
        names[id(node)] = name
    return names


def _covers(tree: Any) -> dict[int, TensorEntry]:
    """For each storage the first tensor that covers it: every element once, none outside, of a type that can be stored."""
    covers: dict[int, TensorEntry] = {}
    for _, node in walk(tree):
        if isinstance(node, TensorEntry) and id(node.storage) not in covers and _is_cover(node):
            covers[id(node.storage)] = node
    return covers


def _is_cover(entry: TensorEntry) -> bool:
    if entry.nbytes != entry.storage.nbytes or entry.offset or not entry.nbytes:
        return False
    if entry.dtype.safetensors is None and entry.dtype.name not in _STAND_INS:
        return False
    if entry.dtype.name == "f4_e2m1fn_x2" and (not entry.shape or not entry.is_contiguous):
        return False
    expected = 1
    for axis in reversed(_axes(entry) or range(len(entry.shape))):
        if entry.shape[axis] != 1 and entry.stride[axis] != expected:
            return False
        expected *= entry.shape[axis]
    return True


def _axes(entry: TensorEntry) -> list[int] | None:
    """The axes from the widest stride to the narrowest, as they lie in the storage; None for row-major."""
    if entry.is_contiguous:
        return None
    return sorted(range(len(entry.shape)), key=lambda axis: (-entry.stride[axis], -entry.shape[axis], axis))


def _same_view(a: TensorEntry, b: TensorEntry) -> bool:
    return (a.dtype, a.shape, a.stride, a.offset) == (b.dtype, b.shape, b.stride, b.offset)


def _stand_in(entry: TensorEntry) -> TensorEntry:
    """The tensor as safetensors can hold it; conjugate and negative bits stay flags, for the writer to resolve."""
    if entry.dtype.safetensors is not None:
        return entry
    name, width = _STAND_INS[entry.dtype.name]
    data = row_major(entry)
    if entry.flags.conj or entry.flags.neg:
        data = _flip(data, entry.dtype, entry.flags.conj, entry.flags.neg, entry.storage)
    whole = data is not entry.storage.data and isinstance(data, Computed)
    storage = Storage(data, entry.location, None if whole else entry.storage.crc, twin=entry.storage.twin)
    shape = (*entry.shape, width) if width > 1 else entry.shape
    stride = (*(s * width for s in row_major_strides(entry.shape)), 1) if width > 1 else row_major_strides(entry.shape)
    return TensorEntry(storage, by_name(name), shape, stride)


def _flip(data: Data, dtype: DType, conj: bool, neg: bool, storage: Storage) -> Computed:
    """The values conjugated or negated, by their sign bits: doing it twice gives the same bits again."""
    part = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    # `neg` flips every part of an element, `conj` the imaginary ones (the second of each pair).
    flips = [bool(neg) ^ (bool(conj) and dtype.kind == "complex" and i == 1) for i in range(dtype.itemsize // part)]

    def read(offset: int, length: int) -> bytes:
        raw = bytearray(data.read(offset, length))
        for i, flip in enumerate(flips):
            if flip:
                first = (i * part + part - 1 - offset) % dtype.itemsize
                raw[first :: dtype.itemsize] = bytes(raw[first :: dtype.itemsize]).translate(_SIGN)
        return bytes(raw)

    return Computed(data.length, read, (storage,))


_SIGN = bytes(byte ^ 0x80 for byte in range(256))


def resolved(entry: TensorEntry) -> TensorEntry:
    """The tensor with its conjugate and negative bits applied to the values, row-major where there were any."""
    if not (entry.flags.conj or entry.flags.neg):
        return entry
    if entry.dtype.kind not in ("float", "complex"):
        raise Unsupported(f"a negated view of type {entry.dtype} cannot be resolved")
    data = _flip(row_major(entry), entry.dtype, entry.flags.conj, entry.flags.neg, entry.storage)
    flags = Flags(entry.flags.requires_grad, entry.flags.parameter)
    return TensorEntry(
        Storage(data, entry.location), entry.dtype, entry.shape, row_major_strides(entry.shape), 0, flags
    )


# The way back --------------------------------------------------------------------------------------------------------


def unpack(source: Source, stored: dict[str, TensorEntry], metadata: dict[str, str]) -> Any:
    """The tree that `pack` was given. Raises `Corrupt` where the record is damaged, `Conflict` where the file no longer agrees with it."""
    try:
        record = json.loads(metadata[KEY])
        if record["schema"] != SCHEMA:
            raise Unsupported(
                f"{source} holds a tree of the version {printable(str(record['schema']))}",
                f"This version reads {SCHEMA}.",
            )
        unpacker = _Unpacker(source, stored, record)
        tree = unpacker.tree()
        check_depth(tree)
    except CkptoolError as error:
        raise error.within(str(source)) from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise Corrupt(
            f"{source}: the record of its tree is damaged ({type(error).__name__})",
            "Its metadata was changed by another program.",
        ) from None
    return tree


class _Unpacker:
    def __init__(self, source: Source, stored: dict[str, TensorEntry], record: dict[str, Any]) -> None:
        self.source, self.stored, self.record = source, stored, record
        names = {fields[0] for fields in record["storages"]}
        if names != set(stored):
            odd = sorted(names ^ set(stored))
            raise Conflict(
                f"{source}: its tensors and the record of its tree no longer agree ({listed([printable(str(name)) for name in odd])})",
                "Another program added, removed or renamed tensors and kept the record.",
            )
        self.alike: dict[tuple[int, str], Data] = {}
        self.storages = [self._storage(*fields) for fields in record["storages"]]
        self.tensors = [self._tensor(*fields) for fields in record["tensors"]]
        self.nodes: list[Any] = []

    def tree(self) -> Any:
        encoded = self.record["nodes"]
        for fields in encoded:
            self.nodes.append(
                self._made(fields) if fields and fields[0] in ("tuple", "composite", "object") else self._empty(fields)
            )
        for node, fields in zip(self.nodes, encoded, strict=True):
            if fields:
                self._fill(node, fields)
        return self.value(self.record["root"])

    def value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise TypeError("a bare list")
            return value
        ((kind, payload),) = value.items()
        if kind == "n":
            return self._at(self.nodes, payload)
        if kind == "t":
            return self._at(self.tensors, payload)
        return _SCALARS[kind](payload) if kind != "s" else self._reference(*payload)

    @staticmethod
    def _at(things: list[Any], index: Any) -> Any:
        if type(index) is not int or index < 0:
            raise TypeError("an index")
        return things[index]

    def _reference(self, index: Any, dtype: str | None) -> StorageRef:
        return StorageRef(self._at(self.storages, index), by_name(dtype) if dtype else None)

    def _made(self, fields: list[Any]) -> Any:
        if fields[0] == "tuple":
            return tuple(self.value(part) for part in fields[1])
        if fields[0] == "composite":
            return rebuilt(Object(self.value(fields[1]), tuple(self.value(part) for part in fields[2])))
        fn, args, kwargs = (self.value(part) for part in fields[2:5])
        if fields[1] not in ("call", "new") or type(args) is not tuple or not isinstance(kwargs, (dict, type(None))):
            raise TypeError("an object")
        return Object(fn, args, fields[1], kwargs)

    @staticmethod
    def _empty(fields: list[Any]) -> Any:
        if not fields:
            return None
        makers: dict[str, Callable[[], Any]] = {
            "odict": OrderedDict,
            "dict": dict,
            "list": list,
            "bytearray": bytearray,
        }
        if fields[0] == "set":
            return Set([], bool(fields[2]))
        return makers[fields[0]]()

    def _fill(self, node: Any, fields: list[Any]) -> None:
        kind, value = fields[0], self.value
        if kind in ("dict", "odict"):
            node.update((value(k), value(v)) for k, v in fields[1])
            if kind == "odict":
                node.attributes = value(fields[2])
        elif kind == "list":
            node.extend(value(part) for part in fields[1])
        elif kind == "set":
            node.items.extend(value(part) for part in fields[1])
        elif kind == "bytearray":
            node.extend(base64.b64decode(fields[1]))
        elif kind == "object":
            node.items, node.elements, node.state = (value(part) for part in fields[5:8])
            node.adds = bool(fields[8])

    def _storage(self, name: str, location: str, how: list[Any] | None) -> Storage:
        entry = self.stored[name]
        twin = entry.storage.twin
        if how is None:
            return Storage(entry.storage.data, location, twin=twin)
        dtype, shape, axes, conj, neg = by_name(how[0]), tuple(how[1]), how[2], how[3], how[4]
        width = _STAND_INS[dtype.name][1] if dtype.name in _STAND_INS else 1
        if entry.shape != (shape if width == 1 else (*shape, width)):
            raise Conflict(
                f"{self.source}: {printable(name)} no longer has the shape {list(shape)} of the record of the tree"
            )
        data: Data = entry.storage.data
        if conj or neg:
            data = _flip(data, dtype, conj, neg, entry.storage)
        if axes is not None:
            strides = row_major_strides(shape)
            view = TensorEntry(Storage(data), dtype, tuple(shape[a] for a in axes), tuple(strides[a] for a in axes))
            data = row_major(view)
        if twin:  # on one piece of data, as they are stored
            data = self.alike.setdefault((id(entry.storage.data), str(how)), data)
        return Storage(data, location, twin=twin)

    def _tensor(self, storage_index: int, bits: int, *view: Any) -> TensorEntry:
        storage = self._at(self.storages, storage_index)
        flags = Flags(*(bool(bits >> i & 1) for i in range(4)))
        if view:
            dtype, shape, stride, offset = by_name(view[0]), tuple(view[1]), tuple(view[2]), view[3]
        else:
            how = self.record["storages"][storage_index][2]
            dtype, shape, offset = by_name(how[0]), tuple(how[1]), 0
            stride = row_major_strides(shape)
        check_view(storage, dtype, shape, stride, offset)
        return TensorEntry(storage, dtype, shape, stride, offset, flags)


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()  # every bit: a nan has a sign and a payload


def _hex_float(text: str) -> float:
    found: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return found


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "f": _hex_float,
    "b": base64.b64decode,
    "p": lambda text: ByteString(base64.b64decode(text)),
    "c": lambda parts: complex(_hex_float(parts[0]), _hex_float(parts[1])),
    "g": lambda parts: Global(str(parts[0]), str(parts[1])),
    "x": lambda _: MISSING,
}
