"""An entry of a checkpoint: a tensor's values, or a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint.registry import provide

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """An entry. `values`: all of a tensor, or, where `edges`, its corners around one element for the rest."""

    file: str
    address: str
    entry: Any
    slice: str | None
    values: numpy.ndarray[Any, Any] | None
    edges: bool

    def __str__(self) -> str:
        text: str = provide("text", self)
        return text
