"""`save_for_cpu`: a module's weights as anyone can load them, without wrappers and without its devices."""

from __future__ import annotations

from pathlib import Path

from torch import nn

import ckptool
from tests.support.live_models import compiled


def test_save_for_cpu_of_wrapped_submodules(tmp_path: Path) -> None:
    model = nn.Sequential(compiled(nn.Linear(2, 2)), nn.Module())
    model[1].module = nn.Linear(2, 2)  # one's own name
    ckptool.save_for_cpu(model, tmp_path / "cpu.safetensors")
    assert set(ckptool.load(tmp_path / "cpu.safetensors")) == {"0.weight", "0.bias", "1.module.weight", "1.module.bias"}
