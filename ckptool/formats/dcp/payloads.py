"""What the places in the tables of a DCP folder hold: one torch zip for every chunk of a tensor and every object.

torch has other writers, too. One puts all tensors of a file into one safetensors, behind the zips of its objects
(`SerializationFormat.SAFETENSORS`), and gives its beginning as the place of each. Another compresses each zip as one
stream; as its directory comes last, it is inflated into an unnamed file when its values are asked for, and the last few
stay, as the chunks of a tensor may be read in turns.

`torch.save` writes the same bytes around the values of every tensor of one shape and type, except for their checksum
and a number that names the contents. There may be hundreds of thousands of such zips: one that differs in nothing else
from a zip that was read in full means the same, and is not read further.

Source: torch/distributed/checkpoint/filesystem.py and _extension.py (`ZStandard`), torch 2.13.
"""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from math import prod
from struct import Struct
from typing import Any, cast

from ckptool.checkpoint import (
    Checkpoint,
    Composite,
    Computed,
    FileRange,
    InlineBytes,
    Storage,
    TensorEntry,
    row_major_strides,
)
from ckptool.checkpoint.blocks import verify
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.files import Folder, Part, Source
from ckptool.checkpoint.nodes import brief
from ckptool.checkpoint.paths import temporary_files
from ckptool.checkpoint.tree import map_storages
from ckptool.errors import LimitExceeded, MissingExtra, Unsupported, listed
from ckptool.facts import dataclass, field, replace
from ckptool.formats import ZIP, safetensors, torch_zip
from ckptool.formats.dcp.tables import Chunk, Place, Saved, owner_of
from ckptool.formats.folder import damaged
from ckptool.formats.layouts.hf_pieces import saved_offsets
from ckptool.formats.marks import PICKLE
from ckptool.formats.pieces import Box, Piece, Stored

SMALL = 1 << 20  # bytes of objects that are compared
ZSTD = "stream.zstd/1"
MOST_BESIDE = 1 << 16  # bytes of a compressed chunk's zip that are not its values
MOST_WINDOW = 1 << 23  # bytes that a decompressor keeps
MOST_KEPT = 1 << 30  # bytes of unnamed files that stay, beside the last one
ALL = 1 << 17  # bytes of a zip that is read at once
TAIL = 1 << 16 | 1 << 7  # bytes at the end in which the reader of zips looks for other ends
MOST_TEMPLATES = 4_096  # templates that are learned, of all sizes
NEAREST = 16  # templates of one size that a new zip is compared with: where all of them differ, more would not help
_END = b"PK\x05\x06"
_DIGITS = 40


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A zip that was read in full. entry: its tensor.  begin, end: the bytes of the values.  head: what is before them.

    after: the fields of what follows them: those that are the same everywhere (`same`), and between these the checksum
    of the values, a number, the checksum of that, and both checksums again.
    """

    entry: TensorEntry
    begin: int
    end: int
    head: bytes
    after: Struct
    same: tuple[bytes, ...]

    def entry_of(self, part: Part) -> Stored | None:
        """The tensor in another zip of the same size; None where more differs."""
        if part.size <= ALL:
            data = part.read(0, part.size)
            head, tail = data[: self.begin], data[self.begin :]
        else:
            head, tail = part.read(0, self.begin), part.read(at := max(self.begin, part.size - TAIL), part.size - at)
        crc = self.sum_in(tail[self.end - part.size :])
        if head != self.head or crc is None or tail.count(_END) != 1:
            return None
        return Stored(self, part.file, part.start, crc)

    def sum_in(self, tail: bytes) -> int | None:
        """The checksum of the values, by what follows them; None where that does not fit."""
        if len(tail) != self.after.size:
            return None
        fields = self.after.unpack(tail)
        crc, number, check, *repeats = fields[1::2]
        fits = fields[::2] == self.same and repeats == [crc, check] and number.isdigit()
        return int.from_bytes(crc, "little") if fits and int.from_bytes(check, "little") == zlib.crc32(number) else None


def template_of(part: Part, checkpoint: Checkpoint) -> Template | None:
    """The template made from a zip that was read in full; None where it is unusual in any way, so that others will not
    be like it."""
    entry, origin = checkpoint.tree, checkpoint.origin
    if not isinstance(entry, TensorEntry) or not isinstance(origin, torch_zip.Origin):
        return None
    records = origin.archive.records
    values, number = records.get(f"{origin.root}data/0"), records.get(f"{origin.root}.data/serialization_id")
    if values is None or number is None or checkpoint.notes or checkpoint.discarded or entry.storage.crc is None:
        return None
    if not values.stored or values.method or number.size != _DIGITS:
        return None
    begin, end = values.data_at, values.data_at + values.stored
    tail = part.read(end, part.size - end)
    crc, check = (record.crc.to_bytes(4, "little") for record in (values, number))
    digits = part.read(number.data_at, _DIGITS)
    fields = re.split(b"(%b)" % b"|".join(map(re.escape, (crc, digits, check))), tail)
    if fields[1::2] != [crc, digits, check, crc, check]:
        return None
    layout = Struct("<" + "".join(f"{len(field)}s" for field in fields))
    template = Template(entry, begin, end, part.read(0, begin), layout, tuple(fields[::2]))
    return template if template.sum_in(tail) == entry.storage.crc else None


# The values ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Payloads:
    """The values in the files of the ranks. discarded: what of their pickles is not inert and not in their values.

    inflated: the compressed chunks that were inflated last, by the place that each is in.  comparable: bytes that may
    still be compared with those of a first rank, in the files so far.
    """

    folder: Folder
    discarded: list[Any] = field(default_factory=list)
    inflated: OrderedDict[Place, TensorEntry] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _templates: dict[int, list[Template]] = field(default_factory=dict)  # by the size of the zip
    _learned: int = 0
    _safetensors: dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    _objects: dict[tuple[str, int, int], Any] = field(default_factory=dict)
    comparable: int = 0
    _compared: set[str] = field(default_factory=set)

    def object(self, name: str, place: Place) -> Any:
        """The object at a place; it is read once, however many names a table gives it.

        Raises `Corrupt`, `Truncated` or `Unsupported`, naming it.
        """
        key = place.relative_path, place.offset, place.length
        if key not in self._objects:
            part = self.part(place)
            if self._is_compressed(name, place):
                checkpoint = inflate(part, torch_zip.inflated_limit(part.size))
                self.discarded += checkpoint.discarded
            else:
                checkpoint = self._read_zip(name, part)
            self._objects[key] = checkpoint.tree
        return self._objects[key]

    def pieces(self, values: dict[str, Saved]) -> dict[str, list[Piece]]:
        """The chunks of all tensors, in the order of the table.

        One file after the other: a thousand ranks have more files than may be open at once. Names that share a place,
        which are tied, get the same tensor. Raises `Corrupt` where a place holds something else than the table says.
        """
        by_file: dict[str, list[tuple[str, int, DType]]] = {}
        pieces: dict[str, list[Any]] = {}
        for name, value in values.items():
            if value.dtype is not None:
                pieces[name] = [*value.chunks]  # each a piece, once it was opened
                for number, block in enumerate(value.chunks):
                    by_file.setdefault(block.place.relative_path, []).append((name, number, value.dtype))
                if len(value.chunks) > 1:
                    value.chunks.clear()  # there may be hundreds of thousands in all
        for file, chunks in by_file.items():
            entries: dict[tuple[int, Box, str], TensorEntry | Stored] = {}
            opened, owner = Place(file), owner_of(file)
            uses = Counter(pieces[name][number].place.offset for name, number, _ in chunks if self.folder.far)
            for offset, count in uses.items():
                if count > 1:  # perhaps a safetensors, in which each name has values of its own at the same place
                    self._safetensors_at(file, offset)
            for name, number, dtype in chunks:
                chunk: Chunk = pieces[name][number]
                at = chunk.place.offset
                key = (at, chunk.box, name if (file, at) in self._safetensors else "")
                if (entry := entries.get(key)) is None:
                    # Of a zip that is compressed, or on another machine, the table tells enough until it is read; but
                    # for ours, which is read next, by its checksum.
                    is_far = self.folder.far and not name.startswith(PICKLE)
                    is_lazy = self._is_compressed(name, chunk.place) or is_far
                    if is_lazy and not self.folder.far:
                        self.part(chunk.place)  # raises unless it is there, in a file of the checkpoint
                    entry = _LazyChunk(self, name, replace(chunk), dtype).tensor if is_lazy else self.chunk(name, chunk)
                    entries[key] = entry
                pieces[name][number] = Piece(self.fitting(name, chunk, dtype, entry), chunk.offsets, owner)
                chunk.place = opened  # from here on the file is enough
            chunks.clear()
        return pieces

    def fitting(self, name: str, chunk: Chunk, dtype: DType, value: Any) -> TensorEntry | Stored:
        """The value at a chunk's place, as it is. Raises `Corrupt` where it is not what the table says, `Unsupported`
        for a quantized tensor."""
        like = value.like if isinstance(value, Stored) else value
        if isinstance(like, Composite) and (like.shape, like.dtype) == (chunk.sizes, dtype):
            what = f"{self.folder}: {name} is a {like.kind} tensor, and these are not joined here"
            raise Unsupported(what, fix="With torch: load it into a state dict that has such a tensor, and save that.")
        if not isinstance(like, TensorEntry) or (like.shape, like.dtype) != (chunk.sizes, dtype):
            claim = f"the chunk of {name} at {list(chunk.offsets)} should be {dtype}{list(chunk.sizes)}"
            has = f"the file of {owner_of(chunk.place.relative_path)} has {brief(like, 100)}"
            raise damaged(self.folder, f"{claim}, {has}")
        return value  # type: ignore[no-any-return]

    def expect(self, places: Iterable[Place]) -> None:
        """Says which objects will be read soon."""
        by_file: dict[str, list[tuple[int, int]]] = {}
        for place in places:
            by_file.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
        for file, source in zip(by_file, self.folder.each([*by_file]), strict=True):
            source.expect(by_file[file])

    def chunk(self, name: str, chunk: Chunk) -> Any:
        """The chunk of a tensor at its place, or whatever else stands there: see `fitting`."""
        part = self.part(chunk.place)
        for template in self._templates.get(part.size, ()):
            if (stored := template.entry_of(part)) is not None:
                return stored
        if part.read(0, min(4, part.size))[:2] != b"PK" and (tensor := self._in_safetensors(name, chunk)):
            return tensor
        checkpoint = self._read_zip(name, part)
        if self._learned < MOST_TEMPLATES and (learned := template_of(part, checkpoint)) is not None:
            self._learned += 1
            templates = self._templates.setdefault(part.size, [])
            templates.append(learned)
            del templates[:-NEAREST]
        entry = checkpoint.tree
        if not isinstance(entry, TensorEntry) or not isinstance(data := entry.storage.data, FileRange):
            return entry
        data.ready()  # without the directory of its zip: there may be hundreds of thousands of them
        place = FileRange(data.file, data.offset, data.length)
        return entry.with_storage(Storage(place, entry.storage.location, entry.storage.crc))

    def same(self, one: Place, other: Place) -> bool | None:
        """True where both places hold the same bytes; None where these are too many to be compared, or more in all than
        the files have: then places overlap."""
        if one.length != other.length:
            return False
        if one.length > SMALL:
            return None
        theirs = self.part(other)
        self.comparable += theirs.file.size if other.relative_path not in self._compared else 0
        self._compared.add(other.relative_path)
        self.comparable -= other.length
        if self.comparable < 0:
            return None
        return self.part(one).read(0, one.length) == theirs.read(0, other.length)

    def part(self, place: Place) -> Part:
        return self.folder.open(place.relative_path).part(place.offset, place.length)

    def _is_compressed(self, name: str, place: Place) -> bool:
        """Raises `Unsupported` for other extensions than zstd, `MissingExtra` where that is not installed."""
        if not place.transform_descriptors:
            return False
        what = f"{self.folder}: {name}"
        if [*place.transform_descriptors] != [ZSTD]:
            fix = "With torch: load it with the same extension, and save it without."
            raise Unsupported(f"{what} is packed by {listed(place.transform_descriptors)}", fix=fix)
        if find_spec("zstandard") is None:
            what += " needs the package zstandard, which is not installed"
            raise MissingExtra(what, fix="pip install 'ckptool[zstd]'")
        return True

    def _read_zip(self, name: str, part: Part) -> Checkpoint:
        if part.read(0, min(4, part.size)) not in ZIP:
            raise damaged(part, f"there is no torch zip where {name} should be")
        checkpoint = torch_zip.read(part)
        self.discarded.extend(checkpoint.discarded)
        return checkpoint

    def _in_safetensors(self, name: str, chunk: Chunk) -> TensorEntry | None:
        """The chunk in a safetensors that begins at the place and goes on to the end of the file; None without one."""
        contents = self._safetensors_at(chunk.place.relative_path, chunk.place.offset)
        if contents is None:
            return None
        tree, offsets = contents
        entry, begin = tree.get(name), list(chunk.offsets)
        if not isinstance(entry, TensorEntry) or offsets.get(name, begin) != begin:
            file = self.folder.open(chunk.place.relative_path)
            raise damaged(file, f"its safetensors has no chunk of {name} at {begin}")
        return entry

    def _safetensors_at(self, name: str, offset: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The tensors of the safetensors at this place in a file, and the offsets of their chunks, by name."""
        if (name, offset) not in self._safetensors:
            file = self.folder.open(name)
            part = file.part(offset, file.size - offset)
            if part.size < 10 or part.read(8, 1) != b"{":
                return None
            checkpoint = safetensors.read(part)
            tree = checkpoint.tree if checkpoint.tensors_only else {}
            self._safetensors[name, offset] = tree, saved_offsets(checkpoint)
        return self._safetensors[name, offset]


@dataclass(slots=True, eq=False)
class _LazyChunk:
    """A chunk whose values, and their storage, are looked up when they are asked for. tensor: as the table has it.

    A compressed one has a checksum from then on, if its zip has one.
    """

    payloads: Payloads
    name: str
    chunk: Chunk
    dtype: DType
    tensor: TensorEntry = field(init=False)
    _entry: TensorEntry | None = None

    def __post_init__(self) -> None:
        sizes, inputs = self.chunk.sizes, () if self.chunk.place.transform_descriptors else self
        length = prod(sizes) * self.dtype.itemsize
        storage = Storage(Computed(length, self.read, inputs, checks=True) if length else InlineBytes(b""))
        self.tensor = TensorEntry(storage, self.dtype, sizes, row_major_strides(sizes))

    def read(self, offset: int, length: int) -> bytes:
        data = (self.inflated() if self.chunk.place.transform_descriptors else self.entry()).row_major()
        return data.read(offset, max(0, min(length, data.length - offset)))

    def __iter__(self) -> Iterator[Storage]:
        yield self.entry().storage

    def entry(self) -> TensorEntry:
        if self._entry is None:
            self._entry = self._fitting(self.payloads.chunk(self.name, self.chunk))
        return self._entry

    def inflated(self) -> TensorEntry:
        """The chunk of a compressed zip, whose values match their checksum."""
        place, cache = self.chunk.place, self.payloads.inflated
        with self.payloads.lock:
            if place not in cache:
                part = self.payloads.part(place)
                cache[place] = self._fitting(inflate(part, self.tensor.nbytes + MOST_BESIDE).tree)
                verify(cache[place])
                while len(cache) > 1 and sum(entry.storage.nbytes for entry in cache.values()) > MOST_KEPT:
                    cache.popitem(last=False)
            cache.move_to_end(place)
            entry = cache[place]
        if entry.is_contiguous and not entry.offset and entry.nbytes == entry.storage.nbytes:
            self.tensor.storage.crc, self.tensor.storage.intact = entry.storage.crc, entry.storage.intact
        return entry

    def _fitting(self, value: Any) -> TensorEntry:
        fitting = self.payloads.fitting(self.name, self.chunk, self.dtype, value)
        return fitting.entry if isinstance(fitting, Stored) else fitting


def inflate(part: Part, limit: int) -> Checkpoint:
    """The torch zip that a part of a file inflates to, in an unnamed file. Raises what `torch_zip.read` does, and
    `LimitExceeded` for more than `limit` bytes."""
    import tempfile

    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    reader = decompressor.stream_reader(cast(Any, _CompressedPart(part)), read_size=1 << 16, read_across_frames=True)
    try:
        with temporary_files(), tempfile.TemporaryFile() as file:
            while data := reader.read(1 << 18):
                if file.tell() + len(data) > limit:
                    raise LimitExceeded(f"{part} inflates to more than {limit:,} bytes")
                file.write(data)
            file.flush()
            source = Source(str(part), os.dup(file.fileno()))
    except zstandard.ZstdError as error:
        raise damaged(part, f"it cannot be inflated: {error!s}") from None
    checkpoint = torch_zip.read(source)

    def unnamed(storage: Storage) -> Storage:  # nobody finds its bytes in a file by name
        return Storage(Computed(storage.nbytes, storage.data.read), storage.location, storage.crc)

    return replace(checkpoint, tree=map_storages(checkpoint.tree, unnamed))


class _CompressedPart:
    """The compressed bytes, for a decompressor."""

    def __init__(self, part: Part) -> None:
        self.part, self.offset = part, 0

    def read(self, size: int) -> bytes:
        data = self.part.read(self.offset, min(size, self.part.size - self.offset))
        self.offset += len(data)
        return data
