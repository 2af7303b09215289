"""The storages of torch's legacy streams: by persistent id, and placed once their keys are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ckptool.checkpoint import Computed, Data, Storage, StorageRef
from ckptool.checkpoint import InlineBytes as InMemory
from ckptool.checkpoint.arrays import swapped
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import Global
from ckptool.checkpoint.strided import subrange
from ckptool.errors import (
    BadTensor,
    Corrupt,
    Truncated,
    Unsupported,
    counted,
    listed,
)
from ckptool.pickles.strings import whole
from ckptool.pickles.torch_objects import StorageView, storage_class


@dataclass(slots=True, eq=False)
class _LegacyStorage:
    """A storage with data of its own. `ref` is how it was first seen, `numel` its number of elements."""

    ref: StorageRef
    numel: int


class LegacyStorages:
    """Gives the storages for persistent ids, and their data when the keys are known that say where it is."""

    def __init__(self, little_endian: bool) -> None:
        self.little_endian = little_endian
        self.order: Literal["", "little", "big"] = ""  # of the data, once that is known
        self.alone: set[str] = set()  # views that no tensor is made of
        self.clear()

    def clear(self) -> None:
        self.by_class: dict[Global, dict[str, _LegacyStorage]] = {}
        self.roots: dict[str, _LegacyStorage] = {}
        self.views: dict[str, tuple[Any, StorageView]] = {}
        self.sources: dict[str, dict[str, str | None]] = {}

    def load(self, pid: Any) -> Any:
        """The value of `("storage", class, key, location, elements, view)` or `("module", class, file, source)`."""
        try:
            tag, cls, key, location, numel, view = pid
            root = self.by_class[cls][key]
        except (KeyError, TypeError, ValueError):
            return self._slowly(pid)
        if tag != "storage" or view is not None or type(numel) is not int:
            return self._slowly(pid)
        if location != root.ref.storage.location or numel != root.numel:
            raise _contradiction(key)
        return root.ref

    def _slowly(self, pid: Any) -> Any:
        parts = pid if type(pid) is tuple and pid else (None,)
        tag = as_text(parts[0])
        if len(parts) == 4 and tag == "module":
            return self._module(parts[1:])
        if len(parts) != 6 or tag != "storage":
            raise Corrupt(
                "a persistent id that names no storage", "torch writes them for storages and for modules' classes."
            )
        cls, numel, view = parts[1], parts[4], parts[5]
        key, location = as_text(parts[2]), as_text(parts[3])
        if type(cls) is not Global or type(key) is not str or type(location) is not str or type(numel) is not int:
            raise Corrupt("a persistent id of a storage that is not as torch writes it", "The pickle was damaged.")
        root = self._root(cls, key, location, numel)
        return root.ref if view is None else self._view(root, view)

    def _module(self, parts: tuple[Any, ...]) -> Global:
        cls, source = module_source(parts)
        if source is not None:
            self.sources[str(cls)] = source
        return cls

    def _root(self, cls: Global, key: str, location: str, numel: int) -> _LegacyStorage:
        known, dtype = storage_class(cls)
        if not known:
            raise Unsupported(f"the storage {key} has the unknown type {cls}", "The size of its elements is unknown.")
        if numel < 0:
            raise BadTensor(f"the storage {key} has {numel} elements", _NO_TENSOR)
        if key in self.views:
            raise _entangled(key)
        size = numel * (dtype.itemsize if dtype else 1)
        first = self.roots.get(key)
        if first is None:
            first = self.roots[key] = _LegacyStorage(StorageRef(Storage(_unplaced(size), location), dtype), numel)
        elif first.ref.dtype is not dtype:
            alike = not size or all(t is None or t.name == "u8" for t in (dtype, first.ref.dtype))
            if size != first.ref.storage.nbytes or not alike:
                raise _contradiction(key)
            first = _LegacyStorage(StorageRef(first.ref.storage, dtype), numel)
        if location != first.ref.storage.location or numel != first.numel:
            raise _contradiction(key)
        self.by_class.setdefault(cls, {})[key] = first
        return first

    def _view(self, root: _LegacyStorage, view: Any) -> Any:
        key, offset, size = view if type(view) is tuple and len(view) == 3 else (None, None, None)
        key = as_text(key)
        if type(key) is not str or type(offset) is not int or type(size) is not int:
            raise BadTensor("a view of a storage that is not as torch writes it", _NO_TENSOR)
        if offset < 0 or size < 0 or offset + size > root.numel:
            raise BadTensor(
                f"the view {key} is of the elements {offset:,} to {offset + size:,} "
                f"of a storage that has {root.numel:,}",
                _NO_TENSOR,
            )
        if key in self.roots:
            raise _entangled(key)
        found = self.views.get(key)
        facts = (root.ref.storage, root.ref.dtype, offset, size)
        if found is None:
            storage, dtype = root.ref.storage, root.ref.dtype
            width = dtype.itemsize if dtype else 1
            window = Storage(_unplaced(size * width), storage.location)
            found = self.views[key] = facts, StorageView(key, storage, dtype, offset, window)
        elif found[0] != facts:
            raise _contradiction(key)
        return StorageRef(found[1].window, root.ref.dtype) if key in self.alone else found[1]

    # Their data --------------------------------------------------------------------------------------------------

    def place(self, data: Data, keys: Any, at: int) -> int:
        """Gives each storage its part of `data`, in the order of the keys, from byte `at`; the byte after the last."""
        keys = [as_text(key) for key in keys] if type(keys) is list else [None]
        self._check_keys(keys)
        for key in keys:
            at = self._place(data, self.roots[key], key, at)
        for (storage, dtype, offset, _), view in self.views.values():
            if view.key in self.alone:
                begin = offset * (dtype.itemsize if dtype else 1)
                view.window.data = subrange(storage.data, begin, view.window.data.length)
        return at

    def _check_keys(self, keys: list[Any]) -> None:
        if not all(type(key) is str for key in keys):
            raise Corrupt("the list of storages is not a list of keys", _MENDED)
        if len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1}) if len(keys) < 1000 else ["some"]
            raise Corrupt(f"the list of storages names {twice[0][:80]} twice", _MENDED)
        if unknown := [key for key in keys if key not in self.roots]:
            raise Corrupt(f"the list of storages names {_named(unknown)}, which no tensor uses", _MENDED)
        if missing := self.roots.keys() - set(keys):
            raise Corrupt(f"the list of storages does not name {_named(sorted(missing))}", _MENDED)

    def _place(self, data: Data, root: _LegacyStorage, key: str, at: int) -> int:
        storage, size = root.ref.storage, root.ref.storage.nbytes
        if at + 8 > data.length:
            raise self._cut(key, at, 8 + size, data.length)
        self._check_count(data.read(at, 8), root, key)
        at += 8
        if at + size > data.length:
            raise self._cut(key, at, size, data.length)
        storage.data = subrange(data, at, size) if size else InMemory(b"")
        if self.order == "big":
            storage.data = swapped(Storage(storage.data, storage.location), self._dtype(key))
        return at + size

    def _check_count(self, header: bytes, root: _LegacyStorage, key: str) -> None:
        """Checks the number of elements in front of the data; its byte order is that of the file."""
        orders = [order for order in _ORDERS if int.from_bytes(header, order) == root.numel]
        if len(orders) == 1 and not self.order:
            self.order = orders[0]
        if not orders or (self.order and self.order not in orders) or (self.order == "big" and self.little_endian):
            raise Corrupt(
                f"the storage {key[:80]} should have {counted(root.numel, 'element')}; "
                f"the data says {int.from_bytes(header, self.order or 'little', signed=True):,}",
                "Two programs wrote to the file, or it was damaged.",
            )

    def _dtype(self, key: str) -> DType | None:
        """The element type of a storage, as far as any of the ways in which it is seen tells it."""
        kinds = [refs[key].ref.dtype for refs in self.by_class.values() if key in refs]
        return next((kind for kind in kinds if kind is not None), None)

    @staticmethod
    def _cut(key: str, at: int, size: int, end: int) -> Truncated:
        what = f"the storage {key} needs {size:,} bytes from byte {at:,}; {end - at:,} are there"
        return Truncated(what, fix="Copy or download it again.")


_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
_NO_TENSOR = "The file is damaged or malicious."
_MENDED = "The file was damaged, or put together from two."


def _named(keys: list[str]) -> str:
    return listed([key[:80] for key in keys], 3)


def _unplaced(size: int) -> Computed:
    """A stand-in for the data of a storage until it is placed."""

    def read(offset: int, length: int) -> bytes:
        raise AssertionError(f"{length} bytes at {offset} of a storage that is not placed yet")

    return Computed(size, read)


def module_source(parts: tuple[Any, ...]) -> tuple[Global, dict[str, str | None] | None]:
    """The class that `(class, file, source text)` in a persistent id names, and its file and text."""
    texts = [whole(part) for part in parts[1:]]
    if (
        len(parts) != 3
        or type(parts[0]) is not Global
        or not all(t is None or isinstance(t, (str, bytes)) for t in texts)
    ):
        raise Corrupt("a persistent id of a module that is not as torch writes it", "The pickle was damaged.")
    file, source = (text.decode("latin-1") if isinstance(text, bytes) else text for text in texts)
    return parts[0], (None if file is None and source is None else {"file": file, "source": source})


def as_text(value: Any) -> Any:
    """Texts of a persistent id, which Python 2 and `encoding="bytes"` may have made bytes."""
    value = whole(value)
    return value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else value


def _contradiction(key: str) -> Corrupt:
    return Corrupt(f"the storage {key[:80]} is described in two ways", "Readers would disagree about which is right.")


def _entangled(key: str) -> BadTensor:
    return BadTensor(f"the storage {key[:80]} is a view, and has views", "torch writes views of whole storages.")
