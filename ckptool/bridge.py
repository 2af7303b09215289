"""Between a tree of entries and live torch objects. Beside `live` and `training`, the only place that imports torch.

`to_torch` makes one tensor, `build` a whole tree as `torch.load` would, `from_torch` turns live objects into entries. What torch's
rebuild functions do is looked up in the table `_REBUILD` below; no name of a file is ever imported or called.
Source of what they do: torch/_utils.py, torch/_tensor.py and torch/serialization.py, torch 2.4 to 2.13.
"""

from __future__ import annotations

import argparse
import collections
import math
import mmap as mapping
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

from ckptool import plain
from ckptool.checkpoint import Checkpoint, Composite, Computed, Data, FileRange, Storage, StorageRef, TensorEntry
from ckptool.dtypes import BY_TORCH, DType
from ckptool.errors import (
    BadTensor,
    CkptoolError,
    Conflict,
    Corrupt,
    FileChanged,
    LimitExceeded,
    UnsafeObject,
    Unsupported,
    UsageError,
    listed,
    printable,
)
from ckptool.files import Source
from ckptool.gather import fill, subrange, verify
from ckptool.graphs import After, Done, Empty, Made, Of, Remake
from ckptool.live_values import Reader
from ckptool.nodes import MISSING, ByteString, Global, Object, OrderedDict, Set
from ckptool.pickles.torch_objects import BUILDERS, SIZE, check_view, dtype_of, storage_class
from ckptool.tree import address, walk

try:
    import torch
except ImportError as error:
    raise Unsupported(
        "torch is not installed",
        "Tensors of torch cannot be made or read without it; everything else of ckptool works.",
        "pip install 'ckptool[torch]'",
    ) from error

_PIECE = 4 << 20
untyped: Any = torch  # for the functions that torch gives no types, or wrong ones


def to_torch(entry: TensorEntry | Composite, device: Any = "cpu") -> torch.Tensor:
    """A new tensor with the entry's bytes, type, strides, flags and class, on `device`. Its bytes are read, nothing is mapped.

    Of a plain entry only the part of the storage that it spans is read. Raises `UnsafeObject` for a subclass that is not torch's own.
    """
    if isinstance(entry, TensorEntry):
        verify(entry)
        start, stop = entry.span()
        part = Storage(subrange(entry.storage.data, start, stop - start), entry.location)
        entry = TensorEntry(part, entry.dtype, entry.shape, entry.stride, 0, entry.flags)
    made: torch.Tensor = _Builder(Checkpoint(entry, ""), _restorer(device), map_files=False).build()
    return made


def build(checkpoint: Checkpoint, map_location: Any = "cpu", *, mmap: bool = True) -> Any:
    """What `torch.load` would give for this tree, without running anything that the file names.

    map_location: as `torch.load` takes it (a device, a dictionary, a function; None: where the tensors were saved).
    mmap: map the file (privately: writes to the tensors do not reach it) instead of reading it, as `torch.load(mmap=True)` does. Nothing is
    read until it is used, checksums are not checked, and the file must not be cut short or overwritten while the tensors live.
    Raises `UnsafeObject` naming every object of an unknown class and where it is, `Unsupported` for a device that is not there.
    """
    return _Builder(checkpoint, _restorer(map_location), map_files=mmap).build()


# Devices -------------------------------------------------------------------------------------------------------------

Restore = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]


class _Restorer:
    """Puts storages where `map_location` wants them. `meta`: then there are no bytes at all."""

    def __init__(self, restore: Restore, meta: bool = False) -> None:
        self.restore, self.meta = restore, meta


def _restorer(map_location: Any) -> _Restorer:
    if map_location is None:
        return _Restorer(_at_home)
    if isinstance(map_location, dict):
        return _Restorer(lambda storage, location: _at_home(storage, str(map_location.get(location, location))))
    if isinstance(map_location, (str, bytes, torch.device)):
        device = _device(map_location)
        return _Restorer(lambda storage, location: _at_home(storage, str(device)), meta=device.type == "meta")
    if not callable(map_location):
        raise UsageError(
            f"map_location={map_location!r} is no device, dictionary or function", "", "For example: map_location='cpu'"
        )

    def asked(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        found = map_location(storage, location)
        found = getattr(found, "_untyped_storage", found)
        return _at_home(storage, location) if found is None else found

    return _Restorer(asked)


def _device(name: Any) -> torch.device:
    try:
        return torch.device(name.decode() if isinstance(name, bytes) else name)
    except (RuntimeError, UnicodeDecodeError):
        raise UsageError(
            f"{printable(str(name))!r} is no device", "Devices are named cpu, cuda, cuda:1, mps, meta."
        ) from None


def _at_home(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """The storage on the device that `location` names."""
    if location == "cpu":
        return storage
    try:
        return cast(torch.UntypedStorage, untyped.serialization.default_restore_location(storage, location))
    except (RuntimeError, AttributeError, AssertionError) as error:
        raise Unsupported(
            f"tensors are tagged {printable(location)}, which this machine or this torch does not have",
            printable(str(error).splitlines()[0])[:300] if str(error) else "",
            "Put them elsewhere: map_location='cpu'; or change the file: ckptool remap FILE --to cpu -o OUT",
        ) from error


# Storages ------------------------------------------------------------------------------------------------------------


class _Storages:
    """One torch storage for each storage of the tree, mapped or read when it is first asked for."""

    def __init__(self, restorer: _Restorer, map_files: bool) -> None:
        self.restorer, self.map_files = restorer, map_files
        self.made: dict[int, torch.UntypedStorage] = {}
        self.maps: dict[Source, mapping.mmap] = {}

    def get(self, storage: Storage, itemsize: int) -> torch.UntypedStorage:
        made = self.made.get(id(storage))
        if made is None:
            made = self.made[id(storage)] = self._make(storage, itemsize)
        return made

    def _make(self, storage: Storage, itemsize: int) -> torch.UntypedStorage:
        if self.restorer.meta:
            return cast(torch.UntypedStorage, untyped.UntypedStorage(storage.nbytes, device="meta"))
        data = storage.data
        mapped = self.map_files and not storage.twin  # twins have one place in the file, and each its own memory
        if mapped and isinstance(data, FileRange) and data.length and data.offset % min(itemsize, 8) == 0:
            data.ready()
            view = torch.frombuffer(self._map(data.file), dtype=torch.uint8, count=data.length, offset=data.offset)
            made = view.untyped_storage()
        else:
            made = _read(data, storage.crc)
        return self.restorer.restore(made, storage.location)

    def _map(self, source: Source) -> mapping.mmap:
        """The whole file, once, copy-on-write; every storage in it keeps it alive."""
        if source not in self.maps:
            source.check_unchanged()
            try:
                self.maps[source] = mapping.mmap(source.fd, source.size, access=mapping.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise FileChanged(
                    f"{source} cannot be mapped into memory", printable(str(error)), "Read it instead: mmap=False"
                ) from error
        return self.maps[source]


def _read(data: Data, crc: int | None) -> torch.UntypedStorage:
    """The bytes in memory of their own; raises `Corrupt` where they do not match their checksum."""
    try:
        storage: torch.UntypedStorage = untyped.UntypedStorage(data.length)
    except (RuntimeError, MemoryError) as error:
        raise LimitExceeded(
            f"a storage of {data.length:,} bytes does not fit into memory",
            "",
            "Choose a part of the file: FILE#ADDRESS",
        ) from error
    if not data.length:
        return storage
    if isinstance(data, FileRange):
        data.ready()
    buffer = memoryview(cast(Any, _bytes_of(storage).numpy()))
    total = 0
    for place in range(0, data.length, _PIECE):
        piece = buffer[place : place + _PIECE]
        fill(data, place, piece)
        total = zlib.crc32(piece, total) if crc is not None else 0
    if crc is not None and total != crc:
        where = (
            f"{data.file}: the {data.length:,} bytes from {data.offset:,}"
            if isinstance(data, FileRange)
            else f"a storage of {data.length:,} bytes"
        )
        raise Corrupt(
            f"{where} do not match their checksum (stored {crc:08x}, found {total:08x})",
            "They were damaged after the file was written.",
        )
    return storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# Trees to torch ------------------------------------------------------------------------------------------------------


class _Builder:
    """Makes the live objects of one tree. What it does not know is collected and named at the end, all at once."""

    def __init__(self, checkpoint: Checkpoint, restorer: _Restorer, map_files: bool) -> None:
        self.checkpoint = checkpoint
        self.storages = _Storages(restorer, map_files)
        self.remake = Remake(self.begin)
        self.unknown: list[tuple[Any, str]] = []

    def build(self) -> Any:
        made = self.remake.run(self.checkpoint.tree)
        self.unknown += [
            (call, f"a call of {call.name} whose result is thrown away") for call in self.checkpoint.discarded
        ]
        if self.unknown:
            raise self._refusal()
        return made

    def _refusal(self) -> UnsafeObject:
        wanted = {id(node) for node, _ in self.unknown}
        places: dict[int, str] = {}
        for path, node in walk(self.checkpoint.tree):
            if id(node) in wanted:
                places.setdefault(id(node), address(path) or "the top")
        names = [
            f"{printable(name)}{' at ' + printable(places[id(node)]) if id(node) in places else ''}"
            for node, name in self.unknown
        ]
        source = str(self.checkpoint.source or "the checkpoint")
        return UnsafeObject(
            f"{source} holds {listed(names)}",
            "Making these would run code that the file names; ckptool does not.",
            f"{self._advice(places.values())}See what is there: ckptool inspect {source}",
        )

    def _advice(self, bad: Iterable[str]) -> str:
        """How to load the first dictionary at the top that holds nothing unknown, if there is one."""
        tops = {place.partition("/")[0] for place in bad}
        tree, source = self.checkpoint.tree, self.checkpoint.source
        for key, value in tree.items() if isinstance(tree, dict) and source else ():
            if isinstance(value, dict) and value and address((key,)) not in tops:
                return f"Load a part that holds none: ckptool.load({f'{source}#{printable(address((key,)))}'!r}). "
        return ""

    def refuse(self, node: Any, name: str) -> Made:
        self.unknown.append((node, name))
        return Done(_Unknown())

    def begin(self, node: Any) -> Made:
        kind = _BEGIN.get(type(node))
        try:
            return kind(self, node) if kind is not None else Done(node)
        except CkptoolError as error:
            raise self._placed(error, node) from None

    def _placed(self, error: CkptoolError, node: Any) -> CkptoolError:
        """The error with the address of the node that it is about."""
        place = next((address(path) for path, found in walk(self.checkpoint.tree) if found is node), "")
        where = ": ".join(part for part in (str(self.checkpoint.source or ""), printable(place)) if part)
        return error.within(where) if where else error

    def _guarded(self, node: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes of a tensor's description; raises `Corrupt` where torch will not have it."""
        try:
            return make()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            raise Corrupt(
                f"torch cannot make {printable(repr(node))}",
                printable(str(error).splitlines()[0])[:300] if str(error) else "",
            ) from error

    # Tensors -----------------------------------------------------------------------------------------------------

    def _entry(self, entry: TensorEntry) -> Made:
        return Done(self._guarded(entry, lambda: self.tensor(entry)))

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        check_view(entry.storage, entry.dtype, entry.shape, entry.stride, entry.offset)
        storage = self.storages.get(entry.storage, entry.dtype.itemsize)
        made = torch.empty(0, dtype=torch_dtype(entry.dtype), device=storage.device)
        made.set_(storage, entry.offset, entry.shape, entry.stride)
        flags = entry.flags
        if flags.conj or flags.neg:
            untyped._utils.set_tensor_metadata(made, {name: True for name in ("conj", "neg") if getattr(flags, name)})
        if flags.parameter:
            return torch.nn.Parameter(made, flags.requires_grad)
        if flags.requires_grad:
            made.requires_grad = True
        return made

    def _composite(self, node: Composite) -> Made:
        return self._rebuild(node, node.made.fn, node.made.args)

    def _rebuild(self, node: Any, fn: Any, args: tuple[Any, ...]) -> Made:
        """A call of one of torch's rebuild functions: its arguments are made first, then it is done as `_REBUILD` says."""
        do = _REBUILD.get(f"{fn}")
        if do is None:
            return self.refuse(node, f"a tensor of {fn}")
        return do(self, node, args)

    def _parts(self, node: Any, args: tuple[Any, ...], make: Callable[..., Any]) -> After:
        def whole(parts: list[Any]) -> Any:
            if any(isinstance(part, _Unknown) for part in parts):
                return _Unknown()
            return self._guarded(node, lambda: make(*parts))

        return After(args, whole)

    def _from_type(self, node: Any, args: tuple[Any, ...]) -> Made:
        """`_rebuild_from_type_v2(func, type, args, state)`: another rebuild call, viewed as a class of torch's, with attributes."""
        cls = _TENSOR_CLASSES.get(str(args[1]))
        if cls is None:
            return self.refuse(node, f"a tensor of the class {args[1]}")
        builder = BUILDERS.get(args[0])
        inner = builder(args[2]) if builder is not None else NotImplemented

        def make(made: Any) -> Any:
            made = made if type(made) is cls else made.as_subclass(cls)
            return self._with_attributes(made, args[3] if len(args) == 4 else None)

        return self._parts(node, (inner,), make)

    def _with_attributes(self, made: Any, state: Any) -> Any:
        """Sets the attributes that were set on a tensor, once they are made themselves."""
        found = [part for part in (state if type(state) is tuple else (state,)) if isinstance(part, dict)]
        attributes = [(key, value) for part in found for key, value in part.items()]
        if any(type(key) is not str or key.startswith("__") for key, _ in attributes):
            raise Corrupt(
                "a tensor with attributes that have no plain names", "Setting them could change what the tensor is."
            )

        def later(of: Of) -> None:
            for key, value in attributes:
                self._guarded(key, lambda key=key, value=value: setattr(made, key, of(value)))  # type: ignore[misc]

        self.remake.later(later)
        return made

    def _parameter(self, node: Any, args: tuple[Any, ...]) -> Made:
        return self._parts(node, (args[0],), lambda data: torch.nn.Parameter(data, args[1]))

    def _parameter_with_state(self, node: Any, args: tuple[Any, ...]) -> Made:
        return self._parts(
            node, (args[0],), lambda data: self._with_attributes(torch.nn.Parameter(data, args[1]), args[3])
        )

    def _quantized(self, node: Any, args: tuple[Any, ...]) -> Made:
        ref, offset, shape, stride, params, requires_grad, _ = args
        scheme, *numbers = params
        check_packed(ref, offset, shape, stride)
        torch_params = (
            _CONSTANTS.get(str(scheme)),
            *(list(part) if isinstance(part, list) else part for part in numbers),
        )
        tensors = [part for part in torch_params if isinstance(part, TensorEntry)]

        def make(*made: torch.Tensor) -> Any:
            given = iter(made)
            ready = tuple(next(given) if isinstance(part, TensorEntry) else part for part in torch_params)
            storage = self._typed(ref)
            return untyped._utils._rebuild_qtensor(
                storage, offset, shape, stride, ready, requires_grad, collections.OrderedDict()
            )

        return self._parts(node, tuple(tensors), make)

    def _sparse(self, node: Any, args: tuple[Any, ...]) -> Made:
        layout = _layout(args[0])
        *tensors, size = args[1][:3] if layout is torch.sparse_coo else args[1]
        coalesced = args[1][3] if layout is torch.sparse_coo and len(args[1]) > 3 else None
        shape = node.shape if isinstance(node, Composite) and node.shape is not None else size

        def make(*made: torch.Tensor) -> Any:
            # torch.load does not check, and indices that point outside are followed all the same. On meta there is nothing to check.
            check = not self.storages.restorer.meta
            if layout is torch.sparse_coo:
                return untyped.sparse_coo_tensor(*made, shape, check_invariants=check, is_coalesced=coalesced)
            return untyped.sparse_compressed_tensor(*made, shape, layout=layout, check_invariants=check)

        return self._parts(node, tuple(tensors), make)

    def _sparse_csr(self, node: Any, args: tuple[Any, ...]) -> Made:
        return self._sparse(node, (Object(_GET_LAYOUT, ("torch.sparse_csr",)), args[0]))

    def _nested(self, node: Any, args: tuple[Any, ...]) -> Made:
        def make(buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor) -> Any:
            if not self.storages.restorer.meta:
                _check_nested(buffer, sizes, strides, offsets)
            return untyped._nested_view_from_buffer(buffer, sizes, strides, offsets)

        return self._parts(node, args, make)

    def _meta(self, node: Any, args: tuple[Any, ...]) -> Made:
        dtype, size, stride, requires_grad = args
        return self._parts(
            node,
            (dtype,),
            lambda made: torch.empty_strided(
                tuple(size), tuple(stride), dtype=made, device="meta", requires_grad=requires_grad
            ),
        )

    def _device_tensor(self, node: Any, args: tuple[Any, ...]) -> Made:
        """A tensor that was on a device without storages, saved as numbers and the name of the device."""
        data, dtype, location, requires_grad = args

        def make(made: Any, kind: torch.dtype) -> Any:
            here = made if isinstance(made, torch.Tensor) else torch.from_numpy(made)
            here = here.to(kind).contiguous()
            there = self.storages.restorer.restore(here.untyped_storage(), str(location))
            moved = torch.empty(0, dtype=kind, device=there.device).set_(
                there, here.storage_offset(), here.shape, here.stride()
            )
            moved.requires_grad = requires_grad
            return moved

        return self._parts(node, (data, dtype), make)

    def _wrapper(self, node: Any, args: tuple[Any, ...]) -> Made:
        return self.refuse(node, f"a tensor of the class {args[0]}")

    # Storages ----------------------------------------------------------------------------------------------------

    def _typed(self, ref: StorageRef) -> Any:
        dtype = torch.uint8 if ref.dtype is None else torch_dtype(ref.dtype)
        storage = self.storages.get(ref.storage, ref.dtype.itemsize if ref.dtype else 8)
        return untyped.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def _storage_ref(self, ref: StorageRef) -> Made:
        return Done(self._typed(ref))

    # Containers --------------------------------------------------------------------------------------------------

    def _dict(self, node: dict[Any, Any]) -> Made:
        made: dict[Any, Any] = {}
        return Empty(made, lambda of: self._set_items(node, made, node, of))

    def _ordered(self, node: OrderedDict) -> Made:
        made: collections.OrderedDict[Any, Any] = collections.OrderedDict()

        def fill_in(of: Of) -> None:
            self._set_items(node, made, node, of)
            vars(made).update(of_items(node.attributes or {}, of))

        return Empty(made, fill_in)

    def _set_items(self, node: Any, made: Any, items: Mapping[Any, Any], of: Of) -> None:
        count = len(made) + len(items)
        for key, value in items.items():
            try:
                made[of(key)] = of(value)
            except TypeError:
                raise Corrupt(
                    f"a dictionary with a key of type {type(of(key)).__name__}, which cannot be one"
                ) from None
        if len(made) != count:
            raise Conflict(
                f"a dictionary with keys that are the same once they are made ({printable(plain.summary(node))})"
            )

    def _list(self, node: list[Any]) -> Made:
        made: list[Any] = []
        return Empty(made, lambda of: made.extend(map(of, node)))

    def _set(self, node: Set) -> Made:
        return After(node.items, lambda parts: self._hashed(frozenset if node.frozen else set, parts))

    def _hashed(self, cls: type, parts: list[Any]) -> Any:
        try:
            return cls(parts)
        except TypeError:
            raise Corrupt(f"a {cls.__name__} of things that cannot be in one") from None

    def _name(self, name: Global) -> Made:
        dtype = dtype_of(name)
        if dtype is not None:
            return Done(torch_dtype(dtype))
        found = _CONSTANTS.get(str(name), _FACTORIES.get(plain.canonical(name)))
        if found is not None:
            return Done(found)
        known, of_type = storage_class(name)
        if known:
            return Done(torch.UntypedStorage if of_type is None else getattr(torch, str(of_type.storage)))
        return self.refuse(name, f"the function or class {name}")

    def _object(self, node: Object) -> Made:
        if node.how == "persistent" or node.kwargs:
            return self.refuse(node, f"an object of {node.name}")
        called = plain.canonical(node.fn)
        make = _OBJECTS.get(called)
        if make is not None:
            return make(self, node)
        if called in _REBUILD and node.state is MISSING:
            return self.refuse(node, f"a call of {node.name} with arguments that torch does not write")
        value = plain.python_value(node)
        if value is not NotImplemented:
            return Done(value)
        return self._expanded(node)

    def _expanded(self, node: Object) -> Made:
        """Configuration becomes the dictionaries and lists that it is made of."""
        value = plain.expand(node)
        if value is node or isinstance(value, plain.Array):
            return self.refuse(node, f"an object of {node.name}")
        if type(value) is tuple:
            return After(value, tuple)
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, list):
            return self._list(value)
        return After((value,), lambda parts: parts[0])

    # Objects that have a class of their own ------------------------------------------------------------------------

    def _namespace(self, node: Object) -> Made:
        made = argparse.Namespace() if plain.canonical(node.fn) == "argparse.Namespace" else types.SimpleNamespace()
        return Empty(made, lambda of: vars(made).update(of_items(node.attributes, of)))

    def _default(self, node: Object) -> Made:
        factory = node.args[0] if node.args else None
        if len(node.args) > 1 or (factory is not None and plain.canonical(factory) not in _FACTORIES):
            return self.refuse(node, f"a defaultdict of {factory}")
        made: Any = collections.defaultdict(None if factory is None else _FACTORIES[plain.canonical(factory)])
        return Empty(made, lambda of: self._set_items(node, made, node.items or {}, of))

    def _counter(self, node: Object) -> Made:
        items = plain.expand(node)
        if items is node:
            return self.refuse(node, "a Counter of something else than a dictionary")
        made: Any = collections.Counter()
        return Empty(made, lambda of: self._set_items(node, made, items, of))

    def _deque(self, node: Object) -> Made:
        items, size = plain.expand(node), node.args[1] if len(node.args) > 1 else None
        if items is node or not (size is None or (type(size) is int and size >= 0)):
            return self.refuse(node, "a deque of something else than a list")
        made: Any = collections.deque(maxlen=size)
        return Empty(made, lambda of: made.extend(map(of, items)))

    def _size(self, node: Object) -> Made:
        sizes = plain.expand(node)
        if sizes is node or not all(type(size) is int for size in sizes):
            return self.refuse(node, "a torch.Size that is not of numbers")
        return Done(torch.Size(sizes))

    def _device(self, node: Object) -> Made:
        if (
            not 1 <= len(node.args) <= 2
            or type(node.args[0]) is not str
            or (len(node.args) == 2 and type(node.args[1]) is not int)
        ):
            return self.refuse(node, "a torch.device that is not a name and a number")
        return Done(self._guarded(node, lambda: torch.device(*node.args)))

    def _get_layout(self, node: Object) -> Made:
        return Done(_layout(node))

    def _uninitialized(self, node: Object) -> Made:
        cls = _OBJECT_CLASSES[str(node.fn)]
        if node.state is not MISSING or not all(type(arg) is bool for arg in node.args):
            return self.refuse(node, f"a {node.name} with arguments that torch does not write")
        return Done(self._guarded(node, lambda: cls(*node.args)))

    def _array(self, node: Object) -> Made:
        try:
            found = plain.array(node)
        except Unsupported as error:
            return self.refuse(node, error.what)
        if found is NotImplemented:
            return self.refuse(node, f"a numpy array made by {node.name}")
        return Done(_numpy_array(found))

    def _scalar(self, node: Object) -> Made:
        found = plain.scalar(node)
        if found is NotImplemented:
            return self.refuse(node, "a numpy scalar that numpy does not write")
        return Done(_numpy_array(found)[()])

    def _dtype(self, node: Object) -> Made:
        return Done(_numpy_type(plain.array_type(node)))


class _Unknown:
    """Stands in for what is not made, until the refusal names it."""


def of_items(items: Mapping[Any, Any], of: Of) -> dict[str, Any]:
    """Attributes with their values made; raises `Corrupt` for names that are no text."""
    if not all(type(key) is str for key in items):
        raise Corrupt("attributes whose names are no text")
    return {key: of(value) for key, value in items.items()}


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's own element type; raises `Unsupported` where this torch is too old for it."""
    found = getattr(torch, dtype.torch, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(
            f"this torch ({torch.__version__}) has no type {dtype.torch}",
            "It came with a later version.",
            "pip install --upgrade torch",
        )
    return found


def check_packed(ref: StorageRef, offset: Any, shape: Any, stride: Any) -> None:
    """Raises `BadTensor` for a view of packed quantized elements that reaches outside of its storage."""
    if ref.dtype is None or ref.dtype.name not in ("qu4x2", "qu2x4"):
        return
    per_byte = 2 if ref.dtype.name == "qu4x2" else 4
    numbers = (offset, *shape, *stride)
    if (
        not all(type(number) is int and number >= 0 for number in numbers)
        or math.prod(shape) > ref.storage.nbytes * per_byte
    ):
        raise BadTensor(f"a quantized tensor of shape {list(shape)} in a storage of {ref.storage.nbytes:,} bytes")


def _check_nested(buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raises `BadTensor` unless every part of a nested tensor lies inside its buffer; torch itself does not look."""
    if sizes.shape != strides.shape or sizes.dim() != 2 or offsets.shape != sizes.shape[:1]:
        raise BadTensor("a nested tensor whose sizes, strides and offsets do not belong together")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        numbers = (*size, *stride, offset)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise BadTensor("a nested tensor whose sizes, strides or offsets are no numbers")
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if 0 not in size and last >= buffer.numel():
            raise BadTensor(
                f"a part of shape {size} of a nested tensor lies outside of its {buffer.numel():,} elements"
            )


def _layout(node: Any) -> torch.layout:
    name = plain.expand(node) if isinstance(node, Object) else None
    found = getattr(torch, name.removeprefix("torch."), None) if type(name) is str and name in _LAYOUTS else None
    if not isinstance(found, torch.layout):
        raise Unsupported(f"the tensor layout {printable(str(name))} is not known")
    return found


def _numpy_type(kind: plain.ArrayType) -> Any:
    import numpy

    if kind.fields:
        names, kinds, offsets = zip(*kind.fields, strict=True)
        fields: Any = {
            "names": names,
            "formats": [_numpy_type(part) for part in kinds],
            "offsets": offsets,
            "itemsize": kind.itemsize,
        }
        return numpy.dtype(fields)
    order = "" if kind.order == "|" else kind.order
    unit = f"[{kind.unit[1]}{kind.unit[0]}]" if kind.unit and kind.unit[0] != "generic" else ""
    return numpy.dtype(f"{order}{kind.code}{unit}")


def _numpy_array(found: plain.Array) -> Any:
    """A new array; the bytes were counted, and there are no Python objects in it."""
    import numpy

    kind = _numpy_type(found.type)
    if not found.data:
        return numpy.zeros(found.shape, kind, order="F" if found.fortran else "C")
    array = numpy.frombuffer(bytearray(bytes(found.data)), kind).reshape(
        found.shape, order="F" if found.fortran else "C"
    )
    # numpy itself turns numbers of the other byte order when it loads them; fields of records stay as they are.
    return array if found.type.fields else array.astype(kind.newbyteorder("="), copy=False)


# Tables: whatever a file may name, and what it is here -----------------------------------------------------------------

_GET_LAYOUT = Global("torch.serialization", "_get_layout")
_LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
)

_TENSOR_CLASSES: dict[str, Any] = {
    "torch.Tensor": torch.Tensor,
    "torch._tensor.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
}

# Classes whose pickle is a call of the class itself.
_OBJECT_CLASSES: dict[str, Any] = {
    "torch.nn.parameter.UninitializedParameter": torch.nn.parameter.UninitializedParameter,
    "torch.nn.parameter.UninitializedBuffer": torch.nn.parameter.UninitializedBuffer,
}

_CONSTANTS: dict[str, Any] = {
    **{
        f"torch.{name}": getattr(torch, name)
        for name in (
            "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric", "per_channel_affine_float_qparams",
            "contiguous_format", "channels_last", "channels_last_3d", "preserve_format",
        )
    },
    "__builtin__.Ellipsis": ...,
    "builtins.Ellipsis": ...,
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
}  # fmt: skip

_FACTORIES: dict[str, Any] = {
    **{
        f"builtins.{cls.__name__}": cls
        for cls in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, bytearray, complex)
    },
    "builtins.unicode": str,
    "builtins.long": int,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "collections.deque": collections.deque,
}

_OBJECTS: dict[str, Callable[[_Builder, Object], Made]] = {
    "argparse.Namespace": _Builder._namespace,
    "types.SimpleNamespace": _Builder._namespace,
    "collections.defaultdict": _Builder._default,
    "collections.Counter": _Builder._counter,
    "collections.deque": _Builder._deque,
    "torch.Size": _Builder._size,
    "torch.device": _Builder._device,
    "torch.serialization._get_layout": _Builder._get_layout,
    "torch.nn.parameter.UninitializedParameter": _Builder._uninitialized,
    "torch.nn.parameter.UninitializedBuffer": _Builder._uninitialized,
    "numpy.core.multiarray._reconstruct": _Builder._array,
    "numpy.core.numeric._frombuffer": _Builder._array,
    "numpy.core.multiarray.scalar": _Builder._scalar,
    "numpy.dtype": _Builder._dtype,
}

_BEGIN: dict[type, Callable[[_Builder, Any], Made]] = {
    TensorEntry: _Builder._entry,
    dict: _Builder._dict,
    OrderedDict: _Builder._ordered,
    list: _Builder._list,
    tuple: lambda _, node: After(node, tuple),
    bytearray: lambda _, node: Done(bytearray(node)),
    ByteString: lambda _, node: Done(bytes(node)),
    Set: _Builder._set,
    Global: _Builder._name,
    Object: _Builder._object,
    Composite: _Builder._composite,
    StorageRef: _Builder._storage_ref,
}

_Rebuild = Callable[[_Builder, Any, tuple[Any, ...]], Made]

_REBUILD: dict[str, _Rebuild] = {
    "torch._tensor._rebuild_from_type_v2": _Builder._from_type,
    "torch._tensor._rebuild_from_type": _Builder._from_type,
    "torch.tensor._rebuild_from_type_v2": _Builder._from_type,
    "torch.tensor._rebuild_from_type": _Builder._from_type,
    "torch._utils._rebuild_parameter": _Builder._parameter,
    "torch._utils._rebuild_parameter_with_state": _Builder._parameter_with_state,
    "torch._utils._rebuild_qtensor": _Builder._quantized,
    "torch._utils._rebuild_sparse_tensor": _Builder._sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _Builder._sparse_csr,
    "torch._utils._rebuild_nested_tensor": _Builder._nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _Builder._meta,
    "torch._utils._rebuild_wrapper_subclass": _Builder._wrapper,
    "torch._utils._rebuild_device_tensor_from_numpy": _Builder._device_tensor,
    "torch._utils._rebuild_xla_tensor": _Builder._device_tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Builder._device_tensor,
}


# Torch to trees ------------------------------------------------------------------------------------------------------


def from_torch(tree: Any, *, arrays_as_tensors: bool = False, keep_unknown: bool = False) -> Any:
    """The tree of nodes that says what `tree` holds: tensors, whatever `torch.save` would write, entries. No tensor is copied.

    Tensors that share a storage share it in the result. CUDA tensors keep their tag, and are copied to the CPU piece by
    piece when they are written.
    Raises `Unsupported`, naming every object that no checkpoint should hold, `Conflict` for one storage under two types.
    """
    return _TorchReader(arrays_as_tensors, keep_unknown).read(tree)


class _TorchReader(Reader):
    def __init__(self, arrays_as_tensors: bool, keep_unknown: bool) -> None:
        super().__init__(arrays_as_tensors, keep_unknown)
        self.storages: dict[int, Storage] = {}
        self.dtypes: dict[int, DType | None] = {}

    def special(self, value: Any) -> Made:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.storage.TypedStorage):
            return Done(self._ref(value._untyped_storage, BY_TORCH[str(value.dtype).removeprefix("torch.")]))
        if isinstance(value, torch.UntypedStorage):
            return Done(self._ref(value, None))
        if isinstance(value, torch.Size):
            return After((tuple(value),), lambda parts: Object(SIZE, tuple(parts)))
        if isinstance(value, torch.layout):
            return Done(Object(_GET_LAYOUT, (str(value),)))
        if isinstance(value, torch.device):
            return Done(Object(Global("torch", "device"), value.__reduce__()[1]))
        if isinstance(value, torch.qscheme):
            return Done(Global("torch", str(value).removeprefix("torch.")))
        return super().special(value)

    def _tensor(self, tensor: torch.Tensor) -> Made:
        """What torch itself says of a tensor, as an entry or composite."""
        answer: tuple[Any, ...] = cast(Any, tensor).__reduce_ex__(2)
        function, args = answer[:2]
        builder = self._builder(function)
        if builder is None or len(answer) > 2 or not isinstance(args, tuple):
            return self.called(tensor, *answer)
        if (
            args
            and isinstance(args[0], types.FunctionType)
            and self._builder(args[0]) is None
            and not self.keep_unknown
        ):
            return Done(self._refused_tensor(tensor))  # its parts need not be looked at

        def make(parts: list[Any]) -> Any:
            made = builder(parts[0])
            return self._refused_tensor(tensor) if made is NotImplemented or not self._loadable(made) else made

        return After((args,), make)

    def _builder(self, function: Any) -> Any:
        name = self.name_of(function)
        return BUILDERS.get(name) if name is not None else None

    def _loadable(self, made: Any) -> bool:
        """False for a tensor of a class that only its own code could make again."""
        if self.keep_unknown or not isinstance(made, Composite):
            return True
        called, args = str(made.made.fn), made.made.args
        return called != _WRAPPER and (
            _REBUILD.get(called) is not _Builder._from_type or str(args[1]) in _TENSOR_CLASSES
        )

    def _refused_tensor(self, tensor: torch.Tensor) -> Any:
        cls = type(tensor)
        made = self.refuse(tensor, f"a tensor of the class {cls.__module__}.{cls.__qualname__}", _AS_PLAIN)
        assert isinstance(made, Done)
        return made.value

    def _ref(self, storage: torch.UntypedStorage, dtype: DType | None) -> StorageRef:
        """The storage, once for each of torch's. Files give a storage one element type for all its views, as torch does."""
        key = storage._cdata
        found = self.storages.get(key)
        if found is None:
            found = self.storages[key] = Storage(_memory(storage), untyped.serialization.location_tag(storage))
            self.remake.alive.append(storage)
            self.dtypes[key] = dtype
        elif (self.dtypes[key] or _BYTES) is not (dtype or _BYTES):
            names = [kind.torch if kind else "an untyped storage" for kind in (self.dtypes[key], dtype)]
            raise Conflict(
                f"two tensors see one storage as {names[0]} and as {names[1]}",
                "A torch file gives each storage one type; torch.save refuses this too.",
                "Save a copy of one of them: tensor.clone()",
            )
        return StorageRef(found, dtype)


_BYTES = BY_TORCH["uint8"]  # what torch takes an untyped storage for
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_AS_PLAIN = "Save it as a plain tensor: tensor.as_subclass(torch.Tensor), or its parts."


def _memory(storage: torch.UntypedStorage) -> Computed:
    """The bytes of a storage, read from where they are; from another device, piece by piece."""
    size = storage.nbytes()
    if not size:
        return Computed(0, lambda offset, length: b"")
    if storage.device.type == "meta":
        raise Unsupported("a storage on the meta device has no bytes")

    def read(offset: int, length: int) -> bytes:
        part = _bytes_of(storage)[offset : offset + length]
        return part.cpu().numpy().tobytes()

    if storage.device.type != "cpu":
        return Computed(size, read)
    raw = memoryview(_bytes_of(storage).numpy())  # type: ignore[arg-type]  # an array is a buffer, which its stubs do not say
    return Computed(size, read, view=lambda offset, length: raw[offset : offset + length])
