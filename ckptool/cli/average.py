"""The command average."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from ckptool.cli.answers import Answers
from ckptool.cli.options import At, Part, Target, write_each, writes
from ckptool.errors import UsageError, printable


@partial(writes, without=("--dir", "--in-place", "--skip-refused"))
def average(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…",
            help="Checkpoints of one model, two or more, or FILE#ADDRESS for a part of one.",
            show_default=False,
        ),
    ],
    target: Target,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="W,W,…", help="The share of each file: 0.5,0.3,0.2.")
    ] = None,
    ema: Annotated[
        float | None,
        typer.Option("--ema", metavar="DECAY", help="An exponential moving average over the files in order."),
    ] = None,
    at: At = None,
    part: Part = False,
) -> Answers:
    """The mean of the weights of several checkpoints, in bounded memory. Counters are the last file's."""
    from ckptool.verbs.average import average

    shares = _numbers(weights) if weights is not None else None
    if target.folder is not None or target.in_place:
        given = "a folder" if target.folder is not None else "--in-place"
        raise UsageError(
            f"average writes one new file, and was given {given}", "It has several inputs.", "For example: -o mean.pt"
        )

    def write(_: str, out: str | None, **options: Any) -> Any:
        return average(files, out, weights=shares, ema=ema, at=at, part=part, **options)

    return write_each("average", files[-1:], target, write, "For example: -o mean.pt")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--weights {printable(text)!r} is not a list of numbers", "", "For example: --weights 0.5,0.3,0.2"
        ) from None
