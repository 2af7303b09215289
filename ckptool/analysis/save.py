"""The outcome of a verb that writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptool.checkpoint import Note
from ckptool.checkpoint.registry import Report


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Written(Report):
    """The result of a verb that writes, or would. `how`: `new file`, `in place`, `copy`, `nothing`.

    summary: one sentence of what was changed.  facts: the same for programs.  details: lines worth reading below it.
    bytes_written counts what was added to the disk; file_bytes is the size of the result.
    """

    is_written: ClassVar[bool] = True

    verb: str
    file: str
    output: str
    container: str
    how: str
    bytes_written: int
    file_bytes: int
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    dry_run: bool = False
    verified: bool = False


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of saving; `how` and the sizes as in `Written`. notes: what happened on the way.

    details: the files that were carried along with weights, in lines.
    """

    output: str
    container: str
    how: str
    bytes_written: int
    file_bytes: int
    notes: tuple[Note, ...] = ()
    details: tuple[str, ...] = ()
