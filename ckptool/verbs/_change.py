"""The common parts of the verbs that change a file, or what is at an address in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckptool.analysis.save import SaveResult, Written
from ckptool.checkpoint import Checkpoint, Storage
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.tree import address, holders, replaced_at, storages, stored_parts, walk
from ckptool.errors import Conflict, UsageError
from ckptool.formats.model_folder import ModelFolder
from ckptool.formats.opening import CheckpointLike, Opened, PathLike, open_to_change
from ckptool.verbs._save import ChangeOptions, Output, output_of, save, written


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that is being changed. `part`: what the verb acts on.  named: it was named by an address.

    outside: the tree around it, with nothing in its place.  kept: the storages in there, which stay as they are.
    """

    output: Output
    original: Checkpoint
    part: Checkpoint
    named: bool
    outside: Any
    kept: tuple[Storage, ...]
    extract: bool

    def save(self, changed: Checkpoint, *, changes: bool = True, beside: ModelFolder | None = None) -> SaveResult:
        """Writes the file with the changed part in its place, or that part alone.

        beside: the files that go into a folder of weights, if not those beside the original.

        Raises `Conflict` where a tensor of the part would lose its tie to one outside of it, and what saving raises.
        """
        if self.extract:
            return save(self.output, self.original, replace(changed, base=()), beside=beside)
        return save(self.output, self.original, self._whole(changed), changes=changes, beside=beside)

    def written(self, saved: SaveResult, summary: str, **more: Any) -> Written | Any:
        """The report, with the facts, details and notes of the verb; in memory, what was made."""
        return written(self.output, self.original, saved, summary, **more)

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
                    f"{name} shares its storage with {other}, which is not in {address(self.part.base)}",
                    "Both would change, or no longer be tied. Nothing was written.",
                    "Change the whole file, without the address; or write the part alone: --extract",
                )

    def _place_outside(self, tied: list[Storage]) -> str:
        numbers = {id(storage) for storage in tied}
        places = (
            path for path, node in walk(self.outside) for part in stored_parts(node) if id(part.storage) in numbers
        )
        return address(next(places, ()))


def begin_change(
    verb: str,
    file: CheckpointLike,
    out: PathLike | None,
    at: str | None,
    options: ChangeOptions,
    opening: Callable[[CheckpointLike, str | None], Opened] = open_to_change,
) -> FileChange:
    """Opens what a verb is to change. Raises `UsageError` where nothing is at the address or cannot be put back."""
    given: dict[str, Any] = {**options}
    extract = bool(given.pop("extract", False))
    output = output_of(verb, out, given, file)  # type: ignore[arg-type]
    opened = opening(file, at)
    part = opened.taken
    if extract:
        _refuse_extract(output, opened)
    outside: Any = None
    if part.base and not extract:
        _refuse_loop(opened.checkpoint.tree, part)
        outside = replaced_at(opened.checkpoint.tree, part.base, None)
    return FileChange(
        output, opened.checkpoint, part, opened.at is not None, outside, tuple(storages(outside)), extract
    )


def _refuse_extract(output: Output, opened: Opened) -> None:
    if opened.at is None:
        raise UsageError(
            f"{output.verb} --extract was given no address",
            "Without --extract the whole file is written.",
            f"Name it: ckptool {output.verb} FILE#ADDRESS --extract -o OUT",
        )
    if output.in_place:
        raise UsageError(
            f"{output.verb} was given both --extract and --in-place",
            "The file itself would lose everything but the part.",
            "Write the part to a new file: -o OUT",
        )


def _refuse_loop(tree: Any, part: Checkpoint) -> None:
    """Raises `UsageError` for a part that holds what it is in: putting a copy back would change the rest."""
    around = {id(holder) for holder in holders(tree, part.base)}
    if any(id(node) in around for node in visit(part.tree)):
        raise UsageError(
            f"{address(part.base)} contains itself",
            "It cannot be changed on its own.",
            "Change the whole file, without the address.",
        )
