"""The optimizer's files of ZeRO: each is one rank's share of the flat vectors, checked against those of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.nodes import Object
from ckptool.errors import Conflict, counted, listed
from ckptool.formats.boxes import agree
from ckptool.formats.deepspeed.flat import RankVector, bare
from ckptool.formats.joined_folder import damaged, lacks, missing_ranks, mixed

_VECTORS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_STATES = ("base_optimizer_state", "optimizer_state_dict")
# What says how the vectors are laid out; of no use when they are joined.
_LAYOUT = (*_VECTORS, *_STATES, "param_slice_mappings", "group_paddings", "param_alignment_paddings")
_PLAIN = frozenset({int, float, bool, str, tuple, type(None)})


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's share. weights: the f32 master values of each group (of stage 3: each sub-group).

    states: the state of the base optimizer, by group.  groups: its parameter groups.  counts: over how many ranks each
    group is divided.  mappings: for each group, where a name's piece begins in this rank's vector, and its length.
    """

    rank: int
    file: str
    stage: int
    weights: list[TensorEntry]
    states: Mapping[Any, Any]
    groups: list[Any]
    counts: tuple[int, ...]
    mappings: list[dict[str, tuple[int, int]]]
    paddings: list[Any]
    rest: dict[str, Any]

    @property
    def engine(self) -> str:
        """The optimizer that wrote it, for people."""
        return f"ZeRO stage {self.stage}" if "zero_stage" in self.rest else "BF16_Optimizer"

    def vector(self, group: int, key: str = "") -> RankVector:
        """The master values of a group, or what the optimizer keeps under a key for it, as long as those."""
        weights = self.weights[group]
        entry = self.state(group).get(key) if key else weights
        if not isinstance(entry, TensorEntry) or len(entry.shape) != 1 or entry.shape[0] < weights.shape[0]:
            what = f"has no {key} for all of group {group}, of which it has the weights"
            raise damaged(self.file, what)
        return RankVector(replace(entry, shape=weights.shape), f"rank {self.rank:,}")

    def state(self, group: int) -> Mapping[str, Any]:
        found = self.states.get(group)
        return found if isinstance(found, dict) else {}

    def divided(self, group: int) -> list[str]:
        """The keys of the optimizer's state for a group whose values are divided as the weights are."""
        return [key for key, value in self.state(group).items() if isinstance(value, TensorEntry) and value.shape]

    def undivided(self, group: int) -> dict[str, Any]:
        """The rest of the state: a `step`."""
        return undivided(self.state(group))


def undivided(state: Any) -> dict[str, Any]:
    """What an optimizer keeps once for a group (a `step`): each time another tensor, as every parameter has its own."""
    return {
        key: value.with_storage(value.storage.alone()) if isinstance(value, TensorEntry) else value
        for key, value in (state.items() if isinstance(state, dict) else ())
        if not (isinstance(value, TensorEntry) and value.shape)
    }


def share_of(rank: int, file: str, tree: Any) -> Share:
    """The share in an optimizer's file. Raises `Corrupt` for a file of another kind."""
    found = tree.get("optimizer_state_dict") if isinstance(tree, dict) else None
    vectors = next((found[key] for key in _VECTORS if key in found), None) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(vectors, list):
        raise damaged(file, "has no f32 weights in it")
    vectors = [bare(entry) for entry in vectors]
    for entry in vectors:
        if not isinstance(entry, TensorEntry) or len(entry.shape) != 1:
            raise damaged(file, "has f32 weights that are not flat vectors")
    base: Any = next((found[key] for key in _STATES if key in found), {})
    states, groups = (base.get("state"), base.get("param_groups")) if isinstance(base, dict) else (base, [])
    stage = _number(found.get("zero_stage"))
    node = found.get("partition_count")
    counts = tuple(node) if isinstance(node, (list, tuple)) else (node,)
    if not counts or not all(type(count) is int and 0 < count < 1 << 32 for count in counts):
        raise damaged(file, "does not say over how many ranks it is divided")
    return Share(
        rank,
        file,
        1 if stage is None else stage,
        vectors,
        dict(enumerate(states)) if isinstance(states, list) else states if isinstance(states, dict) else {},
        groups if isinstance(groups, list) else [],
        counts,
        [_mapping(each) for each in _items(found.get("param_slice_mappings"))],
        list(_items(found.get("param_alignment_paddings"))),
        {str(key): plain(value) for key, value in found.items() if key not in _LAYOUT},
    )


def _items(node: Any) -> Iterable[Any]:
    return node if isinstance(node, (list, tuple)) else ()


def _number(node: Any) -> int | None:
    """A number, or that of a member of an enum."""
    if isinstance(node, Object) and type(node.args) is tuple and len(node.args) == 1:
        node = node.args[0]
    return node if type(node) is int else None


def plain(node: Any) -> Any:
    """An object of DeepSpeed's own (a loss scaler, a stage) as its attributes or its number."""
    if not isinstance(node, Object):
        return node
    number = _number(node)
    return dict(node.attributes) if number is None else number


def _mapping(node: Any) -> dict[str, tuple[int, int]]:
    """Where the pieces of names begin in a rank's vector, and how long they are."""
    found = {}
    for name, address in node.items() if isinstance(node, dict) else ():
        fields = address.attributes if isinstance(address, Object) else {}
        begin, length = fields.get("start"), fields.get("numel")
        if type(begin) is int and type(length) is int and type(name) is str and begin >= 0 <= length:
            found[name] = begin, length
    return found


# All of them together ------------------------------------------------------------------------------------------------


def checked(folder: Folder, shares: list[Share]) -> None:
    """Raises `Corrupt` where ranks are missing, `Conflict` for shares of several checkpoints. shares: by rank."""
    first = shares[0]
    for other in shares[1:]:
        for what, one, another in (
            ("ZeRO stage", first.stage, other.stage),
            ("division over ranks", first.counts, other.counts),
            ("number of groups", len(first.weights), len(other.weights)),
            ("step or learning rate", _facts(first), _facts(other)),
        ):
            if one != another:
                shown = f": {one} and {another}" if type(one) is int else ""
                raise mixed(folder, first.file, other.file, f"the {what} differs{shown}")
        _same_steps(folder, first, other)
    complete(folder, [share.rank for share in shares], max(first.counts), first.file)


def complete(folder: Folder, ranks: list[int], world: int, file: str) -> None:
    """Raises `Corrupt` for ranks of this world that have no file, `Conflict` for files of ranks beyond it."""
    there = set(ranks)
    if beyond := [f"rank {rank:,}" for rank in sorted(there) if rank >= world]:
        raise Conflict(
            f"{folder} has files of {counted(len(beyond), 'rank')} beyond the {world:,} that saved it: "
            f"{listed(beyond, 3)}",
            f"{file} gives that number. The others are left from a larger world, and may be of another step.",
            "Copy only the files of this checkpoint into another folder, or take another checkpoint.",
        )
    if len(there) < world:
        what = f"the files of {counted(world - len(there), 'rank')} of {world:,}"
        raise lacks(folder, what, [f"rank {rank:,}" for rank in missing_ranks(there, world)])


def _facts(share: Share) -> list[Any]:
    """The plain values of the parameter groups: the learning rate of a step, and the like."""
    return [
        {key: value for key, value in group.items() if type(value) in _PLAIN} if isinstance(group, dict) else None
        for group in share.groups
    ]


def _same_steps(folder: Folder, first: Share, other: Share) -> None:
    for group in range(len(first.weights)):
        ours, theirs = first.undivided(group), other.undivided(group)
        for key in ours.keys() & theirs.keys():
            one, another = ours[key], theirs[key]
            both = isinstance(one, TensorEntry) and isinstance(another, TensorEntry)
            if agree(one, another) is False if both else type(one) is not type(another) or one != another:
                raise mixed(folder, first.file, other.file, f"{key!s} of the optimizer differs")


def check_mappings(share: Share, group: int, shapes: Iterable[tuple[str, int, int]], begin: int) -> str:
    """The name of a tensor of which this rank's file says that its piece lies elsewhere; empty for none.

    shapes: name, begin and length in the whole vector, of which this rank's piece begins at `begin`.
    """
    mapping = share.mappings[group] if group < len(share.mappings) else {}
    end = begin + share.weights[group].shape[0]
    for name, at, length in shapes:
        low, high = max(at, begin), min(at + length, end)
        if name in mapping and low < high and mapping[name] != (low - begin, high - low):
            return name
    return ""


def named_groups(groups: Any, names: Mapping[int, Iterable[str]]) -> list[dict[str, Any]]:
    """Parameter groups with names in place of the numbers of their vectors. names: those in each vector."""
    return [
        {**group, "params": [name for number in _items(group.get("params")) for name in names.get(number, ())]}
        for group in _items(groups)
        if isinstance(group, dict)
    ]
