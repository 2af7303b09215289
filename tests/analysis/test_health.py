"""Health: what is conspicuous is found, and nothing in the models of others as they are initialised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.verbs.report import Health


def health_of(state: Any, tmp_path: Path) -> Health:
    torch.save(state, tmp_path / "m.pt")
    return ckptool.report(tmp_path / "m.pt").files[0].health


def stack(count: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(16, 8) for _ in range(count)))
    return {f"layers.{name}": value.clone() for name, value in layers.state_dict().items()}


def edited(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**stack(), **{name.replace("__", "."): value for name, value in changes.items()}}


holed = stack()["layers.2.weight"]
holed[[1, 5]] = 0
PLANTED: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {
    "nan": (edited(layers__1__bias=torch.tensor([float("nan")] * 2 + [0.0] * 6)), {"layers.1.bias": "2 of 8 values"}),
    "inf": (edited(layers__1__weight=torch.full((8, 16), -float("inf"))), {"layers.1.weight": "128 of 128 values"}),
    "all-zero": (edited(layers__0__weight=torch.zeros(8, 16)), {"layers.0.weight": "128 of 128 values"}),
    "constant": (edited(layers__0__weight=torch.full((8, 16), 0.1)), {"layers.0.weight": "all values are 0.1"}),
    "dead-rows": (edited(layers__2__weight=holed), {"layers.2.weight": "2 of 8 rows"}),
    "norm": (edited(layers__3__weight=stack()["layers.3.weight"] * 4), {"layers.3.weight": "norm "}),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_is_found_with_its_rule(kind: str, tmp_path: Path) -> None:
    state, expected = PLANTED[kind]
    found = health_of(state, tmp_path)
    (finding,) = [each for each in found.findings if each.kind == kind]
    assert finding.details.keys() == expected.keys()
    assert all(finding.details[name].startswith(said) for name, said in expected.items())
    assert any(rule == f"{kind}: {finding.rule}" for rule in found.rules) and len(found.rules) == len(PLANTED)
    assert {each.kind for each in found.findings} <= {kind, "norm"}


class ResNet(nn.Module):
    """Blocks with a gamma that begins at zero, as torchvision's `zero_init_residual` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"conv": nn.Conv2d(8, 8, 3, bias=False), "bn": nn.BatchNorm2d(8)}) for _ in range(6)
        )
        for block in self.blocks:
            nn.init.zeros_(block["bn"].weight)
        self.down = nn.Conv2d(8, 16, 1)
        self.fc = nn.Linear(16, 10)
        nn.init.zeros_(self.fc.bias)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 16, padding_idx=0)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.zeros(1, 12, 16))
        self.h = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 5)
        self.register_buffer("mask", torch.tril(torch.ones(12, 12)))
        self.register_buffer("attn_mask", torch.zeros(4, 9, 9))
        self.lora_B = nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.lora_B.weight)


def trained_state(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # moments of nothing but zeros
    return {"model": model.state_dict(), "ema": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 0}


@pytest.mark.parametrize("make", [ResNet, Gpt, lambda: nn.LSTM(8, 8, 5)], ids=["resnet", "gpt", "lstm"])
@pytest.mark.parametrize("seed", range(3))
def test_a_fresh_model_and_its_optimizer_are_not_conspicuous(make: Any, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    found = health_of(trained_state(make()), tmp_path)
    assert found.findings == () and found.read == found.tensors and not found.skipped


def test_a_tensor_whose_data_is_damaged_is_skipped_and_the_others_are_read(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(4, 4), "b.weight": torch.randn(4, 4)}, tmp_path / "m.pt")
    content = (tmp_path / "m.pt").read_bytes()
    place = content.index(b"data/1FB") if b"data/1FB" in content else content.index(b"data/1")
    (tmp_path / "m.pt").write_bytes(content[:place] + b"dxta/1" + content[place + 6 :])
    found = ckptool.report(tmp_path / "m.pt").files[0].health
    assert found.read == 1 and list(found.skipped) == ["b.weight"]
