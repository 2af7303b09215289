"""What a command gives back: reports, one for each file, that `main` prints as they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptool.render.style import Style

Json = dict[str, Any]


class Answer(NamedTuple):
    """One report, and how it is to be shown as text.

    kind: the module of `render/` that is for it.  exit_code: what it means for the whole command.
    """

    kind: str
    report: Any
    options: Mapping[str, Any] = MappingProxyType({})
    exit_code: int = 0

    def text(self, style: Style) -> str:
        made: str = self._renderer("text")(self.report, style=style, **self.options)
        return made

    def json(self) -> Json:
        made: Json = self._renderer("json")(self.report)
        return made

    def _renderer(self, form: str) -> Any:
        return getattr(import_module(f"ckptool.render.{self.kind}"), f"{self.kind}_{form}")


class Answers(NamedTuple):
    """The results of a command, made one after the other.  separate: a blank line between them."""

    each: Iterable[Answer]
    as_json: bool = False
    separate: bool = False
