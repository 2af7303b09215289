"""The memory that the weights of a checkpoint need, by arithmetic from dtypes and shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ckptool.analysis.inspect import Listing, PartSummary, TensorRow, parts
from ckptool.checkpoint import Flags, TensorEntry
from ckptool.checkpoint.state_dicts import AVERAGE, OPTIMIZER, WEIGHTS
from ckptool.checkpoint.tree import tensors

ADAM = 3  # tensors beside each trainable one, of its dtype and shape: a gradient and two moments
_BUFFERS = ("running_mean", "running_var")  # what BatchNorm and InstanceNorm keep beside their parameters
_UNKNOWN = frozenset({"quantized", "quantized-unknown"})  # notes on codes, whose weights have other sizes
_ADAPTER = "adapter"  # the note on one: how large its model is, it does not say


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Sizes in bytes; None where the file does not tell. Tied tensors count once.

    parameters: floating and complex elements of the weights, without running statistics of norms; in pickled modules,
    those of their parameters.  sets: of weights that these are in.  dtypes: bytes of the weights by dtype, most first.
    average: of an average of the weights beside them.  optimizer: of optimizer state; `optimizer_share` of all parts.
    to_load: the storages of the weights.  to_train: these, and for each parameter with gradients a gradient and the two
    moments of Adam in its own dtype; no activations.  trained: the dtypes of these.  partial: the file is only a part.
    """

    parameters: int | None
    sets: int
    dtypes: tuple[tuple[str, int], ...]
    average: int
    optimizer: int
    optimizer_share: float
    to_load: int | None
    to_train: int | None
    trained: tuple[str, ...]
    partial: bool


def memory_needs(listing: Listing, divided: Sequence[PartSummary] | None = None) -> MemoryNeeds:
    """What the weights of a listing need. divided: its parts, where they are there already. Reads no tensor data."""
    divided = parts(listing) if divided is None else divided
    models = [part for part in divided if part.root.kind == WEIGHTS and part.rows]
    averages = [part for part in divided if part.root.kind == AVERAGE and part.rows]
    optimizer, everything = (sum(part.bytes for part in some) for some in (_optimizers(divided), divided))
    weights = models or averages
    dtypes, trained = Counter[str](), Counter[str]()
    parameters, storages, known = 0, dict[int, int](), bool(weights)
    seen: set[tuple[object, ...]] = set()
    for part in weights:
        flags = _flags_of(part)
        for index, row in enumerate(part.rows):
            tensor, nbytes = row.tensor, part.sizes[index]
            if index in part.tied or (len(weights) > 1 and tensor.view in seen):
                continue
            seen.update((tensor.view,) if len(weights) > 1 else ())
            dtypes[tensor.dtype.name if tensor.dtype else "unknown"] += nbytes
            if not isinstance(tensor, TensorEntry):
                known = False  # its parts may be anything: codes, indices
                storages[id(tensor)] = nbytes
                continue
            storages[id(tensor.storage)] = tensor.storage.nbytes
            flag = flags.get(tensor.view) if flags else None
            if flag.parameter if flag else _may_be_parameter(row, tensor):
                parameters += nbytes // tensor.dtype.itemsize
                trained[tensor.dtype.name] += nbytes if flag is None or flag.requires_grad else 0
    to_load = sum(storages.values()) if weights else None
    codes = {note.code for note in listing.notes}
    known = known and codes.isdisjoint(_UNKNOWN)
    to_train = None if not known or _ADAPTER in codes or to_load is None else to_load + ADAM * trained.total()
    return MemoryNeeds(
        parameters if known else None,
        len(weights),
        tuple((name, nbytes) for name, nbytes in dtypes.most_common() if nbytes),
        sum(part.bytes for part in averages) if models else 0,
        optimizer,
        optimizer / everything if everything else 0.0,
        to_load,
        to_train,
        tuple(name for name, nbytes in trained.most_common() if nbytes),
        listing.part is not None,
    )


def _optimizers(divided: Sequence[PartSummary]) -> list[PartSummary]:
    return [part for part in divided if part.root.kind == OPTIMIZER]


def _flags_of(part: PartSummary) -> dict[tuple[object, ...], Flags]:
    """Which tensors are parameters, where the file tells: in modules, and in state dicts that kept their parameters."""
    found = tensors(part.root.module) if part.root.module is not None else [(row.path, row.tensor) for row in part.rows]
    entries = [tensor for _, tensor in found if isinstance(tensor, TensorEntry)]
    return {entry.view: entry.flags for entry in entries} if any(entry.flags.parameter for entry in entries) else {}


def _may_be_parameter(row: TensorRow, tensor: TensorEntry) -> bool:
    return tensor.dtype.kind in ("float", "complex") and not str(row.path[-1]).endswith(_BUFFERS)
