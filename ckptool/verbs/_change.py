"""A file that is changed, or what is at an address in it: open, work, save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Storage
from ckptool.checkpoint.graph import visit
from ckptool.checkpoint.tree import address, holders, replaced_at, storages, stored_parts, walk
from ckptool.commands import FILE, OUT, arg, command
from ckptool.errors import Conflict, UsageError
from ckptool.formats.model_folder import ModelFolder
from ckptool.formats.opening import CheckpointLike, Opened, PathLike, open_to_change
from ckptool.verbs._options import Extract
from ckptool.verbs._save import Change, Save, change_of
from ckptool.verbs._save import Unpack as Unpack
from ckptool.verbs._written import Row as Row
from ckptool.verbs._written import Written as Written


class SavePart(Save, total=False):
    extract: Extract


SavePart.__doc__ = Save.__doc__


@dataclass(frozen=True, slots=True)
class FileChange(Change):
    """A file that is being changed. `part`: what the verb acts on.  named: it was named by an address.

    outside: the tree around it, with nothing in its place.  extract: the part is written alone.
    """

    original: Checkpoint
    part: Checkpoint
    named: bool
    outside: Any
    extract: bool

    @property
    def kept(self) -> tuple[Storage, ...]:
        """The storages outside, which stay as they are."""
        return tuple(storages(self.outside))

    def save(self, changed: Checkpoint, *, changes: bool = True, beside: ModelFolder | None = None) -> Written:
        """Writes the file with the changed part in its place, or that part alone.

        beside: the files that go into a folder of weights, if not those beside the original.
        Raises `Conflict` where a tensor of the part would lose its tie to one outside of it, and what writing raises.
        """
        base = self.part.base
        if self.extract:
            changes, changed = True, replace(changed, base=())
        elif base:
            self._refuse_untied(changed.tree)
            changed = replace(self.original, tree=replaced_at(self.original.tree, base, changed.tree))
        return self.write(self.original, changed, changes=changes, beside=beside)

    def _refuse_untied(self, changed: Any) -> None:
        kept = set(map(id, self.kept))
        if not any(id(storage) in kept for storage in storages(self.part.tree)):
            return
        after = {path: [id(part.storage) for part in stored_parts(node)] for path, node in walk(changed)}
        for path, node in walk(self.part.tree):
            tied = {id(part.storage) for part in stored_parts(node)} & kept
            if tied and not tied.issubset(after.get(path) or tied):
                views = ((place, part) for place, other in walk(self.outside) for part in stored_parts(other))
                other = address(next((place for place, part in views if id(part.storage) in tied), ()))
                name = address((*self.part.base, *path))
                raise Conflict(
                    f"{name} shares its storage with {other}, which is not in {address(self.part.base)}",
                    "Both would change, or no longer be tied. Nothing was written.",
                    f"Change the whole file, without the address; or write the part alone: {arg(extract=True)}",
                )


def begin_change(
    verb: str,
    file: CheckpointLike,
    out: PathLike | None,
    at: str | None,
    options: SavePart,
    opening: Callable[[CheckpointLike, str | None], Opened] = open_to_change,
) -> FileChange:
    """Opens what a verb is to change. Raises `UsageError` where nothing is at the address or cannot be put back."""
    given: Any = {**options}
    extract = bool(given.pop("extract", False))
    change = change_of(verb, out, given, file)
    opened = opening(file, at)
    whole, part = opened.checkpoint, opened.taken
    if extract and opened.at is None:
        raise UsageError(
            f"{verb} {arg(extract=True)} was given no address",
            f"Without {arg(extract=True)} the whole file is written.",
            f"Name it: {command(verb, FILE / 'ADDRESS', extract=True, out=OUT)}",
        )
    if extract and change.asked["in_place"]:
        raise UsageError(
            f"{verb} was given both {arg(extract=True)} and {arg(in_place=True)}",
            "The file itself would lose everything but the part.",
            f"Write the part to a new file: {arg(out=OUT)}",
        )
    outside: Any = None
    if part.base and not extract:
        around = {id(holder) for holder in holders(whole.tree, part.base)}
        if any(id(node) in around for node in visit(part.tree)):  # a copy put back would change the rest
            raise UsageError(
                f"{address(part.base)} contains itself",
                "It cannot be changed on its own.",
                "Change the whole file, without the address.",
            )
        outside = replaced_at(whole.tree, part.base, None)
    own: Any = {each.name: getattr(change, each.name) for each in fields(change)}
    return FileChange(**own, original=whole, part=part, named=opened.at is not None, outside=outside, extract=extract)
