"""What the tests of torch zips share: a small checkpoint with tied weights."""

from __future__ import annotations

from typing import Any

import torch


def tied_state() -> dict[str, Any]:
    w = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {"state_dict": {"a.weight": w, "b.weight": w, "c": torch.ones(5, dtype=torch.float16)}, "epoch": 3}
