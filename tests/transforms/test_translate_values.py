"""What rules make of values that are easy to mix up: tied tensors, variables of sizes, moments. torch is the judge."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Unsupported


def trained() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("seed", range(6))
def test_moments_move_with_the_weights_and_are_not_changed(seed: int, tmp_path: Path) -> None:
    """What is added to a weight, or rounds it, is not for its moments."""
    rng = random.Random(seed)
    model, optimizer = trained()
    chain = rng.sample(["add 1", "cast bf16", "transpose", "add -3"], k=rng.randint(1, 4))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    rules = [f"weight => w : {' | '.join(chain)}", "bias => b : add 1"]
    ckptool.translate(tmp_path / "in.pt", rules, tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    for number, before in enumerate(optimizer.state_dict()["state"].values()):
        for field in ("exp_avg", "exp_avg_sq"):
            wanted = before[field].T if "transpose" in chain and number == 0 else before[field]
            assert torch.equal(state[number][field], wanted)


def test_moments_are_not_resized(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    rules = ["weight => w : resize [8, 3] rows(mean)", "bias => bias"]
    with pytest.raises(Unsupported, match="the moments of weight cannot be resized"):
        ckptool.translate(tmp_path / "in.pt", rules, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
    ckptool.translate(tmp_path / "in.pt", rules, tmp_path / "out.pt", at="model", container="torch-zip", extract=True)


@pytest.mark.parametrize(
    ("state", "rule", "message"),
    [
        ({"w.0": (2,), "w.9999999": (2,)}, "w.{e} => w : stack 0 over e", "nothing for e = 1, of 10,000,000"),
        (dict.fromkeys(["w.0.0", "w.0.1", "w.1.0"], (2,)), "w.{a}.{b} => w : stack 0 over a | stack 0 over b", "b = 1"),
        ({"w": (0, 3)}, "w => w : reshape [0, 9007199254740992, 9007199254740992]", "is too large"),
    ],
)  # fmt: skip
def test_numbers_that_are_too_large(state: dict[str, Any], rule: str, message: str, tmp_path: Path) -> None:
    torch.save({key: torch.zeros(shape) for key, shape in state.items()}, tmp_path / "in.pt")
    with pytest.raises(CkptoolError, match=message):
        ckptool.translate(tmp_path / "in.pt", rule, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


CHAIN = ", ".join(f"v{n}: v{n + 1}" for n in range(2000))
TREE = ", ".join(f"v{n}: x or v{n + 1} or v{n + 1}" for n in range(40))
H = "rules: ['a => b : repeat 0 v0']\nvariables: "
LAYOUT = "new: {name: y, has: [b]}\nrules: ['a => b']\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{H}{{{CHAIN}}}", "more than 64 variables"),
        (f"{H}{{{TREE}}}", "has no value"),
        (f"{H}{{v0: \"size('a')\"}}", "has no value"),
        (f"{H}{{v0: \"size('a', 0, 1)\"}}", "has no value"),
        (f"{H}{{v0: count()}}", "has no value"),
        ("rules: ['a => b']\nfill: ['c => zeros [0-1] like a']", r"line 2: .*\n.*no shape"),
        ("rules: ['a => b']\nfill: ['c => zeros [9007199254740991, 900] like a']", "more than a rule"),
        ("models: vit\nrules: ['a => b']", "line 1: not a list"),
        ("notes: {a: b}\nrules: ['a => b']", "line 1: not a list"),
        (f"old: {{name: x, has: ['a [x]']}}\n{LAYOUT}", "not of the layout"),
        (f"old: [x]\n{LAYOUT}", "a side has"),
    ],
)  # fmt: skip
def test_hostile_rules_are_named_errors(text: str, message: str, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2, 3)}, tmp_path / "in.pt")
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(CkptoolError, match=message):
        ckptool.translate(tmp_path / "in.pt", rules_file=tmp_path / "rules.yaml", out=tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
