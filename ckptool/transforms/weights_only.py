"""Plain values in place of what `torch.load(weights_only=True)` refuses.

Source of what it takes: torch/_weights_only_unpickler.py (`_get_allowed_globals`), torch 2.13. Numpy scalars become numbers, numpy arrays
tensors, configuration dictionaries, dates and paths texts; an object of an unknown class becomes the dictionary of its attributes. What has
no plain form is left out. Everything that was changed is named; tensors and the order of keys stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, StorageRef, TensorEntry
from ckptool.checkpoint.commands import FILE, OUT, Advice, command
from ckptool.checkpoint.graph import After, Done, Empty, Made, Of, Remake
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.numpy_arrays import array_tensor
from ckptool.checkpoint.pickled_modules import module_state_dict
from ckptool.checkpoint.tree import address, walk
from ckptool.errors import Conflict, printable
from ckptool.pickles.calls import DISCARDED, uses
from ckptool.pickles.known import is_torch_name
from ckptool.pickles.plain import Array, canonical, expand

# Functions that `weights_only` calls, beside those that make tensors.
_CALLS = frozenset(
    {"collections.Counter", "torch.serialization._get_layout", "torch.Size", "torch.device", "builtins.complex"}
)
_REBUILDS = frozenset(
    "_rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3"
    " _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor _rebuild_wrapper_subclass"
    " _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor".split()
)
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_TENSOR_TYPES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})


class _Dropped:
    """Stands for a value that has no plain form, until what holds it leaves it out."""


DROPPED = _Dropped()


@dataclass(frozen=True, slots=True)
class PlainValues:
    """The checkpoint of plain values. converted, dropped: (address, what it was and what it became, or why it went)."""

    checkpoint: Checkpoint
    converted: tuple[tuple[str, str], ...]
    dropped: tuple[tuple[str, str], ...]


def weights_only(checkpoint: Checkpoint) -> PlainValues:
    """The checkpoint with plain values for everything that `torch.load(weights_only=True)` refuses.

    Raises `Conflict` where two keys of a dictionary would become one.
    """
    made = _Plain()
    tree = made.run(checkpoint.tree)
    places: dict[int, str] = {}
    for path, node in walk(checkpoint.tree):
        if id(node) in made.words:
            places.setdefault(id(node), address(path))
    converted: list[tuple[str, str]] = []
    dropped: list[tuple[str, str]] = []
    for number, (_, word, kept) in made.words.items():
        (converted if kept else dropped).append((places.get(number, "(a key)"), word))
    dropped += [(DISCARDED, printable(use.name)) for use in uses(checkpoint.discarded)]
    return PlainValues(
        replace(checkpoint, tree=None if tree is DROPPED else tree, discarded=()), tuple(converted), tuple(dropped)
    )


class _Plain:
    def __init__(self) -> None:
        self.words: dict[int, tuple[Any, str, bool]] = {}  # id of a node -> it, what became of it, whether it was kept

    def run(self, tree: Any) -> Any:
        return Remake(self.begin).run(tree)

    def begin(self, value: Any) -> Made:
        if isinstance(value, (TensorEntry, StorageRef)):
            return Done(value)
        if isinstance(value, Composite):
            return self._composite(value)
        if isinstance(value, Object):
            return self._object(value)
        if isinstance(value, Global):
            return Done(value) if is_torch_name(value) else self._became(value, str(value), "its name")
        return self._container(value) or self._scalar(value)

    def _container(self, value: Any) -> Made | None:
        if isinstance(value, dict):
            return self._dict(value)
        if type(value) is list:
            items: list[Any] = []
            return Empty(items, lambda of: items.extend(map(_or_none, map(of, value))))
        if type(value) is tuple:
            return After(value, lambda parts: tuple(map(_or_none, parts)))
        if isinstance(value, Set):
            if value.frozen:
                return After(value.items, lambda parts: self._became(value, Set(list(parts)), "a set").value)
            return After(value.items, lambda parts: Set(list(parts)))
        return None

    def _scalar(self, value: Any) -> Done:
        if type(value) is ByteString:
            return self._became(value, bytes(value), "bytes")
        if type(value) is bytes and not value:
            return self._became(value, bytearray(), "an empty bytearray")
        if isinstance(value, (complex, bytes, bytearray)):
            return Done(value)
        return Done(str(value))  # a date, a path, a fraction, as its text; its object was named already

    def _dict(self, value: dict[Any, Any]) -> Empty:
        made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}

        def fill(of: Of) -> None:
            for key, item in value.items():
                new, result = of(key), of(item)
                if result is DROPPED or new is DROPPED:
                    continue
                if isinstance(new, (dict, list, Set)):
                    new = str(key)
                if new in made:
                    raise Conflict(
                        f"two keys of a dictionary would both become {printable(str(new))!r}",
                        "One of the two values would be lost. Nothing was written.",
                        Advice("Drop one of them first: ", command("edit", FILE, drop="ADDRESS", out=OUT)),
                    )
                made[new] = result
            if isinstance(value, OrderedDict) and isinstance(made, OrderedDict):
                made.attributes = of(value.attributes)

        return Empty(made, fill)

    # Tensors -----------------------------------------------------------------------------------------------------

    def _composite(self, value: Composite) -> Made:
        made = value.made
        name = canonical(made.fn)
        if name == _FROM_TYPE and len(made.args) == 4:
            if canonical(made.args[1]) in _TENSOR_TYPES and _is_plain(made.args[3]):
                return Done(value)
            return self._without_class(value)
        if name.removeprefix("torch._utils.") in _REBUILDS and _is_plain(made.args):
            return Done(value)
        return self._dropped(value, f"a {value.kind} tensor")

    def _without_class(self, value: Composite) -> Made:
        """A tensor of a class of its own, or with attributes: the plain tensor that it was made from."""
        from ckptool.pickles.torch_objects import BUILDERS

        builder = BUILDERS.get(value.made.args[0])
        inner = builder(value.made.args[2]) if builder is not None else NotImplemented
        if not isinstance(inner, TensorEntry):
            return self._dropped(value, f"a {value.kind} tensor")
        return self._became(value, inner, f"a plain tensor, without what made it {printable(value.kind)}")

    # Objects -----------------------------------------------------------------------------------------------------

    def _object(self, node: Object) -> Made:
        name = canonical(node.fn)
        if name in _CALLS and node.how == "call" and node.state is MISSING and not node.items:
            return After([node.args], lambda parts: Object(node.fn, parts[0]))
        state_dict = module_state_dict(node)
        if state_dict is not None:
            return self._instead(node, state_dict, "its state dict")
        value = expand(node)
        if isinstance(value, Array):
            entry = array_tensor(value)
            return self._became(node, entry, "a tensor") if entry else self._dropped(node, repr(value)[1:-1])
        if value is not node:
            return self._instead(node, value, _word(value))
        if node.items:
            return self._instead(node, dict(node.items), "a dictionary of its items")
        if node.elements:
            return self._instead(node, list(node.elements), "a list of its elements")
        if node.attributes and node.how == "new":
            return self._instead(node, dict(node.attributes), "a dictionary of its attributes")
        return self._dropped(node, "has no plain form")

    def _instead(self, node: Object, value: Any, word: str) -> Made:
        """What `value` becomes, in place of the object."""
        self._note(node, f"{printable(node.name)} → {word}", True)
        if value is None or type(value) in (bool, int, float, str):
            return Done(value)
        return self.begin(value)

    def _became(self, node: Any, value: Any, word: str) -> Done:
        self._note(node, f"{printable(_name(node))} → {word}", True)
        return Done(value)

    def _dropped(self, node: Any, word: str) -> Done:
        name = printable(_name(node))
        self._note(node, name if name == printable(word) else f"{name}: {printable(word)}", False)
        return Done(DROPPED)

    def _note(self, node: Any, word: str, kept: bool) -> None:
        self.words.setdefault(id(node), (node, word, kept))


def _or_none(value: Any) -> Any:
    """In a list or tuple a place stays, so that those behind it keep their numbers."""
    return None if value is DROPPED else value


def _name(node: Any) -> str:
    if isinstance(node, Composite):
        return f"a {node.kind} tensor"
    return node.name if isinstance(node, Object) else str(node) if isinstance(node, Global) else type(node).__name__


def _word(value: Any) -> str:
    for kind, word in ((dict, "a dictionary"), (list, "a list"), (tuple, "a tuple"), ((bool, int, float), "a number")):
        if isinstance(value, kind):
            return word
    return "text"


def _is_plain(args: Any) -> bool:
    """True if the arguments of a rebuild call have nothing in them that `weights_only` refuses."""
    stack, seen = [args], set()
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (tuple, list)):
            stack.extend(part)
        elif isinstance(part, dict):
            stack.extend((*part.keys(), *part.values()))
        elif isinstance(part, Object):
            if canonical(part.fn) not in _CALLS or part.state is not MISSING:
                return False
            stack.append(part.args)
        elif isinstance(part, Composite):
            stack.append(part.made.args)
        elif isinstance(part, Global) and not is_torch_name(part) and canonical(part) not in _TENSOR_TYPES:
            return False
    return True
