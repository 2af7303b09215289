"""When the state is written: between two steps, or from a copy of it in a thread while the next steps run."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from ckptool.commands import Advice, command
from ckptool.errors import DiskFull
from ckptool.training.runs import Run, environment
from ckptool.training.state import gathered
from ckptool.training.trainer import Trainer


class Saver:
    """Commits the state after a step, then prunes. step: of the newest checkpoint that was committed, or is being written.

    With `save.async` at most one is being written: the next save waits for it, and so does the end. What goes wrong in the thread is raised
    there.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, run
        there = run.store.all() if trainer.step else []
        self.step = there[-1].step if there else None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()  # what stopped the run is the news; the checkpoint before it is still wanted

    def save(self) -> None:
        """Saves the state after the last step."""
        self.wait()
        trainer = self.trainer
        if trainer.world.is_first:
            apart = trainer.config.save.async_
            tree, facts = gathered(trainer, copied=apart), self._facts()
            if apart:
                self._thread = threading.Thread(
                    target=self._apart, args=(trainer.step, tree, facts), name="ckptool-save"
                )
                self._thread.start()
            else:
                self._commit(trainer.step, tree, facts)
        trainer.world.barrier()
        self.step = trainer.step

    def wait(self) -> None:
        """Waits for what is being written, and raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _facts(self) -> dict[str, Any]:
        trainer = self.trainer
        loss = trainer.loss
        return {
            "epoch": trainer.epoch,
            "loss": loss if loss is None or loss - loss == 0 else str(loss),
            "metrics": {key: value for key, value in trainer.metrics.items() if value - value == 0},
            "parent": self.step,
            "revision": self.run.revision,
            "config": self.run.config.dumped(),
            "fingerprint": self.run.fingerprint,
            "environment": environment(trainer.world.size, trainer.world.device),
        }

    def _apart(self, step: int, tree: dict[str, Any], facts: dict[str, Any]) -> None:
        try:
            self._commit(step, tree, facts)
        except Exception as error:  # noqa: BLE001  raised by the thread that waits
            self._error = error

    def _commit(self, step: int, tree: dict[str, Any], facts: dict[str, Any]) -> None:
        try:
            saved = self.run.store.commit(step, tree, facts)
        except DiskFull as error:
            error.why = "The checkpoints that are there stay as they are."
            error.fix = Advice("Make room, then go on: ", command("resume", self.run.folder))
            raise
        gone = self.run.prune()
        self.run.note("save", step=saved.step, path=saved.path, pruned=[old.step for old in gone])
