"""The model that a checkpoint is for, as verbs are told of it: `--against TARGET`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ckptool.analysis.targets import Target, is_spec, names_code, of_checkpoint, of_spec
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Source, open_input
from ckptool.checkpoint.paths import may_exist, refused_place
from ckptool.commands import arg
from ckptool.errors import LimitExceeded, UsageError
from ckptool.formats import CheckpointLike, is_in_memory, open_whole, shown, split

MAX_SPEC = 64 << 20  # bytes


def find_target(target: CheckpointLike, at: str | None = None, *, part: bool = False) -> Target:
    """The target that `TARGET` names: a spec file, a checkpoint, or the user's own code; a file that exists wins."""
    if not isinstance(target, (str, os.PathLike)):
        if is_in_memory(target) and not isinstance(target, (Mapping, Checkpoint)):
            from ckptool.bridge.modules import target_of

            return target_of(target, shown(target))
        opened = open_whole(target, at, part=part)
        return of_checkpoint(opened.checkpoint, opened.name, opened.at)
    name = shown(target)
    path, _ = split(name)
    if elsewhere := refused_place(path):
        raise elsewhere
    if not may_exist(path) and names_code(name):
        if at is not None:
            raise UsageError(f"{arg('at')} names a part of a checkpoint", f"{name} is code, and builds one model.")
        from ckptool.bridge.modules import target_of_code

        return replace(target_of_code(name), name=name)
    if not may_exist(path) and "::" not in name and ":" in name:
        what = f"{name} is neither a file nor a name of your own code"
        why = "Your own code is file.py:factory or pkg.module:factory."
        raise UsageError(what, why, f"For example: {arg(against='model.py:build')}")
    if path.endswith(".py") and os.path.isfile(path):
        what = f"{path} is a Python file; name what in it builds the model"
        why = "It is a function without arguments, a class, or a module."
        raise UsageError(what, why, f"For example: {path}:build_model")
    source = open_input(path) if may_exist(path) else None
    if isinstance(source, Source) and is_spec(source.read(0, min(4096, source.size))):
        if source.size > MAX_SPEC:
            raise LimitExceeded(f"{source} is a spec of {source.size:,} bytes", f"At most {MAX_SPEC:,} are read.")
        return of_spec(source.read(0, source.size), name)
    opened = open_whole(target, at, part=part)
    return of_checkpoint(opened.checkpoint, name, opened.at)
