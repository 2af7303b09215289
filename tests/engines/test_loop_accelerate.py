"""A loop with accelerate and `AcceleratorCheckpoints`: killed anywhere, it ends with the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.killed_scripts import Scripts

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    scripts = Scripts("accelerate_loop.py", tmp_path_factory.mktemp("accelerate"))
    yield scripts
    scripts.close()


def assert_same_end(one: Path, other: Path) -> None:
    first, second = torch.load(one / "final.pt"), torch.load(other / "final.pt")
    assert first["seen"] == second["seen"]
    assert all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())


def steps_of(out: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in (out / "checkpoints").glob("checkpoint_*"))


def whole(out: Path) -> int:
    """The step of the newest whole checkpoint; no other may be visible with total_limit=1, but during a rotation."""
    from ckptool.integrations.accelerate import _NAME
    from ckptool.integrations.checkpoint_folders import newest_folder

    said: list[str] = []
    newest = newest_folder(str(out / "checkpoints"), _NAME, said.append)
    assert newest is not None and not said
    return int(newest.rpartition("_")[2])


def test_killed_at_random_it_ends_with_the_same_bytes(loop: Scripts, tmp_path: Path) -> None:
    seconds = loop.finish(tmp_path / "unbroken")["seconds"]
    assert loop.killed_at_random(4, seconds, 3, tmp_path / "killed")
    for _ in "a killed one", "one that had ended":
        loop.finish(tmp_path / "killed")
        assert_same_end(tmp_path / "killed", tmp_path / "unbroken")
        assert steps_of(tmp_path / "killed") == [40]
        saved = tmp_path / "killed/checkpoints"
        shutil.copytree(saved / "checkpoint_40", saved / "checkpoint_35")  # as one killed before it was deleted has it


@pytest.mark.parametrize(
    "options",
    [
        {"draws": True},
        {"draws": True, "workers": 2},
        {"seedable": True},
        {"every": 4, "accumulate": 2},
        {"every": 8},
        {"stateful": True, "draws": True, "workers": 2},
    ],
    ids=str,
)
def test_data_of_all_kinds_go_on_where_they_were(loop: Scripts, tmp_path: Path, options: dict[str, Any]) -> None:
    """After the first save, and after a later one."""
    if "stateful" in options:
        pytest.importorskip("torchdata.stateful_dataloader")
    loop.finish(tmp_path / "unbroken", 24, options=options)
    for steps in (8, 16 if "every" in options else 15, 24):
        loop.finish(tmp_path / "broken", steps, options=options)
    assert_same_end(tmp_path / "broken", tmp_path / "unbroken")


def test_a_kill_at_any_change_in_the_folder_loses_nothing_with_a_limit_of_one(loop: Scripts, tmp_path: Path) -> None:
    loop.finish(tmp_path / "begun", 10)
    out = tmp_path / "out"

    def save(event: int) -> dict[str, Any]:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "begun", out)
        return loop.run(out, 15, event=event, folder=str(out))

    events = save(1 << 30)["events"]
    assert events > 30
    found = []
    for event in range(1, events, 5):
        assert save(event)["status"] == -9
        found.append(whole(out))
    assert set(found) == {10, 15} and found == sorted(found)
    loop.finish(out, 20)
    loop.finish(tmp_path / "unbroken", 20)
    assert_same_end(out, tmp_path / "unbroken")


def test_a_damaged_newest_checkpoint_is_skipped_and_named(loop: Scripts, tmp_path: Path) -> None:
    loop.finish(tmp_path / "unbroken", 20)
    loop.finish(tmp_path / "out", 15, 2)
    (tmp_path / "out" / "checkpoints" / "checkpoint_15" / "random_states_0.pkl").write_bytes(b"")
    said = loop.finish(tmp_path / "out", 20, 2)["stderr"]
    assert "skipped" in said and "random_states_0.pkl has 0 bytes" in said
    assert_same_end(tmp_path / "out", tmp_path / "unbroken")


def test_a_save_inside_accumulation_comes_with_the_step_that_uses_the_gradients(loop: Scripts, tmp_path: Path) -> None:
    options = {"accumulate": 3, "every": 5, "limit": 9}
    loop.finish(tmp_path / "unbroken", 24, options=options)
    assert steps_of(tmp_path / "unbroken") == [6, 11, 16, 22]  # windows end at 6, 8 (the epoch), 11, 14, 16, …
    loop.finish(tmp_path / "broken", 14, options=options)
    loop.finish(tmp_path / "broken", 24, options=options)
    assert_same_end(tmp_path / "broken", tmp_path / "unbroken")


def test_another_object_is_refused(loop: Scripts, tmp_path: Path) -> None:
    loop.finish(tmp_path, 10)
    assert "holds no state of other" in loop.run(tmp_path, 15, options={"more": True})["stderr"]
