"""Kill -9 at any time: the last file is byte for byte that of a run that was never killed, and no checkpoint is ever
lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.training import run_folder
from ckptool.training.store import Lines
from tests.support.fork_server import ForkServer
from tests.support.killed_runs import STEPS, Kill, configured, ends_the_same, lab, resumed_steps
from tests.support.small_runs import CONV, GAN, IMAGES, MUON, TEXT, config, own

GROUPS = {
    "main": {
        "lr": 0.01,
        "groups": [{"match": "*.bias", "weight_decay": 0.0}, {"match": "1.*", "lr": 0.001}],
        "clip": {"norm": 1.0},
        "schedule": {"name": "warmup_cosine", "args": {"warmup": 5, "total": STEPS}},
    }
}
SIGNS = {
    "muon": {**MUON, "schedule": {"name": own("warmup"), "args": {"length": 30}}},
    "rest": {"name": "torch.optim:SGD", "model": "main", "args": {"momentum": 0.9}},
}
AVERAGED: dict[str, Any] = {"train": {"steps": STEPS, "ema": 0.9}, "eval": {"every": "epoch", "ema": True}}


def data(name: str, val: str, **more: Any) -> dict[str, Any]:
    return {"data": {"name": own(name), "batch": 8, "val": {"name": own(val)}, **more}}


SEVERAL: dict[str, dict[str, Any]] = {
    "dropout, accumulation, groups": {"optim": GROUPS, "train": {"steps": STEPS, "accumulate": 3, "ema": 0.9}},
    "conv with BatchNorm, bf16": {
        "data": IMAGES,
        "models": {"main": CONV},
        "train": {"steps": STEPS, "precision": "bf16"},
    },
    "tied character transformer": TEXT,
    "gan": GAN,
    "fp16 with overflows": {
        "data": {"name": "blobs", "args": {"samples": 60, "spread": 200.0}, "batch": 8},
        "train": {"steps": STEPS, "precision": "fp16"},
    },
    "two optimizers, one of one's own": {**TEXT, "optim": SIGNS, "train": {"steps": STEPS, "precision": "fp16"}},
    "a stream": {**AVERAGED, **data("Points", "PointItems"), "eval": {"every": 4, "ema": True}},
    "a sampler": {**AVERAGED, **data("PointItems", "PointItems", sampler=own("weighted"))},
}
WAYS = ("KILL", "KILL in save", "KILL in prune", "TERM")
WORKERS = ("data.workers=2",)
# Every state is killed in every way by `make soak`; here those that differ in more than the state, which is the affair
# of test_resumed.py.
KILLS: dict[str, list[Kill]] = {
    "dropout, accumulation, groups": [(7, "KILL", ()), (16, "KILL in save", ()), (29, "KILL in prune", ())],
    "fp16 with overflows": [(17, "KILL", ())],
    "two optimizers, one of one's own": [(7, "KILL", ()), (22, "TERM", ())],
    "a stream": [(7, "KILL", WORKERS), (16, "KILL in save", ()), (29, "TERM", WORKERS)],
}


@pytest.mark.parametrize("name", KILLS)
def test_killed(name: str, tmp_path: Path, server: ForkServer) -> None:
    made = lab(tmp_path, server, seed=len(name), **SEVERAL[name])
    ends_the_same(made, KILLS[name])
    if "overflows" in name:
        state = torch.load(made.last("killed"), weights_only=True)
        assert state["scaler_state_dict"]["scale"] < 65536  # it did overflow


@pytest.mark.soak
@pytest.mark.parametrize("name", SEVERAL)
def test_killed_ten_times(name: str, tmp_path: Path, server: ForkServer) -> None:
    for seed in range(2):
        made = lab(tmp_path / str(seed), server, seed=seed, **SEVERAL[name])
        (tmp_path / str(seed)).mkdir()
        steps = sorted(made.rng.sample(range(1, STEPS - 4), 10))
        ends_the_same(made, [(at, made.rng.choice(WAYS[: 2 if at < 12 else 4]), ()) for at in steps])


# A signal that asks ---------------------------------------------------------------------------------------------------


# As long as there is such a file beside it: so that the signal comes before the end, however late it is sent.
SLOW = """
import os, time
class Slow:
    def after_step(self, trainer):
        if trainer.step > 5 and os.path.exists(os.path.join(os.path.dirname(__file__), "slow")):
            time.sleep(0.2)
"""


@pytest.mark.parametrize(("sent", "group", "code"), [("TERM", False, 143), ("INT", True, 130)])
def test_a_signal_saves_at_the_boundary(tmp_path: Path, server: ForkServer, sent: str, group: bool, code: int) -> None:
    (tmp_path / "hook.py").write_text(SLOW)
    made = lab(tmp_path, server, every=1000, hooks=[f"{tmp_path / 'hook.py'}:Slow"])
    made.train("reference", "data.workers=0")
    number = signal.Signals[f"SIG{sent}"]
    (tmp_path / "slow").touch()
    words = made.words("killed", "data.workers=2" if group else "data.workers=0", "stop.signals=[TERM,INT]")
    process = server.start(words)
    while made.logged("killed") < 5 and not server.ended():
        time.sleep(0.001)
    (os.killpg if group else os.kill)(process, number)
    assert server.wait() == code, server.stderr_tail()
    (tmp_path / "slow").unlink()
    stopped = list(Lines(os.path.join(made.run_of("killed"), "history.jsonl")).read())[-1]
    assert (stopped["event"], stopped["signal"]) == ("stop", int(number))
    assert 5 <= stopped["step"] < STEPS
    assert os.path.exists(os.path.join(made.run_of("killed"), "checkpoints", f"step-{stopped['step']:08d}.pt"))
    made.train("killed")
    assert resumed_steps(made.run_of("killed")) == ([stopped["step"]], False)
    assert made.end("killed") == made.end("reference")


# Every file-system event ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(each, marks=pytest.mark.soak) for each in [*SEVERAL, "async"])])
def test_every_file_system_event(name: str, tmp_path: Path, server: ForkServer) -> None:
    """Here one in thirteen of them."""
    sections = SEVERAL.get(name, {"save": {"async": True}} if name == "async" else {})
    first, stride = (1, 13) if name == "mlp" else (0, 1)
    count, lost = lab(tmp_path, server, **sections).every_event(first=first, stride=stride)
    assert count >= (5 if stride > 1 else 60)
    assert not lost


def test_the_events_are_those_of_checkpoint_sidecar_and_prune(tmp_path: Path, server: ForkServer) -> None:
    """What a run leaves that dies in its first save: every stage of a commit is seen, in its order."""
    made, stages = lab(tmp_path, server, every=2), []
    for number in range(0, 26, 2):
        crash = {"folder": made.run_of(f"run-{number}"), "part": "save", "step": 2, "at": number}
        assert server.run(made.words(f"run-{number}"), crash=crash) == -signal.SIGKILL
        names = os.listdir(os.path.join(made.run_of(f"run-{number}"), "checkpoints"))
        stages.append(tuple(sorted(os.path.splitext(name)[1] for name in names)))
    seen = list(dict.fromkeys(stages))
    assert seen == [(), (".tmp",), (".tmp", ".tmp"), (".json", ".tmp"), (".json", ".pt")]
    crash = {"folder": made.run_of("pruned"), "part": "prune", "step": 0, "at": 1}
    assert server.run(made.words("pruned"), crash=crash) == -signal.SIGKILL
    left = {os.path.splitext(name) for name in os.listdir(os.path.join(made.run_of("pruned"), "checkpoints"))}
    assert [stem for stem, suffix in left if (stem, ".pt") not in left]  # between the two deletions


# Several processes ----------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_two_processes_are_killed(tmp_path: Path) -> None:
    """ddp under torchrun: all of it is killed ten times, and ends as it would have."""
    made = configured(config(strategy="ddp"), 400, 5)
    path = tmp_path / "run.yaml"
    path.write_text(run_folder.dumped(made.dumped()))
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    ours = [str(Path(sys.executable).parent / "ckptool"), "train", str(path), "--resume", "auto", "-q", "--set"]

    def started(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*program, *ours, f"run={tmp_path / name}"], start_new_session=True, stderr=subprocess.DEVNULL
        )

    assert started("reference").wait(300) == 0
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for at in range(30, 330, 30):
        process = started("killed")
        while process.poll() is None:
            if metrics.exists() and (lines := metrics.read_text().splitlines()) and json.loads(lines[-1])["step"] >= at:
                break
            time.sleep(0.005)
        assert process.poll() is None, "it ended before it was killed"
        kill_all(process.pid)
        process.wait()
    assert started("killed").wait(300) == 0
    ends = [(tmp_path / name / "checkpoints" / "step-00000400.pt").read_bytes() for name in ("reference", "killed")]
    assert ends[0] == ends[1]
    steps, lost = resumed_steps(str(tmp_path / "killed"))
    assert len(steps) == 10
    assert not lost


def kill_all(parent: int) -> None:
    """Kills a launcher with its trainers, which it put into sessions of their own."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for process in [parent, *map(int, children)]:
        os.kill(process, signal.SIGKILL)
