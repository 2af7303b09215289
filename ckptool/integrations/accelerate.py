"""Atomic checkpoints by accelerate's `save_state`, and batches that resume at their place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from ckptool.errors import Conflict, UsageError, counted
from ckptool.integrations import checkpoint_folders as folders
from ckptool.output import make_folder
from ckptool.training import rng
from ckptool.training.batches import Batches, Position, generators_of
from ckptool.training.lock import Lock
from ckptool.training.run_folder import to_stderr
from ckptool.training.saving import loaded, to_cpu
from ckptool.training.state import Objects
from ckptool.training.store import commit_file

_NAME = re.compile(r"checkpoint_(\d{1,18})")
_OURS = "ckptool.pt"


class AcceleratorCheckpoints:
    """The checkpoints of a loop with an `Accelerator`; make it after `accelerator.prepare`; it resumes from the newest.

        checkpoints = AcceleratorCheckpoints(accelerator, "checkpoints", keep_last=2, ema=ema)
        for step, batch in checkpoints.batches(loader, epochs=5):
            ...
            if step % 500 == 0:
                checkpoints.save()

    `accelerator.save_state` writes into a hidden folder, which is synced, described by a sidecar of digests and
    renamed, and only then are older ones deleted. A damaged newest one is skipped, and `say` is called with why.
    folder: by default `checkpoints` in the accelerator's project_dir, as accelerate has it.
    keep_last: how many to keep; None for the `total_limit` of the accelerator's ProjectConfiguration, or all.
    objects: others with `state_dict()` and `load_state_dict()`, and generators, saved by name, not by position.
    Every process makes it and calls `save`. Raises `Conflict` where another process writes the folder or a saved state
    does not fit, `NoneValid` where checkpoints exist and none is whole.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: str | os.PathLike[str] | None = None,
        *,
        keep_last: int | None = None,
        say: Callable[[str], Any] = to_stderr,
        **objects: Any,
    ) -> None:
        project = accelerator.project_configuration
        self.accelerator, self.objects, self.position = accelerator, Objects(), Position()
        self.folder = os.fspath(folder or os.path.join(project.project_dir or ".", "checkpoints"))
        self.keep_last = project.total_limit if keep_last is None else keep_last
        self.step, self._random, self._before = 0, None, None
        self._lock: Lock | None = None
        self._epochs: _Epochs | None = None
        for name, value in objects.items():
            self.objects.add(name, value)
        self._generators = dict(self.objects.generators)
        if accelerator.is_main_process:
            make_folder(self.folder)
            self._lock = Lock(self.folder, "another folder")
        accelerator.wait_for_everyone()
        newest = folders.newest_folder(self.folder, _NAME, say if accelerator.is_main_process else lambda text: None)
        self.resumed = newest is not None
        if newest is not None:
            self._load(newest.path)

    def batches(self, loader: Any, *, epochs: int | None = None, steps: int | None = None) -> Iterator[tuple[int, Any]]:
        """The number of each step, from 1, and its batch; resumes in the middle of an epoch.

        loader: what `accelerator.prepare` returned. Batches already trained on are fetched again, so that the data set
        draws the same random numbers.
        """
        if (steps is None) == (epochs is None):
            raise UsageError("batches takes exactly one of steps and epochs", "", "batches(loader, epochs=5)")
        self._generators = {**self.objects.generators, **generators_of(loader)}
        shared = getattr(loader, "synchronized_generator", None)
        if rng.is_generator(shared):
            self._generators["shared"] = shared
        self._epochs = _Epochs(loader, self.position, self._before)
        found = Batches(self._epochs, self.position, self._generators, None, rng.capture, lambda: self.step)
        for batch in found.epochs(epochs, self._random) if steps is None or self.step < steps else ():
            self.step += 1
            yield self.step, batch
            if steps is not None and self.step >= steps:
                break

    def save(self) -> None:
        """Saves the state after this step; all processes take part. Raises `DiskFull`, `FileProblem`."""
        accelerator, main = self.accelerator, self.accelerator.is_main_process
        if not accelerator.sync_gradients:
            raise UsageError(
                "save() was called inside gradient accumulation",
                "The gradients accumulated so far are in no checkpoint.",
                "Call it after an optimizer step: if accelerator.sync_gradients: checkpoints.save()",
            )
        target = os.path.join(self.folder, f"checkpoint_{self.step}")
        temporary = folders.staged(target, make=main)
        accelerator.wait_for_everyone()
        project = accelerator.project_configuration
        named, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
        try:
            accelerator.save_state(temporary)
        finally:
            project.automatic_checkpoint_naming, project.iteration = named, self.step + 1
        before = self._epochs.before if self._epochs else None
        own = {"rng": rng.capture(self._generators), "before": before, **self.position.rank_state()}
        ranks = gather_object([own])
        if main:
            tree = {"step": self.step, "data_state": self.position.shared_state(), "ranks": ranks}
            tree |= {**self.objects.state({}), "generators": sorted(self.objects.generators)}
            self._commit(to_cpu(tree), temporary, target)
        accelerator.wait_for_everyone()

    def _commit(self, tree: dict[str, Any], temporary: str, target: str) -> None:
        ours = os.path.join(temporary, _OURS)
        commit_file(tree, ours, ours + ".json", {"step": self.step}, {})
        for name in os.listdir(temporary):
            if name.startswith("dl_state_dict"):  # `batches` goes back to the place by itself
                os.unlink(os.path.join(temporary, name))
        folders.commit_folder(temporary, target, self.step)
        others = [saved for saved in folders.saved_folders(self.folder, _NAME) if saved.step != self.step]
        for saved in others[: max(0, len(others) + 1 - self.keep_last)] if self.keep_last else ():
            folders.remove_checkpoint(saved.path)

    def _load(self, path: str) -> None:
        rank = self.accelerator.process_index
        tree = loaded(os.path.join(path, _OURS))
        if len(tree["ranks"]) != self.accelerator.num_processes:
            raise Conflict(
                f"{path} was saved by {counted(len(tree['ranks']), 'process', 'processes')}",
                f"Their random states and places in the data do not fit {self.accelerator.num_processes}.",
                f"Start as many: accelerate launch --num_processes {len(tree['ranks'])}",
            )
        self.objects.refuse_others(tree, path)
        self.accelerator.load_state(path)
        self.objects.restore(tree, path)
        own = to_cpu(tree["ranks"][rank], copied=True)
        self.step, self._random, self._before = tree["step"], own["rng"], own["before"]
        self.position.restore(tree["data_state"], own)
        self.accelerator.project_configuration.iteration = self.step + 1

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.release()


class _Epochs:
    """A prepared loader, which fetches one batch ahead of the one that it yields.

    The random state before each fetch is kept in `before`: with it a resumed run fetches that batch again.
    """

    def __init__(self, loader: Any, position: Position, before: rng.State | None) -> None:
        self.loader, self.position, self.before = loader, position, before

    def __iter__(self) -> Iterator[Any]:
        base, place, before = getattr(self.loader, "base_dataloader", self.loader), self.position.batch, self.before
        if getattr(base, "_iterator", None) is not None:  # begun with another random state
            base._iterator, base._initial_iter_for_state_dict = None, False
        batches = iter(self.loader)
        while True:
            place -= 1
            if place == 0 and before is not None:
                rng.restore(before, {})
            self.before = rng.capture({})
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Tells the loader its epoch."""
        if callable(getattr(self.loader, "set_epoch", None)):
            self.loader.set_epoch(epoch)
