"""The user's own files and the amount of data of a run, which are compared when it goes on."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from ckptool.errors import listed, printable
from ckptool.paths import absolute
from ckptool.training.blame import is_theirs
from ckptool.training.config import Config
from ckptool.training.data import Samples
from ckptool.user_code import names_code


def fingerprint(config: Config, data: Samples) -> dict[str, Any]:
    """A digest of each of the user's files that the configuration leads to, and the number of samples."""
    code = {name: digest for name, path in sorted(_files(config)) if (digest := _digest(path))}
    return {"code": code, "samples": data.train_count + len(data.held)}


def differences(before: Any, now: dict[str, Any]) -> list[str]:
    """The changes since then, in words; files that are only in one of the two do not count."""
    if not isinstance(before, dict):
        return []
    old, new = before.get("code"), now["code"]
    changed = [name for name in new if isinstance(old, dict) and old.get(name, new[name]) != new[name]]
    found = [f"{listed([printable(name) for name in changed])} changed"] if changed else []
    if before.get("samples", now["samples"]) != now["samples"]:
        found.append(f"the number of samples is {now['samples']:,}, and was {before['samples']!s:.20}")
    return found


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """The files of the user's own code that are loaded: those that the configuration names, and what lies beside and below them.

    Each under its path from the folder that they are in, which is the same wherever the run goes on.
    """
    names = [config.task, config.data.name, config.data.collate, *config.hooks]
    names += [name for model in config.models.values() for name in (model.name, model.init)]
    places = {name.rpartition(":")[0] for name in names if names_code(name)}
    tops = [place if place.endswith(".py") else _file_of(place.partition(".")[0]) for place in places]
    loaded = {absolute(_file_of(name)) for name in list(sys.modules)}
    for top in filter(None, tops):
        folder = os.path.dirname(absolute(top))
        if os.path.basename(top) == "__init__.py":
            folder = os.path.dirname(folder)
        for path in loaded:
            if path.startswith(folder + os.sep) and is_theirs(path):
                yield os.path.relpath(path, folder), path


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or ""


def _digest(path: str) -> str:
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
