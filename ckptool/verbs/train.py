"""`train`: a run from its configuration to its end; and a rehearsal of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint.commands import several
from ckptool.verbs._training import PathLike, Say, check_harness, configuration

if TYPE_CHECKING:
    from ckptool.reports.train import Outcome, Rehearsal
    from ckptool.training.config import Config


def train(
    config: PathLike | dict[str, Any] | Config,
    set: str | Sequence[str] = (),
    *,
    resume: str = "never",
    progress: Any = None,
    say: Say | None = None,
) -> Outcome:
    """Trains the run that a configuration describes, saving on the way; `set` are `KEY=VALUE` changes.

    resume: `never` refuses an existing run, `auto` starts or goes on, `must` only goes on.  progress: called with each
    logged line.  Raises `UsageError` naming the lines that are wrong, `Conflict` for an existing run or a changed fixed
    key, `NoneValid` where all checkpoints are damaged.
    """
    set = several(set)
    made = configuration(config, set)
    from ckptool.training.start import start

    return start(made, resume=resume, asked=[change.partition("=")[0] for change in set], progress=progress, say=say)


def dry_run(config: PathLike | dict[str, Any] | Config, set: str | Sequence[str] = ()) -> Rehearsal:
    """Builds everything, runs one step, saves, reloads, compares, and leaves nothing behind."""
    set = several(set)
    made = configuration(config, set)
    from ckptool.training.start import rehearse

    return rehearse(made)


def example() -> str:
    """A configuration with every key explained, for `ckptool train --init`."""
    check_harness()
    from ckptool.training.example import example as page

    return page()


def schema() -> str:
    """The JSON Schema of a configuration, for editors."""
    check_harness()
    from ckptool.training.example import schema_text

    return schema_text()
