"""Two trees compared, pair by pair: what differs where both have it, what only one has, which tensors are tied.

*Same* means: keys, types, shapes, row-major bytes and plain entries. Order, devices, strides, ties and `requires_grad`
count where both containers can express them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from ckptool.analysis.values import ValueDifference, change_of, compare_values
from ckptool.analysis.words import PathFact, type_name
from ckptool.checkpoint import Composite, Data, InlineBytes, StorageRef, Tensor, TensorEntry
from ckptool.checkpoint.blocks import same_bytes
from ckptool.checkpoint.dtypes import DType
from ckptool.checkpoint.graph import SCALARS, alike
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set, canonical
from ckptool.checkpoint.numpy_arrays import Array, LongValue, array_entry
from ckptool.checkpoint.paths import selected
from ckptool.checkpoint.strided import to_numpy, without_repeats
from ckptool.checkpoint.tree import Path, address, check_names, children, memories, segment_text, walk
from ckptool.commands import arg
from ckptool.conventions.optimizer_keys import PARAMETER_LISTS
from ckptool.conventions.state_dicts import bare, without_wrappers
from ckptool.errors import Conflict
from ckptool.facts import LIVE, Bytes, Unit, dataclass
from ckptool.pickles.encode import in_python_3
from ckptool.pickles.plain import expand, summary, to_json

Chosen = dict[Any, tuple[Path, Any]]
ARRAY, ARRAYS = "numpy array", "arrays"
Aspects = dict[str, tuple[Any, Any]]
_Outcome = tuple[Aspects, ValueDifference | None, Tensor, Tensor]
_Pair = tuple[Path, Any, Any]
# The kinds of a key that is, or holds, an inert object or a tensor; and of a name that an item has too.
_NODE, _ATTRIBUTE = object(), object()
_NODES = (Object, Set, TensorEntry, Composite, StorageRef)
_LAYER = re.compile(r"(?:.*?[./])?[0-9]+(?=[./])")
_HAVE_IDENTITY = (dict, list, Set, Object, TensorEntry, Composite, bytearray)


def topmost(trees: Iterable[Any], only: Collection[str], as_bare: bool = False) -> list[Chosen]:
    """The nodes of each tree whose address, or the end of it, matches a pattern, without those inside of others.
    The keys are what trees with the same address have in common.  as_bare: addresses are those without the prefixes of
    wrappers. Raises `NoMatch` for a pattern that matches nothing in any tree."""
    walked: list[list[tuple[Path, Any, list[str]]]] = []
    for tree in trees:
        walked.append([])
        for path, node in walk(tree):
            if name := bare(path) if as_bare else path:
                texts = [segment_text(segment) for segment in name]
                tails = ("/".join(texts[-count:]) for count in range(1, min(len(texts), 8)))
                walked[-1].append((name, node, ["/".join(texts), *tails]))
    names = selected({name for nodes in walked for _, _, names in nodes for name in names}, list(only))
    selections: list[Chosen] = []
    for nodes in walked:
        chosen, parent = dict[Any, tuple[Path, Any]](), None
        for path, node, suffixes in nodes:
            if (parent is None or path[: len(parent)] != parent) and not names.isdisjoint(suffixes):
                parent = path
                chosen[(address(path), *map(type, path))] = path, node
        selections.append(chosen)
    return selections


def _aspects_json(aspects: Aspects) -> dict[str, Any]:
    def side(name: str, value: Any) -> Any:
        if name == "value":
            return to_json(value)
        if isinstance(value, (tuple, list)):
            return list(value)
        return value if value is None or isinstance(value, (bool, str)) else str(value)

    return {name: None if name == "values" else [side(name, item) for item in sides] for name, sides in aspects.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Something in both files that differs. aspects: in what (`shape`, `dtype`, `values`, …).  values: by how much."""

    path: PathFact
    left: Annotated[Any, LIVE]
    right: Annotated[Any, LIVE]
    aspects: Annotated[
        Aspects, Unit(json=_aspects_json, schema={"type": "object"}, about="both sides of each, or null for values")
    ]
    values: ValueDifference | None = None

    @property
    def address(self) -> str:
        return address(self.path)


class Unpaired(NamedTuple):
    """Something in one file only. type: `tensor`, or of what kind another entry is."""

    path: PathFact
    node: Annotated[Any, LIVE]

    @property
    def address(self) -> str:
        return address(self.path)

    @property
    def type(self) -> str:
        kind = self.node.kind if isinstance(self.node, Composite) else ""
        return "tensor" if isinstance(self.node, TensorEntry) else kind or type_name(self.node)

    @property
    def dtype(self) -> DType | None:
        return self.node.dtype if is_tensor(self.node) else None

    @property
    def shape(self) -> tuple[int, ...] | None:
        return self.node.shape if is_tensor(self.node) else None

    @property
    def nbytes(self) -> Bytes | None:
        return self.node.nbytes if is_tensor(self.node) else None


class Tie(NamedTuple):
    """Names that share a storage in one file, and not in the other. side: `left` or `right`, where they do."""

    side: str
    names: tuple[str, ...]


class PartChange(NamedTuple):
    """An entry at the top with the tensors in it that were compared; '' is a file that is one set of tensors.
    largest_change: mean |a-b| / max(|a|, |b|) of the tensor that changed most.
    layers: that of each, by the beginnings of their names: None for what did not change, 0 for what is no float."""

    name: str
    tensors: int
    changed: int
    largest_change: float
    layers: Annotated[dict[str, list[float | None]], LIVE]


def place(path: Path) -> tuple[str, str]:
    """The part of a file in which a tensor lies, and the layer: what follows, up to the first number."""
    part, rest = (segment_text(path[0]), path[1:]) if len(path) > 1 else ("", path)
    match = _LAYER.match(address(rest))
    return part, match[0] if match else ""


def is_tensor(node: Any) -> bool:
    return isinstance(node, (TensorEntry, Composite))


def is_integer(change: Difference) -> bool:
    """True for tensors of integers, and for those of one element that is a whole number, such as a step."""
    kind = getattr(change.left.dtype, "kind", "")
    return change.aspects.get("values", (None,))[0] is not None or kind in ("int", "uint", "bool")


def whole_number(entry: TensorEntry) -> int | None:
    """The one element of a tensor, where it is a whole number."""
    if entry.numel != 1 or entry.dtype.kind not in ("int", "uint", "bool", "float") or entry.dtype.numpy is None:
        return None
    value = to_numpy(entry, check=False).item()
    return int(value) if not isinstance(value, float) or value.is_integer() else None


@dataclass(eq=False)
class Comparer:
    """The comparison of two trees, as far as it has come: its differences, and how many tensors are the same.
    skipped: aspects that do not count; `arrays` where one side cannot tell numpy's from tensors.  identity: what is
    shared in only one of them counts, too.  notes_metadata: it is looked at and does not count.
    mixed: an array stood for a tensor.  close: bytes that differ were called the same.
    layers: see `PartChange`, by part.  compared: the outcomes for pairs of tensors, by their ids."""

    skipped: Collection[str]
    atol: float = 0.0
    rtol: float = 0.0
    statistics: bool = True
    identity: bool = False
    notes_metadata: bool = False

    def __post_init__(self) -> None:
        self.skipped = {*self.skipped, "metadata"} if self.notes_metadata else {*self.skipped}
        self.strip = "prefix" in self.skipped
        self.mixed = self.close = False
        self.tensors = self.elements = self.equal = 0
        self.layers = dict[str, dict[str, list[float | None]]]()
        self.changed = list[Difference]()
        self.only_left, self.only_right = list[Unpaired](), list[Unpaired]()
        self.order, self.metadata = list[str](), list[str]()
        self.compared = dict[tuple[int, int], _Outcome]()
        self._seen = set[tuple[int, int]]()
        self._rights, self._lefts = dict[int, Any](), dict[int, Any]()  # the counterparts in the other tree
        self._bare = dict[int, Any]()  # `_metadata` whose keys have lost their prefixes, by id (and kept alive for it)

    def chosen(self, left: Chosen, right: Chosen) -> list[_Pair]:
        """The pairs of nodes chosen on both sides; records those of one side only."""
        self.only_left += [Unpaired(*item) for key, item in left.items() if key not in right]
        self.only_right += [Unpaired(*item) for key, item in right.items() if key not in left]
        return [(path, node, right[key][1]) for key, (path, node) in left.items() if key in right]

    def compare(self, pairs: Sequence[_Pair]) -> bool:
        """True where nothing differs; the order of keys and ties do not count here."""
        stack = [iter(pairs)]  # iterators, so that a million plain values do not become a million pairs
        while stack:
            if (pair := next(stack[-1], None)) is None:
                stack.pop()
            else:
                stack.append(self._compare_pair(*pair))
        return not (self.changed or self.only_left or self.only_right)

    def _compare_pair(self, path: Path, a: Any, b: Any) -> Iterator[_Pair]:
        """Compares two nodes; yields the pairs of their parts that are still to be compared."""
        aspects: Aspects = {}
        has_identity = self.identity and isinstance(a, _HAVE_IDENTITY) and isinstance(b, _HAVE_IDENTITY)
        if has_identity and (self._rights.setdefault(id(a), b) is not b or self._lefts.setdefault(id(b), a) is not a):
            self.changed.append(Difference(path, a, b, {"identity": (None, None)}))
        # Pickled arrays of numpy, of which one may be a tensor, are compared as tensors.
        sides = (a, b) if isinstance(a, Object) or isinstance(b, Object) else ()
        arrays = [node if isinstance(node, TensorEntry) else array_entry(node) for node in sides]
        if arrays and arrays[0] is not None and arrays[1] is not None:
            kind_a, kind_b = (ARRAY if isinstance(node, Object) else "tensor" for node in (a, b))
            self.mixed |= kind_a != kind_b
            kinds: Aspects = {"kind": (kind_a, kind_b)} if kind_a != kind_b and ARRAYS not in self.skipped else {}
            self._tensors(path, arrays[0], arrays[1], "tensor" in (kind_a, kind_b), kinds)
        elif is_tensor(a) and is_tensor(b):
            self._tensors(path, a, b)
        elif isinstance(a, StorageRef) and isinstance(b, StorageRef):
            aspects |= self._unless_skipped("device", a.storage.location, b.storage.location)
            if a.dtype is not b.dtype or not same_bytes(a.storage.data, b.storage.data):
                aspects["values"] = (a, b)
        elif _scalar(a) != _scalar(b) and _shape_of(a) == _shape_of(b) and not alike(a, b):  # of numpy, dates, paths
            aspects["value"] = (a, b)
        elif _shape_of(a) is not None and _shape_of(a) == _shape_of(b):
            if (id(a), id(b)) in self._seen:
                return
            self._seen.add((id(a), id(b)))
            (left, left_segments), (right, right_segments) = self._by_key(a), self._by_key(b)
            directions = (left, left_segments, right, self.only_left), (right, right_segments, left, self.only_right)
            for parts, segments, others, only in directions:
                only += [Unpaired((*path, segments.get(key, key)), parts[key]) for key in parts if key not in others]
            common = [key for key in left if key in right]
            if isinstance(a, dict) and common != [key for key in right if key in left]:
                self.order.append(address(path))
            if self.notes_metadata and not alike(self._metadata(a), self._metadata(b)):
                self.metadata.append(address(path))
            for key in common:
                value_a, value_b, segment = left[key], right[key], left_segments.get(key, key)
                if type(key) is tuple and key[0] is _NODE:
                    yield (*path, segment), segment, right_segments[key]
                is_plain = type(value_a) in SCALARS and type(value_a) is type(value_b)
                if not is_plain or value_a != value_b or value_a == 0:
                    yield (*path, segment), value_a, value_b  # few plain values differ; 0.0 may be -0.0
        elif not _same_plain(a, b):
            # An optimizer has names of one parameter, which may differ by a prefix.
            named = self.strip and len(path) > 1 and path[-2] in PARAMETER_LISTS and type(a) is type(b) is str
            aspects |= {} if named and without_wrappers(a) == without_wrappers(b) else {"value": (a, b)}
        if aspects:
            self.changed.append(Difference(path, a, b, aspects))

    def _unless_skipped(self, aspect: str, old: Any, new: Any) -> Aspects:
        return {aspect: (old, new)} if old != new and aspect not in self.skipped else {}

    def _metadata(self, node: Any) -> Any:
        metadata = (node.attributes or {}).get("_metadata") if isinstance(node, OrderedDict) else None
        return _bare_modules(metadata) if self.strip and isinstance(metadata, dict) else metadata

    def _by_key(self, node: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """The parts of a node by keys that compare equal in both files; and the original keys that are no texts.
        Raises `Conflict` for two that are called the same without their prefixes."""
        parts, segments, counts = dict[Any, Any](), dict[Any, Any](), Counter[str]()
        strip = self.strip and isinstance(node, dict) and id(node) not in self._bare
        hides_metadata = "metadata" in self.skipped and isinstance(node, OrderedDict)
        for segment, part in children(node):
            is_attribute = segment == "_metadata" and not (isinstance(node, dict) and segment in node)
            if is_attribute and hides_metadata:
                continue
            if is_attribute and strip and isinstance(part, dict):
                part = _bare_modules(part)
                self._bare[id(part)] = part
            name = without_wrappers(segment) if strip and type(segment) is str else segment
            key = _comparison_key(name, counts)
            if key in parts and not strip:
                key = (_ATTRIBUTE, key)  # a dictionary with an attribute that has the name of a key
            if key in parts:
                names = [text for text, _ in children(node) if type(text) is str and without_wrappers(text) == key]
                what = f"without their prefixes {names[0]!r} and {names[1]!r} are both {str(key)!r}"
                fix = f"Compare them under their own names: without {arg('ignore')} prefix"
                raise Conflict(what, "It is unclear which of the two to compare.", fix)
            parts[key] = part
            if key is not name:
                segments[key] = segment
        return parts, segments

    # Tensors ----------------------------------------------------------------------------------------------------------

    def _tensors(self, path: Path, a: Tensor, b: Tensor, counted: bool = True, kinds: Aspects | None = None) -> None:
        """Compares two tensors; a pair that has several names only once. kinds: how they differ beforehand."""
        self.tensors += counted
        check_names(self.tensors, len(self.compared))
        key = (id(a), id(b))
        aspects, values, *_ = self.compared.get(key) or self.compared.setdefault(key, (*self._aspects_of(a, b), a, b))
        self.elements += 0 if "shape" in aspects else a.numel  # of other shapes no element has another
        size = None
        if aspects or kinds:
            change = Difference(path, a, b, {**(kinds or {}), **aspects}, values)
            self.changed.append(change)
            size = 0.0 if values is None or is_integer(change) else change_of(values)
        else:
            self.equal += counted
        if counted:
            part, layer = place(path)
            self.layers.setdefault(part, {}).setdefault(layer, []).append(size)

    def parts(self) -> Iterator[PartChange]:
        """The parts in which tensors were compared."""
        for name, layers in self.layers.items():
            sizes = [size for layer in layers.values() for size in layer]
            changed = [size for size in sizes if size is not None]
            yield PartChange(name, len(sizes), len(changed), max(changed, default=0.0), layers)

    def _aspects_of(self, a: Tensor, b: Tensor) -> tuple[Aspects, ValueDifference | None]:
        """The aspects in which two tensors differ, and by how much their values do."""
        is_same, values = True, None
        aspects = {
            **self._unless_skipped("shape", a.shape, b.shape),
            **self._unless_skipped("dtype", a.dtype, b.dtype),
            **self._unless_skipped("device", a.location, b.location),
        }
        if isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
            if "strides" not in self.skipped and "shape" not in aspects and _strides(a) != _strides(b):
                aspects["strides"] = (a.stride, b.stride)
            for name in ("requires_grad", "parameter") if "requires_grad" not in self.skipped else ():
                aspects |= self._unless_skipped(name, getattr(a.flags, name), getattr(b.flags, name))
            is_one = a.same_view(b) and a.storage.data is b.storage.data  # then nothing has to be read
            if "shape" not in aspects and not is_one:
                view_a, view_b = without_repeats(a)[0], without_repeats(b)[0]
                if view_a.shape != view_b.shape:  # otherwise each value once: views of a kilobyte may show a terabyte
                    view_a, view_b = a, b
                exact = not (self.atol or self.rtol) and a.dtype is b.dtype and a.flags.lazy == b.flags.lazy
                if exact and not self.statistics:
                    is_same = same_bytes(view_a.row_major(), view_b.row_major())
                elif (values := compare_values(view_a, view_b, self.atol, self.rtol)) is not None:
                    self.close |= values.within_tolerance
                    is_same = values.within_tolerance and not exact
        elif isinstance(a, Composite) and isinstance(b, Composite):
            inner = Comparer({*self.skipped, "order", "device"}, self.atol, self.rtol, self.statistics)
            is_same = inner.compare([((), a.made, b.made)])
            self.close |= inner.close
        else:
            old, new = (tensor.kind if isinstance(tensor, Composite) else "plain" for tensor in (a, b))
            aspects["kind"] = (old, new)
        if not is_same:
            sides = [whole_number(tensor) if isinstance(tensor, TensorEntry) else None for tensor in (a, b)]
            aspects["values"] = (None, None) if None in sides or sides[0] == sides[1] else (sides[0], sides[1])
        return aspects, values


def _bare_modules(metadata: dict[Any, Any]) -> dict[Any, Any]:
    """A state dict's `_metadata` by the modules' own paths; the wrapped module's entry replaces the wrapper's."""
    return {
        without_wrappers(f"{path}.weight").rpartition(".")[0] if type(path) is str else path: value
        for path, value in metadata.items()
    }


def _shape_of(node: Any) -> Any:
    """Equal for containers whose parts can be compared one by one; None for leaves."""
    if isinstance(node, dict):
        return "dictionary"
    if isinstance(node, (list, tuple)):
        return type(node)
    if isinstance(node, Set):
        return "set", node.frozen, len(node.items)
    if isinstance(node, Object):
        return "object", canonical(_in_python_3(node.fn)) or node.name, node.how
    return None


def _scalar(node: Any) -> Any:
    """The number, text, date or path that an object stands for; None for anything else."""
    value = expand(node) if isinstance(node, Object) else None
    return None if isinstance(value, (Object, Set, Array, LongValue, dict, list, tuple)) else value


def _comparison_key(key: Any, counts: Counter[str]) -> Any:
    """A key in a form that compares equal in both files: a text or integer itself, others by type, an inert object as
    its text and its place among those with the same."""
    if type(key) is str or type(key) is int:
        return key

    def holds_node(key: Any) -> bool:  # the decoder bounds how deep keys are nested
        return any(map(holds_node, key)) if type(key) is tuple else isinstance(key, _NODES)

    if not holds_node(key):
        return type(key), key
    text = summary(key, 200)
    counts[text] += 1
    return _NODE, (text, counts[text])


def _same_plain(a: Any, b: Any) -> bool:
    """Equal values of one type; NaN equals NaN, and 0.0 is not -0.0."""
    if isinstance(a, LongValue) or isinstance(b, LongValue):  # the bytes of an array, wherever they are
        data = [InlineBytes(bytes(side)) if isinstance(side, (bytes, bytearray)) else side for side in (a, b)]
        one, other = (side.data if isinstance(side, LongValue) else side for side in data)
        return isinstance(one, Data) and isinstance(other, Data) and same_bytes(one, other)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex() or (a != a and b != b)
    if isinstance(a, complex):
        return _same_plain(a.real, b.real) and _same_plain(a.imag, b.imag)
    return _in_python_3(a) is _in_python_3(b) or bool(a == b)


def _in_python_3(value: Any) -> Any:
    """A name as Python 3 spells it, whichever pickle protocol wrote it; anything else as it is."""
    return Global(*in_python_3(value)) if type(value) is Global else value


def _strides(entry: TensorEntry) -> tuple[int, ...]:
    """Strides as far as they matter: not those of axes with one element, and none of an empty tensor."""
    if not entry.numel:
        return ()
    return tuple(stride for size, stride in zip(entry.shape, entry.stride, strict=True) if size != 1)


def ties(left: Any, right: Any, by_bare_name: bool) -> Iterator[Tie]:
    """Groups of names that share memory on one side only, among the names that both sides have."""
    lefts, rights = (
        memories(
            {
                address(bare(path) if by_bare_name else path): node
                for path, node in walk(tree)
                if isinstance(node, TensorEntry) and node.storage.nbytes
            }
        )
        for tree in (left, right)
    )
    for side, mine, other in (("left", lefts, rights), ("right", rights, lefts)):
        groups: dict[int, list[str]] = {}
        for name in mine:
            if name in other:
                groups.setdefault(mine[name], []).append(name)
        for names in groups.values():
            if len(names) > 1 and len({other[name] for name in names}) > 1:
                yield Tie(side, tuple(names))
