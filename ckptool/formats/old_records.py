"""What 0.1.0 wrote and nothing writes now: the tree of a safetensors file of `convert --all` as JSON in its metadata.

Read for one release; then this file goes, with `fixtures/0.1.0`.

Tensors that cover their storage are stored as themselves under their address, so that every safetensors reader sees
their values; what the container cannot say is one JSON text in its metadata. A storage that no single tensor covers
(overlaps, slices, expanded views) is stored once, as bytes, under a reserved name. complex128 and complex32 are stored
as pairs of floats, quantized values as their integers.

    {"schema": "ckptool.tree/1", "root": value, "nodes": [[kind, …], …],
     "storages": [[name, location, how], …], "tensors": [[storage, …], …]}

A value is a JSON scalar, or an object with one key: n (a node's index), t (a tensor's), s (a storage by itself), b
(bytes, base64), g (a name), f (the bits of a nan or inf as hex), c (those of a complex number), p (Python 2 bytes), x
(missing). Nodes that cannot be changed once made (tuples, composites, what is called to make an object) come after what
they are made of.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from typing import Any

from ckptool.checkpoint import Flags, Storage, StorageRef, TensorEntry, row_major_strides
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.files import Readable
from ckptool.checkpoint.graph import check_depth
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.strided import row_major
from ckptool.errors import CkptoolError, Conflict, Corrupt, Unsupported, listed
from ckptool.pickles.torch_objects import REBUILD_JAGGED, check_view, jagged, rebuilt

SCHEMA = "ckptool.tree/1"

# How a type that safetensors lacks is stored: another type with the same bits, and how many of it make one element.
STAND_INS = {
    "c128": ("f64", 2),
    "c32": ("f16", 2),
    "qi8": ("i8", 1),
    "qu8": ("u8", 1),
    "qi32": ("i32", 1),
    "bits16": ("u16", 1),
}


def unpack(source: Readable, stored: dict[str, TensorEntry], text: str) -> Any:
    """The tree of a record. Raises `Corrupt` for a damaged record, `Conflict` where the file disagrees with it."""
    try:
        record = json.loads(text)
        if record["schema"] != SCHEMA:
            what = f"{source} holds a tree of the version {record['schema']!s}"
            raise Unsupported(what, f"This version reads {SCHEMA}.")
        tree = _Record(source, stored, record).tree()
        check_depth(tree)
    except CkptoolError as error:
        raise error.within(str(source)) from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, struct.error) as error:
        what = f"{source}: the record of its tree is damaged ({type(error).__name__})"
        raise Corrupt(what, "Its metadata was changed by another program.") from None
    return tree


class _Record:
    """Makes the tree of a record, and the tensors that are stored with it; a damaged one is a Python error."""

    def __init__(self, source: Readable, stored: dict[str, TensorEntry], record: dict[str, Any]) -> None:
        self.source, self.stored, self.record = source, stored, record
        names = {fields[0] for fields in record["storages"]}
        if names != set(stored):
            difference = listed(sorted(names ^ set(stored)))
            what = f"{source}: its tensors no longer match the record of its tree ({difference})"
            raise Conflict(what, "Another program changed the tensors, but kept the record.")
        self.storages = [self._storage(*fields) for fields in record["storages"]]
        self.tensors = [self._tensor(*fields) for fields in record["tensors"]]
        self.nodes: list[Any] = []
        self.kinds: dict[str, Callable[[Any], Any]] = {
            "n": lambda index: _at(self.nodes, index),
            "t": lambda index: _at(self.tensors, index),
            "s": lambda fields: StorageRef(_at(self.storages, fields[0]), by_name(fields[1]) if fields[1] else None),
            "f": _float,
            "b": base64.b64decode,
            "p": lambda text: ByteString(base64.b64decode(text)),
            "c": lambda parts: complex(_float(parts[0]), _float(parts[1])),
            "g": lambda parts: Global(str(parts[0]), str(parts[1])),
            "x": lambda _: MISSING,
        }

    def tree(self) -> Any:
        encoded = self.record["nodes"]
        for fields in encoded:
            self.nodes.append(self._new_node(*fields) if fields else None)
        for node, fields in zip(self.nodes, encoded, strict=True):
            if fields:
                self._fill(node, *fields)
        return self.value(self.record["root"])

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            raise TypeError("a bare list")
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        return self.kinds[kind](content)

    def values(self, values: Any) -> tuple[Any, ...]:
        return tuple(map(self.value, values))

    def _new_node(self, kind: str, *fields: Any) -> Any:
        """A node: whole where it cannot be changed once made, else empty."""
        if kind == "tuple":
            return self.values(fields[0])
        if kind == "composite":
            call = Object(self.value(fields[0]), self.values(fields[1]))
            if len(fields) > 2 and call.args[0] is REBUILD_JAGGED:
                return jagged(call.fn, by_name(fields[2]), call.args)
            return rebuilt(call)
        if kind == "object":
            fn, args, kwargs = self.values(fields[1:4])
            is_known = fields[0] in ("call", "new") and type(args) is tuple
            if not is_known or not isinstance(kwargs, (dict, type(None))):
                raise TypeError("an object")
            return Object(fn, args, fields[0], kwargs)
        if kind == "set":
            return Set([], bool(fields[1]))
        empty: Any = {"odict": OrderedDict, "dict": dict, "list": list, "bytearray": bytearray}[kind]
        return empty()

    def _fill(self, node: Any, kind: str, *fields: Any) -> None:
        if kind in ("dict", "odict"):
            node.update((self.value(k), self.value(v)) for k, v in fields[0])
            if kind == "odict":
                node.attributes = _none_or(dict, self.value(fields[1]))
        elif kind in ("list", "set"):
            (node if kind == "list" else node.items).extend(self.values(fields[0]))
        elif kind == "bytearray":
            node.extend(base64.b64decode(fields[0]))
        elif kind == "object":
            entries, elements, node.state = self.values(fields[4:7])
            node.items, node.elements = _none_or(dict, entries), _none_or(list, elements)
            node.adds = bool(fields[7])

    def _storage(self, name: str, location: str, how: list[Any] | None) -> Storage:
        entry = self.stored[name]
        if type(location) is not str:
            raise TypeError("a location")
        if how is None:
            return Storage(entry.storage.data, location, entry.storage.crc)
        dtype, shape, axes, conj, neg = by_name(how[0]), tuple(how[1]), how[2], how[3], how[4]
        width = STAND_INS[dtype.name][1] if dtype.name in STAND_INS and entry.dtype is not dtype else 1
        stand_in = STAND_INS.get(dtype.name, (dtype.name, 1))[0]
        if entry.shape != (shape if width == 1 else (*shape, width)) or entry.dtype.name not in (dtype.name, stand_in):
            what = f"{self.source}: {name} is no longer {dtype} {list(shape)} as in the record of the tree"
            raise Conflict(what, "Another program changed it.")
        count, flags = entry.storage.nbytes // dtype.itemsize, Flags(conj=conj, neg=neg)
        data = resolved(TensorEntry(Storage(entry.storage.data), dtype, (count,), (1,), flags=flags)).storage.data
        if axes is not None:
            strides = row_major_strides(shape)
            view = TensorEntry(Storage(data), dtype, tuple(shape[a] for a in axes), tuple(strides[a] for a in axes))
            data = row_major(view)
        return Storage(data, location)

    def _tensor(self, storage_index: int, bits: int, *view: Any) -> TensorEntry:
        storage = _at(self.storages, storage_index)
        flags = Flags(*(bool(bits >> i & 1) for i in range(4)))
        if view:
            dtype, shape, stride, offset = by_name(view[0]), tuple(view[1]), tuple(view[2]), view[3]
        else:
            how = self.record["storages"][storage_index][2]
            dtype, shape, offset = by_name(how[0]), tuple(how[1]), 0
            stride = row_major_strides(shape)
        check_view(storage.nbytes, dtype, shape, stride, offset)
        return TensorEntry(storage, dtype, shape, stride, offset, flags)


def _none_or(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, (kind, type(None))):
        raise TypeError(f"no {kind.__name__}")
    return value


def _at(items: list[Any], index: Any) -> Any:
    if type(index) is not int or index < 0:
        raise TypeError("an index")
    return items[index]


def _float(text: str) -> float:
    number: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return number
