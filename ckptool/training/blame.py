"""Whose error it was: what the user's own code or torch raises in a run is told as theirs, with the place; ckptool's own stays as it is."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ckptool.errors import CkptoolError, RunFailed, UserCodeFailed, printable

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = tuple({os.path.dirname(torch.__path__[0]), *sysconfig.get_paths().values()})


@contextmanager
def blamed() -> Iterator[None]:
    """Tells what is raised inside, and is not ckptool's: as `UserCodeFailed` where a file of the user's took part, else as `RunFailed`."""
    try:
        yield
    except CkptoolError:
        raise
    except (MemoryError, RecursionError):
        raise
    except (Exception, SystemExit) as error:
        if (told := _told(error)) is None:
            raise
        raise told from error


def took_part(error: BaseException) -> bool:
    """True where a file of the user's is in the traceback."""
    return any(is_theirs(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _told(error: BaseException) -> CkptoolError | None:
    """The error in words; None for one that ckptool itself raised."""
    frames = traceback.extract_tb(error.__traceback__)
    what = f"{type(error).__name__}: {printable(str(error).partition(chr(10))[0])[:200]}"
    theirs = [number for number, frame in enumerate(frames) if is_theirs(frame.filename)]
    if theirs:
        place = frames[theirs[-1]]
        return UserCodeFailed(
            f"{printable(place.filename)}:{place.lineno} raised {what}",
            "".join(traceback.format_list(frames[theirs[0] :])).rstrip(),
            "This is your code, not ckptool's.",
        )
    last = frames[-1]
    if last.filename.startswith(_OURS + os.sep) and not type(error).__module__.startswith("torch"):
        return None
    return RunFailed(
        f"training stopped: {what}",
        f"It was raised in {last.name} ({printable(last.filename)}:{last.lineno}).",
        "It does not go with what it was given: look at the data, the model, the optimizer and their args.",
    )


def is_theirs(file: str) -> bool:
    """True for a file that is neither ckptool's nor installed."""
    return os.path.isfile(file) and not os.path.abspath(file).startswith((_OURS + os.sep, *_INSTALLED))
