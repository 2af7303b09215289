"""The command bake."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from ckptool.cli.answers import Answers
from ckptool.cli.options import ChangedFiles, ChangeTarget, write_each, writes


class Form(str, Enum):
    plain = "plain"
    old = "old"
    new = "new"


@writes
def bake(
    files: ChangedFiles,
    target: ChangeTarget,
    spectral: Annotated[
        bool, typer.Option("--spectral", help="Fold spectral norm too, with its vectors as they are stored.")
    ] = False,
    form: Annotated[
        Form, typer.Option("--form", help="plain folds; old and new give weight norm its other names, exactly.")
    ] = Form.plain,
) -> Answers:
    """Fold weight norm and pruning into plain weights."""
    from ckptool.verbs.bake import bake

    def write(file: str, out: str | None, **options: Any) -> Any:
        return bake(file, out, spectral=spectral, form=form.value, **options)

    return write_each("bake", files, target, write)
