"""The parts of a listing, each with what its tensors come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.state_dicts import COUNTER, StateDict, without_wrappers
from ckptool.reports.listing import Listing, TensorRow

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A root and its tensors.

    sizes: bytes of each row's values, 0 for one that is tied to an earlier row of the part; `bytes` and `elements` are sums of that kind.
    tied: index of such a row -> index of the first of the same tensor.  dtypes, locations: names, the most frequent first.
    """

    root: StateDict
    rows: Sequence[TensorRow]
    sizes: list[int]
    tied: dict[int, int]
    elements: int
    bytes: int
    dtypes: tuple[str, ...]
    locations: tuple[str, ...]


def parts(listing: Listing) -> list[Part]:
    """Every root of a listing, in order, with its tensors. Those outside of all roots belong to none."""
    if len(listing.roots) == 1:
        return [_part(listing.roots[0], listing.tensors)]
    rows: dict[tuple[object, ...], list[TensorRow]] = {root.path: [] for root in listing.roots}
    depths = sorted({len(path) for path in rows})
    for row in listing.tensors:
        for depth in depths:
            found = rows.get(row.path[:depth])
            if found is not None:
                found.append(row)
                break
    return [_part(root, rows[root.path]) for root in listing.roots]


def like_others(divided: Sequence[Part]) -> dict[Part, Part]:
    """Sets of weights with the very names, types and shapes of an earlier one (wrappers aside), as an EMA has: part -> that one."""
    models = [part for part in divided if part.root.is_model]
    alike: dict[Part, Part] = {}
    first: dict[tuple[object, ...], Part] = {}
    for part in models if len(models) > 1 else ():
        base = len(part.root.path)
        shapes = tuple(
            (
                without_wrappers(key) if isinstance(key := row.path[base], str) else key,
                row.tensor.dtype,
                row.tensor.shape,
            )
            for row in part.rows
            if row.path[base] != COUNTER
        )
        if (found := first.setdefault(shapes, part)) is not part:
            alike[part] = found
    return alike


def _part(root: StateDict, rows: Sequence[TensorRow]) -> Part:
    tied = _tied(rows)
    known: dict[tuple[object, object], tuple[int, int]] = {}  # many tensors are of few shapes
    sizes: list[int] = []
    elements = 0
    for index, row in enumerate(rows):
        tensor = row.tensor
        kind = (tensor.dtype, tensor.shape)
        if index in tied:
            sizes.append(0)
            continue
        fact = known.get(kind)
        if fact is None or not isinstance(tensor, TensorEntry):
            fact = known[kind] = (
                (tensor.numel if isinstance(tensor, TensorEntry) else _numel(tensor.shape)),
                tensor.nbytes,
            )
        elements += fact[0]
        sizes.append(fact[1])
    dtypes = _most_frequent([row.tensor.dtype for row in rows])
    return Part(
        root,
        rows,
        sizes,
        tied,
        elements,
        sum(sizes),
        tuple(dtype.name if dtype else "unknown" for dtype in dtypes),
        tuple(_most_frequent([row.tensor.location for row in rows])),
    )


def _most_frequent(values: list[_T]) -> list[_T]:
    """The different ones, the most frequent first. Mostly there is one: a Counter for each of 40,000 parts would be felt."""
    kinds = dict.fromkeys(values)
    return list(kinds) if len(kinds) < 2 else [value for value, _ in Counter(values).most_common()]


def _numel(shape: tuple[int, ...] | None) -> int:
    count = 1 if shape is not None else 0
    for length in shape or ():
        count *= length
    return count


def _tied(rows: Sequence[TensorRow]) -> dict[int, int]:
    if len(rows) < 2:
        return {}
    shared = {
        number for number, count in Counter(row.storage for row in rows).items() if count > 1 and number is not None
    }
    first: dict[tuple[object, ...], int] = {}
    tied: dict[int, int] = {}
    if shared:
        for index, row in enumerate(rows):
            tensor = row.tensor
            if row.storage in shared and isinstance(tensor, TensorEntry):
                view = (row.storage, tensor.dtype, tensor.shape, tensor.stride, tensor.offset)
                if (before := first.setdefault(view, index)) != index:
                    tied[index] = before
    return tied
