"""Several checkpoints read side by side, each once: how far they are apart, and how the layers of a run move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

from ckptool.analysis.report import Distances, NormsOverTime
from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.numeric import Array, has_numbers, numbers, resolve
from ckptool.checkpoint.state_dicts import find_state_dicts, without_wrappers
from ckptool.checkpoint.strided import row_major
from ckptool.checkpoint.tree import tensors
from ckptool.errors import CkptoolError

ROOM = 1 << 19  # values of all files that are in memory at a time
LEAST = 1 << 10

Weights = dict[str, TensorEntry]


class Unreadable(Exception):
    """One of the files that are read side by side cannot be: which, and why."""

    def __init__(self, number: int, problem: CkptoolError) -> None:
        super().__init__(problem.what)
        self.number, self.problem = number, problem


def weights_of(checkpoint: Checkpoint) -> Weights:
    """The tensors of the models in a checkpoint, by names that do not depend on wrappers, nor on where the only model
    is; all tensors of one without a model."""
    models = [root for root in find_state_dicts(checkpoint) if root.is_model]
    found: Weights = {}
    for root in models:
        base = f"{root.address}/" if len(models) > 1 else ""
        for key, value in root.node.items():
            if isinstance(key, str) and isinstance(value, TensorEntry):
                found.setdefault(base + without_wrappers(key), value)
    if not models:
        found = {
            "/".join(map(str, path)): value
            for path, value in tensors(checkpoint.tree)
            if isinstance(value, TensorEntry)
        }
    return found


def distances(files: Mapping[str, Weights]) -> Distances:
    """Compares each file with each other, tensor by tensor. A value that is not finite counts as 0."""
    import numpy

    count, many = len(files), list(files.values())
    shared, equal = numpy.zeros((count, count), int), numpy.zeros((count, count), int)
    products, squares = numpy.zeros((count, count)), numpy.zeros((count, count))
    alone = numpy.zeros(count, int)
    skipped: dict[str, str] = {}
    for key in dict.fromkeys(key for weights in many for key in weights):
        groups: dict[Any, list[int]] = {}
        for number, weights in enumerate(many):
            if key in weights and (why := _incomparable(weights[key])):
                skipped[key] = why
            elif key in weights:
                groups.setdefault((weights[key].shape, weights[key].dtype.kind == "complex"), []).append(number)
        for group in groups.values():
            if len(group) < 2:
                alone[group] += 1  # nothing has to be read to know that it is the same as itself
                continue
            same, gram = _compared([many[number][key] for number in group], group)
            cells = numpy.ix_(group, group)
            shared[cells] += 1
            equal[cells] += same
            products[cells] += gram
            squares[cells] += numpy.diag(gram)[:, None]
    own = shared.diagonal() + alone
    with numpy.errstate(all="ignore"):
        shares, cosines = equal / shared, products / numpy.sqrt(squares * squares.T)
    numpy.fill_diagonal(shared, own)
    for table in (shares, cosines):
        numpy.fill_diagonal(table, numpy.where(own > 0, 1.0, numpy.nan))
    common, share, cosine = (_table(table.tolist()) for table in (shared, shares, cosines.clip(-1, 1)))
    return Distances(tuple(files), common, share, cosine, skipped)


def _table(rows: list[list[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Rows in which NaN is None."""
    return tuple(tuple(cell if cell == cell else None for cell in row) for row in rows)


def _incomparable(entry: TensorEntry) -> str:
    if not has_numbers(entry.dtype):
        return f"{entry.dtype.name} is packed"
    if entry.nbytes > entry.storage.nbytes:
        return "expanded"
    return "" if entry.numel else "empty"


def _compared(entries: Sequence[TensorEntry], group: Sequence[int]) -> tuple[Array, Array]:
    """For each pair whether they are the same bytes, and the product of their values."""
    import numpy

    same = numpy.array([[one.dtype is other.dtype for other in entries] for one in entries])
    gram = numpy.zeros((len(entries), len(entries)))
    for raw, values in _side_by_side(entries, group):
        for i, one in enumerate(raw):
            for j in range(i):
                same[i, j] = same[j, i] = same[i, j] and one == raw[j]
        gram += values @ values.T
    return same, gram


def _side_by_side(entries: Sequence[TensorEntry], group: Sequence[int]) -> Iterator[tuple[list[bytes], Array]]:
    """Tensors of one shape, some values of each at a time: the bytes, and the values as rows of f64; 0 for strange
    ones."""
    import numpy

    data = [row_major(entry) for entry in entries]
    step = max(LEAST, ROOM // len(entries))
    for start in range(0, entries[0].numel, step):
        raw, rows = [], []
        for number, entry, source in zip(group, entries, data, strict=True):
            size = entry.dtype.itemsize
            try:
                raw.append(source.read(start * size, min(step, entry.numel - start) * size))
            except CkptoolError as problem:
                raise Unreadable(number, problem) from problem
            own = numpy.frombuffer(bytearray(raw[-1]), numpy.uint8)
            values = numbers(resolve(own, entry.dtype, entry.flags), entry.dtype)
            wide = values.astype(numpy.complex128 if values.dtype.kind == "c" else numpy.float64)
            rows.append(numpy.nan_to_num(wide.view(numpy.float64), copy=False, nan=0, posinf=0, neginf=0))
        yield raw, numpy.stack(rows)


def norms_over_time(steps: Sequence[int], files: Sequence[Weights], unread: dict[int, str]) -> NormsOverTime:
    """The norms of the layers that all checkpoints of a run have. Raises `Unreadable` where one cannot be read."""
    import numpy

    squares: dict[str, Array] = {}
    moves: dict[str, Array] = {}
    for key, first in files[0].items() if files else ():
        entries = [weights[key] for weights in files if key in weights and weights[key].shape == first.shape]
        layer, _, name = key.rpartition(".")
        if first.dtype.kind != "float" or name.startswith("running_") or len(entries) < len(files):
            continue
        if any(map(_incomparable, entries)):
            continue
        here = squares.setdefault(layer, numpy.zeros(len(files)))
        moved = moves.setdefault(layer, numpy.zeros(len(files) - 1))
        for _, values in _side_by_side(entries, range(len(files))):
            here += numpy.einsum("ij,ij->i", values, values)
            apart = numpy.diff(values, axis=0)
            moved += numpy.einsum("ij,ij->i", apart, apart)
    norms = {layer: tuple(map(sqrt, found.tolist())) for layer, found in squares.items()}
    shares = {
        layer: tuple(
            sqrt(move) / norm if norm else 0.0 for move, norm in zip(found.tolist(), norms[layer], strict=False)
        )
        for layer, found in moves.items()
    }
    return NormsOverTime(tuple(steps), norms, shares, unread)
