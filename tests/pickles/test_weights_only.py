"""Plain values: whatever a checkpoint holds, what comes out opens with `weights_only=True`, and nothing goes without a
word."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptool
from ckptool.checkpoint.nodes import Global
from ckptool.errors import Conflict
from ckptool.formats import read
from ckptool.pickles.weights_only import weights_only
from tests.support.looped import looped
from tests.support.same import assert_same_objects


class Mode(enum.Enum):
    FAST = 1


class Config:
    def __init__(self) -> None:
        self.lr, self.path = 0.1, pathlib.PurePosixPath("/data")


class Odd:
    """An object that only a function makes."""

    def __reduce__(self) -> Any:
        return Odd, ()


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


@looped(
    "value",
    [
        {"a": 1, 2: None, (1, 2): True, 1.5: "x"},
        OrderedDict(a=torch.zeros(3)),
        Counter("aab"),
        torch.Size([1, 2]),
        torch.device("cpu"),
        torch.float16,
        {1, 2},
        1 + 2j,
        b"bytes",
        bytearray(b"x"),
        [torch.ones(2, dtype=torch.bfloat16), (torch.zeros(2, 3).t(),)],
        nn.Parameter(torch.ones(2)),
        torch.ones(2, 2).to_sparse(),
    ],
)  # fmt: skip
def test_what_weights_only_takes_stays_as_it_is(tmp_path: Path, value: Any) -> None:
    loaded, told = plain(tmp_path, value)
    assert_same_objects(value, loaded)
    assert told == []


def test_numpy_arrays_become_tensors(tmp_path: Path) -> None:
    tree = {
        "a": np.arange(6.0).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6, dtype="i2").reshape(2, 3)),
        "e": np.zeros((0, 2)),
    }
    loaded, told = plain(tmp_path, tree)
    for name, array in tree.items():
        assert np.array_equal(loaded[name].numpy(), array) and loaded[name].numpy().dtype == array.dtype
    assert len(told) == 3


def test_what_has_no_plain_form_is_dropped_by_name(tmp_path: Path) -> None:
    tree = {"odd": Odd(), "list": [1, Odd(), 3], "texts": np.array(["a"]), "w": torch.ones(1)}
    loaded, told = plain(tmp_path, tree)
    assert list(loaded) == ["list", "w"] and loaded["list"] == [1, None, 3]
    dropped = sorted(line for line in told if line.startswith("dropped"))
    assert [line.split(":")[0] for line in dropped] == ["dropped list/1", "dropped odd", "dropped texts"]


def test_a_class_as_a_key_becomes_its_name(tmp_path: Path) -> None:
    loaded, told = plain(tmp_path, {"callbacks": {Config: {"best": 1}}})
    assert loaded == {"callbacks": {f"{__name__}.Config": {"best": 1}}}
    assert len(told) == 1


def test_a_whole_module_becomes_its_state_dict(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    loaded, told = plain(tmp_path, {"model": model})
    expected = model.state_dict()
    assert list(loaded["model"]) == list(expected)
    assert all(torch.equal(loaded["model"][name], expected[name]) for name in expected)
    assert any("state dict" in line for line in told)


def test_a_tensor_of_a_class_of_its_own_becomes_a_plain_one(tmp_path: Path) -> None:
    class Mine(torch.Tensor):
        pass

    globals()["Mine"] = Mine
    Mine.__qualname__ = "Mine"
    loaded, told = plain(tmp_path, {"w": torch.ones(3).as_subclass(Mine)})
    assert type(loaded["w"]) is torch.Tensor and torch.equal(loaded["w"], torch.ones(3))
    assert len(told) == 1


def test_sharing_and_cycles_stay(tmp_path: Path) -> None:
    shared = {"x": np.float64(1)}
    tree: dict[str, Any] = {"a": shared, "b": shared, "w": torch.ones(2)}
    tree["self"] = tree
    tree["tied"] = tree["w"]
    loaded, _ = plain(tmp_path, tree)
    assert loaded["a"] is loaded["b"] and loaded["self"] is loaded
    assert loaded["tied"].data_ptr() == loaded["w"].data_ptr()


def test_two_keys_that_become_one_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    torch.save({pathlib.PurePosixPath("a"): 1, "a": 2}, file)
    with pytest.raises(Conflict, match="would both become 'a'"):
        ckptool.convert(file, tmp_path / "out.pt", weights_only=True)
    assert not (tmp_path / "out.pt").exists()


def test_names_of_dtypes_stay(tmp_path: Path) -> None:
    torch.save({"dtype": torch.float32}, tmp_path / "in.pt")
    assert weights_only(read(tmp_path / "in.pt")).checkpoint.tree == {"dtype": Global("torch", "float32")}


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_keep_the_state_of_every_parameter(make: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))  # two parameters of each shape
    optimizer = make(model.parameters(), lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    loaded, _ = plain(tmp_path, {"model": model, "optimizer": optimizer})
    made = loaded["optimizer"]
    assert len(made["state"]) == 4
    for (key, state), (was, expected) in zip(made["state"].items(), optimizer.state.items(), strict=True):
        assert torch.equal(key, was) and all(torch.equal(state[name], value) for name, value in expected.items())
    assert all(a is b for a, b in zip(made["state"], made["param_groups"][0]["params"], strict=True))


def test_tensors_that_are_keys_stay(tmp_path: Path) -> None:
    loaded, _ = plain(tmp_path, {torch.tensor([1.0]): np.float64(1), torch.tensor([2.0]): Path("b")})
    assert [(key.item(), value) for key, value in loaded.items()] == [(1.0, 1.0), (2.0, "b")]
