"""Every tensor and plain entry of a checkpoint, the parts that they form, and what one should know about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from ckptool.analysis.quantization import quantized_notes
from ckptool.checkpoint import Checkpoint, Composite, Note, PartOf, Tensor, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.graph import SCALARS
from ckptool.checkpoint.nodes import Object, Set
from ckptool.checkpoint.patterns import selected
from ckptool.checkpoint.registry import Report
from ckptool.checkpoint.state_dicts import (
    COUNTER,
    OPTIMIZER,
    StateDict,
    array_state_dicts,
    find_state_dicts,
    unnamed_tensors,
    without_wrappers,
    wrappers,
)
from ckptool.checkpoint.tree import MANY_NAMES, Path, address, check_names, children, find, storages, stored_parts, walk
from ckptool.commands import FILE, OUT, OUT_SAFETENSORS, Command, command
from ckptool.errors import Conflict, counted, form, listed, printable
from ckptool.formats.files_beside import all_uses, unjudged
from ckptool.formats.model_folder import ADAPTER, config_beside
from ckptool.pickles.calls import CALLED, MADE, NAMED, UNKNOWN, custom_notes
from ckptool.pickles.weights_only import takes, weights_only

if TYPE_CHECKING:
    from ckptool.analysis.statistics import Statistics

WASTE_WORTH_A_NOTE = 1 << 16
MAX_ENTRIES = 50_000  # plain values that are listed one by one
SHORT = 8  # a container of so many plain values is listed wherever it stands


# Rows are not frozen, though nobody assigns to them: there is one for each tensor, and making a frozen object takes
# four times as long.


@dataclass(slots=True, eq=False)
class TensorRow:
    """A tensor at one place in the tree. `storage`: its number, from 0 in order; None for composites."""

    path: Path
    tensor: Tensor
    storage: int | None

    @property
    def address(self) -> str:
        return address(self.path)


@dataclass(slots=True, eq=False)
class EntryRow:
    """A value other than a tensor, at one place in the tree.

    same_as: where else it stands, if it is a container with an earlier place.  repeated: a part of such a one.
    """

    path: Path
    value: Any
    same_as: Path | None = None
    repeated: bool = False

    @property
    def address(self) -> str:
        return address(self.path)


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The contents of a checkpoint. `at` is the address that was asked for; sizes are in bytes.

    tensor_bytes: what the storages that the tensors use take up, each counted once.  unlisted: plain values beyond the
    first 50,000.
    part: of what the checkpoint is only a part.  only: the patterns by which these tensors and entries were chosen.
    """

    file: str
    container: str
    bytes: int
    at: str
    tree: Any
    tensors: tuple[TensorRow, ...]
    entries: tuple[EntryRow, ...]
    roots: tuple[StateDict, ...]
    notes: tuple[Note, ...]
    storages: int
    tensor_bytes: int
    metadata: dict[str, Any]
    unlisted: int = 0
    part: PartOf | None = None
    only: tuple[str, ...] = ()

    @property
    def printed(self) -> tuple[EntryRow, ...]:
        """The entries; a container is one of them after its first place, unless `only` asked for its parts."""
        return self.entries if self.only else tuple(row for row in self.entries if not row.repeated)


def listing(checkpoint: Checkpoint, at: str = "") -> Listing:
    """The contents of a checkpoint, or of the part at an address. Reads no tensor data."""
    base, tree = find(checkpoint.tree, at)
    rows: list[TensorRow] = []
    entries: list[EntryRow] = []
    numbers: dict[int, int] = {}
    sizes: dict[int, int] = {}
    places: dict[int, Path] = {}  # of containers, the first of each
    repeat: Path | None = None
    unlisted = 0
    for below, node in walk(tree):
        path = base + below
        if repeat is not None and path[: len(repeat)] != repeat:
            repeat = None
        if isinstance(node, TensorEntry):
            number = numbers.setdefault(id(node.storage), len(numbers))
            sizes[number] = node.storage.nbytes
            rows.append(TensorRow(path, node, number))
        elif isinstance(node, Composite):
            for part in node.parts():
                sizes[numbers.setdefault(id(part.storage), len(numbers))] = part.storage.nbytes
            rows.append(TensorRow(path, node, None))
        elif _is_leaf(node):
            if len(entries) < MAX_ENTRIES:
                entries.append(EntryRow(path, node, repeated=repeat is not None))
            else:
                unlisted += 1
        elif repeat is None and places.setdefault(id(node), path) is not path and not _is_short(node):
            repeat = path
            entries.append(EntryRow(path, node, same_as=places[id(node)]))
    check_names(len(rows), len({id(row.tensor) for row in rows}) if len(rows) > MANY_NAMES else 0)
    source = checkpoint.source
    found = find_state_dicts(replace(checkpoint, tree=tree))
    roots = tuple(replace(root, path=base + root.path) for root in found) if base else tuple(found)
    rows = _with_names(rows, roots, numbers)
    return Listing(
        (source.shown if isinstance(source, Folder) else source.path) if source else "",
        checkpoint.container,
        source.size if source else sum(sizes.values()),
        at,
        tree,
        tuple(rows),
        tuple(entries),
        roots,
        tuple(_notes(checkpoint, roots, rows)),
        len(numbers),
        sum(sizes.values()),
        dict(checkpoint.metadata),
        unlisted,
        checkpoint.part,
    )


def matching_only(found: Listing, only: Sequence[str]) -> Listing:
    """The tensors and entries whose address matches one of the patterns, or whose key in its part does.

    Raises `NoMatch` naming a pattern that matches nothing.
    """
    if not only:
        return found
    paths = {root.path for root in found.roots}
    lengths = sorted({len(path) for path in paths}, reverse=True)

    def owner(row: TensorRow | EntryRow) -> Path:
        return next((row.path[:length] for length in lengths if row.path[:length] in paths), ())

    everything: list[TensorRow | EntryRow] = [*found.tensors, *found.entries]
    named = {id(row): {row.address, address(row.path[len(owner(row)) :])} for row in everything}
    chosen = selected(set().union(*named.values()), only)
    rows = tuple(row for row in found.tensors if named[id(row)] & chosen)
    entries = tuple(row for row in found.entries if named[id(row)] & chosen)
    sizes = {id(part.storage): part.storage.nbytes for row in rows for part in stored_parts(row.tensor)}
    kept = set(map(owner, rows))
    roots = tuple(root for root in found.roots if root.path in kept)
    return replace(
        found,
        tensors=rows,
        entries=entries,
        roots=roots,
        storages=len(sizes),
        tensor_bytes=sum(sizes.values()),
        only=tuple(only),
    )


ENGINE = ("engine", "ranks", "step")  # of the metadata


def engine_of(metadata: Mapping[str, Any]) -> str:
    """The program that wrote a checkpoint, on how many ranks and at which step: `accelerate, saved by 2 ranks`.

    Empty where the file does not say.
    """
    engine, ranks, step = (metadata.get(key) for key in ENGINE)
    if type(engine) is not str:
        return ""
    said = [printable(engine[:200])]
    said += [f"saved by {counted(ranks, 'rank')}"] if type(ranks) is int else []
    said += [f"step {step:,}"] if type(step) is int else []
    return ", ".join(said)


def _with_names(rows: list[TensorRow], roots: Sequence[StateDict], numbers: dict[int, int]) -> list[TensorRow]:
    """The rows with those of whole modules under the names of their state dicts, else under their addresses."""
    modules = {root.path: root for root in roots if root.module is not None}
    depths = sorted({len(path) for path in modules})
    named: list[TensorRow] = []
    begun: set[Path] = set()
    for row in rows:
        root = next((modules[row.path[:depth]] for depth in depths if row.path[:depth] in modules), None)
        if root is None:
            named.append(row)
        elif root.path not in begun:
            begun.add(root.path)
            named += [
                TensorRow(path, tensor, numbers[id(tensor.storage)] if isinstance(tensor, TensorEntry) else None)
                for path, tensor in (
                    *(((*root.path, key), value) for key, value in root.node.items()),
                    *unnamed_tensors(root),
                )
            ]
    return named


def _is_leaf(node: Any) -> bool:
    if isinstance(node, (dict, list, tuple)):
        return not node
    return (
        not (isinstance(node, Set) and node.items)
        if not isinstance(node, Object)
        else not (node.items or node.elements or node.attributes)
    )


def _is_short(node: Any) -> bool:
    """True for what is printed in every place, as the `betas` that all groups of an optimizer share."""
    parts = list(islice(children(node), SHORT + 1))
    return len(parts) <= SHORT and all(type(part) in SCALARS for _, part in parts)


# Notes ---------------------------------------------------------------------------------------------------------------


def _notes(checkpoint: Checkpoint, roots: tuple[StateDict, ...], rows: list[TensorRow]) -> Iterator[Note]:
    use = list(use_notes(checkpoint))
    refused = () if use or checkpoint.container not in _WITH_DEFAULT else _weights_only_notes(checkpoint)
    for note in (*_prefix_notes(roots), *_device_notes(rows), *refused):
        # Beside a program nothing can be changed, nor in one shard of several.
        yield replace(note, fix=()) if checkpoint.extras or (checkpoint.part and checkpoint.part.index) else note
    yield from use
    yield from _waste_notes(rows)
    yield from _adapter_notes(checkpoint, roots)
    yield from _optimizer_notes(roots)
    yield from quantized_notes(checkpoint, roots)
    if not any(root.is_model for root in roots):
        yield from _array_notes(checkpoint)
    yield from checkpoint.notes


def use_notes(checkpoint: Checkpoint) -> Iterator[Note]:
    """Notes on what loading the file would run."""
    unknown: dict[tuple[str, str], str] = {}
    for use, place in all_uses(checkpoint):
        if use.verdict == UNKNOWN:
            unknown.setdefault((use.how, use.name), place)
    if unknown:
        would = [f"{verb} {listed(names)}" for how, verb in _WOULD if (names := _names(unknown, how))]
        first = next(iter(unknown.values())) or "the top"
        yield Note(
            "unsafe-global", f"loading it with pickle would {listed(would)} (first at {first}); ckptool does not"
        )
    if names := unjudged(checkpoint):
        shown = listed(names, 4)
        what = counted(len(names), "file begins like a pickle", "files begin like pickles")
        yield Note("not-judged", f"{what} and could not be read, so nobody knows what loading would run: {shown}")
    yield from custom_notes(checkpoint)


WEIGHTS_ONLY = "weights-only"  # the code of the note on it
_WITH_DEFAULT = ("torch-zip", "torch-legacy")  # that torch.load reads with weights_only=True unless told otherwise


def _weights_only_notes(checkpoint: Checkpoint) -> Iterator[Note]:
    """The note on values that would run nothing unknown, and that torch.load refuses all the same."""
    if takes(checkpoint.tree):
        return
    fix: tuple[()] | Command = ()
    try:
        plain = weights_only(checkpoint)
        names = plain.refused
        if {id(each) for each in storages(checkpoint.tree)} == {id(each) for each in storages(plain.checkpoint.tree)}:
            fix = command("convert", FILE, weights_only=True, out=OUT)
    except Conflict:
        names = ["keys that would become the same text"]
    if names:
        shown = listed(names, 4)
        yield Note(
            WEIGHTS_ONLY,
            f"torch.load refuses it by default (weights_only=True): {shown}; nothing in it would run",
            fix,
        )


def _adapter_notes(checkpoint: Checkpoint, roots: tuple[StateDict, ...]) -> Iterator[Note]:
    """The model that an adapter is for, as PEFT's configuration beside it says."""
    if any(root.is_model and " adapter, " in root.detail for root in roots):
        trained_on = (config_beside(checkpoint, ADAPTER) or {}).get("base_model_name_or_path")
        whose = f"of {str(trained_on)[:200]}" if trained_on else "of a model"
        yield Note("adapter", f"changes to the weights {whose}, which lora merge adds to them")


_WOULD = ((CALLED, "call"), (MADE, "make"), (NAMED, "import"))


def _names(unknown: dict[tuple[str, str], str], how: str) -> list[str]:
    return sorted(name for kind, name in unknown if kind == how)


def _optimizer_notes(roots: tuple[StateDict, ...]) -> Iterator[Note]:
    """Optimizer state of parameters in none of its groups: loading fails, or gives it to another parameter."""
    for root in roots:
        if root.kind != OPTIMIZER:
            continue
        state = root.node["state"]
        groups = [group.get("params") for group in root.node["param_groups"] if isinstance(group, dict)]
        known = {
            id_ for names in groups if isinstance(names, (list, tuple)) for id_ in names if type(id_) in (int, str)
        }
        missing = [key for key in state if key not in known]
        if missing and groups:
            which = listed([str(key)[:100] for key in missing])
            where = root.address or "the file"
            message = (
                f"{where}: {len(missing):,} of {counted(len(state), 'state')} "
                f"{form(len(missing), 'belongs', 'belong')} to no parameter: {which}"
            )
            yield Note("optimizer-mismatch", message)


def _array_notes(checkpoint: Checkpoint) -> Iterator[Note]:
    found = array_state_dicts(checkpoint.tree)
    places = listed([f"{root.detail} at {root.address or 'the top'}" for root in found], 3)
    fix = command("convert", FILE, out=OUT_SAFETENSORS) if len(found) == 1 else ()
    if found:
        yield Note("numpy-weights", f"{places}: no tensors yet, but convert and diff take them for weights", fix)


def _prefix_notes(roots: tuple[StateDict, ...]) -> Iterator[Note]:
    found: list[tuple[str, str]] = []
    partial = False
    for root in roots:
        named = root.is_model and root.module is None  # a whole module's names are not its keys
        names = [name for name in root.names() if name != COUNTER] if named else []
        kinds = Counter(kind for name in names if (kind := wrappers(name)))
        if not kinds:
            continue
        having = sum(count for kind, count in kinds.items() if "module" in kind.split("."))
        partial = partial or 0 < having < len(names)  # the command is one for all roots
        wrapped = sum(kinds.values())
        where = f"{wrapped:,} of {counted(len(names), 'key')} of {root.address or 'the file'}"
        message = f"{where} {form(wrapped, 'carries', 'carry')} a wrapper's {listed(sorted(kinds))}"
        found.append(("prefix-module" if having else "prefix-compiled", message))
    fix = command("strip-module", FILE, partial=partial, out=OUT)
    yield from (Note(code, message, fix) for code, message in found)


def _device_notes(rows: list[TensorRow]) -> Iterator[Note]:
    places = Counter(row.tensor.location for row in rows)
    elsewhere = {place: count for place, count in places.items() if place not in ("cpu", "meta")}
    if elsewhere:
        kind = (
            "cuda" if any(place.startswith("cuda") for place in elsewhere) else next(iter(elsewhere)).partition(":")[0]
        )
        (first, count), *more = sorted(elsewhere.items())
        tagged = f"{count:,} {'tensor is' if count == 1 else 'tensors are'} tagged {first}"
        facts = listed([tagged, *(f"{count:,} {place}" for place, count in more)])
        fix = command("remap", FILE, to="cpu", out=OUT)
        yield Note(
            "cuda-location" if kind == "cuda" else "device-location",
            f"{facts}; a machine without it needs map_location",
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
        fix = command("slim", FILE, keep_optimizer=True, out=OUT)
        yield Note(
            "wasted-storage",
            f"{waste:,} bytes in {counted(count, 'storage')} are used by no tensor (slices saved with all of it)",
            fix,
        )


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class PartSummary:
    """A root and its tensors.

    sizes: bytes of each row's values, 0 for one that is tied to an earlier row of the part; `bytes` and `elements` are
    sums of that kind.
    tied: index of such a row -> index of the first of the same tensor.  dtypes, locations: names, the most frequent
    first.
    """

    root: StateDict
    rows: Sequence[TensorRow]
    sizes: list[int]
    tied: dict[int, int]
    elements: int
    bytes: int
    dtypes: tuple[str, ...]
    locations: tuple[str, ...]


def parts(listing: Listing) -> list[PartSummary]:
    """Every root of a listing, in order, with its tensors. Those outside of all roots belong to none."""
    if len(listing.roots) == 1:
        return [summary_of(listing.roots[0], listing.tensors)]
    rows: dict[tuple[object, ...], list[TensorRow]] = {root.path: [] for root in listing.roots}
    depths = sorted({len(path) for path in rows}, reverse=True)  # of an optimizer within weights, it
    for row in listing.tensors:
        for depth in depths:
            found = rows.get(row.path[:depth])
            if found is not None:
                found.append(row)
                break
    return [summary_of(root, rows[root.path]) for root in listing.roots]


def like_others(divided: Sequence[PartSummary]) -> dict[PartSummary, PartSummary]:
    """Sets of weights with the names, types and shapes of an earlier one (wrappers aside), as an EMA has: to that."""
    models = [part for part in divided if part.root.is_model]
    alike: dict[PartSummary, PartSummary] = {}
    first: dict[tuple[object, ...], PartSummary] = {}
    for part in models if len(models) > 1 else ():
        shapes = tuple(
            (without_wrappers(path[0]) if isinstance(path[0], str) else path[0], tensor.dtype, tensor.shape)
            for path, tensor in _weights(part)
        )
        if (found := first.setdefault(shapes, part)) is not part:
            alike[part] = found
    return alike


def same_names(part: PartSummary, other: PartSummary) -> bool:
    """True where two that are alike have the same names, wrappers included."""
    return all(path == twin for (path, _), (twin, _) in zip(_weights(part), _weights(other), strict=True))


def _weights(part: PartSummary) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a set of weights by their paths in it, without the counter of an average."""
    base = len(part.root.path)
    return ((row.path[base:], row.tensor) for row in part.rows if row.path[base] != COUNTER)


def summary_of(root: StateDict, rows: Sequence[TensorRow]) -> PartSummary:
    """A root and its tensors."""
    tied = _tied(rows)
    known: dict[tuple[object, object], tuple[int, int]] = {}  # many tensors are of few shapes
    sizes: list[int] = []
    elements = 0
    for index, row in enumerate(rows):
        tensor = row.tensor
        kind = (tensor.dtype, tensor.shape)
        if index in tied:
            sizes.append(0)
            continue
        fact = known.get(kind)
        if fact is None or not isinstance(tensor, TensorEntry):
            fact = known[kind] = (
                (tensor.numel if isinstance(tensor, TensorEntry) else _numel(tensor.shape)),
                tensor.nbytes,
            )
        elements += fact[0]
        sizes.append(fact[1])
    dtypes = _most_frequent([row.tensor.dtype for row in rows])
    return PartSummary(
        root,
        rows,
        sizes,
        tied,
        elements,
        sum(sizes),
        tuple(dtype.name if dtype else "unknown" for dtype in dtypes),
        tuple(_most_frequent([row.tensor.location for row in rows])),
    )


def _most_frequent(values: list[_T]) -> list[_T]:
    """The different ones, the most frequent first. Mostly there is one: a Counter for each part would be felt."""
    kinds = dict.fromkeys(values)
    return list(kinds) if len(kinds) < 2 else [value for value, _ in Counter(values).most_common()]


def _numel(shape: tuple[int, ...] | None) -> int:
    count = 1 if shape is not None else 0
    for length in shape or ():
        count *= length
    return count


def _tied(rows: Sequence[TensorRow]) -> dict[int, int]:
    """The rows that are the same memory as one before; a conjugate or negative view is, too."""
    if len(rows) < 2:
        return {}
    shared = {
        number for number, count in Counter(row.storage for row in rows).items() if count > 1 and number is not None
    }
    first: dict[tuple[object, ...], int] = {}
    tied: dict[int, int] = {}
    if shared:
        for index, row in enumerate(rows):
            tensor = row.tensor
            if row.storage not in shared or not isinstance(tensor, TensorEntry):
                continue
            if (before := first.setdefault((row.storage, tensor.layout), index)) != index:
                tied[index] = before
    return tied


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Inspection(Report):
    """A listing; the statistics of each tensor by its address, if they were asked for."""

    listing: Listing
    statistics: dict[str, Statistics]
    notes: tuple[Note, ...]
