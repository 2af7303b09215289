"""What every report as text needs: notes, tensors and values in one line, errors.

Every name and value that comes from a file goes through `printable` on its way here. A kind of report has a module of its own
in this folder, named after it, with `KIND_text` and `KIND_json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Note, Tensor, TensorEntry
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.tree import segment_text
from ckptool.errors import CkptoolError, printable, quoted
from ckptool.render.style import PLAIN, Style
from ckptool.reports.inspect import Part

if TYPE_CHECKING:
    pass

WHOLE = "(the whole file)"


def notes_text(notes: Sequence[Note], style: Style = PLAIN) -> str:
    """Notes with their codes, and the command that fixes each, ready to paste."""
    lines = []
    for note in notes:
        first, *rest = style.prose(f"{note.code}: {printable(note.message)}")
        lines += [style.yellow(note.code) + first.removeprefix(note.code), *rest]
        if note.fix:
            lines.append(f"  {style.cyan(' '.join(map(quoted, note.fix)))}")
    return "\n".join(lines)


def tensor_text(tensor: Tensor, part: Part | None = None) -> str:
    """`f32 [64, 3, 7, 7]`, with what is unusual about it."""
    extra = []
    if tensor.location != "cpu" and (part is None or len(part.locations) > 1):
        extra.append(printable(tensor.location))
    kind = "" if isinstance(tensor, TensorEntry) else f"{printable(tensor.kind)} "
    shape = "" if tensor.shape is None else str(list(tensor.shape))
    return f"{kind}{tensor.dtype.name if tensor.dtype else '?'} {shape}".rstrip() + "".join(
        f", {word}" for word in extra
    )


def error_text(error: CkptoolError, style: Style = PLAIN) -> str:
    """What happened, what it means, what to type: a line each."""
    name = f"error[{error.code}]"
    first, *lines = style.prose(f"{name}: {printable(error.what)}")
    lines = [style.red(name) + first.removeprefix(name), *lines]
    lines += (
        [part for line in error.why.split("\n") for part in style.prose(f"  {printable(line)}")] if error.why else []
    )
    lines += [f"  {style.cyan(printable(error.fix))}"] if error.fix else []
    return "\n".join(lines) + "\n"


def value_text(value: Any, width: int | None = 60) -> str:
    """A value of a file in one line. Small dictionaries are written out."""
    if value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() < 1024):
        return str(value)
    from ckptool.pickles.plain import plain, summary

    wide = width or 1_000_000
    if isinstance(value, Object):
        value = plain(value)
    if width is not None and isinstance(value, dict) and 0 < len(value) <= 8:
        text = ", ".join(f"{printable(segment_text(key))}: {summary(item, 24)}" for key, item in value.items())
        if len(text) <= width:
            return f"{{{text}}}"
    return summary(value, wide)
