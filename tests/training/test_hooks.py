"""Hooks: what they find, that they change nothing, the user's own, the profiler, TensorBoard."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.errors import MissingExtra, UserCodeFailed
from ckptool.training.hooks import Hooks
from tests.support.small_runs import CONV, GAN, IMAGES, last, own, run_to_end, take, trainer


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "run/metrics.jsonl").read_text().splitlines()]


def test_hooks_change_nothing_that_is_trained(tmp_path: Path) -> None:
    sections = {"data": IMAGES, "models": {"main": CONV}}
    run_to_end(tmp_path / "a", **sections)
    run_to_end(tmp_path / "b", hooks=["grad_norm", "activation_stats"], profile={"active": 2}, **sections)
    assert last(tmp_path / "a") == last(tmp_path / "b")


def test_the_norm_of_gradients_is_that_before_clipping() -> None:
    made, hooks = trainer("optim.main.clip.norm=0.001"), Hooks(["grad_norm"])
    take(made, 1, hooks)
    clipped = torch.cat([p.grad.flatten() for p in made.models["main"].parameters() if p.grad is not None]).norm()
    found = hooks.facts()
    assert float(clipped) == pytest.approx(0.001, rel=1e-2)
    assert found["grad_norm"] > 0.01
    assert hooks.facts() == {}
    plain, hooks = trainer(), Hooks(["grad_norm"])
    take(plain, 1, hooks)
    whole = torch.cat([p.grad.flatten() for p in plain.models["main"].parameters() if p.grad is not None]).norm()
    assert hooks.facts()["grad_norm"] == pytest.approx(float(whole), rel=1e-5)


def test_each_of_two_models_has_its_norm(tmp_path: Path) -> None:
    run_to_end(tmp_path, hooks=["grad_norm"], **GAN)
    assert {"grad_norm_generator", "grad_norm_discriminator"} <= set(logged(tmp_path)[0])


def test_statistics_of_activations(tmp_path: Path) -> None:
    run_to_end(tmp_path, "log.every=4", hooks=["activation_stats"])
    fact = next(fact for fact in logged(tmp_path) if fact["step"] == 4)
    assert {key for key in fact if key.startswith("main.")} == {
        f"main.{i}.{kind}" for i in range(5) for kind in ("mean", "std")
    }
    made, hooks = trainer("log.every=3"), Hooks(["activation_stats"])
    hooks.call("attach", made)
    seen: list[torch.Tensor] = []
    made.models["main"].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    take(made, 2, hooks)
    assert hooks.facts() == {}  # no line is written there, so nothing is computed
    take(made, 1, hooks)
    assert hooks.facts()["main.4.mean"] == pytest.approx(float(seen[-1].mean()))


def test_a_hook_of_ones_own(tmp_path: Path) -> None:
    run_to_end(tmp_path, "train.steps=2", "log.every=2", hooks=[own("Said"), own("Helped")])
    said = "attach; backward main; step 1; backward main; step 2; logged 2.0"
    assert (tmp_path / "run/said").read_text() == said
    with pytest.raises(UserCodeFailed, match=r"own.py:Lost raised LookupError: lost"):
        run_to_end(tmp_path / "bad", hooks=[own("Said"), own("Lost")])
    assert (tmp_path / "bad/run/said").read_text() == "attach; backward main; step 1"  # each is told of the end


# The profiler --------------------------------------------------------------------------------------------------------


def test_the_profiler_writes_its_trace_into_the_run(tmp_path: Path) -> None:
    run_to_end(tmp_path, profile={"wait": 2, "warmup": 1, "active": 3, "trace": "trace.json"})
    trace = json.loads((tmp_path / "run/trace.json").read_text())
    steps = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"}
    assert any("addmm" in event.get("name", "") for event in trace["traceEvents"])


def test_a_run_that_is_shorter_than_the_profile_ends_well(tmp_path: Path) -> None:
    run_to_end(tmp_path, "train.steps=2", profile={"wait": 1, "warmup": 0, "active": 9})
    assert (tmp_path / "run/profile.json").exists()
    run_to_end(tmp_path / "shorter", "train.steps=1", profile={"wait": 5})
    assert not (tmp_path / "shorter/run/profile.json").exists()


# TensorBoard ---------------------------------------------------------------------------------------------------------


def test_tensorboard_that_is_not_installed_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match="needs the package tensorboard") as caught:
        run_to_end(tmp_path, "log.tensorboard=true")
    assert "pip install tensorboard" in caught.value.fix
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_tensorboard_gets_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def close(self) -> None:
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    run_to_end(tmp_path, "log.tensorboard=true", "train.steps=10")
    assert written[0] == ("tensorboard", 1)
    assert ("loss", 10) in written
    assert ("val_loss", 5) in written
    assert written[-1] == "closed"
    run_to_end(tmp_path, "log.tensorboard=true", "train.steps=12")
    assert ("tensorboard", 11) in written  # what a killed run wrote behind its last checkpoint is cut off
