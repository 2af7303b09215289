"""`plot`: the numbers that a run logged, over its steps. Needs no torch."""

from __future__ import annotations

from typing import Annotated

from ckptool.commands import repeated, several, verb
from ckptool.formats import refuse_address
from ckptool.training.reports import RunHistory, history_of
from ckptool.training.run_folder import folder_of
from ckptool.verbs._options import RunFolder, Texts


@verb(("ckptool plot runs/basic", "its curves"), ("ckptool plot runs/basic --only 'val_*'", "some of them"))
def plot(
    run: RunFolder,
    *,
    only: Annotated[Texts, repeated("--only NAME", "Draw only this curve, or those that match a pattern.")] = (),
) -> RunHistory:
    """The loss, the learning rate and the metrics of a run over its steps, with its saves, resumes and stops.

    Without names, all but the epoch. A run that is being written is read up to its last whole line. Raises `UsageError`
    for a folder that is not a run, `NoMatch` for a name that was never logged.
    """
    refuse_address("plot", run)
    return history_of(folder_of(run), several(only))
