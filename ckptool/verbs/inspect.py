"""`inspect`: what is in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ckptool.analysis.inspect import Listing, listing, matching_only, with_statistics
from ckptool.checkpoint import Composite
from ckptool.checkpoint.files import unchanged
from ckptool.commands import option, repeated, several, verb
from ckptool.formats.opening import open_file
from ckptool.training import is_run
from ckptool.verbs._options import At, Files, Texts

if TYPE_CHECKING:
    from ckptool.analysis.statistics import Statistics

_ONLY = "Only tensors and entries whose address or key matches; * also matches dots and slashes."


def _of_run(file: str) -> Any:
    if not is_run(file):
        return None
    from ckptool.training.inspect_run import inspect_run  # with the store of runs, which no file needs

    return inspect_run(file)


@verb(
    ("ckptool inspect model.pt", "what is in it"),
    ("ckptool inspect model.pt -q --only '*.bias'", "names, for scripts"),
    first_try=_of_run,
    exits=False,
    other_reports=("ckptool.training.reports.RunReport",),
    blank_between=True,
)
def inspect(
    file: Files,
    *,
    at: At = None,
    stats: Annotated[bool, option("--stats", "Min, max, mean, std, norm, zeros, NaN, Inf. Reads all data.")] = False,
    only: Annotated[Texts, repeated("--only PATTERN", _ONLY)] = (),
) -> Listing:
    """Lists the contents of `file`, or of the part at an address, with notes and the commands that fix things.

    Reads no tensor data, unless `stats`; composite and packed tensors have none.
    Raises `NoMatch` where a pattern matches nothing.
    """
    opened = open_file(file, at)
    found = matching_only(listing(opened.checkpoint, opened.at or ""), several(only))
    numbers: dict[str, Statistics] = {}
    if stats:
        with unchanged(opened.checkpoint.source):
            numbers = _numbers(found)
    return with_statistics(found, numbers, opened.path)


def _numbers(found: Listing) -> dict[str, Statistics]:
    """The statistics of every plain tensor by its address; tensors that are one view of the data are read once."""
    from ckptool.analysis.statistics import statistics

    numbers: dict[str, Statistics] = {}
    known: dict[tuple[object, ...], Statistics] = {}
    for row in found.tensors:
        entry = row.tensor
        if isinstance(entry, Composite) or entry.dtype.kind == "bits" or not entry.numel:
            continue
        view = (*entry.view, entry.flags)
        if view not in known:
            known[view] = statistics(entry)
        numbers[row.address] = known[view]
    return numbers
