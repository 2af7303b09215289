"""The proof that a command which is killed and started again ends with the same checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptool.checkpoint.registry import Report

# What is seen of the file system: all calls, by a preloaded library, or that files appear, grow and go.
PRELOAD, POLLING = "preload", "polling"
ANY = "any moment"  # the place of a kill that waits for no event


@dataclass(frozen=True, slots=True)
class CommandKill:
    """A kill. step: how many optimizer steps were done (None: not known).  place: `ANY`, or a kind of event.

    resumed: the step that the restart went on from; None where that is not known.
    """

    step: int | None
    place: str
    resumed: int | None


@dataclass(slots=True, repr=False)
class CommandProof(Report):
    """Kills, events, findings and causes of a script that was to be proved.

    watched: one of the constants.  steps: of the unbroken run; 0 where no optimizer was seen.

    events: kind of event -> how many the unbroken run had.  compared: the checkpoints that its folder held at the end.
    unstable: what differed between two unbroken runs; then nothing was killed.  findings: what is wrong.  differs: the
    first step and tensor.  causes: what is probably not saved, with the evidence.  remarks: what was not judged.
    kept: where the runs are, if it was not proved.
    """

    verdict = "proved"

    command: tuple[str, ...]
    watched: str
    steps: int = 0
    seconds: float = 0.0
    events: dict[str, int] = field(default_factory=dict)
    compared: tuple[str, ...] = ()
    kills: list[CommandKill] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    differs: str = ""
    causes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    kept: str = ""

    @property
    def proved(self) -> bool:
        return bool(self.kills) and not (self.unstable or self.findings or self.differs)

    def exit(self) -> int:
        """0: proved.  1: disproved.  2: it could not be tried."""
        return 0 if self.proved else 1 if self.findings or self.differs else 2
