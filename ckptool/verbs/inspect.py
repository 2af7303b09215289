"""`inspect`: what is in a checkpoint."""

from __future__ import annotations

import os
from typing import Annotated, Any

from ckptool.analysis.inspect import Listing, listing, matching_only, with_statistics
from ckptool.checkpoint import Composite
from ckptool.checkpoint.files import unchanged
from ckptool.checkpoint.progress import over
from ckptool.commands import option, repeated, several, verb
from ckptool.formats import open_file
from ckptool.verbs._options import At, Files, Texts, report_of_run

_ONLY = "Only tensors and entries whose address or key matches; * also matches dots and slashes."


@verb(
    ("ckptool inspect model.pt", "what is in it"),
    ("ckptool inspect model.pt -q --only '*.bias'", "names, for scripts"),
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
) -> Listing | Any:
    """Lists the contents of `file`, or of the part at an address, with notes and the commands that fix things.

    Reads no tensor data, unless `stats`; composite and packed tensors have none. Of a run, its checkpoints.
    Raises `NoMatch` where a pattern matches nothing.
    """
    run = report_of_run(file) if at is None and isinstance(file, (str, os.PathLike)) else None
    if run is not None:
        return run
    opened = open_file(file, at)
    contents = matching_only(listing(opened.checkpoint, opened.at or ""), several(only))
    if not stats:
        return with_statistics(contents, {}, opened.path)
    from ckptool.analysis.values import statistics  # with numpy, which no other listing needs

    plain = {row.address: row.tensor for row in contents.tensors if not isinstance(row.tensor, Composite)}
    entries = {place: entry for place, entry in plain.items() if entry.dtype.kind != "bits" and entry.numel}
    views = {place: (*entry.view, entry.flags) for place, entry in entries.items()}
    with unchanged(opened.checkpoint.source):  # what is one view of the data is read once
        distinct = {views[place]: entries[place] for place in views}
        by_view = {view: statistics(entry) for view, entry in over(distinct.items(), lambda pair: pair[1].nbytes)}
    return with_statistics(contents, {place: by_view[view] for place, view in views.items()}, opened.path)
