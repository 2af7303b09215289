"""The small vectors of layouts in `fixtures/surgery/layouts`: weights of one library, and what the other has."""

import hashlib
import json
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file

LAYOUT_CASES = Path(__file__).parents[2] / "fixtures" / "surgery" / "layouts"
State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


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


def both_sides(name: str) -> tuple[Shapes, Shapes, dict[str, str]]:
    """The shapes of both sides of a layout, and which name is which, of tensors that are only renamed."""
    case = case_of(name)
    old = counting(case["shapes"]) if "shapes" in case else load_file(LAYOUT_CASES / name / "model.safetensors")
    named: dict[tuple[Any, ...], list[str]] = {}
    for key, value in case["expected"].items():
        named.setdefault(tuple(value), []).append(key)
    found = {key: named.get(tuple(value), []) for key, value in digests(old).items()}
    new = {key: tuple(value[:-1]) for key, value in case["expected"].items()}
    shapes = {key: tuple(value.shape) for key, value in old.items()}
    return shapes, new, {key: names[0] for key, names in found.items() if len(names) == 1}
