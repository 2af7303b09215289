"""The nouns: a checkpoint is a tree of plain values whose tensors are entries that point into storages.

Nothing here reads a byte until it is asked to, and nothing changes once it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import field
from enum import Enum
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, SupportsIndex

from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Input, Source, unchanged
from ckptool.checkpoint.graph import read_only, visit
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.progress import passes
from ckptool.checkpoint.protocols import ArrayLike
from ckptool.errors import Ambiguous, BadTensor, CkptoolError, UsageError, printable
from ckptool.facts import LIVE, dataclass, replace
from ckptool.facts import Note as Note

if TYPE_CHECKING:
    import numpy

MAX_RANK = 64  # dimensions that torch allows a tensor

# FileRange, Storage, TensorEntry and StorageRef are not frozen, though nobody assigns to them: a checkpoint has one of
# each for every tensor, and making a frozen object takes four times as long.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class InlineBytes:
    """Bytes in memory."""

    content: bytes

    @property
    def length(self) -> int:
        return len(self.content)

    def read(self, offset: int, length: int) -> bytes:
        return self.content[offset : offset + length]


@dataclass(slots=True, eq=False, repr=False)
class FileRange:
    """`length` bytes of a file, from `offset`.

    confirm: checks that the bytes are really there, where a container's directory only predicts it; code that uses the
    bytes without `read` (a kernel-side copy, a comparison) calls `ready` first.
    """

    file: Source
    offset: int
    length: int
    confirm: Callable[[], None] | None = None

    def ready(self) -> None:
        """Raises `Corrupt` or `Ambiguous` if the bytes are not those of the directory, `FileChanged` if that is why."""
        if self.confirm is not None:
            try:
                self.confirm()
            except CkptoolError:
                self.file.file.check_unchanged()  # else the directory is that of other bytes
                raise

    def read(self, offset: int, length: int) -> bytes:
        self.ready()
        if passes:
            passes[-1].counted += length
        return self.file.read(self.offset + offset, min(length, self.length - offset))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Computed:
    """`length` bytes that `read(offset, n)` makes on demand: a cast, an inflated record, a gathered view.

    `read` returns exactly the bytes asked for (fewer only at the end), in bounded memory, for any place and order;
    it is quickest when called front to back. `checks`: reading finds damage that no checksum of these bytes shows, and
    raises for it: replicas that differ, a stream that cannot be inflated. `inputs`: the storages that it reads, whose
    checksums a writer checks on the way. `view`: the same without a copy, or fewer bytes, in memory that nobody
    changes afterwards. `concatenated`: the bytes are those of the inputs, end to end, so a writer may copy them as
    they are.
    """

    length: int
    read: Callable[[int, int], bytes]
    inputs: Iterable[Storage] = ()
    view: Callable[[int, int], memoryview] | None = None
    concatenated: bool = False
    checks: bool = False

    def __deepcopy__(self, _: object) -> Computed:
        return self  # nothing of it changes

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Raises `UsageError` for what only this process can make."""
        if "<locals>" in getattr(self.read, "__qualname__", ""):
            fix = "Write them by ckptool.save(tree, PATH), or read them first: ckptool.load(checkpoint), entry.torch()"
            raise UsageError("values in memory, or computed as they are read, cannot be pickled as entries", "", fix)
        return object.__reduce_ex__(self, protocol)


Data = InlineBytes | FileRange | Computed


@dataclass(slots=True, eq=False)
class Storage:
    """A block of bytes that tensors are views of. Compared by identity: sharing a storage is being tied.

    location: torch's tag, `cpu` or `cuda:0`.  crc: CRC-32 of the bytes as the container recorded it, else None.
    replicas: copies that other ranks saved; only a check of their files reads them.
    intact: the bytes were compared with the checksum and match; noted by `blocks.verify`.
    """

    data: Data
    location: str = "cpu"
    crc: int | None = None
    replicas: tuple[Storage, ...] = field(default=(), repr=False)
    intact: bool = field(default=False, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        return self.data.length

    def alone(self) -> Storage:
        """Another storage of the same bytes, which are stored for it alone."""
        return replace(self)

    def below(self) -> Iterator[Storage]:
        """This storage, then those that its data is computed from."""
        pending = [self]
        while pending:
            storage = pending.pop()
            yield storage
            if isinstance(storage.data, Computed):
                pending += storage.data.inputs


class Flags(NamedTuple):
    """Facts about a tensor beside its values. `parameter`: an `nn.Parameter`. `conj`, `neg`: unresolved views."""

    requires_grad: bool = False
    parameter: bool = False
    conj: bool = False
    neg: bool = False

    @property
    def lazy(self) -> tuple[bool, bool]:
        """The operations still to be applied to the stored values."""
        return self.conj, self.neg


NO_FLAGS = Flags()


@dataclass(slots=True, eq=False, repr=False)
class TensorEntry(ArrayLike):
    """A strided tensor: a view of a storage. Sizes, strides and offset count elements, as torch's do."""

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    flags: Flags = NO_FLAGS

    @property
    def layout(self) -> tuple[DType, tuple[int, ...], tuple[int, ...], int]:
        """The elements of a storage that it has, and in which order: type, shape, stride, offset."""
        return self.dtype, self.shape, self.stride, self.offset

    @property
    def view(self) -> tuple[Any, ...]:
        """Equal for tensors that are the same values of one storage, and so are tied."""
        return id(self.storage), self.layout, self.flags.lazy

    def same_view(self, other: TensorEntry) -> bool:
        """True for the same elements in the same order with the same lazy flags, of this storage or of another."""
        return self.layout == other.layout and self.flags.lazy == other.flags.lazy

    def with_storage(self, storage: Storage) -> TensorEntry:
        """The same view of another storage."""
        return TensorEntry(storage, self.dtype, self.shape, self.stride, self.offset, self.flags)

    def alone(self) -> TensorEntry:
        """The same view of a storage of its own, with the same bytes."""
        return self.with_storage(self.storage.alone())

    def with_flags(self, flags: Flags) -> TensorEntry:
        """The same values with other flags."""
        return TensorEntry(self.storage, self.dtype, self.shape, self.stride, self.offset, flags)

    def with_values(self, data: Data) -> TensorEntry:
        """The same tensor with other values, in row-major order, on a storage of its own."""
        storage = Storage(data, self.storage.location)
        return TensorEntry(storage, self.dtype, self.shape, row_major_strides(self.shape), 0, self.flags)

    def reshape(self, shape: tuple[int, ...]) -> TensorEntry:
        """The same elements, in row-major order, in another shape; a view where the strides allow it, as in torch."""
        from ckptool.checkpoint.strided import reshaped

        if prod(shape) != self.numel or min(shape, default=0) < 0:
            why = f"The product of the sizes has to be {self.numel:,}."
            raise UsageError(f"{self!r} cannot be reshaped to {list(shape)}", why)
        return reshaped(self, shape)

    def narrow(self, dim: int, start: int, length: int) -> TensorEntry:
        """The view of `length` elements along a dimension, from `start`, as torch's `narrow`."""
        if not 0 <= start <= start + length <= self.shape[dim]:
            what = f"{self!r} has no elements {start} to {start + length} along dimension {dim}"
            raise UsageError(what, f"It has {self.shape[dim]:,} there.")
        shape = tuple(length if axis == dim % len(self.shape) else size for axis, size in enumerate(self.shape))
        offset = self.offset + start * self.stride[dim]
        return TensorEntry(self.storage, self.dtype, shape, self.stride, offset, self.flags)

    def permute(self, order: Sequence[int]) -> TensorEntry:
        """The view with its dimensions in this order, as torch's `permute`."""
        if sorted(range(len(self.shape))[axis] for axis in order) != [*range(len(self.shape))]:
            raise UsageError(f"{list(order)} is no order of the dimensions of {self!r}", "It has to name each once.")
        shape, stride = (tuple(values[axis] for axis in order) for values in (self.shape, self.stride))
        return TensorEntry(self.storage, self.dtype, shape, stride, self.offset, self.flags)

    def transpose(self) -> TensorEntry:
        """The view with its dimensions in reverse order: a matrix with its rows as columns."""
        return self.permute(range(len(self.shape))[::-1])

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor's values in row-major order; what lies behind an expanded view counts each time."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def location(self) -> str:
        return self.storage.location

    @property
    def is_contiguous(self) -> bool:
        """True if the values lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size == 0:
                return True
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def span(self) -> tuple[int, int]:
        """The first byte of the storage that the tensor touches, and the one after the last."""
        if self.numel == 0:
            return 0, 0
        last = self.offset
        for size, stride in zip(self.shape, self.stride, strict=True):
            last += (size - 1) * stride
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    def bytes(self) -> bytes:
        """The stored values in row-major order (conjugate and negative bits not applied).

        Raises `Corrupt` where they do not match the checksum that the container has for them, as `numpy` does.
        """
        from ckptool.checkpoint.blocks import files_of, verify

        with unchanged(*files_of(self)):
            verify(self)
            data = self.row_major()
            return data.read(0, data.length)

    def row_major(self) -> Data:
        """The stored values in row-major order, not read yet."""
        from ckptool.checkpoint.strided import row_major

        return row_major(self)

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """A new array of the values (conjugate and negative bits applied); bf16 and float8 as ml_dtypes types.

        Raises `Unsupported` for a type that numpy cannot hold (complex32, packed 4-bit), and `Corrupt` where the
        storage does not match its checksum, if the container has one. That of a storage over 64 MB is not looked at for
        a tensor that is less than a quarter of it.
        """
        from ckptool.checkpoint.strided import to_numpy

        return to_numpy(self)

    def __getitem__(self, key: Any) -> Any:
        """`entry.numpy()[key]`, of which only the bytes of that part are read for numbers, slices, `...` and None.

        The checksum, which is of all bytes, is not looked at then. For any other key all values are read.
        """
        from ckptool.checkpoint.strided import indexed

        return indexed(self, key)

    def __repr__(self) -> str:
        kind = "parameter" if self.flags.parameter else "tensor"
        place = "" if self.location == "cpu" else f" on {printable(self.location)}"
        return f"<{kind} {self.dtype.name}{list(self.shape)}{place}>"


@lru_cache(1 << 10)  # equal ones are one object, which thousands of tensors share
def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The row-major strides of a tensor of this shape, in elements; as torch counts them for empty ones."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(slots=True, eq=False, repr=False)
class StorageRef:
    """A storage that is itself in the tree, without a tensor. `dtype` is None for an untyped one."""

    storage: Storage
    dtype: DType | None

    def with_storage(self, storage: Storage) -> StorageRef:
        return StorageRef(storage, self.dtype)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Composite(ArrayLike):
    """A tensor made of others: quantized, sparse, nested, a subclass, with attributes, or without data.

    made: the rebuild call, written back unchanged.  kind: what it is, for display.
    `shape` and `dtype` are those of the tensor as a whole; None where only torch could say.
    build: makes the composite from new arguments of that call; `NotImplemented` where they form none.
    found: its parts, once its file is decoded; until then its arguments may still be filled.
    """

    made: Object
    kind: str
    dtype: DType | None
    shape: tuple[int, ...] | None
    build: Callable[[tuple[Any, ...]], Any]
    found: tuple[TensorEntry | StorageRef, ...] | None = field(default=None, init=False)

    def parts(self) -> Iterable[TensorEntry | StorageRef]:
        """The entries and storages that it is made of."""
        if self.found is not None:
            return self.found
        return (part for part in visit(self.made) if isinstance(part, (TensorEntry, StorageRef)))

    def settle(self) -> int:
        """Collects its parts, now that nothing in it changes; returns how many nodes it went through, plus an eighth of
        the values in them, which are only skipped."""
        nodes = list(visit(self.made))
        parts = tuple(part for part in nodes if isinstance(part, (TensorEntry, StorageRef)))
        object.__setattr__(self, "found", parts)
        return len(nodes) + sum(len(part) // 8 for part in nodes if isinstance(part, (dict, list, tuple)))

    def with_arguments(self, args: tuple[Any, ...]) -> Composite:
        """The composite of the same call with other arguments (storages, …). Raises `BadTensor` if there is none."""
        value = self.build(args)
        if not isinstance(value, Composite):
            raise BadTensor(f"{self.made.name}: its arguments no longer form a tensor")
        value.made.live = self.made.live
        return value

    @property
    def view(self) -> tuple[Any, ...]:
        """Equal for tensors that are made of the same views, with the same numbers."""
        parts = [part.view if isinstance(part, TensorEntry) else id(part.storage) for part in self.parts()]
        numbers = [arg for arg in self.made.args if {*map(type, arg if type(arg) is tuple else (arg,))} <= {int}]
        return self.kind, self.dtype, self.shape, *parts, *numbers

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes if isinstance(part, TensorEntry) else part.storage.nbytes for part in self.parts())

    @property
    def numel(self) -> int:
        """The elements of its shape; 0 where only torch could say."""
        return prod(self.shape) if self.shape is not None else 0

    @property
    def location(self) -> str:
        return next((part.storage.location for part in self.parts()), "cpu")

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """A new array of the values, as torch gives it, which has none of sparse and quantized tensors."""
        array: numpy.ndarray[Any, Any] = self.torch().numpy(force=True)
        return array

    def __repr__(self) -> str:
        shape = "" if self.shape is None else list(self.shape)
        return f"<{printable(self.kind)} tensor {self.dtype or ''}{shape}>"


Tensor = TensorEntry | Composite


class PartKind(str, Enum):
    """The kinds of parts of a checkpoint; the values are those in `--json`."""

    RANK = "rank"  # the share of one process
    SHARD = "shard"  # some of the tensors of a set of files
    PLACEHOLDERS = "placeholders"  # tensors whose values are in other files
    MEMBERS = "members"  # a folder of several files: as many of them as are there and whole


@dataclass(frozen=True, slots=True)
class PartOf:
    """The part of something larger that a checkpoint is, and what that means for anyone who takes it for the whole.

    label: `rank 1 of 2`.  meaning: a sentence.  number, count: those of the label, where they are known.
    whole: the path of the folder or index that it is a part of; empty if that is not known.
    index: the name of the index that names this file, if one does: then changing this file alone breaks the set.
    join: the command that puts a folder of members together, as argv, where it has to be spelled out.
    """

    kind: PartKind
    label: str
    meaning: str
    number: int | None = None
    count: int | None = None
    whole: str = ""
    index: Annotated[str, LIVE] = ""
    join: Annotated[tuple[str, ...], LIVE] = ()

    def sentence(self) -> str:
        """The meaning as a sentence."""
        return f"{self.meaning[:1].upper()}{self.meaning[1:]}."

    @property
    def is_complete(self) -> bool:
        """True for a folder all of whose members are there and whole: a checkpoint that is not joined here."""
        return self.kind is PartKind.MEMBERS and self.number == self.count


def _trees() -> Any:
    """The module that knows addresses; it imports this one."""
    return import_module("ckptool.checkpoint.tree")


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)  # at run time, too
class Checkpoint:
    """An opened checkpoint: a mapping of its top level (`ckpt["epoch"]`) and of addresses
    (`ckpt["state_dict/fc.weight"]`). Immutable, and so is what it returns.

    tree: the values.  container: the format's name (`torch-zip`, `safetensors`).
    metadata: the container's own, beside the tree.  source: the file it was read from, if any.
    origin: what its format needs to write that file back; private to it.
    memory: the objects it was made from, if it was not read from a file (see `formats.in_memory`).
    discarded: calls and imports outside the tree that are not inert: loading would run them, so they are shown.
    tensors_only: the container has names, types, shapes and values, and no way to say more (device, order, ties, …).
    extras: what the file holds besides (a program's code and constants), by name, made when asked for: shown, not
    listed, not written.
    part: which part of a checkpoint it is; None for a whole one (see `formats.folder`, which decides).
    base: the path of a part within its file.  untied: files of a folder that no step ties to the others.
    """

    tree: Any
    container: str
    metadata: dict[str, Any] = field(default_factory=dict)
    source: Input | None = None
    origin: Any = None
    memory: Any = field(default=None, repr=False, kw_only=True)
    notes: tuple[Note, ...] = ()
    discarded: tuple[Any, ...] = ()
    tensors_only: bool = False
    extras: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    part: PartOf | None = None
    base: tuple[Any, ...] = ()
    untied: tuple[str, ...] = field(default=(), repr=False)
    # What was computed once and is needed again.
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __getitem__(self, key: Any) -> Any:
        """The entry of that name, else at that address; containers are read-only.

        Raises `MissingKey`, a `KeyError`, where there is neither.
        """
        top = self._top()
        is_key = type(key) is not str or (isinstance(top, dict) and key in top)
        return top[key] if is_key else _trees().find(top, key)[1]

    def _top(self) -> Any:
        """The tree, read-only; for a pickled module its state dict, for another object its parts by name."""
        if "read-only" not in self.kept:
            tree = self.tree
            if isinstance(tree, Object):
                tree = _trees().module_state_dict(tree)
                tree = dict(_trees().children(self.tree)) if tree is None else tree
            self.kept["read-only"] = read_only(tree)
        return self.kept["read-only"]

    def _names(self) -> dict[Any, Any]:
        top = self._top()
        if not isinstance(top, dict):
            what = f"{self!r} has no names at its top: it is of type {type(top).__name__}"
            raise UsageError(what, "", "Its parts: list(ckpt); all tensors with their addresses: ckpt.tensors()")
        return top

    def keys(self) -> KeysView[Any]:
        """The names at the top. Raises `UsageError` for a list or a tensor, as `values` and `items` do."""
        return self._names().keys()

    def values(self) -> ValuesView[Any]:
        return self._names().values()

    def items(self) -> ItemsView[Any, Any]:
        return self._names().items()

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry of that name or at that address, else the default."""
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: Any) -> bool:
        return key in self._top() or (type(key) is str and self.get(key, self) is not self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._top())

    def __len__(self) -> int:
        return len(self._top())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its address, in order. Raises `Ambiguous` where that is not one tensor's: keys 0 and '0'."""
        tensors: dict[str, Tensor] = {}
        for path, tensor in _trees().tensors(self._top()):
            if tensors.setdefault(name := _trees().address(path), tensor) is not tensor:
                raise Ambiguous(f"{name} is the address of two tensors", "Their keys look the same.")
        return tensors

    def close(self) -> None:
        """Closes its files. One that is read again is opened again, and has to be the same; one that has lost its name
        meanwhile, or never had one, stays open for as long as anything refers to it."""
        if self.source is not None:
            self.source.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        part = f"#{printable(_trees().address(self.base))}" if self.base else ""
        where = f" {self.source or ''}{part}" if self.source or part else ""
        return f"<checkpoint{where} ({self.container if self.memory is None else 'in memory'})>"

    def _ipython_key_completions_(self) -> list[Any]:
        """What TAB offers after `ckpt["`: the names at the top, and the addresses of tensors."""
        return [*dict.fromkeys((*self, *self.tensors()))] if isinstance(self._top(), dict) else []

    def _repr_html_(self) -> str:
        html: str = import_module("ckptool.render.html").checkpoint_html(self)
        return html


Mapping.register(Checkpoint)
