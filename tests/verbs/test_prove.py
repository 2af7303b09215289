"""`prove`: what it kills, what it compares, what it says, and that it finds what is broken."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptool import cli
from ckptool.errors import RunFailed, UsageError
from ckptool.training.prove.fork_server import ForkServer, _end_of
from ckptool.training.prove.proof import ProofRun, configured, processes_of, resumes
from ckptool.training.reports import Kill, Proof
from ckptool.training.store import Lines
from ckptool.verbs._schema import schema
from tests.support.schemas import judge
from tests.support.small_runs import MLP, config

pytestmark = pytest.mark.usefixtures("harness")


BROKEN = """
import torch
from torch.nn import functional
from ckptool.training.tasks import supervised

dice = torch.Generator()
dice.seed()  # from the system: another number in every process, and not a function of the step

def task():
    def loss(output, target):
        return functional.cross_entropy(output, target) * (1 + torch.rand((), generator=dice))
    return supervised(loss, None)
"""


def proved(path: Path, server: ForkServer, steps: int = 30, kills: int = 5, **sections: Any) -> Proof:
    proof = Proof(steps)
    made = ProofRun(configured(config(**sections), steps), steps, str(path), random.Random(1), server, str)
    made.fill(proof, kills, exhaustive=False)
    return proof


def test_a_run_is_proved(tmp_path: Path, server: ForkServer) -> None:
    schedule = {"name": "step", "args": {"step_size": 7}}
    train = {"steps": 30, "precision": "fp16", "ema": 0.9}
    proof = proved(tmp_path, server, optim={"main": {"lr": 0.01, "schedule": schedule}}, train=train)
    assert proof.proved
    assert [kill.signal for kill in proof.kills] == ["KILL", "KILL in save", "TERM", "KILL", "KILL in prune"]
    assert all((kill.resumed or 0) <= kill.at for kill in proof.kills)
    assert proof.kills[2].resumed == proof.kills[2].at  # stopped by TERM, it had saved
    assert proof.without == {"optimizer": True, "scheduler": True, "scaler": True, "ema": True}
    lines = str(proof).splitlines()
    assert lines[0] == f"reference             30 steps  sha256 {proof.reference[:8]}…"
    assert lines[3].endswith("identical file")
    assert lines[-1] == "proved: a run killed anywhere ends with the same bytes."
    assert proof.to_dict()["proved"] is True


def test_a_part_that_a_run_has_not_is_not_left_out(tmp_path: Path, server: ForkServer) -> None:
    """Plain SGD remembers nothing: there is nothing to forget."""
    proof = proved(tmp_path, server, steps=8, kills=1, optim={"main": {"name": "sgd", "lr": 0.01}})
    assert proof.proved
    assert proof.without == dict.fromkeys(("optimizer", "scheduler", "scaler", "ema"))
    assert "without" not in str(proof)


@pytest.mark.long("the command, which starts a server of its own")
def test_a_run_with_chance_in_it_is_disproved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command: exit 1, the first step and tensor that differ, and both runs kept to be looked at."""
    (tmp_path / "mine.py").write_text(BROKEN)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MLP | {"task": f"{tmp_path / 'mine.py'}:task", "eval": {"every": 0}}))
    assert cli.main(["prove", str(path), "--steps", "12", "--kills", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not list(judge(schema("prove").document, found))
    assert (found["schema"], found["proved"], found["reference"] != found["result"]) == ("ckptool.prove/2", False, True)
    assert "the first step that differs is 1;" in found["differs"]
    assert "the first tensor, at the end, is model_state_dict/1.weight" in found["differs"]
    kept = Path(found["kept"])
    assert {"reference", "killed"} <= {entry.name for entry in kept.iterdir()}
    shutil.rmtree(kept)


def test_a_run_that_fails_by_itself_is_no_proof(tmp_path: Path, server: ForkServer) -> None:
    (tmp_path / "mine.py").write_text("def task():\n    raise ValueError('my own mistake')\n")
    with pytest.raises(RunFailed, match="exit code 2") as raised:
        proved(tmp_path, server, task=f"{tmp_path / 'mine.py'}:task")
    assert "my own mistake" in raised.value.why


def history(path: Path, *events: tuple[str, int]) -> str:
    lines = [json.dumps({"event": event, "step": step}) for event, step in events]
    (path / "history.jsonl").write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_checkpoint_that_is_lost_is_noticed(tmp_path: Path) -> None:
    """A saver that deletes the old one first ends with the same bytes too: it silently begins again."""
    kept = history(tmp_path, ("start", 0), ("save", 5), ("resume", 5), ("save", 10), ("resume", 10), ("done", 12))
    assert resumes(kept) == ([5, 10], False)
    again = history(tmp_path, ("start", 0), ("save", 5), ("start", 0), ("save", 5), ("done", 12))
    assert resumes(again) == ([None], True)
    fell = history(tmp_path, ("start", 0), ("resume", 10), ("resume", 5))
    assert resumes(fell) == ([10, 5], True)


def test_what_is_said_of_a_lost_checkpoint_and_of_a_part_without_effect() -> None:
    proof = Proof(9, 1, "a" * 64, [Kill(4, "KILL", None)], "a" * 64, None, True, {"scaler": False}, "", "/tmp/kept")
    text = str(proof)
    assert "resumed from          the beginning" in text
    assert "resumed from a step before its newest checkpoint" in text
    assert "without scaler        ends the same" in text
    assert "disproved" in text
    assert not proof.proved


# Several processes ----------------------------------------------------------------------------------------------------


@pytest.mark.long("each of its runs is one of two processes")
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_a_run_of_several_processes_is_proved(tmp_path: Path, strategy: str) -> None:
    """They start as torchrun starts them; a kill is for all of them, and where the one that writes dies, the others end
    too."""
    with ForkServer(str(tmp_path / "stderr"), 2) as server:
        proof = Proof(24, 2)
        made = ProofRun(
            configured(config(strategy=strategy), 24), 24, str(tmp_path / "runs"), random.Random(2), server, str
        )
        (tmp_path / "runs").mkdir()
        made.fill(proof, 3, exhaustive=False)
    assert proof.proved
    assert [kill.signal for kill in proof.kills] == ["KILL", "KILL in save", "TERM"]
    assert proof.without["optimizer"] is True
    worlds = [fact["world"] for fact in Lines(str(tmp_path / "runs/killed/history.jsonl")).read() if "world" in fact]
    assert worlds == [2] * 4
    assert str(proof).splitlines()[0] == "processes             2, which train together"


def test_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = config(strategy="ddp")
    assert (processes_of(ddp, None), processes_of(ddp, 3), processes_of(config(), None)) == (2, 3, 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("ckptool.training.parallel.device_here", lambda key, name: None)
    assert processes_of(config("device=cuda", strategy="ddp"), None) == 4
    with pytest.raises(UsageError, match=r"(?s)2 processes cannot train together, since strategy is dp.*strategy=ddp"):
        processes_of(config(strategy="dp"), 2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match=r"(?s)prove was started in several processes by torchrun.*processes=3"):
        processes_of(ddp, None)


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ("os._exit(5)", "time.sleep(60)", 5),
        ("time.sleep(60)", "os._exit(6)", 6),
        ("os._exit(143)", "time.sleep(0.2)", 143),
    ],
)
def test_one_of_several_fails(first: str, second: str, code: int) -> None:
    """The others would wait for it: they are ended. But where it was asked to stop, the others were too, and may
    finish."""
    children = []
    for work in (first, second):
        child = os.fork()
        if not child:
            exec(work)
            os._exit(0)
        children.append(child)
    began = time.monotonic()
    assert _end_of(children) == code
    assert time.monotonic() - began < 30
    with pytest.raises(ChildProcessError):
        os.waitpid(children[1], 0)
