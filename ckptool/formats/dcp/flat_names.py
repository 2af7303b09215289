"""The flat names of a nested state dict, by torch's rules, and what they do not say of it.

Source: torch/distributed/checkpoint/_nested_dict.py and _traverse.py, torch 2.4 to 2.13: keys are joined by dots, as
texts; dictionaries are always gone into, lists where there is a tensor or a dictionary in them; anything else is one
value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import escape
from typing import Any

from ckptool.checkpoint import Composite, Note, TensorEntry
from ckptool.checkpoint.graph import MAX_DEPTH, visit
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.checkpoint.tree import address, replaced_at
from ckptool.commands import FILE, OUT, arg, command
from ckptool.conventions import optimizer_keys
from ckptool.conventions.state_dicts import optimizers
from ckptool.errors import Conflict, LimitExceeded, Unsupported, counted

# Names that are made: so many, and so many for each part of what has them. Objects that share parts have one for each.
FREE_NAMES = 10_000
NAMES_PER_PART = 4

KEYS = "keys that are not text"
EMPTY = "empty dictionaries"
ORDERED = "ordered dictionaries and what is set on them (_metadata)"
SHARED = "objects that stand in several places"
PARAMETERS = "what is a Parameter"
OPTIMIZERS = "that keys of an optimizer are flat, or its numbers text"
RESTORED = "optimizer-keys"  # of the notes


@dataclass(slots=True, eq=False)
class FlatNames:
    """The values of a tree by their flat names. paths: their keys, as texts, and indices of lists.

    lost: what the names do not say of the tree, each kind with its first address.
    holders: the dictionaries and lists that were gone into, by id.  most: names that they may have.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    holders: dict[int, Any] = field(default_factory=dict)
    most: int = FREE_NAMES

    def add(self, path: tuple[str | int, ...], place: tuple[Any, ...], value: Any) -> None:
        name = ".".join(map(str, path))
        if name in self.values:
            raise Unsupported(
                f"{address(place)} and another entry would both be called {name}",
                "torch.distributed.checkpoint joins keys by dots, as texts. Nothing was written.",
                f"Rename one first: {command('rename', FILE, 'OLD => NEW', out=OUT)}",
            )
        if len(self.values) >= self.most:
            most = counted(self.most, "name")
            raise LimitExceeded(f"more than {most}", "Objects that share parts have a name for each.")
        self.values[name], self.paths[name] = value, path
        if isinstance(value, TensorEntry) and value.flags.parameter:
            self.lost.setdefault(PARAMETERS, address(place))

    def hold(self, node: Any, place: tuple[Any, ...]) -> None:
        """Notes what the names do not say of a dictionary or list that is gone into."""
        if id(node) in self.holders:
            self.lost.setdefault(SHARED, address(place))
        else:
            self.most += NAMES_PER_PART * len(node)
        self.holders[id(node)] = node
        if isinstance(node, dict):
            if not node:
                self.lost.setdefault(EMPTY, address(place))
            if isinstance(node, OrderedDict):
                self.lost.setdefault(ORDERED, address(place))
            if not all(type(key) is str for key in node):
                self.lost.setdefault(KEYS, address(place))


def flat_names(tree: Any) -> FlatNames:
    """The flat names of a tree. Raises `Unsupported` for one that is no dictionary, for two values of one name, and for
    a container that contains itself."""
    if not isinstance(tree, dict):
        raise Unsupported(
            "a dcp folder holds a dictionary, nothing else",
            "torch.distributed.checkpoint saves dictionaries alone.",
            f"Choose a part: FILE#ADDRESS; or write a torch file: {arg(container='torch-zip')}",
        )
    flat = FlatNames()
    flat.hold(tree, ())
    holders = [id(tree)]
    stack: list[tuple[tuple[str | int, ...], tuple[Any, ...], Iterator[tuple[Any, Any]]]]
    stack = [((), (), iter(tree.items()))]
    while stack:
        path, place, items = stack[-1]
        for key, value in items:
            here: tuple[str | int, ...] = (*path, key if isinstance(items, enumerate) else str(key))
            where = (*place, key)
            if not _is_gone_into(value):
                flat.add(here, where, value)
                continue
            if id(value) in holders or len(stack) > MAX_DEPTH:
                raise Conflict(
                    f"{address(where)} contains itself",
                    "It has no end of names. Nothing was written.",
                    f"Leave it out first: {command('edit', FILE, drop=escape(address(where)), out=OUT)}",
                )
            flat.hold(value, where)
            holders.append(id(value))
            stack.append((here, where, iter(value.items()) if isinstance(value, dict) else enumerate(value)))
            break
        else:
            stack.pop()
            holders.pop()
    if with_optimizers(tree)[0] is not tree:
        flat.lost.setdefault(OPTIMIZERS, "")
    return flat


def _is_gone_into(value: Any) -> bool:
    if type(value) is not list:
        return isinstance(value, dict)
    lists = visit(value, lambda node: node if type(node) is list else ())
    return any(isinstance(part, (dict, TensorEntry, Composite)) for part in lists)


def with_optimizers(tree: dict[Any, Any]) -> tuple[dict[Any, Any], list[Note]]:
    """The tree with the optimizers as they were before torch flattened their keys, or made texts of their numbers."""
    unflat, notes = optimizer_keys.nested(tree), []
    if unflat is not tree:
        what = "flattened keys of an optimizer (state.NAME.KEY) are shown as `state` by name and `param_groups`"
        notes.append(Note(RESTORED, what))
    for path, optimizer in list(optimizers(unflat)):
        numbered = optimizer_keys.with_numbers(optimizer)
        if numbered is not optimizer:
            what = f"{counted(len(numbered['state']), 'key')} of an optimizer's state, which torch wrote as text"
            notes.append(Note(RESTORED, f"{what}, are numbers again, as `param_groups` has them"))
            unflat = replaced_at(unflat, path, numbered) if path else numbered
    return unflat, notes
