"""Plain values in place of what `torch.load(weights_only=True)` refuses.

Source of what it accepts: torch/_weights_only_unpickler.py (`_get_allowed_globals`), torch 2.13. Numpy scalars become
numbers, numpy arrays tensors, configuration dictionaries, dates and paths texts; an object of an unknown class becomes
the dictionary of its attributes. What has no plain form is left out. Everything that changed is named; tensors and the
order of keys stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, StorageRef, TensorEntry
from ckptool.checkpoint.graph import (
    SCALARS,
    FillLater,
    FromParts,
    GraphMapper,
    copy_dict,
    same,
    structural_parts,
    visit,
)
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set, canonical, is_hashable
from ckptool.checkpoint.numpy_arrays import Array, array_tensor
from ckptool.checkpoint.tree import address, module_attributes, module_state_dict, walk
from ckptool.commands import ADDRESS, FILE, OUT, command
from ckptool.errors import Conflict, LimitExceeded, printable
from ckptool.facts import dataclass, replace
from ckptool.pickles.calls import DISCARDED, uses
from ckptool.pickles.known import MEMORY_FORMATS, is_torch_name, kind_of
from ckptool.pickles.plain import expand

_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_TENSOR_TYPES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
_ALLOWED = _TENSOR_TYPES | {_FROM_TYPE, "collections.OrderedDict", "builtins.set", "builtins.bytearray"}


class _Omitted:
    """Marks a value that has no plain form, until its container leaves it out."""


DROPPED = _Omitted()


@dataclass(frozen=True, slots=True)
class PlainValues:
    """The checkpoint of plain values. converted, dropped: (address, what it was and became, or why it was dropped)."""

    checkpoint: Checkpoint
    converted: tuple[tuple[str, str], ...]
    dropped: tuple[tuple[str, str], ...]

    @property
    def refused(self) -> list[str]:
        """The names of the values that were not plain."""
        return list(dict.fromkeys(what.split(" → ")[0] for _, what in (*self.converted, *self.dropped)))


def weights_only(checkpoint: Checkpoint) -> PlainValues:
    """The checkpoint with plain values for everything that `torch.load(weights_only=True)` refuses.

    Raises `Conflict` where two keys of a dictionary would become one.
    """
    if takes(checkpoint.tree) and not checkpoint.discarded:
        return PlainValues(checkpoint, (), ())
    mapper = _Plain()
    tree = mapper.mapper.map(checkpoint.tree)
    places: dict[int, str] = {}
    for path, node in walk(checkpoint.tree):
        if id(node) in mapper.words:
            places.setdefault(id(node), address(path))
    converted: list[tuple[str, str]] = []
    dropped: list[tuple[str, str]] = []
    for number, (_, word, is_kept) in mapper.words.items():
        (converted if is_kept else dropped).append((places.get(number, "(a key)"), word))
    dropped += [(DISCARDED, printable(use.name)) for use in uses(checkpoint.discarded)]
    result = replace(checkpoint, tree=None if tree is DROPPED else tree, discarded=())
    return PlainValues(result, tuple(converted), tuple(dropped))


_TAKEN = SCALARS | {TensorEntry, StorageRef, complex, bytearray}


def takes(root: Any) -> bool:
    """True for a tree of dictionaries, lists, tuples, tensors and plain values, as nearly all are. A quick check, which
    is also False for much that `weights_only` would leave as it is."""
    stack, seen = [] if type(root) in _TAKEN else [root], set()
    while stack:
        node = stack.pop()
        if type(node) not in (dict, OrderedDict, list, tuple):
            return False
        if id(node) not in seen:
            seen.add(id(node))
            stack += [part for part in structural_parts(node) if type(part) not in _TAKEN]
    return True


class _Plain:
    """Maps one tree. words: id of a node -> the node, what became of it, whether it was kept."""

    def __init__(self) -> None:
        self.words: dict[int, tuple[Any, str, bool]] = {}
        self.mapper = GraphMapper(
            {
                **dict.fromkeys((TensorEntry, StorageRef, complex, bytearray), same),
                **dict.fromkeys((dict, OrderedDict), partial(copy_dict, put=_put)),
                list: _list,
                tuple: lambda value: FromParts(value, lambda parts: tuple(map(_or_none, parts))),
                Set: self._set,
                bytes: lambda value: value or self._note(value, bytearray(), "an empty bytearray"),
                ByteString: lambda value: self._note(value, bytes(value), "bytes"),
                Global: lambda name: name if _is_allowed(name) else self._note(name, str(name), "its name"),
                Composite: self._composite,
                Object: self._object,
                object: str,  # a date, a path, a fraction: its text; the object was noted already
            }
        )

    def _set(self, value: Set) -> FromParts:
        def make(parts: list[Any]) -> Set:
            pairs = zip(value.items, parts, strict=True)
            result = Set([_valid_key(old, new) for old, new in pairs if new is not DROPPED])
            return self._note(value, result, "a set") if value.frozen else result

        return FromParts(value.items, make)

    def _composite(self, value: Composite) -> Any:
        call = value.made
        if canonical(call.fn) == _FROM_TYPE and len(call.args) == 4:
            if canonical(call.args[1]) in _TENSOR_TYPES and _is_accepted(call.args[3]):
                return value
            # of its own class, or with attributes: the plain tensor that it was made from
            from ckptool.pickles.torch_objects import BUILDERS

            builder = BUILDERS.get(call.args[0])
            inner = builder(call.args[2]) if builder is not None else NotImplemented
            if isinstance(inner, TensorEntry):
                return self._note(value, inner, f"a plain tensor, no longer {printable(value.kind)}")
        elif _is_called(call.fn) and _is_accepted(call.args):
            return value
        return self._note(value, DROPPED, f"a {value.kind} tensor")

    def _object(self, node: Object) -> Any:
        if _is_plain_call(node) and node.how == "call" and not node.items:
            return FromParts([node.args], lambda parts: Object(node.fn, parts[0]))
        value = self._note(node, *_plain_form(node))
        return value if value is DROPPED or type(value) in SCALARS else self.mapper.handled(value)

    def _note(self, node: Any, value: Any, word: str) -> Any:
        """Notes that a node became a value, and returns the value."""
        name = printable(_NAMES.get(type(node), lambda _: type(node).__name__)(node))
        is_kept, what = value is not DROPPED, printable(word)
        text = f"{name} → {word}" if is_kept else name if what == name else f"{name}: {what}"
        self.words.setdefault(id(node), (node, text, is_kept))
        return value


_NAMES: dict[type, Callable[[Any], str]] = {
    Composite: lambda node: f"a {node.kind} tensor", Object: lambda node: node.name, Global: str
}  # fmt: skip


def _put(target: dict[Any, Any], key: Any, new: Any, item: Any) -> None:
    """Sets an item. Raises `Conflict` for a key that is there already."""
    if item is DROPPED or new is DROPPED:
        return
    new = _valid_key(key, new)
    if new in target:
        what, why = f"two keys of a dictionary would both become {str(new)!r}", "One of the two values would be lost."
        fix = f"Drop one of them first: {command('edit', FILE, drop=ADDRESS, out=OUT)}"
        raise Conflict(what, f"{why} Nothing was written.", fix)
    target[new] = item


def _valid_key(old: Any, new: Any) -> Any:
    """A key, or an item of a set; as text if it became, or contains, something unhashable."""
    return new if type(new) in SCALARS or all(map(is_hashable, visit(new))) else str(old)


def _plain_form(node: Object) -> tuple[Any, str]:
    """The plain value of an object, and a word for it."""
    state_dict = module_state_dict(node)
    if state_dict is not None:
        return state_dict, "its state dict"
    if module_attributes(node) is not None:
        raise LimitExceeded("a module whose tensors' names would fill the memory", "The file is probably malicious.")
    value = expand(node)
    if isinstance(value, Array):
        entry = array_tensor(value)
        return (entry, "a tensor") if entry else (DROPPED, repr(value)[1:-1])
    if value is not node:
        return value, next((word for kind, word in _WORDS if isinstance(value, kind)), "text")
    if node.items:
        return dict(node.items), "a dictionary of its items"
    if node.elements:
        return list(node.elements), "a list of its elements"
    if node.attributes and node.how == "new":
        return dict(node.attributes), "a dictionary of its attributes"
    return DROPPED, "has no plain form"


def _list(value: list[Any]) -> FillLater:
    result: list[Any] = []
    return FillLater(result, lambda of: result.extend(map(_or_none, map(of, value))))


def _or_none(value: Any) -> Any:
    """None in place of a dropped item of a list or tuple, so that those after it keep their index."""
    return None if value is DROPPED else value


_WORDS = ((dict, "a dictionary"), (list, "a list"), (tuple, "a tuple"), ((bool, int, float), "a number"))


def _is_allowed(name: Global) -> bool:
    """True for a name that `weights_only` accepts, as a value or to call."""
    is_constant = is_torch_name(name) and name.name not in MEMORY_FORMATS
    return is_constant or _is_called(name) or canonical(name) in _ALLOWED


def _is_called(name: Any) -> bool:
    """True for a function that `weights_only` calls."""
    return (kind := kind_of(name)) is not None and kind.weights_only


def _is_plain_call(node: Object) -> bool:
    """True for a call that makes a value; not for a rebuild call that gave no tensor."""
    return _is_called(node.fn) and not canonical(node.fn).startswith("torch._utils.") and node.state is MISSING


def _is_accepted(args: Any) -> bool:
    """True if the arguments of a rebuild call contain nothing that `weights_only` refuses."""
    inside = _Plain()
    inside.mapper.map(args)
    return not inside.words
