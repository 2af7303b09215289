"""The parts of a checkpoint in forty lines: modules with sizes, repeated layers folded, as deep as there is room; and
the memory that its weights need.

Nothing is split or added up that is not shown: a file may have a million tensors, and a person reads forty lines.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ckptool.analysis.words import tensor_text, value_text
from ckptool.checkpoint import Tensor, TensorEntry
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.nodes import Object
from ckptool.checkpoint.tree import Path, address, tensors
from ckptool.conventions.state_dicts import AVERAGE, COUNTER, OPTIMIZER, PLAIN, WEIGHTS, without_wrappers
from ckptool.errors import counted, listed
from ckptool.facts import WHOLE, Bytes, dataclass, field, short, size

if TYPE_CHECKING:
    from ckptool.analysis.inspect import Listing, PartSummary

LINES = 40  # of a file, unless more is asked for
ROOTS = 60  # parts with a line of their own
SHOWN = 12  # of more siblings than there is room for
DEEPEST = 100  # pieces of a name; the rest of it is one more
FOLDED = 3  # siblings that are shown as one, at least
_ASPECTS = attrgetter("dtype", "shape", "stride", "storage.location", "flags")
_OF_COMPOSITES = attrgetter("dtype", "shape", "location", "kind", "nbytes")
_NUMBERED = re.compile(r"(.*?)[0-9]{1,9}", re.DOTALL)

Item = tuple[Sequence[str], int, str]
"""The pieces of a tensor's name, which lie between its slashes and dots, the index of its row in the part, the name."""


@dataclass(eq=False)
class Branch:
    """Tensors whose names begin alike.
    depth: how many pieces they share.  times: how often this structure is repeated, here and further out; `run`: here.
    size: bytes, repetitions included.  members: the branches that a folded one stands for.
    hidden: children that are left out."""

    part: PartSummary
    items: Sequence[Item]
    depth: int
    label: str
    times: int
    size: int
    members: Sequence[Branch] = ()
    expanded: list[Branch] = field(default_factory=list)
    hidden: int = 0

    @property
    def leaf(self) -> int | None:
        """The index of the tensor's row, where the branch is one."""
        if len(self.items) != 1:
            return None
        pieces, row, _ = self.items[0]
        return row if len(pieces) == self.depth else None

    @property
    def is_tied(self) -> bool:
        """True for a tensor that shares the memory of another, which counts its bytes."""
        return self.times == 1 and self.leaf in self.part.tied

    @property
    def detail(self) -> str:
        """How many tensors it has; what the one tensor is, and to what it is tied."""
        leaf = self.leaf
        if leaf is None:
            return counted(len(self.items) * self.times, "tensor")
        text, target = tensor_text(self.part.rows[leaf].tensor, self.part), self.part.tied.get(leaf)
        if self.times > 1:
            return f"{self.times:,} × {text}{'' if target is None else ', tied to others'}"
        return text if target is None else f"{text}, tied to {self.part.rows[target].address}"

    @property
    def address(self) -> str:
        """The address of what it is; a pattern where its tensors share only the beginning of their names."""
        pieces, _, name = self.items[0] if self.items else ([], 0, "")
        end = sum(len(piece) + 1 for piece in pieces[: self.depth - bool(self.members)])
        if not self.members and (self.leaf is not None or name[end - 1 : end] in ("/", "")):
            return name if self.leaf is not None else name[: max(end - 1, 0)]
        return f"{name[:end]}*"

    @property
    def run(self) -> int:
        return len(self.members) or 1

    @cached_property
    def below(self) -> list[Branch]:
        """What stands below it where nothing is left out; the members of a folded one."""
        return [_compressed(child, self.depth - bool(self.members)) for child in self.members or self.children]

    @cached_property
    def children(self) -> list[Branch]:
        if self.leaf is not None:
            return []
        depth, sizes = self.depth, self.part.sizes
        groups = defaultdict[str | tuple[str, int], list[Item]](list)
        for item in self.items:
            name = item[0][depth]  # `a` may stand beside `a.b`, or another `a`
            groups[name if len(item[0]) > depth + 1 else (name, item[1])].append(item)
        branches = []
        for key, items in groups.items():
            label, size = key if isinstance(key, str) else key[0], sum([sizes[item[1]] for item in items])
            branches.append(Branch(self.part, items, depth + 1, label, self.times, size * self.times))
        return _folded(branches)

    @cached_property
    def structure(self) -> list[object]:
        """Everything by which two repeated layers can differ, except the last piece that they share.
        A tie within the layer is to a place in it, any other to one row of the part."""
        pieces, tied = self.items[0][0][: self.depth], self.part.tied
        begin = sum([len(piece) + 1 for piece in pieces[:-1]])
        end = begin + len(pieces[-1])
        place = {row: number for number, (_, row, _) in enumerate(self.items)} if tied else {}
        facts: list[object] = []
        for _, row, name in self.items:
            tensor = self.part.rows[row].tensor
            facts += name[:begin], name[end:], (_ASPECTS if type(tensor) is TensorEntry else _OF_COMPOSITES)(tensor)
            if row in tied:
                target = tied[row]
                facts.append(("inside", place[target]) if target in place else target)
        return facts


def outline(part: PartSummary, lines: int, depth: int | None) -> Branch:
    """The tensors of a part as a branch that is expanded within `lines`, or `depth` levels deep where that is given."""
    base = len(part.root.path)
    names = []
    for row in part.rows:
        first = row.path[base] if len(row.path) == base + 1 else None
        is_plain = isinstance(first, str) and "/" not in first and "~" not in first
        names.append(str(first) if is_plain else address(row.path[base:]))
    items = [(name.replace("/", ".").split(".", DEEPEST), row, name) for row, name in enumerate(names)]
    top = Branch(part, items, 0, "", 1, part.bytes)
    while items and len(top.children) == 1 and top.children[0].leaf is None and "{" not in top.children[0].label:
        top = top.children[0]  # what all names have in common stands before each of them
    # Level by level, the largest first, as long as there is room.
    queue, count = [(0, 0, 0, top)] if items else [], 0
    while queue:
        level, _, _, branch = heapq.heappop(queue)
        if depth is not None and level == depth:
            break
        children = [_compressed(child, 0 if branch is top else branch.depth) for child in branch.children]
        if len(children) > (lines if depth is None else LINES):
            if depth is None and branch is not top:
                continue
            branch.hidden = max(len(children) - SHOWN, 0)
            children = children[:SHOWN]
        branch.expanded = children
        lines -= len(children)
        for child in children:
            if child.leaf is None:
                count += 1
                heapq.heappush(queue, (level + 1, -child.size, count, child))
    return top


def _compressed(branch: Branch, start: int) -> Branch:
    """A branch that goes on without forking, under one name: `conv1.weight` instead of `conv1` and a line below it."""
    while branch.leaf is None and len(branch.children) == 1 and "{" not in branch.label:
        branch = branch.children[0]
    pieces, _, name = branch.items[0]
    begin = sum(len(piece) + 1 for piece in pieces[:start])
    end = begin + sum(len(piece) + 1 for piece in pieces[start : branch.depth - 1])
    branch.label = name[begin:end] + branch.label
    return branch


def _folded(branches: list[Branch]) -> list[Branch]:
    """Runs of numbered siblings that are the same in everything but their number, as one: `{0..11}`, `layer{1..4}`.
    Numbers go up by one, with the leading zeros of the first. Where something is folded, neighbours of one prefix come
    in the order of their numbers, as sorted names do not (`layers.10` before `layers.2`)."""
    folded: list[Branch] = []
    for prefix, group in groupby(branches, lambda branch: (match := _NUMBERED.fullmatch(branch.label)) and match[1]):
        siblings = list(group)
        if prefix is None or len(siblings) < FOLDED:
            folded += siblings
            continue
        at, runs = len(prefix), list[list[Branch]]()
        for sibling in sorted(siblings, key=lambda sibling: int(sibling.label[at:])):
            first, number = (runs[-1][0], str(int(runs[-1][-1].label[at:]) + 1)) if runs else (sibling, "")
            is_next = sibling.label[at:] == number.zfill(len(first.label) - at) and first is not sibling
            is_next = is_next and (first.size, len(first.items)) == (sibling.size, len(sibling.items))
            if is_next and first.structure == sibling.structure:
                runs[-1].append(sibling)
            else:
                runs.append([sibling])
        if all(len(run) < FOLDED for run in runs):
            runs = [[sibling] for sibling in siblings]
        for run in runs:
            if len(run) < FOLDED:
                folded += run
                continue
            first, label = run[0], f"{prefix}{{{run[0].label[at:]}..{run[-1].label[at:]}}}"
            times, size = first.times * len(run), sum(sibling.size for sibling in run)
            folded.append(Branch(first.part, first.items, first.depth, label, times, size, run))
    return folded


class OverviewRow(NamedTuple):
    """A part with the outline of what is in it. bytes: None where there are no tensors."""

    part: PartSummary
    name: str
    bytes: int | None
    detail: str
    outline: Branch | None


def overview(divided: Sequence[PartSummary], depth: int | None = None, lines: int = 0) -> tuple[list[OverviewRow], int]:
    """An overview of a file with many parts: a row each, the largest with an outline; then how many are left out.

    lines: of all outlines together; 0 for what a screen has room for."""
    originals = {} if depth is not None else like_others(divided)
    shown = divided if depth is not None else divided[:ROOTS]
    room = max(LINES - len(shown), SHOWN)
    distinct = [part for part in shown if part not in originals]
    several = [part for part in distinct if len(part.rows) > 1 or (part.rows and part.rows[0].path != part.root.path)]
    # Optimizers repeat the model's names: their one line is enough, unless a depth was asked for.
    outlined = [part for part in several if depth is not None or part.root.is_model or part.root.kind == PLAIN]
    if depth is None:
        outlined = sorted(outlined, key=lambda part: -part.bytes)[: max(room // 4, 1)]
    with_outline, rows = set(outlined), []
    for part in shown:
        name, detail = part.root.address or WHOLE, root_detail(part)
        if part in originals:
            pairs = zip(_weights(part), _weights(originals[part]), strict=True)
            prefix = "" if all(path == twin for (path, _), (twin, _) in pairs) else ", but for a prefix"
            detail += f"; like {originals[part].root.address or WHOLE}{prefix}"
        branch = outline(part, (lines or room) // len(outlined), depth) if part in with_outline else None
        rows.append(OverviewRow(part, name, part.bytes if part.rows else None, detail, branch))
    return rows, len(divided) - len(shown)


def like_others(divided: Sequence[PartSummary]) -> dict[PartSummary, PartSummary]:
    """Sets of weights -> the earlier one whose names, types and shapes they have (wrappers aside), as an EMA does."""
    models = [part for part in divided if part.root.is_model]
    originals: dict[PartSummary, PartSummary] = {}
    by_shapes: dict[tuple[object, ...], PartSummary] = {}
    for part in models if len(models) > 1 else ():
        shapes = tuple(
            (without_wrappers(path[0]) if isinstance(path[0], str) else path[0], tensor.dtype, tensor.shape)
            for path, tensor in _weights(part)
        )
        if (original := by_shapes.setdefault(shapes, part)) is not part:
            originals[part] = original
    return originals


def _weights(part: PartSummary) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a set of weights by their paths in it, without the counter of an average."""
    base = len(part.root.path)
    return ((row.path[base:], row.tensor) for row in part.rows if row.path[base] != COUNTER)


def root_detail(part: PartSummary) -> str:
    root = part.root
    if root.kind == PLAIN and not (part.rows and isinstance(root.node, (dict, list, tuple, Object))):
        return value_text(root.node, 100)
    kind = root.node.name if isinstance(root.node, Object) else type(root.node).__name__
    what = root.detail or (root.kind if root.kind != PLAIN else "dictionary" if isinstance(root.node, dict) else kind)
    facts = [counted(len(part.rows), "tensor"), counted(part.elements, "element", shown=short)]
    facts.append(" + ".join(part.dtypes[:3]))
    facts += [listed(part.locations, 3)] if part.locations and part.locations != ("cpu",) else []
    return f"{what}: {', '.join(facts)}" if part.rows else what


ADAM = 3  # tensors beside each trainable one, of its dtype and shape: a gradient and two moments
_BUFFERS = ("running_mean", "running_var")  # what BatchNorm and InstanceNorm keep beside their parameters
_UNKNOWN = frozenset({"quantized", "quantized-unknown"})  # notes on codes, whose weights have other sizes
_ADAPTER = "adapter"  # the note on an adapter, which does not say how large its model is


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What the weights take up; null where the file does not tell. Tied tensors count once.

    parameters: floating and complex elements of the weights, without running statistics of norms; in pickled modules,
    those of their parameters.  sets: of weights that these are in.  dtypes: bytes of the weights by dtype, most first.
    average: of an average of the weights beside them.  optimizer: of optimizer state; `optimizer_share` of all parts.
    to_load: the storages of the weights.  to_train: these, and for each parameter with gradients a gradient and the two
    moments of Adam in its own dtype; no activations.  trained: the dtypes of these.  partial: the file is only a part.
    """

    parameters: int | None
    sets: int
    dtypes: dict[str, int]
    average: Bytes
    optimizer: Bytes
    optimizer_share: float
    to_load: Bytes | None
    to_train: Bytes | None
    trained: tuple[str, ...]
    partial: bool

    def __str__(self) -> str:
        """`11.7M parameters: 44.6 MB f32 + 40 B i64; …`: what is known, in one line; empty where nothing is."""
        facts = []
        if self.sets:
            counts = "weights" if self.parameters is None else counted(self.parameters, "parameter", shown=short)
            counts += f" in {counted(self.sets, 'set')} of weights" if self.sets > 1 else ""
            facts.append(f"{counts}: {' + '.join(f'{size(n)} {name}' for name, n in self.dtypes.items()) or '0 B'}")
        facts += [f"EMA {size(self.average)}"] if self.average else []
        facts += [f"optimizer {size(self.optimizer)} ({self.optimizer_share:.0%})"] if self.optimizer else []
        if self.to_load:
            dtypes = " + ".join(self.trained)
            training = f"{size(self.to_train or 0)} to train with Adam in {dtypes} without activations"
            facts.append(f"{size(self.to_load)} to load" + (f", {training}" if self.to_train and self.trained else ""))
        return ("this part alone: " if self.partial and facts else "") + "; ".join(facts)


def memory_needs(listing: Listing) -> MemoryNeeds:
    """What the weights of a listing need. Reads no tensor data."""
    models = [part for part in listing.parts if part.root.kind == WEIGHTS and part.rows]
    averages = [part for part in listing.parts if part.root.kind == AVERAGE and part.rows]
    weights, average = models or averages, sum(part.bytes for part in averages) if models else 0
    optimizer = sum(part.bytes for part in listing.parts if part.root.kind == OPTIMIZER)
    share = optimizer / (sum(part.bytes for part in listing.parts) or 1)
    dtypes, parameters, frozen = Counter[DType | None](), Counter[DType](), Counter[DType]()  # bytes
    storages, is_known = dict[int, int](), bool(weights)
    several, views = len(weights) > 1, set[tuple[object, ...]]()
    for part in weights:
        module = part.root.module
        everything = [row.tensor for row in part.rows] if module is None else [tensor for _, tensor in tensors(module)]
        entries = [tensor for tensor in everything if isinstance(tensor, TensorEntry)]
        # Modules say which tensors are parameters, and so do state dicts that kept their parameters.
        has_parameters = any(flags.parameter for flags in {entry.flags for entry in entries})
        flags = {entry.view: entry.flags for entry in entries} if has_parameters else {}
        for row, nbytes in zip(part.rows, part.sizes, strict=True):  # tied ones have size 0
            tensor = row.tensor
            if several:
                if tensor.view in views:
                    continue
                views.add(tensor.view)
            if not isinstance(tensor, TensorEntry):
                is_known &= module is not None and tensor.kind == "with attributes"  # a buffer; others: codes, indices
                storages[id(tensor)] = nbytes
                for piece in tensor.parts():
                    dtypes[piece.dtype] += piece.nbytes if isinstance(piece, TensorEntry) else piece.storage.nbytes
                continue
            dtypes[tensor.dtype] += nbytes
            storages[id(tensor.storage)] = tensor.storage.data.length
            if flags and (flag := flags.get(tensor.view)):
                parameters[tensor.dtype] += nbytes * flag.parameter
                frozen[tensor.dtype] += nbytes * (flag.parameter and not flag.requires_grad)
            elif tensor.dtype.kind in ("float", "complex") and not str(row.path[-1]).endswith(_BUFFERS):
                parameters[tensor.dtype] += nbytes
    to_load = sum(storages.values()) if weights else None
    codes = {note.code for note in listing.notes}
    is_known = is_known and codes.isdisjoint(_UNKNOWN)
    trained = parameters - frozen
    to_train = None if not is_known or _ADAPTER in codes or to_load is None else to_load + ADAM * trained.total()
    kinds = {dtype.name if dtype else "unknown": nbytes for dtype, nbytes in dtypes.most_common() if nbytes}
    count = sum(nbytes // dtype.itemsize for dtype, nbytes in parameters.items()) if is_known else None
    types, is_part = tuple(dtype.name for dtype, _ in trained.most_common()), listing.part is not None
    return MemoryNeeds(count, len(weights), kinds, average, optimizer, share, to_load, to_train, types, is_part)
