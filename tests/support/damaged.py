"""What the tests of salvage share: a checkpoint that is going to be damaged."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.files import torch_bytes


def block_state() -> dict[str, Any]:
    """Tensors of one size, as a transformer's blocks have: where one record can pass for another."""
    torch.manual_seed(0)
    return {f"l{i}.w": torch.randn(4, 3) for i in range(12)} | {"big": torch.randn(40)}


PLAIN = torch_bytes({"model": block_state(), "epoch": 3})
