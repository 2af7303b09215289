"""The layouts that ship: one YAML file each in `transforms/layouts/`, which is a file of rules that says more.

layout: names of the two sides, `old` and `new`, and by which keys a set of weights of each is told:

title: timm ViT ↔ transformers ViT
source: where the facts are from
old: {name: timm, has: [blocks.0.attn.qkv.weight], refuse: {'*.q_norm.*': normalised queries have no place there}}
new: {name: transformers, has: [vit.embeddings.cls_token]}
notes: [what the new side's configuration needs]
rules: [...]
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.patterns import Matcher, matcher
from ckptool.errors import Conflict, UsageError, listed, printable
from ckptool.transforms.key_names import parse_name
from ckptool.transforms.rules import MAX_RULES, scalar_text, yaml_node
from ckptool.transforms.translate.translation import LOOK, Translation, translation_of

FOLDER = "layouts"
_HEADER = ("title", "source", "old", "new", "notes")


@dataclass(frozen=True, slots=True)
class LayoutSide:
    """One side of a layout. has: names of which each matches a key.  lacks: names that match none.

    refuse: patterns of keys that the rules have no place for, and why.
    """

    name: str
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    refuse: tuple[tuple[Matcher, str, str], ...] = ()

    def is_of(self, node: Mapping[Any, Any]) -> bool:
        """True for a set of weights with the names of this side."""
        return (
            bool(self.has)
            and all(_matches(name, node) for name in self.has)
            and not any(_matches(name, node) for name in self.lacks)
        )

    def check(self, node: Mapping[Any, Any]) -> None:
        """Raises `Conflict` for a key that the rules have no place for."""
        for matches, pattern, why in self.refuse:
            if found := [printable(key) for key in node if type(key) is str and matches(key)]:
                what = f"{listed(found, 2)}: {why}"
                raise Conflict(what, f"The layout refuses {printable(pattern)}. Nothing was written.")


def _matches(name: str, node: Mapping[Any, Any]) -> bool:
    """True where a key has the name. `NAME [3]`: and is a tensor of so many dimensions."""
    name, _, rank = name.partition(" [")
    pattern = parse_name(name).pattern(())
    keys = [name] if name in node else [key for key in node if type(key) is str and pattern.fullmatch(key)]
    wanted = int(rank.rstrip("]") or 0) if rank else None
    return any(
        wanted is None or (isinstance(node[key], TensorEntry) and len(node[key].shape) == wanted) for key in keys
    )


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """A file of rules between two layouts of one model. name: of the file.  sides: the names of both are empty in a
    file that says nothing of them."""

    name: str
    title: str
    source: str
    old: LayoutSide
    new: LayoutSide
    notes: tuple[str, ...]
    translation: Translation

    def direction(self, node: Mapping[Any, Any], back: bool) -> bool:
        """True if a set of weights is to be translated back. back: that was asked for.

        Raises `Conflict` for weights of neither side, or of that which it would become.
        """
        if not self.old.has and not self.new.has:
            return back
        found = [side for side in (self.old, self.new) if side.is_of(node)]
        if not found or (back and self.new not in found):
            side = self.new if back else self.old
            lacking = next((name for name in side.has if not _matches(name, node)), "")
            without = f": there is no {printable(lacking)}" if lacking else ""
            what = f"the weights are not of the layout {self.name}{without}"
            raise Conflict(what, f"{side.name} weights have {listed(list(side.has), 4)}. Nothing was written.")
        turned = back or self.old not in found
        (self.new if turned else self.old).check(node)
        return turned


def read_layout(path: str) -> LayoutRules:
    """The rules of a YAML file, with or without a header. Raises `UsageError` that points at the line."""
    node = yaml_node(path, MAX_RULES, LOOK)
    name = os.path.splitext(os.path.basename(path))[0]
    header = {}
    if getattr(node, "id", "") == "mapping":
        header = {scalar_text(key): value for key, value in node.value if scalar_text(key) in _HEADER}
    old, new = (_side(header[side], path) if side in header else LayoutSide("") for side in ("old", "new"))
    notes = tuple(scalar_text(each) for each in header["notes"].value) if "notes" in header else ()
    translation = translation_of(node, path, _HEADER)
    if old.has or new.has:  # for any model of the layout; that all of its keys are taken is looked at
        rules = tuple(replace(rule, optional=True) for rule in translation.rules)
        join = translation.join and replace(translation.join, optional=True)
        translation = replace(translation, rules=rules, join=join)
    title, source = (scalar_text(header[each]) if each in header else "" for each in ("title", "source"))
    return LayoutRules(name, title, source, old, new, notes, translation)


def _side(node: Any, path: str) -> LayoutSide:
    try:
        parts = {scalar_text(key): value for key, value in node.value}
        refuse = (
            [(scalar_text(key), scalar_text(why)) for key, why in parts["refuse"].value] if "refuse" in parts else []
        )
        has, lacks = (
            tuple(scalar_text(each) for each in parts[name].value) if name in parts else () for name in ("has", "lacks")
        )
        return LayoutSide(
            scalar_text(parts["name"]), has, lacks, tuple((matcher(key), key, why) for key, why in refuse)
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        where = f"{printable(path)}, line {node.start_mark.line + 1}"
        raise UsageError(f"{where}: a side has name, has, lacks and refuse", "", LOOK) from None


@cache
def shipped() -> dict[str, str]:
    """The layouts that ship: name -> path of the file."""
    folder = str(resources.files("ckptool.transforms").joinpath(FOLDER))
    names = sorted(name for name in os.listdir(folder) if name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): os.path.join(folder, name) for name in names}


def layout_or_file(name: str | os.PathLike[str]) -> LayoutRules:
    """The rules in a file, or the layout of that name. Raises `FileProblem` for what is neither."""
    given = os.fspath(name)
    if not os.path.lexists(given) and given in shipped():
        return read_layout(shipped()[given])
    if not os.path.lexists(given) and os.sep not in given and "." not in given:
        what = f"{printable(given)!r} is neither a file nor a layout that ships"
        raise UsageError(what, f"There are {listed(list(shipped()), 20)}.")
    return read_layout(given)


def layouts_of(node: Mapping[Any, Any]) -> list[tuple[LayoutRules, bool]]:
    """The layouts whose names a set of weights has, and whether it is the new side of each."""
    layouts = map(read_layout, shipped().values())
    return [(each, side is each.new) for each in layouts for side in (each.old, each.new) if side.is_of(node)]
