"""From a tree to live objects: one tensor, or all that `torch.load` would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ckptool.bridge import live_objects, tensors
from ckptool.bridge.storages import Storages, untyped
from ckptool.checkpoint import Checkpoint, Composite, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.blocks import check_files, verify
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.graph import COPY, FromParts, GraphMapper
from ckptool.checkpoint.nodes import ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.strided import subrange
from ckptool.checkpoint.tree import address, walk
from ckptool.commands import OUT_SAFETENSORS, command, input_of
from ckptool.errors import CkptoolError, Corrupt, UnsafeObject, listed
from ckptool.pickles.calls import uses
from ckptool.pickles.reduce import places_in


def to_torch(entry: TensorEntry | Composite, device: Any = "cpu") -> torch.Tensor:
    """A new tensor with the entry's bytes, type, strides, flags and class, on `device`; nothing is mapped.

    Of a plain entry only the part of the storage that it spans is read. Raises `UnsafeObject` for a subclass that is
    not torch's own.
    """
    given = entry
    if isinstance(entry, TensorEntry):
        verify(entry)
        start, stop = entry.span()
        part = Storage(subrange(entry.storage.data, start, stop - start), entry.location)
        entry = TensorEntry(part, entry.dtype, entry.shape, entry.stride, 0, entry.flags)
    made: torch.Tensor = Builder(Checkpoint(entry, ""), Storages(device, map_files=False)).build()
    if isinstance(given, TensorEntry):
        check_files(given)
    return made


def build(
    checkpoint: Checkpoint, map_location: Any = "cpu", *, mmap: bool = True, text: Callable[[bytes], Any] = bytes
) -> Any:
    """The value that `torch.load` would give for this tree, without running anything that the file names.

    map_location: as `torch.load` takes it (a device, a dictionary, a function; None: where the tensors were saved).
    mmap: map the file (privately: writes to the tensors do not reach it) instead of reading it, as
    `torch.load(mmap=True)` does. Nothing is read until it is used, checksums are not checked, and the file must not be
    cut short or overwritten while the tensors live.
    text: makes something of Python 2's strings that are not UTF-8.
    Raises `UnsafeObject` naming every object of an unknown class and where it is, `Unsupported` for a device that is
    not there.
    """
    storages = Storages(map_location, map_files=mmap)
    if (found := load_plain(checkpoint, storages.device)) is not None:
        return found
    return Builder(checkpoint, storages, text).build()


class Builder:
    """Makes the live objects of one tree. What it does not know is collected and named at the end, all at once."""

    def __init__(self, checkpoint: Checkpoint, storages: Storages, text: Callable[[bytes], Any] = bytes) -> None:
        self.checkpoint, self.storages, self.text = checkpoint, storages, text
        handlers = {kind: partial(self._handle, handler) for kind, handler in _HANDLERS.items()}
        self.mapper = GraphMapper({**COPY, **handlers})
        self.unknown: list[tuple[Any, str]] = []

    def build(self, *, is_own: bool = False) -> Any:
        """The value of the tree. is_own: its objects are the caller's, and no file's: it is not judged."""
        made = self.mapper.map(self.checkpoint.tree)
        self.mapper.handlers = {}  # they refer to this builder: without them it ends with its last use, and the tensors
        if not is_own:
            thrown = uses(self.checkpoint.discarded)
            self.unknown += [(None, f"{use.name}, which is {use.how} and thrown away") for use in thrown]
            if not self.unknown and (use := next(uses(self.checkpoint.tree), None)):
                self.unknown.append((None, f"{use.name} at {address(use.path) or 'the top'}"))
        if self.unknown:
            raise self.refusal()
        return made

    def refusal(self) -> UnsafeObject:
        """The error for what was refused, with where it is, and advice to load a part that holds nothing unknown."""
        places = places_in(self.checkpoint.tree, {id(node) for node, _ in self.unknown})
        names = [f"{name}{' at ' + places[id(node)] if id(node) in places else ''}" for node, name in self.unknown]
        source, tree, advice = self.checkpoint.source, self.checkpoint.tree, ""
        if source:
            from ckptool.conventions.state_dicts import find_state_dicts

            bad = {place.partition("/")[0] for place in places.values()}
            parts = tree.items() if isinstance(tree, dict) else ()
            tops = [address((key,)) for key, value in parts if isinstance(value, dict) and value]
            if good := [top for top in tops if top not in bad]:
                advice = f"Load a part without them: ckptool.load({f'{source}#{good[0]}'!r}). "
            elif any(root.module is not None for root in find_state_dicts(self.checkpoint)):
                advice = f"Take its weights: {command('convert', input_of(source), out=OUT_SAFETENSORS)}. "
        what = f"{source or 'the checkpoint'} holds {listed(names)}"
        why = "Loading these would run code that the file names; ckptool does not run it."
        return UnsafeObject(what, why, f"{advice}See what is there: {command('inspect', input_of(source))}")

    def refuse(self, node: Any, name: str) -> Unknown:
        """Stands something in for a node that is not made, and remembers what to call it."""
        self.unknown.append((node, name))
        return Unknown()

    def _handle(self, handler: Callable[[Builder, Any], Any], node: Any) -> Any:
        """The answer of a handler for a node; its errors name the address of the node."""
        try:
            return handler(self, node)
        except CkptoolError as error:
            place = next((address(path) for path, found in walk(self.checkpoint.tree) if found is node), "")
            where = ": ".join(part for part in (str(self.checkpoint.source or ""), place) if part)
            raise (error.within(where) if where else error) from None

    def guarded(self, node: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`; raises `Corrupt` where torch refuses the description of a tensor."""
        try:
            return make()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            why = str(error).splitlines()[0][:300] if str(error) else ""
            raise Corrupt(f"torch cannot create {node!r}", why) from error

    def parts(self, node: Any, args: tuple[Any, ...], make: Callable[..., Any]) -> FromParts:
        """`make` called with the live arguments of a tensor; where one of them is refused, so is the tensor."""

        def whole(parts: list[Any]) -> Any:
            if any(isinstance(part, Unknown) for part in parts):
                return Unknown()
            return self.guarded(node, lambda: make(*parts))

        return FromParts(args, whole)


class Unknown:
    """Stands in for what is not made, until the refusal names it."""


_HANDLERS: Mapping[type, Callable[[Builder, Any], Any]] = {
    TensorEntry: lambda builder, node: builder.guarded(node, lambda: tensors.strided(builder, node)),
    Composite: tensors.composite,
    StorageRef: tensors.typed_storage,
    dict: live_objects.dictionary,
    OrderedDict: live_objects.dictionary,
    Set: live_objects.set_of,
    bytearray: lambda _, node: bytearray(node),
    ByteString: lambda builder, node: builder.text(node),
    Global: live_objects.named,
    Object: live_objects.known,
}


# The stock library ---------------------------------------------------------------------------------------------------


def load_plain(checkpoint: Checkpoint, device: torch.device | None) -> dict[str, Any] | None:
    """The tensors of a plain safetensors file on an accelerator, by safetensors' own reader, where that is quicker.

    None where it is not, or cannot do it: then our own way is taken.
    """
    source, tree = checkpoint.source, checkpoint.tree
    if device is None or device.type not in ("cuda", "mps") or not isinstance(source, Source) or source.far:
        return None
    is_plain = checkpoint.container == "safetensors" and checkpoint.tensors_only and not checkpoint.base
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
                found = file.get_tensors()
            else:
                with file.prefetch() as loader:
                    found = dict(loader)
    except (SafetensorError, RuntimeError, TypeError, OSError):  # whatever it is, our own way names it, or can do it
        return None
    source.check_unchanged()
    return {name: found[name] for name in tree} if found.keys() == tree.keys() else None
