"""Reports as text for people: what the verbs found, what they wrote, what went wrong.

Every name and value that comes from a file goes through `printable` on its way here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Composite, Note, Tensor, TensorEntry
from ckptool.errors import CkptoolError, listed, printable
from ckptool.nodes import Object, Set
from ckptool.prefixes import without_wrappers
from ckptool.render.outline import Branch, outline
from ckptool.render.style import BAR, PLAIN, Style, bar, columns, counted, number, short, size
from ckptool.reports.listing import EntryRow, Listing, TensorRow
from ckptool.reports.parts import Part, like_others, parts
from ckptool.roots import PLAIN as PLAIN_VALUES
from ckptool.tree import address, children, segment_text, walk

if TYPE_CHECKING:
    from ckptool.reports.diff import Diff
    from ckptool.reports.statistics import Statistics
    from ckptool.verbs.inspect import Inspection
    from ckptool.verbs.saving import Written
    from ckptool.verbs.show import Shown

LINES = 40  # of the outline of a file, unless more is asked for
WHOLE = "(the whole file)"
NAMES = 56  # columns for names; longer ones are cut on a terminal, and push their line to the right elsewhere

# inspect -------------------------------------------------------------------------------------------------------------


def inspection_text(
    found: Inspection, *, all: bool = False, sort: str = "none", depth: int | None = None, style: Style = PLAIN
) -> str:
    """What is in a file: its parts with what they look like, an outline of their tensors, notes with the commands that mend them.

    all: every tensor and entry, a line each.  sort: `name`, `size` or `none`.  depth: levels of the outline, instead of what fits.
    """
    listing = found.listing
    divided = parts(listing)
    blocks = [_heading(listing, style)]
    if found.statistics:
        blocks.append(_statistics(listing, found.statistics, sort, style))
    elif all:
        blocks.append(_everything(listing, divided, sort, style))
    else:
        blocks.append(_overview(divided, sort, depth, style))
    blocks += [_totals(listing, divided, style), notes_text(found.notes, style)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _heading(listing: Listing, style: Style) -> str:
    name = printable(listing.file) + (f"#{printable(listing.at)}" if listing.at else "")
    said = {key: value for key, value in listing.metadata.items() if listing.container != "torch-zip"}
    metadata = f", metadata {listed([f'{printable(str(k))}={_value(v)}' for k, v in said.items()], 4)}" if said else ""
    return style.bold(name) + style.fit(f": {listing.container}, {size(listing.bytes)}{metadata}", len(name))


def _totals(listing: Listing, divided: Sequence[Part], style: Style) -> str:
    if not listing.tensors:
        return style.dim("no tensors")
    tied = sum(len(part.tied) for part in divided)
    ties = f"; {counted(tied, 'name')} tied to another" if tied else ""
    where = counted(listing.storages, "storage")
    return style.dim(f"{counted(len(listing.tensors), 'tensor')} in {where}, {size(listing.tensor_bytes)}{ties}")


def notes_text(notes: Sequence[Note], style: Style = PLAIN) -> str:
    """Notes with their codes, and the command that mends each, ready to paste."""
    lines = []
    for note in notes:
        lines.append(f"{style.yellow(note.code)}: {printable(note.message)}")
        if note.fix:
            lines.append(f"  {style.cyan(printable(shlex.join(note.fix)))}")
    return "\n".join(lines)


# The overview: a line for each root, and below it an outline of what is in it


Line = tuple[str, int | None, int, str]
"""A label with its indentation, bytes (None: no bar), the width of its level, details."""


def _overview(divided: Sequence[Part], order: str, depth: int | None, style: Style) -> str:
    alike = {} if depth is not None else like_others(divided)
    shown = [part for part in divided if _has_outline(part, depth) and part not in alike]
    room = max(LINES - len(divided), 12)
    biggest = max((part.bytes for part in divided), default=0)
    lines: list[Line] = []
    for part in _arranged(divided, order):
        like = f"; names and shapes as in {root_name(alike[part])}" if part in alike else ""
        lines.append((root_name(part), part.bytes if part.rows else None, 0, root_detail(part) + like))
        if part in shown:
            lines += _branches(outline(part, room // len(shown), depth, order), 1, part)
    if len(lines) == len(divided) == 1 and divided[0].root.path == () and not divided[0].rows:
        return _flat_entries(divided[0])
    return _aligned(lines, biggest, style)


def _arranged(divided: Sequence[Part], order: str) -> Sequence[Part]:
    if order == "size":
        return sorted(divided, key=lambda part: -part.bytes)
    return sorted(divided, key=root_name) if order == "name" else divided


def _has_outline(part: Part, depth: int | None) -> bool:
    """Optimizers repeat the model's names: their one line is enough, unless a depth was asked for."""
    several = len(part.rows) > 1 or (len(part.rows) == 1 and part.rows[0].path != part.root.path)
    return several and (depth is not None or part.root.is_model or part.root.kind == PLAIN_VALUES)


def root_name(part: Part) -> str:
    return printable(part.root.address) or WHOLE


def root_detail(part: Part) -> str:
    root = part.root
    if root.kind == PLAIN_VALUES and not (part.rows and isinstance(root.node, (dict, list, tuple, Object))):
        return _value(root.node, 100)
    facts = [counted(len(part.rows), "tensor"), f"{short(part.elements)} elements", " + ".join(part.dtypes[:3])]
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


def _branches(branch: Branch, level: int, part: Part) -> Iterable[Line]:
    for child in branch.expanded:
        tied = child.leaf is not None and child.times == 1 and child.leaf in part.tied
        yield "  " * level + child.label, None if tied else child.size, level, branch_detail(child, part)
        yield from _branches(child, level + 1, part)
    if branch.hidden:
        yield "  " * level + "…", None, level, f"{branch.hidden:,} more (--all lists them)"


def branch_detail(branch: Branch, part: Part) -> str:
    leaf = branch.leaf
    if leaf is None:
        return counted(branch.tensors, "tensor")
    text = _tensor(part.rows[leaf].tensor, part)
    if branch.times > 1:
        return f"{branch.times:,} × {text}"
    return f"{text}, tied to {printable(part.rows[part.tied[leaf]].address)}" if leaf in part.tied else text


def _tensor(tensor: Tensor, part: Part | None = None) -> str:
    """`f32 [64, 3, 7, 7]`, with what is unusual about it."""
    extra = []
    if tensor.location != "cpu" and (part is None or len(part.locations) > 1):
        extra.append(printable(tensor.location))
    kind = "" if isinstance(tensor, TensorEntry) else f"{printable(tensor.kind)} "
    shape = "" if tensor.shape is None else str(list(tensor.shape))
    return f"{kind}{tensor.dtype.name if tensor.dtype else '?'} {shape}".rstrip() + "".join(
        f", {word}" for word in extra
    )


def _aligned(lines: Sequence[Line], biggest: int, style: Style) -> str:
    names = max((len(label) for label, *_ in lines), default=0)
    width = style.width
    names = min(names, NAMES, max((width or 1_000) - 40, 12))
    sizes = max((len(size(nbytes)) for _, nbytes, _, _ in lines if nbytes is not None), default=0)
    barred = 0 if not sizes else BAR if width is None or width >= 100 else BAR // 2
    result = []
    for label, nbytes, level, detail in lines:
        name = label if width is None or len(label) <= names else label[: names - 1] + "…"
        left = f"{name.ljust(names)}  "
        if sizes:
            left += f"{'' if nbytes is None else size(nbytes):>{sizes}}  "
        drawn = bar(nbytes or 0, biggest, barred)
        used = len(left) + (barred + 2 if barred else 0)
        start = (style.bold(name) if level == 0 else name) + left[len(name) :] + style.blue(drawn)
        start += " " * (used - len(left) - len(drawn))
        if level:
            result.append((start + style.dim(style.fit(detail, used))).rstrip())
        else:
            result.append((start + _wrapped(detail, used, width)).rstrip())
    return "\n".join(result)


def _wrapped(text: str, used: int, width: int | None) -> str:
    """The text in the columns that are left of a line, going on below where it is too long."""
    if width is None or used + len(text) <= width:
        return text
    from textwrap import wrap

    return ("\n" + " " * used).join(wrap(text, max(width - used, 20)))


def _flat_entries(part: Part) -> str:
    """A file of plain values: its entries, as far as they fit."""
    rows = [(printable(segment_text(key)), _value(value)) for key, value in islice(children(part.root.node), LINES + 1)]
    if not rows:
        return _value(part.root.node)
    return "\n".join([*columns(rows[:LINES], indent=""), *(["…  (--all lists everything)"] if rows[LINES:] else [])])


# Everything


def _everything(listing: Listing, divided: Sequence[Part], order: str, style: Style) -> str:
    tied = {id(part.rows[i]): part.rows[before] for part in divided for i, before in part.tied.items()}
    tensors = _sorted_rows(listing.tensors, order)
    rows = [(printable(row.address) or WHOLE, *_tensor_cells(row, tied.get(id(row)))) for row in tensors]
    blocks = ["\n".join(columns(rows, right=(3,), indent=""))] if rows else []
    entries = [(printable(row.address) or WHOLE, _value(row.value)) for row in _sorted_entries(listing.entries, order)]
    blocks += ["\n".join([style.bold("entries"), *columns(entries)])] if entries else []
    return "\n\n".join(blocks)


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


def _sorted_rows(rows: Sequence[TensorRow], order: str) -> Sequence[TensorRow]:
    if order == "size":
        return sorted(rows, key=lambda row: -row.tensor.nbytes)
    return sorted(rows, key=lambda row: row.address) if order == "name" else rows


def _sorted_entries(rows: Sequence[EntryRow], order: str) -> Sequence[EntryRow]:
    return sorted(rows, key=lambda row: row.address) if order == "name" else rows


def _statistics(listing: Listing, found: dict[str, Statistics], order: str, style: Style) -> str:
    heads = ("", "dtype", "shape", "min", "max", "mean", "std", "norm", "zeros", "NaN", "Inf")
    rows = [heads]
    for row in _sorted_rows(listing.tensors, order):
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


# show ----------------------------------------------------------------------------------------------------------------

SHOWN_LINES = 1_000


def shown_text(shown: Shown, *, all: bool = False, style: Style = PLAIN) -> str:
    """One entry of a file: a tensor's type, shape and values, or a plain value, with everything below it."""
    entry = shown.entry
    name = printable(shown.address) or printable(shown.file)
    if isinstance(entry, (TensorEntry, Composite)):
        part = f"[{printable(shown.slice)}]" if shown.slice else ""
        head = f"{style.bold(name)}{part}: {_tensor(entry)}, {size(entry.nbytes)}"
        return f"{head}\n{_array_text(shown, style)}" if shown.values is not None else f"{head}\n"
    return "\n".join(_value_lines(entry, SHOWN_LINES if not all else None)) + "\n"


def _array_text(shown: Shown, style: Style) -> str:
    import numpy

    values = shown.values
    assert values is not None
    limit = 0 if shown.edges else values.size + 1
    edge = 3 if values.ndim <= 2 else 2
    text = numpy.array2string(
        values, threshold=limit, edgeitems=edge, max_line_width=style.width or 120, separator=", "
    )
    return text + "\n" + ("… stands for values that were not read: --all, or --slice\n" if shown.edges else "")


def _value_lines(value: Any, limit: int | None) -> Iterable[str]:
    from ckptool.plain import Array, plain

    value = plain(value)
    if isinstance(value, str):
        yield from (printable(line) for line in value.split("\n"))
        return
    if isinstance(value, Array):
        yield _value(value, None)
        items = value.values()
        yield from () if items is None else (listed([_value(item, None) for item in items], limit or len(items)),)
        return
    if not isinstance(value, (dict, list, tuple, Set, Object)) or not value:
        yield _value(value, None)
        return
    for count, (path, node) in enumerate(walk(value)):
        if limit is not None and count > limit:
            yield "… and more (--all)"
            return
        if path:
            below = isinstance(node, (dict, list, tuple)) and node and not _flat(node)
            if len(path) > 1 and _inside_flat(value, path):
                continue
            label = "  " * (len(path) - 1) + (printable(segment_text(path[-1])) or "''")
            yield f"{label}:" if below else f"{label}: {_value(node, None)}"


def _flat(node: Any) -> bool:
    """True for a short list of scalars, which is shown in one line."""
    return (
        isinstance(node, (list, tuple))
        and len(node) <= 8
        and all(x is None or isinstance(x, (str, int, float)) for x in node)
    )


def _inside_flat(value: Any, path: Sequence[Any]) -> bool:
    for segment in path[:-1]:
        try:
            value = value[segment]
        except (TypeError, LookupError):
            return False
    return _flat(value)


# diff ----------------------------------------------------------------------------------------------------------------


def diff_text(found: Diff, *, stat: bool = False, name_only: bool = False, style: Style = PLAIN) -> str:
    """The verdict, then every difference in groups. stat: counts only.  name_only: nothing but the addresses that differ."""
    if name_only:
        return "".join(f"{name}\n" for name in _differing(found))
    blocks = [[_verdict(found, style)], [printable(remark) for remark in found.remarks]]
    blocks += [_stat(found)] if stat else _differences(found, style)
    blocks.append(_reservations(found))
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _differing(found: Diff) -> Iterable[str]:
    names = [change.address for change in found.changed]
    names += [address(path) for path, _ in (*found.only_left, *found.only_right)]
    names += [name for _, tied in found.ties for name in tied] + list(found.order_differs)
    return dict.fromkeys(printable(name) or WHOLE for name in names)


_EVIDENCE = {
    "bytes": "byte for byte",
    "stored checksums": "by their stored checksums (not read)",
    "values": "by their values",
    "values within the tolerance": "within the tolerance",
}


def _verdict(found: Diff, style: Style) -> str:
    if found.same:
        return f"{style.green('same')}: {counted(found.tensors, 'tensor')}, {_EVIDENCE.get(found.evidence, found.evidence)}"
    tensors = sum(1 for change in found.changed if _is_tensor(change.left))
    facts = [f"{tensors:,} of {counted(found.tensors, 'tensor')} changed"] if tensors else []
    entries = len(found.changed) - tensors
    facts += [f"{counted(entries, 'entry', 'entries')} changed"] if entries else []
    facts += [f"{len(found.only_left):,} only in {printable(found.left)}"] if found.only_left else []
    facts += [f"{len(found.only_right):,} only in {printable(found.right)}"] if found.only_right else []
    facts += ["other ties"] if found.ties else []
    facts += ["another order"] if found.order_differs else []
    equal = f"; {counted(found.equal, 'tensor')} the same, {_EVIDENCE.get(found.evidence, found.evidence)}"
    return f"{style.red('differ')}: {', '.join(facts)}{equal if found.equal else ''}"


def _is_tensor(node: Any) -> bool:
    return isinstance(node, (TensorEntry, Composite))


def _differences(found: Diff, style: Style) -> list[list[str]]:
    blocks = [
        _only(f"only in {printable(found.left)}", found.only_left, style),
        _only(f"only in {printable(found.right)}", found.only_right, style),
        _aspects(found, style),
        _values_table(found, style),
        _entries_changed(found, style),
    ]
    ties = [
        f"  tied only in {printable(found.left if side == 'left' else found.right)}: {listed([printable(n) for n in names], 20)}"
        for side, names in found.ties
    ]
    order = [f"  {printable(name) or WHOLE}: the same keys in another order" for name in found.order_differs]
    blocks += [[style.bold("ties"), *ties] if ties else [], [style.bold("order"), *order] if order else []]
    return blocks


def _only(title: str, entries: Sequence[tuple[Any, Any]], style: Style) -> list[str]:
    rows = [
        (printable(address(path)) or WHOLE, _tensor(node) if _is_tensor(node) else _value(node))
        for path, node in entries
    ]
    return [style.bold(f"{title} ({len(rows):,})"), *columns(rows)] if rows else []


def _aspects(found: Diff, style: Style) -> list[str]:
    """Shapes, types, devices and the like, old and new."""
    rows = []
    for change in found.changed:
        texts = [
            f"{name} {_side(old)} → {_side(new)}"
            for name, (old, new) in change.aspects.items()
            if name not in ("values", "value")
        ]
        if texts:
            rows.append((printable(change.address) or WHOLE, ", ".join(texts)))
    return [style.bold(f"other than by value ({len(rows):,})"), *columns(rows)] if rows else []


def _side(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else printable(str(value))


def _values_table(found: Diff, style: Style) -> list[str]:
    rows = []
    for change in found.changed:
        values, name = change.values, printable(change.address) or WHOLE
        if "values" not in change.aspects or not _is_tensor(change.left):
            continue
        if values is None:
            rows.append((name, "differ", "", "", "", "", ""))
            continue
        share = f"{values.changed:,} of {values.total:,}"
        cosine = "–" if values.cosine is None else f"{values.cosine:.6f}"
        at = "" if values.first is None else str(list(values.first))
        rows.append((name, share, number(values.max_abs), number(values.max_rel), number(values.mean_rel), cosine, at))
    if not rows:
        return []
    title = f"values ({len(rows):,})"
    if all(row[1] == "differ" for row in rows):
        return [style.bold(title), *(f"  {row[0]}" for row in rows)]
    heads = ("", "elements changed", "max |a-b|", "max rel", "mean rel", "cosine", "first at")
    head, *lines = columns([heads, *rows], right=(1, 2, 3, 4, 5))
    return [style.bold(title) + style.dim(head[len(title) :]) if head[: len(title)].isspace() else head, *lines]


def _entries_changed(found: Diff, style: Style) -> list[str]:
    rows = []
    for change in found.changed:
        if "value" in change.aspects or ("values" in change.aspects and not _is_tensor(change.left)):
            rows.append((printable(change.address) or WHOLE, f"{_entry(change.left)} → {_entry(change.right)}"))
    return [style.bold(f"entries ({len(rows):,})"), *columns(rows)] if rows else []


def _entry(value: Any) -> str:
    return _tensor(value) if _is_tensor(value) else _value(value)


def _stat(found: Diff) -> list[str]:
    """How many things differ in what."""
    counts: dict[str, int] = {}
    for change in found.changed:
        for name in change.aspects:
            counts[name] = counts.get(name, 0) + 1
    rows = [
        (f"only in {printable(found.left)}", len(found.only_left)),
        (f"only in {printable(found.right)}", len(found.only_right)),
    ]
    rows += [(_ASPECTS.get(name, name), count) for name, count in counts.items()]
    rows += [("ties", len(found.ties)), ("order", len(found.order_differs))]
    changed = [(change, change.values.max_abs or 0) for change in found.changed if change.values is not None]
    lines = columns([(name, f"{count:,}") for name, count in rows if count], right=(1,)) if not found.same else []
    if changed:
        worst, most = max(changed, key=lambda pair: pair[1])
        lines.append(f"  largest difference: {number(most)} in {printable(worst.address) or WHOLE}")
    return lines


_ASPECTS = {"value": "plain entries", "values": "values of tensors"}


def _reservations(found: Diff) -> list[str]:
    """What the verdict does not speak of, and a way to ask a better question."""
    lines = (
        [f"not compared (a container here cannot say it): {', '.join(found.not_compared)}"]
        if found.not_compared
        else []
    )
    lines += [f"ignored: {', '.join(found.ignored)}"] if found.ignored else []
    if found.only_left and found.only_right and "prefix" not in found.ignored:
        left, right = (
            {_bare(path) for path, node in side if _is_tensor(node)} for side in (found.only_left, found.only_right)
        )
        if left and left == right:
            lines.append("the names differ only by a wrapper's prefix: --ignore prefix compares what they name")
    return lines


def _bare(path: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(without_wrappers(segment) if isinstance(segment, str) else segment for segment in path)


# What verbs wrote ----------------------------------------------------------------------------------------------------


def written_text(written: Written, style: Style = PLAIN) -> str:
    """What a verb wrote, or would write: one line, then details and notes."""
    facts = [size(written.file_bytes), "in place" if written.how == "in place" else written.how]
    if written.how == "in place":
        facts[1] = f"in place, {written.bytes_written:,} bytes {'to be ' if written.dry_run else ''}added"
    if written.how == "nothing":
        facts[1] = "unchanged"
    facts += ["verified"] if written.verified else []
    where = f"{printable(written.output)} ({', '.join(facts)})"
    verb = style.bold(written.verb)
    if written.dry_run:
        lines = [f"{verb}: {written.summary}; would be written to {where}", "  dry run: nothing was written"]
    else:
        lines = [f"{verb}: {written.summary} → {where}"]
    lines += [f"  {line}" for line in written.details]
    notes = notes_text(written.notes, style)
    return "\n".join([*lines, *([notes] if notes else [])]) + "\n"


# Errors --------------------------------------------------------------------------------------------------------------


def error_text(error: CkptoolError, style: Style = PLAIN) -> str:
    """What happened, what it means, what to type: a line each."""
    lines = [f"{style.red(f'error[{error.code}]')}: {printable(error.what)}"]
    lines += [f"  {printable(error.why)}"] if error.why else []
    lines += [f"  {style.cyan(printable(error.fix))}"] if error.fix else []
    return "\n".join(lines) + "\n"


# Values --------------------------------------------------------------------------------------------------------------


def _value(value: Any, width: int | None = 60) -> str:
    """A value of a file in one line. Small dictionaries are written out."""
    if value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() < 1024):
        return str(value)
    from ckptool.plain import plain, summary

    wide = width or 1_000_000
    if isinstance(value, Object):
        value = plain(value)
    if width is not None and isinstance(value, dict) and 0 < len(value) <= 8:
        text = ", ".join(f"{printable(segment_text(key))}: {summary(item, 24)}" for key, item in value.items())
        if len(text) <= width:
            return f"{{{text}}}"
    return summary(value, wide)
