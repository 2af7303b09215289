"""What was set up for git in a repository, and whether files may be committed to it."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.analysis.verify import Problem
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GitCheck(Report):
    """A file to be committed, and its problems. pointer: it is a git-lfs pointer, not the file itself."""

    verdict = "fine"

    file: str
    pointer: bool
    problems: tuple[Problem, ...]

    @property
    def fine(self) -> bool:
        return not self.problems
