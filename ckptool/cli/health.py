"""Commands about files that may be damaged: verify, recover."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from ckptool.cli.answers import Answer, Answers
from ckptool.cli.options import AsJson, At, DryRun, Files, Force, KeepUnknown, Out
from ckptool.errors import UsageError, counted, printable


def verify(
    files: Files,
    at: At = None,
    finite: Annotated[bool, typer.Option("--finite", help="Look for NaN and Inf as well.")] = False,
    digest: Annotated[
        bool, typer.Option("--digest", help="Print the digest of every tensor of the weights, and one of them all.")
    ] = False,
    write_digest: Annotated[
        str | None, typer.Option("--write-digest", metavar="DIGESTS", help="Keep the digests in this file.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="DIGESTS", help="Compare with digests that were kept, of any container."),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> Answers:
    """Read everything and say what is damaged: checksums, headers, missing data. Exit 0: fine. 1: problems found."""
    if write_digest is not None and len(files) > 1:
        raise UsageError(
            f"the digests of {counted(len(files), 'file')} cannot be kept in one",
            "A file of digests is of one set of weights.",
            "Verify them one by one.",
        )
    return Answers(_verified(files, at, finite, digest, write_digest, against, force), as_json)


def _verified(
    files: list[str],
    at: str | None,
    finite: bool,
    digest: bool,
    write_digest: str | None,
    against: str | None,
    force: bool,
) -> Iterator[Answer]:
    from ckptool.verbs.verify import verify

    for file in files:
        found = verify(
            file, at=at, finite=finite, digest=digest, write_digest=write_digest, against=against, overwrite=force
        )
        yield Answer("verification", found, {"digests": digest}, exit_code=0 if found.fine else 1)


def recover(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A cut or damaged checkpoint; all of it, not FILE#ADDRESS.", show_default=False
        ),
    ],
    out: Out = None,
    fill_from: Annotated[
        str | None,
        typer.Option(
            "--fill-from",
            metavar="OTHER",
            help="Take lost tensors from this checkpoint: same key, type and shape. Every later inspect reports it.",
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    keep_unknown: KeepUnknown = False,
    as_json: AsJson = False,
) -> Answers:
    """Write what is whole of a cut or damaged file to a new one; undo an interrupted in-place edit. Exit 1: something is lost."""
    from ckptool.cli.progress import progress_bar
    from ckptool.verbs.recover import recover

    with progress_bar(f"recover {printable(os.path.basename(file))}") as progress:
        done = recover(
            file,
            out,
            fill_from=fill_from,
            overwrite=force,
            dry_run=dry_run,
            keep_unknown=keep_unknown,
            progress=progress,
        )
    return Answers([Answer("recover", done, exit_code=0 if done.complete else 1)], as_json)
