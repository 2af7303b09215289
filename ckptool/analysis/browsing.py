"""The lines of a tree in which everything of a checkpoint has its place, or everything that differs in another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.analysis.inspect import Listing, TensorRow, summary_of
from ckptool.analysis.outline import DEEPEST, Branch
from ckptool.analysis.words import type_name
from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.tree import Path
from ckptool.facts import number

if TYPE_CHECKING:
    from ckptool.analysis.diff import Diff


class Plain(NamedTuple):
    """A value that stands in the place of a tensor in a line."""

    value: Any
    dtype: None = None
    shape: None = None
    location: str = "cpu"
    nbytes: int = 0

    @property
    def kind(self) -> str:
        return type_name(self.value)


@dataclass(slots=True, eq=False)
class Line(TensorRow):
    """A tensor or plain value of the tree.  change, colour: what became of it in another file."""

    change: str = ""
    colour: str = ""


def lines_of(found: Listing) -> list[Line]:
    """Every tensor, then every value, but what an object is made of."""
    lines, above = [Line(row.path, row.tensor, row.storage) for row in found.tensors], None
    for row in found.entries:
        if not row.repeated and (above is None or row.path[: len(above)] != above):
            lines.append(_line(row.path, row.value))
            above = row.path
    return lines


def lines_of_diff(diff: Diff, base: Path) -> list[Line]:
    """What differs, at its place in the first file, of which the part at `base` was compared."""
    from ckptool.analysis.diff import aspect_rows, entry_rows

    told = {name: text for rows in (aspect_rows(diff), entry_rows(diff)) for name, text in rows}
    found: list[tuple[Path, Any, str, str]] = []
    for each in diff.changed:
        words, values = [told.get(each.address, "")], each.values
        if values is not None:
            words.insert(0, f"{values.changed:,} of {values.total:,} changed, max |a-b| {number(values.max_abs)}")
        found.append((each.path, each.left, ", ".join(filter(None, words)) or "differs", "yellow"))
    found += [(each.path, each.node, "only here", "red") for each in diff.only_left]
    found += [(each.path, each.node, "only in the other", "green") for each in diff.only_right]
    return [_line(base + path, node, *words) for path, node, *words in found]


def _line(path: Path, node: Any, *words: str) -> Line:
    tensor: Any = node if isinstance(node, (TensorEntry, Composite)) else Plain(node)
    return Line(path, tensor, id(node.storage) if isinstance(node, TensorEntry) else None, None, *words)


def tree_of(lines: Sequence[Line], label: str) -> Branch:
    """The lines as a tree by the slashes and dots of their addresses."""
    items = [(line.address.replace("/", ".").split(".", DEEPEST), row, line.address) for row, line in enumerate(lines)]
    root: Any = None  # of no part of the file
    part = summary_of(root, lines)
    return Branch(part, items, 0, label, 1, part.bytes)
