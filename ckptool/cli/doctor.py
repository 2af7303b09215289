"""The command doctor."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from ckptool.checkpoint.files import file_problem
from ckptool.cli.answers import Answer, Answers
from ckptool.cli.options import AsJson

MAX_TEXT = 1 << 20


def doctor(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="What does not load, or FILE#ADDRESS for a part of it.", show_default=False
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="TARGET", help="The model it is for: a checkpoint, a spec, or file.py:factory."
        ),
    ] = None,
    error: Annotated[
        str | None,
        typer.Option("--error", metavar="TEXT|-", help="Explain this error message; - reads it from standard input."),
    ] = None,
    as_json: AsJson = False,
) -> Answers:
    """Why a checkpoint does not load, and the commands that fix it, in order. Exit 1: something keeps it from loading."""
    from ckptool.verbs.doctor import doctor

    text = _from_input() if error == "-" else error
    with redirect_stdout(sys.stderr):  # what the model's own code prints
        found = doctor(file, against=against, error=text)
    return Answers([Answer("health", found, exit_code=0 if found.loads else 1)], as_json)


def _from_input() -> str:
    try:
        return sys.stdin.buffer.read(MAX_TEXT).decode("utf-8", "replace")
    except (OSError, AttributeError) as problem:
        raise file_problem(OSError(str(problem)), "standard input", "read") from problem
