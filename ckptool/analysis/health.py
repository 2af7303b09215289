"""Tensors with conspicuous values, by rules that are all named. None of them is a diagnosis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from ckptool.analysis.inspect import Listing, TensorRow
from ckptool.analysis.report import Health, HealthFinding
from ckptool.analysis.statistics import Statistics
from ckptool.errors import counted

SIBLINGS, DEVIATIONS, FACTOR = 4, 10, 3
_WEIGHT = (
    "a weight is a floating-point tensor of a model, with weight in its name and two or more dimensions larger than 1"
)
_SIBLINGS = "weights of one shape whose names differ only in a number between dots"


class _Values(NamedTuple):
    """What is known of one tensor. dead: its rows that are all zero, where they were looked at."""

    address: str
    row: TensorRow
    found: Statistics
    dead: int | None


_RULES = {
    "nan": "a value is NaN",
    "inf": "a value is infinite",
    "all-zero": f"every value of a weight is 0 ({_WEIGHT}; except the half of a LoRA that starts at 0)",
    "constant": "all values of a weight are the same, and not 0",
    "dead-rows": "two or more rows of a weight, but not all, are all 0 (a single one may be an embedding's padding); "
    "a row is everything at one index of the first dimension",
    "norm": f"the norm of a weight is at least {FACTOR} times the median of its siblings or at most 1/{FACTOR} of it, "
    f"and at least {DEVIATIONS} median absolute deviations away; at least {SIBLINGS} siblings: {_SIBLINGS}",
}


def health(
    listing: Listing, numbers: Mapping[str, Statistics], dead: Mapping[str, int | None], skipped: dict[str, str]
) -> Health:
    """Judges the values of a checkpoint by their statistics and rows of zeros, by address."""
    roots = [root.path for root in listing.roots if root.is_model]
    weights = []
    details: dict[str, dict[str, str]] = {kind: {} for kind in _RULES}
    for row in listing.tensors:
        address = row.address
        found = numbers.get(address)
        if found is None:
            continue
        if found.nans or found.infs:
            details["nan"][address] = _share(found.nans, found.count, "value")
            details["inf"][address] = _share(found.infs, found.count, "value")
        if _is_weight(row) and any(row.path[: len(root)] == root for root in roots):
            weights.append(_Values(address, row, found, dead.get(address)))
    for kind, check in (("all-zero", _zero), ("constant", _constant), ("dead-rows", _dead_rows)):
        details[kind] = {each.address: check(each) for each in weights}
    details["norm"] = dict(_unlike_siblings(weights))
    shown = {kind: {place: said for place, said in each.items() if said} for kind, each in details.items()}
    findings = tuple(HealthFinding(kind, rule, shown[kind]) for kind, rule in _RULES.items() if shown[kind])
    rules = tuple(f"{kind}: {rule}" for kind, rule in _RULES.items())
    return Health(len(listing.tensors), len(numbers), skipped, rules, findings)


def _is_weight(row: TensorRow) -> bool:
    tensor = row.tensor
    name = str(row.path[-1]).rpartition(".")[2] if row.path else ""
    wide = sum(size > 1 for size in tensor.shape or ()) > 1
    return wide and "weight" in name and tensor.dtype is not None and tensor.dtype.kind in ("float", "complex")


def _share(count: int, total: int, word: str) -> str:
    return f"{count:,} of {counted(total, word)}" if count else ""


def _zero(each: _Values) -> str:
    starts_so = re.search(r"lora_(B|up)\b", each.address)
    return _share(each.found.zeros, each.found.count, "value") if _all_zero(each) and not starts_so else ""


def _all_zero(each: _Values) -> bool:
    return each.found.zeros == each.found.count


def _constant(each: _Values) -> str:
    whole = not (each.found.nans or each.found.infs or _all_zero(each))
    return f"all values are {each.found.min:.6g}" if whole and each.found.min == each.found.max else ""


def _dead_rows(each: _Values) -> str:
    rows = (each.row.tensor.shape or (0,))[0]
    return _share(each.dead, rows, "row") if each.dead and 1 < each.dead < rows else ""


def _unlike_siblings(weights: Iterable[_Values]) -> Iterator[tuple[str, str]]:
    groups: dict[object, list[_Values]] = {}
    for each in weights:
        pattern = re.sub(r"(?<![^./])\d+(?![^./])", "#", each.address)
        if each.found.norm is not None:
            groups.setdefault((pattern, each.row.tensor.shape), []).append(each)
    for group in groups.values():
        norms = [each.found.norm or 0.0 for each in group]
        middle = median(norms)
        spread = median(abs(norm - middle) for norm in norms)
        for each, norm in zip(group, norms, strict=True):
            apart = abs(norm - middle) >= DEVIATIONS * spread
            if len(group) >= SIBLINGS and apart and middle and not middle / FACTOR < norm < middle * FACTOR:
                yield each.address, f"norm {norm:.4g}; median of {counted(len(group), 'sibling')} {middle:.4g}"
