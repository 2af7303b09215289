"""Durable checkpoints for Lightning, and resuming with the same random numbers: a plugin and a callback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler, ProgressBar
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

import ckptool
from ckptool.errors import listed
from ckptool.integrations.shared import Fetches
from ckptool.output import make_folder
from ckptool.training import rng
from ckptool.training.batches import has_state
from ckptool.training.run_folder import to_stderr
from ckptool.training.store import SavedState, commit_file, file_digest, newest_whole, read_json, remove_file

_KEY = "ckptool_ranks"
_UNKNOWN = sys.maxsize  # the step of a file without a sidecar: it is looked at first, and named


def newest_checkpoint(folder: str | os.PathLike[str], say: Callable[[str], Any] = to_stderr) -> str | None:
    """The newest whole `.ckpt` of a folder, by its step, for `ckpt_path`; None before the first.

    Files that are damaged or have no sidecar of `DurableCheckpointIO` are skipped, and `say` is called with which, and
    why. Raises `NoneValid` where there are some and none is whole.
    """
    folder = os.fspath(folder)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    checkpoints = []
    for path in (os.path.join(folder, name) for name in names if name.endswith(".ckpt")):
        if os.path.islink(path):
            continue  # last.ckpt may be a link to one of them
        sidecar = read_json(_sidecar(path))
        replaced = (sidecar or {}).get("replaces")
        if isinstance(replaced, dict) and file_digest(path) == replaced.get("sha256"):
            sidecar = replaced  # killed before the new file had the name
        step = (sidecar or {}).get("step")
        checkpoints.append(SavedState(step if isinstance(step, int) else _UNKNOWN, path, sidecar))
    newest = newest_whole(folder, sorted(checkpoints, key=lambda saved: saved.step), say)
    return newest.path if newest else None


def _sidecar(path: str) -> str:
    return path + ".json"


class DurableCheckpointIO(CheckpointIO):
    """Writes a checkpoint under a temporary name, synced, with a sidecar of its sha256, and renames it: `plugins=[…]`.

    Keeps no second copy in memory. Reading executes nothing. To save in the background, from a copy, wrap it in
    Lightning's `AsyncCheckpointIO(DurableCheckpointIO())`. Raises `Unsupported`, naming what could not be read back.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Replaces the file at `path`. Raises `DiskFull`, `FileProblem`, `Unsupported`."""
        path = os.fspath(path)
        make_folder(os.path.dirname(path) or ".")
        header = {"step": int(checkpoint.get("global_step", 0))}
        commit_file(checkpoint, path, _sidecar(path), header, {"epoch": checkpoint.get("epoch")})

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The values of a checkpoint, on the CPU unless told otherwise."""
        values: dict[str, Any] = ckptool.load(os.fspath(path), map_location or "cpu")
        return values

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes a checkpoint, the file before its sidecar."""
        for file in (os.fspath(path), _sidecar(os.fspath(path))):
            remove_file(file)


class ExactResume(Callback):
    """Saves the random states with each checkpoint, and restores them: `callbacks=[ExactResume(), …]`.

    In the middle of an epoch, batches that were trained on are fetched again, but by a loader that saves its place
    (torchdata's StatefulDataLoader). Validation does not change the random numbers of training.
    Raises `Conflict` for another number of processes.
    """

    def __init__(self) -> None:
        self._fetches = Fetches()
        self._trained: rng.State | None = None
        self._noted: set[str] = set()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Has the random states with which batches are fetched noted, from before the first iterator is made."""
        load = trainer.fit_loop._load_combined_loader_states

        def load_and_note() -> None:
            load()
            loader = trainer.fit_loop._combined_loader
            progress = trainer.fit_loop.epoch_progress.current
            facts = {"fetches": self._fetches, "epoch": property(lambda noted: progress.processed)}
            loader.__class__ = type("Noted", (_Noted, type(loader)), facts)

        trainer.fit_loop._load_combined_loader_states = load_and_note

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the random states of all processes."""
        loop = trainer.fit_loop
        progress, loaders = loop.epoch_loop.batch_progress, loop._combined_loader.flattened
        inside = progress.current.ready > 0 and not progress.is_last_batch
        follows = ["ReduceLROnPlateau"] * any(schedule.reduce_on_plateau for schedule in trainer.lr_scheduler_configs)
        if progress.current.completed < progress.current.ready:  # in `on_train_batch_end`
            idle = ExactResume, Checkpoint, ProgressBar
            for each in (pl_module, *(each for each in trainer.callbacks if not isinstance(each, idle))):
                # EarlyStopping may check after a validation instead.
                if is_overridden("on_train_epoch_end", each) and getattr(each, "_check_on_train_epoch_end", True):
                    follows.append(f"on_train_epoch_end of {type(each).__name__}")
        notes = {
            "inside gradient accumulation. The gradients so far are not in it, and a run that resumes from it differs: "
            "save every so many steps, ModelCheckpoint(every_n_train_steps=…)": inside and loop._should_accumulate(),
            f"at the end of an epoch, before {listed(follows)}, which a run that resumes from it leaves out: save in "
            "steps that do not end one, ModelCheckpoint(every_n_train_steps=…)": progress.is_last_batch and follows,
        }
        for words in {words for words, is_so in notes.items() if is_so and trainer.is_global_zero} - self._noted:
            self._noted.add(words)
            to_stderr(f"a checkpoint was saved {words}")
        # A loader without a length is read ahead: its place is behind a batch that was not trained on.
        resumes = all(map(has_state, loaders)) and not getattr(loop._data_fetcher, "batches", None)
        if not (inside and resumes):
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        states = [self._fetches.state(progress.current.ready if inside else 0, again=not resumes)] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, states[0])
        checkpoint[_KEY] = states

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Takes the random states, to be set when the data's iterator is made, after which nothing else draws."""
        if trainer.state.fn != "fit":
            return
        if _KEY in checkpoint:
            self._fetches.resume(checkpoint[_KEY], trainer.global_rank, trainer.world_size, "the checkpoint")
        elif trainer.is_global_zero:
            to_stderr("the checkpoint was saved without this ExactResume: the run continues with other random numbers")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Reminds each ModelCheckpoint that it saved this step, which Lightning forgets: it would save the step again,
        in the middle of the next window of accumulation."""
        for callback in trainer.checkpoint_callbacks if self._fetches.saved else ():
            every = getattr(callback, "_every_n_train_steps", 0)
            if every and trainer.global_step % every == 0:
                callback._last_global_step_saved = trainer.global_step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Sets the epoch's window of accumulation, which Lightning leaves out where it resumes inside an epoch."""
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                callback.on_train_epoch_start(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets the random states again if the run resumes after the end of an epoch: Lightning makes a new iterator."""
        if self._fetches.saved is not None:
            rng.restore(self._fetches.saved["start"], self._fetches.generators)
            self._fetches.saved = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Has ReduceLROnPlateau advance, which Lightning leaves out at the end of an epoch that was resumed inside."""
        trainer.fit_loop._restarting = False

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Notes the random state for after validation."""
        self._trained = rng.capture({})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restores the random state from before validation, which a resumed run may not repeat."""
        if self._trained is not None and not trainer.sanity_checking:
            rng.restore(self._trained, {})


class _Noted(CombinedLoader):
    """The loaders of a Trainer, where each fetch is noted."""

    fetches: Fetches
    epoch: int

    def __iter__(self) -> Any:
        for loader in self.flattened:
            _set_sampler_epoch(loader, self.epoch)  # as Lightning does later, when batches were fetched again
        self.fetches.begin(self.flattened)
        super().__iter__()
        if (saved := self.fetches.saved) and saved["now"] is None:  # of the end of an epoch: others draw before a fetch
            saved["now"] = rng.capture(self.fetches.generators)
        for _ in range(self.fetches.trained):
            next(self)
        return self

    def __next__(self) -> Any:
        self.fetches.fetch()
        return super().__next__()
