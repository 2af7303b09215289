"""`train` and `resume`: a run from its configuration to its end; and a rehearsal of one."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from ckptool.analysis.diff import diff_files
from ckptool.checkpoint.paths import absolute
from ckptool.commands import command
from ckptool.errors import Corrupt, counted, listed, printable
from ckptool.training import CONFIG, TABLE, configfile
from ckptool.training.code_paths import code_names
from ckptool.training.config import Config, changes, refuse_fixed
from ckptool.training.data import Samples
from ckptool.training.extensions import is_theirs, name_culprits
from ckptool.training.hooks import Hooks, Progress
from ckptool.training.loop import one_step, train
from ckptool.training.models import Say, kept_bytes
from ckptool.training.parallel import World, world_of
from ckptool.training.reports import Outcome, Rehearsal
from ckptool.training.run import Point, Run
from ckptool.training.run_folder import environment, is_run
from ckptool.training.runs import ConfiguredRun, create, read_config, reopen
from ckptool.training.saving import loaded
from ckptool.training.shards import local
from ckptool.training.stopping import Stopping, stopping
from ckptool.training.store import SavedState, digest_of_files, size_of
from ckptool.training.trainer import Trainer, build, gathered, restored, switches_given_back


def start(
    config: Config,
    *,
    resume: str = "never",
    asked: Sequence[str] = (),
    progress: Progress | None = None,
    say: Say | None = None,
) -> Outcome:
    """Trains the run that a configuration names: from the beginning, or from its newest whole checkpoint.

    resume: `never` refuses an existing run, `auto` starts or goes on, `must` refuses a new one.  asked: keys that were
    `--set`.  say: called with each note.  Raises `Conflict`, `NoneValid`, `UsageError`, or what building and saving do.
    """
    there = is_run(config.run)
    if resume == "must" and not there:
        read_config(config.run)  # says what is missing
    with (
        world_of(config) as world,
        name_culprits(),
        switches_given_back(),
        stopping(config.stop.signals, Stopping(config.stop.after)) as stop,
    ):
        folder = _opened(config, there and resume != "never", asked, world)
        try:
            hooks = Hooks(config.hooks, progress if world.is_first else None)
            say = say if say and world.is_first else lambda text: None
            trainer = build(config, world, say, fresh=not folder.store.all())
            run = TrainerRun(trainer, folder, stop, say)
            with run:
                train(trainer, run, hooks)
        finally:
            folder.close()
    return Outcome(run.ended, trainer.step, run.exit_code, folder.folder, run.why, hooks.profiled)


def resume(
    folder: str, changes: Sequence[str] = (), *, progress: Progress | None = None, say: Say | None = None
) -> Outcome:
    """Goes on with a run where it stopped, with `KEY=VALUE` changes of what may change."""
    _, before = read_config(folder)
    config = configfile.changed({**before.dumped(), "run": folder}, changes, os.path.join(folder, CONFIG))
    asked = [change.partition("=")[0] for change in changes]
    return start(config, resume="must", asked=asked, progress=progress, say=say)


def _opened(config: Config, there: bool, asked: Sequence[str], world: World) -> ConfiguredRun:
    """The run's folder; in all processes but the first without its lock."""
    opened: list[ConfiguredRun] = []

    def open_first() -> None:
        if there:
            refuse_fixed(changes(read_config(config.run)[1], config), asked, config.run)
        opened.append(reopen(config.run, config) if there else create(config))

    world.first(open_first)
    return opened[0] if opened else reopen(config.run, config, write=False)


class TrainerRun(Run):
    """`ckptool.Run` for a trainer: what a configuration describes in place of a script.

    Randomness is derived from the seed and the place, so none of it is saved.

    length: how far the loop goes; may be changed on the way.  ended, why, exit_code: how it ended.
    """

    folder: ConfiguredRun

    def __init__(self, trainer: Trainer, folder: ConfiguredRun, stop: Stopping, say: Say) -> None:
        self.trainer = trainer
        self.ended, self.why, self.exit_code = "", "", 0
        self._changed: list[str] = []  # of the user's files and data, since the checkpoint
        folder.fingerprint = fingerprint(trainer.config, trainer.data)
        save = trainer.config.save
        super().__init__(
            folder, save_async=save.async_, verify=save.verify, signals=(), say=say, **trainer.objects().named
        )
        self._stop = stop
        self._saver.resume = f"resume: {command('resume', folder.folder)}"
        self.step = trainer.step
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
        before, now = sidecar.get("environment") or {}, environment(trainer.world.size, trainer.world.device)
        keys = [key for key in ("torch", "device", "threads", "world") if before.get(key) not in (None, now[key])]
        if keys:
            crossed = ", ".join(f"{key} {before[key]} → {now[key]}" for key in keys)
            self.say(
                f"resumed from step {trainer.step} in a different environment ({crossed}): "
                "results may differ in the last bits"
            )
        self._changed = differences(sidecar.get("fingerprint"), self.folder.fingerprint)
        if self._changed:
            self.say(f"resumed from step {trainer.step}, but {'; '.join(self._changed)}: the result may differ")

    def _note_begin(self) -> None:
        folder, trainer, config = self.folder, self.trainer, self.trainer.config
        folder.store.refuse_others(trainer.step, trainer.total_steps)
        profile = [config.profile.trace, config.profile.table] if config.profile is not None else []
        for name in [*([TABLE] if config.log.csv else []), *profile]:
            folder.claim(name)
        folder.note_changes()
        facts = {key: value for key, value in (("changed", self._changed), ("skipped", trainer.skipped)) if value}
        facts |= environment(trainer.world.size, trainer.world.device)
        folder.note("resume" if self.resumed else "start", step=trainer.step, **facts)
        folder.metrics.cut_back(trainer.step)

    def _point(self) -> Point:
        return Point(self.trainer.place, {}, {})

    def _tree(self, point: Point, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        return gathered(self.trainer, point.place)

    def _facts(self, point: Point) -> dict[str, Any]:
        return super()._facts(point) | self.folder.facts

    @property
    def _accumulates(self) -> bool:
        return False  # over steps; one that was left out is a step

    def _say_notes(self, first: bool) -> None:
        pass  # its objects are known, and so is their randomness

    def _leave(self, *, stopped: bool) -> None:
        trainer = self.trainer
        if trainer.step >= trainer.total_steps and not trainer.pending:
            event, self.ended = "done", "done"
        elif trainer.is_stale and trainer.stale:
            event, self.ended = "early-stop", "stopped-early"
            best = f", best at step {trainer.best['step']:,}" if trainer.best else ""
            count = counted(trainer.stale["count"], "evaluation")
            self.why = f"{trainer.config.eval.metric} has not improved in {count}{best}"
        else:
            event, self.ended = "stop", "stopped"
            self.exit_code = self.world.broadcast(self._stop.exit_code)
        if self.world.is_first:
            why = {"why": self.why} if self.why else {}
            self.folder.note(event, step=trainer.step, signal=self._stop.number or None, **why)
        if stopped:
            raise _Left


class _Left(Exception):
    """Ends the loop of a run that was stopped."""


# The user's own files ------------------------------------------------------------------------------------------------


def fingerprint(config: Config, data: Samples) -> dict[str, Any]:
    """A digest of each of the user's files that the configuration leads to, and the number of samples."""
    code = {name: digest for name, path in sorted(_files(config)) if (digest := _digest(path))}
    return {"code": code, "samples": data.train_count + len(data.held)}


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


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """The user's files that are loaded: those that the configuration names, and what lies beside and below them.

    Each under its path from the folder that they are in, which is the same wherever the run goes on.
    """
    places = {name.rpartition(":")[0] for name in code_names(config.dumped())}
    tops = [place if place.endswith(".py") else _file_of(place.partition(".")[0]) for place in places]
    loaded = {absolute(_file_of(name)) for name in list(sys.modules)}
    for top in filter(None, tops):
        folder = os.path.dirname(absolute(top))
        if os.path.basename(top) == "__init__.py":
            folder = os.path.dirname(folder)
        for path in loaded:
            if path.startswith(folder + os.sep) and is_theirs(path):
                yield os.path.relpath(path, folder), path


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or ""


def _digest(path: str) -> str:
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# Rehearsal -----------------------------------------------------------------------------------------------------------


def rehearse(config: Config) -> Rehearsal:
    """Runs one step, saves, reloads and saves again. Raises what would stop a run, `Corrupt` where the files differ."""
    with (
        tempfile.TemporaryDirectory(prefix="ckptool-dry-run-") as folder,
        name_culprits(),
        switches_given_back(),
        world_of(config) as world,
    ):
        path = world.broadcast(folder)
        config = configfile.checked({**config.dumped(), "run": os.path.join(path, "run")}, "run.yaml")
        trainer = build(config, world)
        activations, seconds = _rehearsed_step(trainer)
        saved, saving = _saved(trainer, _opened(config, False, (), world))
        world.first(lambda: shutil.copytree(config.run, os.path.join(path, "again")) and None)
        config = configfile.checked({**config.dumped(), "run": os.path.join(path, "again")}, "run.yaml")
        again, _ = _saved(build(config, world), _opened(config, True, (), world))
        if digest_of_files(saved.path) != digest_of_files(again.path):
            changed = diff_files(saved.path, again.path).changed
            where = f" in {printable(changed[0].address)}" if changed else ""
            raise Corrupt(f"the reloaded state differs{where}", "A run would not resume as it stopped.")
        return Rehearsal(
            parameters={name: sum(p.numel() for p in model.parameters()) for name, model in trainer.models.items()},
            train_samples=trainer.data.train_count,
            val_samples=len(trainer.data.held),
            steps=trainer.total_steps,
            loss=trainer.loss or 0.0,
            step_seconds=seconds,
            save_seconds=saving,
            checkpoint_bytes=size_of(saved.path),
            activations=activations,
            without=_activations_of_all(config, world),
            device=str(world.device),
        )


def _saved(trainer: Trainer, folder: ConfiguredRun) -> tuple[SavedState, float]:
    """The checkpoint of a trainer in a run, from whose newest it goes on; and the seconds that the save took."""
    with TrainerRun(trainer, folder, Stopping(), lambda text: None) as run:
        began = time.perf_counter()
        run.save()
        run.close()
        return folder.store.all()[-1], time.perf_counter() - began


def _rehearsed_step(trainer: Trainer) -> tuple[int, float]:
    """Takes a step; returns the bytes of activations that it kept, and its seconds."""
    began = time.perf_counter()
    with kept_bytes() as kept:
        one_step(trainer, next(trainer.data.stream(trainer)), Hooks([]))
    return kept.bytes, time.perf_counter() - began


def _activations_of_all(config: Config, world: World) -> int | None:
    """The bytes that a step keeps without activation checkpointing; None where that is off."""
    if config.train.activation_checkpoint is None:
        return None
    values = config.dumped()
    values["train"]["activation_checkpoint"] = None
    return _rehearsed_step(build(configfile.checked(values, "run.yaml"), world))[0]


def first_difference(one: Any, other: Any, place: str = "") -> str:
    """The first address at which two trees of plain values and tensors differ, bit for bit; "" where they do not."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return "" if same and _bits(one) == _bits(other) else place or "the top"
    if isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        return next((found for key in one if (found := first_difference(one[key], other[key], f"{place}/{key}"))), "")
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return first_difference(dict(enumerate(one)), dict(enumerate(other)), place)
    return "" if type(one) is type(other) and (one == other or one != one) else place or "the top"


def first_different_tensor(one: Any, other: Any) -> str:
    """The address of the first tensor of one tree that the other has not bit for bit; "" where there is none."""
    there = dict(_tensors(other))
    return next((place for place, tensor in _tensors(one) if first_difference(tensor, there.get(place))), "")


def _tensors(tree: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield place, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        yield from _tensors(value, f"{place}/{key}" if place else str(key))


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(local(tensor).contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
