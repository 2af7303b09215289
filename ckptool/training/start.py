"""`train` and `resume`: a run from its configuration to its end; and a rehearsal of one."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ckptool.checkpoint.paths import absolute
from ckptool.errors import CkptoolError, Corrupt, UsageError, listed, printable
from ckptool.training import CHANGED, CONFIG, TABLE, configfile
from ckptool.training.code_paths import code_names
from ckptool.training.config import Config, changes, refuse_fixed
from ckptool.training.data import Samples
from ckptool.training.extensions import is_theirs, name_culprits
from ckptool.training.hooks import Hooks, Progress
from ckptool.training.loop import one_step, train
from ckptool.training.models import Say, kept_bytes
from ckptool.training.parallel import World, world_of
from ckptool.training.reports import Outcome, Rehearsal
from ckptool.training.run_folder import environment, is_run
from ckptool.training.runs import ConfiguredRun, create, read_config, reopen
from ckptool.training.saving import committed, loaded
from ckptool.training.shards import local
from ckptool.training.stopping import stopping
from ckptool.training.store import SavedState, size_of
from ckptool.training.trainer import Trainer, build, gathered, in_parts, restored


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
    with world_of(config) as world:
        run = _open(config, there and resume != "never", asked, world)
        try:
            return _trained(run, world, progress, say if say and world.is_first else lambda text: None)
        finally:
            run.close()


def resume(
    folder: str, changes: Sequence[str] = (), *, progress: Progress | None = None, say: Say | None = None
) -> Outcome:
    """Goes on with a run where it stopped, with `KEY=VALUE` changes of what may change."""
    _, before = read_config(folder)
    config = configfile.changed({**before.dumped(), "run": folder}, changes, os.path.join(folder, CONFIG))
    return start(
        config, resume="must", asked=[change.partition("=")[0] for change in changes], progress=progress, say=say
    )


def _open(config: Config, there: bool, asked: Sequence[str], world: World) -> ConfiguredRun:
    """The run's folder; in all processes but the first without its lock."""
    failed: CkptoolError | None = None
    if world.is_first:
        try:
            if there:
                refuse_fixed(changes(read_config(config.run)[1], config), asked, config.run)
            run = reopen(config.run, config) if there else create(config)
        except CkptoolError as error:
            failed = error
    if world.broadcast(failed is not None):
        raise failed or UsageError(f"the first process could not open the run {config.run}")
    return run if world.is_first else reopen(config.run, config, write=False)


def _trained(run: ConfiguredRun, world: World, progress: Progress | None, say: Say) -> Outcome:
    config = run.config
    hooks = Hooks(config.hooks, progress if world.is_first else None)
    with name_culprits(), switches_given_back(), stopping(config.stop.signals, config.stop.after) as stop:
        trainer = build(config, world, say, fresh=not run.store.all())
        saved = _restore(trainer, run, say)
        run.fingerprint = fingerprint(config, trainer.data)
        changed = differences((saved.sidecar or {}).get("fingerprint"), run.fingerprint) if saved is not None else []
        if changed:
            say(f"resumed from step {trainer.step}, but {'; '.join(changed)}: the result may differ")
        if world.is_first:
            run.store.refuse_others(trainer.step, trainer.total_steps)
            for name in _more_files(config):
                run.claim(name)
            # Records changes of the configuration, with which the run goes on from now.
            found = changes(read_config(run.folder)[1], run.config)
            if noted := {change.key: [change.before, change.after] for change in found if change.key != "run"}:
                run.revision += 1
                run.note(CHANGED, changes=noted, config=run.config.dumped(), revision=run.revision)
            facts = {key: value for key, value in (("changed", changed), ("skipped", trainer.skipped)) if value}
            event = "start" if saved is None else "resume"
            run.note(event, step=trainer.step, **facts, **environment(world.size, world.device))
            run.metrics.cut_back(trainer.step)
        return train(trainer, run, stop, hooks)


def _more_files(config: Config) -> list[str]:
    """The names of the files that hooks write into the run's folder."""
    profile = [config.profile.trace, config.profile.table] if config.profile is not None else []
    return [*([TABLE] if config.log.csv else []), *profile]


def _restore(trainer: Trainer, run: ConfiguredRun, say: Say) -> SavedState | None:
    """Gives the trainer the newest whole checkpoint, if there is one."""
    # One process reads it all to verify it; the others take its word.
    newest: SavedState | None = trainer.world.first(
        lambda: run.newest_valid(trainer.config.save.verify, say, note=True)
    )
    if newest is None:
        return None
    restored(trainer, loaded(newest.path, in_parts), newest.path)
    _say_environment(newest, trainer, say)
    return newest


def _say_environment(saved: SavedState, trainer: Trainer, say: Say) -> None:
    """Says so where the run goes on in an environment that may change bits."""
    before = (saved.sidecar or {}).get("environment") or {}
    now = environment(trainer.world.size, trainer.world.device)
    keys = [key for key in ("torch", "device", "threads", "world") if before.get(key) not in (None, now[key])]
    if keys:
        crossed = ", ".join(f"{key} {before[key]} → {now[key]}" for key in keys)
        say(
            f"resumed from step {saved.step} in a different environment ({crossed}): "
            "results may differ in the last bits"
        )


@contextmanager
def switches_given_back() -> Iterator[None]:
    """Restores torch's switches for determinism afterwards, for whoever called this as a library."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


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
    """Runs one step, saves, reloads and compares. Raises what would stop a run, `Corrupt` where the reload differs."""
    with tempfile.TemporaryDirectory(prefix="ckptool-dry-run-") as folder, name_culprits(), switches_given_back():
        config = configfile.checked({**config.dumped(), "run": os.path.join(folder, "run")}, "run.yaml")
        with world_of(config) as world:
            trainer = build(config, world)
            activations, seconds = _rehearsed_step(trainer)
            run = create(config)
            began = time.perf_counter()
            path = committed(run.store, trainer.step, gathered(trainer), {}, world).path
            saving = time.perf_counter() - began
            again = build(trainer.config, trainer.world)
            restored(again, loaded(path, in_parts), path)
            if differing := first_difference(gathered(trainer), gathered(again)):
                raise Corrupt(f"the reloaded state differs in {differing}", "A run would not resume as it stopped.")
            run.close()
            return Rehearsal(
                parameters={name: sum(p.numel() for p in model.parameters()) for name, model in trainer.models.items()},
                train_samples=trainer.data.train_count,
                val_samples=len(trainer.data.held),
                steps=trainer.total_steps,
                loss=trainer.loss or 0.0,
                step_seconds=seconds,
                save_seconds=saving,
                checkpoint_bytes=size_of(path),
                activations=activations,
                without=_activations_of_all(config, world),
                device=str(world.device),
            )


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
