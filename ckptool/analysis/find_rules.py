"""The rules that were found between two checkpoints, and the proof: what of the second one they make of the first."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.checkpoint import Note
from ckptool.checkpoint.registry import Report


@dataclass(frozen=True, slots=True)
class FoundRule:
    """A rule and what it makes. tensors: how many.  by_value: those with the bytes of the other checkpoint's.

    alike: those among them whose bytes other tensors have as well, so that names or their order tell which is which.
    """

    text: str
    tensors: int
    by_value: int
    alike: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FoundRules(Report):
    """Rules that make the tensors of `new` of those of `old`, as applying them has shown.

    total: tensors of the new one.  by_value: those that are made with the same bytes.  by_name: names of those that are
    made with the same type and shape, and other values; reordered: of those, the same values in another order;
    unrelated: values that no fine-tuning explains.  missing: those that are not made.  dropped: keys of the old one
    that become nothing; drop: patterns for them.  output: the file of rules.
    """

    verdict = "complete"

    old: str
    new: str
    rules: tuple[FoundRule, ...]
    total: int
    by_value: int
    by_name: tuple[str, ...]
    reordered: tuple[str, ...]
    unrelated: tuple[str, ...]
    missing: tuple[str, ...]
    dropped: tuple[str, ...]
    drop: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    output: str = ""
    dry_run: bool = False

    @property
    def complete(self) -> bool:
        """True if every tensor of the new checkpoint is made, with its values or those that it was fine-tuned from."""
        return not (self.missing or self.reordered or self.unrelated)
