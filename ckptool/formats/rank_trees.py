"""Joins the ranks' trees, walking them side by side.

DTensors and ShardedTensors are assembled from the ranks' shards. Plain tensors are replicas, which have to agree; any
other value is the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from ckptool.checkpoint import Composite, Note, TensorEntry
from ckptool.checkpoint.graph import alike, visit
from ckptool.checkpoint.nodes import Global, same_kind
from ckptool.checkpoint.tree import Path, address
from ckptool.errors import LimitExceeded, Unsupported, form, listed
from ckptool.formats.folder import another_run
from ckptool.formats.marks import noted
from ckptool.formats.pieces import DIVIDED, STEPS, Joiner, Piece
from ckptool.formats.placements import RankFile, RankShare, distributed

Described = Callable[[RankFile, Path, TensorEntry], RankShare | None]
DIFFERENT, NOT_JOINED = "ranks-differ", "not-joined"  # of the notes
UNLIKE = "value differs", "values differ", "between ranks, and the first rank's is used"
MAX_DEPTH = 200
_HOLDERS = (dict, list, tuple, TensorEntry, Composite)


def joined_trees(
    joiner: Joiner,
    name: str,
    files: Sequence[RankFile],
    trees: Sequence[Any],
    described: Described | None = None,
    *,
    apart: bool = False,
) -> Any:
    """The tree joined from those that ranks saved as `name`, each in its file; what differs is noted.

    described: gives the blocks that a plain tensor is, where a table says how it is divided.  apart: where the trees
    differ (random states, tensors of which nothing says whether they are divided), and no tensor in them is divided,
    each rank's stays as it is, by its rank; else different tensors are `Unsupported`. Raises `Conflict` for ranks of
    different steps or runs, and what `Joiner.tensor` raises.
    """
    walk, different = _SideBySide(joiner, described), dict(joiner.different)
    tree = walk.join((name,), files, trees)
    if not walk.counts_steps and len(files) > 1:
        joiner.untied += [file.where for file in files]
    for path, (entry, _) in walk.differing.items():
        if str(path[-1]).rpartition(".")[2] in STEPS and entry.numel == 1:
            raise another_run(joiner.where, f"{address(path)} is one step on some ranks and another on others")
    if apart and not walk.distributed and (places := [*map(address, walk.differing), *walk.unequal]):
        joiner.different = different
        what = f"{listed(places, 2)} {form(len(places), 'is', 'are')} not the same on all ranks"
        joiner.notes.append(Note(NOT_JOINED, f"{name} is not joined: {what}, so it holds what each rank saved"))
        return {f"rank {file.rank}": tree for file, tree in zip(files, trees, strict=True)}
    differing = [] if walk.distributed else list(walk.differing.values())  # they may be parts of larger ones
    unjoinable = [what for entry, what in differing if entry.dtype.kind != "uint" and what[-1:] == ")"]  # shapes differ
    unjoinable = unjoinable or [what for entry, what in differing if entry.dtype.kind in ("float", "complex")]
    if unjoinable:
        raise Unsupported(
            f"{joiner.where}: the ranks saved different plain tensors as {name}: {listed(unjoinable, 3)}",
            "No file says whether or how they are sharded: one rank's would not be the model.",
            "Save a full state dict: "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(…, full_state_dict=True)",
        )
    for path, (entry, what) in walk.differing.items():  # which should be the same on all ranks
        if str(path[-1]).rpartition(".")[2] in DIVIDED or entry.flags.requires_grad or what.endswith(")"):
            what += " differs between ranks, is not sharded, and looks like a weight"
            raise another_run(joiner.where, what)
    unlike = (f"{place} (unlike {listed(files, 2)})" for place, files in walk.unequal.items())
    joiner.notes += noted(DIFFERENT, unlike, *UNLIKE)
    return tree


class _SideBySide:
    """The state of walking the trees of one set of files.

    distributed: how many tensors the ranks hold together.  differing: plain tensors that differ between ranks.
    unequal: addresses of other values that differ, and the files whose value is not that of the first.
    counts_steps: a number of steps was compared.
    """

    def __init__(self, joiner: Joiner, described: Described | None) -> None:
        self.joiner, self.where, self.described = joiner, joiner.where, described
        self.distributed, self.counts_steps = 0, False
        self.differing: dict[Path, tuple[TensorEntry, str]] = {}
        self.unequal: dict[str, list[str]] = {}
        self._joined: dict[tuple[int, ...], Any] = {}

    def join(self, path: Path, files: Sequence[RankFile], values: Sequence[Any]) -> Any:
        """The joined value at `path`, from those that these files have there."""
        if len(path) > MAX_DEPTH:
            raise LimitExceeded(f"{self.where}: values nested more than {MAX_DEPTH} deep", "No real checkpoint is.")
        self.counts_steps |= path[-1] in STEPS
        if any(isinstance(value, (TensorEntry, Composite)) for value in values):
            return self._join_tensor(path, files, values)
        kind = next((k for k in (dict, list, tuple) if all(isinstance(value, k) for value in values)), None)
        uneven = kind is not dict and kind and len({len(value) for value in values}) > 1
        if kind is None or uneven or (kind is not dict and not any(isinstance(i, _HOLDERS) for v in values for i in v)):
            return self._compared(path, files, values)
        key = tuple(map(id, values))
        if key not in self._joined:
            if kind is dict:
                joined = {}
                for name in dict.fromkeys(chain(*values)):
                    present = [(file, value[name]) for file, value in zip(files, values, strict=True) if name in value]
                    if absent := [file.where for file, value in zip(files, values, strict=True) if name not in value]:
                        self.unequal.setdefault(address((*path, name)), absent)
                    joined[name] = self.join((*path, name), *zip(*present, strict=True))
                self._joined[key] = same_kind(values[0], joined)
            else:
                rows = enumerate(zip(*values, strict=True))
                self._joined[key] = kind(self.join((*path, i), files, items) for i, items in rows)
        return self._joined[key]

    def _join_tensor(self, path: Path, files: Sequence[RankFile], values: Sequence[Any]) -> Any:
        name = address(path)
        tensors = [tensor for tensor in map(distributed, values) if tensor is not None]
        if tensors and len(tensors) < len(values):
            what = f"{name} is sharded in some of the ranks' files and whole in others"
            raise another_run(self.where, what)
        if tensors:
            return self._from_shares(name, [f.share(name, tensor) for f, tensor in zip(files, tensors, strict=True)])
        entries = [value for value in values if type(value) is TensorEntry]
        if len(entries) < len(values):
            return self._compared(path, files, values)
        if self.described is not None:
            shares = [self.described(file, path, entry) for file, entry in zip(files, entries, strict=True)]
            if None not in shares:
                return self._from_shares(name, [share for share in shares if share is not None])
        first = entries[0]
        if other := next((e for e in entries if (e.shape, e.dtype) != (first.shape, first.dtype)), None):
            shapes = f"{first.dtype}{list(first.shape)} and {other.dtype}{list(other.shape)}"
            self.differing[path] = first, f"{name} ({shapes})"
            return first
        copies = [Piece(entry, (0,) * len(entry.shape), f.owner) for f, entry in zip(files, entries, strict=True)]
        tensor = self.joiner.replicated(name, copies)
        if name in self.joiner.different:
            self.differing[path] = first, name
        return tensor

    def _from_shares(self, name: str, shares: Sequence[RankShare]) -> TensorEntry:
        """The tensor that these shares of the ranks make up."""
        self.distributed += 1
        first = shares[0]
        for share in shares:
            sources = f"{first.file.where} and {share.file.where}"
            if (share.shape, share.dtype) != (first.shape, first.dtype):
                one, other = f"{first.dtype}{list(first.shape)}", f"{share.dtype}{list(share.shape)}"
                raise another_run(self.where, f"{name} is {one} and {other}, by {sources}")
            if share.agreed != first.agreed:
                raise another_run(self.where, f"{name} is sharded in two ways, by {sources}")
        tables = dict.fromkeys(share.table for share in shares)
        if sum(map(len, tables)) > len({rank for table in tables for rank in table}):
            raise another_run(self.where, f"{name} is sharded over overlapping meshes")
        fits = (reading for reading in zip(*(share.readings for share in shares), strict=True) if None not in reading)
        if (blocks := next(fits, None)) is None:  # the reading that fits all of them
            misfit = next(share for share in shares if None in share.readings)
            what = f"{name} has a different shape here than its rank's part of {list(misfit.shape)} would have"
            raise another_run(misfit.file.path, what)
        tensor = self.joiner.tensor(name, first.shape, first.dtype, chain(*filter(None, blocks)))
        flags = first.flags
        return tensor.with_flags(tensor.flags._replace(requires_grad=flags.requires_grad, parameter=flags.parameter))

    def _compared(self, path: Path, files: Sequence[RankFile], values: Sequence[Any]) -> Any:
        """The first rank's value; notes which have another. Raises `Conflict` where that is a part of a tensor, or a
        step."""
        name, first = address(path), values[0]
        where = [
            file.where for file, value in zip(files, values, strict=True) if not alike(first, value, equal=same_leaf)
        ]
        if where:
            if any(distributed(node) for value in values for node in visit(value)):
                what = "holds sharded tensors, but not of one kind on all ranks"
                raise another_run(self.where, f"{name} {what}")
            if path and path[-1] in STEPS and all(type(value) in (int, float) for value in values):
                what = f"{name} is {first!r} by {files[0].where}, and another step by {where[0]}"
                raise another_run(self.where, what)
            self.unequal.setdefault(name, where)
        return first


def same_leaf(one: Any, other: Any) -> bool:
    """True for values without parts, or tensors, that are written alike."""
    if isinstance(one, TensorEntry):
        ours, theirs = ((e.dtype.name, e.shape, e.stride, e.storage.crc, e.storage.nbytes) for e in (one, other))
        return ours == theirs
    return not isinstance(one, Global) and bool(one == other or (one != one and other != other))
