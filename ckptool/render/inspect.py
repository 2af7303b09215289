"""Renders `inspect` as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from html import escape
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated, Any

from ckptool.analysis.inspect import (
    ENGINE,
    Inspection,
    Listing,
    PartSummary,
    TensorRow,
    engine_of,
    like_others,
    listing,
    parts,
    same_names,
)
from ckptool.analysis.memory import memory_needs
from ckptool.checkpoint import Checkpoint, Composite, Note
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.registry import provides
from ckptool.checkpoint.state_dicts import PLAIN as PLAIN_VALUES
from ckptool.checkpoint.tree import address, children, segment_text
from ckptool.errors import counted, listed, printable
from ckptool.facts import BAR, bar, number, short, size
from ckptool.formats import named
from ckptool.options import option
from ckptool.pickles.plain.text import to_json, to_jsons
from ckptool.render.html import bar_html, page_html
from ckptool.render.json import Json, fields_json, finite, path_json, tensor_json, type_name
from ckptool.render.memory_line import memory_json, memory_text
from ckptool.render.outline import SHOWN, Branch, outline
from ckptool.render.style import PLAIN, WHOLE, Style, columns, notes_text, tensor_text, value_text

if TYPE_CHECKING:
    from ckptool.analysis.statistics import Statistics


LINES = 40  # of the outline of a file, unless more is asked for
ROOTS = 200  # parts with a line of their own
MANY = 4  # repeated parts, from which on they share a line
NAMES = 56  # columns for names; longer ones push their line to the right


@provides("text", Inspection)
def inspect_text(
    found: Inspection,
    *,
    all: Annotated[bool, option("--all", "Every tensor and entry, one line each.")] = False,
    depth: Annotated[
        int | None, option("--depth N", "Levels of the outline, instead of as many as fit.", least=0)
    ] = None,
    quiet: Annotated[bool, option("-q --quiet", "Only addresses, one per line; of a run, its checkpoints.")] = False,
    style: Style = PLAIN,
) -> str:
    """The parts of a file, an outline of their tensors, notes with the commands that fix them.

    all: every tensor and entry, a line each.  depth: levels of the outline.
    quiet: only the addresses of what `all` lists.
    """
    listing = found.listing
    if quiet:
        addresses = [row.address for row in listing.tensors] + [row.address for row in listing.printed]
        return "".join(f"{printable(each)}\n" for each in addresses)
    divided = parts(listing)
    blocks = [_heading(listing, style)]
    if found.statistics:
        blocks.append(_statistics(listing, found.statistics, style))
    elif all:
        blocks.append(_everything(listing, divided, style))
    else:
        blocks.append(_overview(divided, depth, style))
    blocks.append(_entries(listing, style) if listing.only and not all else "")
    blocks += [_totals(listing, divided, style), notes_text(found.notes, style)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _heading(listing: Listing, style: Style) -> str:
    name = (printable(listing.file) or "in memory") + (f"#{printable(listing.at)}" if listing.at else "")
    engine = engine_of(listing.metadata)
    own = listing.metadata if named(listing.container).own_metadata else ENGINE if engine else ()
    said = {key: value for key, value in listing.metadata.items() if key not in own}
    metadata = (
        f", metadata {listed([f'{printable(str(k))}={value_text(v)}' for k, v in said.items()], 4)}" if said else ""
    )
    part = f", {printable(listing.part.label)}" if listing.part else ""
    head = f"{style.bold(name)}: {listing.container}{part}, {size(listing.bytes)}{metadata}"
    return f"{head}\nengine: {engine}" if engine else head


def _totals(listing: Listing, divided: Sequence[PartSummary], style: Style) -> str:
    if not listing.tensors:
        return style.dim("no tensors")
    tied = sum(len(part.tied) for part in divided)
    ties = f"; {counted(tied, 'name')} tied to another" if tied else ""
    where = counted(listing.storages, "storage")
    totals = f"{counted(len(listing.tensors), 'tensor')} in {where}, {size(listing.tensor_bytes)}{ties}"
    memory = memory_text(memory_needs(listing, divided))
    return "\n".join(style.dim(line) for text in (totals, memory) if text for line in style.prose(text))


# The overview: a line for each root, and below it an outline of what is in it


Line = tuple[str, int | None, int, str]
"""A label with its indentation, bytes (None: no bar), the width of its level, details."""


def _overview(divided: Sequence[PartSummary], depth: int | None, style: Style) -> str:
    if len(divided) == 1 and divided[0].root.path == () and not divided[0].rows:
        return _flat_entries(divided[0])
    shown, hidden = overview(divided, depth)
    lines = _lines(shown, " (--all lists them)")
    if hidden:
        lines.append(("…", None, 0, f"{hidden:,} more (--all lists every tensor)"))
    return _aligned(lines, max((row.bytes or 0 for row in shown), default=0), style)


def _lines(shown: Sequence[OverviewRow], hint: str = "") -> list[Line]:
    """Each part and its outline.  hint: what to type for the branches that are left out."""
    lines: list[Line] = []
    for row in shown:
        lines.append((row.name, row.bytes, 0, row.detail))
        if row.outline is not None:
            lines += _branches(row.outline, 1, row.part, hint)
    return lines


@dataclass(frozen=True, slots=True)
class OverviewRow:
    """A part, or several that look alike, with the outline of what is in it. bytes: None where there are no tensors."""

    part: PartSummary
    name: str
    bytes: int | None
    detail: str
    outline: Branch | None


def overview(divided: Sequence[PartSummary], depth: int | None = None) -> tuple[list[OverviewRow], int]:
    """An overview of a file with many parts: a row each, the largest with an outline; then how many are left out."""
    alike = {} if depth is not None else like_others(divided)
    runs = _runs(divided, alike)
    shown = runs if depth is not None else runs[:ROOTS]
    room = max(LINES - len(shown), SHOWN)
    outlined = [run[0] for run in shown if run[0] not in alike and _has_outline(run[0], depth)]
    if depth is None:
        outlined = sorted(outlined, key=lambda part: -part.bytes)[: max(room // 4, 1)]
    with_outline, rows = set(outlined), []
    for run in shown:
        first, last = run[0], run[-1]
        name = root_name(first) if first is last else f"{root_name(first)} … {root_name(last)}"
        detail = root_detail(first) if first is last else f"{len(run):,} × {root_detail(first)}"
        if first in alike:
            same = "names" if same_names(first, alike[first]) else "names but for a prefix"
            detail += f"; {same} and shapes as in {root_name(alike[first])}"
        below = outline(first, room // len(outlined), depth) if first in with_outline else None
        rows.append(OverviewRow(first, name, sum(part.bytes for part in run) if first.rows else None, detail, below))
    return rows, sum(len(run) for run in runs[len(shown) :])


def _runs(divided: Iterable[PartSummary], alike: dict[PartSummary, PartSummary]) -> list[list[PartSummary]]:
    """The parts; those that stand after each other and repeat the same one (a hundred clients' weights) together, where
    they are many."""
    runs: list[list[PartSummary]] = []
    for first, run in groupby(divided, key=alike.get):
        together = list(run)
        if first is None or len(together) < MANY or len({(part.bytes, part.locations) for part in together}) > 1:
            runs += [[part] for part in together]
        else:
            runs.append(together)
    return runs


def _has_outline(part: PartSummary, depth: int | None) -> bool:
    """Optimizers repeat the model's names: their one line is enough, unless a depth was asked for."""
    several = len(part.rows) > 1 or (len(part.rows) == 1 and part.rows[0].path != part.root.path)
    return several and (depth is not None or part.root.is_model or part.root.kind == PLAIN_VALUES)


def root_name(part: PartSummary) -> str:
    return printable(part.root.address) or WHOLE


def root_detail(part: PartSummary) -> str:
    root = part.root
    if root.kind == PLAIN_VALUES and not (part.rows and isinstance(root.node, (dict, list, tuple, Object))):
        return value_text(root.node, 100)
    facts = [
        counted(len(part.rows), "tensor"),
        counted(part.elements, "element", shown=short),
        " + ".join(part.dtypes[:3]),
    ]
    facts += [printable(listed(part.locations, 3))] if part.locations and part.locations != ("cpu",) else []
    what = root.detail or (root.kind if root.kind != PLAIN_VALUES else _kind(root.node))
    return f"{what}: {', '.join(facts)}" if part.rows else what


def _kind(node: Any) -> str:
    return (
        printable(node.name)
        if isinstance(node, Object)
        else "dictionary"
        if isinstance(node, dict)
        else type(node).__name__
    )


def _branches(branch: Branch, level: int, part: PartSummary, hint: str) -> Iterable[Line]:
    for child in branch.expanded:
        tied = child.leaf is not None and child.times == 1 and child.leaf in part.tied
        name = child.label + (f" ×{child.run:,}" if child.run > 1 else "")
        yield "  " * level + name, None if tied else child.size, level, branch_detail(child, part)
        yield from _branches(child, level + 1, part, hint)
    if branch.hidden:
        yield "  " * level + "…", None, level, f"{branch.hidden:,} more{hint}"


def branch_detail(branch: Branch, part: PartSummary) -> str:
    leaf = branch.leaf
    if leaf is None:
        return counted(branch.tensors, "tensor")
    text = tensor_text(part.rows[leaf].tensor, part)
    if branch.times > 1:
        return f"{branch.times:,} × {text}{', tied to others' if leaf in part.tied else ''}"
    return f"{text}, tied to {printable(part.rows[part.tied[leaf]].address)}" if leaf in part.tied else text


def _aligned(lines: Sequence[Line], biggest: int, style: Style) -> str:
    names = max((len(label) for label, *_ in lines), default=0)
    width = style.width
    names = min(names, NAMES, max((width or 1_000) - 40, 12))
    sizes = max((len(size(nbytes)) for _, nbytes, _, _ in lines if nbytes is not None), default=0)
    barred = 0 if not sizes else BAR if width is None or width >= 100 else BAR // 2
    result = []
    for label, nbytes, level, detail in lines:
        left = f"{label.ljust(names)}  "
        if sizes:
            left += f"{'' if nbytes is None else size(nbytes):>{sizes}}  "
        drawn = bar(nbytes or 0, biggest, barred)
        used = len(left) + (barred + 2 if barred else 0)
        start = (style.bold(label) if level == 0 else label) + left[len(label) :] + style.blue(drawn)
        start += " " * (used - len(left) - len(drawn))
        text = _wrapped(detail, used, width)
        result.append((start + (style.dim(text) if level else text)).rstrip())
    return "\n".join(result)


def _wrapped(text: str, used: int, width: int | None) -> str:
    """The text in the columns that are left of a line, going on below where it is too long."""
    if width is None or used + len(text) <= width or used > width - 20:
        return text
    from textwrap import wrap

    return ("\n" + " " * used).join(wrap(text, width - used, break_long_words=False, break_on_hyphens=False))


def _flat_entries(part: PartSummary) -> str:
    """A file of plain values: its entries, as far as they fit."""
    rows = [
        (printable(segment_text(key)), value_text(value)) for key, value in islice(children(part.root.node), LINES + 1)
    ]
    if not rows:
        return value_text(part.root.node)
    return "\n".join([*columns(rows[:LINES], indent=""), *(["…  (--all lists everything)"] if rows[LINES:] else [])])


# Everything


def _everything(listing: Listing, divided: Sequence[PartSummary], style: Style) -> str:
    tied = {id(part.rows[i]): part.rows[before] for part in divided for i, before in part.tied.items()}
    rows = [(printable(row.address) or WHOLE, *_tensor_cells(row, tied.get(id(row)))) for row in listing.tensors]
    blocks = ["\n".join(columns(rows, right=(3,), indent=""))] if rows else []
    blocks += [entries] if (entries := _entries(listing, style)) else []
    blocks += [f"… and {counted(listing.unlisted, 'more entry', 'more entries')}"] if listing.unlisted else []
    return "\n\n".join(blocks)


def _entries(listing: Listing, style: Style) -> str:
    rows = [
        (
            printable(row.address) or WHOLE,
            value_text(row.value)
            if row.same_as is None
            else f"the same {type_name(row.value)} as {printable(address(row.same_as)) or WHOLE}",
        )
        for row in listing.printed
    ]
    return "\n".join([style.bold("entries"), *columns(rows)]) if rows else ""


def _tensor_cells(row: TensorRow, before: TensorRow | None) -> tuple[str, str, str, str]:
    tensor = row.tensor
    extra = [] if tensor.location == "cpu" else [printable(tensor.location)]
    if isinstance(tensor, Composite):
        extra.append(printable(tensor.kind))
    elif not tensor.is_contiguous:
        extra.append(f"strides {list(tensor.stride)}")
    extra += [f"tied to {printable(before.address)}"] if before else []
    shape = "" if tensor.shape is None else str(list(tensor.shape))
    return tensor.dtype.name if tensor.dtype else "?", shape, size(tensor.nbytes), ", ".join(extra)


def _statistics(listing: Listing, found: dict[str, Statistics], style: Style) -> str:
    heads = ("", "dtype", "shape", "min", "max", "mean", "std", "norm", "zeros", "NaN", "Inf")
    rows = [heads]
    for row in listing.tensors:
        tensor, values = row.tensor, found.get(row.address)
        shape = "" if tensor.shape is None else str(list(tensor.shape))
        cells = ("",) * 8
        if values is not None:
            numbers = (number(x) for x in (values.min, values.max, values.mean, values.std, values.norm))
            zeros = f"{values.zeros / values.count:.1%}" if values.zeros else "0"
            cells = (*numbers, zeros, short(values.nans), short(values.infs))  # type: ignore[assignment]
        rows.append((printable(row.address), tensor.dtype.name if tensor.dtype else "?", shape, *cells))
    head, *lines = columns(rows, right=range(3, 11), indent="")
    return "\n".join([style.dim(head), *lines])


# JSON -----------------------------------------------------------------------------------------------------------------


@provides("json", Inspection)
def inspect_json(found: Inspection) -> Json:
    """`ckptool.inspect/1`: every tensor and entry with its path; sizes in bytes."""
    listing = found.listing
    divided = parts(listing)
    some = next(iter((found.statistics or {}).values()), None)
    tensors, names = [], [field.name for field in fields(some)] if some is not None else []
    for row in listing.tensors:
        fact = tensor_json(row.path, row.tensor, row.storage)
        if found.statistics and (numbers := found.statistics.get(row.address)) is not None:
            # Plain numbers; asdict would copy each of them, of each of many tensors.
            fact["statistics"] = {name: finite(getattr(numbers, name)) for name in names}
        tensors.append(fact)
    values = to_jsons([row.value if row.same_as is None else None for row in listing.printed])
    return {
        "schema": "ckptool.inspect/1",
        **fields_json(listing, "file container bytes part at tensor_bytes storages"),
        "metadata": to_json(listing.metadata),
        "roots": [
            {
                "path": path_json(part.root.path),
                **fields_json(part.root, "kind detail"),
                "tensors": len(part.rows),
                **fields_json(part, "elements bytes dtypes locations"),
            }
            for part in divided
        ],
        "memory": memory_json(memory_needs(listing, divided)),
        "tensors": tensors,
        "entries": [
            {"path": path_json(row.path), "type": type_name(row.value), "value": value}
            | ({} if row.same_as is None else {"same_as": path_json(row.same_as)})
            for row, value in zip(listing.printed, values, strict=True)
        ],
        "entries_not_listed": listing.unlisted,
        **fields_json(found, "notes"),
    }


# HTML -----------------------------------------------------------------------------------------------------------------


@provides("html", Checkpoint)
def checkpoint_html(checkpoint: Checkpoint) -> str:
    """An opened checkpoint: its parts and an outline of their tensors."""
    return _listing_html(listing(checkpoint), ())


@provides("html", Inspection)
def inspect_html(found: Inspection) -> str:
    """A listing and its notes, as a table for notebooks."""
    return _listing_html(found.listing, found.notes)


def _listing_html(found: Listing, notes: Sequence[Note]) -> str:
    shown, hidden = overview(parts(found))
    biggest = max((part.bytes or 0 for part in shown), default=0)
    lines = [*_lines(shown), *([("…", None, 0, f"{hidden:,} more")] if hidden else [])]
    rows = [
        (escape(label), "" if nbytes is None else size(nbytes), bar_html(nbytes or 0, biggest), escape(detail))
        for label, nbytes, _, detail in lines
    ]
    facts = f": {found.container}, {counted(len(found.tensors), 'tensor')}, {size(found.tensor_bytes)}"
    return page_html(printable(found.file) or "checkpoint", facts, rows, notes_text(notes))
