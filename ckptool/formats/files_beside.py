"""What the files of a folder would run that its checkpoint does not show: each is judged as if it had been named alone.

Engines load what lies beside the weights (`optimizer.bin`, `training_args.bin`, a rank's random states) with `pickle`,
whatever its name. So every file below the folder that is a pickle by content is opened, but for those of DCP, whose
table is read whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Folder, Source, folder_at, while_open
from ckptool.errors import CkptoolError, NotACheckpoint
from ckptool.formats import FORMATS, HEAD, read_alone
from ckptool.formats.parts import FOLDER
from ckptool.pickles.calls import UNKNOWN, NameUse, uses_of

MAX_FILES, MAX_DEPTH = 10_000, 4  # that are judged; each is opened
_OF_DCP = (".distcp", ".metadata")


def all_uses(checkpoint: Checkpoint) -> Iterator[tuple[NameUse, str]]:
    """Everything that is not inert in a checkpoint, and what is unknown in other files of its folder, with addresses.

    In another file the address begins with its name: `optimizer.bin: state/0`.
    """
    known = set()
    for use, place in uses_of(checkpoint):
        known.add((use.how, use.name))
        yield use, place
    yield from ((use, place) for use, place in _judged(checkpoint)[0] if (use.how, use.name) not in known)


def unjudged(checkpoint: Checkpoint) -> list[str]:
    """The names of files of its folder that look like pickles, and could not be read as such."""
    return _judged(checkpoint)[1]


@while_open()
def _judged(checkpoint: Checkpoint) -> tuple[list[tuple[NameUse, str]], list[str]]:
    folder: str = checkpoint.kept.get(FOLDER, "")
    uses, failed = list[tuple[NameUse, str]](), list[str]()
    known = checkpoint.source.files if isinstance(checkpoint.source, Folder) and checkpoint.source.far else {}
    if "beside" not in checkpoint.kept:
        for name in _names(folder) if folder else ():
            try:
                source = known.get(name) or Source(os.path.join(folder, name))
                source.share_descriptors()  # there may be thousands of them
                found = list(uses_of(read_alone(source))) if is_pickled(source) else []
            except NotACheckpoint:
                continue
            except (CkptoolError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
                failed.append(name)
                continue
            uses += ((use, f"{name}: {place or 'the top'}") for use, place in found if use.verdict == UNKNOWN)
        checkpoint.kept["beside"] = uses, failed
    judged: tuple[list[tuple[NameUse, str]], list[str]] = checkpoint.kept["beside"]
    return judged


def is_pickled(source: Source) -> bool:
    """True for a file that is a pickle, or has one inside, by its content."""
    head = source.read(0, min(HEAD, source.size))
    return any(kind.pickled and kind.detect(head, source) for kind in FORMATS)


def _names(folder: str) -> Iterator[str]:
    """The files below a folder by their names in it, not those of hidden folders."""
    stack, count = [("", 0)], 0
    while stack:
        below, depth = stack.pop()
        try:
            inside = [os.path.join(below, name) for name in Folder(os.path.join(folder, below)).names]
        except CkptoolError:
            continue
        for name in inside:
            path = os.path.join(folder, name)
            if folder_at(path):
                if depth < MAX_DEPTH and not os.path.basename(name).startswith(".") and not os.path.islink(path):
                    stack.append((name, depth + 1))
            elif not name.endswith(_OF_DCP) and count < MAX_FILES:
                count += 1
                yield name
