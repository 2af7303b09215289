"""The commands of the training harness: train, resume, prune, prove."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptool.cli.answers import Answer, Answers
from ckptool.cli.console import tell
from ckptool.cli.options import AsJson
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.training.loop import Outcome

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the configuration: train.steps=3000. Repeatable."),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")]


class Resume(str, Enum):
    never = "never"
    auto = "auto"
    must = "must"


def train(
    config: Annotated[
        str | None, typer.Argument(metavar="run.yaml", help="What to train, and how.", show_default=False)
    ] = None,
    set: Set = None,
    resume: Annotated[
        Resume, typer.Option("--resume", help="auto: start the run, or go on with it; must: only go on.")
    ] = Resume.never,
    dry_run: Annotated[
        bool, typer.Option("-n", "--dry-run", help="Run one step, save, reload, compare; leave nothing behind.")
    ] = False,
    init: Annotated[bool, typer.Option("--init", help="Print a configuration with every key explained.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a configuration.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> Answers:
    """Train a model as a configuration says, saving checkpoints that resume. Exit 130, 143: stopped by a signal, after saving."""
    from ckptool.verbs import train as verbs

    if init or schema:
        return Answers([Answer("page", verbs.example() if init else verbs.schema())])
    if config is None:
        raise UsageError("train was given no configuration", "", "Make one: ckptool train --init > run.yaml")
    if dry_run:
        return Answers([Answer("training", verbs.dry_run(config, set or ()))], as_json)
    return _trained(
        lambda progress: verbs.train(config, set or (), resume=resume.value, progress=progress, say=_say),
        quiet,
        as_json,
    )


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    set: Set = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> Answers:
    """Go on with a run from its newest whole checkpoint. Exit 3: there are checkpoints, and none is whole."""
    from ckptool.verbs.resume import resume

    return _trained(lambda progress: resume(run, set or (), progress=progress, say=_say), quiet, as_json)


def prune(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The folder of a run, not FILE#ADDRESS.", show_default=False)
    ],
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Show what would go, and delete nothing.")] = False,
    set: Set = None,
    as_json: AsJson = False,
) -> Answers:
    """Delete the checkpoints of a run that its configuration does not want to keep: never the newest, never the best."""
    from ckptool.verbs.prune import prune

    return Answers([Answer("pruned", prune(run, set or (), dry_run=dry_run))], as_json)


def prove(
    config: Annotated[str, typer.Argument(metavar="run.yaml", help="The configuration to prove.", show_default=False)],
    set: Set = None,
    steps: Annotated[int, typer.Option("--steps", min=2, metavar="N", help="Length of the run.")] = 300,
    kills: Annotated[int, typer.Option("--kills", min=1, metavar="N", help="How often it is killed.")] = 5,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Where the kills fall.")] = 0,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Kill a short run at every file-system event too.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            metavar="N",
            help="With strategy ddp: how many train together, and are killed. Default: 2, or one for each GPU.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> Answers:
    """Prove that a run killed anywhere ends with the same bytes as one that was not. Exit 1: it does not."""
    from ckptool.cli.progress import status_line
    from ckptool.verbs.prove import prove

    with status_line() as say:
        found = prove(
            config,
            set or (),
            steps=steps,
            kills=kills,
            seed=seed,
            exhaustive=exhaustive,
            processes=processes,
            say=say,
        )
    return Answers([Answer("proof", found, exit_code=0 if found.proved else 1)], as_json)


def _say(text: str) -> None:
    tell(text + "\n")


def _trained(work: Callable[[Any], Outcome], quiet: bool, as_json: bool) -> Answers:
    """Trains, telling how far it is."""
    from ckptool.cli.progress import training_progress

    gc.enable()  # a run lives long, and the models of its user may be rings of objects
    with nullcontext() if quiet else training_progress() as progress:
        done = work(progress)
    if os.environ.get("RANK", "0") != "0":  # under torchrun the first process tells
        return Answers([Answer("page", "", exit_code=done.exit_code)])
    return Answers([Answer("training", done, exit_code=done.exit_code)], as_json)
