"""Commands that look: inspect, show, diff."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Annotated

import typer

from ckptool.cli.answers import Answer, Answers
from ckptool.cli.options import AsJson, At, File, Files


class Sort(str, Enum):
    name = "name"
    size = "size"
    none = "none"


def inspect(
    files: Files,
    all: Annotated[bool, typer.Option("--all", help="Every tensor and entry, one line each.")] = False,
    at: At = None,
    sort: Annotated[Sort, typer.Option("--sort", help="Order of what is listed; none is the file's own.")] = Sort.none,
    depth: Annotated[
        int | None, typer.Option("--depth", min=0, metavar="N", help="Levels of the outline, instead of what fits.")
    ] = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Min, max, mean, std, norm, zeros, NaN and Inf of every tensor. Reads all data."),
    ] = False,
    as_json: AsJson = False,
) -> Answers:
    """What is in a checkpoint: parts, sizes, an outline, and notes with the commands that fix it; of a run, its checkpoints."""
    return Answers(_inspected(files, all, at, sort.value, depth, stats), as_json, separate=True)


def _inspected(
    files: list[str], all: bool, at: str | None, sort: str, depth: int | None, stats: bool
) -> Iterator[Answer]:
    from ckptool.training import is_run
    from ckptool.verbs.inspect import inspect

    for file in files:
        if is_run(file):
            from ckptool.verbs.inspect_run import inspect_run  # with the store of runs, which no file needs

            yield Answer("run", inspect_run(file))
            continue
        found = inspect(file, at=at, stats=stats)
        yield Answer("inspection", found, {"all": all, "sort": sort, "depth": depth})


def show(
    file: File,
    at: At = None,
    slice: Annotated[
        str | None, typer.Option("--slice", metavar="SLICE", help="Of a tensor, only this: '0:4,:'.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="All of it, however much that is.")] = False,
    as_json: AsJson = False,
) -> Answers:
    """The values of one tensor, or any other entry: show model.pt#state_dict/fc.weight"""
    from ckptool.verbs.show import show

    shown = show(file, at=at, slice=slice, all=all)
    return Answers([Answer("shown", shown, {"all": all})], as_json)


def diff(
    left: Annotated[
        str, typer.Argument(metavar="A", help="A checkpoint, or FILE#ADDRESS for a part of it.", show_default=False)
    ],
    right: Annotated[str, typer.Argument(metavar="B", help="Another.", show_default=False)],
    atol: Annotated[float, typer.Option("--atol", min=0, metavar="X", help="Values this close count as equal.")] = 0.0,
    rtol: Annotated[
        float, typer.Option("--rtol", min=0, metavar="X", help="The same, as a share of the value in B.")
    ] = 0.0,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="WHAT",
            help="device, dtype, order, prefix, strides, ties, requires_grad, metadata; several by commas.",
        ),
    ] = None,
    stat: Annotated[bool, typer.Option("--stat", help="Only how many differ in what.")] = False,
    name_only: Annotated[bool, typer.Option("--name-only", help="Only the addresses of what differs.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Trust equal stored checksums instead of reading.")] = False,
    as_json: AsJson = False,
) -> Answers:
    """What differs between two checkpoints of any containers. Exit 0: same. 1: they differ."""
    from ckptool.verbs.diff import diff

    found = diff(left, right, atol=atol, rtol=rtol, ignore=ignore or (), quick=quick, stat=as_json or not name_only)
    return Answers(
        [Answer("diff", found, {"stat": stat, "name_only": name_only}, exit_code=0 if found.same else 1)], as_json
    )
