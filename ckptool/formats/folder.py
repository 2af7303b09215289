"""A folder of the files of ranks: their names, which of them are missing, and the errors for what does not fit."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import islice
from math import isfinite
from typing import Any

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.dtypes import has_numbers
from ckptool.checkpoint.files import Folder, Source
from ckptool.checkpoint.paths import is_url
from ckptool.errors import CkptoolError, Conflict, Corrupt, counted, listed

MOST_NAMED = 1_000  # missing ranks: a number in a file may claim any world size
MAX_NAMES = 20_000  # in a folder, that are looked at beside a file
_COPY = "Copy the whole folder again, or take another checkpoint."


# Names ---------------------------------------------------------------------------------------------------------------


class NamePattern:
    """A pattern of file names. It is compiled when a name has `mark` in it, which most names never have."""

    def __init__(self, mark: str, pattern: str) -> None:
        self.mark, self.pattern = mark, pattern

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def fullmatch(self, name: str) -> re.Match[str] | None:
        return self.compiled.fullmatch(name) if self.mark in name else None


# Of shards, and the index that says which tensor is in which.
NUMBERED = NamePattern("-of-", r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.[A-Za-z]+)")
INDEX = NamePattern(".index.", r".+\.(?:safetensors|bin)\.index(?:\.[A-Za-z0-9_-]+)?\.json")
# Of what each rank saved: DeepSpeed's shares, model and layers; FSDP's; Megatron's folders; Llama's files.
STATES = NamePattern(
    "zero_pp_rank_",
    r"(?P<set>(?:bf16_|fp16_)?zero_pp_rank_)(?P<rank>\d+)_mp_rank_(?P<rest>[\d_]+(?:optim|model)_states)\.pt",
)
MODEL_STATES = NamePattern("_model_states.pt", r"(?P<set>)mp_rank_(?P<rank>\d+)(?P<rest>(?:_\d+)*_model_states)\.pt")
LAYER = NamePattern(
    "model_states.pt", r"layer_(?P<layer>\d+)(?:_expert_(?P<expert>\d+))?(?:-model|_mp_rank)_[\d_-]*model_states\.pt"
)
OF_WORLD = NamePattern(
    "_world_size_", r"(?P<set>.+_world_size_(?P<world>\d{1,6})_rank_)(?P<rank>\d{1,6})(?P<rest>)\.pt"
)
FSDP_RANKS = NamePattern(
    "_rank", r"(?P<set>(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank)(?P<rank>\d{1,6})(?P<rest>)\.bin"
)
PIECES = NamePattern("shard-", r"(?P<set>shard-)(?P<rank>\d{5})-(?P<rest>model-\d{5}-of-\d{5})\.safetensors")
MODEL_PARALLEL = NamePattern("mp_rank_", r"(?P<set>mp_rank_)(?P<rank>\d\d)(?P<rest>(?:_\d\d\d){0,2})")
CONSOLIDATED = NamePattern("consolidated.", r"(?P<set>consolidated\.)(?P<rank>\d\d)(?P<rest>\.(?:pth|pt|safetensors))")


def names_in(folder: str) -> list[str]:
    """The names in a folder, sorted; none where it cannot be read."""
    if is_url(folder):
        try:
            return Folder(folder).names
        except CkptoolError:
            return []
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for _, entry in zip(range(MAX_NAMES), entries, strict=False))
    except OSError:
        return []


def missing_names(names: Iterable[str], pattern: NamePattern, world: int = 0) -> list[str]:
    """The names that are missing in sets of ranks: up to the highest rank, or the size of the world where it is
    known."""
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        if (found := pattern.fullmatch(name)) and "rank" in found.groupdict():
            sets.setdefault((found["set"], found["rest"]), {})[int(found["rank"])] = name
            world = max(world, int(found["rank"]) + 1, int(found.groupdict().get("world") or 0))
    missing: list[str] = []
    for ranks in sets.values():
        example = next(iter(ranks.values()))
        place = pattern.fullmatch(example)
        assert place is not None
        for rank in range(world):
            if len(missing) >= 10 * MOST_NAMED:  # names are made up as easily as numbers in them
                return missing
            if rank not in ranks:
                width = len(place["rank"]) if place["rank"].startswith("0") else 1
                missing.append(f"{example[: place.start('rank')]}{rank:0{width}}{example[place.end('rank') :]}")
    return missing


def refuse_renamed(checkpoint: Checkpoint) -> None:
    """Raises `Conflict` for a file of one rank, layer or expert that was saved under the name of another.

    torch calls the root folder of a zip as the file that it is written to, and nothing else in a share of ZeRO says
    which rank's it is.
    """
    source, root = checkpoint.source, getattr(checkpoint.origin, "root", "").strip("/")
    if not root or not isinstance(source, Source):
        return
    name = os.path.basename(source.path)
    saved = root + os.path.splitext(name)[1]
    for pattern in (STATES, MODEL_STATES, LAYER, OF_WORLD, FSDP_RANKS):
        if name != saved and pattern.fullmatch(name) and pattern.fullmatch(saved):
            raise Conflict(
                f"{source} was saved as {saved}",
                "It has the place of another rank's file, whose values would be lost, or mixed up with these.",
                "Copy all files of the folder again, each under its own name.",
            )


# What does not fit together -------------------------------------------------------------------------------------------


def number_in(value: Any) -> float | None:
    """A finite number that was saved as such, or in a tensor of one element; None for anything else."""
    if isinstance(value, TensorEntry) and value.numel == 1 and has_numbers(value.dtype):
        value = value.numpy().item()
    return value if type(value) is int or (type(value) is float and isfinite(value)) else None


def missing_ranks(there: Collection[int], world: int) -> list[int]:
    """The ranks below `world` that are not there, at most 1,000 of them."""
    return list(islice((rank for rank in range(world) if rank not in there), MOST_NAMED))


def complete(folder: Folder, ranks: Collection[int], world: int, file: str) -> None:
    """Raises `Corrupt` for ranks of this world that have no file, `Conflict` for files of ranks beyond it. file: the
    one that says how many there are."""
    if beyond := [f"rank {rank:,}" for rank in sorted(ranks) if rank >= world]:
        raise Conflict(
            f"{folder} has files of {counted(len(beyond), 'rank')} beyond the {world:,} that saved it: "
            f"{listed(beyond, 3)}",
            f"{file} gives that number. The others are left from a larger world, and may be of another step.",
            "Copy only the files of this checkpoint into another folder, or take another checkpoint.",
        )
    if missing := [f"rank {rank:,}" for rank in missing_ranks(ranks, world)]:
        raise lacks(folder, f"the files of {counted(world - len(ranks), 'rank')} of {world:,}", missing)


def lacks(where: object, what: str, names: Iterable[str] = ()) -> Corrupt:
    """The error for files that are missing. names: theirs."""
    shown = listed(list(names), 3)
    why = "What the ranks saved is only complete together."
    return Corrupt(f"{where} lacks {what}{shown and ': '}{shown}", why, _COPY)


def mixed(where: object, one: str, other: str, what: str) -> Conflict:
    """The error for two files of one folder that are not of one checkpoint."""
    return Conflict(
        f"{where}: {one} and {other} are of two checkpoints: {what}",
        "Files of another step or another run lie in the folder; joined, they would be no model that ever was.",
        "Copy the folder again into an empty one, or take another checkpoint.",
    )


def another_run(where: object, what: str) -> Conflict:
    """The error for what the files of ranks should say alike, and do not."""
    why = "A file was renamed, changed, or is of another step or run."
    return Conflict(f"{where}: {what}", why, "Copy the files of all ranks again, each under its own name.")


def damaged(where: object, what: str) -> Corrupt:
    """The error for a file that is not what its name or its table says."""
    return Corrupt(f"{where}: {what}", "The file was damaged, or another program wrote it.", _COPY)
