"""A reason why a checkpoint does not load, the commands that fix it, and its place among others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from ckptool.analysis.fixes import Chain
from ckptool.commands import Advice, Command


class Stage(IntEnum):
    """The turn of a finding's commands: those of an earlier stage write the file that the later ones work on."""

    CONTAINER = 1
    VALUES = 2
    WRAPPERS = 3
    DEVICES = 4
    PLACE = 5
    ENTRIES = 6
    MODEL = 7
    BETTER = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why a checkpoint does not load, or loads as something else than one expects.

    says: the message that people see.  blocks: stock `torch.load` (or the model of `--against`) refuses it here or on
    another machine.  certain: False for the likely meaning of a message that has others.
    fixes: command lines that can be run as they stand, in order; each is ckptool's unless its first word is another
    program.
    commands: the same before the file is known.  inert: they leave out what loading would call.
    """

    code: str
    what: str
    says: str = ""
    blocks: bool = True
    fixes: tuple[str, ...] = ()
    advice: str = ""
    commands: tuple[Command, ...] = field(default=(), repr=False)
    stage: Stage = field(default=Stage.BETTER, repr=False)
    inert: bool = field(default=False, repr=False)
    certain: bool = True

    def filled(self, chain: Chain) -> Finding:
        """The finding with commands for the file as the commands before left it."""
        lines = tuple(str(chain.fill(command)) for command in self.commands)
        advice = self.advice.filled(chain.fill) if isinstance(self.advice, Advice) else self.advice
        return replace(self, fixes=lines, advice=advice)


def in_order(findings: Iterable[Finding], compact: Command | None) -> list[Finding]:
    """The findings in the order in which things are done, no command twice.

    compact: the command that only writes the file anew; it is left out where another writes a new file anyway.
    """
    ordered: list[Finding] = []
    seen: set[tuple[Command, ...]] = set()
    for finding in sorted(findings, key=lambda each: each.stage):
        commands = finding.commands
        written = any(before[-1].writes for before in seen if before)
        if commands == (compact,) and commands not in seen and written:
            ordered.append(replace(finding, advice="The commands above fix this as well.", commands=()))
        elif not commands or commands not in seen:
            ordered.append(finding)
        elif finding.code not in [each.code for each in ordered]:
            ordered.append(replace(finding, advice="The same command fixes it.", commands=()))
        seen.add(commands)
    return ordered
