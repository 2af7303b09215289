"""transformers' Trainer with `DurableCheckpoints`: killed anywhere, it ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_scripts import Scripts

pytestmark = pytest.mark.engines
STEPS = 40


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    scripts = Scripts("trainer.py", tmp_path_factory.mktemp("trainer"))
    yield scripts
    scripts.close()


def digest(out: Path) -> str:
    return hashlib.sha256((out / "final" / "model.safetensors").read_bytes()).hexdigest()


def newest(out: Path) -> tuple[str | None, list[str]]:
    from ckptool.integrations.transformers import newest_checkpoint

    said: list[str] = []
    found = newest_checkpoint(out, said.append)
    return found and Path(found).name, said


def test_killed_at_random_it_ends_with_the_same_bytes(trainer: Scripts, tmp_path: Path) -> None:
    seconds = trainer.finish(tmp_path / "unbroken")["seconds"]
    assert trainer.killed_at_random(6, seconds, 1, tmp_path / "killed")
    trainer.finish(tmp_path / "killed")
    assert digest(tmp_path / "killed") == digest(tmp_path / "unbroken")
    checkpoints = sorted(path.name for path in (tmp_path / "killed").glob("*checkpoint*"))
    assert checkpoints == ["checkpoint-35", f"checkpoint-{STEPS}"]
    assert not (tmp_path / "killed" / ".ckptool-staging").exists()


def test_a_kill_at_any_change_in_the_folder_leaves_the_older_or_the_newer_checkpoint(
    trainer: Scripts, tmp_path: Path
) -> None:
    """With save_total_limit=1, where Trainer alone deletes the only one before the new one is known to be whole."""
    trainer.finish(tmp_path / "begun", 10, 1)
    out = tmp_path / "out"

    def save(event: int) -> dict[str, Any]:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "begun", out)
        return trainer.run(out, 15, 1, event=event, folder=str(out))

    events = save(1 << 30)["events"]
    assert events > 30
    found = []
    for event in range(1, events, 2):
        assert save(event)["status"] == -9
        found.append(newest(out))
    steps = [name for name, said in found]
    assert set(steps) == {"checkpoint-10", "checkpoint-15"} and steps == sorted(steps)
    assert not any(said for _, said in found), "an incomplete checkpoint was visible"
    trainer.finish(out, 20, 1)
    trainer.finish(tmp_path / "whole", 20, 1)
    assert digest(out) == digest(tmp_path / "whole")


def test_a_damaged_newest_checkpoint_is_skipped_and_named(trainer: Scripts, tmp_path: Path) -> None:
    trainer.finish(tmp_path / "unbroken", 20)
    trainer.finish(tmp_path / "out", 15)
    weights = tmp_path / "out" / "checkpoint-15" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    said = trainer.finish(tmp_path / "out", 20)["stderr"]
    assert "skipped" in said and "model.safetensors does not match its sha256" in said
    assert digest(tmp_path / "out") == digest(tmp_path / "unbroken")


def test_none_whole_is_an_error_and_not_a_new_beginning(trainer: Scripts, tmp_path: Path) -> None:
    trainer.finish(tmp_path, 10, 1)
    (tmp_path / "checkpoint-10" / "optimizer.pt").unlink()
    answer = trainer.run(tmp_path, 20)
    assert answer["status"] == 1
    assert "optimizer.pt is missing" in answer["stderr"] and "none of them is whole" in answer["stderr"]


def test_a_finished_run_that_is_started_again_trains_no_further_step(trainer: Scripts, tmp_path: Path) -> None:
    trainer.finish(tmp_path, 15)
    before = digest(tmp_path)
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-5")  # as one killed before it was deleted has it
    trainer.finish(tmp_path, 15)
    assert digest(tmp_path) == before
    assert newest(tmp_path)[0] == "checkpoint-15" and len(list(tmp_path.glob("checkpoint-*"))) == 2


def test_checkpoints_are_not_overwritten_by_a_run_that_begins_anew(trainer: Scripts, tmp_path: Path) -> None:
    trainer.finish(tmp_path, 10)
    answer = trainer.run(tmp_path, 10, options={"resume": False})
    assert "holds checkpoints already" in answer["stderr"] and "resume_from_checkpoint=True" in answer["stderr"]


def test_the_best_checkpoint_is_known_by_its_visible_path(trainer: Scripts, tmp_path: Path) -> None:
    trainer.finish(tmp_path, 15, 1, options={"best": True})
    (state,) = [json.loads(path.read_text()) for path in tmp_path.glob("checkpoint-15/trainer_state.json")]
    best = Path(state["best_model_checkpoint"])
    assert best == tmp_path / f"checkpoint-{state['best_global_step']}" and best.is_dir()


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"accumulate": 1}, {"accumulate": 5, "every": 3}], ids=str)
def test_a_data_set_that_draws_goes_on_with_the_same_numbers(
    trainer: Scripts, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Inside an epoch, after the first save and after a later one."""
    options = {**options, "draws": True}
    trainer.finish(tmp_path / "unbroken", 20, options=options)
    for steps in (5, 12, 20):
        trainer.finish(tmp_path / "broken", steps, options=options)
    assert digest(tmp_path / "broken") == digest(tmp_path / "unbroken")


def test_what_a_stock_trainer_saved_is_resumed_as_it_resumes_it(trainer: Scripts, tmp_path: Path) -> None:
    trainer.finish(tmp_path / "unbroken", 20)
    trainer.finish(tmp_path / "broken", 15, options={"mixin": False})
    trainer.finish(tmp_path / "broken", 20)
    assert digest(tmp_path / "broken") == digest(tmp_path / "unbroken")


def test_a_callback_alone_marks_what_is_complete(trainer: Scripts, tmp_path: Path) -> None:
    answer = trainer.run(tmp_path, 10, 1, options={"mixin": False})
    assert "Set save_total_limit=2" in answer["stderr"]
    trainer.finish(tmp_path, 15, 2, options={"mixin": False})
    assert newest(tmp_path) == ("checkpoint-15", [])
    (tmp_path / "checkpoint-15" / "ckptool.json").unlink()
    name, said = newest(tmp_path)
    assert name == "checkpoint-10" and "has no ckptool.json" in said[0]
