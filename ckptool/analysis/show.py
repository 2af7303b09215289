"""An entry of a checkpoint: a tensor's values, or a plain value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint.numeric import Array
from ckptool.checkpoint.registry import Report


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Shown(Report):
    """An entry. `values`: all of a tensor, or, where `edges`, its corners around one element for the rest."""

    file: str
    address: str
    entry: Any
    slice: str | None
    values: Array | None
    edges: bool
