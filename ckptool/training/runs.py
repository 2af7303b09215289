"""The runs of the harness: a run's folder with the configuration in its run.yaml, as it was last changed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptool.errors import UsageError
from ckptool.training import CONFIG, LOOP, configfile, run_folder
from ckptool.training.config import Config
from ckptool.training.run_folder import last_config, recorded, values_of
from ckptool.training.store import Retention, RunFolder


def create(config: Config) -> RunFolder:
    """A new run in the folder that its configuration names. Raises `Conflict` where there is one already."""
    return run_folder.create(config.run, config.dumped(), retention_of(config))


def reopen(folder: str, config: Config, *, write: bool = True) -> RunFolder:
    """An existing run, with a configuration that fits it. Raises `Conflict` where its files are something else's."""
    return run_folder.reopen(folder, retention_of(config), write=write)


def reopen_to_prune(folder: str, changes: Sequence[str], *, write: bool) -> RunFolder:
    """An existing run of the harness or of `ckptool.Run`, its retention changed for this once."""
    number, text = recorded(folder)
    found = values_of(text)
    if LOOP not in found:
        _, config = read_config(folder)
        config = configfile.changed({**config.dumped(), "run": folder}, changes, os.path.join(folder, CONFIG))
        return reopen(folder, config, write=write)
    # The rules of a loop are written there as those of a configuration.
    _, values = last_config(folder, number, found)
    kept = {"run": folder, "train": {"steps": 1}, "save": values.get("save", {}), "eval": values.get("eval", {})}
    config = configfile.changed(kept, changes, os.path.join(folder, CONFIG))
    return run_folder.reopen(folder, retention_of(config), write=write)


def retention_of(config: Config) -> Retention:
    """The checkpoints that a configuration wants to keep."""
    save, by = config.save, config.eval
    return Retention(save.keep_last, save.keep_best, save.keep_every, by.metric, by.mode)


def read_config(folder: str) -> tuple[str, Config]:
    """The id of a run, and its configuration as last changed. Raises `UsageError` for a folder that is no run."""
    number, config, _ = recorded_config(folder)
    return number, config


def recorded_config(folder: str) -> tuple[str, Config, int]:
    """The id of a run, its configuration, and how often that was changed. Raises what `read_config` does."""
    number, text = recorded(folder)
    path = os.path.join(folder, CONFIG)
    if script := values_of(text).get(LOOP):
        raise UsageError(
            f"{folder} is a run of ckptool.Run in {script!s}, not of `ckptool train`",
            "Its model and its data are made by that script.",
            "Run the script again: it resumes by itself.",
        )
    config = configfile.parsed(text, path)
    revision, values = last_config(folder, number, {})
    return number, configfile.checked({**values, "run": config.run}, path) if values else config, revision
