"""Two trees compared as graphs, and two live objects bit for bit."""

import struct
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from ckptool.checkpoint import Checkpoint, Composite, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.training.parallel import local

# Trees ----------------------------------------------------------------------------------------------------------------


class Mapping:
    """Which object of one graph stands for which of the other: one to one, or it is not the same graph."""

    def __init__(self) -> None:
        self.pairs: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.alive: list[Any] = []

    def met(self, a: Any, b: Any, where: str, key: Callable[[Any], int] = id) -> bool:
        """True if the pair was compared before; fails where one of the two is paired with a third."""
        one, other = key(a), key(b)
        known = self.pairs.get(one)
        assert known in (None, other), f"{where}: the same object on the left, two on the right"
        assert self.back.get(other) in (None, one), f"{where}: two objects on the left, one on the right"
        self.pairs[one], self.back[other] = other, one
        self.alive += (a, b)
        return known is not None


def assert_same_tree(a: Any, b: Any, *, locations: bool = True) -> None:
    """Fails unless two trees are the same graph: types, keys and their order, identity of what is shared, tensors'
    bytes, views, flags, locations and which of them share a storage. Floats are compared by their bits."""
    if isinstance(a, Checkpoint) and isinstance(b, Checkpoint):
        a, b = a.tree, b.tree
    objects, storages = Mapping(), Mapping()
    pending: list[tuple[Any, Any, str]] = [(a, b, "")]
    while pending:
        x, y, where = pending.pop()
        assert type(x) is type(y), (
            f"{where or 'the top'}: {type(x).__name__} {x!r:.80} became {type(y).__name__} {y!r:.80}"
        )
        if isinstance(x, StorageRef):
            assert x.dtype is y.dtype, where
            _same_storage(x.storage, y.storage, storages, where, locations)
        elif isinstance(x, (dict, list, tuple, Set, Object, Composite, TensorEntry, bytearray)) and x != ():
            if objects.met(x, y, where):
                continue
            if isinstance(x, TensorEntry):
                for name in ("dtype", "shape", "stride", "offset", "flags"):
                    one, other = getattr(x, name), getattr(y, name)
                    assert one == other, f"{where}: {name} {one} became {other}"
                _same_storage(x.storage, y.storage, storages, where, locations)
            pending += [(p, q, f"{where}/{name}") for p, q, name in _parts(x, y, where)]
        else:
            assert _scalar(x) == _scalar(y), f"{where}: {x!r:.80} became {y!r:.80}"


def _same_storage(x: Storage, y: Storage, storages: Mapping, where: str, locations: bool) -> None:
    if storages.met(x, y, f"{where} (storage)"):
        return
    assert not locations or x.location == y.location, where
    assert x.nbytes == y.nbytes, where
    for at in range(0, x.nbytes, 1 << 24):
        assert x.data.read(at, 1 << 24) == y.data.read(at, 1 << 24), f"{where}: other bytes"


def _parts(x: Any, y: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    if isinstance(x, dict):
        assert len(x) == len(y), f"{where}: {list(x)!r:.200} became {list(y)!r:.200}"
        for (k, v), (other, w) in zip(x.items(), y.items(), strict=True):
            yield k, other, "key"
            yield v, w, str(k)[:40]
        if isinstance(x, OrderedDict):
            yield x.attributes, y.attributes, "(attributes)"
    elif isinstance(x, (list, tuple)):
        assert len(x) == len(y), f"{where}: {len(x)} parts became {len(y)}"
        yield from ((p, q, str(i)) for i, (p, q) in enumerate(zip(x, y, strict=True)))
    elif isinstance(x, Set):
        assert x.frozen == y.frozen, where
        yield x.items, y.items, "items"
    elif isinstance(x, Composite):
        assert (x.kind, x.dtype, x.shape) == (y.kind, y.dtype, y.shape), where
        yield x.made.fn, y.made.fn, "(callable)"
        yield x.made.args, y.made.args, "(args)"
    elif isinstance(x, Object):
        assert (x.how, x.adds) == (y.how, y.adds), where
        for name in ("fn", "args", "kwargs", "items", "elements", "state"):
            yield getattr(x, name), getattr(y, name), f"({name})"
    elif isinstance(x, bytearray):
        assert x == y, where


def _scalar(value: Any) -> Any:
    if type(value) is float:
        return struct.pack("<d", value)
    if type(value) is complex:
        return struct.pack("<2d", value.real, value.imag)
    if isinstance(value, LongValue):
        return bytes(value), value.kind == "bytearray"
    return id(value) if isinstance(value, Global) else value


# Live objects ---------------------------------------------------------------------------------------------------------

_ATOMS = (
    *(bool, int, str, bytes, type(None), type, type(...), types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout),
)


def assert_same_objects(a: Any, b: Any, *, storages: bool = True, tuples: bool = False) -> None:
    """Fails unless two objects that torch loaded are the same, bit for bit: taken apart by their own `__reduce_ex__`,
    torch tensors too, and the bytes of storages and arrays compared. What is shared must be shared in both.

    storages=False: of strided tensors only the values count, not what else is in their storage.  tuples: so do which
    tuples, sets and byte arrays are one object.
    """
    objects, stored = Mapping(), Mapping()
    pending: list[tuple[Any, Any, str]] = [(a, b, "")]
    while pending:
        x, y, where = pending.pop()
        assert type(x) is type(y), f"{where}: {type(x)} became {type(y)}"
        if isinstance(x, (float, complex)) and not isinstance(x, numpy.generic):
            assert _scalar(x) == _scalar(y), f"{where}: {x} became {y}"
        elif isinstance(x, _ATOMS):
            assert x == y, f"{where}: {x!r} became {y!r}"
        elif isinstance(x, (torch.TypedStorage, torch.UntypedStorage)):
            _same_torch_storage(x, y, stored, where)
        elif tuples and isinstance(x, (tuple, set, frozenset, bytearray)) and x and objects.met(x, y, where):
            continue
        elif (
            not storages
            and isinstance(x, torch.Tensor)
            and x.layout is torch.strided
            and not (x.is_quantized or x.is_nested)
        ):
            if not objects.met(x, y, where):
                assert _values_of(x) == _values_of(y), f"{where}: {x} became {y}"
                pending.append((vars(x), vars(y), f"{where}/attributes"))
        elif isinstance(x, (bytearray, numpy.generic)):
            assert bytes(x) == bytes(y) and getattr(x, "dtype", 0) == getattr(y, "dtype", 0), where
        elif isinstance(x, (set, frozenset)):
            assert len(x) == len(y), where
            pending += [
                (p, q, f"{where}/item") for p, q in zip(sorted(x, key=_order), sorted(y, key=_order), strict=True)
            ]
        elif isinstance(x, tuple) and type(x) is tuple:
            assert len(x) == len(y), where
            pending += [(p, q, f"{where}/{i}") for i, (p, q) in enumerate(zip(x, y, strict=True))]
        elif not objects.met(x, y, where):
            pending += _taken_apart(x, y, where)


def _values_of(tensor: torch.Tensor) -> Any:
    facts = (type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.is_neg(), tensor.is_conj())
    if tensor.device.type == "meta":
        return facts
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
    return *facts, bytes(plain.reshape(-1).view(torch.uint8).numpy())


def _order(value: Any) -> str:
    """A text to sort the items of sets by: the `repr` of a set within a set follows neither's own order."""
    if isinstance(value, (set, frozenset, tuple)):
        parts = map(_order, value)
        return f"{type(value).__name__}{list(parts) if isinstance(value, tuple) else sorted(parts)}"
    return repr(value)


def _same_torch_storage(x: Any, y: Any, storages: Mapping, where: str) -> None:
    x, y = (s._untyped_storage if isinstance(s, torch.TypedStorage) else s for s in (x, y))
    assert (x.nbytes(), x.device) == (y.nbytes(), y.device), where
    if x.nbytes() and x.device.type == "cpu" and not storages.met(x, y, f"{where} (storage)", lambda s: s.data_ptr()):
        assert _storage_bytes(x) == _storage_bytes(y), f"{where}: other bytes"


def _storage_bytes(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def _taken_apart(x: Any, y: Any, where: str) -> list[tuple[Any, Any, str]]:
    if type(x) is dict or type(x) is list:
        left, right = (list(v.items()) if isinstance(v, dict) else v for v in (x, y))
        assert len(left) == len(right), f"{where}: {len(left)} entries became {len(right)}"
        return [(p, q, f"{where}/{i}") for i, (p, q) in enumerate(zip(left, right, strict=True))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reduced = [
            (x.__class__, v.__dict__)
            if type(v).__reduce_ex__ is object.__reduce_ex__ and _plain(v)
            else v.__reduce_ex__(2)
            for v in (x, y)
        ]
    left, right = (
        [list(part) if i in (3, 4) and part is not None else part for i, part in enumerate(r)]
        if isinstance(r, tuple)
        else r
        for r in reduced
    )
    assert type(left) is type(right), where
    if isinstance(left, str):
        assert left == right, where
        return []
    return [(left, right, where)]


def _plain(value: Any) -> bool:
    return (
        type(value).__reduce__ is object.__reduce__
        and hasattr(value, "__dict__")
        and "__getstate__" not in {name for cls in type(value).__mro__[:-1] for name in vars(cls)}
        and not isinstance(value, (dict, list))
    )


# Bits -----------------------------------------------------------------------------------------------------------------


def first_difference(one: Any, other: Any, place: str = "") -> str:
    """The first address at which two trees of plain values and tensors differ, bit for bit; "" where they do not."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return "" if same and _bits(one) == _bits(other) else place or "the top"
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        return next((found for key in one if (found := first_difference(one[key], other[key], f"{place}/{key}"))), "")
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return first_difference(dict(enumerate(one)), dict(enumerate(other)), place)
    return "" if type(one) is type(other) and (one == other or one != one) else place or "the top"


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(local(tensor).contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
