"""Where a verb computes values that its output's type cannot hold, it says so; where it does not, it says nothing."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.support.files import load, saved

Make = Callable[[random.Random, torch.dtype, Path, Path], Any]


def some(draw: random.Random, *shape: int) -> torch.Tensor:
    """Numbers of any size, now and then infinite already."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(99)))
    values *= draw.choice((1, 1, 200, 30_000))
    return values if draw.random() < 0.8 else values.masked_fill(values > 2, float("inf"))


def averaged(draw: random.Random, dtype: torch.dtype, folder: Path, out: Path) -> Any:
    files = [saved({"a.weight": some(draw, 4, 4).to(dtype)}, folder / f"{at}.pt") for at in range(3)]
    method = draw.choice(("mean", "task-arithmetic", "ties", "dare"))
    if method == "mean":
        return ckptool.average(files, out, weights=[draw.choice((-1.0, 0.2, 3.0)) for _ in files])
    return ckptool.average(files[:2], out, base=files[2], method=method, scale=draw.choice((0.5, 4.0)))


def merged(draw: random.Random, dtype: torch.dtype, folder: Path, out: Path) -> Any:
    base = saved({"a.weight": some(draw, 4, 4).to(dtype)}, folder / "base.pt")
    names = ("base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight")
    adapter = dict(zip(names, (some(draw, 2, 4), some(draw, 4, 2)), strict=True))
    config = {"r": 2, "lora_alpha": 2, "peft_type": "LORA", "target_modules": ["a"]}
    return ckptool.lora_merge(base, saved(adapter, folder / "adapter.pt"), out, config=config)


def dequantized(draw: random.Random, dtype: torch.dtype, folder: Path, out: Path) -> Any:
    codes = some(draw, 4, 4).clamp(-400, 400).to(torch.float8_e4m3fn)
    values = {"a.weight": codes, "a.weight_scale": some(draw, 4, 1)}
    return ckptool.cast(saved(values, folder / "in.pt"), out, dtype, dequantize=True)


@pytest.mark.parametrize("make", [averaged, merged, dequantized])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_computed_values_that_became_infinite_are_said(make: Make, dtype: torch.dtype, tmp_path: Path) -> None:
    said_by, lost = [0, 0], 0
    for seed in range(40):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        done = make(random.Random(seed), dtype, folder, folder / "out.pt")
        said = any(note.code == "non-finite" for note in done.notes)
        trees = [load(path) for path in folder.iterdir() if path.name != "out.pt"]
        inputs = [value.float() for tree in trees for value in tree.values()]
        was_infinite = any(value.isinf().any() for value in inputs)
        is_infinite = any(value.isinf().any() for value in load(folder / "out.pt").values())
        if not was_infinite:
            assert said == is_infinite, seed
            lost += is_infinite
        said_by[said] += 1
        assert is_infinite or not said, seed
    assert said_by[0] and (dtype is torch.float32 or (said_by[1] and lost)), "else this tests nothing"


def test_a_result_in_memory_is_warned_of() -> None:
    large = {"a.weight": torch.full((2, 2), 60_000.0, dtype=torch.float16)}
    with (
        pytest.warns(match="add up to 1.5"),
        pytest.warns(match=r"too large for f16 and became infinite \(non-finite\)"),
    ):
        assert ckptool.average([large, large], weights=[2, -0.5])["a.weight"].isinf().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptool.average([large, large])
