"""What the places in the tables of a DCP folder hold: one torch zip for every chunk of a tensor and every object.

Writers of torch can do it in other ways, too: each zip compressed (`compressed`); or all tensors of a file in one
safetensors, behind the zips of its objects (`SerializationFormat.SAFETENSORS`). The places of such tensors all begin
where that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Computed, FileRange, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Folder, Part
from ckptool.errors import Corrupt
from ckptool.formats import safetensors, torch_zip
from ckptool.formats.boxes import Box, Stored
from ckptool.formats.dcp import compressed
from ckptool.formats.dcp.tables import Chunk, Place, Saved
from ckptool.formats.dcp.templates import Templates
from ckptool.formats.layouts.hf_pieces import saved_offsets

SMALL = 1 << 20  # bytes of objects that are compared


@dataclass(slots=True, eq=False)
class Payloads:
    """The values in the files of the ranks. discarded: what of their pickles is not inert and not in their values."""

    folder: Folder
    discarded: list[Any] = field(default_factory=list)
    _templates: Templates = field(default_factory=Templates)
    _compressed: compressed.Chunks = field(default_factory=compressed.Chunks)
    _safetensors: dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)

    def object(self, name: str, place: Place) -> Any:
        """An object, or what stands in one file. Raises `Corrupt`, `Truncated` or `Unsupported`, naming it."""
        part = self._part(place)
        if place.transform_descriptors:
            compressed.refuse_unknown(place.transform_descriptors, f"{self.folder}: {name}")
            value, discarded = compressed.compressed_object(part)
            self.discarded += discarded
            return value
        return self._zip(name, part).tree

    def opened(self, values: dict[str, Saved]) -> dict[str, list[Any]]:
        """The chunks of all tensors, or what else stands in their places, in the order of the table.

        One file after the other: a thousand ranks have more files than may be open at once. The same at one place for
        several names, which are tied.
        """
        by_file: dict[str, list[tuple[str, int, DType]]] = {}
        found: dict[str, list[Any]] = {}
        for name, value in values.items():
            if value.dtype is not None:
                found[name] = [None] * len(value.chunks)
                for number, chunk in enumerate(value.chunks):
                    by_file.setdefault(chunk.place.relative_path, []).append((name, number, value.dtype))
        for file, chunks in by_file.items():
            known: dict[tuple[int, Box, str], Any] = {}
            opened = Place(file)
            for name, number, dtype in chunks:
                chunk = values[name].chunks[number]
                at = chunk.place.offset
                key = (at, chunk.box, name if (file, at) in self._safetensors else "")
                if key not in known:
                    known[key] = self.later(name, chunk, dtype) if self.folder.far else self.chunk(name, chunk, dtype)
                found[name][number] = known[key]
                chunk.place = opened  # from here on the file is enough
            chunks.clear()
        return found

    def later(self, name: str, chunk: Chunk, dtype: DType) -> TensorEntry:
        """A chunk as the table describes it. Its zip is on another machine, and opened when its values are wanted."""
        own = _Elsewhere(self, name, replace(chunk), dtype)
        data = Computed(prod(chunk.sizes) * dtype.itemsize, own.read, own, checks=True)
        return TensorEntry(Storage(data), dtype, chunk.sizes, row_major_strides(chunk.sizes))

    def expect(self, places: Iterable[Place]) -> None:
        """Says which objects will be read soon."""
        by_file: dict[str, list[tuple[int, int]]] = {}
        for place in places:
            by_file.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
        for file, source in zip(by_file, self.folder.each([*by_file]), strict=True):
            source.expect(by_file[file])

    def chunk(self, name: str, chunk: Chunk, dtype: DType) -> Any:
        """A chunk of a tensor, whose offsets, shape and type the table says; what else may stand there, if not that."""
        part = self._part(chunk.place)
        if transforms := chunk.place.transform_descriptors:
            compressed.refuse_unknown(transforms, f"{self.folder}: {name}")
            return compressed.compressed_tensor(part, self._compressed, chunk.sizes, dtype, name)
        known = self._templates.entry_of(part)
        if known is not None:
            return known
        if part.read(0, min(4, part.size))[:2] != b"PK" and (found := self._in_safetensors(name, chunk)):
            return found
        checkpoint = self._zip(name, part)
        self._templates.learn(part, checkpoint)
        return _settled(checkpoint.tree)

    def same(self, one: Place, other: Place) -> bool | None:
        """True where the same bytes are at both places; None where they are too many to be compared."""
        if one.length != other.length:
            return False
        if one.length > SMALL:
            return None
        return self._part(one).read(0, one.length) == self._part(other).read(0, other.length)

    def _part(self, place: Place) -> Part:
        return self.folder.open(place.relative_path).part(place.offset, place.length)

    def _zip(self, name: str, part: Part) -> Checkpoint:
        if not torch_zip.detect(part.read(0, min(4, part.size)), part.file):
            what = f"{part}: there is no torch zip where {name} should be"
            raise Corrupt(what, "The file or the table belongs to another checkpoint.")
        checkpoint = torch_zip.read(part)
        self.discarded.extend(checkpoint.discarded)
        return checkpoint

    def _in_safetensors(self, name: str, chunk: Chunk) -> TensorEntry | None:
        """The chunk in a safetensors that begins at the place and goes on to the end of the file; None without one."""
        key = chunk.place.relative_path, chunk.place.offset
        file = self.folder.open(key[0])
        if key not in self._safetensors:
            part = file.part(key[1], file.size - key[1])
            if part.size < 10 or part.read(8, 1) != b"{":
                return None
            found = safetensors.read(part)
            self._safetensors[key] = found.tree if found.tensors_only else {}, saved_offsets(found)
        tree, offsets = self._safetensors[key]
        entry, begin = tree.get(name), list(chunk.offsets)
        if not isinstance(entry, TensorEntry) or offsets.get(name, begin) != begin:
            what = f"{file} has no chunk of {name} at {begin} in its safetensors"
            raise Corrupt(what, "Its writer keeps one chunk of each name; the table belongs to another checkpoint.")
        return entry


@dataclass(slots=True, eq=False)
class _Elsewhere:
    """The values of a chunk, and the storage that they are in, once they are asked for."""

    payloads: Payloads
    name: str
    chunk: Chunk
    dtype: DType
    _entry: TensorEntry | None = None

    def entry(self) -> TensorEntry:
        if self._entry is None:
            found = self.payloads.chunk(self.name, self.chunk, self.dtype)
            found = found.entry if isinstance(found, Stored) else found
            if not isinstance(found, TensorEntry) or (found.shape, found.dtype) != (self.chunk.sizes, self.dtype):
                what = f"{self.payloads.folder}: {self.name} should be {self.dtype}{list(self.chunk.sizes)}"
                raise Corrupt(f"{what}, its file has {found!r:.100}", "They are of two checkpoints, or damaged.")
            self._entry = found
        return self._entry

    def read(self, offset: int, length: int) -> bytes:
        data = self.entry().row_major()
        return data.read(offset, max(0, min(length, data.length - offset)))

    def __iter__(self) -> Iterator[Storage]:
        yield self.entry().storage


def _settled(value: Any) -> Any:
    """A tensor by itself without the directory of its zip, whose place in the file is confirmed; anything else as it
    is.

    There may be hundreds of thousands of them, each in a zip of its own.
    """
    if not isinstance(value, TensorEntry) or not isinstance(value.storage.data, FileRange):
        return value
    data = value.storage.data
    data.ready()
    place = FileRange(data.file, data.offset, data.length)
    return value.with_storage(Storage(place, value.storage.location, value.storage.crc))
