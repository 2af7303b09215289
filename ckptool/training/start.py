"""`train` and `resume`: a run from its configuration to its end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ckptool.errors import CkptoolError, Conflict, UsageError, printable
from ckptool.training import configfile
from ckptool.training.blame import blamed
from ckptool.training.config import Config
from ckptool.training.fingerprint import differences, fingerprint
from ckptool.training.hooks import Hooks, Told
from ckptool.training.layout import CHANGED, CONFIG
from ckptool.training.loop import Outcome, train
from ckptool.training.parallel import World, world_of
from ckptool.training.runs import Run, create, environment, is_run, read_config, reopen
from ckptool.training.signals import stopping
from ckptool.training.state import restored
from ckptool.training.store import Saved, has_checkpoints
from ckptool.training.trainer import Trainer, build


def start(
    config: Config, *, resume: str = "never", asked: Sequence[str] = (), told: Told | None = None, say: Any = None
) -> Outcome:
    """Trains the run that a configuration names: from the beginning, or from its newest whole checkpoint.

    resume: `never` refuses a run that is there, `auto` starts or goes on, `must` refuses one that is not. asked: keys that were `--set`.
    say: told in a sentence what happens. Raises `Conflict`, `NoneValid`, `UsageError`, or whatever building or saving raises.
    """
    there = is_run(config.run)
    if resume == "must" and not there:
        read_config(config.run)  # says what is missing
    with world_of(config) as world:
        run = _open(config, there and resume != "never", asked, world)
        try:
            return _trained(config, run, world, told, say if say and world.is_first else lambda text: None)
        finally:
            if run.lock is not None:
                run.lock.release()


def resume(folder: str, changes: Sequence[str] = (), *, told: Told | None = None, say: Any = None) -> Outcome:
    """Goes on with a run where it stopped, with `KEY=VALUE` changes of what may change."""
    _, before = read_config(folder)
    values = {**before.dumped(), "run": folder}
    config = configfile.changed(values, changes, os.path.join(folder, CONFIG))
    return start(config, resume="must", asked=[change.partition("=")[0] for change in changes], told=told, say=say)


def _open(config: Config, there: bool, asked: Sequence[str], world: World) -> Run:
    """The run's folder; in all processes but the first without its lock."""
    run = None
    failed: CkptoolError | None = None
    if world.is_first:
        try:
            if there:
                configfile.refuse_fixed(configfile.changes(read_config(config.run)[1], config), asked, config.run)
                run = reopen(config.run, config)
            else:
                run = create(config)
        except CkptoolError as error:
            failed = error
    if world.told(failed is not None):
        raise failed or UsageError(f"the first process could not open the run {printable(config.run)}")
    return run if run is not None else reopen(config.run, config, write=False)


def _note_changes(run: Run) -> None:
    """Notes what of the configuration was changed: the run goes on with that the next time, too."""
    found = configfile.changes(read_config(run.folder)[1], run.config)
    if noted := {change.key: [change.before, change.after] for change in found if change.key != "run"}:
        run.revision += 1
        run.note(CHANGED, changes=noted, config=run.config.dumped(), revision=run.revision)


def _trained(config: Config, run: Run, world: World, told: Told | None, say: Any) -> Outcome:
    hooks = Hooks(config.hooks, told if world.is_first else None)
    with blamed(), switches_given_back(config), stopping(config.stop) as stop:
        trainer = build(config, world, say, fresh=not run.store.all())
        saved = _restore(trainer, run, say)
        run.fingerprint = fingerprint(config, trainer.data)
        changed = differences((saved.sidecar or {}).get("fingerprint"), run.fingerprint) if saved is not None else []
        if changed:
            say(f"resumed from step {trainer.step}, but {'; '.join(changed)}: the result may differ")
        if world.is_first:
            run.store.refuse_others(trainer.step, trainer.total_steps)
            if config.profile is not None:
                run.claim(config.profile.trace)
            _note_changes(run)
            event = "resume" if saved is not None else "start"
            run.note(
                event,
                step=trainer.step,
                **({"changed": changed} if changed else {}),
                **environment(world.size, world.device),
            )
            run.metrics.cut_back(trainer.step)
        return train(trainer, run, stop, hooks)


def _restore(trainer: Trainer, run: Run, say: Any) -> Saved | None:
    """Gives the trainer the newest whole checkpoint, if there is one."""

    def damaged(saved: Saved, error: CkptoolError) -> None:
        say(f"skipped {printable(saved.path)}: {error.what}")
        if trainer.world.is_first:
            run.note("skip-damaged", step=saved.step, path=saved.path, why=error.what)

    newest = run.store.newest_valid(trainer.config.save.verify, damaged)
    if newest is None:
        if has_checkpoints(run.folder):
            raise Conflict(
                f"{printable(run.folder)} holds checkpoints, and none of them is of this run",
                "They are of the run whose run.yaml lay here before. They were left as they are.",
                "Put that run.yaml back, or start this run in another folder: --set run=OTHER",
            )
        return None
    tree: Any = torch.load(newest.path, map_location="cpu", mmap=True, weights_only=True)
    restored(trainer, tree, printable(newest.path))
    del tree
    _crossing(newest, trainer, say)
    return newest


def _crossing(saved: Saved, trainer: Trainer, say: Any) -> None:
    """One line where the run goes on under conditions that may change bits."""
    before = (saved.sidecar or {}).get("environment") or {}
    now = environment(trainer.world.size, trainer.world.device)
    crossed = [
        f"{key} {before[key]} → {now[key]}"
        for key in ("torch", "device", "threads", "world")
        if before.get(key) not in (None, now[key])
    ]
    if crossed:
        say(
            f"resumed from step {saved.step} in a different environment ({', '.join(crossed)}): results may differ in the last bits"
        )


@contextmanager
def switches_given_back(config: Config) -> Iterator[None]:
    """Determinism switches, given back afterwards to whoever called this as a library."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
