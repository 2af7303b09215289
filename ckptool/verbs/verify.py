"""`verify`: is a checkpoint what it was when it was written?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from ckptool.analysis.digests import compared, digests_file, read_digests, root_digests
from ckptool.analysis.verify import Verification, verified
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Input
from ckptool.commands import option, verb
from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import UsageError, counted
from ckptool.formats import PathLike, is_in_memory, open_file, open_source
from ckptool.output import replace_file
from ckptool.verbs._options import At, Files, Jobs, Overwrite, check_text


def _words(file: Sequence[str], write_digest: str | None = None) -> dict[str, Any]:
    if write_digest is not None and len(file) > 1:
        what = f"the digests of {counted(len(file), 'file')} cannot be saved to one file"
        raise UsageError(what, "A file of digests describes one set of weights.", "Verify them one by one.")
    return {}


@verb(
    ("ckptool verify model.pt --finite", "every checksum, NaN and Inf"),
    ("ckptool verify model.pt --write-digest model.digests", "for a later verify --against model.digests"),
    from_words=_words,
)
def verify(
    file: Files,
    *,
    at: At = None,
    finite: Annotated[bool, option("--finite", "Look for NaN and Inf as well.")] = False,
    digest: Annotated[bool, option("--digest", "Print a digest of each tensor of the weights, and of all.")] = False,
    write_digest: Annotated[PathLike | None, option("--write-digest DIGESTS", "Save the digests to this file.")] = None,
    against: Annotated[PathLike | None, option("--against DIGESTS", "Compare with digests of any container.")] = None,
    overwrite: Overwrite = False,
    jobs: Jobs = 1,
) -> Verification:
    """Reads all of a checkpoint and reports everything that is wrong with it: checksums, headers, missing data.

    Where a container stores no checksums the report says so. Digests are those of one set of weights: the only one, the
    model beside its EMA, or the part `at`.
    Raises what opening raises for a file that is not a checkpoint or cannot be read, and `UsageError` where several
    sets of weights could be meant.
    """
    source: tuple[Input | Checkpoint, str | None]
    source = (open_file(file).checkpoint, None) if is_in_memory(file) else open_source(file)
    at = at if at is not None else source[1]
    expected = read_digests(against) if against is not None else None
    if write_digest is not None:
        check_text(write_digest, overwrite=overwrite)
    report, checkpoint = verified(source[0], at, finite=finite, jobs=jobs)
    wants_digests = digest or write_digest is not None or expected is not None
    if checkpoint is None or report.problems or not wants_digests:  # digests of damaged values would only be believed
        return report
    if at is None and checkpoint.tensors_only and isinstance(checkpoint.tree, dict):
        digests = root_digests(checkpoint.tree)
    else:
        root, remark = one_state_dict(checkpoint, at)
        if root.arrays is not None:
            origin = f"{root.detail}, whose digests equal those of tensors with the same values"
            remark = f"{remark}; {origin}" if remark else origin
        digests = root_digests(root.node, root.address, remark)
    report = replace(report, digest=digests)
    if write_digest is not None:
        inputs = [checkpoint.source] if checkpoint.source else []
        notes = replace_file(digests_file(digests), write_digest, overwrite=overwrite, inputs=inputs)
        report = replace(report, notes=report.notes + notes, written=os.fspath(write_digest))
    if expected is not None and against is not None:
        report = replace(report, against=compared(os.fspath(against), expected, digests))
    return report
