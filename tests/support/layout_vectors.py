"""The small vectors of layouts in `fixtures/surgery/layouts`: weights of one library, and what the other has."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

LAYOUT_CASES = Path(__file__).parents[2] / "fixtures" / "surgery" / "layouts"
State = dict[str, torch.Tensor]


def digests(state: State) -> dict[str, Any]:
    """The shape and the beginning of the sha256 of the bytes of each tensor."""
    return {
        name: [*value.shape, hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()[:8]]
        for name, value in state.items()
    }


def counting(shapes: dict[str, list[int]]) -> State:
    """Tensors of these shapes with numbers of their own, that need not be stored."""
    return {
        name: (torch.arange(torch.Size(shape).numel()) + crc32(name.encode()) % 9973).reshape(shape).float()
        for name, shape in shapes.items()
    }


def case_of(name: str) -> dict[str, Any]:
    case: dict[str, Any] = json.loads((LAYOUT_CASES / name / "case.json").read_text())
    return case
