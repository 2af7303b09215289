"""Facts about a run: its checkpoints, and those that retention deletes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted of a run, or would be; `kept`: step -> why it stays."""

    run: str
    deleted: tuple[tuple[int, int], ...]  # step, bytes
    kept: dict[int, tuple[str, ...]]
    dry_run: bool


GOOD = "good"


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint of a run.

    state: `good`, or the code of what is wrong with it, with its sentence in `problem`.  metrics: of the evaluation at its step.
    kept: the rules of retention that want it; `damaged` ones stay, and are for a person to look at.
    """

    step: int
    path: str
    state: str
    problem: str
    epoch: int | None
    loss: float | None
    metrics: dict[str, float]
    bytes: int
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run. metric, mode: what its best is measured by.  resumes: the step that it would go on from, None where there is none.

    event, step: the last thing that happened to it, and when.  epochs: its length, where that is said in epochs.
    """

    path: str
    id: str
    metric: str
    mode: str
    event: str
    step: int | None
    resumes: int | None
    checkpoints: tuple[RunCheckpoint, ...]
    epochs: int | None = None

    @property
    def damaged(self) -> int:
        """How many of its checkpoints are not whole."""
        return sum(1 for one in self.checkpoints if one.state != GOOD)
