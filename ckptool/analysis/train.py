"""Facts about a run: its checkpoints, and those that retention deletes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptool.checkpoint.registry import Report


@dataclass(frozen=True, slots=True, repr=False)
class Page(Report):
    """A text that is printed as it is: a configuration, its schema."""

    text: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Pruned(Report):
    """The checkpoints of a run that were deleted, or would be; `kept`: step -> why it stays."""

    run: str
    deleted: tuple[tuple[int, int], ...]  # step, bytes
    kept: dict[int, tuple[str, ...]]
    dry_run: bool


GOOD = "good"


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run.

    state: `good`, or the code of what is wrong with it, with its sentence in `problem`.  metrics: of the evaluation at
    its step.
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


@dataclass(frozen=True, slots=True, repr=False)
class RunReport(Report):
    """The folder of a run, and its checkpoints.

    metric, mode: the measure of its best.  resumes: the step that it would go on from, or None.

    event, step: the last thing that happened to it, and when.  epochs: its length, where that is said in epochs.
    seconds: that it was trained for, in all its starts.
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
    seconds: float | None = None

    @property
    def damaged(self) -> int:
        """The number of its checkpoints that are not whole."""
        return sum(1 for one in self.checkpoints if one.state != GOOD)

    def exit(self) -> int:
        """1 where one is damaged."""
        return int(bool(self.damaged))


@dataclass(frozen=True, slots=True, repr=False)
class Outcome(Report):
    """How a run ended. status: `done`, `stopped`, or by `stop.patience` `stopped-early`, which `why` explains.

    exit_code: 0, or 128 plus the signal that stopped it.  profile: the profiler's table, where one was written.
    """

    verdict = "status"

    status: str
    step: int
    exit_code: int
    path: str
    why: str = ""
    profile: str = ""

    def exit(self) -> int:
        return self.exit_code


@dataclass(frozen=True, slots=True, repr=False)
class Evaluated(Report):
    """The metrics of a checkpoint of a run.

    chosen: why it is this one, "" where its step was named.  on: `val` or `test` data.

    ema: of the average of its weights.
    """

    run: str
    step: int
    chosen: str
    on: str
    ema: bool
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, repr=False)
class Rehearsal(Report):
    """What a rehearsal of a run showed; bytes and seconds.

    activations: kept for the backward pass of one step.  without: the same without activation checkpointing, None where
    it is off.
    """

    parameters: dict[str, int]
    train_samples: int
    val_samples: int
    steps: int
    loss: float
    step_seconds: float
    save_seconds: float
    checkpoint_bytes: int
    activations: int
    without: int | None
    device: str


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill: the last step before it, the signal and its place, and the step resumed from (None: the beginning)."""

    at: int
    signal: str
    resumed: int | None


@dataclass(slots=True, repr=False)
class Proof(Report):
    """Digests, kills and ablations of a run that was to be proved.

    processes: how many trained together.  without: part of the state -> whether the end differed without it (None: the
    run has none).
    events: how many file-system events were swept, None where that was not asked for.  lost: True where a run went on
    from before a checkpoint that it had.  differs: the first step and tensor that differ, where it was disproved.
    kept: where the runs are then.
    """

    verdict = "proved"

    steps: int
    processes: int = 1
    reference: str = ""
    kills: list[Kill] = field(default_factory=list)
    result: str = ""
    events: int | None = None
    lost: bool = False
    without: dict[str, bool | None] = field(default_factory=dict)
    differs: str = ""
    kept: str = ""

    @property
    def proved(self) -> bool:
        return self.result == self.reference and not self.lost and False not in self.without.values()
