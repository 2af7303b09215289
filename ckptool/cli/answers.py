"""What a command gives back: reports, one for each file, that `main` prints as they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptool.render.style import Style

Json = dict[str, Any]


class Answer(NamedTuple):
    """One report, and how it is to be shown as text.  kind: which renderer is for it.  exit_code: what it means for the whole command."""

    kind: str
    report: Any
    options: Mapping[str, Any] = MappingProxyType({})
    exit_code: int = 0

    def text(self, style: Style) -> str:
        from ckptool.render import text

        made: str = getattr(text, f"{self.kind}_text")(self.report, style=style, **self.options)
        return made

    def json(self) -> Json:
        from ckptool.render import json

        made: Json = getattr(json, f"{self.kind}_json")(self.report)
        return made


class Answers(NamedTuple):
    """The results of a command, made one after the other.  separate: a blank line between them."""

    each: Iterable[Answer]
    as_json: bool = False
    separate: bool = False
