"""A tree in torch's tables: flat names by torch's rules, and the pickle of what these do not say.

Keys are joined by dots, as texts; dictionaries are always descended into, lists where they hold a tensor or dictionary;
anything else is one value. The pickle is a tensor of bytes in the table, `ckptool.pickle`. The bytes of a storage are
in the tensor of a flat name, or in an object (`NAME#N`, its storage number N); `ckptool.pickle.0`, … are storages of
which no tensor has all bytes. The pickle counts only where it has the same names, types, shapes and values as the
table; else it is passed over, and that is noted.

Source: torch/distributed/checkpoint/_nested_dict.py and _traverse.py, torch 2.4 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Computed, Note, Storage, StorageRef, TensorEntry
from ckptool.checkpoint import tree as trees
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.graph import MAX_DEPTH, SCALARS, alike, visit
from ckptool.checkpoint.nodes import Object, OrderedDict, Set
from ckptool.checkpoint.paths import literal
from ckptool.checkpoint.strided import row_major
from ckptool.checkpoint.tree import address, replaced_at
from ckptool.commands import FILE, OUT, arg, command
from ckptool.conventions import optimizer_keys
from ckptool.conventions.state_dicts import optimizers
from ckptool.errors import CkptoolError, Conflict, Corrupt, LimitExceeded, Unsupported, counted
from ckptool.facts import dataclass, replace
from ckptool.formats import marks
from ckptool.formats.whole_tree import DAMAGE, KEY, MAX_PICKLE, PickledStorages, as_bytes, decoded, key_of, pickle_of

# Names made at most: these, and so many for each part of a holder. Shared parts are named in each place anew.
FREE_NAMES = 10_000
NAMES_PER_PART = 4

SHARED = "objects that appear in several places"


class FlatNames:
    """The values of a tree by their flat names. paths: their keys, as texts, and indices of lists.

    lost: what the names do not say of the tree, each kind with its first address.
    holders: the dictionaries and lists that were descended into, by id.  max_names: that these may have.
    Raises `Unsupported` for a tree that is no dictionary, for two values of one name, and for a container that contains
    itself.
    """

    def __init__(self, tree: Any) -> None:
        if not isinstance(tree, dict):
            fix = f"Choose a part: FILE#ADDRESS; or write a torch file: {arg(container='torch-zip')}"
            raise Unsupported("a dcp folder holds a dictionary and nothing else", fix=fix)
        self.values: dict[str, Any] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.lost: dict[str, str] = {}
        self.holders: dict[int, Any] = {}
        self.max_names = FREE_NAMES
        self.hold(tree, ())
        holders = [id(tree)]
        stack: list[tuple[tuple[str | int, ...], tuple[Any, ...], Iterator[tuple[Any, Any]]]]
        stack = [((), (), iter(tree.items()))]
        while stack:
            path, place, items = stack[-1]
            for key, value in items:
                inner_path: tuple[str | int, ...] = (*path, key if isinstance(items, enumerate) else str(key))
                inner_place = (*place, key)
                nodes = visit(value, lambda node: node if type(node) is list else ()) if type(value) is list else ()
                is_holder = isinstance(value, dict)
                if not is_holder and not any(isinstance(node, (dict, TensorEntry, Composite)) for node in nodes):
                    self.add(inner_path, inner_place, value)
                    continue
                if id(value) in holders or len(stack) > MAX_DEPTH:
                    entry = max(at for at, (_, _, level) in enumerate(stack) if not isinstance(level, enumerate))
                    drop = literal(address(inner_place[: entry + 1]))  # no element of a list
                    fix = f"Leave it out first: {command('edit', FILE, drop=drop, out=OUT)}"
                    raise Conflict(f"{address(inner_place)} contains itself", "Nothing was written.", fix)
                self.hold(value, inner_place)
                holders.append(id(value))
                stack.append((inner_path, inner_place, iter(value.items()) if is_holder else enumerate(value)))
                break
            else:
                stack.pop()
                holders.pop()
        if with_optimizers(tree)[0] is not tree:
            self.lost.setdefault("an optimizer's flat keys, or numbers kept as strings", "")

    def add(self, path: tuple[str | int, ...], place: tuple[Any, ...], value: Any) -> None:
        name = ".".join(map(str, path))
        if name in self.values:
            what = f"{address(place)} and another entry would both be called {name}"
            why = "torch.distributed.checkpoint joins keys with dots, as strings. Nothing was written."
            raise Unsupported(what, why, f"Rename one first: {command('rename', FILE, 'OLD => NEW', out=OUT)}")
        if len(self.values) >= self.max_names:
            names = counted(self.max_names, "name")
            raise LimitExceeded(f"more than {names}", "What objects share has a name in each of them.")
        self.values[name], self.paths[name] = value, path
        if isinstance(value, TensorEntry) and value.flags.parameter:
            self.lost.setdefault("which tensors are Parameters", address(place))

    def hold(self, node: Any, place: tuple[Any, ...]) -> None:
        """Records what the names do not say of a dictionary or list that is descended into."""
        if id(node) in self.holders:
            self.lost.setdefault(SHARED, address(place))
        else:
            self.max_names += NAMES_PER_PART * len(node)
        self.holders[id(node)] = node
        if isinstance(node, dict):
            if not node:
                self.lost.setdefault("empty dictionaries", address(place))
            if isinstance(node, OrderedDict):
                self.lost.setdefault("ordered dictionaries and what is set on them (_metadata)", address(place))
            if not all(type(key) is str for key in node):
                self.lost.setdefault("keys that are not strings", address(place))


def flat_names(checkpoint: Checkpoint) -> FlatNames:
    """The flat names of a tree. Optimizers that torch had flattened are so again: torchtitan loads no others."""
    names, tree = FlatNames(checkpoint.tree), checkpoint.tree
    if names.lost or not any(note.code == optimizer_keys.RESTORED for note in checkpoint.notes):
        return names
    for path, optimizer in list(optimizers(tree)):
        if all(type(name) is str for name in optimizer["state"]):
            flat = optimizer_keys.flattened(optimizer).items()  # where each name has options of its own
            tree = replaced_at(tree, path, {k: type(v)([*v]) if type(v) in (list, tuple) else v for k, v in flat})
    again = FlatNames(tree)
    again.lost.clear()  # as the table of torch has them
    return names if lost_in_table(again) else again


def with_optimizers(tree: dict[Any, Any]) -> tuple[dict[Any, Any], list[Note]]:
    """The tree with the optimizers as they were before torch flattened their keys, or made texts of their numbers."""
    unflat, notes = optimizer_keys.nested(tree), []
    if unflat is not tree:
        what = "flattened keys of an optimizer (state.NAME.KEY) are shown as `state` by name and `param_groups`"
        notes.append(Note(optimizer_keys.RESTORED, what))
    for path, optimizer in list(optimizers(unflat)):
        numbered = optimizer_keys.with_numbers(optimizer)
        if numbered is not optimizer:
            what = f"{counted(len(numbered['state']), 'key')} of an optimizer's state, which torch wrote as strings"
            notes.append(Note(optimizer_keys.RESTORED, f"{what}, are numbers again, as `param_groups` has them"))
            unflat = replaced_at(unflat, path, numbered)
    return unflat, notes


# The pickle ----------------------------------------------------------------------------------------------------------

NAME = KEY
MAX_COMPARED = 8 << 20  # bytes of values that are read to compare the pickle's tree with the table
BEGINNING = 16 << 10  # of each tensor


_HAVE_IDENTITY = (dict, list, tuple, Set, Object, Composite, TensorEntry, StorageRef, bytearray)


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where the bytes of a storage are in the folder: in a tensor or object of that name, those from start to stop.

    axes: those of a tensor that was divided in row-major order, as they lie in the storage.
    """

    name: str
    start: int
    stop: int
    axes: list[int] | None = None

    def holds(self, view: TensorEntry | StorageRef) -> bool:
        """True if all bytes that a view touches are there."""
        start, stop = view.span() if isinstance(view, TensorEntry) else (0, view.storage.nbytes)
        size = view.dtype.itemsize if view.dtype is not None else 1
        return self.start <= start and stop <= self.stop and self.start % size == 0


# Writing -------------------------------------------------------------------------------------------------------------


def lost_in_table(flat: FlatNames) -> dict[str, str]:
    """What the table would not say of a tree, each with an address or name where it is so; empty if it says all."""
    lost = dict(flat.lost)
    owners: dict[int, str] = dict.fromkeys(flat.holders, "")  # id of a part -> the name of what it is in
    views: dict[int, Any] = {}  # id of a storage -> the view, or the name of the object, that it is in
    for name, value in flat.values.items():
        is_tensor = isinstance(value, TensorEntry)
        for node in [value] if is_tensor else visit(value):
            if not isinstance(node, _HAVE_IDENTITY) or node == ():
                continue
            if owners.setdefault(id(node), name) != name:
                lost.setdefault(SHARED, name)
            if isinstance(node, (TensorEntry, StorageRef)):
                view = node.view if is_tensor and isinstance(node, TensorEntry) else name
                if views.setdefault(id(node.storage), view) != view:
                    lost.setdefault("tensors that share memory as different views", name)
        if isinstance(value, TensorEntry) and (value.flags.conj or value.flags.neg):
            lost.setdefault("conjugate and negative views", name)
    return lost


def pickled(checkpoint: Checkpoint, homes: dict[int, Home]) -> tuple[bytes, list[Storage]]:
    """The pickle of a tree, and the storages whose bytes it needs beside what the table names.

    homes: of storages, by their id. Raises `LimitExceeded` for a pickle that would not be read.
    """
    views = [view for view in visit(checkpoint.tree) if isinstance(view, (TensorEntry, StorageRef))]
    away = {id(view.storage) for view in views if id(view.storage) in homes and not homes[id(view.storage)].holds(view)}
    raw: list[Storage] = []
    placed: dict[int, tuple[Storage, int]] = {}  # id of a storage -> that of its home, and where this begins in it
    keys: dict[int, str] = {}

    def at_home(view: Any) -> Any:
        storage = view.storage
        if id(storage) not in placed:
            home = homes.get(id(storage)) if id(storage) not in away else None
            if home is None:
                home = Home(f"{NAME}.{len(raw)}", 0, storage.nbytes)
                raw.append(storage)
            target = Storage(Computed(home.stop - home.start, storage.data.read), storage.location)
            placed[id(storage)], keys[id(target)] = (target, home.start), key_of(home.name, home.axes)
        target, begin = placed[id(storage)]
        if isinstance(view, StorageRef):
            return replace(view, storage=target)
        return replace(view, storage=target, offset=view.offset - begin // view.dtype.itemsize)

    mark = checkpoint.metadata.get(marks.RECOVERED)
    tree = trees.rebuild(checkpoint.tree, at_home)
    return pickle_of({"tree": tree, "recovered": mark}, keys), raw


# Reading -------------------------------------------------------------------------------------------------------------


def restored(values: dict[str, Any]) -> tuple[Any, dict[str, Any], list[Note], tuple[Any, ...]]:
    """The tree of the pickle, its metadata, notes, and what of it is neither inert nor in the tree; None in place of
    the tree where there is no pickle that fits the table.

    values: those of the table by their flat names, from which the pickle's own are taken out.
    """
    if NAME not in values:
        return None, {}, [], ()
    aside: tuple[Any, ...] = ()
    entries = {name: values.pop(name) for name in [*values] if name == NAME or name.startswith(f"{NAME}.")}
    try:
        if entries[NAME].nbytes > MAX_PICKLE or all(part.crc is None for part in entries[NAME].storage.below()):
            raise Corrupt("it is too large, or has no checksum")
        content = entries[NAME].bytes()  # which compares them with their checksum
        objects = {name: value for name, value in values.items() if not isinstance(value, TensorEntry)}
        in_objects = ((name, enumerate(trees.storages(value))) for name, value in objects.items())
        held = {f"{name}#{number}": as_bytes(storage) for name, numbered in in_objects for number, storage in numbered}
        pickle = decoded(content, PickledStorages(held | values | entries), NAME)
        aside, loaded = pickle.aside(), pickle.root
        if pickle.discarded or loaded.keys() != {"tree", "recovered"}:
            raise Corrupt("ckptool did not write it")
        tree, mark = loaded["tree"], loaded["recovered"]
        tree_values = FlatNames(tree).values
        if tree_values.keys() != values.keys():
            raise Conflict("its names differ from the table's")
        budget = [MAX_COMPARED]
        for name, value in values.items():
            if not _is_same(tree_values[name], value, budget):
                raise Conflict(f"its {name} differs from the table's")
        metadata = {marks.RECOVERED: mark} if type(mark) is str else {}
        return tree, metadata, list(marks.recovered_notes(metadata)), ()
    except CkptoolError as error:
        why = error.what
    except DAMAGE as error:
        why = f"it is damaged ({type(error).__name__})"
    what = f"{NAME} was ignored, so types of keys, ties and the like are as torch sees them: {why}"
    return None, {}, [Note("side-car-ignored", what)], aside


def _is_same(from_pickle: Any, value: Any, budget: list[int]) -> bool:
    """True unless a value of the pickle's tree is seen to differ from the table's.

    Of tensors in different bytes (parts of a wider one), the beginnings are compared; budget: the bytes of values that
    may still be read for that. Of objects, types and plain values are compared, whatever their parts share; of tensors
    in these, types and shapes.
    """
    if isinstance(from_pickle, TensorEntry) and isinstance(value, TensorEntry):
        is_like = (from_pickle.dtype, from_pickle.shape) == (value.dtype, value.shape)
        is_one = from_pickle.storage.data is value.storage.data and from_pickle.layout == value.layout
        if not is_like or is_one:
            return is_like and from_pickle.flags.lazy == value.flags.lazy
        pair = row_major(resolved(from_pickle)), row_major(value)  # the table's are no conjugate or negative views
        length = min(budget[0], BEGINNING, pair[0].length)
        budget[0] -= length
        return pair[0].read(0, length) == pair[1].read(0, length)
    return alike(from_pickle, value, equal=_is_same_leaf)


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, TensorEntry):
        return (one.dtype, one.shape) == (other.dtype, other.shape)
    is_plain = type(one) in SCALARS or type(one) is bytes
    return not is_plain or one == other or repr(one) == repr(other)  # NaN is the same as NaN
