"""Strategy fsdp: models divided among processes, saved as folders, resumed on any number of them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once, and not in every process
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import ckptool
from ckptool.errors import CkptoolError, DiskFull
from tests.support.crash import Crash
from tests.support.same import first_difference
from tests.support.several_processes import processes
from tests.support.small_runs import CONV, GAN, IMAGES, contents_but_lock, own, run_to_end, toy, trainer

TEXT: dict[str, Any] = {
    "task": "lm",
    "data": {"name": toy("data.py:text"), "args": {"length": 8}, "batch": 6},
    "models": {
        "main": {"name": toy("models.py:CharGPT"), "args": {"width": 8, "layers": 2}, "freeze": ["blocks.0.norm*"]}
    },
    "optim": {"main": {"name": "adamw", "lr": 0.01, "clip": {"norm": 1.0}}},
}
PLAIN = ("train.ema=0.9", "train.steps=6", "save.every=3", "eval.every=3", "log.every=1", "train.accumulate=2")


def fsdp(path: Path, *changes: str, **sections: Any) -> Callable[[int], Any]:
    return lambda rank: run_to_end(path, "strategy=fsdp", *changes, **sections)


def end(path: Path, step: int = 6) -> dict[str, Any]:
    found: dict[str, Any] = ckptool.load(path / f"run/checkpoints/step-{step:08d}.dcp")
    return found


def losses(path: Path) -> list[float]:
    lines = map(json.loads, (path / "run/metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


@pytest.mark.long("several runs of several processes")
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(TEXT, id="text", marks=pytest.mark.soak),
        pytest.param({"data": IMAGES, "models": {"main": CONV}}, id="conv"),
    ],
)
def test_a_run_that_is_resumed_ends_the_same_and_a_save_at_step_0_changes_nothing(
    sections: dict[str, Any], tmp_path: Path
) -> None:
    """Tied, frozen and averaged weights, clipping, accumulation, BatchNorm's buffers, dropout."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    processes(2, fsdp(whole, *PLAIN, **sections))
    again = (*PLAIN, "save.at_start=true", "save.async=true")  # saved meanwhile, too
    processes(2, fsdp(parts, *again, "train.steps=3", **sections), fsdp(parts, *again, **sections))
    assert first_difference(end(whole), end(parts)) == ""
    assert {"step-00000000.dcp", "step-00000003.dcp"} <= set(os.listdir(parts / "run/checkpoints"))


@pytest.mark.long("three runs of several processes")
@pytest.mark.parametrize("which", [slice(2, 3), pytest.param(slice(0, 4), marks=pytest.mark.soak)], ids=str)
def test_it_goes_on_with_other_processes_and_under_other_strategies(which: slice, tmp_path: Path) -> None:
    """The samples of a step are the same for any number of processes; sums differ in their last bits."""
    processes(2, fsdp(tmp_path / "two", *PLAIN, **TEXT))
    for name, count, before, after in (
        ("2-1", 1, "fsdp", "fsdp"),
        ("2-4", 4, "fsdp", "fsdp"),
        ("to-single", 1, "fsdp", "single"),
        ("from-ddp", 2, "ddp", "fsdp"),
    )[which]:
        path = tmp_path / name
        processes(2, fsdp(path, *PLAIN, "train.steps=3", f"strategy={before}", **TEXT))
        run: Callable[[int], Any] = lambda rank, path=path, after=after: run_to_end(  # noqa: E731
            path, *PLAIN, f"strategy={after}", **TEXT
        )
        if after == "single":
            run(0)
        else:
            processes(count, run)
        assert losses(path) == pytest.approx(losses(tmp_path / "two"), abs=1e-6), name
    ended = torch.load(tmp_path / "to-single/run/checkpoints/step-00000006.pt", weights_only=True)
    assert list(ended) == list(end(tmp_path / "two"))
    trainer(**TEXT).models["main"].load_state_dict(ended["model_state_dict"])


# Kills ---------------------------------------------------------------------------------------------------------------

CONVS: dict[str, Any] = {"data": IMAGES, "models": {"main": CONV}}
SHORT = ("train.steps=4", "save.every=2", "eval.every=0", "save.keep_last=1", "save.keep_best=0")


def killed(path: Path, crash: Callable[[int], None], *changes: str) -> None:
    """A run of two processes, in which `crash(rank)` has arranged a kill; the other one ends by itself."""
    begun = time.monotonic()

    def work(rank: int) -> None:
        crash(rank)
        run_to_end(path, "strategy=fsdp", *SHORT, *changes, **CONVS)

    with pytest.raises(AssertionError):
        processes(2, work)
    assert time.monotonic() - begun < 85  # it did not wait for the one that was gone


def in_write(rank: int, *, before: bool) -> Callable[[int], None]:
    """Kills a process when it begins to write its shards, or when they are written."""

    def crash(here: int) -> None:
        write = FileSystemWriter.write_data

        def fatal(*args: Any, **kwargs: Any) -> Any:
            found = None if before else write(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
            return found

        if here == rank:
            FileSystemWriter.write_data = fatal  # type: ignore[method-assign]

    return crash


def at_event(path: Path, number: int) -> Callable[[int], None]:
    return lambda rank: None if rank else Crash(str(path / "run/checkpoints"), number) and None


def resumed_whole(path: Path, whole: Path) -> None:
    """Asserts that what a kill left visible is whole, and that the run then ends with the same bytes."""
    run = ckptool.inspect_run(path / "run")
    assert all(row.state == "good" for row in run.checkpoints)
    processes(2, fsdp(path, *SHORT, **CONVS))
    there = os.listdir(path / "run/checkpoints")
    assert sorted(there) == ["step-00000004.dcp", "step-00000004.json"]
    one, other = (contents_but_lock(str(each / "run/checkpoints/step-00000004.dcp")) for each in (path, whole))
    assert one == other


@pytest.mark.long("several runs of several processes")
def test_a_kill_between_shards_leaves_nothing_visible_and_the_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    processes(2, fsdp(tmp_path / "whole", *SHORT, **CONVS))
    killed(tmp_path / "a", in_write(1, before=True))
    assert [name for name in os.listdir(tmp_path / "a/run/checkpoints") if not name.startswith(".")] == []
    resumed_whole(tmp_path / "a", tmp_path / "whole")


@pytest.mark.soak
def test_killed_at_every_event_of_the_first_process_and_around_the_writes_of_the_other(tmp_path: Path) -> None:
    processes(2, fsdp(tmp_path / "whole", *SHORT, **CONVS))
    points = [in_write(rank, before=before) for rank in (0, 1) for before in (False, True)]
    points += [at_event(tmp_path / f"{number}", number) for number in range(len(points), 36)]
    for number, crash in enumerate(points):
        path = tmp_path / f"{number}"
        killed(path, crash)
        resumed_whole(path, tmp_path / "whole")


def test_what_fails_in_one_process_fails_in_all_also_when_it_is_saved_meanwhile(tmp_path: Path) -> None:
    for full, apart in ((1, "true"), (0, "false")):
        path = tmp_path / f"{full}"

        def work(rank: int, path: Path = path, full: int = full, apart: str = apart) -> None:
            if rank == full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
            with pytest.raises(DiskFull, match="file size limit"):
                run_to_end(path, "strategy=fsdp", *SHORT, f"save.async={apart}", **CONVS)

        processes(2, work)
        assert os.listdir(path / "run/checkpoints") == []


ASKED = """
import os, signal
class Ask:
    def after_step(self, trainer):
        if trainer.step == 2 and not trainer.world.is_first:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.long("several runs of several processes")
def test_a_signal_to_one_process_ends_an_evaluation_in_all_and_it_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(ASKED)
    changes = ("train.steps=4", "save.every=4", "eval.every=2", "eval.metric=val_loss")

    def stopped(rank: int) -> None:
        found = run_to_end(tmp_path / "a", "strategy=fsdp", *changes, f"hooks=[{tmp_path}/ask.py:Ask]", **CONVS)
        assert (found.status, found.step) == ("stopped", 2)

    processes(2, fsdp(tmp_path / "b", *changes, **CONVS), stopped, fsdp(tmp_path / "a", *changes, **CONVS))
    assert first_difference(end(tmp_path / "a", 4), end(tmp_path / "b", 4)) == ""


RESTARTED = """
import os, signal
class Die:
    def after_step(self, trainer):
        if trainer.step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not trainer.world.is_first:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_torchrun_starts_it_again(tmp_path: Path) -> None:
    """With --max-restarts: it goes on from its last checkpoint, and ends as one that was never killed."""
    (tmp_path / "die.py").write_text(RESTARTED)
    (tmp_path / "run.yaml").write_text("strategy: fsdp\nrun: a/run\ntrain: {steps: 4}\n")
    sets = [f"data={json.dumps(IMAGES)}", f"models={json.dumps({'main': CONV})}", *SHORT, "seed=3", "device=cpu"]
    words = [word for change in (*sets, 'hooks=["die.py:Die"]') for word in ("--set", change)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    subprocess.run(
        [*torchrun, "-m", "ckptool", "train", "run.yaml", "--resume", "auto", *words], cwd=tmp_path, check=True
    )
    events = [json.loads(line)["event"] for line in (tmp_path / "a/run/history.jsonl").read_text().splitlines()]
    assert events.count("resume") == 1
    processes(2, fsdp(tmp_path / "b", *SHORT, "optim={main: {}}", **CONVS))
    assert first_difference(end(tmp_path / "a", 4), end(tmp_path / "b", 4)) == ""


def test_a_parameter_without_dimensions_is_refused_by_name(tmp_path: Path) -> None:
    def refused(rank: int) -> None:  # in a process of its own: threads of gloo outlive their group, and no fork
        with pytest.raises(CkptoolError, match="scale"):
            run_to_end(tmp_path, "strategy=fsdp", models={"main": {"name": own("Scalar")}})

    processes(1, refused)


# Models --------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_two_models_and_16_bits_are_trained_as_under_ddp(tmp_path: Path) -> None:
    for name, sections in {"gan": GAN, "fp16": {"train": {"precision": "fp16", "steps": 4}}}.items():
        for strategy in ("fsdp", "ddp"):
            words = (f"strategy={strategy}", "train.steps=4", "save.every=4", "hooks=[grad_norm]", "log.every=1")
            path = tmp_path / name / strategy
            processes(2, lambda rank, words=words, path=path: run_to_end(path, *words, **sections))  # noqa: B023
        assert losses(tmp_path / name / "fsdp") == pytest.approx(losses(tmp_path / name / "ddp"), rel=1e-5)
