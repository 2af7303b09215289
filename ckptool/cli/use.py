"""The commands of the group Use: start a model from a checkpoint, train it, prove the run."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from enum import Enum
from typing import Annotated, Any

from ckptool.cli.options import (
    AsJson,
    At,
    Call,
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
    argument,
    calls,
    examples,
    option,
)
from ckptool.cli.output import Answer, Answers, progress_bar, status_line, tell, training_progress
from ckptool.errors import UsageError
from ckptool.reports.train import Outcome, Page


class OnMismatch(str, Enum):
    error = "error"
    skip = "skip"
    slice = "slice"
    pad = "pad"
    resize = "resize"


Against = Annotated[
    str,
    option(
        "--against TARGET",
        "The model: a checkpoint, a spec, or your own code as file.py:factory or pkg.module:factory.",
        show_default=False,
    ),
]


@examples(
    ("ckptool warm-start model.pt --against other.pt", "what fits, and rules for the rest"),
    ("ckptool warm-start model.pt --against net.py:build -o init.pt", "write what fits"),
    ("ckptool warm-start old.pt --against new.pt --resize 'wte*=rows(mean)' -o w.pt", "a larger vocabulary"),
)
@calls
def warm_start(
    file: File,
    against: Against,
    call: Call,
    at: At = None,
    rename: Annotated[list[str] | None, option("--rename RULE", "'OLD => NEW' for keys of FILE. Repeatable.")] = None,
    rules_file: Annotated[str | None, option("--rules FILE", "A YAML file of such rules.")] = None,
    only: Only = None,
    exclude: Exclude = None,
    on_mismatch: Annotated[
        OnMismatch, option("--on-mismatch", "Tensors of another shape: refuse, keep the model's, slice, pad, resize.")
    ] = OnMismatch.error,
    resize: Annotated[
        list[str] | None,
        option("--resize PATTERN=HOW", "How: 'pos_embed=bicubic(cls=1)', '*embed*=rows(mean)'. Repeatable."),
    ] = None,
    min_loaded: Annotated[
        float | None,
        option("--min-loaded SHARE", "Share that must load: 0.95. Default: half, and all that suggested rules would."),
    ] = None,
    strict: Annotated[bool, option("--strict", "Allow no missing and no unexpected names.")] = False,
    optimizer: Annotated[bool, option("--optimizer", "Take the optimizer's state along, by parameter name.")] = False,
    suggest: Annotated[
        str | None, option("--suggest FILE", "Write rules that would make more fit, for --rules.")
    ] = None,
    out: Out = None,
    overwrite: Force = False,
    dry_run: DryRun = False,
    verify: Verify = False,
    keep_unknown: KeepUnknown = False,
    container: Container = None,
    part: Part = False,
    as_json: AsJson = False,
) -> Answers:
    """Show what of a checkpoint fits a model; -o writes one with exactly the model's keys. Exit 1: not accepted."""
    with progress_bar("warm-start") as progress, redirect_stdout(sys.stderr):  # what the model's own code prints
        report = call(progress=progress)
    return Answers([Answer(report, exit_code=0 if report.accepted else 1)], as_json)


@examples(("ckptool spec net.py:build -o model.spec.json", "for warm-start --against, without torch"))
@calls
def spec(
    target: Annotated[
        str, argument("TARGET", "A checkpoint, FILE#ADDRESS for a part of it, file.py:factory, or pkg.module:factory.")
    ],
    call: Call,
    at: At = None,
    part: Part = False,
    out: Out = None,
    overwrite: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> Answers:
    """Write a model's names, shapes, types and ties (-o model.spec.json), for warm-start without torch."""
    with redirect_stdout(sys.stderr):
        found = call()
    return Answers([Answer(found)], as_json)


Set = Annotated[
    list[str] | None, option("--set KEY=VALUE", "Change a key of the configuration: train.steps=3000. Repeatable.")
]
Quiet = Annotated[bool, option("-q --quiet", "Show no progress.")]


class Resume(str, Enum):
    never = "never"
    auto = "auto"
    must = "must"


@examples(
    ("ckptool train --init > run.yaml", "every key, explained"),
    ("ckptool train run.yaml -n", "a rehearsal of one step"),
    ("ckptool train run.yaml --set optim.main.lr=3e-4", "override a value"),
)
def train(
    config: Annotated[str | None, argument("run.yaml", "The configuration of the run.")] = None,
    set: Set = None,
    resume: Annotated[
        Resume, option("--resume", "auto: start or resume the run; must: only resume it.")
    ] = Resume.never,
    dry_run: Annotated[
        bool, option("-n --dry-run", "Run one step, save, reload, compare; leave nothing behind.")
    ] = False,
    init: Annotated[bool, option("--init", "Print a configuration with every key explained.")] = False,
    schema: Annotated[bool, option("--schema", "Print the JSON Schema of a configuration.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> Answers:
    """Train a model from a configuration. Exit 130, 143: stopped by a signal, after saving."""
    from ckptool.verbs import train as verbs

    if init or schema:
        return Answers([Answer(Page(verbs.example() if init else verbs.schema()))])
    if config is None:
        raise UsageError("train was given no configuration", "", "Create one: ckptool train --init > run.yaml")
    if dry_run:
        return Answers([Answer(verbs.dry_run(config, set or ()))], as_json)
    return _trained(
        lambda progress: verbs.train(config, set or (), resume=resume.value, progress=progress, say=_say),
        quiet,
        as_json,
    )


@examples(("ckptool resume runs/basic", "continue where it was killed"))
@calls
def resume(
    run: Annotated[str, argument("RUN", "The folder of a run.")],
    call: Call,
    set: Set = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> Answers:
    """Resume a run from its newest intact checkpoint. Exit 3: there are checkpoints, but none is intact."""
    return _trained(lambda progress: call(progress=progress, say=_say), quiet, as_json)


class On(str, Enum):
    val = "val"
    test = "test"


@examples(
    ("ckptool eval runs/basic", "the best checkpoint, on the validation data"),
    ("ckptool eval runs/basic --checkpoint 400 --on test", "another, on data.test"),
)
@calls
def eval(
    run: Annotated[str, argument("RUN", "The folder of a run.")],
    call: Call,
    checkpoint: Annotated[
        str | None, option("--checkpoint STEP", "A step, best or newest. Default: the best.", show_default=False)
    ] = None,
    on: Annotated[On, option("--on", "Evaluate on data.val (or what is held out), or on data.test.")] = On.val,
    set: Set = None,
    as_json: AsJson = False,
) -> Answers:
    """Evaluate a checkpoint of a run; nothing is written to it."""
    with redirect_stdout(sys.stderr):  # what the model's own code prints
        found = call()
    return Answers([Answer(found)], as_json)


@examples(("ckptool prune runs/basic -n", "what would be deleted"))
@calls
def prune(
    run: Annotated[str, argument("RUN", "The folder of a run, not FILE#ADDRESS.")],
    call: Call,
    dry_run: Annotated[bool, option("-n --dry-run", "Show what would be deleted; delete nothing.")] = False,
    set: Set = None,
    as_json: AsJson = False,
) -> Answers:
    """Delete the checkpoints of a run that its configuration does not keep: never the newest, never the best."""
    return Answers([Answer(call())], as_json)


@examples(
    ("ckptool prove run.yaml --steps 40 --kills 3", "does it end with the same bytes?"),
    ("ckptool prove -- python train.py --out {run}", "your own script, in a fresh folder"),
)
@calls
def prove(
    words: Annotated[
        list[str],
        argument(
            "run.yaml | -- COMMAND",
            "The configuration to prove, or a command of your own, in which {run} stands for a fresh folder.",
        ),
    ],
    call: Call,
    set: Set = None,
    steps: Annotated[int, option("--steps N", "Length of the run in steps.", min=2)] = 300,
    kills: Annotated[int, option("--kills N", "Number of kills.", min=1)] = 5,
    seed: Annotated[int, option("--seed N", "Seed of where the kills fall.")] = 0,
    exhaustive: Annotated[bool, option("--exhaustive", "Kill a short run at every file-system event too.")] = False,
    processes: Annotated[
        int | None,
        option(
            "--processes N",
            "With strategy ddp or fsdp: how many train together, and are killed. Default: 2, or one for each GPU.",
            min=1,
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, option("--timeout SECONDS", "For one process of a command.", min=1)] = 600,
    as_json: AsJson = False,
) -> Answers:
    """Prove that a run killed anywhere ends with the same bytes as one that was not. Exit 1: it does not."""
    own = len(words) > 1 or "{run}" in words[0]
    with status_line() as say:
        found = call(None if own else words[0], command=words if own else (), say=say)
    return Answers([Answer(found, exit_code=found.exit_code)], as_json)


@examples(("ckptool plot runs/basic", "its curves"), ("ckptool plot runs/basic --only 'val_*'", "some of them"))
@calls
def plot(
    run: Annotated[str, argument("RUN", "The folder of a run, not FILE#ADDRESS.")],
    call: Call,
    only: Annotated[
        list[str] | None, option("--only NAME", "Draw only this curve, or those that match a pattern. Repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> Answers:
    """Draw a run's loss, learning rate and metrics over its steps, even while it is training."""
    return Answers([Answer(call())], as_json)


def _say(text: str) -> None:
    tell(text + "\n")


def _trained(work: Callable[[Any], Outcome], quiet: bool, as_json: bool) -> Answers:
    """Trains, telling how far it is."""
    gc.enable()  # a run lives long, and the models of its user may be rings of objects
    with nullcontext() if quiet else training_progress() as progress:
        done = work(progress)
    if os.environ.get("RANK", "0") != "0":  # under torchrun the first process tells
        return Answers([Answer(Page(), exit_code=done.exit_code)])
    return Answers([Answer(done, exit_code=done.exit_code)], as_json)
