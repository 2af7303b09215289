"""Atomic checkpoints by accelerate's `save_state`, and batches that resume at their place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from ckptool.errors import UsageError
from ckptool.integrations.shared import Fetches, committed, rotate, saved_folders
from ckptool.output import make_folder
from ckptool.training.run_folder import Lock, to_stderr
from ckptool.training.saving import loaded, to_cpu
from ckptool.training.state import SUFFIX, Objects, ranks_with_own, with_own
from ckptool.training.store import commit_file, newest_whole

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
    keep_last: how many to keep; None for the `total_limit` of the accelerator's ProjectConfiguration, or all.
    objects: others with `state_dict()` and `load_state_dict()`, and generators, saved by name, not by position.
    Every process makes it and calls `save`. Raises `Conflict` where another process writes the folder or a saved state
    does not fit, `NoneValid` where checkpoints exist and none is whole.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        say: Callable[[str], Any] = to_stderr,
        **objects: Any,
    ) -> None:
        limit = accelerator.project_configuration.total_limit
        self.accelerator, self.objects, self.folder = accelerator, Objects(objects), os.fspath(folder)
        self.keep_last = limit if keep_last is None else keep_last
        self.step = self.epoch = 0
        self._fetches, self._loader, self._marked = Fetches(), None, False
        self._lock: Lock | None = None
        self._models = Objects({f"model {number}": model for number, model in enumerate(accelerator._models)})
        self._flags: dict[str, Any] = {}  # of a checkpoint, until the first batch after it
        self._fetches.generators |= self.objects.generators
        if accelerator.is_main_process:
            make_folder(self.folder)
            self._lock = Lock(self.folder, "another folder")
        accelerator.wait_for_everyone()
        say = say if accelerator.is_main_process else lambda text: None
        newest = newest_whole(self.folder, saved_folders(self.folder, _NAME), say)
        self.resumed = newest is not None
        if newest is not None:
            tree = loaded(os.path.join(newest.path, _OURS))
            self._fetches.resume(tree["ranks"], accelerator.process_index, accelerator.num_processes, newest.path)
            self.objects.refuse_others(tree, newest.path)
            accelerator.load_state(newest.path)
            self.objects.restore(with_own(tree, tree["ranks"][accelerator.process_index]), newest.path)
            self.step, self.epoch, self._flags = tree["step"], tree["epoch"], tree.get("flags", {})
            accelerator.project_configuration.iteration = self.step + 1
            self._rotate()  # the process may have been killed between its last save and this

    def batches(self, loader: Any, *, epochs: int | None = None, steps: int | None = None) -> Iterator[tuple[int, Any]]:
        """The number of each step, from 1, and its batch; resumes in the middle of an epoch.

        loader: what `accelerator.prepare` returned. Batches already trained on are fetched again, so that the data set
        draws the same random numbers.
        """
        if (steps is None) == (epochs is None):
            raise UsageError("batches takes exactly one of steps and epochs", "", "batches(loader, epochs=5)")
        self._loader = loader
        flags, self._flags = self._flags, {}
        self._models.set_flags(flags)
        while (epochs is None or self.epoch < epochs) and (steps is None or self.step < steps):
            if callable(getattr(loader, "set_epoch", None)):
                loader.set_epoch(self.epoch)
            progress = self.step, self._fetches.trained
            for batch in self._fetches.epoch(loader):
                self.step += 1
                yield self.step, batch
                if self._marked and self.accelerator.sync_gradients:
                    self.save()
                if steps is not None and self.step >= steps:
                    return
            if progress == (self.step, 0):
                raise UsageError("the loader yielded no batch at all", "Its epochs would never end.")
            self.epoch += 1
        self._fetches.go_on()

    def save(self) -> None:
        """Saves the state after this step; all processes take part. Inside gradient accumulation, whose gradients would
        be in no checkpoint, `batches` saves at the end of the step that uses them.

        Raises `DiskFull`, `FileProblem`.
        """
        accelerator, main = self.accelerator, self.accelerator.is_main_process
        self._marked = not accelerator.sync_gradients
        if self._marked:
            return
        is_epoch_end = bool(self._fetches.fetched) and getattr(self._loader, "end_of_dataloader", False)
        states: dict[str, Any] = {}
        if accelerator.num_processes > 1:
            states = {name + SUFFIX: state for name, state in self.objects.states_of_others().items()}
            states |= self.objects.buffers()
        rank = self._fetches.state(0 if is_epoch_end else self._fetches.fetched)
        ranks = ranks_with_own(rank, states, lambda value: gather_object([value]))
        target = os.path.join(self.folder, f"checkpoint_{self.step}")
        with committed(target, self.step, main, accelerator.wait_for_everyone) as temporary:
            project = accelerator.project_configuration
            naming, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
            try:
                accelerator.save_state(temporary)
            finally:
                project.automatic_checkpoint_naming, project.iteration = naming, self.step + 1
            if main:
                for name in os.listdir(temporary):
                    if name.startswith("dl_state_dict"):  # `batches` goes back to the place by itself
                        os.unlink(os.path.join(temporary, name))
                tree = {"step": self.step, "epoch": self.epoch + is_epoch_end, "ranks": ranks, **self.objects.state({})}
                tree["flags"] = self._models.flags()
                tree["generators"], path = sorted(self.objects.generators), os.path.join(temporary, _OURS)
                commit_file(to_cpu(tree), path, path + ".json", {"step": self.step}, {})
        self._rotate()

    def _rotate(self) -> None:
        """Deletes checkpoints that are older than this step's and not to be kept."""
        if self.accelerator.is_main_process and self.keep_last:
            rotate(self.folder, _NAME, self.step, self.keep_last)

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.release()
