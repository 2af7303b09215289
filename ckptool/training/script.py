"""What a script has beside what it gave to `ckptool.Run`: objects that training may change and no checkpoint holds."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import nn

from ckptool.bridge.modules import unwrapped
from ckptool.training.rng import is_generator

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def unsaved_objects(given: Iterable[Any], left_out: tuple[type, ...] = ()) -> list[str]:
    """The objects with a state in the variables of the script that runs the loop, without those given: `ema (EMA)`.

    Modules, optimizers, schedules, scalers; what else has `state_dict` and `load_state_dict`; generators; environments,
    which have `reset` and `step`. Asks the classes: no property of theirs is run. left_out: classes that are not named.
    """
    known = {id(each) for each in given}
    for each in list(given):
        known |= {id(part) for part in each.modules()} if isinstance(each, nn.Module) else set()
        known |= {id(getattr(each, name, None)) for name in ("dataset", "sampler", "batch_sampler")}
    frame = _frame_of_the_script()
    if frame is None:
        return []
    variables = {**frame.f_globals, **frame.f_locals}
    found = {
        id(value): f"{name} ({type(value).__name__})"
        for name, value in variables.items()
        if _has_state(name, value) and not isinstance(value, left_out)
    }
    whole = {id(value): id(unwrapped(value)) for value in variables.values() if isinstance(value, nn.Module)}
    return [text for key, text in found.items() if key not in known and whole.get(key) not in known]


def _has_state(name: str, value: Any) -> bool:
    kind = type(value)
    if name.startswith("_") or issubclass(kind, type) or kind.__module__.partition(".")[0] == "ckptool":
        return False
    if isinstance(value, nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    methods = [callable(getattr(kind, each, None)) for each in ("state_dict", "load_state_dict", "reset", "step")]
    return is_generator(value) or all(methods[:2]) or all(methods[2:])


def _frame_of_the_script() -> FrameType | None:
    """The innermost frame whose code is neither ours nor a library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        ours = str(frame.f_globals.get("__name__")).partition(".")[0] == "ckptool"
        if not (ours or frame.f_code.co_filename.startswith(_LIBRARIES)):
            return frame
        frame = frame.f_back
    return None
