"""`torch-tar`: what `torch.save` wrote before 0.1.10 (the first ResNets of torchvision), a tar archive of four files.

`sys_info`: a pickle of what the machine was like.
`storages`: the number of storages; for each a pickle `(key, location, type)`, its number of elements as an int64, and
the elements; then a pickle of the views among them, `[(key, root key, offset, elements)]`.
`tensors`: the number of tensors; for each a pickle `(key, storage key, type)`, the number of dimensions (4 bytes, and 4
that count for nothing), sizes, strides and offset as int64.
`pickle`: the value; a persistent id is the key of a tensor or storage, or `(class, file, source text)` of a module.

The files are read where they are: nothing is extracted, and the storages are ranges of the archive. torch refuses such
files with `weights_only=True`. Source: torch/serialization.py (`legacy_load`; `save` of torch 0.1.9).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from tarfile import TarError, TarFile, TarInfo
from typing import Any

from ckptool.checkpoint import MAX_RANK, Checkpoint, Data, FileRange, Note, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.files import Input, Source
from ckptool.checkpoint.nodes import Global, brief
from ckptool.checkpoint.strided import subrange
from ckptool.errors import BadTensor, CkptoolError, Corrupt, Truncated, Unsupported, counted
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.torch_legacy import COMPACT, as_text, class_of, machine_order, small_pickle
from ckptool.pickles.decode import decode_lazily, skeleton
from ckptool.pickles.torch_objects import StorageView, storage_class

NAME = "torch-tar"
MEMBERS = ("sys_info", "pickle", "tensors", "storages")
VERSION = 1000
_DAMAGED = "The file was damaged, or made by another program."
_REBUILD = Global("torch._utils", "_rebuild_tensor")


def detect(head: bytes, source: Input) -> bool:
    """True for a tar of torch's files, or of some of them; any other tar is none."""
    if not isinstance(source, Source) or not is_tar(head):
        return False
    first = head[:100].partition(b"\0")[0].decode("latin-1")
    names = [first, *(path.rpartition("/")[2] for path in record_paths(source))]
    return any(name in MEMBERS for name in names[:2]) or len({name for name in names if name in MEMBERS}) > 1


def read(source: Source) -> Checkpoint:
    """The checkpoint in a tar of torch's. Reads the pickles and the places of the tensors, no tensor data.

    Raises `Corrupt` for anything else in it or anything missing, `BadTensor`, `Truncated`, `LimitExceeded` or
    `Unsupported`.
    """
    archive, members = Tar(source), dict[str, Data]()
    for header in archive.headers():
        name = f"{source}: {header.name[:120]!r}"
        if (kind := odd_kind(header)) is not None:
            raise Corrupt(f"{name} in it is {kind}", "torch writes four plain files. Nothing was extracted.")
        if header.name not in MEMBERS:
            raise Corrupt(f"{name} is in it, which torch does not write", f"It writes {', '.join(MEMBERS)}.")
        if header.name in members:
            raise Corrupt(f"{name} is in it twice", "Readers would disagree about which counts.")
        members[header.name] = FileRange(source, header.offset_data, header.size)
    if missing := [name for name in MEMBERS if name not in members]:
        raise Corrupt(f"{source} has no {' and no '.join(missing)} in it", f"torch writes {', '.join(MEMBERS)}.")
    info = small_pickle(members["sys_info"], 0, f"{source}: sys_info")
    if not machine_order(info.root, VERSION, f"{source}: sys_info"):
        what = f"{source} was written on a big-endian machine"
        raise Unsupported(what, "Archives of that age are supported from little-endian machines only.")
    tables = _Tables()
    for name, parse in (("storages", tables.read_storages), ("tensors", tables.read_tensors)):
        try:
            parse(_Member(members[name], tables.discarded))
        except CkptoolError as error:
            raise error.within(f"{source}: {name}") from None
    name, data = f"{source}: pickle", members["pickle"]
    opcodes = skeleton(data, name=name)
    if opcodes.end != data.length:
        raise Corrupt(f"{name} has {data.length - opcodes.end:,} bytes after its end")
    decoded = decode_lazily(opcodes, tables.load, BUILDERS, name=name, file_bytes=data.length)
    metadata: dict[str, Any] = {"protocol_version": str(VERSION), "byteorder": "little"}
    notes = [*decoded.notes]
    what = "the format has checksums of its headers only: damage to its data cannot be detected"
    notes.append(Note("no-checksums", what, COMPACT))
    if rest := source.size - archive.end:
        notes.append(Note("trailing-bytes", f"{rest:,} bytes after the archive are used by nothing", COMPACT))
    if tables.trailing:
        what = f"{tables.trailing:,} bytes in the archive's files are used by nothing"
        notes.append(Note("unused-bytes", what, COMPACT))
    calls = (*info.aside(), *tables.discarded, *decoded.discarded)
    return Checkpoint(decoded.root, NAME, metadata, source, notes=tuple(notes), discarded=calls)


class _Member:
    """A file of the archive, front to back. discarded: collects what its pickles call and throw away."""

    def __init__(self, data: Data, discarded: list[Any]) -> None:
        self.data, self.discarded, self.at = data, discarded, 0

    @property
    def rest(self) -> int:
        return self.data.length - self.at

    def pickle(self, what: str) -> Any:
        decoded = small_pickle(self.data, self.at, what)
        self.discarded += decoded.aside()
        self.at = decoded.end
        return decoded.root

    def entries(self, kind: str) -> Iterator[tuple[str, Any]]:
        """For each entry that it counts, what to call it, and the pickle that describes it."""
        count = self.pickle(f"the number of {kind}s")
        if type(count) is not int or not 0 <= count <= self.data.length:
            raise Corrupt(f"{brief(count, 80)} as the number of {kind}s", _DAMAGED)
        for number in range(count):
            fields = self.pickle(what := f"{kind} {number:,}")
            yield f"{what}, described by {brief(fields, 80)},", fields

    def take(self, size: int, what: str) -> Data:
        """The next bytes."""
        if not 0 <= size <= self.rest:
            raise (Corrupt if size < 0 else Truncated)(f"{what} needs {size:,} bytes; {self.rest:,} are left")
        self.at += size
        return subrange(self.data, self.at - size, size)

    def integers(self, count: int, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{count}q", self.take(8 * count, what).read(0, 8 * count))


class _Tables:
    """What persistent ids stand for, by key: storages, views of storages, and tensors."""

    def __init__(self) -> None:
        self.values: dict[int | str, StorageRef | StorageView | TensorEntry] = {}
        self.discarded: list[Any] = []
        self.trailing = 0

    def load(self, pid: Any) -> Any:
        """The tensor, storage or module's class that a persistent id stands for."""
        if type(pid) is tuple:
            return class_of(pid)
        key = as_text(pid)
        if isinstance(key, str) and re.fullmatch(r"-?\d{1,20}", key, re.ASCII):
            key = int(key)
        value = self.values.get(key) if type(key) is int else None
        if value is None:
            raise Corrupt(f"the value refers to the tensor {brief(key, 80)}, which is not in the file", _DAMAGED)
        if isinstance(value, StorageView):
            raise Unsupported("a storage view outside of a tensor", "torch keeps such views only in tensors.")
        return value

    def read_storages(self, reader: _Member) -> None:
        for what, fields in reader.entries("storage"):
            match fields:
                case (key, str() | bytes() as location, Global() as kind):
                    _, dtype = storage_class(kind)
                case _:
                    raise Corrupt(f"{what} is not a storage", _DAMAGED)
            if dtype is None:
                raise Unsupported(f"{what} has the unknown type {kind}", "The size of its elements is unknown.")
            (count,) = reader.integers(1, what)
            data = reader.take(count * dtype.itemsize, what)
            self._add(key, StorageRef(Storage(data, as_text(location)), dtype))
        views = reader.pickle("the views")
        for view in views if type(views) is list else [views]:
            match view:
                case (key, int() | str() as root, int(begin), int(size)):
                    ref = self.values.get(root)
                case _:
                    raise Corrupt(f"a view of a storage is described by {brief(view, 80)}", _DAMAGED)
            if (
                not isinstance(ref, StorageRef)
                or ref.dtype is None
                or not 0 <= begin <= begin + size <= ref.storage.nbytes // ref.dtype.itemsize
            ):
                raise BadTensor(f"the view {brief(view, 80)} is of no storage in the file, or goes beyond it", _DAMAGED)
            self._add(key, StorageView(ref.storage, ref.dtype, begin, size * ref.dtype.itemsize))
        self.trailing += reader.rest

    def read_tensors(self, reader: _Member) -> None:
        for what, fields in reader.entries("tensor"):
            # The number of dimensions was an int, of which 8 bytes were written: the other four can be anything.
            dimensions = reader.integers(1, what)[0] & 0xFFFFFFFF
            if dimensions > MAX_RANK:
                raise Corrupt(f"{what} has {counted(dimensions, 'dimension')}; torch allows {MAX_RANK}", _DAMAGED)
            *sizes, offset = reader.integers(2 * dimensions + 1, what)
            shape, stride, tensor = tuple(sizes[:dimensions]), tuple(sizes[dimensions:]), None
            match fields:
                case (key, None, Global() as kind) if kind in BUILDERS:  # empty, of its type
                    tensor = BUILDERS[kind](())
                case (key, int() | str() as storage, _):
                    ref = self.values.get(storage)
                    if not shape and isinstance(ref, StorageRef) and not ref.storage.nbytes:
                        shape, stride = (0,), (1,)  # what had no dimensions was empty then
                    tensor = BUILDERS[_REBUILD]((ref, offset, shape, stride))
            if not isinstance(tensor, TensorEntry):
                raise Corrupt(f"{what} is not a tensor, or views a storage that is not in the file", _DAMAGED)
            self._add(key, tensor)
        self.trailing += reader.rest

    def _add(self, key: Any, value: StorageRef | StorageView | TensorEntry) -> None:
        if not isinstance(key, (int, str)) or key in self.values:
            raise Corrupt(f"{brief(key, 80)} is not a key, or appears twice", "Readers would disagree about it.")
        self.values[key] = value


# The archive ---------------------------------------------------------------------------------------------------------

_BLOCK = 512
MAX_ATTRIBUTES = 1 << 16  # bytes of one header of attributes, which hold a time or a name
MAX_FILES = 64  # looked at, where the archive should have four
_KINDS = {"1": "a hard link", "2": "a symbolic link", "5": "a folder", "6": "a pipe", "S": "a sparse file"}


def is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def record_paths(source: Source) -> list[str]:
    """The names of the first files in an archive, as far as its headers can be read; to tell what it is."""
    names = []
    with suppress(Corrupt, Truncated):
        for header in islice(Tar(source).headers(cut=True), MAX_FILES):
            names += [header.name] if header.isreg() else []
    return names


def odd_kind(header: TarInfo) -> str | None:
    """What kind of file an entry is, in words; None for a plain one."""
    is_plain = header.isreg() and not header.issparse()
    return None if is_plain else _KINDS.get(header.type.decode("latin-1"), "no plain file")


class Tar:
    """An archive as a file for `tarfile`, which reads nothing but headers, none of them long.

    end: of the archive, once all headers were read: after two blocks of zeros, and the zeros behind them.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.at, self.end = source, 0, 0

    def tell(self) -> int:
        return self.at

    def seek(self, at: int) -> None:
        self.at = max(0, min(at, self.source.size))

    def read(self, length: int) -> bytes:
        if length > MAX_ATTRIBUTES:
            raise Corrupt(f"{self.source} has attributes of {length:,} bytes", "They hold a time or a name.")
        data = self.source.read(self.at, min(length, self.source.size - self.at))
        self.at += len(data)
        return data

    def headers(self, *, cut: bool = False) -> Iterator[TarInfo]:
        """The headers in it, each with the attributes before it, up to the zeros that end it.

        cut: the contents of the last file may be missing. Raises `Corrupt`, or `Truncated` for a file that is not whole
        and a header that does not match its checksum.
        """
        source = self.source
        try:
            archive = TarFile(fileobj=self, encoding="utf-8", errors="replace")  # type: ignore[arg-type]
            while (header := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # there may be millions
                if not cut and not 0 <= header.size <= source.size - header.offset_data:
                    where = f"{header.size:,} bytes from byte {header.offset_data:,}"
                    raise Truncated(f"{source}: {header.name[:120]!r} has {where}; the file ends at {source.size:,}")
                yield header
        except (TarError, ValueError, RecursionError) as error:
            raise Truncated(f"{source}: {str(error)[:100]} in a header of the archive") from None
        at = archive.offset
        tail = source.read(at, min(2 * _BLOCK, source.size - at)) if at < source.size else b""
        if len(tail) < 2 * _BLOCK or source.size % _BLOCK or tail.strip(b"\0"):
            raise Truncated(f"{source}: at byte {at:,} there is neither a valid header nor the end of the archive")
        at += 2 * _BLOCK
        padding = source.read(at, min(source.size - at, 20 * _BLOCK))
        self.end = at + len(padding) - len(padding.lstrip(b"\0"))
