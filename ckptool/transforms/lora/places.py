"""Where an adapter's changes go: the names of a base, also under another prefix, and kohya's without their dots."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.errors import Conflict, counted, listed

_CANDIDATES = 100  # of a name: with more there is no telling anyway
_SAMPLES = 3  # of an adapter's names, from which the prefixes are taken that all of them are then tried with
Spellings = Sequence[str]
"""The names that a tensor may have, the first that there is."""


def _moved(name: str, removed: str, added: str) -> str:
    return added + name.removeprefix(removed) if name.startswith(removed) else ""


class Places:
    """The names of a base, and with which prefix in the place of which those of each of an adapter's components become
    them.

    underscored: as kohya spells modules, `a.b_c.weight` as `a_b_c.weight`.
    """

    def __init__(self, names: Iterable[str], *, underscored: bool = False) -> None:
        self.separator = "_" if underscored else "."
        self.prefixes: dict[str, tuple[str, str]] = {}
        self.names: dict[str, list[str]] = {}
        for name in names:
            module, dot, leaf = name.rpartition(".")
            self.names.setdefault(module.replace(".", self.separator) + dot + leaf, []).append(name)

    def settle(self, component: str, wanted: Sequence[Spellings]) -> None:
        """Finds the prefixes by which most of the wanted names are found. Raises `Conflict` where two find equally
        many."""
        hits = {("", ""): self._hits(wanted)}
        samples = wanted[:: max(1, len(wanted) // _SAMPLES)] if hits["", ""] < len(wanted) else ()
        for prefixes in (each for spellings in samples for each in self._candidates(spellings)):
            if prefixes not in hits:
                hits[prefixes] = self._hits(wanted, *prefixes)
        best = [prefixes for prefixes, count in hits.items() if count == max(hits.values())]
        if best[0] != ("", ""):
            shortest = min(len(removed) for removed, _ in best)  # `a.b` for `b` says no more than `a` for nothing
            best = [(removed, added) for removed, added in best if len(removed) == shortest]
            if len(best) > 1:
                places = listed([added for _, added in best])
                what = f"the adapter's names are in the base {counted(len(best), 'time')}: under {places}"
                raise Conflict(what, "The adapter fits each of them.", "Name the part: BASE#ADDRESS")
        self.prefixes[component] = best[0]

    def moved(self) -> list[str]:
        """Which prefixes are others, in words."""
        shown = ([repr(one) if one else "no prefix" for one in both] for both in self.prefixes.values() if any(both))
        return list(dict.fromkeys(f"the adapter's names begin with {a}, the base's with {b}" for a, b in shown))

    def in_base(self, component: str, name: str) -> str:
        """An adapter's name as the base has it; empty for one that does not begin as its prefix."""
        return _moved(name, *self.prefixes.get(component, ("", "")))

    def key(self, component: str, names: Spellings) -> str | None:
        """The base's name for the first of an adapter's that it has, or None. Raises `Conflict` where there are two."""
        for name in names:
            found = self.names.get(self.in_base(component, name), [])
            if len(found) > 1:
                what = f"{name} is {listed(found)}"
                raise Conflict(what, "Without their dots these names are the same. Nothing was written.")
            if found:
                return found[0]
        return None

    def _hits(self, wanted: Sequence[Spellings], removed: str = "", added: str = "") -> int:
        return sum(any(_moved(name, removed, added) in self.names for name in spellings) for spellings in wanted)

    def _candidates(self, spellings: Spellings) -> Iterator[tuple[str, str]]:
        """The prefixes to remove and to add by which names of the base have the longest end that any has."""
        for name in spellings:
            module = name.rpartition(".")[0]
            cuts = [place + 1 for place, letter in enumerate(module) if letter == self.separator == "."]
            for cut in [0, *cuts[:8]]:
                ends = (name[cut:], self.separator + name[cut:])
                same = [each for each in self.names if each == ends[0] or each.endswith(ends[1])]
                yield from [(name[:cut], each.removesuffix(ends[0])) for each in same[:_CANDIDATES]]
                if same:
                    break


def is_linear(module: str, shapes: Mapping[Any, Sequence[int] | None]) -> bool:
    """True where the weight of a module is known to be a matrix or kernels that the input is multiplied with, not a
    table of embeddings: by the last part of its name, its dimensions, its bias, or as it is of one of several blocks.

    shapes: of all tensors of the model.
    """
    *blocks, leaf = module.split(".")
    if words := re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1_\2", leaf).lower()):
        last = words[-2] if words[-1].isdigit() and len(words) > 1 else words[-1]
        if last in _LINEAR or len(shapes[f"{module}.weight"] or ()) > 2:
            return True
        if not _EMBEDDING.isdisjoint(words) or any("embed" in word for word in words):
            return False
    is_bias = shapes.get(f"{module}.bias") is not None
    return is_bias or (not leaf.isdigit() and any(each.isdigit() for each in blocks))


_LINEAR = set("proj projection fc linear dense conv query key value q k v o w wq wk wv wo qkv out head".split())
EMBEDDING = re.compile(r"(.*\.)?(wte|wpe|shared|\w*embed(ding)?s?(_tokens|_positions|_in|_table)?)\.weight")
_EMBEDDING = set("emb embs tok token tokens wte wpe pos position positions vocab shared codebook table lookup".split())


def orientation(base: Mapping[Any, Any]) -> Callable[[str], bool | None]:
    """A function that tells whether a weight is [in, out], as transformers' Conv1D has them; None where it is unknown.

    A matrix tells it by its bias; a square one as those do whose names end alike, or else all, if they agree.
    """

    def own(key: Any, weight: Any) -> bool | None:
        bias = base.get(f"{key.removesuffix('weight')}bias")
        if weight.shape[0] == weight.shape[1] or not isinstance(bias, TensorEntry):
            return None
        return bool(bias.shape == weight.shape[1:])

    @cache
    def votes() -> dict[str, set[bool]]:
        """What the matrices that are not square tell, by the name of their module; under "" what all tell."""
        found: dict[str, set[bool]] = {"": set()}
        for key, weight in base.items():
            is_weight = type(key) is str and key.endswith(".weight") and isinstance(weight, TensorEntry)
            if is_weight and len(weight.shape) == 2 and (told := own(key, weight)) is not None:
                found[""].add(told)
                found.setdefault(_module_name(key), set()).add(told)
        return found

    def is_turned(key: str) -> bool | None:
        weight = base[key]
        if len(weight.shape) != 2:
            return False
        if weight.shape[0] != weight.shape[1]:
            return bool(own(key, weight))
        told = votes().get(_module_name(key)) or votes()[""]
        return next(iter(told)) if len(told) == 1 else None

    return is_turned


def _module_name(key: str) -> str:
    """The last part of the name of a weight's module: `c_attn` of `h.0.attn.c_attn.weight`."""
    return key.rpartition(".")[0].rpartition(".")[2]
