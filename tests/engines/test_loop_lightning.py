"""Lightning's Trainer with `DurableCheckpointIO` and `ExactResume`: killed anywhere, it ends with the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.killed_scripts import Scripts

pytestmark = pytest.mark.engines
HAS_TORCHDATA = find_spec("torchdata") is not None
needs_torchdata = pytest.mark.skipif(not HAS_TORCHDATA, reason="torchdata is not installed")
CASES: list[dict[str, Any]] = [
    {},
    {"workers": 2},
    {"draws": True, "workers": 2},
    {"draws": True, "stream": True},
    {"draws": True, "stream": True, "workers": 1, "persist": True},
    {"every": 8},
    {"every": 0, "draws": True},
    {"every": 3, "accumulate": 2},
]
PLAIN: dict[str, Any] = {"every": 8, "stateful": False}


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    scripts = Scripts("lightning_fit.py", tmp_path_factory.mktemp("lightning"))
    yield scripts
    scripts.close()


def assert_same_end(one: Path, other: Path) -> None:
    first, second = torch.load(one / "final.pt"), torch.load(other / "final.pt")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def newest(out: Path) -> tuple[str | None, list[str]]:
    from ckptool.integrations.lightning import newest_checkpoint

    said: list[str] = []
    found = newest_checkpoint(out, said.append)
    return found and Path(found).name, said


@pytest.mark.parametrize("stateful", [False, pytest.param(True, marks=needs_torchdata)], ids=["plain", "stateful"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_run_that_was_resumed_ends_with_the_same_bytes(
    fit: Scripts, tmp_path: Path, options: dict[str, Any], stateful: bool
) -> None:
    """After its first save, then again; inside an epoch, at its end, after validation."""
    options, end = {**options, "stateful": stateful}, 12 if "accumulate" in options else 24
    fit.finish(tmp_path / "unbroken", end, options=options)
    for steps in (8, 8 + end // 3, end):
        said = fit.finish(tmp_path / "broken", steps, options=options)["stderr"]
    assert_same_end(tmp_path / "broken", tmp_path / "unbroken")
    assert "accumulation" not in said


@pytest.mark.parametrize("stateful", [False, pytest.param(True, marks=needs_torchdata)], ids=["plain", "stateful"])
def test_killed_at_random_it_ends_with_the_same_bytes(fit: Scripts, tmp_path: Path, stateful: bool) -> None:
    options = {"stateful": stateful, "draws": True, "accumulate": 1 + stateful}
    seconds = fit.finish(tmp_path / "unbroken", options=options)["seconds"]
    assert fit.killed_at_random(5, seconds, 2, tmp_path / "killed", options=options)
    fit.finish(tmp_path / "killed", options=options)
    assert_same_end(tmp_path / "killed", tmp_path / "unbroken")


def test_a_checkpoint_inside_accumulation_is_noted(fit: Scripts, tmp_path: Path) -> None:
    said = fit.finish(tmp_path, 4, options={"accumulate": 3, "inside": True, "stateful": False})["stderr"]
    assert said.count("saved inside gradient accumulation") == 1 and "every_n_train_steps" in said


def test_a_kill_at_any_change_in_the_folder_leaves_the_older_or_the_newer_checkpoint(
    fit: Scripts, tmp_path: Path
) -> None:
    options = {"every": 8, "stateful": False, "keep": 1}
    fit.finish(tmp_path / "begun", 8, options=options)
    out = tmp_path / "out"

    def save(event: int) -> dict[str, Any]:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "begun", out)
        return fit.run(out, 16, event=event, folder=str(out), options=options)

    events = save(1 << 30)["events"]
    assert events >= 16
    found = []
    for event in range(1, events, 2):
        assert save(event)["status"] == -9
        found.append(newest(out))
    names = [name for name, _ in found]
    assert set(names) == {"epoch=0-step=8.ckpt", "epoch=1-step=16.ckpt"} and names == sorted(names)
    assert not any(said for _, said in found)


def test_a_damaged_newest_checkpoint_is_skipped_and_named(fit: Scripts, tmp_path: Path) -> None:
    fit.finish(tmp_path / "unbroken", 24, options=PLAIN)
    out = tmp_path / "out"
    fit.finish(out, 16, options=PLAIN)
    with open(out / "epoch=1-step=16.ckpt", "r+b") as file:
        file.truncate(1000)
    shutil.copy(out / "epoch=1-step=16.ckpt", out / "not-ours.ckpt")
    name, said = newest(out)
    assert name == "epoch=0-step=8.ckpt"
    assert "not-ours.ckpt has no sidecar" in said[0] and "has 1,000 bytes; its sidecar says" in said[1]
    assert "epoch=1-step=16.ckpt has 1,000 bytes" in fit.finish(out, 24, options=PLAIN)["stderr"]
    assert_same_end(out, tmp_path / "unbroken")


def test_what_it_writes_stock_lightning_and_torch_read(fit: Scripts, tmp_path: Path) -> None:
    fit.finish(tmp_path, 8, options=PLAIN)
    found = torch.load(tmp_path / "epoch=0-step=8.ckpt", weights_only=True)
    assert found["global_step"] == 8 and found["hyper_parameters"] == {"width": 16}


def test_a_kill_while_a_file_is_replaced_leaves_a_step_that_is_true(tmp_path: Path) -> None:
    """last.ckpt, of which the sidecar is newer than the file."""
    from ckptool.integrations.lightning import DurableCheckpointIO

    plugin = DurableCheckpointIO()
    plugin.save_checkpoint({"global_step": 10}, tmp_path / "last.ckpt")
    old = (tmp_path / "last.ckpt").read_bytes()
    plugin.save_checkpoint({"global_step": 15}, tmp_path / "a.ckpt")
    plugin.save_checkpoint({"global_step": 20}, tmp_path / "last.ckpt")
    assert newest(tmp_path) == ("last.ckpt", [])
    (tmp_path / "last.ckpt").write_bytes(old)
    assert newest(tmp_path) == ("a.ckpt", [])
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert newest(tmp_path) == ("last.ckpt", [])
