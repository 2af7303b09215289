"""Durable checkpoints for Lightning, and resuming with the same random numbers: a plugin and a callback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import CheckpointIO

import ckptool
from ckptool.errors import Conflict, UsageError, counted, printable
from ckptool.output import make_folder
from ckptool.training import rng
from ckptool.training.batches import generators_of, has_state
from ckptool.training.run_folder import to_stderr
from ckptool.training.store import SavedState, check, commit_file, file_digest, newest_whole, read_json, remove_file

_KEY = "ckptool"
_UNKNOWN = sys.maxsize  # the step of a file without a sidecar: it is looked at first, and named


def newest_checkpoint(folder: str | os.PathLike[str], say: Callable[[str], Any] = to_stderr) -> str | None:
    """The newest whole `.ckpt` of a folder, by its step, for `ckpt_path`; None before the first.

    Files that are damaged or have no sidecar of `DurableCheckpointIO` are skipped, and `say` is called with which, and
    why. Raises `NoneValid` where there are some and none is whole.
    """
    folder = os.fspath(folder)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in names if name.endswith(".ckpt")]
    there = [_saved(path) for path in paths if not os.path.islink(path)]  # last.ckpt may be a link to one of them
    newest = newest_whole(
        folder,
        sorted(there, key=lambda saved: saved.step),
        lambda saved: check(saved, "full"),
        lambda saved, error: say(f"skipped {printable(saved.path)}: {error.what}"),
    )
    return newest.path if newest else None


def _saved(path: str) -> SavedState:
    sidecar = read_json(_sidecar(path))
    old = (sidecar or {}).get("replaces")
    if isinstance(old, dict) and file_digest(path) == old.get("sha256"):
        sidecar = old  # killed before the new file had the name
    step = (sidecar or {}).get("step")
    return SavedState(step if isinstance(step, int) else _UNKNOWN, path, sidecar)


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
        known: dict[str, Any] = {"step": int(checkpoint.get("global_step", 0))}
        replaced = read_json(_sidecar(path)) if os.path.lexists(path) else None
        if replaced is not None:  # until the new one has its name, the sidecar belongs to both
            known["replaces"] = {key: replaced.get(key) for key in ("step", "bytes", "sha256")}
        commit_file(checkpoint, path, _sidecar(path), known, {"epoch": checkpoint.get("epoch")})

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The values of a checkpoint, on the CPU unless told otherwise."""
        found: dict[str, Any] = ckptool.load(os.fspath(path), map_location or "cpu")
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes a checkpoint, the file before its sidecar."""
        for each in (os.fspath(path), _sidecar(os.fspath(path))):
            remove_file(each)


class ExactResume(Callback):
    """Saves the random states with each checkpoint, and restores them: `callbacks=[ExactResume(), …]`.

    In the middle of an epoch this needs a train_dataloader that saves its place (torchdata's StatefulDataLoader);
    others are refused there, both in saving and in resuming. Validation does not change the random numbers of training.
    Raises `Conflict` for another number of processes.
    """

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None
        self._trained: rng.State | None = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the random states of all processes."""
        if self._saved:  # nothing was trained since
            checkpoint[_KEY] = self._saved
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        middle = progress.current.ready > 0 and not progress.is_last_batch
        if middle:
            _refuse_loaders(trainer)
        else:  # a loader with a state would go on from the end of its epoch, with other draws than one that begins
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        states = [rng.capture(_generators(trainer))] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, states[0])
        checkpoint[_KEY] = {"rng": states, "middle": middle}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Takes the random states, to be set later: until the data's iterator exists others draw."""
        self._saved = checkpoint.get(_KEY) if trainer.state.fn == "fit" else None
        if self._saved and len(self._saved["rng"]) != trainer.world_size:
            saved = counted(len(self._saved["rng"]), "process", "processes")
            raise Conflict(
                f"the checkpoint was saved by {saved}, and this run has {trainer.world_size}",
                "Random states belong to a number of processes.",
                f"Trainer(devices={len(self._saved['rng'])}); or leave out ExactResume",
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets them, once the iterator of an epoch exists; an epoch that begins gets another, which draws its order."""
        if self._saved and self._saved["middle"]:
            _refuse_loaders(trainer)
            self._restore(trainer, {})
        elif self._saved:
            self._restore(trainer, _generators(trainer))
            iter(trainer.fit_loop._data_fetcher)
        _leave_random_states(trainer.fit_loop.epoch_loop.val_loop)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets them again where the run goes on after the end of an epoch, and makes another iterator."""
        if self._saved and not self._saved["middle"]:
            self._restore(trainer, _generators(trainer))

    def on_train_batch_start(self, *args: Any) -> None:
        """Drops them."""
        self._saved = None

    def _restore(self, trainer: Any, generators: dict[str, Any]) -> None:
        if self._saved:
            rng.restore(self._saved["rng"][trainer.global_rank], generators)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Notes the random state for after validation."""
        self._trained = rng.capture({})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restores the random state from before validation, which a resumed run may not repeat."""
        if self._trained is not None and not trainer.sanity_checking:
            rng.restore(self._trained, {})


def _generators(trainer: Any) -> dict[str, Any]:
    """The generators that the train_dataloader draws its order from."""
    loaders = enumerate(trainer.fit_loop._combined_loader.flattened)
    return {f"{number}.{name}": each for number, loader in loaders for name, each in generators_of(loader).items()}


def _leave_random_states(loop: Any) -> None:
    """Keeps a resumed run from drawing random numbers when it skips a finished validation, where there is no hook."""
    passed = loop.increment_progress_to_evaluation_end

    def without_draws() -> None:
        with rng.forked({}):
            passed()

    loop.increment_progress_to_evaluation_end = without_draws


def _refuse_loaders(trainer: Any) -> None:
    """Raises `UsageError` for loaders that do not save their place in the middle of an epoch."""
    for loader in trainer.fit_loop._combined_loader.flattened:
        if not has_state(loader):
            raise UsageError(
                f"the train_dataloader is a {type(loader).__name__}, which does not save its place in an epoch",
                "A resumed run would begin the epoch again, and see some samples twice and others never.",
                "Write: from torchdata.stateful_dataloader import StatefulDataLoader, and use that; "
                "or save at the end of epochs: ModelCheckpoint(save_on_train_epoch_end=True)",
            )
    if getattr(trainer.fit_loop._data_fetcher, "batches", None):
        raise UsageError(
            "the train_dataloader has no length, and Lightning reads it one batch ahead",
            "The saved place would be after a batch that was not trained on, which a resumed run would skip.",
            "Give the data set a __len__; or save at the end of epochs: ModelCheckpoint(save_on_train_epoch_end=True)",
        )
