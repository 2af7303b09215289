"""`ckptool.Run`: crash-safe saving and resuming in anybody's loop, built from the same parts as the harness.

Opening takes the lock and loads the newest whole checkpoint: modules, optimizers, other objects, counters. The place in
the data and the random states are restored when the loop begins. `save` only marks; the loop commits at its points: the
end of a step, and in `epochs` the end of an epoch, which is also that of its last step. In a commit all processes
gather, the first one writes and prunes.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptool.checkpoint.paths import absolute
from ckptool.errors import Conflict, UsageError, counted, listed, printable
from ckptool.training import LOOP, rng, run_folder
from ckptool.training.batches import Position, batches_of, generators_of, workers_spared
from ckptool.training.parallel import World
from ckptool.training.run_folder import environment, to_stderr
from ckptool.training.saving import Saver, checked_rules, loaded, number, refuse_not_plain, to_cpu
from ckptool.training.seen import Looks
from ckptool.training.state import SUFFIX, Objects, Window, evaluation_mode, ranks_with_own, with_own
from ckptool.training.stopping import SIGNALS, Stopping, counters_around, left_by_break, loop_frame, stopping
from ckptool.training.store import LOGGED, Retention, RunFolder, SavedState

_OPEN: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()


class Point(NamedTuple):
    """The part of a saved state that fetching the next batch would change.

    place: in the data, the same in all processes.  rank: the state of this process.  states: of objects by name.
    """

    place: dict[str, Any]
    rank: dict[str, Any]
    states: dict[str, Any]


class Run:
    """A run that saves and resumes your own training loop.

        run = ckptool.Run("runs/x", model=model, optimizer=optimizer, scheduler=scheduler, keep_last=3)
        for step, batch in run.batches(loader, steps=10_000):
            loss = train_step(batch)
            run.log(loss=loss)
            run.save(every=500, val_acc=evaluate)

    folder: the run's; an existing run is resumed from its newest whole checkpoint, damaged ones are skipped.
    objects: everything to save, by name: anything with `state_dict()` and `load_state_dict()`, and generators of torch,
    numpy and Python. Modules are saved without the prefixes of their wrappers. All global random states and the place
    in the data of `batches` are saved too.
    keep_last, keep_best, keep_every: the checkpoints to keep; keep_best: a metric of `save` and `max` or `min`, or
    these two and how many.  save_async: a thread writes while training goes on, from one copy of the state.
    seed: derive all randomness from it and the step instead of saving random states; only this resumes with the same
    random numbers on a different number of processes.  stop_after: seconds.  signals: those that save and stop the run.
    verify: what resuming checks, `full` (sha256) or `size`.  say: called with each note; else stderr.

    Nested epochs, with what follows each: `for epoch in run.epochs(4): for step, batch in run.batches(loader): …`.
    Under torch.distributed every process makes it with the same arguments, and all of them call `save`.
    Raises `Conflict` where another process writes the run or a saved state does not fit the objects, `NoneValid` where
    checkpoints exist and none is whole, `UsageError` for an object that cannot be saved.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | RunFolder,
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
        self.objects, self.position = Objects(objects), Position()
        self.world = _world(self.objects)
        self.say = say if self.world.is_first else lambda text: None
        self.step = 0
        self.loss: float | None = None
        self.values: dict[str, Any] = {}
        self._signals, self._stop = signals, Stopping(stop_after)
        self._seed, self._closed = seed, False
        self._marked: dict[str, Any] | None = None  # the metrics of a save that the loop is to commit
        self._offered: tuple[int, dict[str, Any]] = (-1, {})  # the metrics of a save that was not due, and its step
        self._metrics: dict[str, float] = {}  # of the step that was saved last
        self._counted: int | None = None  # the step of the newest save that was not made only to stop
        self._loop = ""  # the loop that runs: `run.epochs`, or another
        self._has_batches = False  # in this epoch of `run.epochs`
        self._caught = ExitStack()  # signals, in a loop
        self._waits: tuple[int, int] | None = None  # a save, since this step and this count of `_window.steps`
        self._unreached: Point | None = None  # of a commit in progress, or one that failed
        self._failed: BaseException | None = None  # a commit at `break`: Python drops what a generator raises there
        self._ended: dict[str, int] | None = None  # by `break`: the length that the loop had then
        self._initial_random = rng.global_states()
        self._drawn: set[str] = set()  # the global generators that were ever drawn from
        self._random: rng.State | None = None  # with which the next loop begins
        self._resumed: _Resumed | None = None  # until the loop begins
        self._goes_on = True  # False in a resumed process until it is where the checkpoint was saved
        self._kind: str | None = None  # of the loop that this process, or the checkpoint, is in: steps, epochs
        self._looks = Looks(self.objects)
        self._notes_given: set[str] = set()
        self._iterator: Callable[[], Any] = lambda: None  # of the loop, as the script has it
        self._ended_at: tuple[Any, ...] = ()  # the place in the script of the last loop that ran to its end
        ddp = {name: each for name, each in objects.items() if isinstance(each, nn.parallel.DistributedDataParallel)}
        self._broadcast = {name for name, each in ddp.items() if each.broadcast_buffers}
        self._options = self.objects.options()
        self._window = Window(self.objects)
        if not isinstance(folder, RunFolder):  # which the harness opens by its configuration
            keep = keep_last, keep_best, keep_every
            rules = checked_rules(keep, os.fspath(folder), verify, signals, seed, stop_after)
            folder = _opened(absolute(folder), rules, self.world)  # absolute, since scripts change directory
        self.folder = folder
        try:
            newest = self.world.first(lambda: self.folder.newest_valid(verify, self.say))
            self.resumed, self._logged = newest is not None, 0 if newest is None else newest.sidecar.get(LOGGED)
            self._saver = Saver(self.folder, self.world, save_async, newest.step if newest else None)
            if newest is not None:
                steps = self.world.first(lambda: [s.step for s in self.folder.all() if not s.is_stop])
                self._counted = max((step for step in steps if step <= newest.step), default=None)
                self._restore(newest)
            self.objects.refuse_unowned_parameters()
            # Unless it looks for unused parameters, it rebuilds its buckets.
            if self.world.size > 2 and not all(each.find_unused_parameters for each in ddp.values()):
                self.say(
                    "DistributedDataParallel changes the order of its sums after its first step, so with more than two "
                    "processes the last bits of a resumed run differ; find_unused_parameters=True keeps the order"
                )
            if self.world.is_first:
                self._note_begin()
        except BaseException:
            self.folder.close()
            raise
        _OPEN[self.folder.folder] = self
        # A run that is garbage-collected releases its lock; one that is there when the program ends says more.
        weakref.finalize(self, finish_left, weakref.ref(self), self._saver, self.say)

    # Opening -----------------------------------------------------------------------------------------------------

    def _note_begin(self, **facts: Any) -> None:
        """Notes in the history that the run starts, or where it resumes; called in the first process."""
        self.folder.refuse_others(self.step, self.step + 1)
        facts |= environment(self.world.size, self.world.device)
        self.folder.note("resume" if self.resumed else "start", step=self.step, **facts)
        self.folder.metrics.cut_back(self.step, self._logged)
        self._logged = self.folder.metrics.size

    def close(self) -> None:
        """Waits for the save in progress, and releases the lock; nothing more can be saved.

        Raises what went wrong in the save at `break`.
        """
        self._say_unsaved()
        self._caught.close()
        self._saver.finish(self.say)
        error, self._failed, self._closed = self._failed, None, True
        if error is not None:
            raise error

    def _say_unsaved(self) -> None:
        if self._loop and not self._closed and self._saver.step != self.step:
            self.say(
                f"step {self.step:,} was not saved: the run was closed, or the program ended, before the loop; or a "
                "variable still holds its iterator, so that its `break` is not seen: let the loop alone hold it, "
                "for … in tqdm(run.batches(…))"
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
        try:
            if kind is None:
                self._saver.wait()
            else:
                self._failed = None  # what ended the loop is raised
        finally:
            self.close()

    # What is saved -----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_not_plain(value, f"run[{name!r}]")
        self.values[name] = value

    def __getattr__(self, name: str) -> Any:
        why = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name == "due":  # of 0.1.0
            why = "`run.due` is gone: run.save(every=500, val=evaluate) marks, and calls evaluate when it is due"
        raise AttributeError(why, name=name, obj=self)

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        """A plain value of the run, or `default`."""
        return self.values.get(name, default)

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self.position.epoch

    @property
    def stopping(self) -> bool:
        """True once a signal came or the time is over: the loop stops at its next point."""
        return self._stop.asked

    def _reseed(self, *place: object) -> None:
        """Seeds all generators for a place, if the run has a seed."""
        if self._seed is not None:
            rng.seed_all(self.world.device, self._seed, *place, self.world.rank)

    def _generators(self) -> dict[str, Any]:
        return {**self.objects.generators, **generators_of(self.position.loader)}

    def _capture(self, generators: dict[str, Any]) -> rng.State:
        """The random states now; with a seed, those of named generators alone."""
        return rng.capture(generators, with_global=self._seed is None)

    def _restore_random(self, state: rng.State | None, generators: dict[str, Any]) -> None:
        """Restores random states; generators that were never drawn from get those with which the script began."""
        if state is not None:
            rng.restore(state if self._seed is not None else {**self._initial_random, **state}, generators)

    def _point(self) -> Point:
        now, position = self._capture(self._generators()), self.position
        self._drawn |= rng.moved(now, self._initial_random) - {"generators"}
        rank = {**position.rank_state(), "now": now}
        for key in rank.keys() & {"now", "epoch_start", "body_start"}:
            drawn = {*self._drawn, "generators"}  # others may differ in every process
            rank[key] = rank[key] and {name: state for name, state in rank[key].items() if name in drawn}
        return Point(position.common_state(), rank, self.objects.states_of_others())

    def _tree(self, point: Point, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """The tree to save. ranks: `Point.rank` of each process."""
        for name, value in self.values.items():  # again: a list may have grown since
            refuse_not_plain(value, f"run[{name!r}]")
        place = {**point.place, "ended": self._ended, "loop": self._kind}
        return {
            "epoch": place["epoch"],
            "step": self.step,
            "loss": self.loss,
            **self.objects.state(point.states),
            "generators": sorted(self.objects.generators),
            "rng_state": {"seed": self._seed, "ranks": ranks},
            "data_state": {**place, "renewing": sorted(self._window.renewing)},
            "values": self.values,
            "options": self._options,
            "flags": self.objects.flags(),
        }

    def _restore(self, saved: SavedState) -> None:
        where = saved.path
        tree = loaded(where, self.objects.in_parts)
        if "rng_state" not in tree or "ranks" not in tree["rng_state"]:
            fix = f"Start in another folder: {self.folder.elsewhere}"
            raise Conflict(f"{where} was not saved by ckptool.Run", "", fix)
        self.objects.refuse_others(tree, where)
        for name, groups in self._options.items():  # which loading the states overwrites
            for index, (before, now) in enumerate(zip(tree["options"].get(name, ()), groups, strict=False)):
                of = f" of group {index}" if name in self.objects.of(torch.optim.Optimizer) else ""
                for key in [key for key in now if key in before and before[key] != now[key]]:
                    self.say(
                        f"{printable(name)}: {key}{of} is {now[key]!r} in the script, but was {before[key]!r} when the "
                        "run began; the saved value is used"
                    )
        self._options, self.step, self.loss = tree["options"], tree["step"], tree["loss"]
        self._metrics = saved.metrics
        self._take(tree, where)
        ranks = tree["rng_state"]["ranks"]
        if tree["rng_state"]["seed"] != self._seed:
            what = f"{where} was saved with seed={tree['rng_state']['seed']!r}, the script has seed={self._seed!r}"
            raise Conflict(what, "The run would continue with different random numbers.", "Use the same seed")
        if len(ranks) != self.world.size:
            change = f"saved by {counted(len(ranks), 'process', 'processes')}, resumed by {self.world.size:,}"
            why = "random states do not carry over, so results differ: ckptool.Run(…, seed=7) derives them"
            if self._seed is not None:
                why = "random numbers follow from the seed, but in a different order of summation: the last bits differ"
            self.say(f"{change}: {why}")
        rank = to_cpu(ranks[self.world.rank] if self.world.rank < len(ranks) else ranks[0], copied=True)
        place = tree["data_state"]
        self._random, self._ended, self._kind = rank["now"], place.get("ended"), place.get("loop")
        self._window.renewing = set(place.get("renewing", ()))
        self._drawn = set(rank["now"]) - {"generators"}
        self.position.restore(place, rank)
        values, self._goes_on = to_cpu(self.values, copied=True), False
        random, objects = self._capture(self.objects.generators), self.objects
        self._resumed = _Resumed(where, values, random, objects.options(), objects.flags())
        self.say(f"resumed {printable(self.folder.folder)} from step {self.step:,}")

    def _take(self, tree: dict[str, Any], where: str) -> None:
        """Loads the objects and the values from the tree of a checkpoint; tensors that they share stay shared."""
        ranks = tree["rng_state"]["ranks"]
        tree = with_own(tree, ranks[self.world.rank] if self.world.rank < len(ranks) else {})
        keys = ["values", *(name + SUFFIX for name in self.objects.others)]
        copied = to_cpu({key: tree[key] for key in keys}, copied=True)  # they would keep the file mapped
        self.objects.restore({**tree, **copied}, where)
        self.objects.set_flags(tree.get("flags", {}))
        self.values = copied["values"]

    # The loop ----------------------------------------------------------------------------------------------------

    def epochs(self, epochs: int) -> Iterator[int]:
        """The numbers of the epochs, from the one that the newest checkpoint is in to `epochs - 1`.

        `batches` in it yields the steps of one epoch. What follows that belongs to the epoch: a save that is marked in
        its last step or later, and a signal, wait for the end of this body. Without `batches` an epoch is one step.
        """
        return self._tracked(self._epochs("run.epochs", {"epochs": epochs}))

    def steps(self, steps: int) -> Iterator[int]:
        """The numbers of the steps, from the one after the newest checkpoint to `steps`; stops cleanly at a signal.

        Each is the number of steps that are complete when the body ends: the first is 1.
        """

        def draws() -> Generator[None]:
            self._restore_random(self._random, self._generators())
            while True:
                self._reseed("step", self.step)
                yield

        return self._tracked(number for number, _ in self._flat(draws, {"steps": steps}))

    def batches(self, loader: Any, *, steps: int | None = None, epochs: int | None = None) -> Iterator[tuple[int, Any]]:
        """The number of each step, and its batch; resumes in the middle of an epoch.

        loader: a DataLoader, anything that can be iterated once for each epoch, or a function that returns an iterator.
        Exactly one of `steps` and `epochs`; inside `run.epochs` neither. Calls `set_epoch` of samplers and data sets.
        """
        nested = self._loop == "run.epochs"
        length = {kind: count for kind, count in (("steps", steps), ("epochs", epochs)) if count is not None}
        if len(length) != (not nested):
            takes = "neither steps nor epochs inside run.epochs" if nested else "exactly one of steps and epochs"
            what = f"run.batches takes {takes}"
            fix = "run.batches(loader, steps=10_000); or inside `for epoch in run.epochs(4)`: run.batches(loader)"
            raise UsageError(what, "", fix)
        if hasattr(loader, "__next__"):
            what = f"run.batches was given {type(loader).__name__}, an iterator, which ends with its first epoch"
            fix = "Give the loader itself, or a function that returns an iterator: run.batches(lambda: zip(a, b))"
            raise UsageError(what, "It cannot start over, neither for the next epoch nor to resume.", fix)
        self.position.loader = loader
        if nested:
            return self._tracked(self._one_epoch(self._epoch_of(loader), {}))
        return self._tracked(self._flat(lambda: self._epoch_of(loader), length))

    def _tracked(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The iterator for the script, with a reference kept to find it later (`counters_around`)."""
        self._iterator = weakref.ref(iterator)
        return iterator

    def _flat(self, epoch: Callable[[], Generator[Any]], length: dict[str, int]) -> Iterator[tuple[int, Any]]:
        """The loop over steps: a loop over epochs whose bodies have nothing else. epoch: returns the data of one."""
        for _ in self._epochs("run.steps" if self.position.loader is None else "run.batches", length):
            yield from self._one_epoch(epoch(), length)

    def _epochs(self, name: str, length: dict[str, int]) -> Iterator[int]:
        """The loop over epochs. name: of the method that makes it.  length: how many steps or epochs."""
        loop, is_nested = loop_frame(), name == "run.epochs"
        ((kind, count),) = length.items()
        done = self.step if kind == "steps" else self.position.epoch
        if not self._goes_on and self.world.is_first:  # what followed the checkpoint is logged again
            self.folder.metrics.cut_back(self.step, self._logged)
        is_behind = done == count and self._kind not in (kind, None)  # the checkpoint is of a later loop
        self._goes_on |= done + (kind == "epochs" and self.position.batch > 0) <= count and not is_behind
        self._kind = kind if self._goes_on else self._kind
        if self._resumed is not None and self._goes_on and self._is_over(length) and self._ended is None:
            self._say_once(f"finished: {counted(done, kind[:-1])} of {count:,} are done; to train on, ask for more")
        if loop == self._ended_at and not self._is_over(length):
            self._say_once(
                f"{name} runs again at the same place of the script: what comes in between is not repeated if the run "
                "is killed there; write: for epoch in run.epochs(4): for step, batch in run.batches(loader): …"
            )
        if self.step and not self._is_over(length) and self._window.is_open:
            self._say_once(
                f"after step {self.step:,} a loop begins with gradients that no optimizer.step() has used. They are in "
                "no checkpoint, and a resumed run goes on without them: before a loop, use them or call zero_grad()"
            )
        with self._looping(name):
            if not self.position.batch or self._is_over(length):
                self._restore_random(self._random, self._generators())
            elif is_nested:  # the body draws again what it drew before its batches
                self._restore_random(self.position.body, self.objects.generators)
            try:
                while not self._is_over(length):
                    self._stop.begin()
                    self._window.begin()
                    self._has_batches, self.step = False, self.step + 1  # taken back where `batches` counts
                    if is_nested:
                        self._reseed("body", self.position.epoch)
                        self.position.body = self._capture(self.objects.generators)
                    yield self.position.epoch
                    if self._is_over(length):
                        break
                    self.position.next_epoch(self.step)
                    save, stop = self._requests()
                    if (save or stop) and not self._is_over(length):  # else `_end` commits it
                        self._at_point(self._point(), stop=stop)
            except GeneratorExit:
                by_break = False if self._closed else left_by_break(loop)
                if by_break is None and self._saver.step != self.step:
                    self.say(
                        f"step {self.step:,} was not saved: the data failed, or what is around {name} ended the loop; "
                        "leave it by `break`, or put it inside: run.batches(lambda: islice(loader, 100))"
                    )
                if by_break:
                    if is_nested:
                        self.position.next_epoch(self.step)
                    try:
                        self._end(length)
                    except BaseException as error:  # noqa: BLE001  `close` raises it: here, Python would drop it
                        self._failed = error
                        self.say(f"step {self.step:,}, where `break` left the loop, was not saved: {error}")
                raise
            self._end()
            self._ended_at = loop

    def _epoch_of(self, loader: Any) -> Generator[Any]:
        """The data of the current epoch, from the run's place on."""
        resumed = bool(self.position.batch)
        if resumed and (origin := self._resumed) is not None:  # undoes what the body of `epochs` repeated
            self._take(loaded(origin.path, self.objects.in_parts), origin.path)
            self._resumed = None
            self._say_counted()
        random, self._random = self._random, None
        if random is not None and not resumed:  # the loop began before the loader was known
            rng.restore({"generators": random["generators"]}, generators_of(loader))
        yield from batches_of(self, loader, random if resumed else None)

    def _one_epoch(self, data: Generator[Any], length: dict[str, int]) -> Iterator[tuple[int, Any]]:
        """The steps of an epoch, each with its batch; commits at the end of each but the last."""
        try:
            if self._has_batches:
                raise UsageError(
                    "run.batches was called twice in one epoch of run.epochs",
                    "Its batches are those trained on.",
                    "Call it once; for a validation: for batch in loader; for two: "
                    "run.batches(lambda: itertools.chain(one, other))",
                )
            self._has_batches, self.step = True, self.step - 1
            item = next(data, _END)
            while item is not _END:
                self._stop.begin()
                self.step += 1
                self._window.begin()
                yield self.step, item
                if self._is_over(length):
                    return
                save, stop = self._requests()
                point = self._point() if save or stop else None
                item = next(data, _END)  # before the commit: without a next batch this is the end of the epoch
                if point is not None and item is not _END:
                    self._at_point(point, stop=stop)
        finally:
            data.close()  # its workers, too

    @contextmanager
    def _looping(self, name: str) -> Iterator[None]:
        """A loop from its beginning, or where the checkpoint left off, to its end."""
        if self._loop:
            what = f"{name} was called inside {self._loop}"
            fix = "Nest like this: for epoch in run.epochs(4): for step, batch in run.batches(loader): …"
            raise UsageError(what, "Steps of nested loops cannot be distinguished.", fix)
        self._begin_resumed(nested=name == "run.epochs")
        self._loop, first = name, self.step
        try:
            with self._caught as caught:
                caught.enter_context(stopping(self._signals, self._stop))
                caught.enter_context(workers_spared())
                yield
        finally:
            self._loop = ""
            if self.step > first:  # a later loop goes on as a resumed run does
                self._random = self._capture(self._generators())
                self.position.loader_state = self.position.rank_state()["loader"]  # of a stateful one
            # After a failed commit, the batch that was fetched is taken back; a `TrainerRun` has no rank state.
            if (point := self._unreached) is not None and point.rank:
                self.position.restore(point.place, point.rank)
                self._random, self._unreached = point.rank["now"], None

    def _is_over(self, length: dict[str, int]) -> bool:
        """True after so many steps or epochs, or if `break` has ended a loop of as many, or more."""
        completed, ended = {"steps": self.step, "epochs": self.position.epoch}, self._ended or {}
        if by_break := [kind for kind, count in length.items() if ended.get(kind, -1) >= count]:
            self._say_once(
                f"`break` ended this run at step {self.step:,}; it trains on only if you ask for more {by_break[0]}"
            )
        return bool(by_break) or any(completed[kind] >= count for kind, count in length.items())

    def _begin_resumed(self, nested: bool) -> None:
        """When the loop of a resumed process begins: undoes and reports what the script did since `Run(…)`."""
        if (resumed := self._resumed) is None:
            return
        inside, options = nested and self.position.batch > 0, self.objects.options()
        changed = [name for name, saved in resumed.values.items() if not rng.same(self.values[name], saved)]
        self.values |= {name: to_cpu(resumed.values[name], copied=True) for name in changed}
        objects = [name for name, groups in options.items() if groups != resumed.options[name]]
        self.objects.set_flags(resumed.flags)
        names = [f"an option of {printable(name)}" for name in objects if inside or name in resumed.flags]
        for what in [*(f"run[{name!r}]" for name in sorted(changed)), *names]:
            self._say_once(
                f"{what} was set between ckptool.Run(…) and the loop, but this run is resumed: the saved value is "
                "used; set it in a step of the loop, or only if not run.resumed"
            )
        if self.position.epoch if nested else self.step:
            self._say_counted()
        self._resumed = resumed._replace(random=None) if inside else None
        for module in self.objects.modules.values() if inside else ():
            self._caught.callback(module.register_forward_pre_hook(self._note_call).remove)
        now = self._capture(self.objects.generators)
        if self._seed is None and resumed.random is not None and rng.moved(now, resumed.random):
            self._say_once(
                "random numbers were drawn, or an iterator of data begun, between ckptool.Run(…) and the first step of "
                "this resumed process. A batch that was fetched there is not the one that the stopped process had: "
                'keep it, run["batch"] = batch, and begin with: batch = run["batch"] if run.resumed else …'
            )

    def _note_call(self, module: nn.Module, inputs: Any) -> None:
        """A module is called, in a process that resumed inside an epoch: told if that is before the batches of it."""
        if not torch.compiler.is_compiling() and self._resumed is not None:
            self._say_once(
                "a model was called in the body of run.epochs before its batches, by a process that resumed inside the "
                "epoch, and so with later weights. What it gave, and the epoch needs, has to be a value of the run, "
                'run["labels"] = labels, used as run["labels"] in the steps, or for the data: run.batches(lambda: …)'
            )

    def _say_counted(self) -> None:
        for kind in counters_around(self._iterator()):
            self._say_once(
                f"`{kind}` around the loop of a resumed process counts anew: count by `step`, and put what belongs to "
                f"the batches inside: run.batches(lambda: {kind}(loader, …))"
            )

    def _requests(self) -> tuple[bool, bool]:
        """After a body: whether to commit a save, and whether to stop the run; neither in a window of accumulation,
        whose gradients would be lost."""
        if self.step == self._looks.again:
            self._say_notes(first=False)
        save, stop = self.world.any_of(self._marked is not None, self._stop.asked)
        if save and self._marked is None:  # another process asked alone
            self._marked = self._offered[1] if self._offered[0] == self.step else {}
        if (save or stop) and self.world.any_rank(self._window.is_open):
            self._waits = self._waits or (self.step, self._window.steps)
            if self._window.steps > self._waits[1] + 1:
                self._say_once(
                    f"a save has waited since step {self._waits[0]:,}: gradients are added after each "
                    "optimizer.step(), and they are in no checkpoint; call loss.backward() before optimizer.step(), or "
                    "zero_grad() after it"
                )
            return False, False
        self._waits = None
        return save, stop

    def _at_point(self, point: Point, *, stop: bool) -> None:
        """Commits a save that was marked, or one to stop the run, and stops it. point: the state of the data."""
        if self._marked is not None or self._saver.step != self.step:
            self._unreached = point
            self._commit(point, {"stop": True} if self._marked is None else {})
            self._unreached = None
        if stop:
            self._saver.wait()
            self._stop.number = max(self.world.gather(self._stop.number))  # it may have come to one process alone
            self._leave(stopped=True)

    def _leave(self, *, stopped: bool) -> None:
        """Notes how the loop ended; exits if it was stopped, since what follows it is for a finished loop."""
        number = self._stop.number if stopped else 0
        if self.world.is_first:
            self.folder.note("stop" if stopped else "done", step=self.step, signal=number or None)
        if stopped:
            self._loop = ""
            self.say(f"stopped after step {self.step:,}, which is saved; run the script again to continue")
            self.close()
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(self._stop.exit_code)

    def _end(self, length: dict[str, int] | None = None) -> None:
        """Commits the last step, unless that was done. length: of the loop, if `break` ended it."""
        if length is not None:
            self._ended = length
        if self._offered[0] == self.step:  # the last step is always due
            self._marked = {**self._offered[1], **(self._marked or {})}
        is_new = self._goes_on and self.step > 0 and self._counted != self.step
        if self._marked is not None or length is not None or is_new:
            self._commit(self._point())
        self._saver.wait()
        self.world.first(self.folder.prune)  # again: an earlier process may have been killed before it pruned
        self._reseed("end", self.step)  # the script's later draws are the same however often it was started
        self._leave(stopped=False)

    # Saving ------------------------------------------------------------------------------------------------------

    def save(self, *, every: int | None = None, seconds: float | None = None, **metrics: Any) -> None:
        """Marks a save, which the loop commits once the body has ended; outside of a loop it is saved at once.

        every: only where a multiple of so many steps was passed since the last save.  seconds: or so many went by. The
        last step of the loop is always saved.
        metrics: numbers, or functions that return one: they are called where the save is due, inside `evaluating`.
        While gradients are accumulated over steps, it waits for the `optimizer.step()` that uses them; in the last step
        of an epoch of `run.epochs`, for the end of its body. Then checkpoints are deleted that are not to be kept.
        In a loop any process may call it; outside all do. Metrics are those of the first. Raises, where it commits,
        `DiskFull` or `FileProblem`; older checkpoints stay.
        """
        for name in metrics:
            if close := difflib.get_close_matches(name, ("every", "seconds"), 1, 0.8):
                raise UsageError(f"run.save has no option {name}", "", f"Did you mean {close[0]}?")
        is_late = self._saver.is_late(seconds)  # in a loop by the clock of this process: `_requests` asks all
        passed = bool(every) and self.step // (every or 1) > (self._counted or 0) // (every or 1)
        if (every is None and seconds is None) or passed or (is_late if self._loop else self.world.any_rank(is_late)):
            self._marked = {**(self._marked or {}), **metrics}
            if not self._loop:
                self._commit(self._point())
        else:
            self._offered = self.step, metrics

    def _commit(self, point: Point, facts: dict[str, Any] | None = None) -> None:
        if self._closed or (self.folder.lock is not None and self.folder.lock.fd < 0):
            raise UsageError("the run is closed", "It has released its lock.", "Create a new ckptool.Run")
        if averaged := self.objects.averaging_optimizer():
            what = f"{averaged} is in evaluation mode"
            why = "Its weights are the averages now; training cannot continue from those."
            raise UsageError(what, why, f"Call {averaged}.train() before the step ends")
        self._measure()
        first = self._saver.step is None
        facts = {**self._facts(point), **(facts or {})}

        def gather() -> dict[str, Any]:  # all take part, and only the first has the tree, unless it is divided
            states: dict[str, Any] = {}
            if self.world.distributed and point.rank:  # a `TrainerRun` has no rank state
                states = {"values": self.values, **{name + SUFFIX: state for name, state in point.states.items()}}
                states |= self.objects.buffers(without=self._broadcast)
            ranks = ranks_with_own(point.rank, states, self.world.gather)
            return self._tree(point, ranks) if self.world.is_first or self.objects.is_divided else {}

        self._saver.save(self.step, gather, facts)
        self._counted = self._counted if "stop" in facts else self.step
        self._failed = None
        if not self._loop:
            self._random, self._goes_on = self._capture(self._generators()), True
        self._say_notes(first)

    def _facts(self, point: Point) -> dict[str, Any]:
        """The facts for the sidecar of the checkpoint."""
        return {
            "epoch": point.place["epoch"],
            "loss": self.loss if self.loss is None or self.loss - self.loss == 0 else str(self.loss),
            "metrics": dict(self._metrics),
            LOGGED: self.folder.metrics.size,
            "parent": self._counted,
            "environment": environment(self.world.size, self.world.device),
        }

    def _measure(self) -> None:
        """Takes the metrics of the marked save; calls those that are functions."""
        marked, self._marked = self._marked or {}, None
        self._metrics = self._metrics if self._saver.step == self.step else {}
        for name, value in marked.items():
            if callable(value) and not isinstance(value, torch.Tensor):
                with self.evaluating():
                    value = value()
            metric = number(value, name)
            self._metrics |= {name: metric} if metric - metric == 0 else {}
        if (ranking := self.folder.retention.metric) and marked and ranking not in self._metrics:
            self._say_once(
                f"run.save was given no {printable(ranking)}, or NaN, so keep_best cannot rank this checkpoint"
            )

    def _say_notes(self, first: bool) -> None:
        """Prints the notes after a save, once each. first: True for the first save of the run."""
        loader = self.position.loader
        if first:
            named = [*self.objects.named, *self.objects.generators, *(f"run[{name!r}]" for name in self.values)]
            contents = [*map(printable, named), *(["the place in the data"] if loader is not None else [])]
            contents += [f"the random states of {listed(sorted(self._drawn))}"] if self._drawn else []
            self._say_once(f"the checkpoint of step {self.step:,} holds {listed(contents, 20)}")
        for text in self._looks.notes(self, first):
            self._say_once(text)

    def _say_once(self, text: str) -> None:
        if text not in self._notes_given:
            self._notes_given.add(text)
            self.say(text)

    def log(self, /, step: int | None = None, **numbers: Any) -> None:
        """Adds a line of numbers to metrics.jsonl, for this step unless another is given; only in the first process."""
        if type(step) not in (int, type(None)):
            raise UsageError(f"run.log was given {type(step).__name__} as the step", "", "run.log(step, loss=loss)")
        measures = {name: number(value, name) for name, value in numbers.items()}
        self.loss = measures.get("loss", self.loss)
        repeated = self._resumed is not None and self._loop == "run.epochs"  # of an epoch that is resumed inside
        if self.world.is_first and not repeated:
            self.folder.metrics.add({"step": self.step if step is None else step, "epoch": self.epoch, **measures})

    @contextmanager
    def evaluating(self, *modules: nn.Module) -> Iterator[None]:
        """Evaluation mode without gradients; restores the modes of all modules, and all generators, afterwards.

        So an evaluation has no effect on training, however often it is done.
        """
        with rng.forked(self._generators()), evaluation_mode(modules or self.objects.modules.values()):
            yield


def finish_left(run: weakref.ref[Run], saver: Saver, say: Callable[[str], Any]) -> None:
    """Ends a run that nobody closed. After an exception, which says enough, a loop did not end by `break`."""
    if (live := run()) is not None and not hasattr(sys, "last_value"):
        live._say_unsaved()
    saver.finish(say)


_END = object()


class _Resumed(NamedTuple):
    """The checkpoint that was resumed from, until the loop begins. random: until the first loop does."""

    path: str
    values: dict[str, Any]
    random: rng.State | None
    options: dict[str, list[dict[str, Any]]]
    flags: dict[str, Any]


def _world(objects: Objects) -> World:
    """The processes of torch.distributed, as the script set them up; without them one, on its models' first device."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        parameters = (parameter for module in objects.modules.values() for parameter in module.parameters())
        first = next(parameters, None)
        return World(device=first.device) if first is not None else World()
    on_cuda = "nccl" in str(distributed.get_backend())
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return World(distributed.get_rank(), distributed.get_world_size(), device, True)


def _opened(folder: str, rules: Retention, world: World) -> RunFolder:
    """The folder of a new run, or of an existing one."""
    if (previous := _OPEN.pop(folder, None)) is not None:
        previous.close()  # a notebook cell that is run again
    settings = {
        LOOP: os.path.basename(sys.argv[0]) or "python",
        "save": {"keep_last": rules.last, "keep_best": rules.best, "keep_every": rules.every},
        "eval": {"metric": rules.metric, "mode": rules.mode},
    }
    goes_on = world.first(lambda: run_folder.is_run(folder))
    return run_folder.opened(folder, settings, rules, world, goes_on=goes_on)
