"""What a run is made of besides its configuration: the user's own files, and how much data there is. Told when it is not what it was."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from ckptool.errors import listed, printable
from ckptool.training.config import Config
from ckptool.training.data import Samples
from ckptool.user_code import names_code


def fingerprint(config: Config, data: Samples) -> dict[str, Any]:
    """A digest of each of the user's files that the configuration leads to, and the number of samples."""
    code = {name: digest for name, path in sorted(_files(config)) if (digest := _digest(path))}
    return {"code": code, "samples": data.train_count + len(data.held)}


def differences(before: Any, now: dict[str, Any]) -> list[str]:
    """What is not as it was, in words; nothing is said of files that are only in one of the two."""
    if not isinstance(before, dict):
        return []
    old, new = before.get("code"), now["code"]
    changed = [name for name in new if isinstance(old, dict) and old.get(name, new[name]) != new[name]]
    found = [f"{listed([printable(name) for name in changed])} changed"] if changed else []
    if before.get("samples", now["samples"]) != now["samples"]:
        found.append(f"there are {now['samples']:,} samples, and were {before['samples']!s:.20}")
    return found


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """The files of the user's own code, each under the name that it has wherever the run goes on."""
    names = [config.task, config.data.name, config.data.collate, *config.hooks]
    names += [name for model in config.models.values() for name in (model.name, model.init)]
    for place in {name.rpartition(":")[0] for name in names if names_code(name)}:
        if place.endswith(".py"):
            yield os.path.basename(place), place
            continue
        package = place.partition(".")[0]
        for name, module in list(sys.modules.items()):
            if name == package or name.startswith(package + "."):
                yield name, getattr(module, "__file__", None) or ""


def _digest(path: str) -> str:
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
