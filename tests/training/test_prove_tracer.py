"""What `prove` looks at in a process and puts back into another: the tracer, here in the process of the test."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ckptool.training import moving, rng
from ckptool.training.prove import tracer
from ckptool.training.prove.tracer import Tracer


def test_variables_are_looked_at_first_after_a_save_and_in_a_quarter_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"run": str(tmp_path / "run"), "hold": None}))
    model, tool, counter = torch.nn.Linear(2, 1), Tracer(str(tmp_path)), [0]
    tool.moving, tool.rng, optimizer = moving, rng, torch.optim.SGD(model.parameters())
    monkeypatch.setattr(Tracer, "roots", lambda self: {"counter": counter, "optimizer": optimizer})
    for counter[0] in range(60):
        model.weight.data += 1
        if counter[0] == 30:
            (tmp_path / "run").mkdir()
            (tmp_path / "run/a.pt").touch()
        tool.before_step(optimizer, (), {})
    tool.file.close()
    lines = [json.loads(line) for line in next(tmp_path.glob("0-*.jsonl")).read_text().splitlines()]
    looks = [number for number, line in enumerate(lines) if not line["age"]]
    assert looks == [n for n, line in enumerate(lines) if n in (0, 30) or line["weights"][0] in "0123"]
    assert 5 < len(looks) < 30 and lines[looks[1]]["found"]


def test_the_state_of_an_optimizer_may_hold_lists_of_tensors(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    model, tool = torch.nn.Linear(2, 1), Tracer(str(tmp_path))
    tool.moving, states = moving, []
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).pow(4).mean()
        loss.backward()
        return loss

    for _ in range(4):
        states.append(tool.facts(optimizer)["state"])
        optimizer.step(closure)
    assert len({*states}) == 4


class Sampler:
    def __init__(self) -> None:
        self.order, self.rng, self.array = [3, 1, 2], random.Random(4), numpy.arange(3.0)


def parts() -> dict[str, Any]:
    """One object of each kind that can be put back, in the state of its beginning."""
    torch.manual_seed(0)
    model, average = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {
        "model": model,
        "average": average,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": torch.amp.GradScaler("cpu", growth_interval=1),
        "noise": torch.Generator().manual_seed(1),
        "dice": numpy.random.default_rng(2),
        "sampler": Sampler(),
        "batch": (torch.ones(2, 2), torch.zeros(2)),
    }


def moved(made: dict[str, Any]) -> None:
    """Lets all of them move, and the global generators."""
    made["model"](torch.rand(2, 2)).sum().backward()
    made["scaler"].scale(torch.ones(()))
    made["scaler"].step(made["optimizer"])
    made["scaler"].update()
    made["scheduler"].step()
    made["average"].weight.data.add_(1)
    torch.rand(1, generator=made["noise"]), made["dice"].random(), made["sampler"].rng.random()
    random.random(), numpy.random.random()
    made["sampler"].order = made["sampler"].order[1:] + made["sampler"].order[:1]
    made["sampler"].array += 1
    made["batch"][0].add_(1)


def test_all_that_is_kept_can_be_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds after that is what it found before, but for the weights, which a checkpoint has."""
    shutil.copy(Path(moving.__file__), tmp_path)
    shutil.copy(Path(rng.__file__), tmp_path)
    monkeypatch.setattr(tracer, "FOLDER", str(tmp_path))
    made, tool = parts(), Tracer(str(tmp_path))
    tool.moving, tool.rng = tracer.beside("moving"), tracer.beside("rng")
    monkeypatch.setattr(Tracer, "roots", lambda self: made)
    moved(made)

    def facts() -> dict[str, Any]:
        return tool.walk()[0] | tool.facts(made["optimizer"])

    torch.save({"values": tool.values()}, tmp_path / "values")
    before = facts()
    moved(made)
    changed = {name: entry for name, entry in tool.walk()[0].items() if entry != before[name]}
    assert {
        "average",
        "scheduler",
        "scaler",
        "noise",
        "dice",
        "sampler.rng",
        "sampler.order",
        "sampler.array",
        "batch[0]",
    } <= {*changed}
    keys = [f"{tool.moving.kind_of(entry)}:{name}" for name, entry in changed.items()]
    keys += ["optimizer:optimizer", "lr:", "random:torch", "random:numpy", "random:python"]
    plan = {"put": keys, "values": str(tmp_path / "values")}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    tool.put_back(tool.stored()["values"])
    left = {name for name, entry in facts().items() if entry != before[name]}
    assert left == {"weights"}
