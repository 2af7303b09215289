"""transformers' `Trainer` with atomic checkpoints, resumed from the newest whole one."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, nullcontext
from glob import escape, glob
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from ckptool.errors import Conflict, UsageError
from ckptool.integrations.shared import Fetches, committed, rotate, saved_folders
from ckptool.output import make_folder
from ckptool.training import rng
from ckptool.training.run_folder import Lock, to_stderr
from ckptool.training.saving import loaded
from ckptool.training.store import check, newest_whole

_NAME = re.compile(r"checkpoint-(\d{1,18})")
_STATE = "trainer_state.json"


class DurableCheckpoints:
    """A mixin for `Trainer` and its subclasses: `class MyTrainer(DurableCheckpoints, Trainer)`.

    A checkpoint is written under a hidden name, synced, described by a sidecar of digests, and renamed; only then are
    older ones deleted. `train(resume_from_checkpoint=True)` resumes from the newest whole one, or starts from the
    beginning if there is none; batches that were trained on are fetched again, so that the data set draws the same
    random numbers. Only one process at a time trains into an `output_dir`.
    """

    _staged: str | None = None
    _fetches: Fetches
    _batches: Any = None  # of the epoch; None where Trainer fetches by itself

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Trains, as `Trainer.train` does. Raises `Conflict` over checkpoints that would be overwritten, and for one of
        another number of processes."""
        folder = self.args.output_dir
        with ExitStack() as stack:
            if self.args.should_save:
                make_folder(folder)
                stack.callback(Lock(folder, "another output_dir").release)
            resume = resume_from_checkpoint or None
            path = os.path.abspath(resume) if isinstance(resume, str) else ""
            checkpoints = saved_folders(os.path.dirname(path) or folder, _NAME)
            if resume is True:
                say = to_stderr if self.args.should_save else lambda text: None
                newest = newest_whole(folder, checkpoints, say)
                resume = newest.path if newest else None
            elif path:
                for saved in checkpoints:
                    if saved.path == path and saved.sidecar:
                        check(saved)
            elif self.args.should_save and checkpoints:
                # A stock Trainer's checkpoints have no sidecars, so none is whole: the last is named by its path.
                argument = True if any(saved.sidecar for saved in checkpoints) else checkpoints[-1].path
                what = f"{folder} holds checkpoints already"
                fix = f"Resume: trainer.train(resume_from_checkpoint={argument!r}); or name another output_dir"
                raise Conflict(what, "A new run would overwrite some and mix with the rest.", fix)
            if resume and self.args.save_only_model:
                what = "save_only_model=True leaves out the optimizer and the random state"
                why = "A run cannot resume exactly from such checkpoints."
                raise UsageError(what, why, "Leave it out of TrainingArguments")
            state = TrainerState.load_from_json(os.path.join(resume, _STATE)) if resume else None
            if state is not None and (0 < self.args.max_steps <= state.global_step or self._stops_early(state)):
                # Loads the end of a complete run that is started again: Trainer itself would train another step.
                self._load_from_checkpoint(resume)
                self.state = state
                if resume_from_checkpoint is True:  # it may have been killed between its last save and this
                    self._rotate(folder, resume, state.global_step)
                if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
                    self._load_best_model()
                return TrainOutput(state.global_step, 0.0, {})
            self._fetches, self._batches = Fetches(), None
            states = [loaded(path) for path in sorted(glob(escape(resume or "") + "/ckptool-*.pt"))]
            if states and not self.args.ignore_data_skip:
                self._fetches.resume(states, self.args.process_index, self.args.world_size, resume)
            return super().train(resume, *args, **options)  # type: ignore[misc]

    def _stops_early(self: Any, state: TrainerState) -> bool:
        """True where an early stop ended the run, and the script gives it no more patience. Restores what callbacks
        counted, which Trainer does only if it is told to."""
        callbacks = self.callback_handler.callbacks
        for name, states in state.stateful_callbacks.items():
            same = [each for each in callbacks if type(each).__name__ == name]
            for callback, values in zip(same, states if isinstance(states, list) else [states], strict=False):
                vars(callback).update(values.get("attributes", {}))
        stops = [each for each in callbacks if isinstance(each, EarlyStoppingCallback)]
        return any(each.early_stopping_patience_counter >= each.early_stopping_patience for each in stops)

    def _get_output_dir(self: Any, trial: Any) -> str:
        return self._staged or str(super()._get_output_dir(trial))  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        folder, main, step = self._get_output_dir(trial), self.args.should_save, self.state.global_step
        target = os.path.join(folder, f"checkpoint-{step}")
        with committed(target, step, main, self.accelerator.wait_for_everyone) as temporary:
            self._staged = os.path.dirname(temporary)
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            finally:
                self._staged = None
            if self.state.best_model_checkpoint == temporary:
                self.state.best_model_checkpoint = target
                if main:
                    self.state.save_to_json(os.path.join(temporary, _STATE))
        self._rotate(folder, target, step)
        if self.args.push_to_hub:
            self._push_from_checkpoint(target)

    def _rotate(self: Any, run: str, newest: str, step: int) -> None:
        if self.args.should_save and (limit := self.args.save_total_limit):
            rotate(run, _NAME, step, limit, {newest, self.state.best_model_checkpoint} - {None})

    def _push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        if self._staged is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _run_epoch(self: Any, **options: Any) -> None:
        loader = options["train_dataloader"]
        is_fresh = options["epoch"] > options["epochs_trained"] or options["resume_from_checkpoint"] is None
        if is_fresh or self._fetches.saved is not None:  # else of a stock Trainer
            if callable(getattr(loader, "set_epoch", None)):
                loader.set_epoch(options["epoch"])
            self._length, self._batches = options["steps_in_epoch"], self._fetches.epoch(loader)
        super()._run_epoch(**options)  # type: ignore[misc]

    def get_batch_samples(self: Any, epoch_iterator: Any, *args: Any, **options: Any) -> Any:
        """The next batches, as `Trainer.get_batch_samples` gives them."""
        return super().get_batch_samples(self._batches or epoch_iterator, *args, **options)  # type: ignore[misc]

    def _save_rng_state(self: Any, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self._batches is not None:
            fetched = self._fetches.fetched
            state = self._fetches.state(fetched if fetched < self._length else 0)
            torch.save(state, os.path.join(output_dir, f"ckptool-{self.args.process_index:05}.pt"))

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        with nullcontext() if self._batches is None else rng.forked({}):  # which are set where batches are fetched
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
