"""One reason why a checkpoint does not load, with the commands that fix it."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.checkpoint.commands import Command


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a checkpoint does not load, or loads as something else than one expects.

    says: the message that people see.  blocks: stock `torch.load` (or the model of `--against`) refuses it here or on another machine.
    fixes: command lines that can be run as they stand, in order; each is ckptool's unless its first word is another program.
    """

    code: str
    what: str
    says: str = ""
    blocks: bool = True
    fixes: tuple[str, ...] = ()
    advice: str = ""


Found = tuple[Finding, tuple[Command, ...]]
