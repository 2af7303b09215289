"""Shared by the verbs of the training harness: the check that it is installed, and a configuration from any input."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from ckptool.commands import Watched, argument, repeated
from ckptool.errors import MissingExtra

if TYPE_CHECKING:
    from ckptool.training.config import Config as Config
else:
    Config = type("Config", (), {})  # pydantic's, which only training needs

PathLike = str | os.PathLike[str]
Say = Callable[[str], Any]
Set = Annotated[
    str | Sequence[str], repeated("--set KEY=VALUE", "Change a key of the configuration: train.steps=3000.")
]
Folder = Annotated[PathLike, argument("RUN", "The folder of a run.")]
RunFolder = Annotated[PathLike, argument("RUN", "The folder of a run, not FILE#ADDRESS.")]
Logged = Annotated[Any, Watched("training")]
Lines = Annotated[Say | None, Watched("lines")]


def check_harness() -> None:
    """Raises `MissingExtra` where torch or pydantic is not installed."""
    for name in ("torch", "pydantic"):
        if find_spec(name) is None:
            raise MissingExtra(f"training needs {name}, which is not installed", "", "pip install 'ckptool[torch]'")


def configuration(config: PathLike | dict[str, Any] | Config, changes: Sequence[str]) -> Config:
    """A configuration from a file, a dictionary of the same keys, or one that was made; with `KEY=VALUE` changes."""
    check_harness()
    from ckptool.training import configfile
    from ckptool.training.config import Config

    if isinstance(config, Config):
        config = config.dumped()
    if isinstance(config, dict):
        return configfile.changed(config, changes)
    return configfile.read(os.fspath(config), changes)
