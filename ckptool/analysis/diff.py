"""The differences of two checkpoints in words, and the evidence on which the rest is called the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Annotated, Any, TypeVar

from ckptool.analysis import differences
from ckptool.analysis.differences import ARRAYS, Comparer, Difference, PartChange, Tie, Unpaired, is_integer, is_tensor
from ckptool.analysis.values import ValueDifference, change_of
from ckptool.analysis.words import entry_text, grouped, type_name
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Folder, Source, unchanged
from ckptool.checkpoint.progress import reading
from ckptool.checkpoint.tree import is_meta, module_attributes, second_names, storages
from ckptool.commands import arg, option, several
from ckptool.conventions.state_dicts import bare, find_state_dicts, is_optimizer, one_state_dict
from ckptool.errors import UsageError, counted, listed
from ckptool.facts import WHOLE, Report, Table, Told, dataclass, dim, green, number, percent, red, replace
from ckptool.formats import CheckpointLike, members, named, open_file
from ckptool.formats.marks import OTHER_ADAPTERS

BESIDE = {"device", "strides", "requires_grad", "parameter"}  # what differs beside equal values
IGNORABLE = ("device", "dtype", "order", "prefix", "strides", "ties", "requires_grad", "metadata")
# What a safetensors file cannot record; compared where both containers can.
_ONLY_IN_PICKLES = ("device", "strides", "requires_grad", "metadata")
# The evidence for "same": the weakest by which any tensor counts as the same.
BYTES, VALUES, TOLERANCE, SHAPES = "bytes", "values", "values within the tolerance", "shapes"
EVIDENCE = {BYTES: "byte for byte", VALUES: "by their values", TOLERANCE: "within the tolerance"}
EVIDENCE[SHAPES] = "by shape and type"  # of tensors without values, on the meta device
ROWS, NAMES = 9, 40  # of a kind of difference, unless all are asked for; columns for their names
STRIP, LAYERS = "▁▂▃▄▅▆▇█", 24  # levels of change; characters at most
_ASPECTS = {"value": "plain entries", "values": "values of tensors"}

Item = TypeVar("Item")
Values = Sequence[ValueDifference]  # of several tensors


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Diff(Report):
    """The verdict on two checkpoints, what it rests on, and every difference. Counts are of tensors.

    evidence: what the verdict rests on.  only: patterns; where there are any, the verdict is about what matches,
    without ties.
    ties: names that share memory in one file and not in the other.  order_differs: dictionaries whose keys are in
    another order.  metadata_differs: state dicts with another `_metadata`, where that does not count; it and the order
    count if `strict`.
    elements: of all tensors of the same shape, under each name.  changed_elements: those that differ; null where they
    were not counted.
    """

    verdict = "same"

    left: str
    right: str
    same: bool
    evidence: str
    tensors: int
    equal: int
    changed: tuple[Difference, ...]
    only_left: tuple[Unpaired, ...]
    only_right: tuple[Unpaired, ...]
    ties: tuple[Tie, ...]
    order_differs: tuple[str, ...]
    metadata_differs: tuple[str, ...]
    ignored: tuple[str, ...]
    not_compared: tuple[str, ...]
    remarks: tuple[str, ...]
    strict: bool
    only: tuple[str, ...]
    elements: int
    changed_elements: int | None
    parts: tuple[PartChange, ...] = ()

    def told(
        self,
        *,
        counts: Annotated[bool, option("--stat", "Print only counts.")] = False,
        all: Annotated[bool, option("--all", "A row for each tensor, instead of groups.")] = False,
        quiet: Annotated[bool, option("-q --quiet", "Print nothing; only set the exit code.")] = False,
    ) -> Told:
        """The verdict, then every difference in groups."""
        if quiet:
            return
        same = green("same in what matches" if self.only else "same")
        yield same if self.same else red("differ"), f": {self.summary(self.left, self.right)}"
        yield ""
        yield from self.remarks
        places = {"the order of keys": self.order_differs, "_metadata": self.metadata_differs}
        for what, names in places.items() if not self.strict else ():
            if names:
                where = f" in {listed([name or WHOLE for name in names], 3)}" if any(names) else ""
                yield f"{what} differs{where}; this counts only with --strict"
        if self.differs_by_prefix():
            yield "names differ by a wrapper's prefix: --ignore prefix compares what they name"
        yield ""
        if counts:
            aspects = Counter(name for change in self.changed for name in change.aspects)
            rows = [(f"only in {self.left}", len(self.only_left)), (f"only in {self.right}", len(self.only_right))]
            rows += [(_ASPECTS.get(name, name), count) for name, count in aspects.items()]
            rows += [("ties", len(self.ties)), ("order", len(self.order_differs))]
            yield Table([(name, f"{count:,}") for name, count in rows if count and not self.same], right=(1,))
            floats = [change for change in self.changed if change.values is not None and not is_integer(change)]
            sizes = {change.address: change.values.max_abs or 0 for change in floats if change.values is not None}
            if sizes:
                worst = max(sizes, key=lambda name: sizes[name])
                yield f"  largest difference: {number(sizes[worst])} in {worst or WHOLE}"
        else:
            yield from self.differences((self.left, self.right), all=all, order=self.strict)
        yield ""
        limits = "not compared (one of the containers does not record it)"
        yield f"{limits}: {', '.join(self.not_compared)}" if self.not_compared else None
        yield f"ignored: {', '.join(self.ignored)}" if self.ignored else None
        if self.only:
            patterns = listed(self.only, 20)
            yield f"compared only what matches {patterns}; nothing else was read, and ties were not compared"

    def summary(self, left: str, right: str) -> str:
        """What the verdict rests on, in a line.  left, right: what the two are called."""
        evidence = EVIDENCE[self.evidence]
        if self.same:
            return f"{counted(self.tensors, 'tensor')}, {evidence}"
        tensors = [change.aspects.keys() for change in self.changed if is_tensor(change.left)]
        entries = len(self.changed) - len(tensors)
        how = "changed" if any(aspects - BESIDE for aspects in tensors) else "changed other than by value"
        facts = [f"{len(tensors):,} of {counted(self.tensors, 'tensor')} {how}"] if tensors else []
        facts += [f"{counted(entries, 'entry', 'entries')} changed"] if entries else []
        onlys = ((left, self.only_left), (right, self.only_right))
        facts += [f"{len(only):,} only in {side}" for side, only in onlys if only]
        facts += ["different ties"] if self.ties else []
        facts += ["a different order"] if self.order_differs and self.strict else []
        return ", ".join(facts) + (f"; {counted(self.equal, 'tensor')} the same, {evidence}" if self.equal else "")

    def differs_by_prefix(self) -> bool:
        """True if most names that are in one file only are in the other with or without a wrapper's prefix."""
        onlys = (self.only_left, self.only_right)
        left, right = ({bare(path) for path, node in only if is_tensor(node)} for only in onlys)
        return 2 * len(left & right) > len(left | right) and "prefix" not in self.ignored

    def differences(self, sides: tuple[str, str], *, all: bool = False, order: bool = True, room: int = ROWS) -> Told:
        """Every difference, by kinds.  sides: what the two are called.  all: names, not groups.  room: rows a kind."""
        room = 0 if all else room
        limits: dict[str, Any] = {"limit": room or None, "more": f"  … {{}} more ({arg(all=True)})"}

        def block(title: str, rows: Sequence[tuple[str, str]], *, by_end: bool = False) -> Table:
            # Names with the same text in groups, with their number.  by_end: those that end in different words apart.
            by_text: dict[tuple[str, str], list[tuple[str, None]]] = {}
            for name, text in () if all else rows:
                end = re.split("[./]", name)[-1].strip("0123456789") if by_end else ""
                by_text.setdefault((text, end), []).append((name, None))
            cells = [(name or WHOLE, text) for name, text in rows] if all else []
            for (text, _), names in by_text.items():
                for group, keys in folded(names):
                    cells.append((f"{group or WHOLE}  ({len(keys):,})" if len(keys) > 1 else group or WHOLE, text))
            return Table(cells, title=f"{title} ({len(rows):,})", hang=NAMES, **limits)

        yield from (block("entries", entry_rows(self), by_end=True), "")
        integers, values = list[tuple[str, str]](), list[tuple[str, Difference]]()
        for name, change in tensors_changed(self):
            if not is_integer(change):
                values.append((name, change))
                continue
            (old, new), delta = change.aspects["values"], change.values  # of one element, else their number
            share = f"{delta.changed:,} of {counted(delta.total, 'element')}" if delta is not None else ""
            integers.append((name, share if old is None else f"{old} → {new}"))
        yield from (block("counters and other integers", integers, by_end=True), "")
        rows = [(part.name or WHOLE, *_part_cells(part)) for part in self.parts if part.largest_change]
        heads = ("", "tensors", "change", "layers (· the same)")
        yield from (Table(rows, title="parts", heads=heads, right=(1, 2), **limits | {"limit": 3 * room or None}), "")
        for side, only in zip(sides, (self.only_left, self.only_right), strict=True):
            yield from (block(f"only in {side}", [(entry.address, entry_text(entry.node)) for entry in only]), "")
        yield from (block("other than by value", aspect_rows(self)), "")
        if any(change.values is not None for _, change in values):
            yield from (*self._values(values, room, all), "")
        else:  # nobody asked by how much
            yield from (block("values", [(name, "") for name, _ in values]), "")
        tied = [(f"tied only in {sides[side == 'right']}: {listed(names, 20)}",) for side, names in self.ties]
        yield from (Table(tied, title="ties", **limits), "")
        others = [(f"{name or WHOLE}: the same keys in another order",) for name in self.order_differs if order]
        yield Table(others, title="order", **limits)

    def _values(self, rows: Sequence[tuple[str, Difference]], room: int, all: bool) -> Told:
        """A row for each tensor, or for each group of tensors."""
        if all:
            heads: Sequence[str] = ("", "elements changed", "max |a-b|", "max rel", "mean rel", "cosine", "first at")
            cells = list[tuple[str, ...]]()
            for name, change in rows:
                if (delta := change.values) is None:
                    cells.append((name or WHOLE, "differ", "", "", "", "", ""))
                    continue
                at = "" if delta.first is None else str(list(delta.first))
                cosine = "–" if delta.cosine is None else f"{delta.cosine:.6f}"
                numbers = map(number, (delta.max_abs, delta.max_rel, delta.mean_rel))
                cells.append((name or WHOLE, f"{delta.changed:,} of {delta.total:,}", *numbers, cosine, at))
            yield Table(cells, title=f"values ({len(rows):,})", heads=heads, right=range(1, 6))
            one_sided = any(change.values is not None and change.values.max_abs == inf for _, change in rows)
            yield "  max |a-b| inf: NaN or infinite on one side only, which the others leave out" if one_sided else None
        else:
            groups, omitted = group_rows(rows, room)
            heads = ("", "change", "max |a-b|", "elements")
            if room:  # names of any length have room at the end of a line
                groups, heads = [(*facts, name) for name, *facts in groups], (*heads[1:], "")
            limits: dict[str, Any] = {"limit": 3 * room or None, "more": f"  … {{}} more ({arg(all=True)})"}
            yield Table(groups, f"values ({len(rows):,})", heads, range(not room, 4 - bool(room)), hang=NAMES, **limits)
            yield f"  … {counted(omitted, 'group')} that changed less ({arg(all=True)})" if omitted else None
            yield dim("  change: mean |a-b| / max(|a|, |b|) of the tensor that changed most")
        if self.changed_elements:
            share = percent(self.changed_elements / max(self.elements, 1))
            yield f"  {self.changed_elements:,} of {counted(self.elements, 'element')} changed ({share})"


# Rows -----------------------------------------------------------------------------------------------------------------


def aspect_rows(diff: Diff) -> list[tuple[str, str]]:
    """Shapes, types, devices and the like, old and new."""
    rows = []
    for change in diff.changed:
        texts = []
        for name, sides in change.aspects.items():
            old, new = (list(side) if isinstance(side, tuple) else side for side in sides)
            texts += [f"{name} {old} → {new}"] if name not in ("values", "value") else []
        rows += [(change.address, ", ".join(texts))] if texts else []
    return rows


def entry_rows(diff: Diff) -> list[tuple[str, str]]:
    """The entries that are not tensors on both sides, old and new.
    First what stands at the top (epoch, loss) and the learning rate; the items of lists come last."""
    rows = []
    for change in diff.changed:
        if "value" in change.aspects or ("values" in change.aspects and not is_tensor(change.left)):
            sides = [entry_text(node) for node in (change.left, change.right)]
            if sides[0] == sides[1]:
                sides = [f"{sides[0]} ({type_name(node)})" for node in (change.left, change.right)]
            rows.append((change.address, " → ".join(sides)))

    def rank(row: tuple[str, str]) -> tuple[bool, int]:
        parent, _, last = row[0].rpartition("/")
        return last.isdigit(), 2 * bool(parent) - (last == "lr")

    return sorted(rows, key=rank)


def folded(rows: Iterable[tuple[str, Item]]) -> list[tuple[str, dict[str, list[Item]]]]:
    """Named items in groups of similar names: the text of each group, and its items by name."""
    by_name: dict[str, list[Item]] = {}
    for name, item in rows:
        by_name.setdefault(name, []).append(item)
    return [(group.text, {key: by_name[key] for key in group.keys}) for group in grouped(by_name)]


def tensors_changed(diff: Diff) -> list[tuple[str, Difference]]:
    """The tensors whose values differ, by their addresses."""
    return [(entry.address, entry) for entry in diff.changed if "values" in entry.aspects and is_tensor(entry.left)]


def group_rows(rows: Iterable[tuple[str, Difference]], room: int) -> tuple[list[tuple[str, ...]], int]:
    """Groups of tensors, those of a part together, the largest change first; and how many did not fit."""
    parts, cells, omitted = dict[str, list[tuple[str, Difference]]](), list[tuple[str, ...]](), 0
    for name, change in rows:
        parts.setdefault(differences.place(change.path)[0], []).append((name, change))
    limit = max(2 * room // len(parts) ** 2, 3) if room else None
    for changes in parts.values():
        groups = list[tuple[str, Values]]()
        for name, keyed in folded(changes):
            groups.append((name, [item.values for same in keyed.values() for item in same if item.values is not None]))
        groups.sort(key=lambda group: -max(map(change_of, group[1]), default=0.0))
        omitted += len(groups[limit:]) if limit else 0
        for name, values in groups[:limit]:
            changed, total, top = totals(values)
            first = max(values, key=change_of, default=None)  # which changed most; in words where there is no number
            peak, mean = (None, 0.0) if first is None else (first.max_abs, first.mean_rel or 0.0)
            how = "differ" if peak is None else "NaN, inf" if peak == inf else percent(mean) if peak else "bits only"
            cells.append((name or WHOLE, how, number(top), percent(changed / max(total, 1))))
    return cells, omitted


def totals(values: Values) -> tuple[int, int, float | None]:
    """The number of changed elements, of all elements, and the largest |a-b|; None for it where nothing has one."""
    largest = max((delta.max_abs for delta in values if delta.max_abs is not None), default=None)
    return sum(delta.changed for delta in values), sum(delta.total for delta in values), largest


def _part_cells(part: PartChange) -> tuple[str, str, str]:
    """How many tensors changed, the largest change, and a character for each layer, or for several in a row."""
    order = {re.sub("[0-9]+", lambda digits: digits[0].zfill(9), name): name for name in part.layers if name}
    layers = [[size for size in part.layers[order[key]] if size is not None] for key in sorted(order)]
    top = max((size for layer in layers for size in layer if size < inf), default=0.0)
    step, strip = -(-len(layers) // LAYERS), ""
    for start in range(0, len(layers), step) if len(layers) > 2 else ():
        peak = max((size for layer in layers[start : start + step] for size in layer), default=None)
        strip += "·" if peak is None else "!" if peak == inf else STRIP[min(int(8 * peak / top), 7) if top else 0]
    strip += f" ({step} each)" if step > 1 and strip else ""
    change = "NaN, inf" if part.largest_change == inf else percent(part.largest_change)
    return f"{part.changed:,} of {part.tensors:,} changed", change, strip


# Two checkpoints ------------------------------------------------------------------------------------------------------


def diff(
    left: Checkpoint,
    right: Checkpoint,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    ignore: Collection[str] = (),
    statistics: bool = True,
    identity: bool = False,
    only: Collection[str] = (),
    strict: bool = True,
) -> Diff:
    """Compares two trees.

    only: patterns for addresses or their ends (`state_dict/fc.*`, `fc.*`); compares what matches and all in it.

    statistics=False: finds out whether values differ, not by how much.
    strict=False: another order of keys and another `_metadata` are reported, and do not count.
    identity: it counts, too, which objects stand in several places; reports of two people's files do not ask for it.
    atol, rtol: values count as equal within `atol + rtol * |right|`.  ignore: names out of `IGNORABLE`.
    Raises `UsageError` for another name, `NoMatch` for a pattern that matches nothing.
    """
    if unknown := [name for name in ignore if name not in IGNORABLE]:
        what = f"unknown kind of difference {unknown[0]!r} in {arg('ignore')}"
        raise UsageError(what, f"Available: {', '.join(IGNORABLE)}.")
    # In a folder that only its engine writes, which tensors share a storage and in what order they come follows from
    # how the ranks divide them, not from the model.
    containers = [named(side.container) for side in (left, right)]
    of_ranks = any(container.is_folder and not container.writable for container in containers)
    pickled = not (left.tensors_only or right.tensors_only or of_ranks)
    skipped = {*ignore} if pickled else {*ignore, *_ONLY_IN_PICKLES}
    if not pickled or any(side.memory is not None and side.memory.arrays_as_tensors for side in (left, right)):
        skipped.add(ARRAYS)
    lenient = not strict and "metadata" not in skipped
    comparer = Comparer(skipped, atol, rtol, statistics, identity=identity, notes_metadata=lenient)
    pairs = [((), left.tree, right.tree)]
    if only:
        pairs = comparer.chosen(*differences.topmost((left.tree, right.tree), only, "prefix" in ignore))
    sides = ([pair[side] for pair in pairs] for side in (1, 2))
    with reading(lambda: 2 * min(sum(storage.nbytes for storage in storages(side)) for side in sides)):
        same = comparer.compare(pairs)
    compares_ties = pickled and not ("ties" in skipped or only)
    tied = tuple(differences.ties(left.tree, right.tree, "prefix" in skipped)) if compares_ties else ()
    order = () if "order" in skipped or not pickled else tuple(comparer.order)
    not_compared: tuple[str, ...] = () if pickled else ("order", "ties", *_ONLY_IN_PICKLES)
    not_compared += (ARRAYS,) * (comparer.mixed and ARRAYS in skipped)
    on_meta = sum(is_meta(a) for *_, a, _ in comparer.compared.values())
    exact = SHAPES if on_meta and on_meta == len(comparer.compared) else BYTES
    return Diff(
        left=str(left.source or "the left one"),
        right=str(right.source or "the right one"),
        same=same and not (tied or (order and strict)),
        evidence=exact if not comparer.close else TOLERANCE if atol or rtol else VALUES,
        tensors=comparer.tensors,
        equal=comparer.equal,
        elements=comparer.elements,
        changed=tuple(comparer.changed),
        only_left=tuple(comparer.only_left),
        only_right=tuple(comparer.only_right),
        ties=tied,
        order_differs=order,
        metadata_differs=tuple(comparer.metadata),
        ignored=tuple(sorted(ignore)),
        not_compared=tuple(name for name in not_compared if name not in ignore),
        remarks=(f"{counted(on_meta, 'tensor')} on the meta device, without values",) if on_meta else (),
        strict=strict,
        only=tuple(only),
        changed_elements=sum(each.values.changed for each in comparer.changed if each.values) if statistics else None,
        parts=tuple(comparer.parts()),
    )


def diff_files(left: CheckpointLike, right: CheckpointLike, **options: Any) -> Diff:
    """Compares two checkpoints of any containers; see the verb.  options: those of `diff`."""
    return diff_of_parts(left, right, **options)[0]


def diff_of_parts(
    left: CheckpointLike,
    right: CheckpointLike,
    *,
    ignore: str | Collection[str] = (),
    only: str | Sequence[str] = (),
    strict: bool = False,
    **options: Any,
) -> tuple[Diff, tuple[Checkpoint, Checkpoint]]:
    """The differences, and the parts of the two that were compared, which keep their files open."""
    a, b = open_file(left), open_file(right)
    source_a, source_b = a.checkpoint.source, b.checkpoint.source
    same_folder = isinstance(source_a, Folder) and isinstance(source_b, Folder) and source_a.is_at(source_b.path)
    if same_folder or (isinstance(source_a, Source) and isinstance(source_b, Source) and source_a.is_same(source_b)):
        b = replace(b, checkpoint=a.checkpoint)  # then equal parts are known to be equal without being read
    remarks, parts = list[str](), [a.taken, b.taken]
    modules = [module_attributes(part.tree) is not None for part in parts]
    if modules[0] != modules[1]:  # one is its state dict: compare that of the other, too
        parts = [_weights_of(part, remarks) if module else part for part, module in zip(parts, modules, strict=True)]
    # Of two whole files, what they have in common: all, or the weights in each. One is bare and the other holds weights
    # among other things, or each has its only model under a name of its own, as two engines do (`module`, `model`).
    roots = [find_state_dicts(part) for part in parts]
    flat = [len(sets) == 1 and sets[0].path == () for sets in roots]  # a bare set of weights
    paths = [[root.path for root in sets if root.is_model] for sets in roots]
    by_weights = flat[0] != flat[1] or (len(paths[0]) == len(paths[1]) == 1 and paths[0] != paths[1])
    for side, (mine, other) in enumerate(((a, b), (b, a))):
        if mine.at is None and (by_weights if other.at is None else flat[not side] and not flat[side]):
            parts[side] = _weights_of(parts[side], remarks)
    for opened in (a, b):
        others = members.beside(opened.checkpoint) if opened.at is None else ()
        remarks += [_weights_remark(opened.name, others)] if others else []
        remarks += [f"{opened.name}: {each.message}" for each in opened.checkpoint.notes if each.code == OTHER_ADAPTERS]
    ignored = [name for word in several(ignore) for part in word.split(",") if (name := part.strip())]
    with unchanged(a.checkpoint.source, b.checkpoint.source):
        report = diff(parts[0], parts[1], ignore=ignored, only=several(only), strict=strict, **options)
    for part, entries in zip(parts, (report.only_left, report.only_right), strict=True):
        if aliases := second_names(part.tree, {entry.path for entry in entries}):
            remarks.append(f"{listed(aliases, 3)}: a second name for the same values")
    if report.left == report.right and a.at != b.at:  # two parts of one file
        names = ["#".join(filter(None, (report.left, opened.at))) for opened in (a, b)]
        report = replace(report, left=names[0], right=names[1])
    return replace(report, remarks=(*report.remarks, *remarks)), (parts[0], parts[1])


def _weights_of(checkpoint: Checkpoint, remarks: list[str]) -> Checkpoint:
    """The one set of weights in a file; `remarks` are told which, where there was more."""
    name = str(checkpoint.source or "what is in memory")
    root, remark = one_state_dict(checkpoint)
    remarks += [remark] if remark else []
    remarks += [f"compared {root.address} of {name}"] if root.path else []
    remarks += [f"compared the state dict of the {root.detail} in {name}"] if root.module else []
    tree = root.node if root.arrays is None else root.arrays
    if any(map(is_optimizer, tree.values())):  # what training needs lies among the weights, as torchtitan saves it
        remarks.append(_weights_remark(name, [str(key) for key, value in tree.items() if not is_tensor(value)]))
        tree = {key: value for key, value in tree.items() if is_tensor(value)}
    return replace(checkpoint, tree=tree, base=(*checkpoint.base, *root.path))


def _weights_remark(name: str, others: Sequence[str]) -> str:
    return f"compared the weights of {name}, not {listed(others, 6)} beside them"
