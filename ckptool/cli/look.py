"""The commands of the group Look: each reports, and writes no checkpoint."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from typing import Annotated, Any

from ckptool.checkpoint.workers import Progress, checked_jobs
from ckptool.cli.options import AsJson, At, Call, File, Files, Force, Jobs, Out, argument, calls, examples, option
from ckptool.cli.output import Answer, Answers, each_answer, standard_input
from ckptool.errors import UsageError, counted


@examples(
    ("ckptool inspect model.pt", "what is in it"),
    ("ckptool inspect model.pt -q --only '*.bias'", "names, for scripts"),
)
def inspect(
    files: Files,
    all: Annotated[bool, option("--all", "Every tensor and entry, one line each.")] = False,
    at: At = None,
    depth: Annotated[
        int | None, option("--depth N", "Levels of the outline, instead of as many as fit.", min=0)
    ] = None,
    stats: Annotated[
        bool, option("--stats", "Min, max, mean, std, norm, zeros, NaN and Inf of every tensor. Reads all data.")
    ] = False,
    only: Annotated[
        list[str] | None,
        option(
            "--only PATTERN",
            "Only tensors and entries whose address or key matches; * also matches dots and slashes. Repeatable.",
        ),
    ] = None,
    quiet: Annotated[bool, option("-q --quiet", "Only addresses, one per line; of a run, its checkpoints.")] = False,
    jobs: Jobs = 1,
    as_json: AsJson = False,
) -> Answers:
    """Show what is in a checkpoint: parts, sizes, notes with the commands that fix them; or a run's checkpoints."""
    options = {"at": at, "stats": stats, "only": only or ()}
    shown = {"all": all, "depth": depth, "quiet": quiet}
    answer = partial(_inspected, options=options, shown=shown)
    return Answers(each_answer(answer, files, jobs, as_json), as_json, separate=not quiet)


def _inspected(file: str, progress: Progress | None, options: dict[str, Any], shown: dict[str, Any]) -> Answer:
    from ckptool.training import is_run
    from ckptool.verbs.inspect import inspect

    if is_run(file):
        from ckptool.verbs.inspect_run import inspect_run  # with the store of runs, which no file needs

        return Answer(inspect_run(file), {"quiet": shown["quiet"]})
    return Answer(inspect(file, **options), shown)


@examples(
    ("ckptool show model.pt#epoch", "a value"),
    ("ckptool show model.pt#state_dict/module.fc.weight --slice '0:2,:5'", "a part of a tensor"),
)
@calls
def show(
    file: File,
    call: Call,
    at: At = None,
    slice: Annotated[str | None, option("--slice SLICE", "Show only this slice of a tensor: '0:4,:'.")] = None,
    all: Annotated[bool, option("--all", "Show all of it, however large.")] = False,
    as_json: AsJson = False,
) -> Answers:
    """Show the values of one tensor, or any other entry: show model.pt#state_dict/fc.weight"""
    return Answers([Answer(call(), {"all": all})], as_json)


@examples(("ckptool diff model.pt other.pt --ignore prefix,device", "what else differs"))
@calls
def diff(
    left: Annotated[str, argument("A", "A checkpoint, or FILE#ADDRESS for a part of it.")],
    right: Annotated[str, argument("B", "Another.")],
    call: Call,
    atol: Annotated[float, option("--atol X", "Absolute tolerance: values this close count as equal.", min=0)] = 0.0,
    rtol: Annotated[
        float, option("--rtol X", "Relative tolerance: the same, as a share of the value in B.", min=0)
    ] = 0.0,
    ignore: Annotated[
        list[str] | None,
        option(
            "--ignore KIND",
            "device, dtype, order, prefix, strides, ties, requires_grad, metadata; separate several by commas.",
        ),
    ] = None,
    stat: Annotated[bool, option("--stat", "Print only counts.")] = False,
    strict: Annotated[
        bool, option("--strict", "Another order of keys, or another _metadata, is a difference, too.")
    ] = False,
    only: Annotated[
        list[str] | None, option("--only PATTERN", "Compare only what matches; read nothing else. Repeatable.")
    ] = None,
    all: Annotated[bool, option("--all", "A row for each tensor, instead of groups.")] = False,
    quiet: Annotated[bool, option("-q --quiet", "Print nothing; only set the exit code.")] = False,
    as_json: AsJson = False,
) -> Answers:
    """Compare two checkpoints, in any containers. Exit 0: same. 1: they differ."""
    found = call(stat=as_json or not quiet)
    shown = {"stat": stat, "all": all, "quiet": quiet}
    return Answers([Answer(found, shown, exit_code=0 if found.same else 1)], as_json)


@examples(
    ("ckptool verify model.pt --finite", "every checksum, NaN and Inf"),
    ("ckptool verify model.pt --write-digest model.digests", "for a later verify --against model.digests"),
)
def verify(
    files: Files,
    at: At = None,
    finite: Annotated[bool, option("--finite", "Look for NaN and Inf as well.")] = False,
    digest: Annotated[
        bool, option("--digest", "Print a digest of every tensor of the weights, and one of all of them.")
    ] = False,
    write_digest: Annotated[str | None, option("--write-digest DIGESTS", "Save the digests to this file.")] = None,
    against: Annotated[
        str | None, option("--against DIGESTS", "Compare with saved digests, whatever the container.")
    ] = None,
    force: Force = False,
    quiet: Annotated[bool, option("-q --quiet", "Print only the names of files that are not fine.")] = False,
    jobs: Jobs = 1,
    as_json: AsJson = False,
) -> Answers:
    """Read everything and report damage: checksums, headers, missing data. Exit 0: fine. 1: problems found."""
    if write_digest is not None and len(files) > 1:
        raise UsageError(
            f"the digests of {counted(len(files), 'file')} cannot be saved to one file",
            "A file of digests describes one set of weights.",
            "Verify them one by one.",
        )
    options: dict[str, Any] = {"finite": finite, "digest": digest, "write_digest": write_digest, "against": against}
    answer = partial(_verified, at=at, quiet=quiet, overwrite=force, jobs=jobs if len(files) == 1 else 1, **options)
    return Answers(each_answer(answer, files, jobs, as_json), as_json)


def _verified(file: str, progress: Progress | None, digest: bool, quiet: bool, **options: Any) -> Answer:
    from ckptool.verbs.verify import verify

    found = verify(file, digest=digest, **options)
    return Answer(found, {"digests": digest, "quiet": quiet}, exit_code=0 if found.fine else 1)


@examples(
    ("ckptool doctor model.pt", "why it does not load, and what to type"),
    ("ckptool doctor model.pt --against other.pt", "and why it does not fit this model"),
    ("python train.py 2>&1 | ckptool doctor --error -", "what an error message means"),
)
@calls
def doctor(
    call: Call,
    file: Annotated[
        str | None, argument("FILE", "The checkpoint that does not load, or FILE#ADDRESS for a part of it.")
    ] = None,
    against: Annotated[
        str | None, option("--against TARGET", "The model to load it into: a checkpoint, a spec, or file.py:factory.")
    ] = None,
    error: Annotated[
        str | None, option("--error TEXT|-", "Explain this error message; - reads it from standard input.")
    ] = None,
    as_json: AsJson = False,
) -> Answers:
    """Explain why a checkpoint does not load, and what fixes it. Exit 1: something keeps it from loading."""
    text = standard_input() if error == "-" else error
    with redirect_stdout(sys.stderr):  # what the model's own code prints
        found = call(error=text)
    return Answers([Answer(found, exit_code=0 if found.loads else 1)], as_json)


@examples(("ckptool scan .", "every checkpoint here"), ("ckptool scan --latest-good -q .", "for scripts"))
def scan(
    paths: Annotated[
        list[str], argument("PATH", "Folders of checkpoints, or checkpoints; whole files, not FILE#ADDRESS.")
    ],
    latest_good: Annotated[
        bool, option("--latest-good", "Print only the newest intact checkpoint. Exit 1: there is none.")
    ] = False,
    quiet: Annotated[
        bool, option("-q --quiet", "With --latest-good print only its path; otherwise only set the exit code.")
    ] = False,
    full: Annotated[bool, option("--full", "Verify every checksum too. Reads all data.")] = False,
    jobs: Jobs = 1,
    as_json: AsJson = False,
) -> Answers:
    """List a folder's checkpoints, or what a file's pickles would call. Exit 1: damaged, or would run code."""
    answer = partial(_scanned, latest_good=latest_good, quiet=quiet, full=full, jobs=checked_jobs(jobs))
    return Answers(each_answer(answer, paths, 1, as_json), as_json, separate=not quiet)


def _scanned(path: str, progress: Progress | None, latest_good: bool, quiet: bool, full: bool, jobs: int) -> Answer:
    from ckptool.training import is_run
    from ckptool.verbs.scan import scan

    if is_run(path) and not latest_good and not quiet:
        from ckptool.verbs.inspect_run import inspect_run

        run = inspect_run(path, full=full)
        return Answer(run, exit_code=1 if run.damaged else 0)
    found = scan(path, full=full, latest_only=latest_good, jobs=jobs)
    wrong = found.latest is None if latest_good else bool(found.findings)
    return Answer(found, {"latest_good": latest_good, "quiet": quiet}, exit_code=1 if wrong else 0)


@examples(
    ("ckptool report model.pt -o page.html", "its contents, values and health"),
    ("ckptool report model.pt other.pt -o changes.html", "what changed between the two"),
)
def report(
    files: Annotated[
        list[str],
        argument("FILE", "Checkpoints, or FILE#ADDRESS for a part of one; the folder of a run. Two are compared."),
    ],
    run: Annotated[
        str | None, option("--run RUN", "Show the checkpoints and curves of the run in this folder.")
    ] = None,
    against: Annotated[
        str | None,
        option("--against TARGET", "The model for the first file: a checkpoint, a spec, or file.py:factory."),
    ] = None,
    out: Out = None,
    force: Force = False,
    as_json: AsJson = False,
) -> Answers:
    """Write an HTML page about checkpoints: contents, histograms, health, changes. It opens in any browser, offline."""
    from ckptool.verbs.report import report

    with redirect_stdout(sys.stderr):  # what the model's own code prints
        found = report(*files, run=run, against=against, out=out, overwrite=force)
    return Answers([Answer(found)], as_json)
