"""A tree to a pickle of protocol 2, byte for byte as Python's pickler writes what torch gives it.

One difference is meant: equal texts are written once and referred to afterwards, whatever objects they were, so that
the same tree always gives the same bytes. Protocol 2 is what every torch reads, `weights_only` included. Three things
need protocol 4: the name of a nested class (`Outer.Inner`), an object made with keyword arguments, and one that items
are added to.

Source of the conventions: Modules/_pickle.c (save_tuple, batch_list, batch_dict_exact, save_reduce).
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any

from ckptool.checkpoint import Composite, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.numpy_arrays import LazyBytes
from ckptool.errors import Conflict, Unsupported
from ckptool.pickles.builders import ORDERED_DICT
from ckptool.pickles.torch_objects import (
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
_COMPLEX, _BYTES, _BYTEARRAY = (
    Global("__builtin__", "complex"),
    Global("__builtin__", "bytes"),
    Global("__builtin__", "bytearray"),
)
_ENCODE = Global("_codecs", "encode")

Steps = Generator[Any, None, None]


def encode(tree: Any, key_of: Callable[[Storage], str]) -> bytes:
    """The pickle of `tree`. `key_of` names a storage's record; it is asked in the order in which storages are met.

    Raises `Unsupported` for a value that no checkpoint holds (a numpy array, a live tensor).
    """
    encoder = _Encoder(key_of)
    data = encoder.run(tree)
    return data if encoder.protocol == 2 else _Encoder(key_of, encoder.protocol).run(tree)


class _Encoder:
    """Writes one pickle. protocol: raised on the way where something needs it; names follow its rules then."""

    def __init__(self, key_of: Callable[[Storage], str], protocol: int = 2) -> None:
        self.key_of = key_of
        self.out = bytearray(b"\x80\x02")
        self.count = 0  # values memoized so far
        self.texts: dict[Any, bytes] = {}  # text, bytes or name -> the opcode that recalls it
        self.objects: dict[int, bytes] = {}  # id of a container -> the opcode that recalls it
        self.begun: dict[int, int] = {}  # id of a set -> how many objects were stored when it was begun
        self.protocol = protocol
        self.names_as_in_python_3 = protocol > 2
        self.types: dict[int, DType | None] = {}  # id of a storage -> the element type it was first written with

    def run(self, tree: Any) -> bytes:
        if not self._leaf(tree):
            pending: list[Iterator[Any]] = [self._steps(tree)]
            while pending:
                for child in pending[-1]:  # a child that is not a leaf: go down, and come back here
                    pending.append(self._steps(child))
                    break
                else:
                    pending.pop()
        self.out[1] = self.protocol
        self.out += b"."
        return bytes(self.out)

    # Leaves: everything that refers to no container ---------------------------------------------------------------

    def _leaf(self, value: Any) -> bool:
        """Writes `value` if it has no containers in it, or was written before; says whether it did."""
        kind = type(value)
        if kind is str:
            self._text(value)
        elif kind is int:
            self.out += integer(value)
        elif kind is TensorEntry:
            if not self._recalled(value):
                self._entry(value)
        elif value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"\x88" if value else b"\x89"
        elif kind is float:
            self.out += b"G" + _pack_float(value)
        elif kind is Global:
            self._global(value)
        elif kind is tuple and not value:
            self.out += b")"
        elif kind is bytes or kind is ByteString:
            self._bytes(value)
        elif kind is complex:
            if not self._recalled(value):
                self._global(_COMPLEX)
                self.out += (
                    b"G" + _pack_float(value.real) + b"G" + _pack_float(value.imag) + b"\x86" + self._put() + b"R"
                )
                self._memoize(value)
        else:
            return self._recalled(value) if kind is not StorageRef else self._storage(value.storage, value.dtype)
        return True

    def _put(self) -> bytes:
        """The opcode that memoizes what is on top of the stack."""
        index = self.count
        self.count += 1
        return b"q" + bytes([index]) if index < 256 else b"r" + _pack_uint(index)

    def _recalled(self, value: Any) -> bool:
        recall = self.objects.get(id(value))
        if recall is None:
            return False
        self.out += recall
        return True

    def _memoize(self, value: Any) -> None:
        put = self._put()
        self.out += put
        self.objects[id(value)] = (b"h" if put[0] == 0x71 else b"j") + put[1:]

    def _memoize_text(self, value: Any, opcode: bytes) -> None:
        put = self._put()
        self.out += opcode + put
        self.texts[value] = (b"h" if put[0] == 0x71 else b"j") + put[1:]

    def _text(self, text: str) -> None:
        recall = self.texts.get(text)
        if recall is not None:
            self.out += recall
        else:
            raw = text.encode("utf-8", "surrogatepass")
            self._memoize_text(text, b"X" + _pack_uint(len(raw)) + raw)

    def _global(self, name: Global) -> None:
        recall = self.texts.get(name)
        if recall is not None:
            self.out += recall
            return
        if "." in name.name:
            self.protocol = 4  # below it, a reader looks for an attribute that is called so, dot and all
        module, attribute = in_python_3(name) if self.names_as_in_python_3 else (name.module, name.name)
        self._memoize_text(name, b"c" + module.encode() + b"\n" + attribute.encode() + b"\n")

    def _bytes(self, value: bytes) -> None:
        key = (type(value), value)
        recall = self.texts.get(key)
        if recall is not None:
            self.out += recall
        elif type(value) is ByteString:
            self._memoize_text(key, b"T" + _pack_uint(len(value)) + value)
        elif not value:
            self._global(_BYTES)
            self._memoize_text(key, b")R")
        else:
            self._global(_ENCODE)
            self._text(value.decode("latin-1"))
            self._text("latin1")
            self.out += b"\x86" + self._put()
            self._memoize_text(key, b"R")

    # Tensors -----------------------------------------------------------------------------------------------------

    def _entry(self, entry: TensorEntry) -> None:
        out, flags = self.out, entry.flags
        typed = entry.dtype.storage is not None
        # `_rebuild_tensor_v3` cannot say it: torch's own files of this kind do not load.
        later = flags.requires_grad and not (typed or flags.parameter)
        if flags.parameter:
            self._global(REBUILD_PARAMETER)
        if later:
            self._global(REBUILD_FROM_TYPE)
            out += b"("
        self._global(REBUILD_TENSOR_V2 if typed else REBUILD_TENSOR_V3)
        if later:
            self._global(TENSOR)
        out += b"(("
        self._storage(entry.storage, entry.dtype if typed else None, opened=True)
        out += integer(entry.offset)
        self._sizes(entry.shape)
        self._sizes(entry.stride)
        out += b"\x88" if flags.requires_grad and typed and not flags.parameter else b"\x89"
        self._no_hooks()
        if not typed:
            self._global(Global("torch", entry.dtype.torch))
        if flags.conj or flags.neg:
            self._true_by_name([name for name in ("conj", "neg") if getattr(flags, name)])
        out += b"t" + self._put()
        if later:
            self._true_by_name(["requires_grad"])
            out += b"t" + self._put()
        out += b"R"
        if flags.parameter:
            out += self._put()
            out += b"\x88" if flags.requires_grad else b"\x89"
            self._no_hooks()
            out += b"\x87" + self._put() + b"R"
        self._memoize(entry)

    def _storage(self, storage: Storage, dtype: DType | None, opened: bool = False) -> bool:
        """A persistent id: `("storage", class, key, location, number of elements)`."""
        if self.types.setdefault(id(storage), dtype) is not dtype:
            self._refuse_two_types(storage, dtype)
        if not opened:
            self.out += b"("
        self._text("storage")
        self._global(UNTYPED_STORAGE if dtype is None else Global("torch", str(dtype.storage)))
        self._text(self.key_of(storage))
        self._text(storage.location)
        self.out += integer(storage.nbytes // (dtype.itemsize if dtype else 1)) + b"t" + self._put() + b"Q"
        return True

    def _refuse_two_types(self, storage: Storage, dtype: DType | None) -> None:
        """torch reads every tensor of a storage with the type that it meets first; only bytes and untyped go together.

        A storage without bytes is none to torch: it makes a new one for each tensor.
        """
        first = self.types[id(storage)]
        if storage.nbytes and not all(kind is None or kind.name == "u8" for kind in (first, dtype)):
            raise Conflict(
                f"one storage is viewed as {first or 'untyped'} and as {dtype or 'untyped'}",
                "torch can neither save nor load that: it would read both as one type.",
            )

    def _sizes(self, sizes: tuple[int, ...]) -> None:
        if not sizes:
            self.out += b")"
            return
        if len(sizes) > 3:
            self.out += b"("
        self.out += b"".join(map(integer, sizes))
        self.out += _TUPLE[min(len(sizes), 4)] + self._put()

    def _no_hooks(self) -> None:
        self._global(ORDERED_DICT)
        self.out += b")R" + self._put()

    def _true_by_name(self, names: list[str]) -> None:
        """A dictionary in which each of one or two names is true."""
        self.out += b"}" + self._put()
        self.out += b"(" * (len(names) > 1)
        for name in names:
            self._text(name)
            self.out += b"\x88"
        self.out += b"s" if len(names) == 1 else b"u"

    # Containers: generators that give the children they cannot write themselves ------------------------------------

    def _steps(self, value: Any) -> Steps:
        if isinstance(value, OrderedDict):
            return self._ordered_dict(value)
        for kind, steps in self._STEPS:
            if isinstance(value, kind):
                return steps(self, value)
        raise Unsupported(
            f"a value of type {type(value).__name__} cannot be written",
            "A checkpoint holds tensors, strings, numbers, bytes, lists, tuples, dictionaries and sets.",
        )

    def _each(self, values: Any) -> Steps:
        for value in values:
            if not self._leaf(value):
                yield value

    def _tuple(self, value: tuple[Any, ...]) -> Steps:
        if len(value) > 3:
            self.out += b"("
        yield from self._each(value)
        # It contains itself, and was written on the way: drop the parts, recall the whole.
        if id(value) in self.objects:
            self.out += (b"1" if len(value) > 3 else b"0" * len(value)) + self.objects[id(value)]
        else:
            self.out += _TUPLE[min(len(value), 4)]
            self._memoize(value)

    def _list(self, value: list[Any]) -> Steps:
        self.out += b"]"
        self._memoize(value)
        yield from self._appends(value)

    def _appends(self, values: list[Any], one: bytes = b"a", many: bytes = b"e") -> Steps:
        for start in range(0, len(values), _BATCH):
            batch = values[start : start + _BATCH]
            alone = len(values) == 1 and one != b""
            self.out += b"(" * (not alone)
            yield from self._each(batch)
            self.out += one if alone else many

    def _dict(self, value: dict[Any, Any]) -> Steps:
        self.out += b"}"
        self._memoize(value)
        yield from self._items(value, exact=True)

    def _items(self, value: dict[Any, Any], exact: bool) -> Steps:
        """A plain dict closes its last batch as the others; of other mappings a last single item stands alone."""
        items = iter(value.items())
        left = len(value)
        while left:
            batch = list(islice(items, _BATCH))
            left -= len(batch)
            alone = len(batch) == 1 and (len(value) == 1 or not exact)
            self.out += b"(" * (not alone)
            for key, item in batch:
                if not self._leaf(key):
                    yield key
                if not self._leaf(item):
                    yield item
            self.out += b"s" if alone else b"u"
        if exact and value and len(value) % _BATCH == 0:
            self.out += b"(u"  # Python's pickler finds out that a plain dict is at its end by an empty batch

    def _ordered_dict(self, value: OrderedDict) -> Steps:
        self._global(ORDERED_DICT)
        self.out += b")R"
        self._memoize(value)
        yield from self._items(value, exact=False)
        if value.attributes is not None:
            yield from self._each([value.attributes])
            self.out += b"b"

    def _set(self, value: Set) -> Steps:
        # Written again inside itself, where one of its items refers to it; that ends, unless nothing new was stored on
        # the way.
        if self.begun.get(id(value)) == len(self.objects):
            raise Unsupported(
                "a set that contains itself cannot be written",
                "Protocol 2, which every torch reads, cannot express it.",
            )
        self.begun[id(value)] = len(self.objects)
        self._global(_FROZENSET if value.frozen else _SET)
        self.out += b"]" + self._put()
        yield from self._appends(value.items)
        if id(value) in self.objects:
            self.out += b"00" + self.objects[id(value)]
            return
        self.out += b"\x85" + self._put() + b"R"
        self._memoize(value)

    def _bytearray(self, value: bytearray) -> Steps:
        self._global(_BYTEARRAY)
        if value:
            self._bytes(bytes(value))
            self.out += b"\x85" + self._put()
        else:
            self.out += b")"
        self.out += b"R"
        self._memoize(value)
        yield from ()

    def _long(self, value: LazyBytes) -> Steps:
        """As `_bytes`, but nobody else has the same, so it is not remembered by its contents."""
        if value.mutable:
            self._global(_BYTEARRAY)
        raw = value.whole().decode("latin-1").encode()
        self._global(_ENCODE)
        self.out += b"X" + _pack_uint(len(raw)) + raw
        self._text("latin1")
        self.out += b"\x86R"
        if value.mutable:
            self.out += b"\x85R"
        self._memoize(value)
        yield from ()

    def _object(self, made: Object, whole: Any = None) -> Steps:
        whole = made if whole is None else whole
        yield from self._each([made.fn, made.args])
        if made.kwargs is not None:
            yield from self._each([made.kwargs])
            self.protocol = 4
        if id(whole) in self.objects:  # one of its own arguments refers to it
            self.out += (b"0" * (3 if made.kwargs is not None else 2)) + self.objects[id(whole)]
            return
        self.out += b"R" if made.how == "call" else b"\x92" if made.kwargs is not None else b"\x81"
        self._memoize(whole)
        if made.elements is not None:
            if made.adds:
                self.protocol = 4
                yield from self._appends(made.elements or [], one=b"", many=b"\x90")
            else:
                yield from self._appends(made.elements or [])
        if made.items is not None:
            yield from self._items(made.items, exact=False)
        if made.state is not MISSING:
            yield from self._each([made.state])
            self.out += b"b"

    _STEPS: tuple[tuple[type, Callable[[Any, Any], Steps]], ...] = (
        (dict, _dict),
        (list, _list),
        (tuple, _tuple),
        (Object, _object),
        (Composite, lambda self, value: self._object(value.made, value)),
        (Set, _set),
        (bytearray, _bytearray),
        (LazyBytes, _long),
    )


def in_python_3(name: Global) -> tuple[str, str]:
    """The module and name that Python 3 has for a name of Python 2: readers translate them only up to protocol 2."""
    module = IMPORT_MAPPING.get(name.module, name.module)
    return NAME_MAPPING.get((name.module, name.name), (module, name.name))


_TUPLE = (b")", b"\x85", b"\x86", b"\x87", b"t")


def integer(value: int) -> bytes:
    """The opcode that puts a number on the stack."""
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
