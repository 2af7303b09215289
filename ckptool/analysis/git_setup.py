"""What was set up for git in a repository."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.checkpoint import Note
from ckptool.checkpoint.registry import Report


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GitSetup(Report):
    """Changes to git's configuration and to a file of attributes.

    commands: those that change the configuration, as argv.  attributes: the file.  patterns: that were put in it,
    or taken out of it.  removed: this was the way back.  dry_run: nothing was changed.
    """

    commands: tuple[tuple[str, ...], ...]
    attributes: str
    patterns: tuple[str, ...]
    removed: bool
    dry_run: bool
    notes: tuple[Note, ...] = ()
