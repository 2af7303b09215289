"""Where tensors are put: a device, dictionary or function, as `torch.load` takes it for `map_location`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from ckptool.bridge.names import untyped
from ckptool.errors import Unsupported, UsageError, printable

Restore = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]


class Restorer:
    """Puts storages where `map_location` wants them. `meta`: then there are no bytes at all."""

    def __init__(self, restore: Restore, meta: bool = False) -> None:
        self.restore, self.meta = restore, meta


def restorer(map_location: Any) -> Restorer:
    """What `map_location` asks for; raises `UsageError` for what is no device, dictionary or function."""
    if map_location is None:
        return Restorer(_at_home)
    if isinstance(map_location, dict):
        return Restorer(lambda storage, location: _at_home(storage, str(map_location.get(location, location))))
    if isinstance(map_location, (str, bytes, torch.device)):
        device = _device(map_location)
        return Restorer(lambda storage, location: _at_home(storage, str(device)), meta=device.type == "meta")
    if not callable(map_location):
        raise UsageError(
            f"map_location={map_location!r} is no device, dictionary or function", "", "For example: map_location='cpu'"
        )

    def asked(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        found = map_location(storage, location)
        found = getattr(found, "_untyped_storage", found)
        return _at_home(storage, location) if found is None else found

    return Restorer(asked)


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
