"""File names in the commands that reports print: each command works on what the one before it wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from ckptool.checkpoint import Note
from ckptool.checkpoint.paths import absolute, is_url, parted
from ckptool.commands import VERBS, Command, Slot, Use, Words, as_argument
from ckptool.formats import NOT_WRITTEN


class Fix(NamedTuple):
    """A command that writes, and works on what the one before it wrote.

    command: its slots not filled in.  at: the address of the part that it is about.  line: it, as a shell runs it.
    out: the name that its output has there.
    """

    command: Command
    at: str
    line: Command
    out: str


class Chain:
    """Fills in `FILE` and `OUT` so that each command works on the output of the one before, under a free name.

    steps: the commands that were filled in and write, for who does them without a shell.
    """

    def __init__(self, file: str, at: str = "") -> None:
        """at: the part of the file that the commands are about, for as long as what they write is the whole of it."""
        self.original = self.current = as_argument(file)
        self.at = at
        self.steps: list[Fix] = []
        self._taken: set[str] = set()
        self._suffix: str | None = None  # of what was written last, where that is another than the input's

    def fill(self, command: Command) -> Command:
        """The command for the file as the commands before left it; that for what is in memory stays as it is."""
        words, output, place = list[str](), "", ""
        for word in command:
            if isinstance(word, Slot) and word.startswith("OUT"):
                word = output = self._free(word[3:] or None)
            elif isinstance(word, Slot) and word.startswith("FILE"):
                place = "/".join(part for part in (self.at, word.partition("#")[2]) if part)
                word = f"{self.current}#{place}" if place else self.current
            words.append(word)
        line = Command(words) if self.original else command
        if output:
            self.steps.append(Fix(command, place, line, output))
            self.current = output
            self.at = self.at if command[1] in VERBS and VERBS[command[1]].address is Use.CHANGES else ""
        return line

    def aside(self, command: Command) -> Command:
        """The command filled in for who chooses it; those that follow go on without it."""
        other = copy(self)
        other.steps = []
        return other.fill(command)

    def _free(self, suffix: str | None) -> str:
        self._suffix = suffix or self._suffix
        stem, own = parted(_beside(self.original or "checkpoint"))
        own = ".pt" if own in NOT_WRITTEN else own
        own = "" if own.endswith(".index.json") else own  # what is written for an index is a folder
        own = own if self._suffix is None else self._suffix
        names = (f"{stem}.fixed{number if number > 1 else ''}{own}" for number in count(1))
        name = next(each for each in names if each not in self._taken and not os.path.lexists(each))
        self._taken.add(name)
        return name


def runnable(notes: Iterable[Note], path: str) -> tuple[Note, ...]:
    """The notes with commands that can be run one after the other: on this file, to names beside it that are not taken.

    A command that is there twice is left out the second time, as is a fix that is no command.
    """
    notes = list(notes)
    chain, seen, filled = Chain(path), set[Words](), list[Note]()
    # Verbs that write refuse such a file; doctor says what to do first.
    refused = any(note.code == "unsafe-global" for note in notes)
    for note in notes:
        fix = note.fix
        wanted = isinstance(fix, Command) and not (refused and fix.writes) and fix not in seen
        filled.append(replace(note, fix=chain.fill(fix) if isinstance(fix, Command) and wanted else ()))
        seen.add(fix)
    return tuple(filled)


def _beside(path: str) -> str:
    """The path with which a new name beside the file or folder begins, also for `runs/` and `.`; of a URL, here."""
    name = os.path.basename(path)
    if is_url(path):
        return os.path.basename(path.rstrip("/"))
    path = path if name not in ("", ".", "..") else os.path.normpath(path)
    if os.path.basename(path) in (".", ".."):
        return os.path.normpath(os.path.join(path, "..", os.path.basename(absolute(path))))
    return path
