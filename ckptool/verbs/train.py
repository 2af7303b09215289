"""`train`: a run from its configuration to its end; and a rehearsal of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from ckptool.commands import argument, option, several, verb
from ckptool.errors import UsageError
from ckptool.facts import Page
from ckptool.formats import PathLike
from ckptool.training import check_harness
from ckptool.training.reports import Outcome, Rehearsal
from ckptool.verbs._options import Lines, Logged, Set

Configuration = PathLike | Mapping[str, Any]
Resume = Literal["never", "auto", "must"]


def _words(
    config: str | None = None,
    set: Sequence[str] = (),
    dry_run: Annotated[bool, option("-n --dry-run", "Run one step, save, reload, compare; leave no trace.")] = False,
    init: Annotated[bool, option("--init", "Print every key; with a folder, write run.yaml and model.py.")] = False,
    schema: Annotated[bool, option("--schema", "Print the JSON Schema of a configuration.")] = False,
) -> dict[str, Any] | Page | Rehearsal:
    check_harness()
    if init or schema:
        from ckptool.training.configfile import begun, example, schema_text

        return Page(schema_text() if schema else begun(config) if config else example())
    if config is None:
        raise UsageError("train was given no configuration", "", "Create one: ckptool train --init DIR")
    if not dry_run:
        return {}
    from ckptool.training.configfile import read
    from ckptool.training.trainer import rehearse

    return rehearse(read(config, set))


@verb(
    ("ckptool train --init first", "a run.yaml, every key explained, and a model.py"),
    ("ckptool train run.yaml -n", "a rehearsal of one step"),
    ("ckptool train run.yaml --set optim.main.lr=3e-4", "override a value"),
    from_words=_words,
)
def train(
    config: Annotated[Configuration, argument("run.yaml", "The configuration of the run.", optional=True)],
    set: Set = (),
    *,
    resume: Annotated[Resume, option("--resume", "auto: start or resume the run; must: only resume it.")] = "never",
    progress: Logged = None,
    say: Lines = None,
) -> Outcome:
    """Trains the run that a configuration describes, saving on the way; `set` are `KEY=VALUE` changes.

    progress: called with each logged line.  Raises `UsageError` naming the lines that are wrong, `Conflict` for an
    existing run or a changed fixed key, `NoneValid` where all checkpoints are damaged.
    """
    check_harness()
    from ckptool.training.configfile import read
    from ckptool.training.trainer import start

    set = several(set)
    return start(read(config, set), resume=resume, assignments=set, progress=progress, say=say)
