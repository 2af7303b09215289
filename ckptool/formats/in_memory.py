"""Objects in memory in the place of files: dictionaries of tensors and arrays, modules; and the way back to them. Open
files in the place of paths.

They are read as a file would be, so that every verb takes them, and no tensor is copied. On the way back an object
about which nothing changed is itself again, and a tensor that is another view of the same memory is a view of it.
"""

from __future__ import annotations

import collections
import io
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from importlib import import_module
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, StorageRef, TensorEntry
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.graph import COPY, FillLater, FromParts, GraphMapper, Of, alike, visit
from ckptool.checkpoint.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.strided import to_numpy
from ckptool.checkpoint.tree import tensors
from ckptool.errors import FileProblem, Truncated, Unsupported, UsageError
from ckptool.formats import LIVE
from ckptool.pickles.reduce import LiveReader


class Memory(LiveReader):
    """Reads objects in memory as nodes, and remembers which is which. What no file could hold is no error here.

    pairs: by the id of a node, that node and the object.  nodes: by the id of an object, its node.
    memories: torch's storages, by the id of ours.  of_torch: there were tensors of torch.
    """

    of_torch = False

    def __init__(self, arrays_as_tensors: bool = False) -> None:
        super().__init__(arrays_as_tensors, keep_unknown=True)
        self.pairs: dict[int, tuple[Any, Any]] = {}
        self.nodes: dict[int, Any] = {}
        self.memories: dict[int, Any] = {}
        self.refusal: Unsupported | None = None

    def __deepcopy__(self, _: object) -> Memory:
        return self  # it knows objects by their ids

    def contents(self, value: Any) -> Any:
        """The dictionary that an argument stands for. Raises `UsageError` where it is none."""
        if isinstance(value, Mapping):
            if type(value) in (dict, collections.OrderedDict, OrderedDict):
                return value
            contents = (collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict)(value)
            if isinstance(contents, collections.OrderedDict):  # with `_metadata`
                vars(contents).update(vars(value))
            return contents
        what = f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
        what = repr(value) if isinstance(value, (bool, int, float)) else what
        fix = "For example: 'model.pt', model.state_dict(), model, io.BytesIO(data)"
        raise UsageError(f"{what} is not a file, a dictionary of tensors, a module or a checkpoint", "", fix)

    def read(self, tree: Any) -> Any:
        node = self.mapper.map(tree)
        self.refusal = self._refusal(node) if self.refused else None
        return node

    def special(self, value: Any) -> Any:
        try:
            node = super().special(value)
        except Unsupported:  # an array that is no tensor
            node = self.reduced(value)
        if type(node) is FromParts:
            return FromParts(node.parts, lambda parts: self._remember(value, node.make(parts)))
        self._remember(value, node.result if type(node) is FillLater else node)
        return node

    def _remember(self, value: Any, node: Any) -> Any:
        self.pairs[id(node)] = node, value
        self.nodes[id(value)] = node
        if (call := _call(node)) is not None:
            call.live = value
        return node

    def known(self, node: Any) -> Any:
        """The object that a node stands for, if nothing about it changed; else `MISSING`."""
        if (call := _call(node)) is not None:
            original = self.nodes.get(id(call.live))
            return call.live if original is not None and alike(node, original) else MISSING
        return self.pairs[id(node)][1] if id(node) in self.pairs else MISSING

    def refuse_unsaved(self, tree: Any) -> None:
        """Raises `Unsupported`, naming them, where objects are in the tree that no file can hold."""
        refused = {id(node.live) for node, _, _ in self.refused}
        if self.refusal and any(isinstance(node, Object) and id(node.live) in refused for node in visit(tree)):
            raise self.refusal

    def objects(self, tree: Any) -> Any:
        """The tree as objects in memory: those that it was read from, new arrays, entries."""
        return GraphMapper({**COPY, **dict.fromkeys(_LEAVES, self._object), **_CONTAINERS}).map(tree)

    def _object(self, node: Any) -> Any:
        live = self.known(node)
        if live is MISSING:
            return to_numpy(node) if self.arrays_as_tensors and isinstance(node, TensorEntry) else node
        return live


def _call(node: Any) -> Object | None:
    """The call that makes a node's object; None where the node has none."""
    call = node.made if isinstance(node, Composite) else node
    return call if isinstance(call, Object) else None


def holds_containers(node: Any) -> bool:
    """True for an object with dictionaries or lists in it: the result must not share the caller's own."""
    return isinstance(node, Object) and any(isinstance(part, (dict, list, Set)) for part in visit(node))


_LEAVES = (TensorEntry, Composite, StorageRef, Object, Global)


def _ordered(node: OrderedDict) -> FillLater:
    ordered: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def fill(of: Of) -> None:
        ordered.update((of(key), of(value)) for key, value in node.items())
        vars(ordered).update((key, of(value)) for key, value in (node.attributes or {}).items())

    return FillLater(ordered, fill)


_CONTAINERS: dict[type, Any] = {
    OrderedDict: _ordered,
    Set: lambda node: FromParts(node.items, frozenset if node.frozen else set),
    ByteString: bytes,
}


def checkpoint_in_memory(value: Any, *, members: bool = False) -> Checkpoint:
    """A dictionary or module as a checkpoint over its own memory. Numpy's arrays are tensors where there are no others.

    members: a dictionary of such, read together, so that what they share stays shared.
    Raises `UsageError` for anything else, `Conflict` for one storage under two types.
    """
    memory = Memory()
    if sys.modules.get("torch") is not None:  # else there can be no tensor of torch
        memory = import_module("ckptool.bridge.from_live").torch_memory(memory)
    contents = {name: memory.contents(member) for name, member in value.items()} if members else memory.contents(value)
    tree = memory.read(contents)
    if not memory.of_torch:
        memory = Memory(arrays_as_tensors=next(tensors(tree), None) is None)
        tree = memory.read(contents)
    return Checkpoint(tree, LIVE, memory=memory)


def together(checkpoint: Checkpoint, others: Iterable[Checkpoint]) -> Checkpoint:
    """The checkpoint with the memories of others too: it is made of tensors of them all."""
    memories = [other.memory for other in (checkpoint, *others) if other.memory is not None]
    if not memories:
        return checkpoint
    joined = copy(max(memories, key=lambda memory: (memory.of_torch, memory.refusal is not None)))
    for name in ("pairs", "nodes", "memories"):
        setattr(joined, name, {key: value for memory in memories for key, value in getattr(memory, name).items()})
    return replace(checkpoint, memory=joined)


# Open files in the place of paths: of the system, in memory, compressed, a part of an archive -------------------------

_BINARY = "Open it for reading in binary: open(PATH, 'rb')"


def source_of(file: Any) -> Source:
    """What an open binary file holds from its position on, which is at the end afterwards.

    A regular file of the system is shared, not copied, and stays readable when `file` is closed; of anything else (a
    `BytesIO`, a gzip file, a pipe) the rest is copied once into memory outside of the heap. Raises `UsageError` for a
    text file and one that is closed or cannot be read, `FileProblem` where reading fails.
    """
    name = getattr(file, "name", None)
    shown = name if type(name) is str and name else f"<{type(file).__name__}>"
    if not callable(getattr(file, "read", None)):
        raise UsageError(f"{repr(file)[:80]} is neither a path nor an open file", "", "Name a file.")
    if isinstance(file, io.TextIOBase) or getattr(file, "encoding", None):
        raise UsageError(f"{shown} is open as text", "Checkpoints are binary.", _BINARY)
    raw = getattr(file, "raw", file)  # of a buffer; files in memory, archives and compressors have another, or none
    at = 0
    try:
        with suppress(AttributeError, OSError):  # a pipe has no position
            at = file.tell()
        if isinstance(raw, io.FileIO) and stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
            if not file.readable():
                raise io.UnsupportedOperation("it is open for writing only")
            if file.writable():
                file.flush()
            source = Source(shown, os.dup(raw.fileno()), at)
            file.seek(0, os.SEEK_END)
        else:
            import shutil
            import tempfile  # with all kinds of random numbers

            on_linux = hasattr(os, "memfd_create")
            with open(os.memfd_create("ckptool"), "wb") if on_linux else tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
                copy.flush()
                source = Source(shown, os.dup(copy.fileno()))
    except (OSError, ValueError, TypeError) as error:
        why = str(error)[:200]
        if isinstance(error, OSError) and not isinstance(error, io.UnsupportedOperation):
            raise FileProblem(f"cannot read {shown}", why) from error
        raise UsageError(f"{shown} cannot be read from", why, _BINARY) from None
    if at and source.size <= 0:
        why = "An open file is read from its position to its end, as one checkpoint."
        raise Truncated(f"{shown} is at its end: there is nothing to read", why, "Rewind it: file.seek(0)")
    return source
