"""`train` and `resume`: a run from its configuration to its end; a checkpoint of one, evaluated; a rehearsal of one."""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckptool.checkpoint.paths import absolute
from ckptool.commands import arg, command
from ckptool.errors import Corrupt, UsageError, counted, listed, printable
from ckptool.training import CHANGED, CONFIG, configfile, run_folder
from ckptool.training.config import Config, changes, code_names, refuse_fixed
from ckptool.training.configfile import recorded_config, retention_of
from ckptool.training.data import Samples
from ckptool.training.extensions import is_theirs, name_culprits
from ckptool.training.hooks import Hooks, Progress
from ckptool.training.loop import measured, one_step, remember, train
from ckptool.training.models import Say, kept_bytes
from ckptool.training.parallel import World, world_of
from ckptool.training.reports import Evaluated, Outcome, Rehearsal
from ckptool.training.run import Point, Run
from ckptool.training.run_folder import environment, is_run
from ckptool.training.saving import loaded
from ckptool.training.state import Objects, Window
from ckptool.training.stopping import Stopping, stopping
from ckptool.training.store import RunFolder, SavedState, check, described, file_digest, files_of, size_of
from ckptool.training.trainer import Trainer, build, deterministic, gathered, restored


def start(
    config: Config,
    *,
    resume: str = "never",
    asked: Sequence[str] = (),
    progress: Progress | None = None,
    say: Say | None = None,
) -> Outcome:
    """Trains the run that a configuration names: from the beginning, or from its newest whole checkpoint.

    resume: `never` refuses an existing run, `auto` starts or goes on, `must` refuses a new one.  asked: what was
    `--set`.  say: called with each note.  Raises `Conflict`, `NoneValid`, `UsageError`, or what building and saving do.
    """
    there = is_run(config.run)
    if resume == "must" and not there:
        recorded_config(config.run)  # says what is missing
    with (
        world_of(config) as world,
        name_culprits(),
        deterministic(config.deterministic),
        stopping(config.stop.signals, Stopping(config.stop.after)) as stop,
    ):
        folder = _opened(config, there and resume != "never", asked, world)
        try:
            say = say if say and world.is_first else lambda text: None
            return _trained(config, folder, world, stop, progress, say)
        finally:
            folder.close()


def _trained(
    config: Config, folder: RunFolder, world: World, stop: Stopping, progress: Progress | None, say: Say
) -> Outcome:
    """Trains to the end. What is made here is gone before the processes part: else DDP would wait for them for ever."""
    hooks = Hooks(config.hooks, progress if world.is_first else None)
    trainer = build(config, world, say, fresh=not folder.all())
    run = TrainerRun(trainer, folder, stop, say)
    with run:
        train(trainer, run, hooks)
    return replace(run.outcome, profile=hooks.profiled)


def resume(
    folder: str, changes: Sequence[str] = (), *, progress: Progress | None = None, say: Say | None = None
) -> Outcome:
    """Goes on with a run where it stopped, with `KEY=VALUE` changes of what may change."""
    _, before = recorded_config(folder)
    config = configfile.changed({**before.dumped(), "run": folder}, changes, os.path.join(folder, CONFIG))
    return start(config, resume="must", asked=changes, progress=progress, say=say)


def _opened(config: Config, goes_on: bool, asked: Sequence[str], world: World) -> RunFolder:
    """The run's folder. Raises `Conflict` where it is not to go on, or cannot with this configuration."""
    if goes_on:
        world.first(lambda: refuse_fixed(changes(recorded_config(config.run)[1], config), asked, config.run))
    return run_folder.opened(config.run, config.dumped(), retention_of(config), world, goes_on=goes_on)


class TrainerRun(Run):
    """`ckptool.Run` for a trainer: what a configuration describes in place of a script.

    Randomness is derived from the seed and the place, so none of it is saved.

    length: how far the loop goes; may be changed on the way.  metrics: of the evaluation after this step.
    outcome: when it has ended.
    """

    folder: RunFolder
    outcome: Outcome

    def __init__(self, trainer: Trainer, folder: RunFolder, stop: Stopping, say: Say) -> None:
        self.trainer = trainer
        self.metrics: dict[str, float] = {}
        self._changed: list[str] = []  # of the user's files and data, since the checkpoint
        self.fingerprint = fingerprint(trainer.config, trainer.data)
        save = trainer.config.save
        super().__init__(
            folder, save_async=save.async_, verify=save.verify, signals=(), say=say, **trainer.objects().named
        )
        self._stop, self._window = stop, Window(Objects())  # no gradients are kept for a later step
        self._saver.resume = f"resume: {command('resume', folder.folder)}"
        self.length = {"steps": trainer.step if trainer.is_stale else trainer.total_steps}

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self.trainer.epoch

    @property
    def begun(self) -> float:
        """When the first step of this process began."""
        return self._stop.begin()

    def loop(self) -> Generator[tuple[int, Any]]:
        """The number of each step that is to be taken, and its batches."""
        with suppress(_Left):
            if (self.trainer.pending or self.step < self.length["steps"]) and self.world.any_rank(self.stopping):
                self._leave(stopped=True)
            yield from self._flat(lambda: self.trainer.data.stream(self.trainer), self.length)

    def save_now(self) -> None:
        """Saves the state after the last step in the middle of the loop, unless that was done."""
        if self._saver.step != self.step:
            self._commit(self._point())
            self._saver.wait()

    def _restore(self, saved: SavedState) -> None:
        trainer, sidecar = self.trainer, saved.sidecar or {}
        restored(trainer, loaded(saved.path, self.objects.in_parts), saved.path)
        self.step = trainer.step
        known = sidecar.get("environment")
        before, now = known if isinstance(known, dict) else {}, environment(trainer.world.size, trainer.world.device)
        keys = [key for key in ("torch", "device", "threads", "world") if before.get(key) not in (None, now[key])]
        if keys:
            crossed = ", ".join(f"{key} {before[key]} → {now[key]}" for key in keys)
            self.say(
                f"resumed from step {trainer.step} in a different environment ({crossed}): "
                "results may differ in the last bits"
            )
        self._changed = differences(sidecar.get("fingerprint"), self.fingerprint)
        if self._changed:
            self.say(f"resumed from step {trainer.step}, but {'; '.join(self._changed)}: the result may differ")

    def _note_begin(self, **facts: Any) -> None:
        folder, trainer, config = self.folder, self.trainer, self.trainer.config
        folder.refuse_others(trainer.step, trainer.total_steps)
        for name in (config.profile.trace, config.profile.table) if config.profile is not None else ():
            folder.claim(name)
        _, before = recorded_config(folder.folder)
        found = {change.key: [change.before, change.after] for change in changes(before, config)}
        if noted := {key: values for key, values in found.items() if key != "run"}:
            folder.note(CHANGED, changes=noted, config=config.dumped())
        facts = {key: value for key, value in (("changed", self._changed), ("skipped", trainer.skipped)) if value}
        super()._note_begin(**facts)

    def _point(self) -> Point:
        return Point(self.trainer.place, {}, {})

    def _tree(self, point: Point, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        return gathered(self.trainer, point.place)

    def _facts(self, point: Point) -> dict[str, Any]:
        self.loss = self.trainer.loss
        how = {"config": self.trainer.config.dumped(), "fingerprint": self.fingerprint}
        # Before its evaluation is done, a step is saved only to stop: it is saved again after that, with its metrics.
        return super()._facts(point) | how | ({"stop": True} if self.trainer.pending else {})

    def _measure(self) -> None:
        self._marked = None
        self._metrics = {name: value for name, value in self.metrics.items() if math.isfinite(value)}

    def _say_notes(self, first: bool) -> None:
        pass  # its objects are known, and so is their randomness

    def _leave(self, *, stopped: bool) -> None:
        trainer, status, code, why = self.trainer, "stopped", 0, ""
        if trainer.step >= trainer.total_steps and not trainer.pending:
            status = "done"
        elif trainer.stale and trainer.is_stale:
            best = f", best at step {trainer.best['step']:,}" if trainer.best else ""
            count = counted(trainer.stale["count"], "evaluation")
            status, why = "stopped-early", f"{trainer.config.eval.metric} has not improved in {count}{best}"
        else:
            code = self._stop.exit_code
        self.outcome = Outcome(status, trainer.step, code, self.folder.folder, why)
        if self.world.is_first:
            event = {"stopped": "stop", "stopped-early": "early-stop"}.get(status, status)
            facts = {"why": why} if why else {}
            self.folder.note(event, step=trainer.step, signal=self._stop.number or None, **facts)
        if stopped:
            raise _Left


class _Left(Exception):
    """Ends the loop of a run that was stopped."""


# The user's own files ------------------------------------------------------------------------------------------------


def fingerprint(config: Config, data: Samples) -> dict[str, Any]:
    """A digest of each of the user's files that are loaded, and the number of samples.

    The files that the configuration names, and what lies beside and below them; each under its path from the folder
    that they are in, which is the same wherever the run goes on.
    """
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    loaded = {name: absolute(file) for name, file in files if file}
    code: dict[str, str] = {}
    for place in {name.rpartition(":")[0] for name in code_names(config.dumped())}:
        top = absolute(place) if place.endswith(".py") else loaded.get(place.partition(".")[0], "")
        folder = os.path.dirname(top.removesuffix(os.sep + "__init__.py")) + os.sep
        theirs = {path for path in loaded.values() if top and path.startswith(folder) and is_theirs(path)}
        code |= {path.removeprefix(folder): file_digest(path) for path in theirs}
    return {"code": dict(sorted(code.items())), "samples": data.train_count + len(data.held)}


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


# Evaluation -----------------------------------------------------------------------------------------------------------

BEST, NEWEST = "best", "newest"


def evaluate_run(folder: str, changes: Sequence[str], checkpoint: str | int | None, on: str) -> Evaluated:
    """The metrics of a checkpoint of a run on its validation or test data, in one process."""
    number, config = recorded_config(folder)
    strategy = config.strategy if config.split is not None else "single"
    values = {**config.dumped(), "run": folder, "strategy": strategy}
    config = configfile.changed(values, changes, os.path.join(folder, CONFIG))
    chosen, saved = _chosen(RunFolder(folder, number).all(), config, checkpoint, folder)
    check(saved, config.save.verify)
    with name_culprits(), deterministic(config.deterministic), world_of(config) as world:
        trainer = build(config, world, fresh=False)
        objects = trainer.objects(trains=False)
        objects.restore(loaded(saved.path, objects.in_parts), saved.path)
        trainer.step = saved.step
        metrics = measured(trainer, on=on)
    if not metrics:
        raise UsageError(
            "there is nothing to evaluate on",
            "No sample is held out, and there is no validation set.",
            f"Name one: {arg(set=['data.val.name=file.py:NAME', 'data.val_fraction=0'])}",
        )
    return Evaluated(folder, saved.step, chosen, on, config.eval.ema, metrics)


def _chosen(
    there: Sequence[SavedState], config: Config, checkpoint: str | int | None, folder: str
) -> tuple[str, SavedState]:
    """The checkpoint that is asked for, and in words which it is: the best where there is one, without being asked."""
    rules = replace(retention_of(config), last=0, best=1, every=0).reasons(there)
    found = {str(saved.step): saved for saved in there}
    for saved in there:
        found |= {name: saved for name in (BEST, NEWEST) if name in rules.get(saved.step, ())}
    wanted = str(checkpoint) if checkpoint is not None else BEST if BEST in found else NEWEST
    if wanted not in found:
        raise UsageError(
            f"{folder} has no checkpoint {wanted}",
            f"Available: {listed(list(found), 12)}." if found else "It has none.",
        )
    return f"the best {config.eval.metric}" if wanted == BEST else wanted if wanted == NEWEST else "", found[wanted]


# Rehearsal -----------------------------------------------------------------------------------------------------------


def rehearse(config: Config) -> Rehearsal:
    """Runs one step, saves, reloads and saves again, and evaluates a batch.

    Raises what would stop a run, `Corrupt` where the files differ.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ckptool-dry-run-") as folder,
        name_culprits(),
        deterministic(config.deterministic),
        world_of(config) as world,
    ):
        path = world.broadcast(folder)

        def with_run(name: str, **more: Any) -> Config:
            return configfile.checked({**config.dumped(), "run": os.path.join(path, name), **more}, "run.yaml")

        config = with_run("run")
        trainer = build(config, world)
        activations, seconds = _rehearsed_step(trainer)
        saved, saving = _saved(trainer, _opened(config, False, (), world))
        world.first(lambda: shutil.copytree(config.run, os.path.join(path, "again")) and None)
        config = with_run("again")
        again, _ = _saved(build(config, world), _opened(config, True, (), world))
        if described(files_of(saved.path)) != described(files_of(again.path)):
            from ckptool.analysis.diff import diff_files

            changed = diff_files(saved.path, again.path).changed
            where = f" in {printable(changed[0].address)}" if changed else ""
            raise Corrupt(f"the reloaded state differs{where}", "A run would not resume as it stopped.")
        if trainer.eval_every:
            remember(trainer, measured(trainer, most=1) or {})  # refuses a metric that the task does not give
        without = None
        if config.train.activation_checkpoint is not None:
            train = {**config.dumped()["train"], "activation_checkpoint": None}
            without, _ = _rehearsed_step(build(with_run("run", train=train), world))
        return Rehearsal(
            parameters={name: sum(p.numel() for p in model.parameters()) for name, model in trainer.models.items()},
            train_samples=trainer.data.train_count,
            val_samples=len(trainer.data.held),
            steps=trainer.total_steps,
            loss=trainer.loss or 0.0,
            step_seconds=seconds,
            save_seconds=saving,
            checkpoint_bytes=world.broadcast(size_of(saved.path)),  # in all before the first deletes it
            activations=activations,
            without=without,
            device=str(world.device),
        )


def _saved(trainer: Trainer, folder: RunFolder) -> tuple[SavedState, float]:
    """The checkpoint of a trainer in a run, from whose newest it goes on; and the seconds that the save took."""
    with TrainerRun(trainer, folder, Stopping(), lambda text: None) as run:
        began = time.perf_counter()
        run.save()
        run.close()
        return folder.all()[-1], time.perf_counter() - began


def _rehearsed_step(trainer: Trainer) -> tuple[int, float]:
    """Takes a step; returns the bytes of activations that it kept, and its seconds."""
    began = time.perf_counter()
    with kept_bytes() as kept:
        one_step(trainer, next(trainer.data.stream(trainer)), Hooks([]))
    return kept.bytes, time.perf_counter() - began
