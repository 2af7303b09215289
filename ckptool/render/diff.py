"""Renders `diff` as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.registry import provides
from ckptool.checkpoint.state_dicts import without_wrappers
from ckptool.checkpoint.tree import Path, address
from ckptool.errors import counted, listed, printable
from ckptool.pickles.plain.text import to_json
from ckptool.render.json import Json, fields_json, finite, path_json, type_name
from ckptool.render.style import PLAIN, WHOLE, Style, columns, number, tensor_text, value_text
from ckptool.reports.diff import Diff, Difference


@provides("text", Diff)
def diff_text(found: Diff, *, stat: bool = False, name_only: bool = False, style: Style = PLAIN) -> str:
    """The verdict, then every difference in groups.  stat: counts only.  name_only: only the addresses that differ."""
    if name_only:
        return "".join(f"{name}\n" for name in _differing(found))
    remarks = (printable(remark) for remark in found.remarks)
    blocks = [[_verdict(found, style)], [line for remark in remarks for line in style.prose(remark)]]
    blocks += [_stat(found)] if stat else _differences(found, style)
    blocks.append([line for limit in _reservations(found) for line in style.prose(limit)])
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
        evidence = _EVIDENCE.get(found.evidence, found.evidence)
        return f"{style.green('same')}: {counted(found.tensors, 'tensor')}, {evidence}"
    tensors = sum(1 for change in found.changed if _is_tensor(change.left))
    facts = [f"{tensors:,} of {counted(found.tensors, 'tensor')} changed"] if tensors else []
    entries = len(found.changed) - tensors
    facts += [f"{counted(entries, 'entry', 'entries')} changed"] if entries else []
    facts += [f"{len(found.only_left):,} only in {printable(found.left)}"] if found.only_left else []
    facts += [f"{len(found.only_right):,} only in {printable(found.right)}"] if found.only_right else []
    facts += ["different ties"] if found.ties else []
    facts += ["a different order"] if found.order_differs else []
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
    sides = {"left": printable(found.left), "right": printable(found.right)}
    ties = [f"  tied only in {sides[side]}: {listed([printable(n) for n in names], 20)}" for side, names in found.ties]
    order = [f"  {printable(name) or WHOLE}: the same keys in another order" for name in found.order_differs]
    blocks += [[style.bold("ties"), *ties] if ties else [], [style.bold("order"), *order] if order else []]
    return blocks


def _only(title: str, entries: Sequence[tuple[Any, Any]], style: Style) -> list[str]:
    rows = [
        (printable(address(path)) or WHOLE, tensor_text(node) if _is_tensor(node) else value_text(node))
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
    return tensor_text(value) if _is_tensor(value) else value_text(value)


def _stat(found: Diff) -> list[str]:
    """Counts of what differs."""
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
    """The limits of the verdict, and a better question to ask."""
    lines = (
        [f"not compared (one of the containers does not record it): {', '.join(found.not_compared)}"]
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


# JSON -----------------------------------------------------------------------------------------------------------------


@provides("json", Diff)
def diff_json(found: Diff) -> Json:
    """`ckptool.diff/1`: the verdict, what it rests on, and every difference."""
    return {
        "schema": "ckptool.diff/1",
        **fields_json(found, "left right same evidence tensors equal"),
        "changed": [_change_json(change) for change in found.changed],
        "only_left": [_only_json(path, node) for path, node in found.only_left],
        "only_right": [_only_json(path, node) for path, node in found.only_right],
        "ties": [{"side": side, "names": list(names)} for side, names in found.ties],
        "order": list(found.order_differs),
        **fields_json(found, "ignored not_compared remarks"),
    }


def _change_json(change: Difference) -> Json:
    aspects = {
        name: None if name == "values" else [_aspect(name, side) for side in sides]
        for name, sides in change.aspects.items()
    }
    values = None if change.values is None else finite(asdict(change.values))
    return {"path": path_json(change.path), "address": change.address, "aspects": aspects, "values": values}


def _aspect(name: str, value: Any) -> Any:
    if name == "value":
        return to_json(value)
    if isinstance(value, (tuple, list)):
        return list(value)
    return value if value is None or isinstance(value, (bool, str)) else str(value)


def _only_json(path: Path, node: Any) -> Json:
    fact: Json = {"path": path_json(path), "address": address(path)}
    if isinstance(node, (TensorEntry, Composite)):
        shape = None if node.shape is None else list(node.shape)
        return fact | {"dtype": node.dtype.name if node.dtype else None, "shape": shape, "nbytes": node.nbytes}
    return fact | {"type": type_name(node)}
