"""`prove`: that a run killed anywhere ends with the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint.commands import several
from ckptool.verbs._training import PathLike, Say, configuration

if TYPE_CHECKING:
    from ckptool.reports.train import Proof
    from ckptool.training.config import Config


def prove(
    config: PathLike | dict[str, Any] | Config,
    set: str | Sequence[str] = (),
    *,
    steps: int = 300,
    kills: int = 5,
    seed: int = 0,
    exhaustive: bool = False,
    processes: int | None = None,
    say: Say | None = None,
) -> Proof:
    """Proves that a run of this configuration which is killed anywhere ends with the same bytes as one that is not.

    steps, kills: how long the run is, and how often it is killed.  seed: where.  exhaustive: kill a short run at every
    file-system event, too.  processes: how many train together under ddp, 2 by default.  Raises `RunFailed` where a
    training process fails by itself.
    """
    set = several(set)
    made = configuration(config, set)
    from ckptool.training.prove.proof import prove as proved

    told = say or (lambda text: None)
    return proved(made, steps=steps, kills=kills, seed=seed, exhaustive=exhaustive, processes=processes, say=told)
