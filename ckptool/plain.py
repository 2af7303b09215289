"""Plain Python values of the inert objects that a checkpoint holds: dates, paths, numpy scalars and arrays, configuration.

For showing, comparing and JSON. Every class here is named in a table of ours; no name is ever taken from a file and looked up.
What is not in the tables stays the inert object that it was.
Sources: the `__reduce__` methods of the standard library (Python 3.8 to 3.14), numpy 1 and 2, and omegaconf 2.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import math
import os
import pathlib
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Composite, LongBytes, StorageRef, TensorEntry
from ckptool.errors import CkptoolError, Corrupt, Unsupported, printable
from ckptool.graphs import After, Done, Empty, Made, Of, Remake
from ckptool.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.pickles.known import is_torch_name

_HOMES = {
    "__builtin__": "builtins",
    "pathlib._local": "pathlib",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy.core._multiarray_umath": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
}


def canonical(name: Any) -> str:
    """A name as the tables here spell it: one home for a module that moved; the empty text for what is no name."""
    return f"{_HOMES.get(name.module, name.module)}.{name.name}" if type(name) is Global else ""


def plain(value: Any) -> Any:
    """The value with every object that is understood replaced by Python's own; unknown objects and tensors stay.

    Namespaces, configuration, counters become dictionaries, deques lists, `torch.Size` tuples, devices and dtypes texts, numpy scalars
    Python's numbers, numpy arrays an `Array`. Sharing and cycles stay.
    """
    return Remake(_begin).run(value)


def _begin(value: Any) -> Made:
    if isinstance(value, Object):
        value = expand(value)
    if isinstance(value, Global):
        return Done(_name(value))
    if isinstance(value, dict):
        return _dict(value)
    if type(value) is list:
        made: list[Any] = []
        return Empty(made, lambda of, items=value: made.extend(map(of, items)))  # type: ignore[misc]
    if type(value) is tuple:
        return After(value, tuple)
    if isinstance(value, Set):
        items = Set([], value.frozen)
        return Empty(items, lambda of, old=value: items.items.extend(map(of, old.items)))  # type: ignore[misc]
    return Done(value)


def _dict(value: dict[Any, Any]) -> Made:
    made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}

    def fill(of: Of) -> None:
        for key, item in value.items():
            new = of(key)
            made[new if _hashable(new) and new not in made else key] = of(item)
        if isinstance(value, OrderedDict) and isinstance(made, OrderedDict):
            made.attributes = of(value.attributes)

    return Empty(made, fill)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _name(name: Global) -> Any:
    return str(name) if is_torch_name(name) else name


def expand(node: Object) -> Any:
    """One object as Python's own value; where that is a container, its parts are still nodes. The node itself if it is unknown."""
    known = _SHAPES.get(canonical(node.fn))
    if known is not None:
        try:
            value = known(node)
        except (CkptoolError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
            return node  # not what the class itself would have written
        return node if value is NotImplemented else value
    if type(node.fn) is Global and node.fn.module == "omegaconf.nodes":
        return node.attributes.get("_val", node)
    return node


# Python's own classes ------------------------------------------------------------------------------------------------


def python_value(node: Any) -> Any:
    """The date, number, path, UUID, range or slice that an object stands for; `NotImplemented` for anything else.

    Raises `Corrupt` where the class is known and its arguments are not what it writes.
    """
    make = _VALUES.get(canonical(node.fn)) if isinstance(node, Object) else None
    if make is None or node.kwargs or node.items or node.elements is not None:
        return NotImplemented
    try:
        _check_arguments(node)
        return make(node)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
        raise Corrupt(
            f"{printable(node.name)} with arguments that it never writes", "The pickle was damaged, or made to mislead."
        ) from None


def _check_arguments(node: Object, levels: int = 3) -> None:
    """Raises `TypeError` for more arguments than these classes have, or arguments in arguments deeper than a time zone in a date."""
    if not levels or type(node.args) is not tuple or len(node.args) > 10:
        raise TypeError("more arguments than it has")
    for part in node.args:
        if isinstance(part, Object):
            _check_arguments(part, levels - 1)


def _stateless(node: Object) -> tuple[Any, ...]:
    if node.state is not MISSING and node.state is not None and node.state != {}:
        raise TypeError("a state")
    return tuple(_argument(part) for part in node.args)


def _argument(part: Any) -> Any:
    value = python_value(part) if isinstance(part, Object) else part
    if value is NotImplemented:
        raise TypeError("an argument of another kind")
    return value


def _of_bytes(cls: Callable[..., Any]) -> Callable[[Object], Any]:
    """Dates and times are pickled as the bytes of their fields; Python 2 wrote those as text."""

    def make(node: Object) -> Any:
        first, *rest = _stateless(node)
        return cls(first.encode("latin-1") if isinstance(first, str) else first, *rest)

    return make


def _of_arguments(cls: Callable[..., Any], *kinds: type) -> Callable[[Object], Any]:
    def make(node: Object) -> Any:
        args = _stateless(node)
        if not all(isinstance(arg, kinds) for arg in args):
            raise TypeError("an argument of another kind")
        return cls(*args)

    return make


def _fraction(node: Object) -> Any:
    """Fractions are pickled as `numerator/denominator`. An exponent, which Python would also read, could take all memory."""
    args = _stateless(node)
    if any(type(arg) is str and (len(arg) > 2_500 or not set(arg) <= set("-0123456789/")) for arg in args):
        raise ValueError("not as it is written")
    return _of_arguments(fractions.Fraction, str, int)(node)


def _timezone(node: Object) -> Any:
    zone = datetime.timezone(*_stateless(node))
    return datetime.timezone.utc if zone == datetime.timezone.utc and len(node.args) == 1 else zone


def _uuid(node: Object) -> Any:
    number = node.attributes["int"]
    if type(number) is not int or node.args:
        raise TypeError("no number")
    return uuid.UUID(int=number)


def _path(posix: bool, pure: bool) -> Callable[[Object], Any]:
    """A path of the other system's kind cannot be made here, and is a pure one."""
    native = not pure and posix == (os.name == "posix")
    cls = pathlib.Path if native else pathlib.PurePosixPath if posix else pathlib.PureWindowsPath
    return _of_arguments(cls, str)


def _primitive(cls: Callable[..., Any], *kinds: type) -> Callable[[Object], Any]:
    def make(node: Object) -> Any:
        args = _stateless(node)
        if len(args) > 1 or not all(type(arg) in kinds for arg in args):
            return NotImplemented
        return cls(*args)

    return make


_VALUES: dict[str, Callable[[Object], Any]] = {
    "datetime.datetime": _of_bytes(datetime.datetime),
    "datetime.date": _of_bytes(datetime.date),
    "datetime.time": _of_bytes(datetime.time),
    "datetime.timedelta": _of_arguments(datetime.timedelta, int),
    "datetime.timezone": _timezone,
    "decimal.Decimal": _of_arguments(decimal.Decimal, str),
    "fractions.Fraction": _fraction,
    "uuid.UUID": _uuid,
    "pathlib.PosixPath": _path(posix=True, pure=False),
    "pathlib.WindowsPath": _path(posix=False, pure=False),
    "pathlib.PurePosixPath": _path(posix=True, pure=True),
    "pathlib.PureWindowsPath": _path(posix=False, pure=True),
    "builtins.range": _of_arguments(range, int),
    "builtins.xrange": _of_arguments(range, int),
    "builtins.slice": _of_arguments(slice, int, float, str, type(None)),
    "builtins.int": _primitive(int, int),
    "builtins.long": _primitive(int, int),
    "builtins.float": _primitive(float, float, int),
    "builtins.bool": _primitive(bool, bool, int),
    "builtins.str": _primitive(str, str),
    "builtins.unicode": _primitive(str, str),
    "torch.torch_version.TorchVersion": _primitive(str, str),
}


# numpy ---------------------------------------------------------------------------------------------------------------

_LETTERS = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrayType:
    """A numpy element type without numpy. code: kind and size, `f8` or `U3`.  order: `<`, `>`, or `|` where it does not matter.

    fields: of a record, its (name, type, offset). unit: of a date or duration, (unit, count).
    """

    code: str
    order: str
    itemsize: int
    fields: tuple[tuple[str, ArrayType, int], ...] = ()
    unit: tuple[str, int] | None = None

    def __str__(self) -> str:
        if self.fields:
            return f"record of {len(self.fields)} fields"
        unit = f"[{self.unit[1] if self.unit[1] != 1 else ''}{self.unit[0]}]" if self.unit else ""
        return f"{'>' if self.order == '>' and self.itemsize > 1 else ''}{_OUR_NAMES.get(self.code, self.code)}{unit}"


_OUR_NAMES = {
    "b1": "bool", "i1": "i8", "i2": "i16", "i4": "i32", "i8": "i64", "u1": "u8", "u2": "u16", "u4": "u32", "u8": "u64",
    "f2": "f16", "f4": "f32", "f8": "f64", "c8": "c64", "c16": "c128", "M8": "datetime64", "m8": "timedelta64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Array:
    """A numpy array of a pickle: its element type, its shape, and its bytes in row-major order (column-major where `fortran`).

    data: the bytes, or where they are, of a large array that a format left in its file.
    """

    type: ArrayType
    shape: tuple[int, ...]
    data: bytes | LongBytes
    fortran: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def values(self, limit: int | None = None) -> list[Any] | None:
        """The elements in the order of their bytes, the first `limit` of them; None for types that Python has no value for."""
        width, count = self.type.itemsize, self.size if limit is None else min(limit, self.size)
        if isinstance(self.data, LongBytes) and count < self.size:
            data = self.data.data.read(0, count * width)
        else:
            data = bytes(self.data)
        items = [element(self.type, data[i * width : (i + 1) * width]) for i in range(count)]
        return None if NotImplemented in items else items

    def __repr__(self) -> str:
        return f"<numpy array {self.type}{list(self.shape)}>"


def element(kind: ArrayType, raw: bytes) -> Any:
    """One element as Python's own value; `NotImplemented` where Python has none."""
    letters = _LETTERS.get(kind.code)
    if kind.fields:
        return NotImplemented
    if letters is not None:
        parts = struct.unpack((">" if kind.order == ">" else "<") + letters, raw)
        return complex(*parts) if len(parts) == 2 else parts[0]
    if kind.code[0] == "U":
        return raw.decode("utf-32-be" if kind.order == ">" else "utf-32-le", "replace").rstrip("\0")
    return raw.rstrip(b"\0") if kind.code[0] == "S" else NotImplemented


def array_type(node: Any, depth: int = 0) -> ArrayType:
    """The element type that a pickled `numpy.dtype` names. Raises `Unsupported` for objects and what numpy cannot hold plainly."""
    if not isinstance(node, Object) or canonical(node.fn) != "numpy.dtype" or not node.args or depth > 8:
        raise Unsupported(
            "a numpy type that is not known", "Only numbers, texts, dates, bytes and records of them are read."
        )
    code, state = node.args[0], node.state
    if (
        type(code) is not str
        or not code.isascii()
        or code[:1] not in tuple("?biufcSUVmM")
        or not (code[1:].isdigit() or code == "?")
    ):
        kind = (
            "Python objects"
            if type(code) is str and code[:1] == "O"
            else f"the unknown type {printable(str(code)[:40])!r}"
        )
        raise Unsupported(f"a numpy array of {kind}", "Only numbers, texts, dates, bytes and records of them are read.")
    code = "b1" if code == "?" else code
    size = int(code[1:]) * (4 if code[0] == "U" else 1)
    if code[0] in "biufcmM" and code not in _LETTERS and code not in ("M8", "m8"):
        raise Unsupported(f"a numpy type {code!r}", "It differs from machine to machine.")
    if type(state) is not tuple:
        return ArrayType(code, "|" if size == 1 or code[0] in "SV" else "<", size)
    if len(state) < 7 or state[1] not in ("<", ">", "|", "=") or state[2] is not None:
        raise Unsupported("a numpy type of nested arrays, or damaged")
    order = "<" if state[1] == "=" else state[1]
    return ArrayType(code, order, size, _fields(state, size, depth), _unit(state) if code in ("M8", "m8") else None)


def _fields(state: tuple[Any, ...], size: int, depth: int) -> tuple[tuple[str, ArrayType, int], ...]:
    names, fields = state[3], state[4]
    if names is None:
        return ()
    found = []
    for name in names:
        kind, offset = array_type(fields[name][0], depth + 1), fields[name][1]
        if type(name) is not str or type(offset) is not int or offset < 0 or offset + kind.itemsize > size:
            raise Corrupt("a numpy record whose fields lie outside of it")
        found.append((name, kind, offset))
    return tuple(found)


def _unit(state: tuple[Any, ...]) -> tuple[str, int]:
    unit, count, *_ = state[8][-1] if len(state) > 8 else (b"generic", 1)
    unit = unit.decode("ascii") if isinstance(unit, bytes) else unit
    if (
        unit not in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")
        or type(count) is not int
    ):
        raise Corrupt("a numpy date of an unknown unit")
    return unit, count


def array(node: Object) -> Any:
    """The `Array` that an object stands for; `NotImplemented` if it is no plain numpy array. Raises `Corrupt` where sizes disagree."""
    called, state = canonical(node.fn), node.state
    if (
        called == "numpy.core.multiarray._reconstruct"
        and node.args
        and canonical(node.args[0]) == "numpy.ndarray"
        and type(state) is tuple
    ):
        shape, kind, fortran, data = state[-4:]
    elif called == "numpy.core.numeric._frombuffer" and len(node.args) == 4 and state is MISSING:
        data, kind, shape, order = node.args
        fortran = order == "F"
    else:
        return NotImplemented
    found = array_type(kind)
    data = _python2_bytes(data)
    if isinstance(data, list) or not isinstance(data, (bytes, bytearray, LongBytes)):
        raise Unsupported("a numpy array of Python objects", "It holds no plain numbers.")
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 64:
        raise Corrupt("a numpy array whose shape is not a list of numbers")
    if math.prod(shape) * found.itemsize != len(data):
        raise Corrupt(f"a numpy array of shape {list(shape)} and type {found} with {len(data):,} bytes")
    return Array(found, shape, data if isinstance(data, LongBytes) else bytes(data), bool(fortran))


def _python2_bytes(data: Any) -> Any:
    """What Python 2 called a text was read as UTF-8 where it happened to be that; its bytes are meant."""
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data


def scalar(node: Object) -> Any:
    """The type and bytes of a numpy scalar, as an `Array` without dimensions; `NotImplemented` for anything else."""
    if canonical(node.fn) != "numpy.core.multiarray.scalar" or len(node.args) != 2:
        return NotImplemented
    kind, data = array_type(node.args[0]), _python2_bytes(node.args[1])
    if not isinstance(data, bytes) or len(data) != kind.itemsize:
        raise Corrupt(f"a numpy scalar of type {kind} that is not of {kind.itemsize} bytes")
    return Array(kind, (), data)


def _array_or_node(node: Object) -> Any:
    try:
        return array(node)
    except CkptoolError:
        return NotImplemented


def _scalar_value(node: Object) -> Any:
    try:
        found = scalar(node)
    except CkptoolError:
        return NotImplemented
    if found is NotImplemented:
        return found
    value = element(found.type, found.data)
    return found if value is NotImplemented else value


def _dtype_name(node: Object) -> Any:
    try:
        return str(array_type(node))
    except CkptoolError:
        return NotImplemented


# Containers ----------------------------------------------------------------------------------------------------------


def _attributes(node: Object) -> Any:
    return NotImplemented if node.items or node.elements else dict(node.attributes)


def _items(node: Object) -> Any:
    return dict(node.items or {})


def _elements(node: Object) -> Any:
    return list(node.elements or ())


def _counter(node: Object) -> Any:
    first = node.args[0] if node.args else {}
    return {**first, **(node.items or {})} if isinstance(first, dict) else NotImplemented


def _deque(node: Object) -> Any:
    first = node.args[0] if node.args else []
    return [*first, *(node.elements or ())] if isinstance(first, (list, tuple)) else NotImplemented


def _dict_call(node: Object) -> Any:
    return _items(node) if not node.args else NotImplemented


def _list_call(node: Object) -> Any:
    first = node.args[0] if node.args else []
    return [*first, *(node.elements or ())] if isinstance(first, (list, tuple)) else NotImplemented


def _tuple_call(node: Object) -> Any:
    found = _list_call(node)
    return found if found is NotImplemented else tuple(found)


def _omegaconf(node: Object) -> Any:
    """A DictConfig or ListConfig: what its `_content` holds. None and missing values (`???`) stay those."""
    content = node.attributes["_content"]
    return content if isinstance(content, (dict, list, str, type(None))) else NotImplemented


def _inner(*names: str) -> Callable[[Object], Any]:
    """A wrapper around one dictionary, which is the attribute of one of these names."""

    def find(node: Object) -> Any:
        return next(
            (value for name in names if isinstance(value := node.attributes.get(name), (dict, Object))), NotImplemented
        )

    return find


def _dict_or_attributes(node: Object) -> Any:
    """A dictionary with attribute access: its items, or its attributes where it keeps them there only."""
    return dict(node.items if node.items is not None else node.attributes)


def _size(node: Object) -> Any:
    (sizes,) = _stateless(node)
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else NotImplemented


def _device(node: Object) -> Any:
    kind, *index = _stateless(node)
    return f"{kind}:{index[0]}" if index and index[0] is not None else str(kind)


def _layout(node: Object) -> Any:
    (name,) = _stateless(node)
    return name if type(name) is str else NotImplemented


_SHAPES: dict[str, Callable[[Object], Any]] = {
    **_VALUES,
    "numpy.core.multiarray._reconstruct": _array_or_node,
    "numpy.core.numeric._frombuffer": _array_or_node,
    "numpy.core.multiarray.scalar": _scalar_value,
    "numpy.dtype": _dtype_name,
    "argparse.Namespace": _attributes,
    "types.SimpleNamespace": _attributes,
    "collections.defaultdict": _items,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "builtins.dict": _dict_call,
    "builtins.list": _list_call,
    "builtins.tuple": _tuple_call,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "omegaconf.dictconfig.DictConfig": _omegaconf,
    "omegaconf.listconfig.ListConfig": _omegaconf,
    "pytorch_lightning.utilities.parsing.AttributeDict": _dict_or_attributes,
    "lightning_fabric.utilities.data.AttributeDict": _dict_or_attributes,
    "lightning.fabric.utilities.data.AttributeDict": _dict_or_attributes,
    "lightning.pytorch.utilities.parsing.AttributeDict": _dict_or_attributes,
    "yacs.config.CfgNode": _items,
    "easydict.EasyDict": _dict_or_attributes,
    "addict.Dict": _items,
    "addict.addict.Dict": _items,
    "box.Box": _items,
    "box.box.Box": _items,
    "box.BoxList": _elements,
    "box.box_list.BoxList": _elements,
    "mmengine.config.config.ConfigDict": _items,
    "mmengine.config.config.Config": _inner("_cfg_dict"),
    "ml_collections.config_dict.config_dict.ConfigDict": _inner("_fields"),
    "ml_collections.config_dict.config_dict.FrozenConfigDict": _inner("_fields"),
    "ml_collections.config_dict.ConfigDict": _inner("_fields"),
    "ml_collections.config_dict.FrozenConfigDict": _inner("_fields"),
    "mmengine.logging.history_buffer.HistoryBuffer": _attributes,
}


# One line ------------------------------------------------------------------------------------------------------------


def summary(value: Any, width: int = 60) -> str:
    """One printable line that says what a value of a tree is: `0.001`, `'adam'`, `3 items`, `numpy array f64[3, 4]`."""
    text = _summary(expand(value) if isinstance(value, Object) else value, width)
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"


def _summary(value: Any, width: int) -> str:
    if isinstance(value, str):
        return f"'{printable(value[: width + 1])}'"
    if isinstance(value, (bytes, bytearray)):
        kind = "Python 2 text" if isinstance(value, ByteString) else type(value).__name__
        return repr(bytes(value)) if len(value) <= 16 else f"{kind} of {len(value):,}"
    if value is None or isinstance(value, (bool, float, complex)):
        return str(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() < 1024 else f"integer of {value.bit_length():,} bits"
    if isinstance(value, (dict, list, tuple, Set)):
        return _container(value, width)
    if isinstance(value, Object):
        return _object(value)
    if isinstance(value, (TensorEntry, Composite)):
        return printable(repr(value)[1:-1])
    if isinstance(value, StorageRef):
        return f"{value.dtype or 'untyped'} storage of {value.storage.nbytes:,} bytes"
    if isinstance(value, Global):
        return printable(_name(value) if is_torch_name(value) else repr(value)[1:-1])
    if isinstance(value, Array):
        found = value.values() if value.size == 1 and not value.shape else None
        return printable(f"numpy {value.type} {found[0]}" if found else repr(value)[1:-1])
    return printable(str(value))


_FLAT = (str, int, float, bool, type(None))


def _container(value: Any, width: int) -> str:
    items = value.items if isinstance(value, Set) else value
    if isinstance(value, dict):
        return _counted(items) if items else "{}"
    name, begin, end = _brackets(value)
    if not items:
        return f"empty {name}" if isinstance(value, Set) else begin + end
    if len(items) <= 8 and all(isinstance(item, _FLAT) for item in items):
        comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
        text = f"{begin}{', '.join(_summary(item, width) for item in items)}{comma}{end}"
        if len(text) <= width:
            return text
    return f"{name} of {_counted(items)}"


def _brackets(value: Any) -> tuple[str, str, str]:
    if isinstance(value, Set):
        return ("frozenset" if value.frozen else "set"), "{", "}"
    return ("tuple", "(", ")") if isinstance(value, tuple) else ("list", "[", "]")


def _counted(items: Any) -> str:
    return f"{len(items):,} item{'s' * (len(items) != 1)}"


def _object(node: Object) -> str:
    named = _SHAPES.get(canonical(node.fn)) is not None
    counts = (
        (len(node.attributes), "attribute"),
        (len(node.items or ()), "item"),
        (len(node.elements or ()), "element"),
    )
    having = " and ".join(f"{count:,} {word}{'s' * (count != 1)}" for count, word in counts if count)
    kind = (
        ""
        if named
        else "unknown class "
        if node.how == "new"
        else "unknown call "
        if node.how == "call"
        else "persistent "
    )
    return f"<{kind}{printable(node.name)}{' with ' + having if having else ''}>"


# JSON ----------------------------------------------------------------------------------------------------------------

MAX_JSON_DEPTH = 100
MAX_JSON_NODES = 100_000
MAX_JSON_BYTES = 4_096
MAX_JSON_REPEATED = 4 << 20  # characters of what stands there already
SHORT = 256


def to_json(value: Any) -> Any:
    """The value as JSON can say it: keys are texts, NaN and infinities the texts "NaN", "Infinity", "-Infinity".

    Bounded, whatever the value refers to: below 100 levels, and after 100,000 values, an object `{"...": what}` stands for the rest.
    Bytes are `{"base64": …}` (`{"bytes": n}` beyond 4 KiB), tensors `{"tensor": dtype, "shape": …}`, unknown objects `{"object": name, …}`.
    """
    return to_jsons([value])[0]


def to_jsons(values: Sequence[Any]) -> list[Any]:
    """The same for several values, which are bounded together."""
    writer = _Json(MAX_JSON_NODES + 4 * len(values))
    return [writer.value(plain(value), 0) for value in values]


class _Json:
    def __init__(self, left: int) -> None:
        self.left = left
        self.repeated = MAX_JSON_REPEATED
        self.written: dict[int, Any] = {}  # long texts and numbers, by id (and kept alive for it)

    def _affordable(self, value: Any, size: int) -> bool:
        """False for a long text or number that was written before, once such repetitions have come to too much."""
        if size <= SHORT:
            return True
        if id(value) in self.written:
            self.repeated -= size
        self.written[id(value)] = value
        return self.repeated >= 0

    def value(self, value: Any, depth: int) -> Any:
        if type(value) is str:
            return _text(value) if self._affordable(value, len(value)) else {"...": summary(value)}
        if value is None or type(value) is bool:
            return value
        if type(value) is int:
            short = value.bit_length() < 1024 or not self._affordable(value, value.bit_length() // 4)
            return (value if value.bit_length() < 1024 else {"...": summary(value)}) if short else str(hex(value))
        if type(value) is float:
            return value if math.isfinite(value) else _float(value)
        self.left -= 1
        if depth >= MAX_JSON_DEPTH or self.left < 0:
            return {"...": summary(value)}
        if isinstance(value, dict):
            return {self._key(key, value): self.value(item, depth + 1) for key, item in self._some(value.items())}
        if isinstance(value, (list, tuple)):
            return [self.value(item, depth + 1) for item in self._some(value)]
        if isinstance(value, Set):
            return [self.value(item, depth + 1) for item in self._some(value.items)]
        return self._other(value, depth)

    def _some(self, values: Any) -> Iterator[Any]:
        for value in values:
            if self.left < 0:
                return
            self.left -= 1
            yield value

    def _key(self, key: Any, owner: dict[Any, Any]) -> str:
        if type(key) is str:
            return str(_text(key)) if self._affordable(key, len(key)) else summary(key, SHORT)
        text = summary(key, 200) if not isinstance(key, (int, float)) or isinstance(key, bool) else str(key)
        return f"{text} ({type(key).__name__})" if text in owner else text  # 0 beside '0'

    def _other(self, value: Any, depth: int) -> Any:
        if isinstance(value, (bytes, bytearray)):
            small = len(value) <= MAX_JSON_BYTES and self._affordable(value, len(value))
            return {"base64": base64.b64encode(value).decode()} if small else {"bytes": len(value)}
        if isinstance(value, complex):
            return [self.value(value.real, depth), self.value(value.imag, depth)]
        if isinstance(value, (TensorEntry, Composite)):
            shape = None if value.shape is None else list(value.shape)
            return {"tensor": value.dtype.name if value.dtype else None, "shape": shape}
        if isinstance(value, Array):
            return self._array(value, depth)
        if isinstance(value, Object):
            parts = {"args": value.args, "items": value.items, "elements": value.elements, "state": value.attributes}
            return {"object": printable(value.name)} | {
                name: self.value(part, depth + 1) for name, part in parts.items() if part
            }
        return printable(str(value)) if not isinstance(value, StorageRef) else summary(value)

    def _array(self, value: Array, depth: int) -> Any:
        facts = {"numpy": str(value.type), "shape": list(value.shape)}
        found = value.values() if value.size <= 64 else None
        return (
            facts
            if found is None
            else facts | {"values": self.value(found, depth + 1), **({"order": "F"} if value.fortran else {})}
        )


def _float(value: float) -> str:
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _text(text: str) -> str:
    """Lone surrogates cannot be written as UTF-8: they become escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text
