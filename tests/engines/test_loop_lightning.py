"""Lightning's Trainer with `DurableCheckpointIO` and `ExactResume`: killed anywhere, it ends with the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.killed_scripts import Scripts

pytestmark = pytest.mark.engines
try:
    import torchdata.stateful_dataloader  # noqa: F401

    STATEFUL = [{}, {"workers": 2}, {"draws": True}, {"every": 8}, {"every": 0}]
except ImportError:
    STATEFUL = []
PLAIN = [{"every": 8, "stateful": False}, {"every": 0, "stateful": False}]


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


@pytest.mark.parametrize("options", [*STATEFUL, *PLAIN], ids=str)
def test_a_run_that_was_resumed_ends_with_the_same_bytes(fit: Scripts, tmp_path: Path, options: dict[str, Any]) -> None:
    fit.finish(tmp_path / "unbroken", 24, options=options)
    fit.finish(tmp_path / "broken", 16 if "every" in options else 15, options=options)
    fit.finish(tmp_path / "broken", 24, options=options)
    assert_same_end(tmp_path / "broken", tmp_path / "unbroken")


def test_killed_at_random_it_ends_with_the_same_bytes(fit: Scripts, tmp_path: Path) -> None:
    options = {} if STATEFUL else PLAIN[0]
    seconds = fit.finish(tmp_path / "unbroken", options=options)["seconds"]
    assert fit.killed_at_random(5, seconds, 2, tmp_path / "killed", options=options)
    fit.finish(tmp_path / "killed", options=options)
    assert_same_end(tmp_path / "killed", tmp_path / "unbroken")


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


def test_a_plain_loader_in_the_middle_of_an_epoch_is_refused(fit: Scripts, tmp_path: Path) -> None:
    answer = fit.run(tmp_path, 10, options={"stateful": False})
    assert answer["status"] == 1
    assert "the train_dataloader is a DataLoader, which does not save its place" in answer["stderr"]
    assert "from torchdata.stateful_dataloader import StatefulDataLoader" in answer["stderr"]


@pytest.mark.skipif(not STATEFUL, reason="torchdata is not installed")
def test_a_loader_without_a_length_is_refused(fit: Scripts, tmp_path: Path) -> None:
    assert "reads it one batch ahead" in fit.run(tmp_path, 10, options={"stream": True})["stderr"]


def test_a_damaged_newest_checkpoint_is_skipped_and_named(fit: Scripts, tmp_path: Path) -> None:
    fit.finish(tmp_path / "unbroken", 24, options=PLAIN[0])
    out = tmp_path / "out"
    fit.finish(out, 16, options=PLAIN[0])
    with open(out / "epoch=1-step=16.ckpt", "r+b") as file:
        file.truncate(1000)
    shutil.copy(out / "epoch=1-step=16.ckpt", out / "not-ours.ckpt")
    name, said = newest(out)
    assert name == "epoch=0-step=8.ckpt"
    assert "not-ours.ckpt has no sidecar" in said[0] and "has 1,000 bytes; its sidecar says" in said[1]
    assert "epoch=1-step=16.ckpt has 1,000 bytes" in fit.finish(out, 24, options=PLAIN[0])["stderr"]
    assert_same_end(out, tmp_path / "unbroken")


def test_what_it_writes_stock_lightning_and_torch_read(fit: Scripts, tmp_path: Path) -> None:
    fit.finish(tmp_path, 8, options=PLAIN[0])
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
