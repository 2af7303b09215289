"""Ways through a tree: everything in it with its path, one thing by its address, and a copy with parts replaced.

Trees may share containers and contain themselves; nothing here recurses on them. A path is a tuple of keys and indices;
an address is its text, `state_dict/fc.weight`, with `/` and `~` in a key written `~1` and `~0` (RFC 6901).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from ckptool.checkpoint import Composite, Flags, Storage, StorageRef, Tensor, TensorEntry
from ckptool.checkpoint.graph import COPY, FromParts, GraphMapper, alike, same, structural_parts, visit
from ckptool.checkpoint.nodes import MISSING, Object, OrderedDict, Set, canonical, same_kind
from ckptool.commands import FILE, command
from ckptool.errors import Ambiguous, LimitExceeded, MissingKey, UsageError, counted, listed

Path = tuple[Any, ...]
Leaf = Callable[[Any], Any]
Key = TypeVar("Key")

# A container that stands in several places (a state dict that is both `model` and `best`) is walked each time, up to a
# number of nodes in all, and more for each node; after that only once. What objects share has a name in each of them.
REPEATED_NODES = 10_000
REPEATED_PER_NODE = 4

MANY_NAMES = 20_000  # of tensors; if there are more, they must be those of enough tensors

_CONTAINERS = (dict, list, tuple, Set, Object)
_STORED = (TensorEntry, StorageRef)


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of `node` that a path can lead to, with their segment; nothing for leaves and tensors."""
    if isinstance(node, dict):
        yield from node.items()
        if isinstance(node, OrderedDict) and node.attributes:
            yield from node.attributes.items()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)
    elif isinstance(node, Set):
        yield from enumerate(node.items)
    elif isinstance(node, Object):
        if isinstance(node.fn, _CONTAINERS):
            yield "(callable)", node.fn
        if node.args:
            yield "(args)", node.args
        if node.kwargs:
            yield "(kwargs)", node.kwargs
        yield from (node.items or {}).items()
        yield from enumerate(node.elements or ())
        if attributes := node.attributes:
            yield from attributes.items()
        elif node.state is not MISSING and node.state is not None:
            yield "(state)", node.state


def walk(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Every node with its path, parents first. A shared one comes for each path; one that contains itself, once."""
    yield (), tree
    if not isinstance(tree, _CONTAINERS):
        return
    seen, ancestors, repeated = {id(tree)}, [id(tree)], -REPEATED_NODES
    # Not written with `visit`: what stands in two places comes twice, each time with its path.
    stack: list[tuple[Path, Iterator[tuple[Any, Any]]]] = [((), children(tree))]
    while stack:
        path, parts = stack[-1]
        for segment, node in parts:
            node_path = (*path, segment)
            yield node_path, node
            if isinstance(node, _CONTAINERS) and (node or type(node) is OrderedDict):
                if id(node) not in seen:
                    seen.add(id(node))
                    repeated -= REPEATED_PER_NODE * _width(node)
                elif id(node) in ancestors or repeated > 0:
                    continue
                else:
                    # About how many characters its address has, and as much for each segment.
                    length = sum([8 + len(key) if type(key) is str else 16 for key in node_path])
                    repeated += _width(node) * (1 + length // 64)
                ancestors.append(id(node))
                stack.append((node_path, children(node)))
                break
        else:
            stack.pop()
            ancestors.pop()


def _width(node: Any) -> int:
    """About how many nodes `children` gives."""
    if isinstance(node, (dict, list, tuple)):
        return 1 + len(node) + len(getattr(node, "attributes", None) or ())
    return 8 + sum(1 for _ in children(node))


def tensors(tree: Any) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor with its path: the same tensor under two names twice, a composite as one."""
    for path, node in walk(tree):
        if isinstance(node, (TensorEntry, Composite)):
            yield path, node


def second_names(tree: Any, names: Collection[Path]) -> list[str]:
    """The tensors at these paths that are tied to one at none of them, each as `a is tied to b`."""
    entries = [(path, node) for path, node in walk(tree) if isinstance(node, TensorEntry)] if names else []
    # The first of several.
    others = {node.view: address(path) for path, node in reversed(entries) if path not in names}
    ties = [(path, others.get(node.view)) for path, node in entries if path in names]
    return [f"{address(path)} is tied to {other}" for path, other in ties if other is not None]


def memories(entries: Mapping[Key, TensorEntry]) -> dict[Key, int]:
    """A number for each tensor, the same for those that overlap in a storage; slices side by side in it do not."""
    spans = {key: (id(entry.storage), *entry.span()) for key, entry in entries.items()}
    number, end, previous = 0, 0, 0
    numbers: dict[Key, int] = {}
    for key in sorted(spans, key=spans.__getitem__):
        storage, begin, after = spans[key]
        if storage != previous or begin >= end:
            number, end, previous = number + 1, after, storage
        end = max(end, after)
        numbers[key] = number
    return {key: numbers[key] for key in entries}


def check_names(names: int, tensors: int) -> None:
    """Raises `LimitExceeded` where a few tensors stand under very many names each."""
    if names > MANY_NAMES and names > 4 * tensors:
        what = f"{counted(names, 'name')} or more for {counted(tensors, 'tensor')}"
        raise LimitExceeded(what, "", f"Look at a part of it: {command('show', FILE / 'ADDRESS')}")


def stored_parts(node: Any) -> Iterator[TensorEntry | StorageRef]:
    """The parts of a node that have storages: a tensor or storage itself, the parts of a composite, else nothing."""
    if isinstance(node, (TensorEntry, StorageRef)):
        yield node
    elif isinstance(node, Composite):
        yield from node.parts()


def storages(tree: Any) -> Iterator[Storage]:
    """Every storage that the tree refers to, once, in the order in which it is met; those of keys, too."""
    seen: set[int] = set()
    for node in visit(tree, lambda node: () if isinstance(node, _STORED) else structural_parts(node)):
        if isinstance(node, _STORED) and id(node.storage) not in seen:
            seen.add(id(node.storage))
            yield node.storage


# Addresses -----------------------------------------------------------------------------------------------------------


def segment_text(segment: Any) -> str:
    """A segment as it stands in an address: `fc.weight`, `0`, `a~1b` for the key `a/b`."""
    return str(segment).replace("~", "~0").replace("/", "~1")


def address(path: Path) -> str:
    """A path as text; the empty text for the whole."""
    return "/".join(map(segment_text, path))


def find(tree: Any, text: str) -> tuple[Path, Any]:
    """The path and node that an address leads to; the whole tree for an empty one.

    Below a pickled module, the names of its state dict are found as well. Slashes at the end count where the key is
    empty.

    Raises `MissingKey`, which lists what is there, if nothing is; `Ambiguous` if the keys 0 and '0' both are.
    """
    path: Path = ()
    node = tree
    parts = text.lstrip("/").split("/") if text.strip("/") else []
    for number, part in enumerate(parts):
        if _is_plain_name(node, part):
            path, node = (*path, part), node[part]
            continue
        matches = matching(children(node), part) or matching((module_state_dict(node) or {}).items(), part)
        if not matches and not any(parts[number:]):
            break
        if not matches:
            where = f"in {address(path)}" if path else "at the top level"
            raise MissingKey.among(part, partial(_names_in, node), where, partial(_first_named, node, path, part))
        if len(matches) > 1:
            keys = listed([repr(segment) for segment, _ in matches])
            what = f"{part} names {counted(len(matches), 'entry', 'entries')} of {address(path) or 'the top'}"
            raise Ambiguous(f"{what}: {keys}", "An address has to be unambiguous.")
        path, node = (*path, matches[0][0]), matches[0][1]
    return path, node


def _names_in(node: Any) -> list[str]:
    """What an address can name in a node."""
    return [*map(segment_text, (*(module_state_dict(node) or ()), *(segment for segment, _ in children(node))))]


def _first_named(node: Any, above: Path, part: str) -> str:
    """The first address below a node that ends in a name, as far as it is searched."""
    paths = (path for path, _ in islice(walk(node), MANY_NAMES) if path and segment_text(path[-1]) == part)
    return next((address((*above, *path)) for path in paths), "")


def _is_plain_name(node: Any, part: str) -> bool:
    """True for a key that no other can be spelled like: the many names of a state dict need not be searched for it."""
    if not isinstance(node, dict) or part not in node or "~" in part or not part[:1].isalpha():
        return False
    return not (isinstance(node, OrderedDict) and part in (node.attributes or ())) and part not in _LITERALS


_LITERALS = frozenset({"True", "False", "None", "inf", "nan"})


def item_at(tree: Any, path: Path) -> Any:
    """The node at a path of keys and indices, through dictionaries, lists and tuples alone; None where nothing is."""
    for segment in path:
        try:
            tree = tree[segment] if isinstance(tree, (dict, list, tuple)) else None
        except (LookupError, TypeError):
            return None
    return tree


def matching(parts: Iterable[tuple[Any, Any]], text: str) -> list[tuple[Any, Any]]:
    return [(segment, child) for segment, child in parts if segment_text(segment) == text]


# Copies with changes -------------------------------------------------------------------------------------------------


def replaced_at(tree: Any, path: Path, node: Any) -> Any:
    """The tree with another node at `path`. The containers on the way are copied; everything else stays as it is.

    Raises `UsageError` where the path goes by a name that only a module's state dict has.
    """
    for holder, segment in zip(reversed(holders(tree, path)), reversed(path), strict=True):
        node = with_part(holder, segment, node)
    return node


def holders(tree: Any, path: Path) -> list[Any]:
    """The containers that lead to `path`, outermost first. Raises `UsageError` for names of a state dict."""
    containers = [tree]
    for depth, segment in enumerate(path):
        matches = [part for name, part in children(containers[-1]) if name == segment]
        if not matches:
            what = f"{address(path)} is the name of a tensor in the module's state dict"
            why = "In the file it is an attribute of an object."
            raise UsageError(what, why, f"Name what is there: {command('show', FILE / address(path[:depth]))}")
        containers.append(matches[0])
    return containers[:-1]


def with_part(holder: Any, segment: Any, part: Any) -> Any:
    """A copy of a container with another part at a segment, one of those that `children` gives."""
    if isinstance(holder, OrderedDict) and segment not in holder:
        return OrderedDict(holder, {**(holder.attributes or {}), segment: part})
    if isinstance(holder, dict):
        return same_kind(holder, {**holder, segment: part})
    if isinstance(holder, (list, tuple)):
        return type(holder)(part if number == segment else old for number, old in enumerate(holder))
    copied = copy(holder)
    if isinstance(holder, Set):
        copied.items = with_part(holder.items, segment, part)
    elif segment in _CALL_PARTS:
        setattr(copied, _CALL_PARTS[segment], part)
    elif segment in (holder.items or {}):
        copied.items = with_part(holder.items, segment, part)
    elif type(segment) is int and segment < len(holder.elements or ()):
        copied.elements = with_part(holder.elements, segment, part)
    elif isinstance(holder.state, dict):
        copied.state = with_part(holder.state, segment, part)
    else:  # (__dict__, __slots__)
        number = 1 if segment in holder.state[1] else 0
        copied.state = with_part(holder.state, number, with_part(holder.state[number], segment, part))
    return copied


_CALL_PARTS = {"(callable)": "fn", "(args)": "args", "(kwargs)": "kwargs", "(state)": "state"}


def rebuild(tree: Any, leaf: Leaf | None = None, replaced: Mapping[int, Any] | None = None) -> Any:
    """A copy of the tree with `leaf` applied to every tensor and storage, and containers replaced by others.

    leaf: `TensorEntry` or `StorageRef` -> the same kind; applied once to each object, also inside composites.
    replaced: id of a container -> the container to copy in its place (its parts are parts of the old tree).
    Sharing, cycles, order and types stay as they are.
    """
    of_tensor = same if leaf is None else leaf

    def of_composite(node: Composite) -> FromParts:
        args = node.made.args
        return FromParts(args, lambda new: node if alike(tuple(new), args) else node.with_arguments(tuple(new)))

    handlers = {**COPY, TensorEntry: of_tensor, StorageRef: of_tensor, Composite: of_composite}
    return GraphMapper(handlers, replaced).map(tree)


def map_storages(tree: Any, function: Callable[[Storage], Storage]) -> Any:
    """The tree with every storage replaced by the result of `function`, called once for each, so that ties stay."""
    results: dict[int, Storage] = {}

    def leaf(node: Any) -> Any:
        storage = results.get(id(node.storage))
        if storage is None:
            storage = results[id(node.storage)] = function(node.storage)
        return node if storage is node.storage else node.with_storage(storage)

    return rebuild(tree, leaf)


# Whole modules, as `torch.save(model)` pickles them: their state dict, without their class ----------------------------

# A pickled `nn.Module` is its dictionary of attributes: `_parameters`, `_buffers` and `_modules` hold what
# `state_dict()` returns, whatever the class is called and wherever its source is. Source: torch/nn/modules/module.py
# (`state_dict`, `_save_to_state_dict`), torch 0.1.12 to 2.13. What only the class knows stays out: versions
# (`_metadata`), what `get_extra_state` would return, an own `state_dict()`.
MAX_NAMES = 32 << 20  # characters of all names together, and 64 for each module that is met
_PARTS = ("_parameters", "_buffers", "_modules")


def method_owner(node: Any) -> Any:
    """The object whose method `state_dict` was saved, as in `torch.save(model.state_dict, …)`; else the node itself."""
    is_method = type(node) is Object and canonical(node.fn) == "builtins.getattr" and node.args[1:] == ("state_dict",)
    return node.args[0] if is_method else node


def module_attributes(node: Any) -> dict[Any, Any] | None:
    """The attributes of a pickled module, with its `_parameters`, `_buffers` and `_modules`; None for anything else."""
    if type(node) is not Object:
        return None
    attributes: Any = node.attributes
    if not attributes and node.how == "call" and node.args:
        if node.name.endswith(".reduce_graph_module"):  # torch.fx: the attributes, and imports for its source
            attributes = node.args[0]
        elif node.name.endswith(".OptimizedModule"):  # torch.compile: called with the module that it wraps
            attributes = {"_parameters": {}, "_buffers": {}, "_modules": {"_orig_mod": node.args[0]}}
        elif node.name.endswith("._reconstruct_persistent_obj") and isinstance(node.args[0], dict):  # of StyleGAN, EDM
            attributes = node.args[0].get("state")
        elif (owner := method_owner(node)) is not node:
            return module_attributes(owner)
    if not isinstance(attributes, dict) or not all(isinstance(attributes.get(part), dict) for part in _PARTS):
        return None
    return attributes if all(type(name) is str for part in _PARTS for name in attributes[part]) else None


def module_state_dict(node: Any) -> OrderedDict | None:
    """The `state_dict()` of a pickled module in torch's order: parameters, persistent buffers, then each submodule's.

    A submodule that stands in two places gives its tensors under both names, on one storage. None for what is no
    module, and for one whose names would fill the memory.
    """
    if module_attributes(node) is None:
        return None
    names = OrderedDict()
    try:
        for prefix, attributes in walk_modules(node, module_attributes, lambda fields: fields["_modules"]):
            left_out = attributes.get("_non_persistent_buffers_set")
            transient = set(left_out.items) if isinstance(left_out, Set) else set()
            for name, value in (*attributes["_parameters"].items(), *attributes["_buffers"].items()):
                if name not in transient and (tensor := detached(value)) is not None:
                    names[prefix + name] = tensor
    except LimitExceeded:
        return None
    return names


Attributes = dict[Any, Any]


def walk_modules(
    top: Any, attributes_of: Callable[[Any], Attributes | None], submodules: Callable[[Attributes], Attributes]
) -> Iterator[tuple[str, Attributes]]:
    """The attributes of a module and of all below it, parents first, each with the prefix of its names (`layer1.0.`).

    attributes_of: None for what is no module.  submodules: what may be a module in one, by name.
    A module that stands in two places comes twice, one within itself once. Raises `LimitExceeded` for names without
    end.
    """
    attributes = attributes_of(top)
    if attributes is None:
        return
    yield "", attributes
    spent, ancestors = 0, {id(top)}
    stack = [("", id(top), iter(submodules(attributes).items()))]
    while stack:
        prefix, module_id, parts = stack[-1]
        for name, node in parts:
            attributes = None if id(node) in ancestors else attributes_of(node)
            if attributes is None:
                continue
            node_prefix = f"{prefix}{name}."
            # A bound on the characters of the names of its own tensors.
            registered = (attributes[part] for part in _PARTS if isinstance(attributes.get(part), dict))
            spent += 64 + len(node_prefix) * (1 + len(attributes) + sum(map(len, registered)))
            if spent > MAX_NAMES:
                raise LimitExceeded("modules whose names are too long together")
            yield node_prefix, attributes
            ancestors.add(id(node))
            stack.append((node_prefix, id(node), iter(submodules(attributes).items())))
            break
        else:
            stack.pop()
            ancestors.discard(module_id)


_WRAPPERS = ("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.autograd.variable.Variable")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


def detached(value: Any) -> Tensor | None:
    """The tensor in a parameter or buffer as a state dict has it: no parameter, no gradient. None if there is none."""
    if isinstance(value, Composite) and value.made.name in _PARAMETERS:
        value = value.made.args[0]
    elif type(value) is Object and value.name in _WRAPPERS and value.args:  # before torch 0.4
        value = value.args[0]
    if not isinstance(value, TensorEntry):
        return value if isinstance(value, Composite) else None
    return value.with_flags(Flags(conj=value.flags.conj, neg=value.flags.neg))


def is_meta(tensor: Tensor) -> bool:
    """True for one that was saved from the device meta, or a parameter that is one: it has a shape, and no values."""
    inner = detached(tensor) if type(tensor) is Composite else None
    return type(inner) is Composite and inner.kind == "meta"
