"""The memory that the weights of a checkpoint need, by arithmetic from dtypes and shapes alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.tree import tensors
from ckptool.conventions.state_dicts import AVERAGE, OPTIMIZER, WEIGHTS
from ckptool.errors import counted
from ckptool.facts import Bytes, short, size

if TYPE_CHECKING:
    from ckptool.analysis.inspect import Listing

ADAM = 3  # tensors beside each trainable one, of its dtype and shape: a gradient and two moments
_BUFFERS = ("running_mean", "running_var")  # what BatchNorm and InstanceNorm keep beside their parameters
_UNKNOWN = frozenset({"quantized", "quantized-unknown"})  # notes on codes, whose weights have other sizes
_ADAPTER = "adapter"  # the note on one: how large its model is, it does not say


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What the weights take up; null where the file does not tell. Tied tensors count once.

    parameters: floating and complex elements of the weights, without running statistics of norms; in pickled modules,
    those of their parameters.  sets: of weights that these are in.  dtypes: bytes of the weights by dtype, most first.
    average: of an average of the weights beside them.  optimizer: of optimizer state; `optimizer_share` of all parts.
    to_load: the storages of the weights.  to_train: these, and for each parameter with gradients a gradient and the two
    moments of Adam in its own dtype; no activations.  trained: the dtypes of these.  partial: the file is only a part.
    """

    parameters: int | None
    sets: int
    dtypes: dict[str, int]
    average: Bytes
    optimizer: Bytes
    optimizer_share: float
    to_load: Bytes | None
    to_train: Bytes | None
    trained: tuple[str, ...]
    partial: bool

    def __str__(self) -> str:
        """`11.7M parameters: 44.6 MB f32 + 40 B i64; …`: what is known of it, in one line; empty where nothing is."""
        facts = []
        if self.sets:
            counts = "weights" if self.parameters is None else counted(self.parameters, "parameter", shown=short)
            counts += f" in {counted(self.sets, 'set')} of weights" if self.sets > 1 else ""
            facts.append(f"{counts}: {' + '.join(f'{size(n)} {name}' for name, n in self.dtypes.items()) or '0 B'}")
        facts += [f"EMA {size(self.average)}"] if self.average else []
        facts += [f"optimizer {size(self.optimizer)} ({self.optimizer_share:.0%})"] if self.optimizer else []
        if self.to_load:
            dtypes = " + ".join(self.trained)
            training = f"{size(self.to_train or 0)} to train with Adam in {dtypes} without activations"
            facts.append(f"{size(self.to_load)} to load" + (f", {training}" if self.to_train and self.trained else ""))
        return ("this part alone: " if self.partial and facts else "") + "; ".join(facts).replace("%", " %")


def memory_needs(listing: Listing) -> MemoryNeeds:
    """What the weights of a listing need. Reads no tensor data."""
    models = [part for part in listing.parts if part.root.kind == WEIGHTS and part.rows]
    averages = [part for part in listing.parts if part.root.kind == AVERAGE and part.rows]
    optimizer = sum(part.bytes for part in listing.parts if part.root.kind == OPTIMIZER)
    everything = sum(part.bytes for part in listing.parts)
    weights = models or averages
    dtypes, trained = Counter[str](), Counter[str]()
    parameters, storages, known = 0, dict[int, int](), bool(weights)
    seen: set[tuple[object, ...]] = set()
    for part in weights:
        pairs = tensors(part.root.module) if part.root.module is not None else ((r.path, r.tensor) for r in part.rows)
        entries = [tensor for _, tensor in pairs if isinstance(tensor, TensorEntry)]
        # What is a parameter the file tells in modules, and in state dicts that kept their parameters.
        flags = {each.view: each.flags for each in entries} if any(each.flags.parameter for each in entries) else {}
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
            may_be = tensor.dtype.kind in ("float", "complex") and not str(row.path[-1]).endswith(_BUFFERS)
            if flag.parameter if flag else may_be:
                parameters += nbytes // tensor.dtype.itemsize
                trained[tensor.dtype.name] += nbytes if flag is None or flag.requires_grad else 0
    to_load = sum(storages.values()) if weights else None
    codes = {note.code for note in listing.notes}
    known = known and codes.isdisjoint(_UNKNOWN)
    to_train = None if not known or _ADAPTER in codes or to_load is None else to_load + ADAM * trained.total()
    return MemoryNeeds(
        parameters if known else None,
        len(weights),
        {name: nbytes for name, nbytes in dtypes.most_common() if nbytes},
        sum(part.bytes for part in averages) if models else 0,
        optimizer,
        optimizer / everything if everything else 0.0,
        to_load,
        to_train,
        tuple(name for name, nbytes in trained.most_common() if nbytes),
        listing.part is not None,
    )
