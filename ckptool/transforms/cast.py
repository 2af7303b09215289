"""Casts the floating-point tensors of model state dicts to another dtype; everything else stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, TensorEntry
from ckptool.checkpoint.dtypes import DType, dtype_of
from ckptool.checkpoint.patterns import selected
from ckptool.checkpoint.tree import address, children, rebuild, stored_parts, walk
from ckptool.commands import arg
from ckptool.conventions.state_dicts import StateDict
from ckptool.errors import Conflict, UsageError
from ckptool.transforms.casting import CastTally, cast_storage, recast


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast: the checkpoint, and for each storage the name of its first tensor, its old type and a tally.

    tensors: how many, by their names; bytes_before, bytes_after: of their storages, each counted once.
    The tallies fill while the values pass on their way to the output.  skipped: floating tensors that were left as they
    are, and why.
    """

    checkpoint: Checkpoint
    target: DType
    tallies: tuple[tuple[str, DType, CastTally], ...]
    tensors: int
    bytes_before: int
    bytes_after: int
    skipped: tuple[tuple[str, str], ...]


def parse_dtype(given: object) -> DType:
    """The floating type that is meant (`bf16`, `float16`, `torch.bfloat16`, torch's and numpy's own); raises
    `UsageError` for another."""
    dtype, text = None, given if isinstance(given, str) else repr(given)
    try:
        dtype = dtype_of(given)
    except UsageError:
        if not isinstance(given, str):
            raise
    if dtype is None or not dtype.is_float:
        raise UsageError(
            f"{text!r} is not a floating-point dtype",
            "Casts are between floating-point dtypes.",
            "Available: f64, f32, f16, bf16, f8_e4m3fn, f8_e5m2, …",
        )
    return dtype


def cast_roots(
    checkpoint: Checkpoint,
    roots: Sequence[StateDict],
    target: DType,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Cast:
    """Casts the floating tensors of `roots` whose keys match `only` and not `exclude`.

    Raises `NoMatch` for a pattern that matches nothing, `Conflict` where a storage is also seen by a tensor that is not
    cast, or as another type: both would change with it.
    """
    keys = selected([key for root in roots for key in root.node if type(key) is str], only, exclude)
    chosen: dict[int, TensorEntry] = {}
    slots: set[tuple[int, str]] = set()  # which entries of which dictionaries; one tensor may stand in several
    names: dict[int, str] = {}
    skipped: list[tuple[str, str]] = []
    for root in roots:
        for key, value in root.node.items():
            if key not in keys or not isinstance(value, (TensorEntry, Composite)) or value.dtype is None:
                continue
            place = address((*root.base, *root.path, key))
            if isinstance(value, Composite):
                skipped += [(place, value.kind)] if value.dtype.kind in ("float", "quantized") else []
            elif value.dtype.is_float and value.dtype is not target:
                chosen[id(value)] = value
                slots.add((id(root.node), key))
                names.setdefault(id(value.storage), place)
    _refuse_shared(checkpoint.tree, chosen, slots, names)
    before = {id(entry.storage): entry for entry in chosen.values()}
    tallies = {number: CastTally() for number in before}
    storages = {
        number: cast_storage(entry.storage, entry.dtype, target, tallies[number]) for number, entry in before.items()
    }

    def leaf(node: Any) -> Any:
        return recast(node, storages[id(node.storage)], target) if id(node) in chosen else node

    return Cast(
        replace(checkpoint, tree=rebuild(checkpoint.tree, leaf)),
        target,
        tuple((names[number], before[number].dtype, tally) for number, tally in tallies.items()),
        len(slots),
        sum(entry.storage.nbytes for entry in before.values()),
        sum(storage.nbytes for storage in storages.values()),
        tuple(skipped),
    )


def _refuse_shared(
    tree: Any, chosen: dict[int, TensorEntry], slots: set[tuple[int, str]], names: dict[int, str]
) -> None:
    dtypes: dict[int, DType] = {}
    for entry in chosen.values():
        if dtypes.setdefault(id(entry.storage), entry.dtype) is not entry.dtype:
            what = f"the storage of {names[id(entry.storage)]} is seen as two types"
            raise Conflict(what, "Its elements cannot be converted without knowing their dtype.")
    for path, node in walk(tree):
        for segment, part in children(node):
            clashes = [stored for stored in stored_parts(part) if id(stored.storage) in names]
            if clashes and (id(node), segment) not in slots:
                name, other = names[id(clashes[0].storage)], address((*path, segment))
                raise Conflict(
                    f"{name} shares its storage with {other}, which is not cast",
                    "Both would change, or no longer be tied.",
                    f"Leave it out too: {arg(exclude=name.rpartition('/')[2])}",
                )
