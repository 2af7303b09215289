"""Plain values: whatever a checkpoint holds, what comes out opens with `weights_only=True`, and nothing goes without a
word."""

from __future__ import annotations

import argparse
import datetime
import decimal
import pathlib
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.errors import Conflict
from tests.support.looped import looped


class Config:
    def __init__(self) -> None:
        self.lr, self.path = 0.1, pathlib.PurePosixPath("/data")


def plain(folder: Path, tree: Any) -> tuple[Any, list[str]]:
    """What stock torch loads after the conversion, and the lines that said what was changed."""
    file, out = folder / "in.pt", folder / "out.pt"
    torch.save(tree, file)
    done = ckptool.convert(file, out, weights_only=True, overwrite=True)
    return torch.load(out, weights_only=True), list(done.details)


@looped(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int32(-3), -3),
        (np.bool_(True), True),
        (argparse.Namespace(lr=0.1, deep=argparse.Namespace(n=1)), {"lr": 0.1, "deep": {"n": 1}}),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (defaultdict(list, {"a": [1]}), {"a": [1]}),
        (deque([1, 2]), [1, 2]),
        (datetime.datetime(2020, 1, 2, 3), "2020-01-02 03:00:00"),
        (decimal.Decimal("1.50"), "1.50"),
        (frozenset({1}), {1}),
        (b"", bytearray()),
        (Config(), {"lr": 0.1, "path": "/data"}),
        ({"k": (np.float32(1.5), [np.int64(2)])}, {"k": (1.5, [2])}),
    ],
)  # fmt: skip
def test_a_value_becomes_the_plain_one(tmp_path: Path, value: Any, expected: Any) -> None:
    loaded, told = plain(tmp_path, {"value": value, "w": torch.ones(2)})
    assert loaded["value"] == expected and type(loaded["value"]) is type(expected)
    assert torch.equal(loaded["w"], torch.ones(2))
    assert any("value" in line for line in told)


def test_a_tensor_of_a_class_of_its_own_becomes_a_plain_one(tmp_path: Path) -> None:
    class Mine(torch.Tensor):
        pass

    globals()["Mine"] = Mine
    Mine.__qualname__ = "Mine"
    loaded, told = plain(tmp_path, {"w": torch.ones(3).as_subclass(Mine)})
    assert type(loaded["w"]) is torch.Tensor and torch.equal(loaded["w"], torch.ones(3))
    assert len(told) == 1


def test_two_keys_that_become_one_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    torch.save({pathlib.PurePosixPath("a"): 1, "a": 2}, file)
    with pytest.raises(Conflict, match="would both become 'a'"):
        ckptool.convert(file, tmp_path / "out.pt", weights_only=True)
    assert not (tmp_path / "out.pt").exists()
