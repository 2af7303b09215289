"""`prove -- COMMAND`: planted faults are named, a correct script is proved, an unstable one is told first."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import cli
from ckptool.errors import RunFailed, UsageError
from ckptool.training.prove import command as module
from ckptool.training.prove import watch
from ckptool.training.prove.trace import NOT_RESTORED, Trace, TracedStep, divergence, place_of
from ckptool.training.prove.tracer import Tracer
from ckptool.training.reports import CommandProof

# A loop by hand with one fault, or none. 8 steps an epoch, saved every 5.
TORCH = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
out, fault = sys.argv[1:]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.counter = nn.Linear(4, 8), nn.Linear(8, 2), 0
        self.register_buffer("scale", torch.ones(8), persistent=fault != "buffer")
    def forward(self, x):
        self.counter += 1
        self.scale *= 1.01
        return self.two(torch.tanh(self.one(x)) * self.scale * (1 + self.counter / 100))

class Data(Dataset):
    def __init__(self):
        self.rng = torch.Generator().manual_seed(5)
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.rand(4, generator=self.rng) + i / 32, i % 2

class Order:
    def __init__(self):
        self.order, self.at, self.gen = [], 0, torch.Generator().manual_seed(1)
    def __len__(self):
        return 32
    def __iter__(self):
        for _ in range(32):
            if self.at % 32 == 0:
                self.order = torch.randperm(32, generator=self.gen).tolist()
            self.at += 1
            yield self.order[(self.at - 1) % 32]

torch.manual_seed(0)
model, data, sampler = Net(), Data(), Order()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step, path = 0, os.path.join(out, "last.pt")
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    if fault != "optimizer":
        optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    if fault != "counter":
        model.counter = state["counter"]
    if fault != "generator":
        data.rng.set_state(state["rng"])
    if fault != "sampler":
        sampler.order, sampler.at = state["order"]
        sampler.gen.set_state(state["gen"])
if fault == "unstable":
    torch.seed()
loader = DataLoader(data, batch_size=4, sampler=sampler)
batches = iter(loader)
while step < 24:
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    if fault == "unstable":
        x = x + torch.rand(4)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 5 == 0 or step == 24:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state |= {"counter": model.counter, "rng": data.rng.get_state()}
        state |= {"gen": sampler.gen.get_state(), "order": [sampler.order, sampler.at]}
        torch.save(state, path if fault == "torn" else path + ".tmp")
        if fault != "torn":
            os.replace(path + ".tmp", path)
"""

# The same without torch, so that it starts at once: what is killed and what is found there needs no steps.
PLAIN = """
import json, os, struct, sys, time
out, fault = sys.argv[1:]
path = os.path.join(out, "last.safetensors")
with open(os.path.join(out, os.pardir, "lives"), "a+") as lives:
    lives.write(".")
    pause = 0.08 if fault == "stops, slow" or (fault == "slow twice" and lives.tell() <= 2) else 0.02
def save(step, path):
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    if step == 10:
        os.makedirs(os.path.join(out, "half"), exist_ok=True)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + bytes([step]) * 4096)
        file.flush()
        os.fsync(file.fileno())
step = 0
if os.path.exists(path) and fault != "again":
    data = open(path, "rb").read()
    if len(data) < 4096:
        sys.exit("it is torn")
    step = data[-1]
    if fault.startswith("stops"):
        sys.exit(0)
with open(os.path.join(out, "log.jsonl"), "a") as log:
    while step < 20:
        time.sleep(pause)
        step += 1
        print(step, file=log, flush=True)
        if step % 2 == 0:
            save(step + (fault == "wrong" and step < 20), path + ".tmp" if fault != "torn" else path)
            if fault != "torn":
                os.replace(path + ".tmp", path)
open(os.path.join(out, "done"), "w").close()
"""


def proved(path: Path, script: str, fault: str, **options: Any) -> CommandProof:
    (path / "train.py").write_text(script)
    command = [sys.executable, str(path / "train.py"), "{run}", fault]
    found = ckptool.prove(command=command, **options)
    assert isinstance(found, CommandProof)
    if found.kept:
        shutil.rmtree(found.kept)
    return found


NAMED = {
    "generator": "`data.rng`, a generator, is in another state",
    "sampler": "`sampler.gen`, a generator, is in another state",
    "counter": "`model.counter` (module attribute) is ",
    "buffer": "`model.scale` (non-persistent buffer) has another value",
    "optimizer": "the state of the optimizer differs",
}


@pytest.mark.soak
@pytest.mark.parametrize("fault", NAMED)
def test_what_was_not_saved_is_named(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"open({str(tmp_path / 'theirs')!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = proved(tmp_path, TORCH, fault, kills=1, seed=3)
    assert found.exit() == 1 and found.kills[0].resumed
    assert found.differs.startswith(f"the first step that differs is {found.kills[0].resumed + 1}; ")
    assert "the first tensor at the end is model/one.weight in last.pt" in found.differs
    assert found.causes[0].startswith(NAMED[fault]), found.causes
    assert (tmp_path / "theirs").exists()  # their sitecustomize ran, too
    if fault == "counter":
        assert found.causes == [
            f"{NAMED[fault]}{found.kills[0].resumed + 1} in the unbroken run and 1 after the restart"
        ]
    if fault == "sampler":
        assert any(cause.startswith("`sampler.at` (attribute) is ") for cause in found.causes)


@pytest.mark.soak
def test_a_correct_script_is_proved(tmp_path: Path) -> None:
    found = proved(tmp_path, TORCH, "", kills=5)
    assert found.proved and len(found.kills) == 5 and found.steps == 24 and found.compared == ("last.pt",), found
    assert {kill.resumed or 24 for kill in found.kills} <= {5, 10, 15, 20, 24}
    assert {"rename", "half of a write"} <= {kill.place for kill in found.kills} or found.watched != "preload"


@pytest.mark.soak
def test_a_file_written_in_place_is_torn(tmp_path: Path) -> None:
    found = proved(tmp_path, TORCH, "torn", kills=2, seed=1)
    assert found.exit() == 1 and "last.pt: the kill in half of a write" in found.findings[0]
    assert "ended with exit code 1" in found.findings[1]


@pytest.mark.soak
def test_an_unstable_script_is_told_first(tmp_path: Path) -> None:
    found = proved(tmp_path, TORCH, "unstable")
    assert found.exit() == 2 and not found.kills
    assert found.unstable[1:] == ["from step 1 on", "the global generator of torch is in another state"]


# Without torch --------------------------------------------------------------------------------------------------------


def test_a_script_without_torch_is_proved_by_time(tmp_path: Path) -> None:
    found = proved(tmp_path, PLAIN, "", kills=3)
    assert found.proved and not found.steps, found
    assert found.remarks == [
        "2 other files in the folder: not compared",
        "no optimizer step of torch was seen: kills come by time, and no cause is named",
    ]
    assert "proved for 3 kills" in str(found)


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="calls are counted by a compiled library")
def test_a_torn_file_and_a_restart_that_stops_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill comes at the first event of its kind, whatever the time is."""
    monkeypatch.setattr(module.CommandRuns, "plan", lambda *_: [(0.0, "half of a write")])
    torn = proved(tmp_path, PLAIN, "torn")
    assert torn.kills[-1].place == "half of a write" and torn.watched == "preload"
    assert torn.findings[0].startswith(
        "last.safetensors: the kill in half of a write left it torn: it is written in place"
    )
    assert torn.findings[1] == "after the kill in half of a write it ended with exit code 1: it is torn"
    assert torn.events["fsync"] == 10 and torn.events["half of a write"] >= 10
    monkeypatch.setattr(module.CommandRuns, "plan", lambda *_: [(0.0, "mkdir")])
    stops = proved(tmp_path, PLAIN, "stops", kills=1)
    assert stops.kills[0].place == "mkdir"
    assert stops.exit() == 1 and stops.differs == "the first tensor at the end is w in last.safetensors"


def test_a_run_that_ends_before_its_kill_is_killed_sooner_the_next_time(tmp_path: Path) -> None:
    """The unbroken runs were slow, as on a busy machine: what they took says nothing of the others."""
    found = proved(tmp_path, PLAIN, "slow twice", kills=1)
    assert found.proved and len(found.kills) == 1, found


def test_without_a_compiler_the_files_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "watcher", lambda run, tools: watch.Polled(run))
    found = proved(tmp_path, PLAIN, "", kills=3)
    assert found.proved and found.watched == "polling" and sum(found.events.values()) > 3
    assert {kill.place for kill in found.kills} & set(watch.Polled.kinds)


def test_what_cannot_be_tried(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not name \{run\}"):
        ckptool.prove(command=["true"])
    with pytest.raises(UsageError, match="there is no program"):
        ckptool.prove(command=["no-such-program", "{run}"])
    with pytest.raises(UsageError, match="no configuration"):
        ckptool.prove("run.yaml", command=["true", "{run}"])
    with pytest.raises(RunFailed, match="no checkpoint"):
        ckptool.prove(command=["true", "{run}"])
    with pytest.raises(RunFailed, match="exit code 3 before anything was killed"):
        ckptool.prove(command=["sh", "-c", "exit 3", "{run}"])
    with pytest.raises(RunFailed, match="took more than 0 s"):
        ckptool.prove(command=["sh", "-c", "sleep 60", "{run}"], timeout=0.2)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    # Slow, so that the kill comes after the first file.
    words = [sys.executable, str(tmp_path / "train.py"), "{run}", "stops, slow"]
    assert cli.main(["prove", "--kills", "1", "--json", "--", *words]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["proved"]) == ("ckptool.prove_command/2", False)
    shutil.rmtree(found["kept"])


# Traces ---------------------------------------------------------------------------------------------------------------


def step(number: int, **facts: Any) -> TracedStep:
    """A step of a run in which everything moves."""
    found = {"a.rng": f"generator: {number}", "m.count": f"module attribute: {number}", "i": f"value: {number}"}
    values = {"samples": [str(number)], "state": str(number), "lr": [1.0], "random": {"torch": str(number)}}
    values |= {"found": found | facts.pop("found", {})} | facts
    return TracedStep(0, str(facts.pop("weights", number)), **{k: v for k, v in values.items() if k != "weights"})


def test_variables_are_those_of_the_programs_own_files(tmp_path: Path) -> None:
    own = Tracer(str(tmp_path)).is_own
    assert own("/home/me/train.py") and own("train.py")
    assert not any(map(own, (None, 3, json.__file__, torch.__file__, module.__file__, "<frozen importlib._bootstrap>")))


REFERENCE = [step(number) for number in range(10)]


def test_a_restart_is_placed_by_its_weights() -> None:
    assert place_of(step(4, state="x"), REFERENCE) == 4
    assert place_of(step(4, weights="x"), REFERENCE) is None
    still = [step(number, weights="0") for number in range(5)]  # lr is 0 at first
    assert place_of(still[3], still) == 3


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"found": {"a.rng": "generator: x"}, "samples": ["x"]}, "`a.rng`, a generator, is in another state"),
        ({"samples": ["x"], "state": "x"}, "the samples differ: their order, the place in the epoch, or what is drawn"),
        ({"found": {"m.count": "module attribute: 0"}}, "`m.count` (module attribute) is 5 in the unbroken run and 0"),
        ({"random": {"torch": "x"}}, "the global generator of torch is in another state"),
        ({"found": {"i": "value: 0"}}, "`i` (value) is 5 in the unbroken run and 0 after the restart"),
    ],
)
def test_causes_come_before_effects(change: dict[str, Any], cause: str) -> None:
    resumed = [step(4), step(5, **change), step(6, weights="x", state="x")]
    found = divergence(REFERENCE, REFERENCE, resumed, 4)
    assert found is not None and found.step == 6 and found.causes[0].startswith(cause)
    assert divergence(REFERENCE, REFERENCE, [step(4), step(5)], 4) is None


def test_batches_that_were_skipped_on_the_way_are_not_other_samples() -> None:
    resumed = [step(4, samples=["0", "1", "4"], state="x"), step(5, weights="x")]
    assert divergence(REFERENCE, REFERENCE, resumed, 4) == (5, ["the state of the optimizer differs"])


def test_of_two_optimizers_the_one_whose_step_differs_is_looked_at() -> None:
    def gan(number: int, **facts: Any) -> TracedStep:
        return replace(step(number, **facts), optimizer=number % 2)

    reference = [gan(number) for number in range(10)]
    resumed = [gan(4), gan(5, state="x"), gan(6), gan(7, weights="x")]
    assert divergence(reference, reference, resumed, 4) == (6, ["the state of the optimizer differs"])
    assert divergence(reference, reference, [gan(4), gan(5, weights="x")], 4) == (5, [NOT_RESTORED])


def test_what_differs_by_chance_or_never_moves_is_no_cause() -> None:
    again = [step(number, random={"torch": f"{number} of another run"}) for number in range(10)]
    resumed = [step(5, random={"torch": "x"}, lr=[2.0]), step(6, weights="x")]
    assert divergence(REFERENCE, again, resumed, 5) == (6, [])


def test_a_line_that_a_kill_cut_off_does_not_count(tmp_path: Path) -> None:
    first = {
        "optimizer": 0,
        "weights": "a",
        "samples": [],
        "state": "",
        "lr": [1],
        "random": {},
        "found": {"a": "x: 1"},
    }
    later = first | {"found": {"b": "x: 2"}}
    (tmp_path / "1-7.jsonl").write_text("another rank\n")
    (tmp_path / "0-9.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(later)}\n{json.dumps(later)[:20]}")
    trace = Trace(str(tmp_path))
    assert trace.read() == 2 and trace.steps[1].found == {"a": "x: 1", "b": "x: 2"}
    trace.close()
