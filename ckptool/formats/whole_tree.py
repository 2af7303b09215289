"""What a container of tensors cannot say of a tree: its pickle, in the container, for ckptool alone.

It is the pickle of a torch file, except that the keys of storages say where in the container their bytes are: under
which name, and, for a tensor that was brought into row-major order, how its dimensions lie in the storage. It is base64
in the metadata of safetensors (a whole tree, as `convert --all` writes it) and of the index of shards (what is set on a
state dict), in a `dcp` folder a tensor. Decoded as any pickle: nothing runs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ckptool.checkpoint import Checkpoint, Storage, StorageRef, TensorEntry, row_major_strides
from ckptool.checkpoint import tree as trees
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import Object, OrderedDict
from ckptool.checkpoint.strided import in_storage_order, row_major, storage_axes
from ckptool.commands import ADDRESS, FILE, OUT, arg, command
from ckptool.conventions.state_dicts import is_metadata
from ckptool.errors import CkptoolError, Conflict, Corrupt, LimitExceeded, Unsupported, is_text, listed
from ckptool.formats import marks
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.calls import is_quiet, uses
from ckptool.pickles.decode import Decoded, decode_all
from ckptool.pickles.encode import encode
from ckptool.pickles.torch_objects import storage_class

KEY = marks.PICKLE
KEPT = "side-car"  # of the notes
MAX_PICKLE = 64 << 20  # bytes
RESERVED = "~storage/"  # begins the names of storages that no tensor covers
METADATA = "_metadata"
_CHANGED = "Another program changed the tensors, or the pickle in the metadata."
DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)  # of what another program wrote


def pickle_of(tree: Any, keys: Mapping[int, str]) -> bytes:
    """The pickle of a tree. keys: of its storages, by their id. Raises `LimitExceeded` for one that is not read."""
    content = encode(tree, lambda storage: keys[id(storage)])
    if len(content) > MAX_PICKLE:
        what = f"{KEY} would have {len(content):,} bytes"
        fix = f"Write a torch file: {arg(container='torch-zip')}"
        raise LimitExceeded(what, f"ckptool reads at most {MAX_PICKLE:,}.", fix)
    return content


def key_of(name: str, axes: list[int] | None) -> str:
    """The key, in the pickle, of a storage whose bytes the container has under a name. axes: see `PickledStorages`."""
    return json.dumps([name, axes])


class PickledStorages:
    """The storages of a pickle, each once. values: what the container holds.  used: those asked for, by name.

    A key has a name, and for a tensor whose dimensions lie in another order in the storage, that order (`axes`).
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.used: dict[str, Storage] = {}
        self._loaded: dict[str, Storage] = {}

    def load(self, pid: Any) -> StorageRef:
        _, cls, key, location, count = pid
        is_known, dtype = storage_class(cls)
        if not is_known:
            raise TypeError("a storage")
        if key not in self._loaded:
            name, axes = json.loads(key)
            if name not in self.values:
                raise Conflict(f"there is no {name}, which the pickle refers to", _CHANGED)
            entry = self.values[name]
            if not isinstance(entry, TensorEntry):
                raise TypeError("a storage")
            data, crc = entry.storage.data, entry.storage.crc
            if axes is not None:
                if sorted(axes) != list(range(len(entry.shape))):
                    raise Conflict("the number of a tensor's dimensions differs from the pickle's", _CHANGED)
                data, crc = row_major(replace(entry, stride=row_major_strides(entry.shape)).permute(axes)), None
            self._loaded[key] = self.used[name] = Storage(data, str(location), crc)
            if self._loaded[key].nbytes // (dtype.itemsize if dtype else 1) != count:
                raise Conflict(f"{name} differs in size from what the pickle says", _CHANGED)
        return StorageRef(self._loaded[key], dtype)


def decoded(content: bytes, storages: PickledStorages, name: str) -> Decoded:
    """What a pickle says. Raises as `decode_all`."""
    return decode_all(content, storages.load, BUILDERS, name=name, file_bytes=len(content))


# In safetensors ------------------------------------------------------------------------------------------------------


def pack(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a flat dictionary of tensors that safetensors can hold, and the pickle that leads back.

    A storage is stored as the first tensor that covers it, so that every reader sees the values; else as bytes. Raises
    `Unsupported` for objects of unknown classes, and for names that are not Unicode text.
    """
    unknown = [
        f"{node.name} at {trees.address(path) or 'the top'}"
        for path, node in trees.walk(checkpoint.tree)
        if isinstance(node, Object) and not is_quiet(node)
    ]
    if not checkpoint.extras:  # of a program loading makes objects, but no file of tensors can hold it anyway
        unknown += [f"{use.name}, which loading creates and discards" for use in uses(checkpoint.discarded)]
    if unknown:
        what = f"objects of classes that ckptool does not know cannot be carried: {listed(unknown)}"
        fix = f"Leave them out: {command('edit', FILE, drop=ADDRESS, out=OUT)}; "
        fix += f"or convert only the weights: without {arg(all=True)}"
        raise Unsupported(what, "Only a pickle can restore them, by running their code.", fix)
    tree = checkpoint.tree
    is_flat = isinstance(tree, dict) and any(isinstance(value, TensorEntry) for value in tree.values())
    texts = {key for key in tree if type(key) is str} if is_flat else ()  # whose names no other address may take
    stored: dict[str, TensorEntry] = {}
    keys: dict[int, str] = {}

    def store(name: str, entry: TensorEntry, axes: list[int] | None = None) -> None:
        if not is_text(name):
            raise Unsupported(f"the tensor {name} has a name that is not Unicode text", fix="Rename it first.")
        while name in stored or name == "__metadata__" or (name in texts and tree[name] is not entry):
            name += "~"
        stored[name], keys[id(entry.storage)] = entry, key_of(name, axes)

    for path, node in trees.walk(tree):
        if not isinstance(node, TensorEntry) or id(node.storage) in keys:
            continue
        # One whose values in row-major order are all bytes of its storage, and that can be stored.
        is_whole = not node.offset and node.nbytes == node.storage.nbytes and not any(node.flags.lazy)
        is_held = node.dtype.safetensors is not None and (node.dtype.name != "f4_e2m1fn_x2" or bool(node.shape))
        if is_whole and is_held and (node.is_contiguous or in_storage_order(node) is not None):
            is_entry = is_flat and len(path) == 1 and type(path[0]) is str
            axes = None if node.is_contiguous else storage_axes(node)
            store(path[0] if is_entry else trees.address(path), node, axes)
    for number, storage in enumerate(trees.storages(tree)):
        if id(storage) not in keys:
            store(f"{RESERVED}{number}", as_bytes(storage))
    metadata = {key: mark for key, mark in checkpoint.metadata.items() if key == marks.RECOVERED}
    metadata[KEY] = base64.b64encode(pickle_of(tree, keys)).decode()
    return Checkpoint(stored, checkpoint.container, metadata, checkpoint.source, tensors_only=True)


def as_bytes(storage: Storage) -> TensorEntry:
    return TensorEntry(storage, by_name("u8"), (storage.nbytes,), (1,))


def unpack(
    stored: dict[str, TensorEntry], text: str, where: str, tied: Mapping[str, TensorEntry] = MappingProxyType({})
) -> tuple[Any, tuple[Any, ...], bool]:
    """The tree of a pickle, the calls in it that are neither inert nor in the tree, and whether it is a whole tree.

    If not, it says only what is set on the dictionary of the tensors, `tied` ones included. Raises `Corrupt` for a
    damaged one, `Conflict` where the file disagrees with it, and whatever the machine refuses.
    """
    storages, name = PickledStorages(stored), f"{where}: its {KEY}"
    try:
        pickle = decoded(base64.b64decode(text, validate=True), storages, name)
    except CkptoolError:
        raise
    except DAMAGE as error:
        raise Corrupt(f"{name} is damaged ({type(error).__name__})", _CHANGED) from None
    tree = pickle.root
    if stored and type(tree) is OrderedDict and not tree:
        if not is_metadata(tree.metadata):
            raise Corrupt(f"{name} was not written by ckptool", _CHANGED)
        return OrderedDict({**stored, **tied}, {METADATA: tree.metadata}), pickle.aside(), False
    # The names of tensors that are of another type or shape in the container than in the tree, or in one of them alone.
    changed = stored.keys() ^ storages.used.keys()
    if not changed:
        views: dict[int, set[Any]] = {}
        for _, node in trees.walk(tree):
            if isinstance(node, TensorEntry):
                views.setdefault(id(node.storage), set()).add((node.dtype, node.shape))
        for key, storage in storages.used.items():
            kind = stored[key].dtype, stored[key].shape
            is_bytes = key.startswith(RESERVED) and kind == (by_name("u8"), (storage.nbytes,))
            if kind not in views.get(id(storage), ()) and not is_bytes:
                changed.add(key)
    if changed:
        what = f"{where}: its tensors no longer match the pickle of its tree ({listed(sorted(changed))})"
        raise Conflict(what, _CHANGED)
    return tree, pickle.discarded, True


# What is set on a state dict -----------------------------------------------------------------------------------------


def set_on(tree: Any) -> dict[str, str]:
    """The entry of metadata that keeps the `_metadata` of a state dict; none where it has none that torch writes."""
    if not isinstance(tree, OrderedDict) or not is_metadata(tree.metadata):
        return {}
    return {KEY: base64.b64encode(pickle_of(OrderedDict((), {METADATA: tree.metadata}), {})).decode()}
