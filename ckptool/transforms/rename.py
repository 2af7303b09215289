"""New keys for model state dicts: wrapper prefixes removed and added, and rules.

Whatever refers to the keys changes along: a state dict's `_metadata` (by module path), and the parameter names that an
optimizer keeps. Two keys that become one are an error, never last-wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.nodes import OrderedDict, same_kind
from ckptool.checkpoint.tree import rebuild
from ckptool.commands import FILE, OUT, arg, command
from ckptool.conventions.optimizer_keys import PARAMETER_LISTS, flat_keys
from ckptool.conventions.state_dicts import COUNTER, PEELED, StateDict, optimizers, without_wrappers, wrappers
from ckptool.errors import Conflict, NoMatch, Unsupported, UsageError, counted, listed
from ckptool.formats import IN_MEMORY

Rename = Callable[[str], str]


class Renamed(NamedTuple):
    """The renamed checkpoint; how many keys changed, of how many; the same by root; and the names, old to new."""

    checkpoint: Checkpoint
    changed: int
    total: int
    roots: tuple[tuple[str, int, int], ...]
    names: dict[str, str]


# Prefixes ------------------------------------------------------------------------------------------------------------


def strip(
    checkpoint: Checkpoint, roots: Sequence[StateDict], prefixes: Sequence[str] = (), *, partial: bool = False
) -> Renamed:
    """Removes wrapper prefixes, or instead the named `prefixes` in the order given, from the keys of `roots`.

    Raises `Conflict` where only some keys of a root carry `module.` (or a named prefix), unless `partial`, and where
    two keys would become one; `NoMatch` where a named prefix is on no key; `UsageError` for an empty prefix.
    """
    if "" in prefixes:
        example = f"For example: {arg(prefix='model.')}"
        raise UsageError("the prefix is empty", "There would be nothing to remove.", example)
    present = set()
    # A named prefix is looked for at the very front; `module.` also behind wrappers that are removed with it.
    inner = f".{PEELED}"
    has: Any = str.startswith if prefixes else lambda name, _: name == PEELED or inner in f".{wrappers(name)}"
    for root in roots:
        names = [name for name in root.names() if name != COUNTER]
        for number, prefix in enumerate(prefixes or (PEELED,)):
            without = [name for name in names if not has(name, prefix)]
            if len(without) < len(names):
                present.add(number)
            if not partial and 0 < len(without) < len(names):
                what = f"{len(names) - len(without):,} of {counted(len(names), 'key')} of {root.address or 'the file'} "
                what += f"begin with {prefix!r}; without it: {listed(without, 3)}"
                why = "A wrapper would have added it to all keys; this may be a submodule of that name."
                raise Conflict(what, why, f"Remove it where it is: {arg(partial=True)}")
            names = [name.removeprefix(prefix) for name in names]
    if lacking := [prefix for number, prefix in enumerate(prefixes) if number not in present]:
        fix = f"See the keys: {command('inspect', FILE, all=True)}"
        raise NoMatch(f"no key begins with {lacking[0]!r}", "No key has the prefix that you gave.", fix)
    if not prefixes:
        return apply(checkpoint, roots, without_wrappers)
    return apply(checkpoint, roots, lambda key: reduce(str.removeprefix, prefixes, key))


def add(checkpoint: Checkpoint, roots: Sequence[StateDict], prefix: str = PEELED) -> Renamed:
    """Puts `prefix` before every key of `roots`, as a wrapper would; an averaged model's counter stays as it is."""
    return apply(checkpoint, roots, lambda key: key if key == COUNTER else prefix + key)


# Any renaming --------------------------------------------------------------------------------------------------------


def apply(checkpoint: Checkpoint, roots: Sequence[StateDict], rename: Rename) -> Renamed:
    """Renames the keys of `roots`, their `_metadata`, and the parameter names in every optimizer of the checkpoint.

    Raises `Conflict` naming the keys that would become one, or that would become empty.
    """
    replaced: dict[int, Any] = {}
    mapping: dict[str, str] = {}
    facts = []
    for root in roots:
        names = {key: rename(key) for key in root.names()}
        refuse_collisions(names, root.address or "the file")
        changed = {old: new for old, new in names.items() if old != new}
        facts.append((root.address, len(changed), len(names)))
        mapping.update(changed)
        if changed:
            node, attributes = root.node, getattr(root.node, "attributes", None)
            items = {names.get(key, key) if type(key) is str else key: value for key, value in node.items()}
            if isinstance(node, OrderedDict) and node.metadata is not None and attributes is not None:
                moved = {new: old for old, new in names.items()}
                attributes = {**attributes, "_metadata": moved_metadata(node.metadata, names, moved, rename)}
            replaced[id(node)] = OrderedDict(items, attributes) if isinstance(node, OrderedDict) else items
    total_changed, total = sum(fact[1] for fact in facts), sum(fact[2] for fact in facts)

    def rename_slots(node: dict[Any, Any], keys: Mapping[Any, str], lists: Iterable[Any]) -> None:
        old: dict[Any, Any] = replaced.get(id(node), node)
        new = {keys.get(key, key): value for key, value in old.items()}
        if len(new) != len(old):
            raise Conflict("two entries of the optimizer's state would get the same name", "Nothing was written.")
        replaced[id(node)] = same_kind(old, new)
        for names in (names for names in lists if isinstance(names, list)):
            replaced[id(names)] = [mapping.get(name, name) if type(name) is str else name for name in names]

    tree: Any = checkpoint.tree
    for _, optimizer in optimizers(tree) if mapping else ():
        groups = [group for group in optimizer["param_groups"] if isinstance(group, dict)]
        lists = (group.get(field) for group in groups for field in PARAMETER_LISTS)
        rename_slots(optimizer["state"], mapping, lists)
    inner = (node for node in tree.values() if isinstance(node, dict)) if isinstance(tree, dict) else ()
    for node in (tree, *inner) if mapping else ():
        if flat := flat_keys(node):
            lists = (node[key] for key, parts in flat.items() if parts.inner[-1] in PARAMETER_LISTS)
            keys = {key: parts.text(mapping.get(parts.name, parts.name)) for key, parts in flat.items()}
            rename_slots(node, keys, lists)
    if mapping and "tensor_names" in checkpoint.metadata:
        what = f"{checkpoint.source or IN_MEMORY} describes its weights by name in the metadata (tensor_names)"
        why = "Under other names torchao would not find them. Nothing was written."
        plain = command("cast", FILE, dtype="bf16", dequantize=True, out=OUT)
        raise Unsupported(what, why, f"Rename the weights before they are quantized; or compute them first: {plain}")
    if mapping:
        checkpoint = replace(checkpoint, tree=rebuild(checkpoint.tree, replaced=replaced))
    return Renamed(checkpoint, total_changed, total, tuple(facts), mapping)


def refuse_collisions(names: Mapping[str, str], where: str) -> None:
    """Raises `Conflict` for keys that would become one, or empty. names: the new name of each."""
    if len({*names.values()} - {""}) == len(names):
        return
    olds: dict[str, list[str]] = {}
    for old, new in names.items():
        olds.setdefault(new, []).append(old)
    texts = []
    for new, keys in [item for item in olds.items() if len(item[1]) > 1][:3]:
        text = f"{keys[0]} and {keys[1]} would both" if len(keys) == 2 else f"{listed(keys, 3)} would all"
        texts.append(f"{text} be {new!r}")
    if texts:
        what, why = f"keys of {where} would collide: {'; '.join(texts)}", "Only one of them could be kept."
        raise Conflict(what, f"{why} Nothing was written.", f"See the keys: {command('inspect', FILE, all=True)}")
    if empty := [old for old in olds.get("", []) if old]:
        raise Conflict(f"the key {empty[0]!r} of {where} would become empty", "Nothing was written.")


def moved_metadata(before: Any, keys: Iterable[str], moved: Mapping[str, str], rename: Rename | None = None) -> Any:
    """`_metadata` by the modules of the new keys. keys: all old keys.  moved: the old key of each new one.

    A module goes where its keys go; one without keys where `rename` would take a key of it, or else with the nearest
    module around it. Where a wrapper and its module become one, the module's entry stays. A module that only the new
    names have gets the entry of a fresh module.
    """
    sources: dict[str, str] = {}  # new module -> old: those of a key, and further up while both have the same names
    for key, old_key in moved.items():
        (new, _, name), (old, _, old_name) = key.rpartition("."), old_key.rpartition(".")
        while old and new not in sources:
            sources[new], is_same = old, name == old_name
            (new, _, name), (old, _, old_name) = new.rpartition("."), old.rpartition(".")
            if not is_same or name != old_name:
                break
    prefix = next((new.removesuffix(old) for new, old in moved.items() if old != COUNTER), "")
    if prefix.endswith(".") and all(new == prefix + old or old == COUNTER for new, old in moved.items()):
        sources[prefix[:-1]] = ""
    goals: dict[Any, list[str]] = {}
    for new, old in sources.items():
        goals.setdefault(old, []).append(new)

    modules, around = _modules_around(moved), _modules_around(keys)
    for path in [path for path in before if type(path) is str and path not in goals]:
        if rename is not None:
            marked = rename(f"{path}.\0") if path else "\0"
            new = marked[:-2] if f".{marked}".endswith(".\0") else path
        else:
            above = path
            while above and not goals.get(above):
                above = above.rpartition(".")[0]
            new = f"{goals[above][0]}{path[len(above) :]}" if above else path
        # In the files of FSDP a module is inside its wrappers, of which its keys have none.
        is_free = new not in sources or len(path) > len(sources[new])
        goals[path] = [new] if is_free and (new in modules or path not in around) else []
    items: dict[Any, Any] = {}
    for path in sorted(modules.difference(*goals.values())):
        items[path] = {"version": 1}
    for path, facts in before.items():
        items |= dict.fromkeys(goals.get(path, [path]), facts)
    return same_kind(before, items)


def _modules_around(keys: Iterable[str]) -> set[str]:
    """The modules that keys are in, and those around them."""
    modules = {""}
    for key in keys:
        dot = key.rfind(".")
        while dot >= 0 and key[:dot] not in modules:
            modules.add(key[:dot])
            dot = key.rfind(".", 0, dot)
    return modules
