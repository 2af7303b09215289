"""Repeated blocks: which numbered siblings are equal in everything but their number, and are shown as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from ckptool.analysis.inspect import PartSummary
from ckptool.checkpoint import Tensor, TensorEntry

FOLDED = 3  # siblings, at least
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})", re.DOTALL)


def runs(names: Sequence[str], alike: Callable[[int, int], bool]) -> Iterator[list[int]]:
    """Siblings by index: those to fold together, all others alone. alike: whether two differ in their number only.

    Numbers go up by one, with the leading zeros of the first. Where something is folded, neighbours of one prefix come
    in the order of their numbers, as sorted names do not (`layers.10` before `layers.2`).
    """
    split = [(match[1], match[2]) if (match := _NUMBERED.fullmatch(name)) else (name, "") for name in names]
    for _, group in groupby(range(len(names)), key=lambda index: (split[index][0], bool(split[index][1]))):
        stretch = list(group)
        if len(stretch) < FOLDED or not split[stretch[0]][1]:
            yield from ([index] for index in stretch)
            continue
        found: list[list[int]] = []
        for index in sorted(stretch, key=lambda index: int(split[index][1])):
            run = found[-1] if found else []
            first, last = (split[run[0]][1], int(split[run[-1]][1])) if run else ("", 0)
            if run and split[index][1] == str(last + 1).zfill(len(first)) and alike(run[0], index):
                run.append(index)
            else:
                found.append([index])
        if not any(len(run) >= FOLDED for run in found):
            found = [[index] for index in stretch]
        for run in found:
            yield from [run] if len(run) >= FOLDED else ([index] for index in run)


def label(first: str, last: str) -> str:
    """The name of a run: `{0..11}`, `layer{1..4}`."""
    begin, end = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    return f"{begin[1]}{{{begin[2]}..{end[2]}}}" if begin and end else first


def structure(part: PartSummary, rows: Sequence[int], names: Sequence[object]) -> list[tuple[object, ...]]:
    """Everything by which two blocks can differ. names: of the rows, without the number of the block.

    A tie within the block is to a place in it, any other to one row of the part.
    """
    place = {row: number for number, row in enumerate(rows)} if part.tied else {}
    return [
        (name, _facts(part.rows[row].tensor), _tie(part.tied.get(row), place))
        for row, name in zip(rows, names, strict=True)
    ]


def _tie(target: int | None, place: dict[int, int]) -> tuple[str, int] | None:
    if target is None:
        return None
    return ("inside", place[target]) if target in place else ("outside", target)


def _facts(tensor: Tensor) -> tuple[object, ...]:
    if isinstance(tensor, TensorEntry):
        return tensor.dtype, tensor.shape, tensor.stride, tensor.storage.location, tensor.flags
    return tensor.kind, tensor.dtype, tensor.shape, tensor.location, tensor.nbytes
