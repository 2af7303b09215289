"""Errors as a user sees them: refused for what is wrong, in three parts, with nothing touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptool.errors import CkptoolError, in_python
from ckptool.formats import read
from tests.support.files import contents


def three_parts(error: CkptoolError) -> tuple[str, str]:
    """An error's code and what happened; fails where it does not also say what that means or what to do."""
    assert error.what and (error.why or error.fix), error
    assert str(error) == "\n".join(in_python(part) for part in (error.what, error.why, error.fix) if part)
    return error.code, error.what


def refused(code: str, folder: Path, action: Callable[[], object]) -> CkptoolError:
    """The error of this code that `action` raises, after which every file in the folder is as it was."""
    before = contents(folder)
    with pytest.raises(CkptoolError) as caught:
        action()
    assert three_parts(caught.value)[0] == code
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
