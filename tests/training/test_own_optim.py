"""Optimizers and schedules of one's own, by `file.py:NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.errors import UsageError
from ckptool.training.start import resume
from tests.support.small_runs import again, resumes, run_to_end, take, trainer

LION = """
import torch

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["signs"] = torch.zeros_like(p), torch.zeros(3, dtype=torch.int64)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                mean, (one, two) = state["exp_avg"], group["betas"]
                p.add_(mean.lerp(p.grad, 1 - one).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - two)
                state["signs"] += 1

class Moody(Lion):
    mode = "eval"

    def train(self):
        self.mode = "train"

    def step(self, closure=None):
        assert self.mode == "train"
        super().step()

def matrices(params, lr):
    return Lion([p for p in params if p.dim() > 1], lr)

def nothing(params, lr):
    return lr

def warmup(step, length=4):
    return min(1.0, (step + 1) / length)

class Halving(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, every):
        self.every = every
        super().__init__(optimizer)

    def get_lr(self):
        return [base * 0.5 ** (self.last_epoch // self.every) for base in self.base_lrs]

def both(optimizer, length):
    S = torch.optim.lr_scheduler
    first = S.LambdaLR(optimizer, lambda step: (step + 1) / length)
    return S.SequentialLR(optimizer, [first, S.ExponentialLR(optimizer, 0.9)], milestones=[length])

def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

class Counter:
    def __call__(self, step):
        return 1.0

counter = Counter()
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(LION)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("groups", [[], [{"match": "*.bias", "weight_decay": 0.0}]])
def test_an_optimizer_of_ones_own_resumes_bit_for_bit(tmp_path: Path, mine: str, groups: list[dict[str, Any]]) -> None:
    lion = {"name": f"{mine}:Lion", "lr": 0.002, "args": {"weight_decay": 0.1}, "groups": groups}
    made = resumes(tmp_path, optim={"main": lion})
    names = [name for group in made.optimizers["main"].param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(dict(made.models["main"].named_parameters()))
    slots = next(iter(again(made, tmp_path / "b.pt").optimizers["main"].state.values()))
    assert slots["signs"].dtype == torch.int64
    assert slots["signs"].tolist() == [9, 9, 9]


def test_the_file_of_an_optimizer_or_a_schedule_that_changed_is_told(tmp_path: Path, mine: str) -> None:
    lion = {"name": f"{mine}:Lion", "schedule": {"name": f"{mine}:warmup"}}
    run_to_end(tmp_path, "train.steps=5", optim={"main": lion})
    path = tmp_path / "mine.py"
    path.write_text(path.read_text() + "\n# another\n")
    said: list[str] = []
    resume(str(tmp_path / "run"), ["train.steps=8"], say=said.append)
    assert said == ["resumed from step 5, but mine.py changed: the result may differ"]


def test_an_optimizer_with_modes_steps_in_that_of_training(tmp_path: Path, mine: str) -> None:
    resumes(tmp_path, f"optim.main.name={mine}:Moody")


def test_what_an_optimizer_of_ones_own_gets_wrong_is_told_by_name(mine: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)does not step the parameters.*It left out 1\.bias, 4\.bias"):
        trainer(f"optim.main.name={mine}:matrices")
    with pytest.raises(UsageError, match=r"mine\.py:nothing returned float, not a torch\.optim\.Optimizer"):
        trainer(f"optim.main.name={mine}:nothing")
    with pytest.raises(UsageError, match=r"(?s)Lion does not take these arguments.*momentum.*It takes: lr"):
        trainer(f"optim.main.name={mine}:Lion", "optim.main.args.momentum=0.9")


@pytest.mark.parametrize(
    ("name", "args", "rates"),
    [
        ("warmup", {}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ("warmup", {"length": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("Halving", {"every": 2}, [1.0, 1.0, 0.5, 0.5, 0.25]),
        ("both", {"length": 2}, [0.5, 1.0, 1.0, 0.9, 0.81]),
    ],
)
def test_a_schedule_of_ones_own(tmp_path: Path, mine: str, name: str, args: dict[str, Any], rates: list[float]) -> None:
    settings = {"main": {"name": "sgd", "lr": 1.0, "schedule": {"name": f"{mine}:{name}", "args": args}}}
    made = trainer(optim=settings)
    found = [made.optimizers["main"].param_groups[0]["lr"]]
    for _ in range(4):
        take(made, 1)
        found.append(made.optimizers["main"].param_groups[0]["lr"])
    assert found == pytest.approx(rates)
    resumes(tmp_path, optim=settings, middle=3, steps=7)


@pytest.mark.parametrize("name", ["plateau", "counter", "nothing"])
def test_what_cannot_be_a_schedule_is_told_by_name(mine: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"(?s)schedule: .*{name}"):
        trainer(f"optim.main.schedule.name={mine}:{name}")
