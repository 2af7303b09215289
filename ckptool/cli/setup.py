"""The commands of the group Setup: what only a shell needs, and no function of Python does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from ckptool.checkpoint.workers import Progress
from ckptool.cli.options import AsJson, DryRun, Force, Jobs, argument, examples, option
from ckptool.cli.output import Answer, Answers, Printed, each_answer, standard_input
from ckptool.reports.train import Page


@examples(("ckptool demo playground", "two checkpoints in a new folder, and what to try"))
def demo(
    folder: Annotated[str, argument("FOLDER", "The new folder.", show_default=True)] = "ckptool-demo",
    force: Force = False,
    as_json: AsJson = False,
) -> Answers:
    """Write two small checkpoints to try things on, one of them with the usual problems. Needs no torch."""
    from ckptool.verbs._demo import demo

    return Answers([Answer(demo(folder, overwrite=force))], as_json)


@examples(
    ("ckptool explain prefix-module", "a code: what it means, and what fixes it"),
    ("python train.py 2>&1 | ckptool explain -", "any error message, ckptool's or not"),
)
def explain(
    code: Annotated[
        str,
        argument(
            "[CODE|-]", "The code of a note or error; - reads a message from standard input. Without it: list all."
        ),
    ] = "",
    as_json: AsJson = False,
) -> Answers:
    """Explain a note, an error code or an error message, and say what fixes it. Exit 1: unknown."""
    from ckptool.reports.explain import explain, explain_text

    found = explain_text(standard_input()) if code == "-" else explain(code)
    return Answers([Answer(found)], as_json)


@examples(
    ("ckptool schema inspect", "what inspect --json prints"),
    ("ckptool schema error", "what any command prints when it fails"),
)
def schema(
    verb: Annotated[
        str, argument("[VERB]", "A command, or a schema such as error or ckptool.diff/1. Without it: list all.")
    ] = "",
    as_json: AsJson = False,
) -> Answers:
    """Print the JSON Schema (draft 2020-12) of what a command prints with --json."""
    from ckptool.reports.schema import schema

    return Answers([Answer(schema(verb))], as_json)


class Shell(str, Enum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@examples(
    ("ckptool completion bash", 'in ~/.bashrc: eval "$(ckptool completion bash)"'),
    ("ckptool completion zsh", 'in ~/.zshrc: eval "$(ckptool completion zsh)"'),
    ("ckptool completion fish", "to ~/.config/fish/completions/ckptool.fish"),
)
def completion(
    shell: Annotated[Shell, argument("SHELL", "bash, zsh or fish.")],
    as_json: AsJson = False,
) -> Answers:
    """Print a shell's completion script: commands, options, values, and after model.pt# the names in the file."""
    return Answers([Answer(Page((Path(__file__).with_name("shells") / shell.value).read_text()))], as_json)


@examples(("ckptool git-setup -n", "what it would do"), ("ckptool git-setup --remove", "git as it was before"))
def git_setup(
    everywhere: Annotated[bool, option("--global", "Set up all your repositories, not only this one.")] = False,
    remove: Annotated[bool, option("--remove", "Remove exactly what git-setup added.")] = False,
    dry_run: DryRun = False,
    textconv: Annotated[str | None, typer.Option("--textconv", metavar="FILE", hidden=True)] = None,
    as_json: AsJson = False,
) -> Answers:
    """Make git diff, git log -p and git difftool compare checkpoints by their tensors, with or without git-lfs."""
    from ckptool.verbs import _git_setup as verbs

    if textconv is not None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # the same text on every machine, which git keeps
        return Answers([Printed(verbs.textconv(textconv), 0)], as_json)
    return Answers([Answer(verbs.git_setup(everywhere=everywhere, remove=remove, dry_run=dry_run))], as_json)


@examples(
    ("ckptool git-check model.pt", "may it be committed?"),
    ("ckptool git-check model.pt --allow non-finite", "NaN and Inf are accepted"),
)
def git_check(
    files: Annotated[list[str], argument("FILE", "Files to be committed.")],
    max_size: Annotated[float, option("--max-size MB", "Largest file that git may store without git-lfs.", min=0)] = 10,
    allow: Annotated[list[str] | None, option("--allow CODE", "Accept this problem. Repeatable.")] = None,
    jobs: Jobs = 1,
    as_json: AsJson = False,
) -> Answers:
    """Check files before a commit: intact, finite, no code to run, git-lfs for large ones. Exit 1: problems found."""
    answer = partial(_git_checked, max_size=max_size, allow=allow or ())
    return Answers(each_answer(answer, files, jobs, as_json), as_json)


def _git_checked(file: str, progress: Progress | None, max_size: float, allow: Sequence[str]) -> Answer:
    from ckptool.verbs._git_setup import git_check

    found = git_check(file, max_size=max_size, allow=allow)
    return Answer(found, exit_code=0 if found.fine else 1)
