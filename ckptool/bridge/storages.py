"""The bytes of tensors: a file's as torch's storages, mapped or read, on their device; torch's as data to write."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch

from ckptool.checkpoint import Computed, Data, FileRange, Storage
from ckptool.checkpoint.blocks import BLOCK, Crc, fill, name_of
from ckptool.checkpoint.files import Source
from ckptool.commands import FILE, OUT, command
from ckptool.errors import FileChanged, LimitExceeded, Unsupported, UsageError

untyped: Any = torch  # for the functions that torch gives no types, or wrong ones

# Locations ------------------------------------------------------------------------------------------------------------


@cache
def _is_absent(location: str) -> bool:
    """True for a device of a kind of which this machine, or this torch, has none at all."""
    if location == "cpu":
        return False
    try:
        kind = torch.device(location).type
        return kind != "meta" and not untyped.get_device_module(kind).is_available()
    except (RuntimeError, AttributeError, AssertionError):
        return False


def _at_home(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """The storage on the device that `location` names."""
    if location == "cpu":
        return storage
    try:
        return cast(torch.UntypedStorage, untyped.serialization.default_restore_location(storage, location))
    except (RuntimeError, AttributeError, AssertionError) as error:
        what = f"tensors were saved on {location}, which this machine or this torch does not have"
        why = str(error).splitlines()[0][:300] if str(error) else ""
        fix = f"Put them elsewhere: map_location='cpu'; or change the file: {command('remap', FILE, to='cpu', out=OUT)}"
        raise Unsupported(what, why, fix) from error


# Bytes ----------------------------------------------------------------------------------------------------------------


class Storages:
    """The torch storage for each storage of the tree, mapped or read when it is first asked for, where `map_location`
    wants it.

    device: of all of them, where it is known.  meta: they have no bytes. Raises `UsageError` for a `map_location` that
    is not a device, dictionary or function.
    """

    def __init__(self, map_location: Any, map_files: bool) -> None:
        if untyped._guards.detect_fake_mode(None) is not None:
            what, why = "nothing is loaded under torch's FakeTensorMode", "Its tensors have no bytes."
            raise Unsupported(what, why, "Load it outside that mode; for shapes alone: map_location='meta'")
        self.map_location, self.map_files = map_location, map_files
        self.device: torch.device | None = None
        if isinstance(map_location, (str, bytes, torch.device)):
            given = map_location.decode("utf-8", "replace") if isinstance(map_location, bytes) else map_location
            try:
                self.device = torch.device(given)
            except RuntimeError:
                what, why = f"{str(map_location)!r} is not a device", "Devices are cpu, cuda, cuda:1, mps, meta."
                raise UsageError(what, why) from None
        elif map_location is not None and not isinstance(map_location, dict) and not callable(map_location):
            what = f"map_location={map_location!r} is not a device, dictionary or function"
            raise UsageError(what, "", "For example: map_location='cpu'")
        self.meta = self.device is not None and self.device.type == "meta"
        self.made: dict[int, torch.UntypedStorage] = {}
        self.maps: dict[Source, torch.UntypedStorage] = {}
        self.mapped: set[int] = set()  # the ids of data

    def restore(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """The storage on the device where it is wanted. location: of where it was saved."""
        if self.device is not None:
            return _at_home(storage, str(self.device))
        if self.map_location is None:
            return storage if _is_absent(location) else _at_home(storage, location)
        if isinstance(self.map_location, dict):
            return _at_home(storage, str(self.map_location.get(location, location)))
        found = self.map_location(storage, location)
        return _at_home(storage, location) if found is None else getattr(found, "_untyped_storage", found)

    def get(self, storage: Storage, itemsize: int) -> torch.UntypedStorage:
        made = self.made.get(id(storage))
        if made is None:
            made = self.made[id(storage)] = self._make(storage, itemsize)
        return made

    def _make(self, storage: Storage, itemsize: int) -> torch.UntypedStorage:
        if self.meta:
            return cast(torch.UntypedStorage, untyped.UntypedStorage(storage.nbytes, device="meta"))
        data = storage.data
        # Of two storages in one place of a file, one has its own memory.
        mapped = self.map_files and id(data) not in self.mapped
        mapped = mapped and type(data) is FileRange and not data.file.far and data.offset % min(itemsize, 8) == 0
        if mapped and isinstance(data, FileRange) and data.length:
            self.mapped.add(id(data))
            data.ready()
            if data.file not in self.maps:
                # The whole file, once, copy-on-write; every storage in it keeps it alive. Torch closes it again: a map
                # of Python's has a descriptor, and a folder may have more files than a process may.
                data.file.check_unchanged()
                try:
                    fd = data.file.descriptor()
                    whole = untyped.UntypedStorage.from_file(f"/dev/fd/{fd}", False, data.file.size)
                    self.maps[data.file] = whole
                except RuntimeError as error:
                    what, why = f"{data.file} cannot be mapped into memory", str(error).splitlines()[0][:300]
                    raise FileChanged(what, why, "Read it instead: mmap=False") from error
            made = self.maps[data.file][data.offset : data.offset + data.length]
        else:
            made = _in_memory(data, storage.crc)
        return self.restore(made, storage.location)


def _in_memory(data: Data, crc: int | None) -> torch.UntypedStorage:
    """The bytes in memory of their own; raises `Corrupt` where they do not have the checksum `crc`."""
    try:
        storage: torch.UntypedStorage = untyped.UntypedStorage(data.length)
    except (RuntimeError, MemoryError) as error:
        what = f"a storage of {data.length:,} bytes does not fit into memory"
        raise LimitExceeded(what, "", "Choose a part of the file: FILE#ADDRESS") from error
    if not data.length:
        return storage
    memory, total = memoryview(cast(Any, _bytes_of(storage).numpy())), Crc(expected=crc, name=name_of(data))
    for at in range(0, data.length, BLOCK):  # what is summed up is in the processor's cache
        block = memory[at : at + BLOCK]
        fill(data, at, block)
        if crc is not None:
            total.update(block)
    total.check("")
    return storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def data_of(storage: torch.UntypedStorage) -> Computed:
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
    # An array is a buffer, which its stubs do not say.
    raw = memoryview(_bytes_of(storage).numpy())  # type: ignore[arg-type]
    return Computed(size, read, view=lambda offset, length: raw[offset : offset + length])
