"""A file of several that was refused, while the others were written."""

from __future__ import annotations

from ckptool.errors import CkptoolError
from ckptool.render.json import Json, error_json
from ckptool.render.style import PLAIN, Style
from ckptool.render.text import error_text


def refused_text(found: tuple[str, CkptoolError], *, style: Style = PLAIN) -> str:
    """The error, which names the file."""
    file, error = found
    return error_text(error.within(file), style)


def refused_json(found: tuple[str, CkptoolError]) -> Json:
    """The same object that is printed where the command ends with the error."""
    file, error = found
    return error_json(error.within(file), [])
