"""The frame of every verb that changes a file: it acts on the whole of it or at an address, and writes the whole.

The part at an address is a checkpoint of its own, which the verb changes as it would a file; it is then put back. Nothing outside of it
changes: what its tensors share with the rest is no longer the part's alone to change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Storage
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.tree import address, holders, replaced_at, storages, stored_parts, walk
from ckptool.errors import Conflict, UsageError, printable
from ckptool.formats.opening import Opened, PathLike, open_to_change
from ckptool.reports.written import Saved
from ckptool.verbs.saving import SaveOptions, check_options, save


class ChangeOptions(SaveOptions, total=False):
    """extract: write the part at the address alone, changed, in place of the whole file."""

    extract: bool


@dataclass(frozen=True, slots=True)
class Change:
    """A file that is being changed. `part`: what the verb acts on.  named: it was named by an address.

    outside: the tree around it, with nothing in its place.  kept: the storages in there, which stay as they are.
    """

    verb: str
    original: Checkpoint
    part: Checkpoint
    named: bool
    outside: Any
    kept: tuple[Storage, ...]
    options: SaveOptions
    extract: bool

    def save(self, changed: Checkpoint, out: PathLike | None, *, changes: bool = True) -> Saved:
        """Writes the file with the changed part in its place, or that part alone.

        Raises `Conflict` where a tensor of the part would no longer be tied to one outside of it, and what saving raises.
        """
        if self.extract:
            return save(self.verb, self.original, replace(changed, base=()), out, self.options)
        return save(self.verb, self.original, self._whole(changed), out, self.options, changes=changes)

    def _whole(self, changed: Checkpoint) -> Checkpoint:
        base = self.part.base
        if not base:
            return changed
        self._refuse_untied(changed.tree)
        return replace(self.original, tree=replaced_at(self.original.tree, base, changed.tree))

    def _refuse_untied(self, changed: Any) -> None:
        kept = {id(storage) for storage in self.kept}
        if not any(id(storage) in kept for storage in storages(self.part.tree)):
            return
        after = {path: [id(part.storage) for part in stored_parts(node)] for path, node in walk(changed)}
        for path, node in walk(self.part.tree):
            tied = [part.storage for part in stored_parts(node) if id(part.storage) in kept]
            if tied and any(id(storage) not in after[path] for storage in tied if after.get(path)):
                name, other = address((*self.part.base, *path)), self._place_outside(tied)
                raise Conflict(
                    f"{printable(name)} shares its storage with {printable(other)}, which is not in "
                    f"{printable(address(self.part.base))}",
                    "Both would change, or no longer be tied. Nothing was written.",
                    "Change the whole file, without the address; or write the part alone: --extract",
                )

    def _place_outside(self, tied: list[Storage]) -> str:
        numbers = {id(storage) for storage in tied}
        places = (
            path for path, node in walk(self.outside) for part in stored_parts(node) if id(part.storage) in numbers
        )
        return address(next(places, ()))


def begin_change(verb: str, file: PathLike, at: str | None, options: ChangeOptions) -> Change:
    """Opens what a verb is to change. Raises `UsageError` where nothing is at the address, or what is there cannot be put back."""
    given: dict[str, Any] = {**options}
    extract = bool(given.pop("extract", False))
    own: SaveOptions = given  # type: ignore[assignment]
    check_options(verb, own)
    opened = open_to_change(file, at)
    part = opened.taken
    _refuse_extract(verb, opened, extract, own)
    outside: Any = None
    if part.base and not extract:
        _refuse_loop(opened.checkpoint.tree, part)
        outside = replaced_at(opened.checkpoint.tree, part.base, None)
    kept = tuple(storages(outside))
    return Change(verb, opened.checkpoint, part, opened.at is not None, outside, kept, own, extract)


def _refuse_extract(verb: str, opened: Opened, extract: bool, options: SaveOptions) -> None:
    if extract and opened.at is None:
        raise UsageError(
            f"{verb} was to write a part alone, and no part was named",
            "The whole file is written without --extract.",
            f"Name it: ckptool {verb} FILE#ADDRESS --extract -o OUT",
        )
    if extract and options.get("in_place", False):
        raise UsageError(
            f"{verb} was given both --extract and --in-place",
            "The file itself would lose everything but the part.",
            "Write the part to a new file: -o OUT",
        )


def _refuse_loop(tree: Any, part: Checkpoint) -> None:
    """Raises `UsageError` for a part that holds what it is in: no copy of it could be put back without changing the rest."""
    around = {id(holder) for holder in holders(tree, part.base)}
    if any(id(node) in around for node in visit(part.tree)):
        raise UsageError(
            f"{printable(address(part.base))} holds what it is itself a part of",
            "It cannot be changed without the rest.",
            "Change the whole file, without the address.",
        )
