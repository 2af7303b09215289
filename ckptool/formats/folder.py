"""A folder of files that are joined into one checkpoint: how each is opened, and the errors for what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, TensorEntry
from ckptool.checkpoint.files import Folder
from ckptool.checkpoint.numeric import has_numbers
from ckptool.errors import Conflict, Corrupt, listed
from ckptool.formats.parts import refuse_renamed
from ckptool.formats.pieces import Joiner
from ckptool.pickles.calls import UNKNOWN, uses

MOST_NAMED = 1_000  # missing files: a number in a file may claim any world size
_COPY = "Copy the whole folder again, or take another checkpoint."


@dataclass(slots=True, eq=False)
class RankFolder:
    """The state of joining a folder. discarded: what is not inert in its files."""

    folder: Folder
    notes: list[Note] = field(default_factory=list)
    discarded: list[Any] = field(default_factory=list)
    joiner: Joiner = field(init=False)

    def __post_init__(self) -> None:
        self.joiner = Joiner(str(self.folder))

    def open(self, name: str, folder: Folder | None = None) -> Any:
        """The tree of a file in the folder, or in one below it. Raises `Conflict` for another rank's file by this name,
        and whatever opening it raises."""
        from ckptool.formats import read_alone

        checkpoint = read_alone((folder or self.folder).open(name))
        refuse_renamed(checkpoint)
        self.discarded += checkpoint.discarded
        if any(use.verdict == UNKNOWN for use in uses(checkpoint.tree)):
            self.discarded.append(checkpoint.tree)
        return checkpoint.tree

    def checkpoint(self, container: str, tree: Any, engine: str, ranks: int, step: Any = None) -> Checkpoint:
        """The joined checkpoint, which `engine` wrote on so many ranks at this step, where that is a number."""
        facts = {"engine": engine, "ranks": ranks} | ({"step": step} if type(step) is int else {})
        notes = (*self.notes, *self.joiner.notes())
        return Checkpoint(tree, container, facts, self.folder, notes=notes, discarded=tuple(self.discarded))


def number_in(value: Any) -> float | None:
    """A finite number that was saved as such, or in a tensor of one element; None for anything else."""
    if isinstance(value, TensorEntry) and value.numel == 1 and has_numbers(value.dtype):
        value = value.numpy().item()
    return value if type(value) is int or (type(value) is float and isfinite(value)) else None


def refuse_other_steps(where: object, steps: Mapping[str, Sequence[float]]) -> None:
    """Raises `Conflict` where a file has, of all its parameters, another step than the latest in the other files.

    steps: by file, those of the parameters that it has. One alone may be of a parameter that was frozen for a while.
    """
    latest = max((max(each) for each in steps.values()), default=0)
    other = next((name for name, each in steps.items() if max(each) == latest), "")
    for name, each in steps.items():
        if len(each) > 1 and max(each) == min(each) < latest:
            raise mixed(where, other, name, f"one has the optimizer's step {latest:g}, the other {each[0]:g}")


def missing_ranks(there: Collection[int], world: int) -> list[int]:
    """The ranks below `world` that are not there, at most 1,000 of them."""
    return list(islice((rank for rank in range(world) if rank not in there), MOST_NAMED))


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


def damaged(where: object, what: str) -> Corrupt:
    """The error for a file that is not what its name or its table says."""
    return Corrupt(f"{where}: {what}", "The file was damaged, or another program wrote it.", _COPY)
