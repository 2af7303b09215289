"""The commands warm-start and spec."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from enum import Enum
from typing import Annotated

import typer

from ckptool.cli.answers import Answer, Answers
from ckptool.cli.options import (
    AsJson,
    At,
    Container,
    DryRun,
    Exclude,
    File,
    Force,
    KeepUnknown,
    Only,
    Out,
    Part,
    Verify,
)


class OnMismatch(str, Enum):
    error = "error"
    skip = "skip"
    slice = "slice"
    pad = "pad"


Against = Annotated[
    str,
    typer.Option(
        "--against",
        metavar="TARGET",
        help="The model: a checkpoint, a spec, or your own code as file.py:factory or pkg.module:factory.",
        show_default=False,
    ),
]


def warm_start(
    file: File,
    against: Against,
    at: At = None,
    rename: Annotated[
        list[str] | None, typer.Option("--rename", metavar="RULE", help="'OLD => NEW' for keys of FILE. Repeatable.")
    ] = None,
    rules: Annotated[str | None, typer.Option("--rules", metavar="FILE", help="A YAML file of such rules.")] = None,
    only: Only = None,
    exclude: Exclude = None,
    on_mismatch: Annotated[
        OnMismatch,
        typer.Option("--on-mismatch", help="Tensors of another shape: refuse, keep the model's, cut, or fill up."),
    ] = OnMismatch.error,
    min_loaded: Annotated[
        float | None, typer.Option("--min-loaded", metavar="SHARE", help="At least this share of the values: 0.95.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="No missing and no unexpected names.")] = False,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="The optimizer's state goes along, by parameter name.")
    ] = False,
    suggest: Annotated[
        str | None, typer.Option("--suggest", metavar="FILE", help="Write rules that would make more fit, for --rules.")
    ] = None,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
    verify: Verify = False,
    keep_unknown: KeepUnknown = False,
    container: Container = None,
    part: Part = False,
    as_json: AsJson = False,
) -> Answers:
    """What of a checkpoint fits a model; with -o, a checkpoint of exactly the model's keys. Exit 1: not accepted, nothing written."""
    from ckptool.cli.progress import progress_bar
    from ckptool.verbs.warm_start import warm_start

    with progress_bar("warm-start") as progress, redirect_stdout(sys.stderr):  # what the model's own code prints
        report = warm_start(
            file,
            against,
            out,
            at=at,
            rename=rename or (),
            rules_file=rules,
            only=only or (),
            exclude=exclude or (),
            on_mismatch=on_mismatch.value,
            min_loaded=min_loaded,
            strict=strict,
            optimizer=optimizer,
            suggest=suggest,
            part=part,
            overwrite=force,
            dry_run=dry_run,
            verify=verify,
            keep_unknown=keep_unknown,
            container=container,
            progress=progress,
        )
    return Answers([Answer("warm_start", report, exit_code=0 if report.accepted else 1)], as_json)


def spec(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A checkpoint, FILE#ADDRESS for a part of it, file.py:factory, or pkg.module:factory.",
            show_default=False,
        ),
    ],
    at: At = None,
    part: Part = False,
    out: Out = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> Answers:
    """Names, shapes, types and ties of a model, without its values: -o model.spec.json, for warm-start --against without torch."""
    from ckptool.verbs.spec import spec

    with redirect_stdout(sys.stderr):
        found = spec(target, out, at=at, part=part, overwrite=force, dry_run=dry_run)
    return Answers([Answer("spec", found)], as_json)
