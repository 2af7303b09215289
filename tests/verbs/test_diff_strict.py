"""Another order of keys or another `_metadata` is noted, and is a difference only with `--strict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptool
from tests.support.cli import Run


def test_order_and_metadata_count_only_when_strict(tmp_path: Path, run: Run) -> None:
    full = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    made: dict[str, tuple[Any, Any]] = {
        "metadata": ({"model": full}, {"model": dict(full)}),
        "order": ({"model": dict(full), "step": 1}, {"step": 1, "model": dict(reversed(full.items()))}),
        "both": (full, dict(reversed(full.items()))),
    }
    for name, (one, other) in made.items():
        paths = [tmp_path / f"{name}{side}.pt" for side in "ab"]
        for tree, path in zip((one, other), paths, strict=True):
            torch.save(tree, path)
        found, strict = ckptool.diff(*paths), ckptool.diff(*paths, strict=True)
        assert (found.same, strict.same) == (True, False), name
        assert bool(found.metadata_differs) == (name != "order") and bool(found.order_differs) == (name != "metadata")
        said = run("diff", *paths)
        assert said.code == 0 and "--strict" in said.out
        assert run("diff", *paths, "--strict").code == 1
        assert ckptool.diff(*paths, strict=True, ignore="order,metadata").same
    same = ckptool.diff(paths[0], paths[0])
    assert not same.metadata_differs and not same.order_differs
