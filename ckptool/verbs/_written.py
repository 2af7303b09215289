"""What a verb that writes reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ckptool.checkpoint import Note
from ckptool.checkpoint.registry import Report, provides
from ckptool.errors import listed, printable
from ckptool.formats import named
from ckptool.render.json import document
from ckptool.render.style import PLAIN, Style, notes_text, size


class Row(NamedTuple):
    """Something that a verb did. key, value: for programs, among the facts.  lines: for people, among the details."""

    key: str
    value: Any
    lines: Iterable[str] = ()

    @classmethod
    def named(cls, key: str, names: Iterable[str], label: str, most: int = 8) -> Row:
        """Names, listed in one line behind the label where there are any."""
        shown = [printable(name) for name in names]
        return cls(key, list(names), [f"{label} {listed(shown, most)}"] if shown else [])


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
    summary: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    dry_run: bool = False
    verified: bool = False
    made: tuple[Any, ...] = ()
    """What the verb gives in place of this report, where nothing was to be written."""
    left: tuple[Note, ...] = ()
    """Notes on what of the original is not in the output, before those of writing it."""

    def about(self, summary: str, *rows: Row | str, notes: Iterable[Note] = (), **facts: Any) -> Written | Any:
        """The same with what the verb did, in rows, lines and facts; what it made, where nothing was to be written."""
        if self.made:
            return self.made[0]
        facts |= {row.key: row.value for row in rows if isinstance(row, Row)}
        lines = [line for row in rows for line in ([row] if isinstance(row, str) else row.lines)]
        details, notes = (*lines, *self.details), (*notes, *self.left, *self.notes)
        return replace(self, summary=summary, facts=facts, details=details, notes=notes, made=(), left=())


@provides("text", Written)
def save_text(written: Written, style: Style = PLAIN) -> str:
    """What a verb wrote, or would write: one line, then details and notes."""
    facts = [size(written.file_bytes), "in place" if written.how == "in place" else written.how]
    if written.how == "in place":
        facts[1] = f"in place, {written.bytes_written:,} bytes {'to be ' if written.dry_run else ''}added"
    elif written.how == "new file" and named(written.container).writes_folder:
        facts[1] = "new folder"
    if written.how == "nothing":
        facts[1] = "unchanged"
    facts += ["verified"] if written.verified else []
    where = f"written to {printable(written.output)}" if written.output else "returned"
    where += f" ({', '.join(facts)})"
    verb = style.bold(written.verb)
    if written.dry_run:
        lines = [f"{verb}: {written.summary}; would be {where}", "  dry run: nothing was written"]
    else:
        lines = [f"{verb}: {written.summary} → {where.removeprefix('written to ')}"]
    lines += [f"  {line}" for line in written.details]
    notes = notes_text(written.notes, style)
    return "\n".join([*lines, *([notes] if notes else [])]) + "\n"


document(
    Written,
    "written",
    "verb file output container how dry_run verified bytes_written file_bytes summary facts details notes",
)
