"""From a tree to live objects: one tensor, or all that `torch.load` would return.

An object becomes what its pickle would make; what is in none of our tables is refused by name, and never looked up.
"""

from __future__ import annotations

import argparse
import collections
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch

from ckptool.bridge import tensors
from ckptool.bridge.tensors import TENSOR_CLASSES, Storages, layout_of, torch_dtype, untyped
from ckptool.checkpoint import Checkpoint, Composite, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.blocks import files_of, verify
from ckptool.checkpoint.files import Source, unchanged
from ckptool.checkpoint.graph import COPY, FillLater, FromParts, GraphMapper, Of, copy_list, copy_tuple
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set, brief, canonical
from ckptool.checkpoint.numpy_arrays import Array, ArrayType, array, array_type
from ckptool.checkpoint.strided import subrange
from ckptool.checkpoint.tree import address, walk
from ckptool.commands import OUT_SAFETENSORS, command, input_of
from ckptool.errors import CkptoolError, Conflict, Corrupt, UnsafeObject, Unsupported, listed
from ckptool.pickles.calls import uses
from ckptool.pickles.known import value_word
from ckptool.pickles.plain import expand, summary
from ckptool.pickles.torch_objects import BUILDERS, dtype_of, storage_class


def to_torch(entry: TensorEntry | Composite, device: Any = "cpu") -> torch.Tensor:
    """A new tensor with the entry's bytes, type, strides, flags and class, on `device`; nothing is mapped.

    For a plain entry only the part of the storage that it spans is read. Raises `UnsafeObject` for a subclass that is
    not torch's own.
    """
    with unchanged(*(files_of(entry) if isinstance(entry, TensorEntry) else ())):
        if isinstance(entry, TensorEntry):
            verify(entry)
            start, stop = entry.span()
            part = Storage(subrange(entry.storage.data, start, stop - start), entry.location)
            entry = TensorEntry(part, entry.dtype, entry.shape, entry.stride, 0, entry.flags)
        tensor: torch.Tensor = Builder(Checkpoint(entry, ""), Storages(device, map_files=False)).build()
        return tensor


def build(
    checkpoint: Checkpoint, map_location: Any = "cpu", *, mmap: bool = True, text: Callable[[bytes], Any] = bytes
) -> Any:
    """The value that `torch.load` would return for this tree, without running anything that the file names.

    map_location: as `torch.load` takes it (a device, a dictionary, a function; None: where the tensors were saved).
    mmap: map the file (privately: writes to the tensors do not reach it) instead of reading it, as
    `torch.load(mmap=True)` does. Nothing is read until it is used, checksums are not checked, and the file must not be
    cut short or overwritten while the tensors live.
    text: converts Python 2 strings that are not UTF-8.
    Raises `UnsafeObject` naming every object of an unknown class and where it is, `Unsupported` for a device that is
    not there.
    """
    storages = Storages(map_location, map_files=mmap)
    if (result := load_plain(checkpoint, storages.device)) is not None:
        return result
    with unchanged(checkpoint.source):
        return Builder(checkpoint, storages, text).build()


class Builder:
    """Makes the live objects of one tree. Unknown ones are collected and named together at the end."""

    def __init__(self, checkpoint: Checkpoint, storages: Storages, text: Callable[[bytes], Any] = bytes) -> None:
        self.checkpoint, self.storages, self.text = checkpoint, storages, text
        handlers = {kind: partial(self._handle, handler) for kind, handler in _HANDLERS.items()}
        self.mapper = GraphMapper({**COPY, **handlers})
        self.unknown: list[tuple[Any, str]] = []

    def build(self, *, is_own: bool = False) -> Any:
        """The value of the tree. is_own: its objects are the caller's, not a file's, and are not judged."""
        value = self.mapper.map(self.checkpoint.tree)
        if not is_own:
            thrown = uses(self.checkpoint.discarded)
            self.unknown += [(None, f"{use.name}, which is {use.how} and discarded") for use in thrown]
            if not self.unknown and (use := next(uses(self.checkpoint.tree), None)):
                self.unknown.append((None, f"{use.name} at {address(use.path) or 'the top'}"))
        if self.unknown:
            raise self.refusal()
        return value

    def refusal(self) -> UnsafeObject:
        """The error for what was refused, with its places, and advice to load a part without anything unknown."""
        from ckptool.pickles.reduce import places_in

        places = places_in(self.checkpoint.tree, {id(node) for node, _ in self.unknown})
        names = [f"{name}{' at ' + places[id(node)] if id(node) in places else ''}" for node, name in self.unknown]
        source, base, advice = self.checkpoint.source, self.checkpoint.base, ""
        if source:
            from ckptool.conventions.state_dicts import find_state_dicts

            bad = {place.partition("/")[0] for place in places.values()}
            roots = find_state_dicts(self.checkpoint)
            roots = [root for root in roots if root.is_model] or roots
            parts = [root for root in roots if root.path and root.module is None and isinstance(root.node, dict)]
            if good := [part.address for part in parts if part.node and address(part.path[:1]) not in bad]:
                advice = f"Load a part without them: ckptool.load({input_of(source, good[0])!r}). "
            elif roots and roots[0].is_model:
                take = command("convert", input_of(source, roots[0].address), out=OUT_SAFETENSORS)
                advice = f"Take its weights: {take}. "
        what = f"{input_of(source, address(base)) if source else 'the checkpoint'} holds {listed(names)}"
        why = "Loading these would run code that the file names; ckptool does not."
        return UnsafeObject(what, why, f"{advice}See what is in it: {command('inspect', input_of(source))}")

    def refuse(self, node: Any, name: str) -> Unknown:
        """A stand-in for a node that is not made, whose name is noted for the refusal."""
        self.unknown.append((node, name))
        return Unknown()

    def _handle(self, handler: Callable[[Builder, Any], Any], node: Any) -> Any:
        """The handler's result for a node; its errors name the address of the node."""
        try:
            return handler(self, node)
        except CkptoolError as error:
            place = next((address(path) for path, candidate in walk(self.checkpoint.tree) if candidate is node), "")
            where = ": ".join(part for part in (str(self.checkpoint.source or ""), place) if part)
            raise (error.within(where) if where else error) from None

    def guarded(self, node: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`; raises `Corrupt` where torch rejects the description of a tensor."""
        try:
            return make()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            why = str(error).splitlines()[0][:300] if str(error) else ""
            raise Corrupt(f"torch cannot create {node!r}", why) from error

    def parts(self, node: Any, args: tuple[Any, ...], make: Callable[..., Any]) -> FromParts:
        """The result of `make` with a tensor's live arguments; where one of them is refused, so is the tensor."""

        def make_checked(parts: list[Any]) -> Any:
            if any(isinstance(part, Unknown) for part in parts):
                return Unknown()
            return self.guarded(node, lambda: make(*parts))

        return FromParts(args, make_checked)


class Unknown:
    """A stand-in for what is not made, until the refusal names it."""


# Containers ----------------------------------------------------------------------------------------------------------


def dictionary(_: Builder, node: dict[Any, Any]) -> FillLater:
    """A dictionary; an `OrderedDict` with its attributes (`_metadata` of a state dict)."""
    if isinstance(node, OrderedDict):
        return _filled(collections.OrderedDict(), node, node.attributes)
    return _filled({}, node)


def _filled(target: Any, items: Mapping[Any, Any] | None, attributes: Mapping[Any, Any] | None = None) -> FillLater:
    """An empty object, filled once its items and attributes are made.

    Raises `Conflict` where two keys became equal, `Corrupt` for a key that is not hashable, and for attribute names
    that are not text.
    """

    def fill_in(of: Of) -> None:
        for key, value in (items or {}).items():
            try:
                target[of(key)] = of(value)
            except TypeError:
                what = f"a dictionary with a key of type {type(of(key)).__name__}, which is not hashable"
                raise Corrupt(what) from None
        if items and len(target) != len(items):
            raise Conflict(f"a dictionary with keys that become equal when loaded ({summary(items)})")
        if attributes and not all(type(key) is str for key in attributes):
            raise Corrupt("attributes whose names are not strings")
        if attributes:
            vars(target).update((key, of(value)) for key, value in attributes.items())

    return FillLater(target, fill_in)


def set_of(_: Builder, node: Set) -> FromParts:
    """A set or frozenset."""
    cls = frozenset if node.frozen else set

    def make(parts: list[Any]) -> Any:
        try:
            return cls(parts)
        except TypeError:
            raise Corrupt(f"a {cls.__name__} with unhashable members") from None

    return FromParts(node.items, make)


# Names ----------------------------------------------------------------------------------------------------------------

NAMES: dict[str, Any] = {
    **{
        f"builtins.{cls.__name__}": cls
        for cls in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex)
    },
    "builtins.unicode": str,
    "builtins.long": int,
    "builtins.Ellipsis": ...,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "collections.deque": collections.deque,
    **TENSOR_CLASSES,
}


def named(builder: Builder, name: Global) -> Any:
    """What a name by itself means: an element type or other constant of torch, or a class of a table."""
    dtype = dtype_of(name)
    if dtype is not None:
        return torch_dtype(dtype)
    is_storage, of_type = storage_class(name)
    if is_storage:
        return torch.UntypedStorage if of_type is None else getattr(torch, str(of_type.storage))
    constant = vars(torch).get(name.name) if name.module == "torch" else None
    if isinstance(constant, (torch.qscheme, torch.memory_format)):
        return constant
    return NAMES[canonical(name)] if canonical(name) in NAMES else builder.refuse(name, f"the function or class {name}")


# Objects --------------------------------------------------------------------------------------------------------------


def object_of(builder: Builder, node: Object) -> Any:
    """An object of a class in one of our tables; any other is refused."""
    word, args = value_word(node.fn), node.args
    if node.how == "persistent" or node.kwargs:
        return builder.refuse(node, f"an object of {node.name}")
    if word == "layout":
        return layout_of(node)
    if word == "array type":
        return _numpy_type(array_type(node))
    if word in ("array", "array scalar"):
        try:
            content = array(node)
        except Unsupported as error:
            return builder.refuse(node, error.what)
        if content is not NotImplemented:
            return _numpy_array(content) if word == "array" else _numpy_array(content)[()]
    if word == "uninitialized" and node.state is MISSING and all(type(arg) is bool for arg in args):
        return builder.guarded(node, lambda: getattr(torch.nn.parameter, node.fn.name)(*args))
    is_torch = type(node.fn) is Global and node.fn in BUILDERS and node.fn.module.startswith("torch")
    if is_torch and node.state is MISSING:
        return builder.refuse(node, f"a call of {node.name} with arguments that torch never writes")
    value = expand(node)
    if value is node:
        return builder.refuse(node, f"an object of {node.name}{' with other contents than it writes' if word else ''}")
    if canonical(node.fn) == "torch.torch_version.TorchVersion":  # a text that compares as versions do
        return torch.torch_version.TorchVersion(value)
    match word:
        case "namespace":
            namespace = argparse.Namespace() if canonical(node.fn) == "argparse.Namespace" else types.SimpleNamespace()
            return _filled(namespace, {}, value)
        case "counter":
            return _filled(collections.Counter(), value)
        case "defaultdict":
            factory = NAMES.get(canonical(args[0])) if args else None
            if len(args) > 1 or not (isinstance(factory, type) or args in ((), (None,))):
                return builder.refuse(node, f"a defaultdict of {brief(args[0])}")
            return _filled(collections.defaultdict(factory), value)
        case "deque":
            size = args[1] if len(args) > 1 else None
            if size is not None and not (type(size) is int and size >= 0):
                return builder.refuse(node, f"a deque of length {brief(size)}")
            deque: Any = collections.deque(maxlen=size)
            return FillLater(deque, lambda of: deque.extend(map(of, value)))
        case "size" | "device":
            if word == "size" and not all(type(size) is int for size in value):
                return builder.refuse(node, "a torch.Size of something other than numbers")
            return builder.guarded(node, lambda: torch.Size(value) if word == "size" else torch.device(value))
    # Configuration becomes the dictionaries and lists that it is made of.
    if isinstance(value, dict):
        return dictionary(builder, value)
    if isinstance(value, list):
        return copy_list(value)
    return copy_tuple(value) if type(value) is tuple else FromParts((value,), lambda parts: parts[0])


def _numpy_array(source: Array) -> Any:
    """A new array in the byte order in which it was saved; it holds no Python objects."""
    import numpy

    kind = _numpy_type(source.type)
    order: Literal["F", "C"] = "F" if source.fortran else "C"
    if not source.data:
        return numpy.zeros(source.shape, kind, order=order)
    return numpy.frombuffer(bytearray(bytes(source.data)), kind).reshape(source.shape, order=order)


def _numpy_type(kind: ArrayType) -> Any:
    import numpy

    if kind.fields:
        names, kinds, offsets = zip(*kind.fields, strict=True)
        formats = [_numpy_type(part) for part in kinds]
        fields: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": kind.itemsize}
        return numpy.dtype(fields)
    order = "" if kind.order == "|" else kind.order
    unit = f"[{kind.unit[1]}{kind.unit[0]}]" if kind.unit and kind.unit[0] != "generic" else ""
    return numpy.dtype(f"{order}{kind.code}{unit}")


# Handlers by type -----------------------------------------------------------------------------------------------------

_HANDLERS: Mapping[type, Callable[[Builder, Any], Any]] = {
    TensorEntry: lambda builder, node: builder.guarded(node, lambda: tensors.strided(builder, node)),
    Composite: tensors.composite,
    StorageRef: tensors.typed_storage,
    dict: dictionary,
    OrderedDict: dictionary,
    Set: set_of,
    bytearray: lambda _, node: bytearray(node),
    ByteString: lambda builder, node: builder.text(node),
    Global: named,
    Object: object_of,
}


# The stock library ---------------------------------------------------------------------------------------------------


def load_plain(checkpoint: Checkpoint, device: torch.device | None) -> dict[str, Any] | None:
    """The tensors of a plain safetensors file on an accelerator, by safetensors' own reader, where that is faster.

    None where it is not, or cannot do it: then our own reader is used.
    """
    source, tree = checkpoint.source, checkpoint.tree
    if device is None or device.type not in ("cuda", "mps") or not isinstance(source, Source):
        return None
    is_plain = (
        not (source.far or source.begin)
        and checkpoint.container == "safetensors"
        and checkpoint.tensors_only
        and not checkpoint.base
    )
    is_plain = is_plain and len({id(entry.storage.data) for entry in tree.values()}) == len(tree)  # without ties
    if not is_plain or not untyped.get_device_module(device.type).is_available():
        return None
    from safetensors import SafetensorError, safe_open

    # To torch `cuda` is the current device, to the stock library the first.
    name = f"cuda:{torch.cuda.current_device()}" if str(device) == "cuda" else str(device)
    way = "prefetch" if device.type == "cuda" else "get_tensors"
    if not hasattr(safe_open, way):
        return None
    try:
        fd = source.descriptor()
        with safe_open(f"/dev/fd/{fd}", "pt", name, backend="pread") as file:
            if way == "get_tensors":
                entries = file.get_tensors()
            else:
                with file.prefetch() as loader:
                    entries = dict(loader)
    except (SafetensorError, RuntimeError, TypeError, OSError):  # whatever it is, our own reader names it, or copes
        return None
    source.check_unchanged()
    return {name: entries[name] for name in tree} if entries.keys() == tree.keys() else None
