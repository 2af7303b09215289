"""The machine's two helpers: the reader of a pickle's bytes and opcode arguments; and the maker of the nodes
that opcodes describe: names, calls, items, elements, states.

Nothing is copied before it is known to be there, and every error names the byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from math import isinf
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.graph import structural_parts, visit
from ckptool.checkpoint.nodes import MISSING, Global, Object, OrderedDict, Set, check_collisions, is_hashable
from ckptool.errors import CkptoolError, Corrupt, LimitExceeded, Truncated, UnsafeObject, counted
from ckptool.pickles.calls import is_quiet
from ckptool.pickles.known import kind_of
from ckptool.pickles.strings import MAX_STRING, key_text, python2_text, python2_unescaped, unstub
from ckptool.pickles.torch_objects import Builder, TakesState, set_tensor_state

MAX_INTEGER_BITS = 4_096
# Numbers that all readers read alike: a leading zero means octal to C's up to Python 3.13, and is an error to Python's
# own.
_NUMBER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_TRUTHS = {"00": False, "+0": False, "-0": False, "01": True, "+1": True}
_FLOAT = r"(?i)[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|inf(?:inity)?|nan)"
DAMAGED = "The pickle is damaged or malicious."


class PickleReader:
    """A pickle, `data`, and the position `at` in it."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def corrupt(self, pos: int, what: str) -> Corrupt:
        """The error for damage at byte `pos`."""
        self.at = pos
        return Corrupt(what, DAMAGED)

    def beyond(self, pos: int, what: str, why: str = "") -> LimitExceeded:
        """The error for an exceeded limit at byte `pos`."""
        self.at = pos
        return LimitExceeded(what, why)

    def take(self, pos: int, size: int) -> bytes:
        """The next `size` bytes; raises `Truncated` where fewer are left, before any are copied."""
        if size < 0:
            raise self.corrupt(pos, f"a length of {size:,}")
        if size > len(self.data) - pos:
            self.at = pos
            raise Truncated(f"{size:,} bytes are expected, {max(0, len(self.data) - pos):,} are there")
        return self.data[pos : pos + size]

    def text(self, pos: int, size: int) -> str:
        """UTF-8 text, in which pickles may have lone surrogates."""
        if size > MAX_STRING:
            raise self.beyond(pos, f"a string of {size:,} bytes", f"ckptool reads at most {MAX_STRING:,}.")
        raw = self.take(pos, size)
        try:
            return str(raw, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.corrupt(pos, "a string that is not UTF-8") from None

    def integer(self, pos: int, size: int) -> int:
        """A little-endian integer of `size` bytes."""
        if size * 8 > MAX_INTEGER_BITS:
            what = f"an integer of {counted(size * 8, 'bit')}"
            raise self.beyond(pos, what, f"ckptool reads at most {MAX_INTEGER_BITS:,}.")
        return int.from_bytes(self.take(pos, size), "little", signed=True)

    def raw_line(self, pos: int) -> tuple[bytes, int]:
        """The bytes up to the end of the line, and where the next one begins."""
        end = self.data.find(b"\n", pos)
        if end < 0:
            self.at = pos
            raise Truncated("a line without an end")
        if end - pos > MAX_STRING:
            raise self.beyond(pos, f"a string of {end - pos:,} bytes", f"ckptool reads at most {MAX_STRING:,}.")
        return self.data[pos:end], end + 1

    def line(self, pos: int) -> tuple[str, int]:
        """The text up to the end of the line, and where the next one begins."""
        raw, end = self.raw_line(pos)
        try:
            return raw.decode(), end
        except UnicodeDecodeError:
            raise self.corrupt(pos, "a name that is not UTF-8") from None

    def unescaped(self, raw: bytes, pos: int) -> str:
        """The text of a Unicode literal without quotes."""
        try:
            return raw.decode("raw_unicode_escape")
        except UnicodeDecodeError:
            raise self.corrupt(pos, "a string with a broken escape") from None

    def quoted(self, raw: bytes, pos: int) -> Any:
        """The text of a Python 2 literal."""
        raw = raw.strip()
        if len(raw) < 2 or raw[:1] != raw[-1:] or raw[0] not in b"'\"":
            raise self.corrupt(pos, "a string without quotes")
        return python2_text(python2_unescaped(raw[1:-1]))

    def number(self, line: str, pos: int) -> int:
        """The integer that a line holds."""
        if len(line) > MAX_INTEGER_BITS // 4:
            raise self.corrupt(pos, f"an integer of {counted(len(line), 'digit')}")
        if _NUMBER.fullmatch(line) is None:
            raise self.corrupt(pos, f"{line[:40]!r} where a number should be")
        return int(line)

    def scalar(self, op: int, line: str, pos: int) -> Any:
        """The number that a line of protocol 0 holds."""
        if op == 0x49:  # INT, also for protocol 0's booleans: to C's reader, a 0 or 1 of two characters
            return _TRUTHS[line] if line in _TRUTHS else self.number(line, pos)
        if op == 0x4C:  # LONG
            return self.number(line.removesuffix("L"), pos)
        # FLOAT
        if re.fullmatch(_FLOAT, line) is None or (isinf(float(line)) and "inf" not in line.lower()):
            raise self.corrupt(pos, f"{line[:40]!r} where a number should be")
        return float(line)


MAX_KEY_DEPTH = 4
FREE_NAMED = 1 << 18  # attributes of objects in the smallest pickle, counted for every object that has them
MAX_NAME = 1_000  # characters of a module and a name in it
MAX_NAMES = 20_000  # of classes and functions, each counted once; pickled models name some hundreds


class ObjectMaker:
    """Makes and fills the nodes of one pickle; remembers those that are not inert, as the pickle may discard them."""

    __slots__ = ("budget", "builders", "byte_strings", "gradients", "hashed", "limit", "names", "objects", "reader",
                 "repeated", "stubs")  # fmt: skip

    def __init__(self, reader: PickleReader, builders: Mapping[Global, Builder], limit: int, stubs: bool) -> None:
        self.reader = reader  # where errors record their byte
        self.builders = builders
        self.limit = limit
        self.budget = max(FREE_NAMED, len(reader.data))  # attributes still to be judged, once per object
        self.stubs = stubs  # whether some texts may be stubs
        self.byte_strings = 0  # texts of Python 2 that are not UTF-8
        self.names: dict[Global, None] = {}
        self.objects: dict[int, Object] = {}  # those that are not inert
        self.gradients = 0  # inside of old parameters
        self.hashed = 0  # parts of keys so far
        self.repeated: list[tuple[Any, Any, Any]] = []  # repeated keys, with the old and the new value

    def name(self, module: str, attribute: str, pos: int) -> Global:
        """A name in a pickle; it is never looked up."""
        if not (module.isprintable() and attribute.isprintable()):
            raise self.reader.corrupt(pos, f"the name {module[:200]}.{attribute[:200]}")
        if (length := len(module) + len(attribute)) > MAX_NAME:
            raise self.reader.beyond(pos, f"a class or function with a name of {counted(length, 'character')}")
        node = Global(module, attribute)
        self.names[node] = None
        if len(self.names) > MAX_NAMES:
            raise self.reader.beyond(pos, f"more than {MAX_NAMES:,} different classes and functions")
        return node

    def computed(self, module: Any, attribute: Any, pos: int) -> CkptoolError:
        """The error for a name that is not text."""
        if isinstance(module, Object) or isinstance(attribute, Object):
            self.reader.at = pos
            return UnsafeObject("a name is computed", "What gets called depends on the result of another call.")
        return self.reader.corrupt(pos, "a name is computed, not a string")

    def call(self, fn: Any, args: tuple[Any, ...], how: str, kwargs: Any = None) -> Object:
        """The object that represents a call; nothing is called."""
        node = Object(fn, args, how, kwargs)
        self._judge(node)
        return node

    def new(self, cls: Any, args: Any, kwargs: Any, pos: int) -> Any:
        """The result of NEWOBJ for a class: its builder's, or an inert object."""
        builder = self.builders.get(cls) if type(cls) is Global else None
        if type(args) is not tuple or not (kwargs is None or isinstance(kwargs, dict)):
            raise self.reader.corrupt(pos, "an object without an argument tuple")
        value = builder(args) if builder is not None and not kwargs else NotImplemented
        return self.call(cls, args, "new", kwargs or None) if value is NotImplemented else value

    def instance(self, cls: Any, args: tuple[Any, ...]) -> Any:
        """The result of INST and OBJ, which call the class; without arguments they only make an object."""
        return self.call(cls, args, "call") if args or kind_of(cls) is None else self.new(cls, (), None, self.reader.at)

    def set_items(self, target: Any, items: list[Any], pos: int) -> None:
        """Puts alternating keys and values into a dictionary or an object like one; of a key twice the last value."""
        if isinstance(target, dict):
            mapping = target
        elif type(target) is Object:
            if target.items is None:
                target.items = {}
                self._judge(target)
            mapping = target.items
        elif not items:  # nothing is called
            return
        else:
            raise self._misused(target, pos, "items set on")
        if len(items) % 2:
            raise self.reader.corrupt(pos, "a key without a value")
        keys = items[::2] if not self.stubs and not self.byte_strings else [key_text(unstub(key)) for key in items[::2]]
        for key in keys:
            if type(key) is not str and type(key) is not int:
                self._check_key(key, pos)
        size = len(mapping)
        if (size + len(keys)).bit_length() > max(7, size.bit_length()):  # only now and then, so that it costs nothing
            self.reader.at = pos
            check_collisions(chain(mapping, keys))
        is_new = mapping.keys().isdisjoint(keys)
        before = {} if is_new else {key: mapping[key] for key in keys if key in mapping}
        mapping.update(zip(keys, items[1::2], strict=True))
        if len(mapping) != size + len(keys):  # a repeated key: the last value counts, in every reader
            for key, value in zip(keys, items[1::2], strict=True):
                if before.setdefault(key, value) is not value:
                    self.repeated.append((key, before[key], value))
                    before[key] = value

    def _check_key(self, key: Any, pos: int, depth: int = 0) -> None:
        if type(key) is tuple:
            if depth == MAX_KEY_DEPTH:
                raise self.reader.beyond(pos, "a dictionary key of tuples within tuples")
            self.hashed += len(key)
            if self.hashed > self.limit:
                raise self.reader.beyond(pos, f"dictionary keys of more than {counted(self.limit, 'part')}")
            for part in key:
                self._check_key(part, pos, depth + 1)
        elif key != key:
            self.reader.at = pos
            raise Corrupt("NaN as a dictionary key", "It does not even equal itself, so no lookup could find it.")
        elif not is_hashable(key):
            raise self.reader.corrupt(pos, f"a {_kind_name(key)} as a dictionary key")

    def append(self, target: Any, items: list[Any], pos: int) -> None:
        """Appends values to a list, or to an object that is like one."""
        if type(target) is list:
            target.extend(items)
        else:
            self._extend(target, items, pos, "values appended to")

    def _extend(self, target: Any, items: list[Any], pos: int, what: str) -> None:
        if type(target) is not Object:
            if not items:
                return
            raise self._misused(target, pos, what)
        if target.elements is None:
            target.elements = []
        target.elements.extend(items)
        if len(target.elements) == len(items):
            self._judge(target)

    def _judge(self, node: Object) -> None:
        """Remembers an object that is not inert, or no longer is after what was set on it.

        Its attributes and texts are looked at, and many objects may share them: they are counted for each object.
        """
        if id(node) in self.objects:
            return
        states = node.state if type(node.state) is tuple and len(node.state) < 10 else (node.state,)
        for part in (*node.args[:4], *states):
            if isinstance(part, (dict, tuple)):
                parts = part if type(part) is tuple and len(part) == 2 else (part,)
                self.budget -= sum([len(attributes) for attributes in parts if isinstance(attributes, dict)])
            elif type(part) is str:
                self.budget -= len(part) // 64
        if self.budget < 0:
            raise self.reader.beyond(self.reader.at, "objects that share parts, too many to check each time")
        if not is_quiet(node):
            self.objects[id(node)] = node

    def add(self, target: Any, items: list[Any], pos: int) -> None:
        """Adds values to a set, or to an object that is like one."""
        if type(target) is Set:
            if not all(map(is_hashable, items)):
                raise self.reader.corrupt(pos, "a set of values that can be changed")
            target.items.extend(items)
        else:
            self._extend(target, items, pos, "values added to")
            if items:
                target.adds = True

    def set_state(self, target: Any, state: Any, pos: int) -> None:
        """Sets BUILD's state: of an object, the attributes of an `OrderedDict`, the flags of a tensor."""
        if type(target) is Object and target.state is MISSING:
            target.state = state
            self._judge(target)
        elif isinstance(target, TakesState):
            target.fill(state)
        elif (
            type(target) is OrderedDict
            and target.attributes is None
            and type(state) is dict
            and all(type(k) is str for k in state)
        ):
            target.attributes = state
        elif type(target) is not TensorEntry or not set_tensor_state(target, state):
            raise self._misused(target, pos, "a state set on")
        else:
            self.gradients += len(state) == 5 and state[1] is not None

    def _misused(self, target: Any, pos: int, what: str) -> CkptoolError:
        """The error for an operation that a value does not support; on a name it would call methods."""
        if type(target) is Global:
            self.reader.at = pos
            return UnsafeObject(f"{what} {target} itself", "Loading the file would change what that name refers to.")
        return self.reader.corrupt(pos, f"{what} a {_kind_name(target)}")

    def discarded(self, root: Any) -> tuple[Any, ...]:
        """The objects and names that are not inert and not in the tree: loading makes and imports them nevertheless."""
        names = {name for name in self.names.keys() - self.builders if (kind := kind_of(name)) is None or kind.custom}
        if not names and not self.objects:
            return ()
        in_tree = set(map(id, visit(root, _inner_parts)))
        lost = [node for node in self.objects.values() if id(node) not in in_tree]
        names -= {node.fn for node in lost if type(node.fn) is Global}
        return (*lost, *sorted((name for name in names if id(name) not in in_tree), key=str))


def _inner_parts(node: Any) -> Iterator[Any]:
    """The parts of a node, without the leaves that builders made, of which a table has hundreds of thousands."""
    return (part for part in structural_parts(node) if not isinstance(part, TakesState))


def _kind_name(value: Any) -> str:
    return value.name if isinstance(value, Object) else type(value).__name__
