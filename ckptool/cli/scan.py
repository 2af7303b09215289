"""The command scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from ckptool.cli.answers import Answer, Answers
from ckptool.cli.options import AsJson


def scan(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Folders of checkpoints, or checkpoints; whole ones, not FILE#ADDRESS.",
            show_default=False,
        ),
    ],
    latest_good: Annotated[
        bool, typer.Option("--latest-good", help="Only the newest checkpoint that is whole. Exit 1: there is none.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="With --latest-good only its path, else only the exit code.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Verify every checksum too. Reads all data.")] = False,
    as_json: AsJson = False,
) -> Answers:
    """A folder: one line per checkpoint. A file: what its pickles would call. Exit 1: something is damaged, or would run code."""
    return Answers(_scanned(paths, latest_good, quiet, full), as_json, separate=not quiet)


def _scanned(paths: list[str], latest_good: bool, quiet: bool, full: bool) -> Iterator[Answer]:
    from ckptool.training import is_run
    from ckptool.verbs.scan import scan

    for path in paths:
        if is_run(path) and not latest_good and not quiet:
            from ckptool.verbs.inspect_run import inspect_run

            run = inspect_run(path, full=full)
            yield Answer("run", run, exit_code=1 if run.damaged else 0)
            continue
        found = scan(path, full=full, latest_only=latest_good)
        wrong = found.latest is None if latest_good else bool(found.findings)
        yield Answer("scan", found, {"latest_good": latest_good, "quiet": quiet}, exit_code=1 if wrong else 0)
