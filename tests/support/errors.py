"""Errors as a user sees them: refused for what is wrong, in three parts, with nothing touched."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptool.errors import _MARK, CkptoolError
from ckptool.formats import read
from tests.support.files import contents

FLAG = re.compile(r"(?<![\w'-])--?[a-z][a-z-]*")
# Those that no function does, and other programs'.
OTHER_COMMANDS = re.compile(
    r"(?:pip|torchrun|accelerate|unzip|gzip|mkdir|cp|ls|tar|zip|head|git|xz|zstd|bzip2|lz4) [^;]*|--ckpt-format"
    r"|ckptool (?:inspect \S+ --all|translate --list|[a-z-]+ --(?:help|init|json|global)|bundle NAME=[^;]*)"
)


def of_a_shell(text: str) -> list[str]:
    """The options in a text that Python has no such word for."""
    return FLAG.findall(OTHER_COMMANDS.sub("", text))


def three_parts(error: CkptoolError) -> tuple[str, str]:
    """An error's code and what happened; fails where it does not also say what that means or what to do."""
    assert error.what and (error.why or error.fix), error
    assert _MARK not in str(error), "a command that nobody spelled"
    assert (
        str(error).count("\n") == sum(part.count("\n") + 1 for part in (error.what, error.why, error.fix) if part) - 1
    )
    assert of_a_shell(str(error)) == [], error
    return error.code, error.what


def refused(kind: str | type[CkptoolError], folder: Path, action: Callable[[], object], says: str = "") -> CkptoolError:
    """The error of this code or class, with words that match, that `action` raises, after which every file in the
    folder is as it was."""
    before = contents(folder)
    with pytest.raises(CkptoolError if isinstance(kind, str) else kind, match=says or None) as caught:
        action()
    assert three_parts(caught.value)[0] == kind or not isinstance(kind, str)
    assert contents(folder) == before, "nothing was written"
    return caught.value


def unreadable(path: Path, kind: type[CkptoolError] = CkptoolError, *words: str) -> CkptoolError:
    """The error, of exactly this class and with these words, that reading a file and all its values raises; it names
    the file."""
    before = path.read_bytes() if os.path.isfile(path) else None
    with pytest.raises(CkptoolError) as caught:
        for entry in read(path).tree.values():
            entry.bytes()
    error = caught.value
    assert kind in (type(error), CkptoolError), error
    assert all(word in str(error) for word in words), error
    assert path.name in error.what or not before, error
    assert before is None or path.read_bytes() == before
    return error
