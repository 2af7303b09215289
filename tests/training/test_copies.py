"""Saving in the background keeps at most one copy of the state, without waiting for garbage to be collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.training import loop
from ckptool.training.trainer import Trainer
from tests.support.small_runs import CONV, GAN, IMAGES, run_to_end, scheduled

SEVERAL: dict[str, dict[str, Any]] = {
    "mlp": {"optim": scheduled("warmup_cosine"), "train": {"steps": 50, "ema": 0.9}},
    "conv, fp16": {"data": IMAGES, "models": {"main": CONV}, "train": {"steps": 50, "precision": "fp16"}},
    "gan": {**GAN, "train": {"steps": 50}},
}


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        yield from tensors(part)


@pytest.mark.parametrize("name", SEVERAL)
def test_copies_of_the_state_are_gone_with_their_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before a copy is made, none of an earlier one is left; and none is at the end. The collector of garbage does not
    run."""
    made, copies, left = loop.gathered, [], []

    def gathered(trainer: Trainer, *, copied: bool) -> dict[str, Any]:
        left.append(sum(any(each() is not None for each in copy) for copy in copies))
        tree = made(trainer, copied=copied)
        copies.append([weakref.ref(tensor) for tensor in tensors(tree)])
        return tree

    monkeypatch.setattr(loop, "gathered", gathered)
    gc.collect()
    gc.disable()
    try:
        run_to_end(tmp_path, "save.every=1", "save.async=true", "eval.every=5", **SEVERAL[name])
        assert left == [0] * 50
        assert not any(each() is not None for copy in copies for each in copy)
    finally:
        gc.enable()
