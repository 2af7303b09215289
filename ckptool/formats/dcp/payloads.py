"""What the places in the tables of a DCP folder hold: one torch zip for every chunk of a tensor and every object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import FileRange, Storage, TensorEntry
from ckptool.checkpoint.files import Folder, Part
from ckptool.errors import Corrupt, Unsupported, listed, printable
from ckptool.formats import torch_zip
from ckptool.formats.dcp.tables import Place

SMALL = 1 << 20  # bytes of objects that are compared


@dataclass(slots=True, eq=False)
class Payloads:
    """The values in the files of the ranks, each opened once.

    discarded: what of their pickles is not inert and not in their values.
    """

    folder: Folder
    discarded: list[Any] = field(default_factory=list)
    _opened: dict[Place, Any] = field(default_factory=dict)

    def value(self, name: str, place: Place) -> Any:
        """The value that was saved at a place. Raises `Corrupt`, `Truncated` or `Unsupported`, naming it."""
        if place not in self._opened:
            self._opened[place] = self._open(name, place)
        return self._opened[place]

    def same(self, one: Place, other: Place) -> bool:
        """True where the same bytes are at both places."""
        if one.length != other.length or one.length > SMALL:
            return False
        return self._part(one).read(0, one.length) == self._part(other).read(0, other.length)

    def _part(self, place: Place) -> Part:
        return self.folder.open(place.file).part(place.offset, place.length)

    def _open(self, name: str, place: Place) -> Any:
        if place.transforms:
            what = f"{self.folder}: {printable(name)} is packed by {printable(listed(place.transforms))}"
            why = "An extension of torch's writer did that; only it can undo it."
            raise Unsupported(what, why, "With torch: load it with the same extension, and save it without.")
        part = self._part(place)
        if place.file.endswith(".safetensors"):
            what = f"{self.folder} was written by torch.distributed.checkpoint as safetensors"
            why = "Only folders of .distcp files are read here."
            raise Unsupported(what, why, "With torch: torch.distributed.checkpoint.HuggingFaceStorageReader")
        if not torch_zip.detect(part.read(0, min(4, part.size)), part.file):
            what = f"{part}: there is no torch zip where {printable(name)} should be"
            raise Corrupt(what, "The file or the table belongs to another checkpoint.")
        checkpoint = torch_zip.read(part)
        self.discarded.extend(checkpoint.discarded)
        return _settled(checkpoint.tree)


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
