"""`doctor`: what a file is, why it does not load, and the commands that fix it."""

from __future__ import annotations

import os
from typing import Annotated

from ckptool.analysis.doctor import Diagnosis, Values, of_checkpoint, of_error_text, of_folder, of_problem
from ckptool.analysis.inspect import Listing, listing
from ckptool.analysis.targets import Target
from ckptool.checkpoint import Checkpoint
from ckptool.commands import command
from ckptool.errors import CkptoolError, Conflict, FileProblem, NotACheckpoint, UsageError
from ckptool.formats import named
from ckptool.formats.opening import CheckpointLike, Opened, open_file
from ckptool.options import argument, option, verb
from ckptool.pickles.weights_only import weights_only
from ckptool.training import is_run
from ckptool.transforms.flatten import lost_tensors
from ckptool.verbs._options import standard_input


def _read(text: str) -> str:
    return standard_input() if text == "-" else text


@verb(
    ("ckptool doctor model.pt", "why it does not load, and what to type"),
    ("ckptool doctor model.pt --against other.pt", "and why it does not fit this model"),
    ("python train.py 2>&1 | ckptool doctor --error -", "what an error message means"),
)
def doctor(
    file: Annotated[
        CheckpointLike | None,
        argument("FILE", "The checkpoint that does not load, or FILE#ADDRESS for a part of it."),
    ] = None,
    *,
    against: Annotated[
        CheckpointLike | None,
        option("--against TARGET", "The model to load it into: a checkpoint, a spec, or file.py:factory."),
    ] = None,
    error: Annotated[
        str | None, option("--error TEXT|-", "Explain this error message; - reads it from standard input.", parse=_read)
    ] = None,
) -> Diagnosis:
    """Diagnoses a checkpoint: what it is, why stock `torch.load` or a model refuses it, and the commands that fix it.

    against: the model that it is to be loaded into: itself, a checkpoint of it, a spec, or `file.py:factory`, your own
    code.
    error: the text of an error; without a file it is answered from that alone.
    Raises `FileProblem` where the file cannot be read at all; what is wrong with its contents is a finding.
    """
    path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
    if error is not None:
        return of_error_text(error, path, _devices(file) if file else None)
    if file is None or file == "":
        raise UsageError("doctor was given nothing to look at", "", f"For example: {command('doctor', 'model.pt')}")
    target = target_of(against) if against is not None else None
    try:
        return of_opened(open_file(file), target)
    except CkptoolError as problem:
        return of_unopened(problem, path)


def _devices(file: CheckpointLike) -> list[str] | None:
    """The devices that a file's tensors are tagged with, but for the CPU; None where it cannot be opened."""
    try:
        found = listing(open_file(file).taken)
    except CkptoolError:
        return None
    return list(dict.fromkeys(row.tensor.location for row in found.tensors if row.tensor.location != "cpu"))


def target_of(against: CheckpointLike) -> Target:
    """The model that a checkpoint is to be loaded into."""
    from ckptool.verbs._target import find_target

    return find_target(against).as_it_loads


def of_opened(opened: Opened, target: Target | None = None, known: Listing | None = None) -> Diagnosis:
    """The diagnosis of a checkpoint that is open already. known: its listing, if that is made."""
    checkpoint = opened.taken
    found = known if known is not None and opened.at is None else listing(checkpoint)
    refused = _values(checkpoint, found)
    if target is None:
        return of_checkpoint(checkpoint, found, opened.path, refused)
    from ckptool.verbs.layouts import translation_to  # all layouts, which no other diagnosis needs

    return of_checkpoint(checkpoint, found, opened.path, refused, target, translation_to)


def of_unopened(problem: CkptoolError, path: str) -> Diagnosis:
    """The diagnosis of what could not be opened. Raises the problem where the file cannot be read at all."""
    if isinstance(problem, FileProblem) and not os.path.islink(path):
        raise problem
    if os.path.isdir(path) and isinstance(problem, NotACheckpoint):
        from ckptool.analysis.scan import scan

        return of_folder(problem, path, is_run(path), scan(path).latest)
    return of_problem(problem, path)


def _values(checkpoint: Checkpoint, found: Listing) -> Values:
    """The values that `weights_only` refuses. Lossy: `convert --weights-only` would write nothing, or lose a tensor."""
    try:
        plain = weights_only(checkpoint)
    except Conflict:
        refused, lossy = ["keys that would become the same text"], True
        dropped: tuple[str, ...] = ()
    else:
        refused = plain.refused
        dropped = tuple(place for place, _ in plain.dropped)
        nothing = plain.checkpoint.tree is None and checkpoint.tree is not None
        lossy = nothing or bool(lost_tensors(checkpoint.tree, plain.checkpoint.tree))
    asked = lossy or named(found.container).is_folder
    weights = [root for root in found.roots if root.is_model and root.module is None] if asked else []
    parts = [(root.address, weights_only(Checkpoint(root.node, found.container))) for root in weights]
    plain_parts = frozenset(place for place, part in parts if not (part.converted or part.dropped))
    return Values(tuple(refused), lossy, dropped, plain_parts)
