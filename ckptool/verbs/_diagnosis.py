"""The diagnosis of a file, for `doctor` and the page of `report`."""

from __future__ import annotations

import os

from ckptool.analysis.doctor import RefusedValues, of_checkpoint, of_folder, of_problem
from ckptool.analysis.findings import Diagnosis
from ckptool.analysis.inspect import Listing, listing
from ckptool.analysis.targets import Target
from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptoolError, Conflict, FileProblem, NotACheckpoint
from ckptool.formats import named
from ckptool.formats.opening import Opened
from ckptool.pickles.weights_only import weights_only
from ckptool.training import is_run
from ckptool.transforms.flatten import lost_tensors


def of_opened(opened: Opened, target: Target | None = None, known: Listing | None = None) -> Diagnosis:
    """The diagnosis of a checkpoint that is open already. known: its listing, if that is made.

    What `weights_only` refuses is lossy where `convert --weights-only` would write nothing, or lose a tensor.
    """
    checkpoint = opened.taken
    found = known if known is not None and opened.at is None else listing(checkpoint)
    try:
        plain = weights_only(checkpoint)
    except Conflict:
        refused, lossy = ["keys that would become the same text"], True
        dropped: tuple[str, ...] = ()
    else:
        refused, dropped = plain.refused, tuple(place for place, _ in plain.dropped)
        nothing = plain.checkpoint.tree is None and checkpoint.tree is not None
        lossy = nothing or bool(lost_tensors(checkpoint.tree, plain.checkpoint.tree))
    asked = lossy or named(found.container).is_folder
    weights = [root for root in found.roots if root.is_model and root.module is None] if asked else []
    parts = [(root.address, weights_only(Checkpoint(root.node, found.container))) for root in weights]
    plain_parts = frozenset(place for place, part in parts if not (part.converted or part.dropped))
    values = RefusedValues(tuple(refused), lossy, dropped, plain_parts)
    if target is None:
        return of_checkpoint(checkpoint, found, opened.path, values)
    from ckptool.names.layout import translation_to  # all layouts, which no other diagnosis needs

    return of_checkpoint(checkpoint, found, opened.path, values, target, translation_to)


def of_unopened(problem: CkptoolError, path: str) -> Diagnosis:
    """The diagnosis of what could not be opened. Raises the problem where the file cannot be read at all."""
    if isinstance(problem, FileProblem) and not os.path.islink(path):
        raise problem
    if os.path.isdir(path) and isinstance(problem, NotACheckpoint):
        from ckptool.analysis.scan import scan

        return of_folder(problem, path, is_run(path), scan(path).latest)
    return of_problem(problem, path)
