"""Everything that the page of `report` shows about checkpoints, as facts: the page only draws them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptool.checkpoint.registry import Report, provide

if TYPE_CHECKING:
    from ckptool.analysis.diff import Diff
    from ckptool.analysis.findings import Diagnosis
    from ckptool.analysis.inspect import Inspection
    from ckptool.analysis.plot import RunHistory
    from ckptool.analysis.train import RunReport
    from ckptool.checkpoint import Note

BINS = 24  # of a histogram


@dataclass(frozen=True, slots=True)
class TensorPicture:
    """The values of a tensor as a histogram and as a thumbnail, from the pass over them that makes the statistics.

    counts: values in each of BINS equal bins between the least and the greatest finite value.  counted: of how
    many values, evenly taken; fewer than there are where it is large.  quantiles: of those, at 5, 25, 50, 75, 95 %.
    means: rows of means of blocks, of the tensor as a matrix (its first dimension by the others); None where a block
    has no finite value; empty where no thumbnail was made.
    """

    counts: tuple[int, ...]
    counted: int
    quantiles: tuple[float, ...]
    means: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """Tensors whose values are conspicuous. kind: `nan`, `inf`, `all-zero`, `constant`, `dead-rows`, `norm`.

    rule: the condition with its threshold, as a person reads it.  details: what was found, for each address.
    """

    kind: str
    rule: str
    details: dict[str, str]


@dataclass(frozen=True, slots=True)
class Health:
    """What the values show, judged by rules that are all named.

    rules: of every check, also of those that found nothing.
    read: tensors whose values were read, of `tensors`; why the others were not, by address, in `skipped`.
    """

    tensors: int
    read: int
    skipped: dict[str, str]
    rules: tuple[str, ...]
    findings: tuple[HealthFinding, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FileReport:
    """One checkpoint: what `inspect --stats` and `doctor` say of it, and its values in pictures, by address.

    inspection: None for a file that could not be opened; then the diagnosis says why, and everything else is empty.
    """

    inspection: Inspection | None
    diagnosis: Diagnosis
    pictures: dict[str, TensorPicture]
    health: Health


@dataclass(frozen=True, slots=True)
class Distances:
    """How far several checkpoints are apart, each pair by the tensors that both have in one shape.

    names: of the files.  equal: share of those tensors with the same bytes.  cosine: of all their values as one vector,
    None where nothing can be compared.  shared: how many tensors each pair has in common.
    skipped: tensors that cannot be compared, and why. A value that is not finite counts as 0.
    """

    names: tuple[str, ...]
    shared: tuple[tuple[int, ...], ...]
    equal: tuple[tuple[float | None, ...], ...]
    cosine: tuple[tuple[float | None, ...], ...]
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class NormsOverTime:
    """The norm of each layer of a run's weights at each of its checkpoints that could be read, and its movement.

    steps: of the checkpoints.  norms: layer -> its norm at each step.  moved: layer -> the norm of its change since the
    checkpoint before, as a share of its norm there; one fewer.  unread: step -> why a checkpoint was left out.
    """

    steps: tuple[int, ...]
    norms: dict[str, tuple[float, ...]]
    moved: dict[str, tuple[float, ...]]
    unread: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckpointReport(Report):
    """A page about one checkpoint or several. diff: of the first two.  fit: against the model that was named.

    run: the run's checkpoints; history: its curves and events; norms: its layers over time.
    out: where the page was written, with its size in bytes; empty where it was not.
    notes: on the page as a file.
    """

    files: tuple[FileReport, ...]
    diff: Diff | None = None
    fit: Diagnosis | None = None
    run: RunReport | None = None
    history: RunHistory | None = None
    norms: NormsOverTime | None = None
    distances: Distances | None = None
    out: str = ""
    bytes: int = 0
    notes: tuple[Note, ...] = ()

    @property
    def problems(self) -> int:
        """What keeps a checkpoint from loading, and what is conspicuous in the values, of all files."""
        diagnoses = [*(file.diagnosis for file in self.files), *([self.fit] if self.fit is not None else [])]
        blocking = sum(finding.blocks for diagnosis in diagnoses for finding in diagnosis.findings)
        return blocking + sum(len(file.health.findings) for file in self.files)

    def html(self) -> str:
        """The page: one file without requests. Raises `MissingExtra` where jinja2 is not installed."""
        page: str = provide("page", self)
        return page
