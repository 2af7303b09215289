"""`doctor`: what a file is, why it does not load, and the commands that fix it; or the fixed file."""

from __future__ import annotations

import os
from typing import Annotated, Any

from ckptool.analysis.findings import Diagnosis
from ckptool.commands import FILE, OUT, arg, argument, command, option, verb
from ckptool.errors import CkptoolError, UsageError
from ckptool.formats import CheckpointLike, open_file, shown
from ckptool.verbs._options import AGAINST, Out, standard_input
from ckptool.verbs._save import SaveInPlace, Unpack, Written, change_of


def _message(_: str, text: str) -> str:
    return standard_input() if text == "-" else text


@verb(
    ("ckptool doctor model.pt", "why it does not load, and what to type"),
    ("ckptool doctor model.pt --against other.pt", "and why it does not fit this model"),
    ("ckptool doctor model.pt --fix -o fixed.pt", "only its weights, in a file that loads anywhere"),
    ("python train.py 2>&1 | ckptool doctor --error -", "what an error message means"),
)
def doctor(
    file: Annotated[
        CheckpointLike | None,
        argument("FILE", "Checkpoints that do not load, or FILE#ADDRESS for a part of one.", each=True),
    ] = None,
    out: Out = None,
    *,
    fix: Annotated[
        bool, option("--fix", "Apply all fixes in one pass, and write weights that load; -n only shows the steps.")
    ] = False,
    dtype: Annotated[object, option("--dtype DTYPE", "With --fix: cast them, too; bf16 halves the size.")] = None,
    against: Annotated[CheckpointLike | None, AGAINST] = None,
    error: Annotated[
        str | None,
        option("--error TEXT|-", "Explain this error message; -: read it from standard input.", parse=_message),
    ] = None,
    **options: Unpack[SaveInPlace],
) -> Diagnosis | Written | Any:
    """Diagnoses a checkpoint: what it is, why stock `torch.load` or a model refuses it, and the commands that fix it.

    `fix` does what these commands do, and writes the result once: the weights at the top of a file that
    `torch.load(weights_only=True)` loads, and with `against` only if the model takes them. In place the file keeps its
    tree. What is in memory is given back.
    An error message without a file is answered from that alone. The model may be itself, a module.
    Raises `FileProblem` where the file cannot be read at all; what is wrong with its contents is a finding, and with
    `fix`, where no command mends it, `Unsupported`.
    """
    from ckptool.analysis.findings import of_error_text  # what only the work needs, and not the help
    from ckptool.verbs._diagnosis import of_opened, of_unopened
    from ckptool.verbs._target import find_target

    path = shown(file) if isinstance(file, (str, os.PathLike)) else ""
    if error is not None:
        if fix:
            what = f"doctor was given both {arg('error')} and {arg('fix')}"
            raise UsageError(what, "A message names no values to write.", "Give the file alone.")
        return of_error_text(error, path)
    if file is None or file == "":
        raise UsageError("doctor was given nothing to look at", "", f"For example: {command('doctor', 'model.pt')}")
    asked: Any = {"out": out, "dtype": dtype, **options}
    if not fix and (unused := [name for name, value in asked.items() if value and name != "progress"]):
        what = f"doctor was given {arg(unused[0])} without {arg('fix')}"
        raise UsageError(what, "It only looks.", f"To write: {command('doctor', FILE, fix=True, out=OUT)}")
    change = change_of("doctor", out, options, file, in_place=True) if fix else None
    target = find_target(against).as_it_loads if against is not None else None
    if change is not None:
        from ckptool.verbs._fix import fixed

        return fixed(file, change, target, {"against": against, "dtype": dtype})
    try:
        return of_opened(open_file(file), target)
    except CkptoolError as problem:
        return of_unopened(problem, path)
