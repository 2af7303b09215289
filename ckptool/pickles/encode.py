"""A tree to a pickle of protocol 2, byte for byte as Python's pickler writes what torch gives it.

One difference is intended: equal texts are written once and then referred to, even if they were separate objects, so
that the same tree always gives the same bytes. Every torch reads protocol 2, `weights_only` included. Three things need
protocol 4: the name of a nested class (`Outer.Inner`), an object made with keyword arguments, and one that items are
added to.

Source of the conventions: Modules/_pickle.c (save_tuple, batch_list, batch_dict_exact, save_reduce).
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from ckptool.checkpoint import NO_FLAGS, Composite, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.errors import Conflict, Unsupported
from ckptool.pickles.torch_objects import (
    ORDERED_DICT,
    REBUILD_FROM_TYPE,
    REBUILD_PARAMETER,
    REBUILD_TENSOR_V2,
    REBUILD_TENSOR_V3,
    TENSOR,
    UNTYPED_STORAGE,
)

_BATCH = 1000
_pack_int = struct.Struct("<i").pack
_pack_uint = struct.Struct("<I").pack
_pack_float = struct.Struct(">d").pack

_SET, _FROZENSET = Global("__builtin__", "set"), Global("__builtin__", "frozenset")
_COMPLEX = Global("__builtin__", "complex")
_BYTES, _BYTEARRAY = Global("__builtin__", "bytes"), Global("__builtin__", "bytearray")
_ENCODE = Global("_codecs", "encode")
_ATOMS = frozenset({int, float, bool, type(None), StorageRef})  # beside empty tuples


class _Call(NamedTuple):
    """A call with a single reference, as an argument of another call."""

    fn: Global
    args: tuple[Any, ...]


class _Template(NamedTuple):
    """How plain tensors of one kind are written: `begin`, the key, and each memo index with the bytes after it.

    fields: of `rest`, memo indices and the bytes after them, in turn, as of the last tensor written this way.
    """

    begin: bytes
    rest: struct.Struct
    fields: list[Any]


_NO_HOOKS = _Call(ORDERED_DICT, ())


def encode(tree: Any, key_of: Callable[[Storage], str]) -> bytes:
    """The pickle of `tree`. `key_of` names a storage's record; it is called in the order in which storages occur.

    Raises `Unsupported` for a value that no checkpoint holds (a numpy array, a live tensor).
    """
    protocol = 2
    while True:
        encoder = _Encoder(key_of, protocol)
        pending: list[Iterator[Any]] = [iter((tree,))]
        while pending:
            for part in pending[-1]:
                if not encoder.leaf(part):  # go down, and come back here
                    pending.append(encoder.container(part))
                    break
            else:
                pending.pop()
        if encoder.protocol == protocol:
            return b"".join((b"\x80", bytes([protocol]), encoder.out, b"."))
        protocol = encoder.protocol


class _Encoder:
    """Writes one pickle. protocol: raised where something needs it; then the whole is written again."""

    def __init__(self, key_of: Callable[[Storage], str], protocol: int) -> None:
        self.key_of = key_of
        self.protocol = protocol
        self.out = bytearray()
        self.count = 0  # values memoized so far
        self.memo: dict[Any, int] = {}  # text, bytes, name, or the id of another value -> its memo index
        self.begun: dict[int, int] = {}  # id of a set -> the size of the memo when it was begun
        self.types: dict[int, DType | None] = {}  # id of a storage -> the element type it was first written with
        self.puts: list[int] | None = None  # where in `out` a tensor's parts are memoized, while recorded
        self.templates: dict[Any, _Template] = {}  # by everything that plain tensors may share

    def _recall(self, key: Any, unfinished: bytes = b"") -> bool:
        """Recalls a value that was written before; False if it was not. unfinished: opcodes that drop parts of it."""
        index = self.memo.get(key)
        if index is None:
            return False
        self.out += unfinished + (b"h" + bytes([index]) if index < 256 else b"j" + _pack_uint(index))
        return True

    def _put(self, key: Any = None) -> None:
        """Memoizes the top of the stack, to be recalled by its key; without a key, never."""
        index = self.count
        self.count += 1
        if self.puts is not None:
            self.puts.append(len(self.out))
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + _pack_uint(index)
        if key is not None:
            self.memo[key] = index

    # Leaves: everything that contains no container ----------------------------------------------------------------

    def leaf(self, value: Any) -> bool:
        """Writes `value` if it contains no containers or was written before; returns whether it did."""
        kind, out = type(value), self.out
        if kind not in _ATOMS and (kind is not tuple or value):  # written once, and recalled after that
            key: Any = id(value)
            if kind is str or kind is Global:
                key = value
            elif kind is bytes or kind is ByteString:
                key = kind, value
            if (index := self.memo.get(key)) is not None:
                out += b"h" + bytes([index]) if index < 256 else b"j" + _pack_uint(index)
            elif kind is str:
                raw = value.encode("utf-8", "surrogatepass")
                out += b"X" + _pack_uint(len(raw)) + raw
                self._put(value)
            elif kind is TensorEntry:
                self._tensor(value)
            elif kind is Global:
                if "." in value.name:
                    self.protocol = 4  # below it, a reader looks for an attribute of that name, dot included
                module, name = in_python_3(value) if self.protocol > 2 else (value.module, value.name)
                out += f"c{module}\n{name}\n".encode()
                self._put(value)
            elif kind is ByteString:
                out += b"T" + _pack_uint(len(value)) + value
                self._put(key)
            elif kind is bytes and value:
                self._call(_ENCODE, (value.decode("latin-1"), "latin1"), key)
            elif kind is bytes:
                self._call(_BYTES, (), key)
            elif kind is complex:
                self._call(_COMPLEX, (value.real, value.imag), key)
            elif kind is bytearray:
                self._call(_BYTEARRAY, (bytes(value),) if value else (), key)
            elif kind is LongValue:  # no other value is the same, so its text is not memoized
                if value.kind == "bytearray":
                    self.leaf(_BYTEARRAY)
                raw = value.whole().decode("latin-1").encode()
                self.leaf(_ENCODE)
                out += b"X" + _pack_uint(len(raw)) + raw
                self.leaf("latin1")
                out += b"\x86R\x85R" if value.kind == "bytearray" else b"\x86R"
                self._put(key)
            else:
                return False
        elif kind is int:
            out += integer(value)
        elif value is None:
            out += b"N"
        elif kind is bool:
            out += b"\x88" if value else b"\x89"
        elif kind is float:
            out += b"G" + _pack_float(value)
        elif kind is StorageRef:
            # A persistent id. torch reads every tensor of a storage with the type that it meets first; only bytes and
            # untyped go together. A storage without bytes is not shared: torch makes a new one for each tensor.
            storage, dtype = value.storage, value.dtype
            first = self.types.setdefault(id(storage), dtype)
            names = {first and first.name, dtype and dtype.name}
            if first is not dtype and storage.nbytes and not names <= {"u8", None}:
                what = f"one storage is viewed as {first or 'untyped'} and as {dtype or 'untyped'}"
                raise Conflict(what, "torch can neither save nor load that: it would read both as one dtype.")
            cls = UNTYPED_STORAGE if dtype is None else Global("torch", str(dtype.storage))
            out += b"("
            for part in ("storage", cls, self.key_of(storage), storage.location):
                self.leaf(part)
            out += integer(storage.nbytes // (dtype.itemsize if dtype else 1)) + b"t"
            self._put()
            out += b"Q"
        else:
            out += b")"
        return True

    def _call(self, fn: Global, args: tuple[Any, ...], key: Any = None) -> None:
        self.leaf(fn)
        self._arguments(args)
        self.out += b"R"
        self._put(key)

    def _arguments(self, args: tuple[Any, ...]) -> None:
        """A tuple with a single reference: of leaves, calls, and tuples and dictionaries of leaves."""
        if not args:
            self.out += b")"
            return
        if len(args) > 3:
            self.out += b"("
        for arg in args:
            kind = type(arg)
            if kind is tuple:
                self._arguments(arg)
            elif kind is _Call:
                self._call(arg.fn, arg.args)
            elif kind is dict:
                self.out += b"}"
                self._put()
                for part in self._items(arg):
                    self.leaf(part)
            else:
                self.leaf(arg)
        self.out += _TUPLE[min(len(args), 4)]
        self._put()

    def _tensor(self, entry: TensorEntry) -> None:
        storage, flags, out, first = entry.storage, entry.flags, self.out, self.count
        key, typed, is_plain = self.key_of(storage), entry.dtype.storage is not None, flags is NO_FLAGS
        # A plain one is written like the last of its kind, but for its key and memo indices: most tensors are alike.
        raw, is_new = key.encode("utf-8", "surrogatepass"), key not in self.memo and id(storage) not in self.types
        kind = (entry.dtype, entry.shape, entry.stride, entry.offset, storage.location, storage.nbytes)
        if is_plain and is_new and (template := self.templates.get(kind)) is not None:
            begin, rest, fields = template
            self.types[id(storage)] = entry.dtype if typed else None
            self.count = after = first + len(fields) // 2
            self.memo[key], self.memo[id(entry)] = first, after - 1
            fields[::2] = range(first, after)
            out += b"".join((begin, _pack_uint(len(raw)), raw, b"r", rest.pack(*fields)))
            return
        # `_rebuild_tensor_v3` cannot express `requires_grad`: torch's own files with both do not load.
        later = flags.requires_grad and not (typed or flags.parameter)
        needs_grad = flags.requires_grad and typed and not flags.parameter
        args: tuple[Any, ...] = (StorageRef(storage, entry.dtype if typed else None), entry.offset)
        args += (entry.shape, entry.stride, needs_grad, _NO_HOOKS)
        if not typed:
            args += (Global("torch", entry.dtype.torch),)
        if flags.conj or flags.neg:
            args += ({name: True for name in ("conj", "neg") if getattr(flags, name)},)
        call = _Call(REBUILD_TENSOR_V2 if typed else REBUILD_TENSOR_V3, args)
        if later:
            call = _Call(REBUILD_FROM_TYPE, (call.fn, TENSOR, args, {"requires_grad": True}))
        if flags.parameter:
            call = _Call(REBUILD_PARAMETER, (call, flags.requires_grad, _NO_HOOKS))
        begin_at, memo_size, self.puts = len(out), len(self.memo), []
        self._call(call.fn, call.args, id(entry))
        puts, self.puts = self.puts, None
        # Everything but the key and the tensor was in the memo before.
        if is_plain and is_new and first > 255 and len(self.memo) == memo_size + 2:
            ends = [*(put + 1 for put in puts[1:]), len(out)]
            fields = [item for put, end in zip(puts, ends, strict=True) for item in (0, bytes(out[put + 5 : end]))]
            layout = struct.Struct("<" + "".join(f"I{len(part)}s" for part in fields[1::2]))
            self.templates[kind] = _Template(bytes(out[begin_at : puts[0] - len(raw) - 4]), layout, fields)

    # Containers: generators of their parts, which are written as they are yielded -----------------------------------

    def container(self, value: Any) -> Iterator[Any]:
        out, key = self.out, id(value)
        if isinstance(value, OrderedDict):
            self.leaf(ORDERED_DICT)
            out += b")R"
            self._put(key)
            yield from self._items(value, exact=False)
            if value.attributes is not None:
                yield value.attributes
                out += b"b"
        elif isinstance(value, dict):
            out += b"}"
            self._put(key)
            yield from self._items(value)
        elif isinstance(value, list):
            out += b"]"
            self._put(key)
            yield from self._elements(value)
        elif isinstance(value, tuple):
            if len(value) > 3:
                out += b"("
            yield from value
            # If it contains itself, it was written in between.
            if not self._recall(key, b"1" if len(value) > 3 else b"0" * len(value)):
                out += _TUPLE[min(len(value), 4)]
                self._put(key)
        elif isinstance(value, (Object, Composite)):
            yield from self._object(value.made if isinstance(value, Composite) else value, key)
        elif isinstance(value, Set):
            # Written again inside itself where an item refers to it; that ends, unless nothing new was memoized
            # meanwhile.
            if self.begun.get(key) == len(self.memo):
                raise Unsupported("a set that contains itself cannot be written", "Protocol 2 cannot express it.")
            self.begun[key] = len(self.memo)
            self.leaf(_FROZENSET if value.frozen else _SET)
            out += b"]"
            self._put()
            yield from self._elements(value.items)
            if not self._recall(key, b"00"):
                out += b"\x85"
                self._put()
                out += b"R"
                self._put(key)
        else:
            why = "A checkpoint holds tensors, strings, numbers, bytes, lists, tuples, dictionaries and sets."
            raise Unsupported(f"a value of type {type(value).__name__} cannot be written", why)

    def _elements(self, values: list[Any], one: bytes = b"a", many: bytes = b"e") -> Iterator[Any]:
        for start in range(0, len(values), _BATCH):
            alone = len(values) == 1 and one != b""
            self.out += b"" if alone else b"("
            yield from values[start : start + _BATCH]
            self.out += one if alone else many

    def _items(self, value: dict[Any, Any], exact: bool = True) -> Iterator[Any]:
        """A plain dict closes its last batch like the others; in other mappings a last single item is on its own."""
        items = iter(value.items())
        while batch := list(islice(items, _BATCH)):
            alone = len(batch) == 1 and (len(value) == 1 or not exact)
            self.out += b"" if alone else b"("
            for item in batch:
                yield from item
            self.out += b"s" if alone else b"u"
        if exact and value and len(value) % _BATCH == 0:
            self.out += b"(u"  # Python's pickler detects the end of a plain dict by an empty batch

    def _object(self, node: Object, key: int) -> Iterator[Any]:
        parts = [node.fn, node.args]
        if node.kwargs is not None:
            parts.append(node.kwargs)
            self.protocol = 4
        yield from parts
        if self._recall(key, b"0" * len(parts)):  # one of its own arguments refers to it
            return
        self.out += b"R" if node.how == "call" else b"\x92" if node.kwargs is not None else b"\x81"
        self._put(key)
        if node.elements is not None:
            if node.adds:
                self.protocol = 4
            yield from self._elements(node.elements, *((b"", b"\x90") if node.adds else ()))
        if node.items is not None:
            yield from self._items(node.items, exact=False)
        if node.state is not MISSING:
            yield node.state
            self.out += b"b"


def in_python_3(name: Global) -> tuple[str, str]:
    """The Python 3 module and name for a name of Python 2: readers translate them only up to protocol 2."""
    module = IMPORT_MAPPING.get(name.module, name.module)
    return NAME_MAPPING.get((name.module, name.name), (module, name.name))


_TUPLE = (b")", b"\x85", b"\x86", b"\x87", b"t")


def integer(value: int) -> bytes:
    """The opcode that pushes a number."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _pack_int(value)
    size = value.bit_length() // 8 + 1
    if value < 0 and value == -(1 << (size * 8 - 9)):  # the sign bit fits into one byte less
        size -= 1
    raw = value.to_bytes(size, "little", signed=True)
    return b"\x8a" + bytes([size]) + raw if size < 256 else b"\x8b" + _pack_int(size) + raw
