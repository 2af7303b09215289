"""The commands of the group Setup: what only a shell needs, and no function of Python does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.options import AsJson, DryRun, Force, Jobs, examples
from ckptool.cli.output import Answer, Answers, Printed, each_answer, standard_input
from ckptool.reports.train import Page

if TYPE_CHECKING:
    from ckptool.checkpoint.workers import Progress


@examples(("ckptool demo playground", "two checkpoints in a new folder, and what to try"))
def demo(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The new folder.")] = "ckptool-demo",
    force: Force = False,
    as_json: AsJson = False,
) -> Answers:
    """Make two small checkpoints to play with, one of them with the usual troubles. Needs no torch."""
    from ckptool.verbs._demo import demo

    return Answers([Answer(demo(folder, overwrite=force))], as_json)


@examples(
    ("ckptool explain prefix-module", "a code: what it means, what fixes it"),
    ("python train.py 2>&1 | ckptool explain -", "any error message, ours or another's"),
)
def explain(
    code: Annotated[
        str,
        typer.Argument(
            metavar="[CODE|-]",
            help="The code of a note or error; - reads a message from standard input. Without it: list all.",
            show_default=False,
        ),
    ] = "",
    as_json: AsJson = False,
) -> Answers:
    """Explain a note, an error code or an error message, and what fixes it. Exit 1: it is not known."""
    from ckptool.reports.explain import explain, explain_text

    found = explain_text(standard_input()) if code == "-" else explain(code)
    return Answers([Answer(found)], as_json)


@examples(
    ("ckptool schema inspect", "what inspect --json prints"),
    ("ckptool schema error", "what any command prints when it fails"),
)
def schema(
    verb: Annotated[
        str,
        typer.Argument(
            metavar="[VERB]",
            help="A command, or a schema such as error or ckptool.diff/1. Without it: list all.",
            show_default=False,
        ),
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
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
    as_json: AsJson = False,
) -> Answers:
    """Print the shell's completion: of verbs, options, values, and addresses in files: show model.pt#state_dict/la"""
    return Answers([Answer(Page((Path(__file__).with_name("shells") / shell.value).read_text()))], as_json)


@examples(("ckptool git-setup -n", "what it would do"), ("ckptool git-setup --remove", "git as it was before"))
def git_setup(
    everywhere: Annotated[
        bool, typer.Option("--global", help="For all your repositories, not only the one that you are in.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take out exactly what git-setup put in.")] = False,
    dry_run: DryRun = False,
    textconv: Annotated[str | None, typer.Option("--textconv", metavar="FILE", hidden=True)] = None,
    as_json: AsJson = False,
) -> Answers:
    """Have git diff, git log -p and git difftool compare checkpoints by their tensors, LFS or not."""
    from ckptool.verbs import _git_setup as verbs

    if textconv is not None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # the same text on every machine, which git keeps
        return Answers([Printed(verbs.textconv(textconv), 0)], as_json)
    return Answers([Answer(verbs.git_setup(everywhere=everywhere, remove=remove, dry_run=dry_run))], as_json)


@examples(
    ("ckptool git-check model.pt", "may it be committed?"),
    ("ckptool git-check model.pt --allow non-finite", "whatever its values"),
)
def git_check(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Files that are to be committed.", show_default=False)
    ],
    max_size: Annotated[
        float, typer.Option("--max-size", min=0, metavar="MB", help="What git may hold of a file without git-lfs.")
    ] = 10,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", metavar="CODE", help="Accept this problem. Repeatable.")
    ] = None,
    jobs: Jobs = 1,
    as_json: AsJson = False,
) -> Answers:
    """Check checkpoints before a commit: whole, finite, nothing that would run, large ones in git-lfs. Exit 1: no."""
    answer = partial(_git_checked, max_size=max_size, allow=allow or ())
    return Answers(each_answer(answer, files, jobs, as_json), as_json)


def _git_checked(file: str, progress: Progress | None, max_size: float, allow: Sequence[str]) -> Answer:
    from ckptool.verbs._git_setup import git_check

    found = git_check(file, max_size=max_size, allow=allow)
    return Answer(found, exit_code=0 if found.fine else 1)
