"""`inspect`: what is in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.checkpoint import Composite, Note
from ckptool.errors import listed, printable
from ckptool.reports.listing import Listing, listing
from ckptool.reports.statistics import Statistics, statistics
from ckptool.verbs.opening import PathLike, open_file


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """A listing, with the statistics of each tensor by its address if they were asked for."""

    listing: Listing
    statistics: dict[str, Statistics]
    notes: tuple[Note, ...]

    def __str__(self) -> str:
        from ckptool.render.text import inspection_text

        return inspection_text(self)

    def _repr_html_(self) -> str:
        from ckptool.render.html import inspection_html

        return inspection_html(self)


def inspect(file: PathLike, *, at: str | None = None, stats: bool = False) -> Inspection:
    """Lists what is in `file`, or in the part at an address, with notes on what one should know and the commands that mend it.

    Reads no tensor data, unless `stats`: then min, max, mean, std, norm, zeros, NaN and Inf of every plain tensor, read in chunks.
    """
    opened = open_file(file, at)
    found = listing(opened.checkpoint, opened.at or "")
    if not stats:
        return Inspection(found, {}, found.notes)
    numbers: dict[str, Statistics] = {}
    known: dict[tuple[object, ...], Statistics] = {}
    for row in found.tensors:
        entry = row.tensor
        if isinstance(entry, Composite) or entry.dtype.kind == "bits" or not entry.numel:
            continue
        view = (id(entry.storage), entry.dtype, entry.shape, entry.stride, entry.offset, entry.flags)
        if view not in known:
            known[view] = statistics(entry)
        numbers[row.address] = known[view]
    return Inspection(found, numbers, (*_non_finite(found, numbers), *found.notes))


def _non_finite(found: Listing, numbers: dict[str, Statistics]) -> list[Note]:
    bad = [place for place, values in numbers.items() if values.nans or values.infs]
    if not bad:
        return []
    return [
        Note(
            "non-finite",
            f"{len(bad):,} of {len(found.tensors):,} tensors hold NaN or Inf: {listed([printable(place) for place in bad], 3)}",
        )
    ]
