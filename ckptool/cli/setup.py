"""The commands of the group Setup: what only a shell needs, and no function of Python does."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ckptool.cli.options import AsJson, examples
from ckptool.cli.output import Answer, Answers, standard_input
from ckptool.reports.train import Page


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
