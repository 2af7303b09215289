"""`scan`: the checkpoints of a folder, one line each; of a file, what its pickles would call."""

from __future__ import annotations

from typing import Annotated

from ckptool.analysis import scan as analysis
from ckptool.analysis.scan import Scan
from ckptool.commands import argument, option, verb
from ckptool.formats import PathLike, refuse_address
from ckptool.training.reports import RunReport
from ckptool.verbs._options import Jobs, report_of_run


def _of_run(path: str, full: bool = False, latest_only: bool = False, quiet: bool = False) -> RunReport | None:
    return None if latest_only or quiet else report_of_run(path, full)


@verb(
    ("ckptool scan .", "every checkpoint here"),
    ("ckptool scan --latest-good --full -q .", "for scripts"),
    first_try=_of_run,
    blank_between=True,
)
def scan(
    path: Annotated[
        PathLike,
        argument("PATH", "Folders of checkpoints, or single checkpoints: whole files, not FILE#ADDRESS.", each=True),
    ],
    *,
    latest_only: Annotated[
        bool, option("--latest-good", "Only the newest good one (its data too: --full). Exit 1: none.")
    ] = False,
    full: Annotated[bool, option("--full", "Verify every checksum too. Reads all data.")] = False,
    jobs: Jobs = 1,
) -> Scan:
    """Looks at every checkpoint below a folder, or at one file, without running anything.

    Files that cannot be opened are rows of the report. Raises `FileProblem` where the path cannot be read, and for a
    single file whatever opening it raises.
    """
    refuse_address("scan", path)
    return analysis.scan(path, latest_only=latest_only, full=full, jobs=jobs)
