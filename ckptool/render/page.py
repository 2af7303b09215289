"""A text that is printed as it is."""

from __future__ import annotations

from ckptool.render.json import Json
from ckptool.render.style import PLAIN, Style


def page_text(found: str, *, style: Style = PLAIN) -> str:
    """The text."""
    return found


def page_json(found: str) -> Json:
    """`ckptool.text/1`."""
    return {"schema": "ckptool.text/1", "text": found}
