"""The tensors of a part as a short outline: modules with sizes, repeated layers folded, as deep as there is room.

Nothing is split or added up that is not shown: a file may have a million tensors, and a person reads forty lines.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckptool.analysis.folds import FOLDED, label, runs, structure
from ckptool.analysis.inspect import PartSummary
from ckptool.checkpoint.tree import Path, address
from ckptool.errors import printable

SHOWN = 12  # of more siblings than there is room for
DEEPEST = 100  # pieces of a name, before its rest is one

Item = tuple[Sequence[str], int, str]
"""The pieces of a tensor's name, which lie between its slashes and dots, the index of its row in the part, the name."""


@dataclass(eq=False)
class Branch:
    """Tensors whose names begin alike.

    depth: how many pieces they share.  times: how often this structure is repeated, here and further out; `run`: here.
    size: bytes, repetitions included.
    hidden: children that are left out.  start: the piece with which the labels of children begin.
    """

    part: PartSummary
    items: Sequence[Item]
    depth: int
    label: str
    times: int
    size: int
    start: int
    run: int = 1
    expanded: list[Branch] = field(default_factory=list)
    hidden: int = 0

    @property
    def tensors(self) -> int:
        return len(self.items) * self.times

    @property
    def leaf(self) -> int | None:
        """The index of the tensor's row, where the branch is one."""
        pieces, index, _ = self.items[0]
        return index if len(self.items) == 1 and len(pieces) == self.depth else None

    @cached_property
    def children(self) -> list[Branch]:
        if self.leaf is not None:
            return []
        groups: dict[str | tuple[str, int], list[Item]] = {}
        depth, sizes = self.depth, self.part.sizes
        for item in self.items:
            pieces = item[0]
            name = pieces[depth]
            key = name if len(pieces) > depth + 1 else (name, item[1])  # `a` may stand beside `a.b`, or another `a`
            if key in groups:
                groups[key].append(item)
            else:
                groups[key] = [item]
        return _folded(
            [
                Branch(
                    self.part,
                    items,
                    depth + 1,
                    key if isinstance(key, str) else key[0],
                    self.times,
                    sum([sizes[item[1]] for item in items]) * self.times,
                    depth + 1,
                )
                for key, items in groups.items()
            ]
        )

    @cached_property
    def structure(self) -> list[tuple[object, ...]]:
        """Everything by which two repeated layers can differ, whatever the last piece is that they share."""
        pieces = self.items[0][0][: self.depth]
        begin = sum([len(piece) + 1 for piece in pieces[:-1]])
        end = begin + len(pieces[-1])
        names = [(name[:begin], name[end:]) for _, _, name in self.items]
        return structure(self.part, [item[1] for item in self.items], names)


def outline(part: PartSummary, lines: int, depth: int | None) -> Branch:
    """The tensors of a part as a branch that is expanded within `lines`, or `depth` levels deep where that is given."""
    base = len(part.root.path)
    names = [_name(row.path, base) for row in part.rows]
    items = [(name.replace("/", ".").split(".", DEEPEST), index, name) for index, name in enumerate(names)]
    top = Branch(part, items, 0, "", 1, part.bytes, 0)
    while items and len(top.children) == 1 and top.children[0].leaf is None and "{" not in top.children[0].label:
        top = top.children[0]  # what all names have in common stands before each of them
    top.start = 0
    if items:
        _to_depth(top, depth) if depth is not None else _within(top, lines)
    return top


def _name(path: Path, base: int) -> str:
    first = path[base] if len(path) == base + 1 else None
    plain = isinstance(first, str) and "/" not in first and "~" not in first
    return str(first) if plain else address(path[base:])


def _to_depth(top: Branch, depth: int) -> None:
    level = [top]
    for _ in range(depth):
        for branch in level:
            branch.expanded = _below(branch)
        level = [child for branch in level for child in branch.expanded]


def _within(top: Branch, lines: int) -> None:
    """Expands level by level, the largest first, as long as there is room."""
    queue = [(0, 0, 0, top)]
    count = 0
    while queue:
        level, _, _, branch = heapq.heappop(queue)
        below = _below(branch)
        if len(below) > lines:
            if branch is not top:
                continue
            branch.hidden = max(len(below) - SHOWN, 0)
            below = below[:SHOWN]
        branch.expanded = below
        lines -= len(below)
        for child in below:
            if child.leaf is None:
                count += 1
                heapq.heappush(queue, (level + 1, -child.size, count, child))


def _below(branch: Branch) -> list[Branch]:
    """The children; where there is only one, named with all that it has in common."""
    return [_compressed(child, branch.start) for child in branch.children]


def _compressed(branch: Branch, start: int) -> Branch:
    """A branch that goes on without forking, under one name: `conv1.weight` instead of `conv1` and a line below it."""
    while branch.leaf is None and len(branch.children) == 1 and "{" not in branch.label:
        branch = branch.children[0]
    pieces, _, name = branch.items[0]
    begin = sum(len(piece) + 1 for piece in pieces[:start])
    before = name[begin : begin + sum(len(piece) + 1 for piece in pieces[start : branch.depth - 1])]
    branch.label = printable(before + branch.label)
    return branch


# Repeated layers -----------------------------------------------------------------------------------------------------


def _folded(branches: list[Branch]) -> list[Branch]:
    """Runs of numbered siblings that are the same in everything but their number, as one: `{0..11}`, `layer{1..4}`."""
    if len(branches) < FOLDED:
        return branches

    def alike(one: int, other: int) -> bool:
        first, second = branches[one], branches[other]
        same_size = first.size == second.size and len(first.items) == len(second.items)
        return same_size and first.structure == second.structure

    return [_one([branches[index] for index in run]) for run in runs([branch.label for branch in branches], alike)]


def _one(run: list[Branch]) -> Branch:
    first = run[0]
    if len(run) == 1:
        return first
    name, size = label(first.label, run[-1].label), sum(branch.size for branch in run)
    return Branch(first.part, first.items, first.depth, name, first.times * len(run), size, first.depth, len(run))
