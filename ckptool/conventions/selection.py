"""The parts of checkpoints that patterns choose, by their addresses."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ckptool.checkpoint.patterns import selected
from ckptool.checkpoint.tree import Path, address, segment_text, walk
from ckptool.conventions.state_dicts import bare

Chosen = dict[Any, tuple[Path, Any]]


def topmost(trees: Iterable[Any], only: Collection[str], as_bare: bool = False) -> list[Chosen]:
    """The nodes of each tree that a pattern matches by their address or its end, without those inside of others.

    The keys are what trees with the same address have in common.  as_bare: addresses are those without the prefixes of
    wrappers. Raises `NoMatch` for a pattern that matches nothing in any tree.
    """
    walked: list[list[tuple[Path, Any, list[str]]]] = []
    for tree in trees:
        walked.append([])
        for path, node in walk(tree):
            if name := bare(path) if as_bare else path:
                texts = [segment_text(segment) for segment in name]
                tails = ("/".join(texts[-count:]) for count in range(1, min(len(texts), 8)))
                walked[-1].append((name, node, ["/".join(texts), *tails]))
    names = selected({name for nodes in walked for _, _, names in nodes for name in names}, list(only))
    found: list[Chosen] = []
    for nodes in walked:
        chosen, above = dict[Any, tuple[Path, Any]](), None
        for path, node, ends in nodes:
            if (above is None or path[: len(above)] != above) and not names.isdisjoint(ends):
                above = path
                chosen[(address(path), *map(type, path))] = path, node
        found.append(chosen)
    return found
