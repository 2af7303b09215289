"""Tensors with conspicuous values, by rules that are all named. None of them is a diagnosis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from ckptool.analysis.inspect import Listing
from ckptool.analysis.statistics import Values
from ckptool.errors import counted

SIBLINGS, DEVIATIONS, FACTOR = 4, 10, 3
_FLOATS = ("float", "complex")
_RULES = {
    "nan": "a value is NaN",
    "inf": "a value is infinite",
    "all-zero": "every value of a weight is 0 (a weight is a floating-point tensor of a model, with weight in its name "
    "and two or more dimensions larger than 1; except the half of a LoRA that starts at 0)",
    "constant": "all values of a weight are the same, and not 0",
    "dead-rows": "two or more rows of a weight, but not all, are all 0 (a single one may be an embedding's padding); "
    "a row is everything at one index of the first dimension",
    "norm": f"the norm of a weight is at least {FACTOR} times the median of its siblings or at most 1/{FACTOR} of it, "
    f"and at least {DEVIATIONS} median absolute deviations away; at least {SIBLINGS} siblings: weights of one shape "
    "whose names differ only in a number between dots",
}


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """Tensors whose values are conspicuous. kind: `nan`, `inf`, `all-zero`, `constant`, `dead-rows`, `norm`.

    rule: the condition with its threshold, as a person reads it.  details: what was found, for each address.
    """

    kind: str
    rule: str
    details: dict[str, str]


@dataclass(frozen=True, slots=True)
class Health:
    """What the values show, judged by rules that are all named.

    rules: of every check, also of those that found nothing.
    read: tensors whose values were read, of `tensors`; why the others were not, by address, in `skipped`.
    """

    tensors: int
    read: int
    skipped: dict[str, str]
    rules: tuple[str, ...]
    findings: tuple[HealthFinding, ...]


def health(listing: Listing, values: Mapping[str, Values], skipped: dict[str, str]) -> Health:
    """Judges the values of a checkpoint, by address.  skipped: why others were not read."""
    details: dict[str, dict[str, str]] = {kind: {} for kind in _RULES}
    siblings: dict[object, dict[str, float]] = {}
    models = [root.path for root in listing.roots if root.is_model]
    for row in listing.tensors:
        place, tensor = row.address, row.tensor
        if place not in values:
            continue
        found, dead = values[place].numbers, values[place].zero_rows or 0
        said = {"nan": _share(found.nans, found.count), "inf": _share(found.infs, found.count)}
        wide = sum(size > 1 for size in tensor.shape or ()) > 1 and tensor.dtype and tensor.dtype.kind in _FLOATS
        named = row.path and "weight" in str(row.path[-1]).rpartition(".")[2]
        if wide and named and any(row.path[: len(path)] == path for path in models):
            rows = (tensor.shape or (0,))[0]
            if found.zeros == found.count:
                said["all-zero"] = "" if re.search(r"lora_(B|up)\b", place) else _share(found.zeros, found.count)
            elif found.min == found.max and not (found.nans or found.infs):
                said["constant"] = f"all values are {found.min:.6g}"
            if 1 < dead < rows:
                said["dead-rows"] = _share(dead, rows, "row")
            if found.norm is not None:
                pattern = re.sub(r"(?<![^./])\d+(?![^./])", "#", place)
                siblings.setdefault((pattern, tensor.shape), {})[place] = found.norm
        for kind, text in said.items():
            details[kind] |= {place: text} if text else {}
    for norms in siblings.values():
        middle = median(norms.values())
        spread = median(abs(norm - middle) for norm in norms.values())
        for place, norm in norms.items() if len(norms) >= SIBLINGS and middle else ():
            if abs(norm - middle) >= DEVIATIONS * spread and not middle / FACTOR < norm < middle * FACTOR:
                details["norm"][place] = f"norm {norm:.4g}; median of {counted(len(norms), 'sibling')} {middle:.4g}"
    rules = tuple(f"{kind}: {rule}" for kind, rule in _RULES.items())
    findings = tuple(HealthFinding(kind, rule, details[kind]) for kind, rule in _RULES.items() if details[kind])
    return Health(len(listing.tensors), len(values), skipped, rules, findings)


def _share(count: int, total: int, word: str = "value") -> str:
    return f"{count:,} of {counted(total, word)}" if count else ""
