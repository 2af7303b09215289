"""What is in a checkpoint: every tensor and plain entry, the parts that they form, and what one should know about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Note, Tensor, TensorEntry
from ckptool.errors import listed, printable
from ckptool.nodes import Object, Set
from ckptool.prefixes import COUNTER, wrappers
from ckptool.roots import Root, find_roots
from ckptool.tree import Path, address, find, unknown_calls, walk

WASTE_WORTH_A_NOTE = 1 << 16


# Rows are not frozen, though nobody assigns to them: there is one for each tensor, and making a frozen object takes four times as long.


@dataclass(slots=True, eq=False)
class TensorRow:
    """A tensor at one place in the tree. `storage` numbers storages from 0 in the order in which they are met; None for composites."""

    path: Path
    tensor: Tensor
    storage: int | None

    @property
    def address(self) -> str:
        return address(self.path)


@dataclass(slots=True, eq=False)
class EntryRow:
    """A value that is no tensor, at one place in the tree."""

    path: Path
    value: Any

    @property
    def address(self) -> str:
        return address(self.path)


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The contents of a checkpoint. `at` is the address that was asked for; sizes are in bytes.

    tensor_bytes: what the storages that the tensors use take up, each counted once.
    """

    file: str
    container: str
    bytes: int
    at: str
    tree: Any
    tensors: tuple[TensorRow, ...]
    entries: tuple[EntryRow, ...]
    roots: tuple[Root, ...]
    notes: tuple[Note, ...]
    storages: int
    tensor_bytes: int
    metadata: dict[str, Any]


def listing(checkpoint: Checkpoint, at: str = "") -> Listing:
    """What is in a checkpoint, or in the part at an address. Reads no tensor data."""
    base, tree = find(checkpoint.tree, at)
    rows: list[TensorRow] = []
    entries: list[EntryRow] = []
    numbers: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for below, node in walk(tree):
        path = base + below
        if isinstance(node, TensorEntry):
            number = numbers.setdefault(id(node.storage), len(numbers))
            sizes[number] = node.storage.nbytes
            rows.append(TensorRow(path, node, number))
        elif isinstance(node, Composite):
            for part in node.parts():
                sizes[numbers.setdefault(id(part.storage), len(numbers))] = part.storage.nbytes
            rows.append(TensorRow(path, node, None))
        elif _is_leaf(node):
            entries.append(EntryRow(path, node))
    source = checkpoint.source
    roots = tuple(replace(root, path=base + root.path) for root in find_roots(replace(checkpoint, tree=tree)))
    return Listing(
        source.path if source else "",
        checkpoint.container,
        source.size if source else 0,
        at,
        tree,
        tuple(rows),
        tuple(entries),
        roots,
        tuple(_notes(checkpoint, roots, rows)),
        len(numbers),
        sum(sizes.values()),
        dict(checkpoint.metadata),
    )


def _is_leaf(node: Any) -> bool:
    if isinstance(node, (dict, list, tuple)):
        return not node
    return (
        not isinstance(node, Set)
        if not isinstance(node, Object)
        else not (node.items or node.elements or node.attributes)
    )


# Notes ---------------------------------------------------------------------------------------------------------------


def _notes(checkpoint: Checkpoint, roots: tuple[Root, ...], rows: list[TensorRow]) -> Iterator[Note]:
    yield from _prefix_notes(roots)
    yield from _device_notes(rows)
    calls = unknown_calls(checkpoint)
    if calls:
        names = sorted({printable(call.name) for _, call in calls})
        yield Note(
            "unsafe-global",
            f"loading it with pickle would call {listed(names)} (first at {printable(calls[0][0]) or 'the top'}); ckptool does not",
        )
    yield from _waste_notes(rows)
    yield from checkpoint.notes


def _prefix_notes(roots: tuple[Root, ...]) -> Iterator[Note]:
    fix: tuple[str, ...] = ("ckptool", "strip-module", "{file}", "-o", "{out}")
    found: list[tuple[str, str]] = []
    for root in roots:
        names = [name for name in root.node if type(name) is str and name != COUNTER] if root.is_model else []
        kinds = Counter(kind for name in names if (kind := wrappers(name)))
        if not kinds:
            continue
        having = sum(count for kind, count in kinds.items() if "module" in kind.split("."))
        if 0 < having < len(names) and "--partial" not in fix:
            fix += ("--partial",)  # the command is one for all roots
        where = f"{sum(kinds.values()):,} of {len(names):,} keys of {printable(root.address) or 'the file'}"
        message = f"{where} carry a wrapper's {listed(sorted(kinds))}"
        found.append(("prefix-module" if having else "prefix-compiled", message))
    yield from (Note(code, message, fix) for code, message in found)


def _device_notes(rows: list[TensorRow]) -> Iterator[Note]:
    places = Counter(row.tensor.location for row in rows)
    elsewhere = {place: count for place, count in places.items() if place not in ("cpu", "meta")}
    if elsewhere:
        kind = (
            "cuda" if any(place.startswith("cuda") for place in elsewhere) else next(iter(elsewhere)).partition(":")[0]
        )
        facts = listed([f"{count:,} on {printable(place)}" for place, count in sorted(elsewhere.items())])
        fix = ("ckptool", "remap", "{file}", "--to", "cpu", "-o", "{out}")
        yield Note(
            "cuda-location" if kind == "cuda" else "device-location",
            f"tensors are tagged {facts}; a machine without it needs map_location",
            fix,
        )


def _waste_notes(rows: list[TensorRow]) -> Iterator[Note]:
    """Storages of which the tensors show only a part, as slices do that were saved without `.clone()`."""
    shown: dict[int, int] = {}
    totals: dict[int, int] = {}
    for row in rows:
        entry = row.tensor
        if isinstance(entry, TensorEntry) and row.storage is not None and entry.storage.nbytes != entry.nbytes:
            first, last = entry.span()
            shown[row.storage] = shown.get(row.storage, 0) + min(entry.nbytes, last - first)
            totals[row.storage] = entry.storage.nbytes
        elif row.storage is not None:
            shown[row.storage] = row.tensor.nbytes
    waste = sum(max(0, total - shown[number]) for number, total in totals.items())
    if waste >= WASTE_WORTH_A_NOTE:
        count = sum(1 for number, total in totals.items() if shown[number] < total)
        yield Note("wasted-storage", f"{waste:,} bytes in {count:,} storages are behind no tensor (slices saved whole)")
