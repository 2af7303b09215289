"""`torch-tar`: what `torch.save` wrote before 0.1.10 (the first ResNets of torchvision), a tar archive of four files.

`sys_info`: a pickle of what the machine was like.
`storages`: the number of storages; for each a pickle `(key, location, type)`, its number of elements as an int64, and
the elements; then a pickle of the views among them, `[(key, root key, offset, elements)]`. The first versions had no
locations and no views. `tensors`: the number of tensors; for each a pickle `(key, storage key, type)`, the number of
dimensions (4 bytes, and 4 that count for nothing), sizes, strides and offset as int64. `pickle`: the value; a
persistent id is the key of a tensor or storage, or `(class, file, source text)` of a module.

The files are read where they are: nothing is extracted, and the storages are ranges of the archive. torch refuses such
files with `weights_only=True`. Source: torch/serialization.py (`legacy_load`; `save` of torch 0.1.9).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from tarfile import TarError, TarFile, TarInfo
from types import NoneType
from typing import Any

from ckptool.checkpoint import MAX_RANK, Checkpoint, Data, FileRange, Note, Storage, StorageRef, TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Input, Source
from ckptool.checkpoint.nodes import Global
from ckptool.checkpoint.strided import subrange, swapped
from ckptool.errors import BadTensor, CkptoolError, Corrupt, Truncated, Unsupported, counted
from ckptool.formats.legacy_storages import as_text, module_source
from ckptool.formats.nested_streams import BUILDERS
from ckptool.formats.torch_legacy import COMPACT, machine_order, shown, small_pickle, source_notes
from ckptool.pickles.decode import Decoded
from ckptool.pickles.skeleton import decode_lazily, skeleton
from ckptool.pickles.torch_objects import check_view, storage_class

NAME = "torch-tar"
MEMBERS = ("sys_info", "pickle", "tensors", "storages")
VERSION = 1000
_DAMAGED = "The file was damaged, or made by another program."


def detect(head: bytes, source: Input) -> bool:
    """True for a tar of torch's files, or of some of them; any other tar is none."""
    if not isinstance(source, Source) or not is_tar(head):
        return False
    found = [
        head[:100].partition(b"\0")[0].decode("latin-1"),
        *(path.rpartition("/")[2] for path in record_paths(source)),
    ]
    return any(name in MEMBERS for name in found[:2]) or len({name for name in found if name in MEMBERS}) > 1


def read(source: Source) -> Checkpoint:
    """The checkpoint in a tar of torch's. Reads the pickles and the places of the tensors, no tensor data.

    Raises `Corrupt`, `BadTensor`, `Truncated`, `LimitExceeded` or `Unsupported`.
    """
    members, end = read_members(source, MEMBERS)
    info = small_pickle(members["sys_info"], 0, f"{source}: sys_info")
    little_endian = machine_order(info.root, VERSION, f"{source}: sys_info")
    tables = _Tables(little_endian)
    for name, parse in (("storages", tables.read_storages), ("tensors", tables.read_tensors)):
        try:
            parse(members[name])
        except CkptoolError as error:
            raise error.within(f"{source}: {name}") from None
    decoded = _decoded(members["pickle"], tables, f"{source}: pickle")
    metadata: dict[str, Any] = {"protocol_version": str(VERSION), "byteorder": "little" if little_endian else "big"}
    if tables.sources:
        metadata["sources"] = dict(tables.sources)
    odd = _notes(tables, little_endian, source.size - end)
    notes = (*decoded.notes, *source_notes(tables.sources), *odd)
    calls = (*info.aside(), *tables.discarded, *decoded.discarded)
    return Checkpoint(decoded.root, NAME, metadata, source, notes=notes, discarded=calls)


def _decoded(data: Data, tables: _Tables, name: str) -> Decoded:
    made = skeleton(data, name=name)
    if made.end != data.length:
        what = f"{name} has {data.length - made.end:,} bytes after its end"
        raise Corrupt(what, "Another pickle may be hidden there.")

    return decode_lazily(made, tables.load, BUILDERS, name=name, file_bytes=data.length)


def _notes(tables: _Tables, little_endian: bool, left: int) -> list[Note]:
    what = "the format has checksums of its headers only: damage to its data cannot be noticed"
    notes = [Note("no-checksums", what, COMPACT)]
    if not little_endian:
        how = "turned" if tables.big_endian else "little-endian, and read so"
        notes.append(Note("big-endian", f"written on a big-endian machine; its elements are {how}", COMPACT))
    if left:
        notes.append(Note("trailing-bytes", f"{left:,} bytes after the archive are used by nothing", COMPACT))
    if tables.trailing:
        what = f"{tables.trailing:,} bytes in the archive's files are used by nothing"
        notes.append(Note("unused-bytes", what, COMPACT))
    return notes


class _View:
    """A part of a storage that has a key of its own."""

    __slots__ = ("offset", "ref", "root")

    def __init__(self, ref: StorageRef, root: StorageRef, offset: int) -> None:
        self.ref, self.root, self.offset = ref, root, offset


class _Tables:
    """The storages and tensors by their keys."""

    def __init__(self, little_endian: bool) -> None:
        self.little_endian = little_endian
        self.big_endian = False  # whether the numbers and elements are
        self.storages: dict[int | str, StorageRef] = {}
        self.views: dict[int | str, _View] = {}
        self.tensors: dict[int | str, TensorEntry] = {}
        self.sources: dict[str, dict[str, str | None]] = {}
        self.discarded: list[Any] = []
        self.trailing = 0

    def load(self, pid: Any) -> Any:
        """The tensor, storage or module's class that a persistent id stands for."""
        if type(pid) is tuple:
            # The class of a pickled module: a name. Its file and source text are kept as text, to be shown.
            cls, source = module_source(pid)
            if source is not None:
                self.sources[str(cls)] = source
            return cls
        key = pid
        if isinstance(pid, (str, bytes)):
            text = as_text(pid)
            if not text.removeprefix("-").isdigit() or len(text) > 20:
                raise Corrupt(f"the persistent id {text[:40]!r}", "torch writes numbers.")
            key = int(text)
        if type(key) is not int:
            raise Corrupt("a persistent id that is no number", "torch writes numbers, and modules' classes.")
        found = self.tensors.get(key) or self.storages.get(key)
        if found is None and (view := self.views.get(key)) is not None:
            found = view.ref
        if found is None:
            raise Corrupt(f"the value refers to the tensor {key}, which is not in the file", _DAMAGED)
        return found

    def _pickle(self, data: Data, at: int, what: str) -> tuple[Any, int]:
        found = small_pickle(data, at, what)
        self.discarded += found.aside()
        return found.root, found.end

    def _count(self, data: Data, what: str) -> tuple[int, int]:
        count, at = self._pickle(data, 0, f"the number of {what}")
        if type(count) is not int or not 0 <= count <= data.length:
            raise Corrupt(f"{shown(count)} as the number of {what}", _DAMAGED)
        return count, at

    # Storages ----------------------------------------------------------------------------------------------------

    def read_storages(self, data: Data) -> None:
        count, at = self._count(data, "storages")
        with_views = True
        for number in range(count):
            place, at = self._pickle(data, at, f"storage {number:,}")
            parts = place if type(place) is tuple else ()
            with_views = len(parts) == 3
            if len(parts) == 2 and type(parts[1]) is Global:  # before locations
                parts = (parts[0], "cuda:0" if parts[1].module == "torch.cuda" else "cpu", parts[1])
            at = self._storage(data, at, number, parts)
        if with_views or at != data.length:
            views, at = self._pickle(data, at, "the views")
            for view in views if type(views) is list else [None]:
                self._view(view)
        self.trailing += data.length - at

    def _storage(self, data: Data, at: int, number: int, parts: tuple[Any, ...]) -> int:
        key, location, kind = parts if len(parts) == 3 else (None, None, None)
        location = as_text(location)
        if not isinstance(key, (int, str)) or type(location) is not str or type(kind) is not Global:
            raise Corrupt(f"storage {number:,} is described by {shown(parts)}", _DAMAGED)
        self._check_new(key)
        known, dtype = storage_class(kind)
        if not known or dtype is None:
            raise Unsupported(f"storage {number:,} has the unknown type {kind}", "The size of its elements is unknown.")
        if at + 8 > data.length:
            raise Truncated(f"storage {number:,} ends before its number of elements")
        size = self._elements(data.read(at, 8), dtype, data.length - at - 8, number) * dtype.itemsize
        storage = Storage(subrange(data, at + 8, size), location)
        if self.big_endian:
            storage.data = swapped(Storage(storage.data, storage.location), dtype)
        self.storages[key] = StorageRef(storage, dtype)
        return at + 8 + size

    def _elements(self, header: bytes, dtype: DType, room: int, number: int) -> int:
        """The number of elements of a storage; where only the big-endian one is possible, all of the file is read
        so."""
        count = int.from_bytes(header, "big" if self.big_endian else "little", signed=True)
        if not 0 <= count * dtype.itemsize <= room and not self.little_endian and not self.big_endian:
            self.big_endian = all(not ref.storage.nbytes for ref in self.storages.values())
            count = int.from_bytes(header, "big", signed=True)
        if count < 0:
            raise Corrupt(f"storage {number:,} has {counted(count, 'element')}", _DAMAGED)
        if count * dtype.itemsize > room:
            size = f"{counted(count, 'element')} of {dtype.itemsize} bytes"
            what = f"storage {number:,} has {size}; {room:,} bytes are left"
            raise Truncated(what, "The file was cut off, or the number is wrong.")
        return count

    def _view(self, view: Any) -> None:
        target, root, offset, size = view if type(view) is tuple and len(view) == 4 else (None, None, None, None)
        if (
            not isinstance(target, (int, str))
            or not isinstance(root, (int, str))
            or type(offset) is not int
            or type(size) is not int
        ):
            raise Corrupt(f"a view of a storage is described by {shown(view)}", _DAMAGED)
        self._check_new(target)
        whole = self.storages.get(root)
        if whole is None:
            raise BadTensor(f"a view of the storage {shown(root)}, which is not in the file or a view itself", _DAMAGED)
        width = whole.dtype.itemsize if whole.dtype else 1
        if offset < 0 or size < 0 or (offset + size) * width > whole.storage.nbytes:
            there = whole.storage.nbytes // width
            what = f"a view of the elements {offset:,} to {offset + size:,} of a storage that has {there:,}"
            raise BadTensor(what, _DAMAGED)
        part = Storage(subrange(whole.storage.data, offset * width, size * width), whole.storage.location)
        self.views[target] = _View(StorageRef(part, whole.dtype), whole, offset)

    # Tensors -----------------------------------------------------------------------------------------------------

    def read_tensors(self, data: Data) -> None:
        count, at = self._count(data, "tensors")
        for number in range(count):
            place, at = self._pickle(data, at, f"tensor {number:,}")
            at = self._tensor(data, at, number, place)
        self.trailing += data.length - at

    def _tensor(self, data: Data, at: int, number: int, place: Any) -> int:
        key, storage, kind = place if type(place) is tuple and len(place) == 3 else (None, None, None)
        if not isinstance(key, (int, str)) or not isinstance(storage, (int, str, NoneType)):
            raise Corrupt(f"tensor {number:,} is described by {shown(place)}", _DAMAGED)
        self._check_new(key)
        rank, at = self._numbers(data, at, 1, number)
        # The number of dimensions was an int, of which 8 bytes were written: the other four can be anything.
        dimensions = (rank[0] >> 32 if self.big_endian else rank[0]) & 0xFFFFFFFF
        if dimensions > MAX_RANK:
            raise Corrupt(
                f"tensor {number:,} has {counted(dimensions, 'dimension')}; torch allows {MAX_RANK}", _DAMAGED
            )
        sizes, at = self._numbers(data, at, 2 * dimensions + 1, number)
        if storage is None:
            made = BUILDERS[kind](()) if type(kind) is Global and kind in BUILDERS else None  # empty, of its type
            if not isinstance(made, TensorEntry):
                raise Corrupt(f"tensor {number:,} has no storage and is {shown(kind)}", _DAMAGED)
            self.tensors[key] = made
        else:
            self.tensors[key] = self._entry(storage, sizes[:dimensions], sizes[dimensions:-1], sizes[-1], number)
        return at

    def _numbers(self, data: Data, at: int, count: int, number: int) -> tuple[tuple[int, ...], int]:
        if at + 8 * count > data.length:
            raise Truncated(f"tensor {number:,} ends before its sizes")
        order = ">" if self.big_endian else "<"
        return struct.unpack(f"{order}{count}q", data.read(at, 8 * count)), at + 8 * count

    def _entry(
        self, key: int | str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, number: int
    ) -> TensorEntry:
        view = self.views.get(key)
        ref, root, begin = (view.ref, view.root, view.offset) if view else (self.storages.get(key), None, 0)
        if ref is None or ref.dtype is None:
            raise Corrupt(
                f"tensor {number:,} is a view of the storage {shown(key)}, which is not in the file", _DAMAGED
            )
        if not shape and not ref.storage.nbytes:  # what had no dimensions was empty then
            shape, stride = (0,), (1,)
        check_view(ref.storage, ref.dtype, shape, stride, offset)
        return TensorEntry((root or ref).storage, ref.dtype, shape, stride, begin + offset)

    def _check_new(self, key: Any) -> None:
        if key in self.storages or key in self.views or key in self.tensors:
            raise Corrupt(f"the key {shown(key)} is given twice", "Readers would disagree about which is right.")


_BLOCK = 512
MAX_ATTRIBUTES = 1 << 16  # bytes of one header of attributes, which hold a time or a name
MAX_FILES = 64  # looked at, where the archive should have four
_CUT = "The file was cut off, or bytes of it were lost."
_KINDS = {"1": "a hard link", "2": "a symbolic link", "5": "a folder", "6": "a pipe", "S": "a sparse file"}


def is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def record_paths(source: Source) -> list[str]:
    """The names of the first files in an archive, as far as its headers can be read; to tell what it is."""
    names = []
    try:
        for header in islice(headers(source, cut=True), MAX_FILES):
            names += [header.name] if header.isreg() else []
    except (Corrupt, Truncated):
        pass
    return names


def read_members(source: Source, wanted: tuple[str, ...]) -> tuple[dict[str, Data], int]:
    """The contents of the wanted files by name, and where the archive ends.

    Raises `Corrupt` for anything else in it or anything missing, `Truncated` for a cut archive or a bad checksum.
    """
    members: dict[str, Data] = {}
    end = 0
    for header in headers(source):
        shown = f"{source}: {header.name[:120]!r}"
        if (kind := odd_kind(header)) is not None:
            raise Corrupt(f"{shown} in it is {kind}", "torch writes four plain files. Nothing was extracted.")
        if header.name not in wanted:
            raise Corrupt(f"{shown} is in it, which torch does not write", f"It writes {', '.join(wanted)}.")
        if header.name in members:
            raise Corrupt(f"{shown} is in it twice", "Readers would disagree about which is right.")
        members[header.name] = FileRange(source, header.offset_data, header.size)
        end = header.offset_data + header.size + -header.size % _BLOCK
    missing = [name for name in wanted if name not in members]
    if missing:
        raise Corrupt(f"{source} has no {' and no '.join(missing)} in it", f"torch writes {', '.join(wanted)}.")
    return members, end_of(source, end)


def odd_kind(header: TarInfo) -> str | None:
    """What an entry is that is no plain file, in words."""
    plain = header.isreg() and not header.issparse()
    return None if plain else _KINDS.get(header.type.decode("latin-1"), "no plain file")


class _Headers:
    """An archive as the file that `tarfile` reads: nothing but headers, none of them long."""

    def __init__(self, source: Source) -> None:
        self.source, self.at = source, 0

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


def headers(source: Source, *, cut: bool = False) -> Iterator[TarInfo]:
    """The headers in an archive, each with the attributes before it, up to the zeros that end it.

    cut: the file behind the last one may be missing. Raises `Corrupt`, or `Truncated` for a file that is not whole and
    a header that does not match its checksum.
    """
    try:
        archive = TarFile(fileobj=_Headers(source), encoding="utf-8", errors="replace")  # type: ignore[arg-type]
        while (header := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # there may be millions
            if not cut and not 0 <= header.size <= source.size - header.offset_data:
                where = f"{header.size:,} bytes from byte {header.offset_data:,}"
                what = f"{source}: {header.name[:120]!r} has {where}; the file ends at {source.size:,}"
                raise Truncated(what, _CUT)
            yield header
        if archive.offset + _BLOCK > source.size:
            raise Truncated(f"{source} ends at byte {source.size:,}, before the end of the archive", _CUT)
        if source.read(archive.offset, _BLOCK).strip(b"\0"):
            raise Truncated(f"{source}: the header at byte {archive.offset:,} does not match its checksum", _CUT)
    except (TarError, ValueError, RecursionError) as error:
        raise Truncated(f"{source}: {str(error)[:100]} in a header of the archive", _CUT) from None


def end_of(source: Source, at: int) -> int:
    """The end of the archive whose last file ends at `at`: after two blocks of zeros, and the zeros behind them."""
    if at + 2 * _BLOCK > source.size or source.size % _BLOCK:
        raise Truncated(f"{source}: its last block is not whole (the file has {source.size:,} bytes)", _CUT)
    if source.read(at + _BLOCK, _BLOCK).strip(b"\0"):
        raise Corrupt(f"{source} goes on at byte {at + _BLOCK:,} after the end of the archive began", _CUT)
    at += 2 * _BLOCK
    padding = source.read(at, min(source.size - at, 20 * _BLOCK))
    return at + len(padding) - len(padding.lstrip(b"\0"))
