"""`spec`: a model's names, shapes, types and ties, to check checkpoints against without its values or its code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from ckptool.analysis.spec import Spec, is_spec, parse_spec
from ckptool.analysis.targets import Target, names_code, of_checkpoint
from ckptool.checkpoint import Checkpoint, InlineBytes
from ckptool.checkpoint.files import Source, open_input
from ckptool.checkpoint.paths import refused_place
from ckptool.checkpoint.plan import Plan
from ckptool.errors import LimitExceeded, UsageError
from ckptool.formats.opening import CheckpointLike, in_memory, open_whole, shown, split
from ckptool.options import argument, verb
from ckptool.output import check_target, replace_file
from ckptool.verbs._options import At, DryRun, IsPart, Out, Overwrite

MAX_SPEC = 64 << 20  # bytes


@verb(("ckptool spec net.py:build -o model.spec.json", "for warm-start --against, without torch"))
def spec(
    target: Annotated[
        CheckpointLike,
        argument("TARGET", "A checkpoint, FILE#ADDRESS for a part of it, file.py:factory, or pkg.module:factory."),
    ],
    out: Out = None,
    *,
    at: At = None,
    part: IsPart = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Spec:
    """Names, shapes, types, ties and kinds of a model's tensors, written to `out` as JSON (`ckptool.spec/1`).

    target: a module, a checkpoint (or `FILE#ADDRESS`), `pkg.module:factory` or `file.py:factory` (needs torch), or
    another spec.  at: the part of a checkpoint.  part: take also one that is only a rank's share or one shard.
    overwrite: replace an existing `out`.  dry_run: write nothing.
    Raises `UserCodeFailed` with the traceback where the factory raises, and what opening a checkpoint raises.
    """
    from ckptool.render.spec import spec_file

    found = Spec(find_target(target, at, part=part), os.fspath(out) if out is not None else "", dry_run)
    content = spec_file(found)
    if out is not None:
        if dry_run:
            check_target(out, overwrite=overwrite)
        else:
            replace_file(Plan({"": [InlineBytes(content)]}), out, overwrite=overwrite)
    return found


def find_target(target: CheckpointLike, at: str | None = None, *, part: bool = False) -> Target:
    """The target that `TARGET` names: a spec file, a checkpoint, or the user's own code; a file that exists wins."""
    if not isinstance(target, (str, os.PathLike)):
        return _of_objects(target, at, part)
    name = os.fspath(target)
    path, _ = split(name)
    if elsewhere := refused_place(path):
        raise elsewhere
    if not os.path.lexists(path) and names_code(name):
        return _of_code(name, at)
    if not os.path.lexists(path) and "::" not in name and ":" in name:
        raise UsageError(
            f"{name} is neither a file nor a name of your own code",
            "Your own code is file.py:factory or pkg.module:factory.",
            "For example: --against model.py:build",
        )
    if path.endswith(".py") and os.path.isfile(path):
        raise UsageError(
            f"{path} is a Python file; name what in it builds the model",
            "It is a function without arguments, a class, or a module.",
            f"For example: {path}:build_model",
        )
    read = _spec_in(path) if os.path.isfile(path) else None
    if read is not None:
        return parse_spec(read, name)
    opened = open_whole(target, at, part=part)
    return of_checkpoint(opened.checkpoint, name, opened.at)


def _of_objects(given: CheckpointLike, at: str | None, part: bool) -> Target:
    """The target that is a module, a state dict in memory, an open checkpoint or file."""
    if in_memory(given) and not isinstance(given, (Mapping, Checkpoint)):
        from ckptool.verbs._live import target_of

        return target_of(given, shown(given))
    opened = open_whole(given, at, part=part)
    return of_checkpoint(opened.checkpoint, opened.name, opened.at)


def _spec_in(path: str) -> bytes | None:
    """The bytes of a spec file; None for any other."""
    source = open_input(path)
    if not isinstance(source, Source) or not is_spec(source.read(0, min(4096, source.size))):
        return None
    if source.size > MAX_SPEC:
        raise LimitExceeded(f"{source} is a spec of {source.size:,} bytes", f"At most {MAX_SPEC:,} are read.")
    return source.read(0, source.size)


def _of_code(name: str, at: str | None) -> Target:
    if at is not None:
        raise UsageError("--at names a part of a checkpoint", f"{name} is code, and builds one model.")
    from ckptool.verbs._live import target_of_code

    return replace(target_of_code(name), name=name)
