"""Every tensor and plain entry of a checkpoint, the parts that they form, and what one should know about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from ckptool import facts
from ckptool.analysis import words
from ckptool.analysis.findings import runnable
from ckptool.analysis.outline import LINES, Branch, MemoryNeeds, memory_needs, overview
from ckptool.analysis.quantization import quantized_notes
from ckptool.analysis.words import Json, PathFact, shape_text, type_name, value_text
from ckptool.checkpoint import Checkpoint, Composite, Note, PartOf, Tensor, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.graph import SCALARS, no_collection
from ckptool.checkpoint.nodes import Object, Set, fields, items
from ckptool.checkpoint.paths import selected
from ckptool.checkpoint.tree import MANY_NAMES, Path, address, check_names, children, find, storages, stored_parts, walk
from ckptool.commands import FILE, OUT, OUT_SAFETENSORS, Command, command, option
from ckptool.conventions import state_dicts
from ckptool.conventions.state_dicts import COUNTER, OPTIMIZER, StateDict, find_state_dicts, without_wrappers, wrappers
from ckptool.errors import Conflict, counted, form, listed, printable
from ckptool.facts import BAR, LIVE, WHOLE, Bytes, Report, Table, Told, Unit, bar, blue, bold, dim, number, short, size
from ckptool.formats import named
from ckptool.formats.folder import ADAPTER
from ckptool.formats.members import all_uses, unjudged
from ckptool.formats.model_folder import config_beside
from ckptool.pickles.calls import CALLED, MADE, NAMED, UNKNOWN, custom_notes
from ckptool.pickles.plain import is_one_line, to_json
from ckptool.pickles.weights_only import takes, weights_only

if TYPE_CHECKING:
    from ckptool.analysis.values import Statistics

WASTE_WORTH_A_NOTE = 1 << 16
MAX_ENTRIES = 50_000  # plain values that are listed one by one
SHORT = 8  # a container of at most so many plain values is listed in each of its places
NAMES = 56  # columns for names of the outline; longer ones push their line to the right
ENGINE = ("engine", "ranks", "step")  # of the metadata
STATISTICS = ("count", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs")
_COUNTS = dict.fromkeys(("count", "zeros", "nans", "infs"), words.INTEGER)
_NUMBERS = words.fields(dict.fromkeys(STATISTICS, words.optional(words.NUMBER)) | _COUNTS)
_ROW = words.fields({"path": words.PATH, **words.TENSOR}, {**words.TENSOR_ALSO, "statistics": _NUMBERS})
_ENTRY = words.fields({"path": words.PATH, "type": words.TEXT, "value": words.VALUE}, {"same_as": words.PATH})


def _of_tensor(name: str) -> Any:
    return property(lambda row: getattr(row.tensor, name, None))


# Rows are not frozen, though nobody assigns to them: there is one for each tensor, and making a frozen object takes
# four times as long.


@facts.dataclass(slots=True, eq=False)
class TensorRow:
    """A tensor at one place in the tree. `storage`: its number, from 0 in order; None for composites."""

    path: Path
    tensor: Tensor
    storage: int | None
    statistics: Statistics | None = None

    @property
    def address(self) -> str:
        return address(self.path)

    # As JSON has them; None where a tensor has no such thing.
    dtype, shape, stride, offset, kind, location, nbytes = map(
        _of_tensor, ("dtype", "shape", "stride", "offset", "kind", "location", "nbytes")
    )


@facts.dataclass(slots=True, eq=False)
class EntryRow:
    """A value other than a tensor, at one place in the tree.
    same_as: the earlier place of the same container, if there is one.  repeated: it is a part of such a container."""

    path: Path
    value: Any
    same_as: Path | None = None
    repeated: bool = False

    @property
    def address(self) -> str:
        return address(self.path)

    type = property(lambda row: type_name(row.value))

    @property
    def text(self) -> str:
        if self.same_as is None:
            return value_text(self.value)
        return f"the same {type_name(self.value)} as {address(self.same_as) or WHOLE}"


def _rows_json(rows: Iterable[TensorRow]) -> list[Json]:
    """Every tensor with its path, and its statistics where they were asked for."""
    from ckptool.pickles.plain import to_jsons

    facts = []
    for row in rows:
        facts.append({"path": words.path_json(row.path), **words.tensor_json(row.tensor, row.storage)})
        if row.statistics is not None:
            numbers = to_jsons([getattr(row.statistics, name) for name in STATISTICS])
            facts[-1]["statistics"] = dict(zip(STATISTICS, numbers, strict=True))
    return facts


def _entries_json(rows: Iterable[EntryRow]) -> list[Json]:
    """Every value that is printed; of one that stands in an earlier place, too, only that place. Bounded together."""
    from ckptool.pickles.plain import to_jsons

    shown = [row for row in rows if not row.repeated]
    values = to_jsons([row.value if row.same_as is None else None for row in shown])
    return [
        {"path": words.path_json(row.path), "type": type_name(row.value), "value": value}
        | ({} if row.same_as is None else {"same_as": words.path_json(row.same_as)})
        for row, value in zip(shown, values, strict=True)
    ]


@facts.dataclass(frozen=True, eq=False, repr=False)
class Listing(Report):
    """Every tensor and entry of a checkpoint with its path; sizes in bytes.

    bytes: of the file or folder.  part: set where it is only a part of a checkpoint.  at: the address that was asked
    for.  tensor_bytes: what the storages that the tensors use take up, each counted once.
    metadata: of the container, as it is there.  unlisted: plain values beyond the first 50,000.
    only: the patterns by which these tensors and entries were chosen.  parts: state dicts and what stands beside them.
    """

    schema = "inspect/2"

    file: str
    container: str
    bytes: Bytes
    part: PartOf | None
    at: str
    tree: Annotated[Any, LIVE]
    roots: Annotated[tuple[StateDict, ...], LIVE]
    tensor_bytes: Bytes
    storages: int
    metadata: Annotated[dict[str, Any], Unit(json=to_json, schema={"type": "object"})]
    tensors: Annotated[tuple[TensorRow, ...], Unit(json=_rows_json, schema=words.several(_ROW))]
    entries: Annotated[tuple[EntryRow, ...], Unit(json=_entries_json, schema=words.several(_ENTRY))]
    unlisted: int
    notes: tuple[Note, ...]
    only: tuple[str, ...] = ()

    @cached_property
    def parts(self) -> list[PartSummary]:
        """Every root, in order, with its tensors. Those outside of all roots belong to none."""
        if len(self.roots) == 1:
            return [summary_of(self.roots[0], self.tensors)]
        rows: dict[Path | None, list[TensorRow]] = {root.path: [] for root in self.roots}
        owner = owners(self.roots)
        for row in self.tensors:
            rows.setdefault(owner(row.path), []).append(row)
        return [summary_of(root, rows[root.path]) for root in self.roots]

    @cached_property
    def memory(self) -> MemoryNeeds:
        """What the weights take up."""
        return memory_needs(self)

    @cached_property
    def statistics(self) -> Annotated[dict[str, Statistics], LIVE]:
        """The statistics of tensors by their addresses, where they were asked for."""
        return {row.address: row.statistics for row in self.tensors if row.statistics is not None}

    @cached_property
    def non_finite(self) -> Annotated[dict[str, None], LIVE]:
        """The addresses of tensors with NaN or Inf, but for numbers beside the weights without a value yet."""
        odd: dict[str, None] = {}
        for row in self.tensors:
            if (values := row.statistics) is None or not (values.nans or values.infs):
                continue
            if not state_dicts.is_unset(self.roots, row.path, row.tensor.shape, values.nans):
                odd[row.address] = None
        return odd

    def told(
        self,
        *,
        all: Annotated[bool, option("--all", "Every tensor and entry, one line each.")] = False,
        depth: Annotated[int | None, option("--depth N", "Levels of the outline (or all that fit).", least=0)] = None,
        quiet: Annotated[bool, option("-q --quiet", "Only addresses, one a line; of a run, its checkpoints.")] = False,
    ) -> Told:
        entries = [row for row in self.entries if not row.repeated]
        if quiet:
            addresses = [row.address for row in self.tensors] + [row.address for row in entries]
            yield from (address or "/" for address in addresses)
            return
        engine = engine_of(self.metadata)
        hidden = self.metadata if named(self.container).own_metadata else ENGINE if engine else ()
        metadata = [f"{key}={value_text(value)}" for key, value in self.metadata.items() if key not in hidden]
        about = [self.container, *([self.part.label] if self.part else []), size(self.bytes)]
        about += [f"metadata {listed(metadata, 4)}"] if metadata else []
        yield bold((self.file or "in memory") + (f"#{self.at}" if self.at else "")), f": {', '.join(about)}"
        yield f"engine: {engine}" if engine else None
        yield ""
        if self.statistics:
            heads = ("", "dtype", "shape", "min", "max", "mean", "std", "norm", "zeros", "NaN", "Inf")
            rows = list[list[str]]()
            for row in self.tensors:
                cells = [row.address, *_type(row.tensor)]
                if (values := row.statistics) is not None:
                    cells += map(number, (values.min, values.max, values.mean, values.std, values.norm))
                    cells.append(facts.percent(values.zeros / values.count) if values.zeros else "0")
                rows.append([*cells, *([short(values.nans), short(values.infs)] if values else [""] * 8)])
            yield Table(rows, heads=heads, right=range(3, 11), indent=0)
        elif all:
            tied = {id(part.rows[row]): part.rows[first] for part in self.parts for row, first in part.tied.items()}
            rows = []
            for row in self.tensors:
                tensor = row.tensor  # and what is unusual about it
                remarks = [] if tensor.location == "cpu" else [tensor.location]
                if isinstance(tensor, Composite):
                    remarks.append(tensor.kind)
                elif not tensor.is_contiguous:
                    remarks.append(f"strides {list(tensor.stride)}")
                remarks += [f"tied to {tied[id(row)].address}"] if id(row) in tied else []
                rows.append([row.address or WHOLE, *_type(row.tensor), size(row.tensor.nbytes), ", ".join(remarks)])
            yield Table(rows, right=(3,), indent=0)
        else:
            yield from _outlined(self.parts, depth)
        yield ""
        if (all and not self.statistics) or (self.only and not all):
            yield Table([(row.address or WHOLE, row.text) for row in entries], title="entries")
        yield ""
        if all and self.unlisted and not self.statistics:
            yield f"… and {counted(self.unlisted, 'more entry', 'more entries')}"
        yield ""
        if not self.tensors:
            yield dim("no tensors")
        else:
            ties = sum(len(part.tied) for part in self.parts)
            also = f"; {counted(ties, 'name')} tied to another" if ties else ""
            where = f"{counted(self.storages, 'storage')}, {size(self.tensor_bytes)}{also}"
            yield dim(f"{counted(len(self.tensors), 'tensor')} in {where}")
            yield dim(f"{self.memory}")
        yield ""
        yield from self.notes


def _outlined(parts: Sequence[PartSummary], depth: int | None) -> Told:
    """A line for each part, and below it an outline of it; of a file of plain values these, as far as they fit."""
    if len(parts) == 1 and parts[0].root.path == () and not parts[0].rows:
        node = parts[0].root.node
        rows = [(address((key,)), value_text(value)) for key, value in islice(children(node), LINES + 1)]
        yield Table(rows[:LINES], indent=0) if rows else value_text(node)
        yield "…  (--all lists everything)" if rows[LINES:] else None
        return
    shown, hidden = overview(parts, depth)
    lines: list[tuple[str, int | None, str]] = []  # a label, bytes (None: no bar), what it is

    def add(branch: Branch, indent: str) -> None:
        for child in branch.expanded:
            label = indent + (child.label or "''") + (f" ×{child.run:,}" if child.run > 1 else "")
            lines.append((label, None if child.is_tied else child.size, dim(child.detail)))
            add(child, indent + "  ")
        if branch.hidden:
            lines.append((f"{indent}…", None, dim(f"{branch.hidden:,} more (--all lists them)")))

    for row in shown:
        lines.append((bold(row.name), row.bytes, row.detail))
        if row.outline is not None:
            add(row.outline, "  ")
    if hidden:
        lines.append((bold("…"), None, f"{hidden:,} more (--all lists every tensor)"))
    biggest, sized = max((row.bytes or 0 for row in shown), default=0), any(row.bytes is not None for row in shown)

    def aligned(width: int | None) -> Told:
        hang, length = min(NAMES, max((width or 1_000) - 40, 12)), BAR if width is None or width >= 100 else BAR // 2
        rows = []
        for label, total, detail in lines:
            sizes = ("" if total is None else size(total), blue(bar(total or 0, biggest, length)))
            rows.append((label, *(sizes if sized else ()), detail))
        yield Table(rows, right=(1,) if sized else (), indent=0, hang=hang)

    yield aligned


def _type(tensor: Tensor) -> tuple[str, str]:
    return tensor.dtype.name if tensor.dtype else "?", shape_text(tensor.shape)


@no_collection()  # of very many rows
def listing(checkpoint: Checkpoint, at: str = "") -> Listing:
    """The contents of a checkpoint, or of the part at an address. Reads no tensor data."""
    base, tree = find(checkpoint.tree, at)
    rows, entries = list[TensorRow](), list[EntryRow]()
    numbers, sizes = dict[int, int](), dict[int, int]()
    places: dict[int, Path] = {}  # of containers, the first of each
    repeat: Path | None = None
    said: Path | None = None  # of an object whose line says all that is in it
    unlisted = 0
    for relative, node in walk(tree):
        path = base + relative
        if said is not None and path[: len(said)] == said:
            continue
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
            said = path if is_one_line(node) else None
            if len(entries) < MAX_ENTRIES:
                entries.append(EntryRow(path, node, repeated=repeat is not None))
            else:
                unlisted += 1
        elif repeat is None and places.setdefault(id(node), path) is not path:
            parts = list(islice(children(node), SHORT + 1))
            # Otherwise it is printed in every place, like the `betas` that all groups of an optimizer share.
            if len(parts) > SHORT or any(type(part) not in SCALARS for _, part in parts):
                repeat = path
                entries.append(EntryRow(path, node, same_as=places[id(node)]))
    check_names(len(rows), len({id(row.tensor) for row in rows}) if len(rows) > MANY_NAMES else 0)
    source = checkpoint.source
    roots = find_state_dicts(replace(checkpoint, tree=tree))
    roots = [replace(root, path=base + root.path) for root in roots] if base else roots
    modules = {root.path: root for root in roots if root.module is not None}
    owner, renamed = owners(modules.values()), list[TensorRow]()
    for row in rows if modules else ():  # rows of whole modules get the names of their state dicts
        if (place := owner(row.path)) is None:
            renamed.append(row)
        elif (root := modules.pop(place, None)) is not None:  # its first row
            pairs = (((*root.path, key), value) for key, value in root.node.items())
            for path, tensor in (*pairs, *state_dicts.unnamed_tensors(root)):
                index = numbers[id(tensor.storage)] if isinstance(tensor, TensorEntry) else None
                renamed.append(TensorRow(path, tensor, index))
    rows = renamed or rows
    return Listing(
        file=(source.shown if isinstance(source, Folder) else source.path) if source else "",
        container=checkpoint.container,
        bytes=source.size if source else sum(sizes.values()),
        part=checkpoint.part,
        at=at,
        tree=tree,
        roots=tuple(roots),
        tensor_bytes=sum(sizes.values()),
        storages=len(numbers),
        metadata=dict(checkpoint.metadata),
        tensors=tuple(rows),
        entries=tuple(entries),
        unlisted=unlisted,
        notes=tuple(
            replace(note, fix=()) if _is_refused(note.fix, checkpoint) else note
            for note in _notes(checkpoint, roots, rows)
        ),
    )


def matching_only(contents: Listing, only: Sequence[str]) -> Listing:
    """The tensors and entries whose address matches one of the patterns, or whose key in its part does.
    Raises `NoMatch` naming a pattern that matches nothing."""
    if not only:
        return contents
    owner = owners(contents.roots)
    candidates: list[TensorRow | EntryRow] = [*contents.tensors, *contents.entries]
    names = {id(row): {row.address, address(row.path[len(owner(row.path) or ()) :])} for row in candidates}
    chosen = selected(set().union(*names.values()), only)
    rows = tuple(row for row in contents.tensors if names[id(row)] & chosen)
    # A pattern asks by name: parts of what stands in an earlier place, too, are printed.
    entries = (replace(row, repeated=False) for row in contents.entries if names[id(row)] & chosen)
    sizes = {id(part.storage): part.storage.nbytes for row in rows for part in stored_parts(row.tensor)}
    paths = {owner(row.path) or () for row in rows}
    roots = tuple(root for root in contents.roots if root.path in paths)
    contents = replace(contents, storages=len(sizes), tensor_bytes=sum(sizes.values()))
    return replace(contents, tensors=rows, entries=tuple(entries), roots=roots, only=tuple(only))


def with_statistics(contents: Listing, stats: Mapping[str, Statistics], path: str) -> Listing:
    """The listing with statistics, by address, and its notes with commands that can be run on the file."""
    rows = [replace(row, statistics=stats.get(row.address)) for row in contents.tensors] if stats else contents.tensors
    contents = replace(contents, tensors=tuple(rows), notes=runnable(contents.notes, path, contents.container))
    if not (odd := list(contents.non_finite)):
        return contents
    what = f"NaN or Inf in {len(odd):,} of {counted(len(rows), 'tensor')}: {listed(odd, 3)}"
    return replace(contents, notes=(Note("non-finite", what), *contents.notes))


def owners(roots: Iterable[StateDict]) -> Callable[[Path], Path | None]:
    """A function from a path to the path of the innermost root that it leads into; None outside of all roots."""
    paths = {root.path for root in roots}
    depths = sorted({len(path) for path in paths}, reverse=True)
    return lambda path: next((path[:depth] for depth in depths if path[:depth] in paths), None)


def engine_of(metadata: Mapping[str, Any]) -> str:
    """The program that wrote a checkpoint, on how many ranks and at which step: `accelerate, saved by 2 ranks`.
    Empty where the file does not say."""
    engine, ranks, step = (metadata.get(key) for key in ENGINE)
    if type(engine) is not str:
        return ""
    facts = [printable(engine[:200])]
    facts += [f"saved by {counted(ranks, 'rank')}"] if type(ranks) is int else []
    facts += [f"step {step:,}"] if type(step) is int else []
    return ", ".join(facts)


def _is_leaf(node: Any) -> bool:
    if isinstance(node, Object):
        return not (node.items or node.elements or node.attributes)
    return not node.items if isinstance(node, Set) else not isinstance(node, (dict, list, tuple)) or not node


# Notes ----------------------------------------------------------------------------------------------------------------


def _notes(checkpoint: Checkpoint, roots: Sequence[StateDict], rows: Sequence[TensorRow]) -> Iterator[Note]:
    use = list(use_notes(checkpoint))
    yield from (*_naming_notes(roots), *_loading_notes(checkpoint, rows, bool(use)), *use)
    # Storages of which the tensors show only a part, as slices do that were saved without `.clone()`.
    hidden = dict[int, int]()
    for row in rows:
        entry = row.tensor
        if isinstance(entry, TensorEntry) and row.storage is not None:
            total, nbytes = entry.storage.data.length, entry.nbytes
            visible = nbytes if nbytes == total else min(nbytes, entry.span()[1] - entry.span()[0])
            hidden[row.storage] = hidden.get(row.storage, total) - visible
    wasted = [unused for unused in hidden.values() if unused > 0]
    if sum(wasted) >= WASTE_WORTH_A_NOTE:
        where = f"{size(sum(wasted))} in {counted(len(wasted), 'storage')}"
        fix = command("slim", FILE, keep_optimizer=True, out=OUT)
        yield Note("wasted-storage", f"{where} belong to no tensor: slices, saved without .clone()", fix)
    if any(root.is_adapter for root in roots):
        trained_on = (config_beside(checkpoint, ADAPTER) or {}).get("base_model_name_or_path")
        whose = f"of {str(trained_on)[:200]}" if trained_on else "of a model"
        yield Note("adapter", f"changes to the weights {whose}; lora merge adds them")
    # Optimizer state of parameters in none of its groups: loading fails, or gives it to another parameter.
    for root in (root for root in roots if root.kind == OPTIMIZER):
        lists = [items(fields(group).get("params")) for group in root.node["param_groups"]]
        parameters = {name for names in lists for name in names if type(name) in (int, str)}
        state = root.node["state"]
        if lists and (missing := [key for key in state if key not in parameters]):
            examples = listed([str(key)[:100] for key in missing])
            count = f"{len(missing):,} of {counted(len(state), 'state')} {form(len(missing), 'belongs', 'belong')}"
            yield Note("optimizer-mismatch", f"{root.address or 'the file'}: {count} to no parameter: {examples}")
    yield from quantized_notes(checkpoint, roots)
    arrays = state_dicts.array_state_dicts(checkpoint.tree) if not any(root.is_model for root in roots) else []
    if arrays:
        places = listed([f"{root.detail} at {root.address or 'the top'}" for root in arrays], 3)
        message = f"{places}: not tensors, but convert and diff treat them as weights"
        yield Note(NUMPY, message, command("convert", FILE, out=OUT_SAFETENSORS) if len(arrays) == 1 else ())
    yield from checkpoint.notes


def _is_refused(fix: tuple[str, ...], checkpoint: Checkpoint) -> bool:
    """True for a command that changes what is beside a program, or in one shard of several; no part is converted."""
    part = checkpoint.part
    is_bound = bool(checkpoint.extras) or (part is not None and (bool(part.index) or "convert" in fix))
    return is_bound and isinstance(fix, Command) and fix.writes


_WOULD = {CALLED: "call", MADE: "make", NAMED: "import"}
WEIGHTS_ONLY, NUMPY = "weights-only", "numpy-weights"  # codes of notes
_WITH_DEFAULT = ("torch-zip", "torch-legacy")  # that torch.load reads with weights_only=True unless told otherwise


def use_notes(checkpoint: Checkpoint) -> Iterator[Note]:
    """Notes on what loading the file would run."""
    unknown: dict[tuple[str, str], str] = {}
    for use, place in all_uses(checkpoint):
        if use.verdict == UNKNOWN:
            unknown.setdefault((use.how, use.name), place)
    if unknown:
        names = {how: sorted(name for kind, name in unknown if kind == how) for how in _WOULD}
        would = [f"{_WOULD[how]} {listed(group)}" for how, group in names.items() if group]
        where = f"first at {next(iter(unknown.values())) or 'the top'}"
        how = "loading it" if checkpoint.extras else "loading it with pickle"  # a program has loaders of its own
        yield Note("unsafe-global", f"{how} would {listed(would)} ({where}); ckptool does not")
    if unread := unjudged(checkpoint):
        what = f"{counted(len(unread), 'file')} of its folder cannot be read, so what loading would run is unknown"
        yield Note("not-judged", f"{what}: {listed(unread, 4)}")
    yield from custom_notes(checkpoint)


def _naming_notes(roots: Sequence[StateDict]) -> Iterator[Note]:
    """Keys with the names of wrappers before them."""
    notes: list[tuple[str, str]] = []
    partial = collide = False
    for root in roots:
        is_named = root.is_model and root.module is None  # a whole module's names are not its keys
        names = [name for name in root.names() if name != COUNTER] if is_named else []
        kinds = Counter(kind for name in names if (kind := wrappers(name)))
        if not kinds:
            continue
        with_module = sum(count for kind, count in kinds.items() if "module" in kind.split("."))
        partial = partial or 0 < with_module < len(names)  # one command for all roots
        collide = collide or len({*map(without_wrappers, names)}) < len(names)  # then no command can
        wrapped = sum(kinds.values())
        where = f"{wrapped:,} of {counted(len(names), 'key')} of {root.address or 'the file'}"
        prefixes = listed([f"'{kind}'" for kind in sorted(kinds)])
        message = f"{where} {form(wrapped, 'has', 'have')} a wrapper's prefix, {prefixes}"
        notes.append(("prefix-module" if with_module else "prefix-compiled", message))
    fix = () if collide else command("strip-module", FILE, partial=partial, out=OUT)
    yield from (Note(code, message, fix) for code, message in notes)


def _loading_notes(checkpoint: Checkpoint, rows: Sequence[TensorRow], is_unsafe: bool) -> Iterator[Note]:
    """Tensors on a device, and values that torch.load refuses although loading them would run nothing unknown."""
    locations = Counter(row.tensor.location for row in rows)
    devices = sorted((place, count) for place, count in locations.items() if place not in ("cpu", "meta"))
    if devices:
        (first, count), *more = devices
        saved = f"{count:,} {form(count, 'tensor was', 'tensors were')} saved on {first}"
        facts = listed([saved, *(f"{count:,} {place}" for place, count in more)])
        code = "cuda-location" if any(place.startswith("cuda") for place, _ in devices) else "device-location"
        yield Note(
            code,
            f"{facts}; without that device, torch.load needs map_location",
            command("remap", FILE, to="cpu", out=OUT),
        )
    if is_unsafe or checkpoint.container not in _WITH_DEFAULT or takes(checkpoint.tree):
        return
    fix: tuple[()] | Command = ()
    try:
        plain = weights_only(checkpoint)
        names = plain.refused
        kept = {id(item) for item in storages(plain.checkpoint.tree)}
        if plain.checkpoint.tree is not None and kept == {id(item) for item in storages(checkpoint.tree)}:
            fix = command("convert", FILE, weights_only=True, out=OUT)
    except Conflict:
        names = ["keys that would become the same text"]
    if names:
        what = f"torch.load refuses it by default (weights_only=True): {listed(names, 4)}; nothing in it would run"
        yield Note(WEIGHTS_ONLY, what, fix)


# Parts ----------------------------------------------------------------------------------------------------------------


@facts.dataclass(frozen=True, slots=True, eq=False)
class PartSummary:
    """A root and its tensors.
    sizes: bytes of each row's values, 0 for one that is tied to an earlier row of the part; `bytes` and `elements` are
    sums of that kind.
    tied: index of such a row -> index of the first of the same tensor.  dtypes, locations: names, the most frequent
    first."""

    root: Annotated[StateDict, LIVE]
    rows: Annotated[Sequence[TensorRow], LIVE] = facts.field(repr=False)
    sizes: Annotated[list[int], LIVE] = facts.field(repr=False)
    tied: Annotated[dict[int, int], LIVE] = facts.field(repr=False)
    elements: int
    bytes: Bytes
    dtypes: tuple[str, ...]
    locations: tuple[str, ...]

    @property
    def path(self) -> PathFact:
        return self.root.path

    @property
    def kind(self) -> str:
        return self.root.kind

    @property
    def detail(self) -> str:
        return self.root.detail

    @property
    def tensors(self) -> int:
        return len(self.rows)


def summary_of(root: StateDict, rows: Sequence[TensorRow]) -> PartSummary:
    """A root and its tensors."""
    # The rows that are the same memory as one before; a conjugate or negative view is, too.
    shared = {number for number, count in Counter([row.storage for row in rows]).items() if count > 1}
    first: dict[tuple[object, ...], int] = {}
    tied: dict[int, int] = {}
    for index, row in enumerate(rows) if shared else ():
        if row.storage in shared and isinstance(row.tensor, TensorEntry):
            earlier = first.setdefault((row.storage, row.tensor.layout), index)
            tied.update({index: earlier} if earlier != index else {})
    sizes = [0 if index in tied else row.tensor.nbytes for index, row in enumerate(rows)]
    elements = sum([row.tensor.numel for index, row in enumerate(rows) if index not in tied])
    dtypes = Counter([row.tensor.dtype.name if row.tensor.dtype else "unknown" for row in rows])
    places = Counter([row.tensor.location for row in rows])
    kinds, locations = (tuple(name for name, _ in counts.most_common()) for counts in (dtypes, places))
    return PartSummary(root, rows, sizes, tied, elements, sum(sizes), kinds, locations)
