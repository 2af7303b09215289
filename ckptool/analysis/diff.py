"""The differences of two checkpoints, and the evidence on which the rest is called the same.

*Same* means: keys, types, shapes, row-major bytes and plain entries. Order, devices, strides, ties and `requires_grad`
count where both containers can express them; the report names what was not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptool.analysis.compare import ValueDifference, compare_values, same_bytes
from ckptool.checkpoint import Checkpoint, Composite, Data, InlineBytes, StorageRef, Tensor, TensorEntry
from ckptool.checkpoint.graph import SCALARS, alike
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set, canonical
from ckptool.checkpoint.numpy_arrays import LazyBytes, array_entry
from ckptool.checkpoint.registry import Report
from ckptool.checkpoint.selection import Chosen, topmost
from ckptool.checkpoint.state_dicts import bare, without_wrappers
from ckptool.checkpoint.strided import without_repeats
from ckptool.checkpoint.tree import Path, address, check_names, children, walk
from ckptool.commands import arg
from ckptool.errors import Conflict, UsageError
from ckptool.formats import named
from ckptool.pickles.encode import in_python_3
from ckptool.pickles.plain.text import summary

IGNORABLE = ("device", "dtype", "order", "prefix", "strides", "ties", "requires_grad", "metadata")
# What a safetensors file cannot say; two of a kind that can are compared in it.
_ONLY_IN_PICKLES = ("device", "strides", "requires_grad", "metadata")

ARRAY = "numpy array"

# What "same" rests on; the weakest that some tensor was called the same by.
BYTES, VALUES, TOLERANCE = "bytes", "values", "values within the tolerance"


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Something in both files that differs. `aspects`: in what (`shape`, `dtype`, `values`, …), old and new."""

    path: Path
    left: Any
    right: Any
    aspects: dict[str, tuple[Any, Any]]
    values: ValueDifference | None = None

    @property
    def address(self) -> str:
        return address(self.path)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Diff(Report):
    """The differences. `evidence`: what "same" rests on. Counts are of tensors; `same` is the verdict.

    ties: groups of names that share a storage in one file and not in the other, as (side, names).  only: patterns;
    where given, `same` is about what matches, without ties.  elements: of all tensors that were compared.
    changed_elements: those that differ, of what stands under several names once; None where they were not counted.
    bases: where in each file the parts lie.
    metadata_differs: state dicts whose `_metadata` differ, where it does not count; it and the order count if `strict`.
    """

    verdict = "same"

    left: str
    right: str
    same: bool
    evidence: str
    tensors: int
    equal: int
    changed: tuple[Difference, ...]
    only_left: tuple[tuple[Path, Any], ...]
    only_right: tuple[tuple[Path, Any], ...]
    ties: tuple[tuple[str, tuple[str, ...]], ...]
    order_differs: tuple[str, ...]
    ignored: tuple[str, ...]
    not_compared: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    elements: int = 0
    changed_elements: int | None = None
    bases: tuple[Path, Path] = ((), ())
    metadata_differs: tuple[str, ...] = ()
    strict: bool = True


_Aspects = dict[str, tuple[Any, Any]]


@dataclass(slots=True)
class _Found:
    tensors: int = 0
    elements: int = 0
    equal: int = 0
    changed: list[Difference] = field(default_factory=list)
    only_left: list[tuple[Path, Any]] = field(default_factory=list)
    only_right: list[tuple[Path, Any]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)


def diff(
    left: Checkpoint,
    right: Checkpoint,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    ignore: Collection[str] = (),
    statistics: bool = True,
    identity: bool = False,
    base: Path = (),
    remarks: tuple[str, ...] = (),
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
        raise UsageError(
            f"unknown kind of difference {unknown[0]!r} in {arg('ignore')}", f"Available: {', '.join(IGNORABLE)}."
        )
    pickled = not any(side.tensors_only or _of_ranks(side) for side in (left, right))
    skipped = set(ignore) | (set() if pickled else set(_ONLY_IN_PICKLES))
    lenient = not strict and "metadata" not in skipped
    comparer = _Comparer(skipped | ({"metadata"} if lenient else set()), pickled, atol, rtol, statistics)
    comparer.places = _Places() if identity else None
    comparer.notes_metadata = lenient
    pairs = [(base, left.tree, right.tree)]
    if only:
        pairs = comparer.pairs(*topmost((left.tree, right.tree), only, "prefix" in ignore))
    found = comparer.compare(pairs)
    ties = () if "ties" in skipped or not pickled or only else tuple(_tie_changes(left.tree, right.tree, comparer))
    order = () if "order" in skipped or not pickled else tuple(found.order)
    same = not (found.changed or found.only_left or found.only_right or ties or (order and strict))
    not_compared = () if pickled else ("order", "ties", *_ONLY_IN_PICKLES, *["arrays"] * comparer.mixed)
    tolerance = TOLERANCE if atol or rtol else VALUES
    evidence = tolerance if comparer.close else BYTES
    changed = {
        (id(b.storage), b.shape, b.stride, b.offset): values.changed
        for _, values, _, b in comparer.compared.values()
        if values is not None and isinstance(b, TensorEntry)
    }
    names = [str(c.source or side) for c, side in ((left, "the left one"), (right, "the right one"))]
    return Diff(
        names[0],
        names[1],
        same,
        evidence,
        found.tensors,
        found.equal,
        tuple(found.changed),
        tuple(found.only_left),
        tuple(found.only_right),
        ties,
        order,
        tuple(sorted(ignore)),
        tuple(name for name in not_compared if name not in ignore),
        remarks,
        tuple(only),
        found.elements,
        sum(changed.values()) if statistics else None,
        metadata_differs=tuple(found.metadata),
        strict=strict,
    )


def _of_ranks(checkpoint: Checkpoint) -> bool:
    """True for a folder that only its engine writes: which tensors share a storage there, and in what order they come,
    follows from how the ranks divide them, not from the model."""
    container = named(checkpoint.container)
    return container.is_folder and not container.writable


class _Comparer:
    def __init__(self, skipped: set[str], pickled: bool, atol: float, rtol: float, statistics: bool) -> None:
        self.pickled = pickled  # both containers tell numpy arrays from tensors
        self.mixed = False  # one stood for the other, where a container cannot
        self.skipped, self.atol, self.rtol, self.statistics = skipped, atol, rtol, statistics
        self.close = False  # bytes that differ were called the same
        self.seen: set[tuple[int, int]] = set()
        self.places: _Places | None = None
        self.notes_metadata = False  # it does not count, but is looked at
        self.compared: dict[tuple[int, int], tuple[_Aspects, ValueDifference | None, Tensor, Tensor]] = {}
        self.found = _Found()
        self.bare: dict[int, Any] = {}  # `_metadata` whose keys have lost their prefixes, by id (and kept alive for it)

    def pairs(self, left: Chosen, right: Chosen) -> list[tuple[Path, Any, Any]]:
        """The nodes that were chosen in both; notes those of one only."""
        self.found.only_left += [found for key, found in left.items() if key not in right]
        self.found.only_right += [found for key, found in right.items() if key not in left]
        return [(path, node, right[key][1]) for key, (path, node) in left.items() if key in right]

    def compare(self, pairs: Sequence[tuple[Path, Any, Any]]) -> _Found:
        stack = [iter(pairs)]  # a million plain values are not made a million pairs
        while stack:
            if (pair := next(stack[-1], None)) is None:
                stack.pop()
            else:
                stack.append(self._pair(*pair))
        return self.found

    def _pair(self, path: Path, a: Any, b: Any) -> Iterator[tuple[Path, Any, Any]]:
        """Compares two nodes; gives the pairs of parts that are still to be compared."""
        if self.places is not None and not self.places.alike(a, b):
            self._change(path, a, b, {"identity": (None, None)})
        if arrays := _arrays(a, b):
            kinds = [ARRAY if isinstance(node, Object) else "tensor" for node in (a, b)]
            mixed = kinds[0] != kinds[1]
            self.mixed |= mixed
            aspects: _Aspects = {"kind": (kinds[0], kinds[1])} if mixed and self.pickled else {}
            self._tensors(path, *arrays, "tensor" in kinds, aspects)
        elif isinstance(a, (TensorEntry, Composite)) and isinstance(b, (TensorEntry, Composite)):
            self._tensors(path, a, b)
        elif isinstance(a, StorageRef) and isinstance(b, StorageRef):
            self._storages(path, a, b)
        elif _shape_of(a) is not None and _shape_of(a) == _shape_of(b):
            if (id(a), id(b)) not in self.seen:
                self.seen.add((id(a), id(b)))
                yield from self._containers(path, a, b)
        elif not _same_plain(a, b) and not self._same_parameter(path, a, b):
            self._change(path, a, b, {"value": (a, b)})

    def _same_parameter(self, path: Path, a: Any, b: Any) -> bool:
        """True for an optimizer's names of one parameter where prefixes do not count."""
        names = "prefix" in self.skipped and len(path) > 1 and path[-2] in ("param_names", "params")
        return names and type(a) is type(b) is str and without_wrappers(a) == without_wrappers(b)

    def _storages(self, path: Path, a: StorageRef, b: StorageRef) -> None:
        aspects: dict[str, tuple[Any, Any]] = {}
        if a.storage.location != b.storage.location and "device" not in self.skipped:
            aspects["device"] = (a.storage.location, b.storage.location)
        if a.dtype is not b.dtype or not same_bytes(a.storage.data, b.storage.data):
            aspects["values"] = (a, b)
        if aspects:
            self._change(path, a, b, aspects)

    def _containers(self, path: Path, a: Any, b: Any) -> Iterator[tuple[Path, Any, Any]]:
        (left, ours), (right, theirs) = self._by_key(a), self._by_key(b)
        self.found.only_left += [((*path, ours.get(key, key)), part) for key, part in left.items() if key not in right]
        self.found.only_right += [
            ((*path, theirs.get(key, key)), part) for key, part in right.items() if key not in left
        ]
        common = [key for key in left if key in right]
        if isinstance(a, dict) and common != [key for key in right if key in left]:
            self.found.order.append(address(path))
        if self.notes_metadata and not alike(self._metadata(a), self._metadata(b)):
            self.found.metadata.append(address(path))
        for key in common:
            one, other, segment = left[key], right[key], ours.get(key, key)
            if type(key) is tuple and key[0] is _Node:
                yield (*path, segment), segment, theirs[key]
            if type(one) not in SCALARS or type(one) is not type(other) or one != other or one == 0:
                yield (*path, segment), one, other  # few plain values differ; 0.0 may be -0.0

    def _metadata(self, node: Any) -> Any:
        found = (node.attributes or {}).get("_metadata") if isinstance(node, OrderedDict) else None
        return _without_wrapper_modules(found) if "prefix" in self.skipped and isinstance(found, dict) else found

    def _by_key(self, node: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """The parts of a node by what their keys are called in both files; the keys that are called otherwise."""
        parts: dict[Any, Any] = {}
        segments: dict[Any, Any] = {}
        for key, segment, part in self._parts(node):
            if key in parts and "prefix" not in self.skipped:
                key = (_Attribute, key)  # of a dictionary with attributes, one is called as a key is
            if key in parts:
                one, other = (str(each) for each in (segments.get(key, key), segment))
                raise Conflict(
                    f"without their prefixes {one!r} and {other!r} are both {str(key)!r}",
                    "Which of the two to compare is not known.",
                    f"Compare them under their own names: without {arg('ignore')} prefix",
                )
            parts[key] = part
            if key is not segment:
                segments[key] = segment
        return parts, segments

    def _parts(self, node: Any) -> Iterator[tuple[Any, Any, Any]]:
        strip = "prefix" in self.skipped and isinstance(node, dict) and id(node) not in self.bare
        hidden = {"_metadata"} if "metadata" in self.skipped and isinstance(node, OrderedDict) else set()
        counts: Counter[str] = Counter()
        for segment, part in children(node):
            if segment not in hidden or (isinstance(node, dict) and segment in node):
                key = without_wrappers(segment) if strip and type(segment) is str else segment
                if strip and segment == "_metadata" and segment not in node and isinstance(part, dict):
                    part = _without_wrapper_modules(part)
                    self.bare[id(part)] = part
                yield _comparable(key, counts), segment, part

    def _tensors(self, path: Path, a: Tensor, b: Tensor, counted: bool = True, kinds: _Aspects | None = None) -> None:
        """Compares two tensors; what stands under several names only once. kinds: where they differ before that."""
        self.found.tensors += counted
        self.found.elements += a.numel
        check_names(self.found.tensors, len(self.compared))
        key = (id(a), id(b))
        known = self.compared.get(key) or self.compared.setdefault(key, (*self._different(a, b), a, b))
        if known[0] or kinds:
            self.found.changed.append(Difference(path, a, b, {**(kinds or {}), **known[0]}, known[1]))
        else:
            self.found.equal += counted

    def _different(self, a: Tensor, b: Tensor) -> tuple[_Aspects, ValueDifference | None]:
        """In what two tensors differ, and by how much their values do."""
        aspects: dict[str, tuple[Any, Any]] = {}
        if a.shape != b.shape:
            aspects["shape"] = (a.shape, b.shape)
        if a.dtype is not b.dtype and "dtype" not in self.skipped:
            aspects["dtype"] = (a.dtype, b.dtype)
        if a.location != b.location and "device" not in self.skipped:
            aspects["device"] = (a.location, b.location)
        if isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
            self._strided(a, b, aspects)
        elif isinstance(a, TensorEntry) or isinstance(b, TensorEntry):
            aspects["kind"] = (_kind(a), _kind(b))
        elif not self._same_composites(a, b):
            aspects["values"] = (None, None)
        values = None
        if "shape" not in aspects and isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
            differs, values = self._values(a, b)
            if differs:
                aspects["values"] = (None, None)
        return aspects, values

    def _strided(self, a: TensorEntry, b: TensorEntry, aspects: dict[str, tuple[Any, Any]]) -> None:
        if "strides" not in self.skipped and "shape" not in aspects and _strides(a) != _strides(b):
            aspects["strides"] = (a.stride, b.stride)
        if "requires_grad" not in self.skipped:
            for name in ("requires_grad", "parameter"):
                if getattr(a.flags, name) != getattr(b.flags, name):
                    aspects[name] = (getattr(a.flags, name), getattr(b.flags, name))

    def _values(self, a: TensorEntry, b: TensorEntry) -> tuple[bool, ValueDifference | None]:
        """True where values differ by more than the tolerance, and the difference if it was asked for."""
        if self._same_source(a, b):
            return False, None
        a, b = _shown_once(a, b)
        exact = not (self.atol or self.rtol) and a.dtype is b.dtype and a.flags.lazy == b.flags.lazy
        if exact and not self.statistics:
            return not same_bytes(a.row_major(), b.row_major()), None
        found = compare_values(a, b, self.atol, self.rtol)
        self.close |= found is not None and found.within_tolerance
        return found is not None and (exact or not found.within_tolerance), found

    @staticmethod
    def _same_source(a: TensorEntry, b: TensorEntry) -> bool:
        """True for the same view of the same bytes: there is nothing to read."""
        return a.same_view(b) and a.storage.data is b.storage.data

    def _same_composites(self, a: Composite, b: Composite) -> bool:
        inner = _Comparer(self.skipped | {"order", "device"}, self.pickled, self.atol, self.rtol, self.statistics)
        found = inner.compare([((), a.made, b.made)])
        self.close |= inner.close
        return not (found.changed or found.only_left or found.only_right)

    def _change(self, path: Path, a: Any, b: Any, aspects: dict[str, tuple[Any, Any]]) -> None:
        self.found.changed.append(Difference(path, a, b, aspects))


def _without_wrapper_modules(metadata: dict[Any, Any]) -> dict[Any, Any]:
    """A state dict's `_metadata` by the modules' own paths; a wrapper's entry gives way to the one of what it wraps."""
    return {
        without_wrappers(f"{path}.weight").rpartition(".")[0] if type(path) is str else path: value
        for path, value in metadata.items()
    }


def _arrays(a: Any, b: Any) -> tuple[TensorEntry, TensorEntry] | None:
    """Pickled numpy arrays, of which one may be a tensor, as tensors; None where neither is an array."""
    if not any(isinstance(node, Object) for node in (a, b)):
        return None
    one, other = (node if isinstance(node, TensorEntry) else array_entry(node) for node in (a, b))
    return (one, other) if one is not None and other is not None else None


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


class _Node:
    """The kind of a key that is, or holds, an inert object or a tensor."""


class _Places:
    """Pairs of objects of the two trees that stand for each other, to find what is shared in only one of them."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.right: dict[int, int] = {}

    def alike(self, a: Any, b: Any) -> bool:
        if not isinstance(a, _HAVE_IDENTITY) or not isinstance(b, _HAVE_IDENTITY):
            return True
        return self.left.setdefault(id(a), id(b)) == id(b) and self.right.setdefault(id(b), id(a)) == id(a)


_HAVE_IDENTITY = (dict, list, Set, Object, TensorEntry, Composite, bytearray)


class _Attribute:
    """The kind of a name that an item has too."""


def _comparable(key: Any, counts: Counter[str]) -> Any:
    """What a key is called in both files: a text or integer itself, others by type, an inert object as its text and its
    place among those alike."""
    if type(key) is str or type(key) is int:
        return key
    if not _holds_node(key):
        return type(key), key
    text = summary(key, 200)
    counts[text] += 1
    return _Node, (text, counts[text])


def _holds_node(key: Any) -> bool:
    if type(key) is tuple:
        return any(map(_holds_node, key))  # the decoder bounds how deep keys are nested
    return isinstance(key, (Object, Set, TensorEntry, Composite, StorageRef))


def _same_plain(a: Any, b: Any) -> bool:
    """Equal values of one type; NaN equals NaN, and 0.0 is not -0.0."""
    if isinstance(a, LazyBytes) or isinstance(b, LazyBytes):
        one, other = _long_data(a), _long_data(b)
        return one is not None and other is not None and same_bytes(one, other)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex() or (a != a and b != b)
    if isinstance(a, complex):
        return _same_plain(a.real, b.real) and _same_plain(a.imag, b.imag)
    return _in_python_3(a) is _in_python_3(b) or bool(a == b)


def _in_python_3(value: Any) -> Any:
    """A name as Python 3 spells it, whatever the protocol that it was written in; anything else as it is."""
    return Global(*in_python_3(value)) if type(value) is Global else value


def _long_data(value: Any) -> Data | None:
    """The bytes of an array, wherever they are."""
    if isinstance(value, LazyBytes):
        return value.data
    return InlineBytes(bytes(value)) if isinstance(value, (bytes, bytearray)) else None


def _kind(tensor: Tensor) -> str:
    return tensor.kind if isinstance(tensor, Composite) else "plain"


def _shown_once(a: TensorEntry, b: TensorEntry) -> tuple[TensorEntry, TensorEntry]:
    """Two views that repeat values along the same dimensions, each value once: a kilobyte may show a terabyte."""
    once, other = without_repeats(a)[0], without_repeats(b)[0]
    return (once, other) if once.shape == other.shape else (a, b)


def _strides(entry: TensorEntry) -> tuple[int, ...]:
    """Strides as far as they matter: not those of axes with one element, and none of an empty tensor."""
    if not entry.numel:
        return ()
    return tuple(stride for size, stride in zip(entry.shape, entry.stride, strict=True) if size != 1)


def _tie_changes(left: Any, right: Any, comparer: _Comparer) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Groups of names that share a storage on one side only, among the names that both sides have."""
    lefts, rights = _storage_by_name(left, comparer), _storage_by_name(right, comparer)
    common = lefts.keys() & rights.keys()
    for side, mine, other in (("left", lefts, rights), ("right", rights, lefts)):
        by_storage: dict[int, list[str]] = {}
        for name, storage in mine.items():
            if name in common:
                by_storage.setdefault(storage, []).append(name)
        for names in by_storage.values():
            if len(names) > 1 and len({other[name] for name in names}) > 1:
                yield side, tuple(names)


def _storage_by_name(tree: Any, comparer: _Comparer) -> dict[str, int]:
    strip = "prefix" in comparer.skipped
    names: dict[str, int] = {}
    for path, node in walk(tree):
        if isinstance(node, TensorEntry) and node.storage.nbytes:
            names[address(bare(path) if strip else path)] = id(node.storage)
    return names
