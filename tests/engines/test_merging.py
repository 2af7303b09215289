"""Merges against peft's own functions (`make engines`): the same task vectors, the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.support.files import load, saved

pytestmark = pytest.mark.engines
WEIGHTS = [0.7, 0.4, -0.3]


def merged(folder: Path, base: torch.Tensor, files: list[torch.Tensor], **options: Any) -> torch.Tensor:
    paths = [saved({"w.weight": tensor}, folder / f"{number}.pt") for number, tensor in enumerate([base, *files])]
    ckptool.average(paths[1:], folder / "out.pt", base=paths[0], overwrite=True, **options)
    tensor: torch.Tensor = load(folder / "out.pt")["w.weight"]
    return tensor


def models(count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(count)
    base = torch.randn(40, 2003)
    return base, [base + torch.randn(base.shape) / 10 for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ties_and_task_arithmetic(count: int, tmp_path: Path) -> None:
    """peft's ties elects the sign before the weights, and divides by the number that agree: with equal weights ours,
    which is mergekit's, is its result through that weight."""
    from peft.utils import merge_utils

    base, files = models(count)
    deltas, weights = [file - base for file in files], torch.tensor(WEIGHTS[:count])
    found = merged(tmp_path, base, files, method="task-arithmetic", weights=WEIGHTS[:count])
    assert torch.allclose(found, base + merge_utils.task_arithmetic(deltas, weights), atol=1e-6)
    for density in (0.2, 0.5, 0.9):
        found = merged(tmp_path, base, files, method="ties", density=density)
        assert torch.allclose(found, base + merge_utils.ties(deltas, torch.ones(count), density), atol=1e-6)


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_dare_of_the_same_random_choice(density: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft with our choice in place of its own gives ours."""
    from peft.utils import merge_utils

    base, files = models(2)
    options: Any = {"method": "dare", "density": density}
    chosen = [merged(tmp_path, base, files, weights=weights, **options) != base for weights in ([1, 0], [0, 1])]
    assert all(abs(mask.double().mean() - density) < 0.01 for mask in chosen)
    masks = iter(chosen)
    monkeypatch.setattr(torch, "bernoulli", lambda shares: next(masks).to(shares.dtype))
    deltas, weights = [file - base for file in files], torch.tensor([0.7, 0.4])
    wanted = base + merge_utils.dare_linear(deltas, weights, density)
    assert torch.allclose(merged(tmp_path, base, files, weights=[0.7, 0.4], **options), wanted, atol=1e-6)
