"""`prove`: a configuration is proved as any command is; what it kills, compares and says, and what it refuses."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptool
from ckptool import cli
from ckptool.errors import RunFailed, UsageError
from ckptool.training.reports import Kill, Proof
from ckptool.verbs._schema import schema
from tests.support.cli import Run, judge
from tests.support.killed_runs import resumed_steps
from tests.support.small_runs import MLP

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


def written(path: Path, **sections: Any) -> str:
    (path / "run.yaml").write_text(yaml.safe_dump(MLP | {"eval": {"every": 0}} | sections))
    return str(path / "run.yaml")


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_configuration_is_proved_by_the_command_that_trains_it(
    real: bool, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(words: list[str], **options: Any) -> Proof:
        """In place of all the starts of a proof (tests/training/test_prove_command.py), the command once."""
        assert options["kills"] == 1 and cli.main([word.format(run=tmp_path / "run") for word in words[3:]]) == 0
        steps = max(int(path.stem[5:]) for path in (tmp_path / "run" / "checkpoints").glob("*.pt"))
        compared = (f"checkpoints/step-{steps:08d}.pt",)
        return Proof(tuple(words), "preload", steps, 1.5, {"rename": 2}, compared, [Kill(9, "rename", 5)], starts=4)

    if not real:
        monkeypatch.setattr("ckptool.training.prove.prove_command", once)
    found = run("prove", written(tmp_path), "--steps", "12", "--kills", "1", "--json").json
    assert not list(judge(schema("prove").document, found))
    assert (found["schema"], found["proved"], found["starts"], found["steps"]) == ("ckptool.prove/2", True, 4, 12)
    assert "checkpoints/step-00000012.pt" in found["compared"]
    words = ["--set", "run={run}", "--resume", "auto", "-q"]
    assert found["command"][3] == "train" and found["command"][-5:] == words


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_are_started_and_killed_together(tmp_path: Path, strategy: str) -> None:
    """By torchrun, which puts them into sessions of their own."""
    words = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node=2 -m ckptool train".split()]
    words += [written(tmp_path, strategy=strategy), "--set", "run={run}", "--resume", "auto", "-q"]
    found = ckptool.prove(command=words, kills=2)
    assert found.proved and len(found.kills) == 2 and found.steps == 20, found


@pytest.mark.soak
def test_a_run_with_chance_in_it_is_told_before_anything_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    found = ckptool.prove(written(tmp_path, task=f"{tmp_path / 'mine.py'}:task"), steps=12, kills=1)
    shutil.rmtree(found.kept)
    assert (found.exit(), found.starts, found.kills) == (2, 2, [])
    assert found.unstable[1:] == ["from step 1 on", "`dice`, a generator, is in a different state"]


@pytest.mark.soak
def test_a_run_that_fails_by_itself_is_no_proof(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def task():\n    raise ValueError('my own mistake')\n")
    with pytest.raises(RunFailed, match="exit code 2") as raised:
        ckptool.prove(written(tmp_path, task=f"{tmp_path / 'mine.py'}:task"))
    assert "my own mistake" in raised.value.why


def test_what_is_refused(run: Run) -> None:
    """A script alone is no configuration, whatever its words mean in YAML."""
    ran = run("prove", "train.py")
    assert ran.code == 2 and "ckptool prove -- python train.py {run}" in ran.err
    with pytest.raises(UsageError, match=r"train\.stepps"):
        ckptool.prove(MLP, set="train.stepps=3")
    for options in ({"steps": 3}, {"set": "train.steps=3"}, {"config": "run.yaml"}):
        with pytest.raises(UsageError, match="no configuration and no length"):
            ckptool.prove(**{"command": ["true", "{run}"], **options})
    with pytest.raises(UsageError, match="neither"):
        ckptool.prove()


def test_what_is_said() -> None:
    proof = Proof(("x", "{run}"), "preload", 24, 1.5, {"rename": 2}, ("a.pt",), [Kill(9, "rename", 5)], starts=4)
    assert str(proof).splitlines()[0] == "unbroken            24 optimizer steps, 1 checkpoint at the end"
    assert str(proof).splitlines()[2] == "killed              after step 9, at: rename; resumed from 5"
    assert "proved for 1 kill:" in str(proof) and proof.exit() == 0
    proof.differs, proof.causes = "the first step that differs is 6", ["b", "a"]
    proof.confirmed, proof.kept = ["a"], "/k"
    assert [line.split()[0] for line in str(proof).splitlines()[-5:-2]] == ["differs", "likely", "confirmed"]
    assert "disproved" in str(proof) and "kept in /k" in str(proof) and proof.exit() == 1


def history(path: Path, *events: tuple[str, int]) -> str:
    lines = [json.dumps({"event": event, "step": step}) for event, step in events]
    (path / "history.jsonl").write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_checkpoint_that_is_lost_is_noticed(tmp_path: Path) -> None:
    """A saver that deletes the old one first ends with the same bytes too: it silently begins again."""
    kept = history(tmp_path, ("start", 0), ("save", 5), ("resume", 5), ("save", 10), ("resume", 10), ("done", 12))
    assert resumed_steps(kept) == ([5, 10], False)
    again = history(tmp_path, ("start", 0), ("save", 5), ("start", 0), ("save", 5), ("done", 12))
    assert resumed_steps(again) == ([None], True)
    fell = history(tmp_path, ("start", 0), ("resume", 10), ("resume", 5))
    assert resumed_steps(fell) == ([10, 5], True)


def test_kills_after_which_all_began_again_prove_no_resuming() -> None:
    kills = [Kill(9, "rename", 0), Kill(11, "any moment", 0)]
    proof = Proof(("x", "{run}"), "preload", 24, 1.5, {"rename": 2}, ("a.pt",), kills, starts=5)
    assert (proof.proved, proof.exit()) == (False, 2) and "there was no checkpoint yet" in str(proof)
    for resumed in (4, None):  # as where no steps are seen
        assert replace(proof, kills=[*kills, Kill(12, "rename", resumed)]).proved
