"""Renders `diff` as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Annotated, Any, TypeVar

from ckptool.analysis.compare import ValueDifference
from ckptool.analysis.diff import Diff, Difference
from ckptool.analysis.fold import grouped
from ckptool.analysis.words import path_json, tensor_text, type_name, value_text
from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.registry import provides
from ckptool.checkpoint.state_dicts import bare
from ckptool.checkpoint.tree import Path, address
from ckptool.errors import counted, listed, printable
from ckptool.facts import number
from ckptool.options import option
from ckptool.pickles.plain.text import to_json
from ckptool.render.json import Json, fields_json, finite
from ckptool.render.style import PLAIN, WHOLE, Style, columns

STRIP, LAYERS = "▁▂▃▄▅▆▇█", 48  # levels of change; characters at most
Item = TypeVar("Item")
Members = Mapping[str, Sequence[Difference]]  # changed tensors by their addresses


@provides("text", Diff)
def diff_text(
    found: Diff,
    *,
    counts: Annotated[bool, option("--stat", "Print only counts.")] = False,
    all: Annotated[bool, option("--all", "A row for each tensor, instead of groups.")] = False,
    quiet: Annotated[bool, option("-q --quiet", "Print nothing; only set the exit code.")] = False,
    style: Style = PLAIN,
) -> str:
    """The verdict, then every difference in groups.

    counts: only these.  all: a row for each.  quiet: nothing.
    """
    if quiet:
        return ""
    remarks = [printable(remark) for remark in found.remarks]
    places = {"the order of keys": found.order_differs, "_metadata": found.metadata_differs}
    for what, names in places.items() if not found.strict else ():
        if names:
            where = listed([printable(name) or WHOLE for name in names], 3)
            remarks.append(f"{what} differs in {where}; this counts only with --strict")
    if differs_by_prefix(found):
        remarks.append("the names differ only by a wrapper's prefix: --ignore prefix compares what they name")
    verdict, *facts = style.prose(_verdict(found))
    word, colon, rest = verdict.partition(":")
    blocks = [
        [(style.green if found.same else style.red)(word) + colon + rest, *facts],
        [line for remark in remarks for line in style.prose(remark)],
    ]
    blocks += [_stat(found)] if counts else _differences(found, style, all)
    blocks.append([line for limit in _reservations(found) for line in style.prose(limit)])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


EVIDENCE = {
    "bytes": "byte for byte",
    "values": "by their values",
    "values within the tolerance": "within the tolerance",
}


def _verdict(found: Diff) -> str:
    if found.same:
        evidence = EVIDENCE.get(found.evidence, found.evidence)
        same = "same in what matches" if found.only else "same"
        return f"{same}: {counted(found.tensors, 'tensor')}, {evidence}"
    tensors = sum(1 for change in found.changed if _is_tensor(change.left))
    facts = [f"{tensors:,} of {counted(found.tensors, 'tensor')} changed"] if tensors else []
    entries = len(found.changed) - tensors
    facts += [f"{counted(entries, 'entry', 'entries')} changed"] if entries else []
    facts += [f"{len(found.only_left):,} only in {printable(found.left)}"] if found.only_left else []
    facts += [f"{len(found.only_right):,} only in {printable(found.right)}"] if found.only_right else []
    facts += ["different ties"] if found.ties else []
    facts += ["a different order"] if found.order_differs and found.strict else []
    equal = f"; {counted(found.equal, 'tensor')} the same, {EVIDENCE.get(found.evidence, found.evidence)}"
    return f"differ: {', '.join(facts)}{equal if found.equal else ''}"


def _is_tensor(node: Any) -> bool:
    return isinstance(node, (TensorEntry, Composite))


def _differences(found: Diff, style: Style, all: bool) -> list[list[str]]:
    blocks = [
        _block(f"only in {printable(found.left)}", only_rows(found.only_left), style, all),
        _block(f"only in {printable(found.right)}", only_rows(found.only_right), style, all),
        _block("other than by value", aspect_rows(found), style, all),
        _values_table(found, style, all),
        _block("entries", entry_rows(found), style, all),
    ]
    sides = {"left": printable(found.left), "right": printable(found.right)}
    ties = [f"  tied only in {sides[side]}: {listed([printable(n) for n in names], 20)}" for side, names in found.ties]
    others = found.order_differs if found.strict else ()
    order = [f"  {printable(name) or WHOLE}: the same keys in another order" for name in others]
    for title, texts in (("ties", ties), ("order", order)):
        lines = [line for text in texts for line in style.prose(text, "    ")]
        blocks.append([style.bold(title), *lines] if lines else [])
    return blocks


def only_rows(entries: Iterable[tuple[Path, Any]]) -> list[tuple[str, str]]:
    """What is in one file only: its address, and what it is."""
    return [(address(path), _entry(node)) for path, node in entries]


def aspect_rows(found: Diff) -> list[tuple[str, str]]:
    """Shapes, types, devices and the like, old and new."""
    rows = []
    for change in found.changed:
        texts = [
            f"{name} {_side(old)} → {_side(new)}"
            for name, (old, new) in change.aspects.items()
            if name not in ("values", "value")
        ]
        if texts:
            rows.append((change.address, ", ".join(texts)))
    return rows


def _side(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else printable(str(value))


def entry_rows(found: Diff) -> list[tuple[str, str]]:
    """What is no tensor on both sides, old and new."""
    rows = []
    for change in found.changed:
        if "value" in change.aspects or ("values" in change.aspects and not _is_tensor(change.left)):
            sides = [_entry(node) for node in (change.left, change.right)]
            if sides[0] == sides[1]:
                sides = [f"{sides[0]} ({type_name(node)})" for node in (change.left, change.right)]
            rows.append((change.address, " → ".join(sides)))
    return rows


def _entry(value: Any) -> str:
    return tensor_text(value) if _is_tensor(value) else value_text(value)


def _block(title: str, rows: Sequence[tuple[str, str]], style: Style, all: bool) -> list[str]:
    """Names with a text each; those with the same text in groups, unless `all` are to be shown."""
    cells = [(_shown(name), text) for name, text in rows] if all else grouped_rows(rows)
    return [style.bold(f"{title} ({len(rows):,})"), *style.table(cells)] if rows else []


def grouped_rows(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names with a text each: those with the same text in groups, with their number."""
    by_text: dict[str, list[tuple[str, None]]] = {}
    for name, text in rows:
        by_text.setdefault(text, []).append((name, None))
    return [
        (_shown(group) + (f"  ({len(members):,})" if len(members) > 1 else ""), text)
        for text, names in by_text.items()
        for group, members in folded(names)
    ]


def _shown(name: str) -> str:
    return printable(name) or WHOLE


def folded(rows: Iterable[tuple[str, Item]]) -> list[tuple[str, dict[str, list[Item]]]]:
    """What has a name each, in groups of names: the text of each group, and all that it stands for."""
    by_name: dict[str, list[Item]] = {}
    for name, item in rows:
        by_name.setdefault(name, []).append(item)
    return [(group.text, {key: by_name[key] for key in group.keys}) for group in grouped(by_name)]


# Values ---------------------------------------------------------------------------------------------------------------


def tensors_changed(found: Diff) -> list[tuple[str, Difference]]:
    """The tensors whose values differ, by their addresses."""
    return [(each.address, each) for each in found.changed if "values" in each.aspects and _is_tensor(each.left)]


def _values_table(found: Diff, style: Style, all: bool) -> list[str]:
    """A row for each tensor, or for each group of tensors where those are fewer."""
    rows = tensors_changed(found)
    groups = [] if all else folded(rows)
    if not rows:
        return []
    title, counted_ones = f"values ({len(rows):,})", [change.values for _, change in rows if change.values is not None]
    if not counted_ones:
        return _block("values", [(name, "") for name, _ in rows], style, all)
    if all or len(groups) == len(rows):
        heads: Sequence[str] = ("", "elements changed", "max |a-b|", "max rel", "mean rel", "cosine", "first at")
        cells = [(_shown(name), *_facts(change.values)) for name, change in rows]
        lines = style.table([heads, *cells], right=range(1, 6), title=title)
    else:
        top = max((values.mean_rel or 0 for values in counted_ones), default=0)
        heads = ("", "tensors", "elements changed", "max |a-b|", "cosine", "change")
        cells = [(_shown(text), *group_facts(members, top)) for text, members in groups]
        lines = style.table([heads, *cells], right=range(1, 5), title=title)
        scale = f"change: mean |a-b| / max(|a|, |b|) of each layer or member in turn, from 0 (▁) to {number(top)} (█)"
        lines += [style.dim(line) for line in style.prose(f"  {scale}; each tensor: --all", "    ")]
    if found.changed_elements:
        share = f"{100 * found.changed_elements / max(found.elements, 1):.3g} %"
        lines.append(f"  {found.changed_elements:,} of {counted(found.elements, 'element')} changed ({share})")
    if any(values.max_abs == inf for values in counted_ones):
        lines += style.prose("  inf: NaN or infinite on one side only; cosine and relative change leave it out", "    ")
    return lines


def _facts(values: ValueDifference | None) -> tuple[str, ...]:
    if values is None:
        return "differ", "", "", "", "", ""
    share = f"{values.changed:,} of {values.total:,}"
    at = "" if values.first is None else str(list(values.first))
    return share, *map(number, (values.max_abs, values.max_rel, values.mean_rel)), _cosine(values.cosine), at


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.6f}"


def group_facts(members: Members, top: float) -> tuple[str, ...]:
    """The number of tensors, what changed in them together, the range of their cosines, and the strip of change."""
    all_values = [change.values for changes in members.values() for change in changes]
    values = [each for each in all_values if each is not None]
    if not values:
        return f"{len(all_values):,}", "differ", "", "", ""
    share = f"{sum(each.changed for each in values):,} of {sum(each.total for each in values):,}"
    most = max((each.max_abs for each in values if each.max_abs is not None), default=None)
    cosines = [each.cosine for each in values if each.cosine is not None]
    cosine = " to ".join(dict.fromkeys(map(_cosine, (min(cosines), max(cosines))))) if cosines else "–"
    if cosines and len(cosines) < len(values):
        cosine += f" ({len(values) - len(cosines):,} without)"
    return f"{len(all_values):,}", share, number(most), cosine, _strip(members, top)


def _strip(members: Members, top: float) -> str:
    """A character for each layer: for each part in which the names differ first, or for several in a row."""
    pieces = [name.split(".") for name in members]
    first = next((at for at, same in enumerate(zip(*pieces, strict=False)) if len({*same}) > 1), 0)
    layers: dict[str, list[Difference]] = {}
    for piece, changes in zip(pieces, members.values(), strict=True):
        layers.setdefault(piece[first], []).extend(changes)
    each = -(-len(layers) // LAYERS)
    parts = list(layers.values())
    parts = [[change for part in parts[i : i + each] for change in part] for i in range(0, len(parts), each)]
    strip = "".join(_level([change.values for change in part], top) for part in parts)
    return strip + (f" ({each} each)" if each > 1 else "") if len(parts) > 1 else ""


def _level(values: Sequence[ValueDifference | None], top: float) -> str:
    known = [(each.mean_rel, each.total) for each in values if each is not None and each.mean_rel is not None]
    if not known:
        return "?"
    mean = sum(value * total for value, total in known) / max(sum(total for _, total in known), 1)
    return STRIP[min(int(8 * mean / top), 7)] if top else STRIP[0]


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
    if found.only:
        patterns = listed([printable(pattern) for pattern in found.only], 20)
        lines.append(f"compared only what matches {patterns}; nothing else was read, and no ties were looked for")
    return lines


def differs_by_prefix(found: Diff) -> bool:
    """True if the names of what is in one file only differ by nothing but a wrapper's prefix."""
    sides = (found.only_left, found.only_right)
    left, right = ({bare(path) for path, node in side if _is_tensor(node)} for side in sides)
    return bool(left) and left == right and "prefix" not in found.ignored


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
        **fields_json(found, "ties:side,names order=order_differs metadata=metadata_differs ignored not_compared"),
        **fields_json(found, "remarks strict only elements changed_elements"),
    }


def _change_json(change: Difference) -> Json:
    aspects = {
        name: None if name == "values" else [_aspect(name, side) for side in sides]
        for name, sides in change.aspects.items()
    }
    facts = {"path": path_json(change.path), "address": change.address, "aspects": aspects}
    return {**facts, "values": finite(change.values)}


def _aspect(name: str, value: Any) -> Any:
    if name == "value":
        return to_json(value)
    if isinstance(value, (tuple, list)):
        return list(value)
    return value if value is None or isinstance(value, (bool, str)) else str(value)


def _only_json(path: Path, node: Any) -> Json:
    fact: Json = {"path": path_json(path), "address": address(path)}
    if isinstance(node, (TensorEntry, Composite)):
        return fact | fields_json(node, "dtype shape nbytes")
    return fact | {"type": type_name(node)}
