"""What a verb that writes reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple

from ckptool.errors import listed, printable
from ckptool.facts import LIVE, Bytes, Note, Report, Told, bold, size
from ckptool.formats import named


class Row(NamedTuple):
    """Something that a verb did. key, value: for programs, among the facts.  lines: for people, among the details."""

    key: str
    value: Any
    lines: Iterable[str] = ()

    @classmethod
    def named(cls, key: str, names: Sequence[str], label: str, most: int = 8) -> Row:
        """Names, listed in one line behind the label where there are any."""
        return cls(key, list(names), [f"{label} {listed(names, most)}"] if names else [])


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Written(Report):
    """The result of a verb that writes, or would. `how`: `new file`, `in place`, `copy`, `nothing`.

    summary: one sentence of what was changed.  facts: the same for programs.  details: lines worth reading below it.
    bytes_written counts what was added to the disk; file_bytes is the size of the result.
    made: what the verb gives in place of this report, where nothing was to be written.  left: notes on what of the
    original is not in the output.
    """

    is_written: ClassVar[bool] = True

    verb: str
    file: str
    output: str
    container: str
    how: str
    bytes_written: Bytes
    file_bytes: Bytes
    summary: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    dry_run: bool = False
    verified: bool = False
    made: Annotated[tuple[Any, ...], LIVE] = ()
    left: Annotated[tuple[Note, ...], LIVE] = ()

    def about(self, summary: str, *rows: Row | str, notes: Iterable[Note] = (), **facts: Any) -> Written | Any:
        """The same with what the verb did, in rows, lines and facts; what it made, where nothing was to be written."""
        if self.made:
            return self.made[0]
        facts |= {row.key: row.value for row in rows if isinstance(row, Row)}
        lines = [line for row in rows for line in ([row] if isinstance(row, str) else row.lines)]
        details, notes = (*map(printable, lines), *self.details), (*notes, *self.left, *self.notes)
        summary = printable(summary)
        return replace(self, summary=summary, facts=facts, details=details, notes=notes, made=(), left=())

    def told(self) -> Told:
        how = {"nothing": "unchanged"}.get(self.how, self.how)
        if self.how == "in place":
            how = f"in place, {self.bytes_written:,} bytes {'to be ' if self.dry_run else ''}added"
        elif self.how == "new file" and named(self.container).writes_folder:
            how = "new folder"
        facts = ", ".join([size(self.file_bytes), how, *(["verified"] if self.verified else [])])
        where = f"written to {self.output}" if self.output else "returned"
        if self.dry_run:
            yield bold(self.verb), f": {self.summary}; would be {where} ({facts})"
            yield "  dry run: nothing was written"
        else:
            yield bold(self.verb), f": {self.summary} → {self.output or where} ({facts})"
        yield from (f"  {line}" for line in self.details)
        yield from self.notes
