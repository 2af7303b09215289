"""`ckptool.Run`: crash-safe saving and resuming in anybody's loop, built from the same parts as the harness.

Opening takes the lock and loads the newest whole checkpoint: modules, optimizers, other objects, counters. The place in
the data and the random states are restored when the loop begins. In a save all processes gather, the first one commits
and prunes.
"""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ckptool.checkpoint.paths import absolute
from ckptool.errors import CkptoolError, Conflict, UsageError, counted, listed, printable
from ckptool.training import LOOP, moving, rng, run_folder
from ckptool.training.batches import Batches, Position, by_place, epochs_of, generators_of
from ckptool.training.parallel import World
from ckptool.training.run_folder import RunFolder, environment, to_stderr
from ckptool.training.saving import Saver, loaded, number, refuse_not_plain, refuse_settings, retention, to_cpu
from ckptool.training.state import Objects, scaler_updates
from ckptool.training.stopping import SIGNALS, Stopping, stopping
from ckptool.training.store import Retention

ELSEWHERE = "ckptool.Run('OTHER', …)"
_OPEN: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()


class Run:
    """A run that saves and resumes your own training loop.

        run = ckptool.Run("runs/x", model=model, optimizer=optimizer, scheduler=scheduler, keep_last=3)
        for step, batch in run.batches(loader, steps=10_000):
            loss = train_step(batch)
            run.log(loss=loss)
            if run.due(every=500):
                run.save(val_acc=evaluate())

    folder: the run's; an existing run is resumed from its newest whole checkpoint, damaged ones are skipped.
    objects: everything to save, by name: anything with `state_dict()` and `load_state_dict()`, and generators of torch,
    numpy and Python. Modules are saved without the prefixes of their wrappers. All global random states and the place
    in the data of `batches` are saved too.
    keep_last, keep_best, keep_every: the checkpoints to keep; keep_best: a metric of `save` and `max` or `min`, or
    these two and how many.  save_async: a thread writes while training goes on, from one copy of the state.
    seed: derive all randomness from it and the step instead of saving random states; only this resumes with the same
    random numbers on another number of processes.  stop_after: seconds.  signals: those that save and stop the run.
    verify: what resuming checks, `full` (sha256) or `size`.  say: called with each note, which else goes to stderr.

    Under torch.distributed every process makes it with the same arguments, and all of them call `save`.
    Raises `Conflict` where another process writes the run or a saved state does not fit the objects, `NoneValid` where
    checkpoints exist and none is whole, `UsageError` for an object that cannot be saved.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: tuple[str, str] | tuple[str, str, int] | None = None,
        keep_every: int = 0,
        save_async: bool = False,
        seed: int | None = None,
        stop_after: float | None = None,
        signals: Sequence[str] = SIGNALS,
        verify: str = "full",
        say: Callable[[str], Any] = to_stderr,
        **objects: Any,
    ) -> None:
        self.world = _world()
        self.say = say if self.world.is_first else lambda text: None
        self.step = 0
        self.total: int | None = None
        self.loss: float | None = None
        self.values: dict[str, Any] = {}
        self.objects, self.position = Objects(), Position()
        self._signals, self._stop = signals, Stopping(stop_after)
        self._seeding = by_place(seed, self.world.rank, self.world.device) if seed is not None else None
        self._closed = False
        self._seed, self._progress_before = seed, 0
        self._saved_counters: dict[str, Any] = {}  # counters at the last save
        self._metrics: dict[str, float] = {}  # of the step that was saved last
        self._epochs: int | None = None
        self._random: rng.State | None = None
        self._initial_random = rng.global_states()
        self._looping = False
        self._snapshot: dict[str, str] = {}
        self._notes_given: set[str] = set()
        for name, value in objects.items():
            self.objects.add(name, value)
        self._options = self.objects.options()
        self._count_updates()
        refuse_settings(os.fspath(folder), verify, signals, seed, stop_after)
        self.folder = self._open(absolute(folder), retention(keep_last, keep_best, keep_every))
        try:
            newest = self.world.first(lambda: self.folder.newest_valid(verify, self.say, note=True))
            self.resumed = newest is not None
            self._saver = Saver(
                self.folder,
                self.world,
                background=save_async,
                step=newest.step if newest else None,
                resume="run the script again: it resumes by itself",
            )
            if newest is not None:
                self._restore(loaded(newest.path, self.objects.in_parts), newest.path)
                self.say(f"resumed {printable(self.folder.folder)} from step {self.step:,}")
            self.objects.refuse_unowned_parameters()
            if self.world.is_first:
                self.folder.store.refuse_others(self.step, self.step + 1)
                facts = environment(self.world.size, self.world.device)
                self.folder.note("resume" if self.resumed else "start", step=self.step, **facts)
                self.folder.metrics.cut_back(self.step)
        except BaseException:
            self.close()
            raise
        _OPEN[self.folder.folder] = self
        weakref.finalize(self, self._saver.finish, self.say)  # a run that is dropped holds no lock

    # Opening -----------------------------------------------------------------------------------------------------

    def _open(self, folder: str, rules: Retention) -> RunFolder:
        """The run's folder, absolute since scripts change directory; only the first process makes and locks it."""
        if (before := _OPEN.pop(folder, None)) is not None:
            before.close()  # a notebook cell that is run again
        failed: CkptoolError | None = None
        opened: RunFolder | None = None
        if self.world.is_first:
            try:
                opened = _open_folder(folder, rules)
            except CkptoolError as error:
                failed = error
        if self.world.broadcast(failed is not None):
            raise failed or UsageError(f"the first process could not open the run {folder}")
        return opened or run_folder.reopen(folder, rules, write=False, elsewhere=ELSEWHERE)

    def close(self) -> None:
        """Waits for the save in progress, and releases the lock; nothing more can be saved."""
        if hasattr(self, "_saver"):
            self._saver.finish(self.say)
        elif hasattr(self, "folder"):
            self.folder.close()
        self._closed = True

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
        try:
            if kind is None:
                self._saver.wait()
        finally:
            self.close()

    # What is saved -----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_not_plain(value, f"run[{name!r}]")
        self.values[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        """A plain value of the run, or `default`."""
        return self.values.get(name, default)

    @property
    def epoch(self) -> int:
        """The epoch that `batches` is in, from 0."""
        return self.position.epoch

    @property
    def stopping(self) -> bool:
        """True once a signal came or the time is over: the loop stops after this step."""
        return self._stop.asked

    def _generators(self) -> dict[str, Any]:
        return {**self.objects.generators, **generators_of(self.position.loader)}

    def _capture(self, generators: dict[str, Any]) -> rng.State:
        """The random states to save; with a seed, those of named generators alone."""
        if self._seed is not None:
            return rng.capture(generators, rng.global_states())
        drawn = self._random or {}
        return rng.capture(generators, {name: each for name, each in self._initial_random.items() if name not in drawn})

    def _restore_random(self, state: rng.State, generators: dict[str, Any]) -> None:
        """Gives random states back; of what was left out, as it was untouched, that with which the script began."""
        rng.restore(state if self._seed is not None else {**self._initial_random, **state}, generators)

    def _gather(self, copied: bool) -> dict[str, Any]:
        """The tree to save, in the first process, or in all of them if tensors are sharded. All take part."""
        ranks = self.world.gather({"now": self._capture(self._generators()), **self.position.rank_state()})
        if not (self.world.is_first or self.objects.is_divided):
            return {}
        for name, value in self.values.items():  # again: a list may have been added to
            refuse_not_plain(value, f"run[{name!r}]")
        tree = {
            "epoch": self.position.epoch,
            "step": self.step,
            "loss": self.loss,
            **self.objects.state(),
            "generators": sorted(self.objects.generators),
            "rng_state": {"seed": self._seed, "ranks": ranks},
            "data_state": self.position.shared_state(),
            "values": self.values,
            "options": self._options,
        }
        found: dict[str, Any] = to_cpu(tree, copied=copied)
        return found

    def _restore(self, tree: dict[str, Any], where: str) -> None:
        if "rng_state" not in tree or "ranks" not in tree["rng_state"]:
            raise Conflict(f"{where} was not saved by ckptool.Run", "", f"Start in another folder: {ELSEWHERE}")
        self.objects.refuse_others(tree, where)
        self._say_options(tree["options"])
        self.objects.restore(tree, where)
        # Copied, since they would keep the file mapped.
        self.step, self.loss, self.values = tree["step"], tree["loss"], to_cpu(tree["values"], copied=True)
        ranks = tree["rng_state"]["ranks"]
        if tree["rng_state"]["seed"] != self._seed:
            raise Conflict(
                f"{where} was saved with seed={tree['rng_state']['seed']!r}, the script has seed={self._seed!r}",
                "The run would continue with other random numbers.",
                "Use the same seed",
            )
        if len(ranks) != self.world.size and self._seed is None:
            self.say(
                f"saved by {counted(len(ranks), 'process')}, resumed by {self.world.size}: their random states do not "
                "carry over, so results differ; ckptool.Run(…, seed=7) derives them from the step"
            )
        own = ranks[self.world.rank] if self.world.rank < len(ranks) else ranks[0]
        self._random = to_cpu(own["now"], copied=True)
        self.position.restore(tree["data_state"], to_cpu(own, copied=True))

    def _say_options(self, began: dict[str, Any]) -> None:
        """Says which options of optimizers the script has changed: loading their state overwrites them."""
        for name, groups in self._options.items():
            for place, (before, now) in enumerate(zip(began[name], groups, strict=False)):
                for key in [key for key in now if key in before and before[key] != now[key]]:
                    self.say(
                        f"{printable(name)}: {key} of group {place} is {now[key]!r} in the script, but was "
                        f"{before[key]!r} when the run began; the saved value is used"
                    )
        self._options = began

    # The loop ----------------------------------------------------------------------------------------------------

    def steps(self, steps: int) -> Iterator[int]:
        """The numbers of the steps, from the one after the newest checkpoint to `steps`; stops cleanly at a signal.

        Each is the number of steps that are complete when the body ends: the first is 1.
        """

        def draws() -> Generator[None]:
            if self._random is not None:
                self._restore_random(self._random, self._generators())
            while True:
                if self._seeding is not None:
                    self._seeding("step", self.step)
                yield

        return (number for number, _ in self._loop(draws(), steps))

    def batches(self, loader: Any, *, steps: int | None = None, epochs: int | None = None) -> Iterator[tuple[int, Any]]:
        """The number of each step, and its batch; resumes in the middle of an epoch.

        loader: a DataLoader, anything that can be iterated once for each epoch, or a function that returns an iterator.
        Exactly one of `steps` and `epochs`. Calls `set_epoch` of samplers and data sets.
        """
        if (steps is None) == (epochs is None):
            raise UsageError(
                "run.batches takes exactly one of steps and epochs", "", "run.batches(loader, steps=10_000)"
            )
        generators = {**self.objects.generators, **generators_of(loader)}
        place, seeding, done = self.position, self._seeding, lambda: self.step
        found = Batches(loader, place, generators, seeding, self._capture, done, epochs, self._restore_random)
        self._epochs = epochs
        return self._loop(found.resumed(self._random), steps)

    def _loop(self, data: Generator[Any], steps: int | None) -> Iterator[tuple[int, Any]]:
        if self._looping:
            raise UsageError("the run is already in a loop", "Steps of nested loops cannot be told apart.")
        self._looping, self.total, first = True, steps, self.step
        try:
            with stopping(self._signals, self._stop.after) as self._stop:
                while (steps is None or self.step < steps) and (item := next(data, _END)) is not _END:
                    self._stop.begin()
                    self.step, self._progress_before = self.step + 1, self._progress
                    yield self.step, item
                    self._save_again()
                    if self._has_updated and self.world.any_rank(self._stop.asked):
                        break
                self._end(stopped=self.world.any_rank(self._stop.asked) and self.step != steps)
        finally:
            data.close()  # its workers, too
            self._looping = False
            if self.step > first:  # another loop goes on as a resumed run does
                self._random = self._capture(self._generators())
                self.position.keep_loader_state()

    def _save_again(self) -> None:
        """Saves once more what changed in a step after it was saved: a schedule, or another optimizer's parameters."""
        if self._saver.step != self.step or not self._saved_counters:
            return
        changed = [printable(name) for name, now in self._counters().items() if now != self._saved_counters[name]]
        if self.world.any_rank(bool(changed)):
            self._say_once(
                f"{listed(changed)} changed after run.save in the same step, which is saved again: call run.save last"
            )
            self._save({})

    def _counters(self) -> dict[str, Any]:
        return {**self._updates, **self.objects.counters()}

    def _end(self, stopped: bool) -> None:
        """Saves the last step, unless that was done. Exits if the run was stopped: what follows the loop is for a
        finished one."""
        if self.step and self._saver.step != self.step:
            self._save({})
        self._saver.wait()
        signaled = self.world.broadcast(self._stop.number)
        if self.world.is_first:
            self.folder.note("stop" if stopped else "done", step=self.step, signal=signaled or None)
        if stopped:
            self.say(f"stopped after step {self.step:,}, which is saved; run the script again to go on")
            self.close()
            if signaled == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(self.world.broadcast(self._stop.exit_code))

    def _count_updates(self) -> None:
        """Counts the updates of all optimizers, which show whether a save is in the middle of a step."""
        this = weakref.ref(self)

        def counted(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (run := this()) is not None:
                run._updates[names[id(optimizer)]] += 1

        names = {id(optimizer): name for name, optimizer in self.objects.of(torch.optim.Optimizer).items()}
        self._updates = dict.fromkeys(names.values(), 0)
        for optimizer in self.objects.of(torch.optim.Optimizer).values():
            optimizer.register_step_post_hook(counted)

    @property
    def _progress(self) -> int:
        """Grows with each update of an optimizer, also one that a GradScaler skipped."""
        return sum(self._updates.values()) + sum(map(scaler_updates, self.objects.of(torch.amp.GradScaler).values()))

    @property
    def _has_updated(self) -> bool:
        """False before an optimizer has used the gradients of this step."""
        return not (self._updates and self._looping) or self._progress != self._progress_before

    # Saving ------------------------------------------------------------------------------------------------------

    def due(self, every: int | None = None, *, seconds: float | None = None) -> bool:
        """True at each multiple of `every` steps, so many seconds after the last save, and at the last step."""
        late = self._saver.is_late(seconds)
        last = self.position.over and self.position.epoch + 1 == self._epochs
        return bool(late or (every and self.step % every == 0) or self.step == self.total or last)

    def save(self, *, force: bool = False, **metrics: Any) -> None:
        """Saves the state after this step, with its metrics, then deletes the checkpoints that are not kept.

        Every process calls it. force: even if no optimizer has stepped in this step, else a `UsageError`.
        Raises `DiskFull` or `FileProblem` if it cannot be written; older checkpoints stay.
        """
        if not (force or self._has_updated):
            raise UsageError(
                f"run.save was called in step {self.step:,} before any optimizer had stepped",
                "It would hold the state before this step under this step's number, and gradients would be lost.",
                "Save after optimizer.step(); if the update was skipped on purpose: run.save(force=True)",
            )
        if averaged := self.objects.averaging_optimizer():
            raise UsageError(
                f"{averaged} is in evaluation mode",
                "The weights are its averages now, from which training cannot continue.",
                f"Call {averaged}.train() before run.save()",
            )
        self._save({name: number(value, name) for name, value in metrics.items()})

    def _save(self, metrics: dict[str, float]) -> None:
        if self._closed or (self.folder.lock is not None and self.folder.lock.fd < 0):
            raise UsageError("the run is closed", "It has released its lock.", "Make a new ckptool.Run for the folder")
        if self._saver.step != self.step:
            self._metrics = {}
        self._metrics |= {name: value for name, value in metrics.items() if value - value == 0}
        if (wanted := self.folder.retention.metric) and metrics and wanted not in self._metrics:
            self._say_once(
                f"run.save was given no {printable(wanted)}, or NaN, so keep_best cannot rank this checkpoint"
            )
        facts = {
            "epoch": self.position.epoch,
            "loss": self.loss if self.loss is None or self.loss - self.loss == 0 else str(self.loss),
            "metrics": dict(self._metrics),
            "environment": environment(self.world.size, self.world.device),
        }
        self._saver.save(self.step, self._gather, facts)
        self._saved_counters = self._counters()
        if not self._looping:
            self._random = self._capture(self._generators())
        self._name_unsaved()

    def _name_unsaved(self) -> None:
        """Names, once each, what changed since the last save, is reachable from the objects, and is in no state."""
        loader = self.position.loader
        roots = {**self._generators(), **self.objects.named, **({"loader": loader} if loader is not None else {})}
        now = {**moving.snapshot(roots), **self.objects.requires_grad()}
        saved = moving.saved_names(roots, {name: value.state_dict() for name, value in self.objects.modules.items()})
        saved |= {*self._generators(), *(self.objects.named.keys() - self.objects.modules.keys()), *epochs_of(loader)}
        if name := self.objects.optimizer_without_its_schedule():
            self._say_once(
                f"{printable(name)} has a learning rate schedule, which was not given to ckptool.Run and is not saved"
            )
        for name, kind in moving.unsaved(self._snapshot or now, now, saved):
            self._say_once(f"{printable(name)} ({kind}) changes during training and is not saved")
        self._snapshot = now

    def _say_once(self, text: str) -> None:
        if text not in self._notes_given:
            self._notes_given.add(text)
            self.say(text)

    def log(self, step: int | None = None, **numbers: Any) -> None:
        """Adds a line of numbers to metrics.jsonl, for this step unless another is given; only in the first process."""
        if type(step) not in (int, type(None)):
            raise UsageError(f"run.log was given {type(step).__name__} as the step", "", "run.log(step, loss=loss)")
        found = {name: number(value, name) for name, value in numbers.items()}
        self.loss = found.get("loss", self.loss)
        if self.world.is_first:
            self.folder.metrics.add({"step": self.step if step is None else step, "epoch": self.epoch, **found})

    @contextmanager
    def evaluating(self, *modules: nn.Module) -> Iterator[None]:
        """Evaluation mode without gradients; restores the modes of all modules, and all generators, afterwards.

        So an evaluation has no effect on training, however often it is done.
        """
        parts = [part for module in modules or self.objects.modules.values() for part in module.modules()]
        modes = [(part, part.training) for part in parts]
        with rng.forked(self._generators()), torch.no_grad():
            for part in parts:
                part.training = False
            try:
                yield
            finally:
                for part, mode in modes:
                    part.training = mode


_END = object()


def _world() -> World:
    """The processes of torch.distributed, as the script has set them up."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return World()
    on_cuda = "nccl" in str(distributed.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return World(distributed.get_rank(), distributed.get_world_size(), device, True)


def _open_folder(folder: str, rules: Retention) -> RunFolder:
    """The folder of an existing run, or of a new one."""
    if run_folder.is_run(folder):
        return run_folder.reopen(folder, rules, elsewhere=ELSEWHERE)
    settings = {
        LOOP: os.path.basename(sys.argv[0]) or "python",
        "save": {"keep_last": rules.last, "keep_best": rules.best, "keep_every": rules.every},
        "eval": {"metric": rules.metric, "mode": rules.mode},
    }
    return run_folder.create(folder, settings, rules, ELSEWHERE)
