"""A run from its configuration to its end: its parts, built in the order that resuming needs (models, optimizers,
schedules, then state), how they are saved and resumed; the evaluation of a checkpoint; a rehearsal.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ckptool.bridge.modules import unwrapped
from ckptool.checkpoint.paths import temporary_files
from ckptool.commands import arg
from ckptool.errors import Corrupt, UsageError, counted, listed, printable
from ckptool.training import CHANGED, CONFIG, configfile, optim, run_folder
from ckptool.training.config import Config, changes, code_names, recorded, refuse_fixed
from ckptool.training.configfile import recorded_config, retention_of
from ckptool.training.data import Samples, load_data
from ckptool.training.extensions import is_theirs, name_culprits
from ckptool.training.hooks import Hooks, Progress
from ckptool.training.loop import measured, one_step, remember, train
from ckptool.training.models import Say, build_model, checkpoint_activations
from ckptool.training.optim import Average, Update
from ckptool.training.parallel import World, placed, world_of, wrapped
from ckptool.training.reports import Evaluated, Outcome, Rehearsal
from ckptool.training.rng import seed_all
from ckptool.training.run import Point, Run
from ckptool.training.run_folder import environment, is_run
from ckptool.training.saving import loaded, refuse_not_plain
from ckptool.training.state import SUFFIX, Objects, Window
from ckptool.training.stopping import Stopping, stopping
from ckptool.training.store import RunFolder, SavedState, check, described, file_digest, files_of, size_of
from ckptool.training.tasks import TASKS, Task


@dataclass(slots=True)
class Trainer:
    """The parts of a run, and how far it has come. `step` is the number of completed optimizer steps.

    models: as they are saved.  runners: the same in the wrappers of the user's code, and as the strategy runs them.
    updates: the optimizers of each.
    skipped: of the checkpoints that models start from, in words.  loss: the mean over the samples of the last step.
    best: metric, value and step of the best evaluation.  stale: with `stop.patience`, the metric, the value to improve
    on, and the count of evaluations in a row that did not.  samples: how many were trained on.
    pending: an evaluation is due and not done yet.  facts: the numbers of the hooks for the line of this step.
    """

    config: Config
    world: World
    data: Samples
    task: Task
    scaler: torch.amp.GradScaler | None
    models: dict[str, nn.Module] = field(default_factory=dict)
    runners: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    updates: dict[str, Update] = field(default_factory=dict)
    schedules: dict[str, torch.optim.lr_scheduler.LRScheduler] = field(default_factory=dict)
    averages: dict[str, Average] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    step: int = 0
    loss: float | None = None
    samples: int = 0
    best: dict[str, Any] | None = None
    stale: dict[str, Any] | None = None
    pending: bool = False
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def is_stale(self) -> bool:
        """True once evaluations have not improved for as long as `stop.patience` allows."""
        patience = self.config.stop.patience
        return bool(patience and self.stale and self.stale["count"] >= patience)

    def key(self, kind: str, name: str) -> str:
        """The name by which a part is saved: `model`; with several models `model_NAME`.

        The same for optimizers and schedulers, if there are several optimizers.
        """
        several = len(self.optimizers if kind in ("optimizer", "scheduler") else self.models) > 1
        return f"{kind}_{name}" if several else kind

    def objects(self, *, trains: bool = True, without: Collection[str] = ()) -> Objects:
        """The objects that are saved by their `state_dict`. trains: False for those that an evaluation needs.

        without: the optimizers whose schedules are left out.
        """
        objects: dict[str, Any] = {self.key("model", name): part for name, part in self.models.items()}
        if trains:
            schedules = {name: part for name, part in self.schedules.items() if name not in without}
            objects |= {self.key("optimizer", name): part for name, part in self.optimizers.items()}
            objects |= {self.key("scheduler", name): part for name, part in schedules.items()}
            objects |= {"scaler": self.scaler} if self.scaler is not None else {}
        return Objects(objects | {self.key("ema", name): part for name, part in self.averages.items()})

    @property
    def place(self) -> dict[str, Any]:
        """The place in the data after the last step, as it is saved. Raises `UsageError` for what is not plain."""
        of_stream = {"stream": self.data.position} if self.data.position else {}
        refuse_not_plain(of_stream, f"the state of data {self.config.data.name}")
        batch = self.step % self.data.steps_per_epoch
        return {"epoch": self.epoch, "batch": batch, "samples": self.samples, **of_stream}

    @property
    def total_steps(self) -> int:
        """The length of the run, by `train.steps` or `train.epochs`."""
        train = self.config.train
        return train.steps if train.steps is not None else (train.epochs or 0) * self.data.steps_per_epoch

    @property
    def eval_every(self) -> int:
        """The steps between two evaluations; 0: never."""
        every = self.config.eval.every
        return self.data.steps_per_epoch if every == "epoch" else every

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self.step // self.data.steps_per_epoch


def build(config: Config, world: World, say: Say = lambda text: None, *, fresh: bool = True) -> Trainer:
    """A trainer at step 0. Raises `UsageError` for what the configuration names and does not exist.

    say: called with each note.  fresh: False for one that is given a saved state next, and needs no other checkpoint.
    """
    data, task = load_data(config.data, config.seed), TASKS.make(config.task, {})
    if missing := [phase.model for phase in task.phases if phase.model not in config.models]:
        what = f"task: {config.task} trains the model {missing[0]!r}, but there is no such model"
        raise UsageError(what, f"Available: {', '.join(config.models)}.")
    planned = {name: settings.schedule for name, settings in config.optim.items() if settings.schedule is not None}
    asking = ["train.epochs"] * bool(config.train.epochs) + ["eval.every"] * (config.eval.every == "epoch")
    asking += [f"optim.{name}.schedule.per" for name, schedule in planned.items() if schedule.per == "epoch"]
    if asking and not data.epoch_count:
        what = f"data: {config.data.name} has no length, so the steps of an epoch cannot be counted"
        raise UsageError(what, f"It is counted in epochs: {', '.join(asking)}.", "Give it __len__, or count in steps.")
    scaler = torch.amp.GradScaler(world.device.type) if config.train.precision == "fp16" else None
    trainer = Trainer(config, world, data, task, scaler)
    for name, settings in config.models.items():
        seed_all(torch.device("cpu"), config.seed, "init", name)
        built = build_model(settings, data, fresh=fresh, name=name, say=trainer.skipped.append)
        model = placed(unwrapped(built), config, world)
        if config.train.activation_checkpoint is not None:
            checkpoint_activations(model, config.train.activation_checkpoint, say)
        frozen = optim.freeze(model, settings.freeze)
        optims = {key: options for key, options in config.optim.items() if config.model_of(key) == name}
        shares = optim.shares(model, optims, frozen)
        optimizers = {key: optim.build_optimizer(model, optims[key], share) for key, share in shares.items()}
        trainer.models[name] = model
        trainer.runners[name] = wrapped(built, config, world)
        trainer.optimizers |= optimizers
        trainer.updates[name] = Update(optimizers, optims, settings.clip)
        trainer.averages |= {name: Average(model, config.train.ema)} if config.train.ema else {}
    for words in trainer.skipped:
        say(words)
    for name, optimizer in trainer.optimizers.items():
        if (schedule := planned.get(name)) is not None:
            trainer.schedules[name] = optim.build_schedule(optimizer, schedule)
    return trainer


@contextmanager
def deterministic(mode: bool | str) -> Iterator[None]:
    """Sets torch's switches so that the same step gives the same bits, and sets them back afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


def gathered(trainer: Trainer, place: dict[str, Any] | None = None) -> dict[str, Any]:
    """All that is saved after the last step. place: in the data before the next batch, if that was fetched since."""
    tree = {"epoch": trainer.epoch, "step": trainer.step, "loss": trainer.loss, **trainer.objects().state({})}
    del tree["kinds"]  # the configuration has them
    tree["rng_state"] = {"seed": trainer.config.seed, "derived_from": "seed, step, micro-step, rank"}
    tree["data_state"] = trainer.place if place is None else place
    tree["best"] = dict(trainer.best) if trainer.best else None
    if trainer.stale is not None:
        tree["stale"] = dict(trainer.stale)
    if trainer.pending:
        tree |= {"pending": "evaluation"} | ({"hooks": trainer.facts} if trainer.facts else {})
    tree["config"] = recorded(trainer.config.dumped())
    return tree


def restore(trainer: Trainer, tree: dict[str, Any], where: str) -> None:
    """Restores the state of a checkpoint in a newly built trainer. Raises `Conflict` naming what does not fit.

    An optimizer whose learning rate or schedule was changed goes on with that, as if it had always been so.
    """
    now = recorded(trainer.config.dumped())["optim"]
    before = tree["config"]["optim"]
    changed = {name for name in now if any(now[name][key] != before[name][key] for key in ("lr", "schedule"))}
    options = {
        name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for name, optimizer in trainer.optimizers.items()
    }
    trainer.objects(without=changed).restore(tree, where)
    trainer.step, trainer.loss, trainer.best = tree["step"], tree["loss"], tree["best"]
    trainer.stale = tree.get("stale") if trainer.config.stop.patience else None
    trainer.samples = tree["data_state"]["samples"]
    trainer.pending, trainer.facts = "pending" in tree, dict(tree.get("hooks", ()))
    trainer.data.position = tree["data_state"].get("stream")
    for name in changed:
        for group, values in zip(trainer.optimizers[name].param_groups, options[name], strict=True):
            group.update(values)
        settings, old = trainer.config.optim[name].schedule, before[name]["schedule"]
        if settings is None or settings.follows_evaluation:
            continue
        count = trainer.step // (1 if settings.per == "step" else trainer.data.steps_per_epoch)
        if old is not None and old["per"] == settings.per:  # the old one did not count skipped steps
            count = tree[trainer.key("scheduler", name) + SUFFIX].get("last_epoch", count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer does not step meanwhile
            for _ in range(count):
                trainer.schedules[name].step()


# Runs ----------------------------------------------------------------------------------------------------------------


def start(
    config: Config,
    *,
    resume: str = "never",
    assignments: Sequence[str] = (),
    progress: Progress | None = None,
    say: Say | None = None,
) -> Outcome:
    """Trains the run that a configuration names: from the beginning, or from its newest whole checkpoint.

    resume: `never` refuses an existing run, `auto` starts or resumes, `must` refuses a new one.  assignments: those of
    `--set`.  say: called with each note.  Raises `Conflict`, `NoneValid`, `UsageError`, or what building and saving do.
    """
    exists = is_run(config.run)
    if resume == "must" and not exists:
        recorded_config(config.run)  # raises, naming what is missing
    with (
        world_of(config) as world,
        name_culprits(),
        deterministic(config.deterministic),
        stopping(config.stop.signals, Stopping(config.stop.after)) as stop,
        closing(_opened(config, exists and resume != "never", assignments, world)) as folder,
    ):
        say = say if say and world.is_first else lambda text: None
        return _trained(config, folder, world, stop, progress, say)


def _trained(
    config: Config, folder: RunFolder, world: World, stop: Stopping, progress: Progress | None, say: Say
) -> Outcome:
    """Trains to the end. Objects made here are freed before the processes part: else DDP would wait for ever."""
    hooks = Hooks(config.hooks, progress if world.is_first else None)
    trainer = build(config, world, say, fresh=not folder.all())
    run = TrainerRun(trainer, folder, stop, say)
    with run:
        train(trainer, run, hooks)
    return run.outcome


def resume(
    folder: str, changes: Sequence[str] = (), *, progress: Progress | None = None, say: Say | None = None
) -> Outcome:
    """Resumes a run where it stopped, with `KEY=VALUE` changes of keys that may change."""
    _, before = recorded_config(folder)
    config = configfile.changed(before.dumped(), changes, os.path.join(folder, CONFIG))
    return start(config, resume="must", assignments=changes, progress=progress, say=say)


def _opened(config: Config, goes_on: bool, assignments: Sequence[str], world: World) -> RunFolder:
    """The run's folder. Raises `Conflict` if the run may not be resumed, or not with this configuration."""
    if goes_on:
        world.first(lambda: refuse_fixed(changes(recorded_config(config.run)[1], config), assignments, config.run))
    return run_folder.opened(config.run, config.dumped(), retention_of(config), world, goes_on=goes_on)


class TrainerRun(Run):
    """`ckptool.Run` for a trainer, whose loop a configuration describes in place of a script.

    Randomness is derived from the seed and the place, so none of it is saved.

    begin: when the first step began.  length: the steps of the loop; may change on the way.  metrics: of the evaluation
    after this step.  outcome: set at the end.
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
        self.begin = stop.begin
        self._stop, self._window = stop, Window(Objects())  # no gradients are kept for a later step
        self.length = {"steps": trainer.step if trainer.is_stale else trainer.total_steps}

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self.trainer.epoch

    def loop(self) -> Generator[tuple[int, Any]]:
        """The number of each remaining step, and its batches."""
        with suppress(_Left):
            if (self.trainer.pending or self.step < self.length["steps"]) and self.world.any_rank(self.stopping):
                self._leave(stopped=True)
            yield from self._flat(lambda: self.trainer.data.stream(self.trainer), self.length)

    def save_now(self) -> None:
        """Saves the state after the last step in the middle of the loop, unless it is saved already."""
        if self._saver.step != self.step:
            self._commit(self._unreached or self._point())  # a batch was fetched after a commit that failed
            self._saver.wait()

    def _restore(self, saved: SavedState) -> None:
        trainer, sidecar = self.trainer, saved.sidecar or {}
        restore(trainer, loaded(saved.path, self.objects.in_parts), saved.path)
        self.step = trainer.step
        facts = sidecar.get("environment")
        before, now = facts if isinstance(facts, dict) else {}, environment(trainer.world.size, trainer.world.device)
        keys = [key for key in ("torch", "device", "threads", "world") if before.get(key) not in (None, now[key])]
        self._changed = differences(sidecar.get("fingerprint"), self.fingerprint)
        if changed := [*(f"{key} {before[key]} → {now[key]}" for key in keys), *self._changed]:
            self.say(f"resumed from step {trainer.step}, but {'; '.join(changed)}: the result may differ")

    def _note_begin(self, **facts: Any) -> None:
        folder, trainer, config = self.folder, self.trainer, self.trainer.config
        folder.refuse_others(trainer.step, trainer.total_steps)
        if config.profile is not None:
            folder.claim(config.profile.trace)
        _, before = recorded_config(folder.folder)
        if changed := {change.key: [change.before, change.after] for change in changes(before, config)}:
            folder.note(CHANGED, changes=changed, config=config.dumped())
        facts = {key: value for key, value in (("changed", self._changed), ("skipped", trainer.skipped)) if value}
        super()._note_begin(**facts)

    def _point(self) -> Point:
        return Point(self.trainer.place, {}, {})

    def _tree(self, point: Point, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        return gathered(self.trainer, point.place)

    def _facts(self, point: Point) -> dict[str, Any]:
        self.loss = self.trainer.loss
        settings = {"config": self.trainer.config.dumped(), "fingerprint": self.fingerprint}
        # Before its evaluation, a step is saved only to stop: it is saved again afterwards, with its metrics.
        return super()._facts(point) | settings | ({"stop": True} if self.trainer.pending else {})

    def _measure(self) -> None:
        self._marked = None
        self._metrics = {name: value for name, value in self.metrics.items() if math.isfinite(value)}

    def _say_notes(self, first: bool) -> None:
        data = self.trainer.data
        is_saved = "state" in (data.position or ())
        for text in self._looks.notes_of_harness(self.trainer.models, None if is_saved else data.dataset):
            self._say_once(text)

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
    """A digest of each of the user's files that the configuration names, by its name, and the number of samples."""
    named = {name.rpartition(":")[0] for name in code_names(config.dumped())}
    paths = {name if name.endswith(".py") else getattr(sys.modules.get(name), "__file__", "") for name in named}
    code: dict[str, str] = {}
    for path in sorted(path for path in filter(None, paths) if is_theirs(path)):
        name = os.path.basename(path)
        code[name] = code.get(name, "") + file_digest(path)  # of two files of one name both
    return {"code": code, "samples": data.train_count + len(data.held_out)}


def differences(before: Any, now: dict[str, Any]) -> list[str]:
    """The changes from one fingerprint to another, in sentences; files that only one of them has do not count."""
    if not isinstance(before, dict):
        return []
    old, new = before.get("code"), now["code"]
    changed = [name for name in new if isinstance(old, dict) and old.get(name, new[name]) != new[name]]
    sentences = [f"{listed([printable(name) for name in changed])} changed"] if changed else []
    if before.get("samples", now["samples"]) != now["samples"]:
        sentences.append(f"the number of samples is {now['samples']:,}, and was {before['samples']!s:.20}")
    return sentences


# Evaluation -----------------------------------------------------------------------------------------------------------

BEST, NEWEST = "best", "newest"


def evaluate_run(folder: str, changes: Sequence[str], checkpoint: str | int | None, on: str) -> Evaluated:
    """The metrics of a checkpoint of a run on its validation or test data, in one process.

    checkpoint: its step, `best` or `newest`; None: the best, where there is one.
    """
    run_id, config = recorded_config(folder)
    strategy = config.strategy if config.split is not None else "single"
    config = configfile.changed({**config.dumped(), "strategy": strategy}, changes, os.path.join(folder, CONFIG))
    checkpoints = RunFolder(folder, run_id).all()
    rules = replace(retention_of(config), last=0, best=1, every=0).reasons(checkpoints)
    choices = {str(saved.step): saved for saved in checkpoints}
    for saved in checkpoints:
        choices |= {name: saved for name in (BEST, NEWEST) if name in rules.get(saved.step, ())}
    choice = str(checkpoint) if checkpoint is not None else BEST if BEST in choices else NEWEST
    if choice not in choices:
        raise UsageError(
            f"{folder} has no checkpoint {choice if choices else 'yet'}",
            f"Available: {listed(list(choices), 12)}." if choices else "",
        )
    saved = check(choices[choice], config.save.verify)
    chosen = {BEST: f"the best {config.eval.metric}", NEWEST: NEWEST}.get(choice, "")
    with name_culprits(), deterministic(config.deterministic), world_of(config) as world:
        trainer = build(config, world, fresh=False)
        objects = trainer.objects(trains=False)
        objects.restore(loaded(saved.path, objects.in_parts), saved.path)
        trainer.step = saved.step
        metrics = measured(trainer, on=on)
    if not metrics:
        what = "there is nothing to evaluate on"
        why = "No data is held out, and there is no validation set."
        raise UsageError(what, why, f"Name one: {arg(set=['data.val.name=file.py:NAME', 'data.val_fraction=0'])}")
    return Evaluated(folder, saved.step, chosen, on, config.eval.ema, metrics)


# Rehearsal -----------------------------------------------------------------------------------------------------------


def rehearse(config: Config) -> Rehearsal:
    """Runs one step, saves, reloads and saves again, and evaluates a batch.

    Raises what would stop a run, `Corrupt` where the files differ.
    """
    with (
        temporary_files(),
        tempfile.TemporaryDirectory(prefix="ckptool-dry-run-") as folder,
        name_culprits(),
        deterministic(config.deterministic),
        world_of(config) as world,
    ):
        path = world.broadcast(folder)

        def with_run(name: str) -> Config:
            return configfile.checked({**config.dumped(), "run": os.path.join(path, name)}, "run.yaml")

        config = with_run("run")
        trainer = build(config, world)
        began = time.perf_counter()
        one_step(trainer, next(trainer.data.stream(trainer)), Hooks([]))
        seconds = time.perf_counter() - began
        saved, saving = _saved(trainer, _opened(config, False, (), world))
        world.first(lambda: shutil.copytree(config.run, os.path.join(path, "again")) and None)
        config = with_run("again")
        resaved, _ = _saved(build(config, world), _opened(config, True, (), world))
        if described(files_of(saved.path)) != described(files_of(resaved.path)):
            from ckptool.analysis.diff import diff_files

            changed = diff_files(saved.path, resaved.path).changed
            where = f" in {printable(changed[0].address)}" if changed else ""
            raise Corrupt(f"the reloaded state differs{where}", "A run would not resume as it was saved.")
        if trainer.eval_every:
            remember(trainer, measured(trainer, limit=1) or {})  # refuses a metric that the task does not give
        return Rehearsal(
            parameters={name: sum(p.numel() for p in model.parameters()) for name, model in trainer.models.items()},
            train_samples=trainer.data.train_count,
            val_samples=len(trainer.data.held_out),
            steps=trainer.total_steps,
            loss=trainer.loss or 0.0,
            step_seconds=seconds,
            save_seconds=saving,
            checkpoint_bytes=world.broadcast(size_of(saved.path)),  # in all processes before the first deletes it
            device=str(world.device),
        )


def _saved(trainer: Trainer, folder: RunFolder) -> tuple[SavedState, float]:
    """The checkpoint that a trainer saves in a run, resumed from its newest, and the seconds that saving took."""
    with TrainerRun(trainer, folder, Stopping(), lambda text: None) as run:
        began = time.perf_counter()
        run.save()
        run.close()
        return folder.all()[-1], time.perf_counter() - began
