"""`add-module`: what a wrapper would do."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import ckptool
from ckptool.errors import UsageError
from fixtures.make import make, mlp
from tests.support.files import load, saved, weights
from tests.support.same import assert_same_objects


def test_the_result_loads_into_the_wrapped_model(tmp_path: Path) -> None:
    file = saved(mlp().state_dict(), tmp_path / "in.pt")
    ckptool.add_module(file, tmp_path / "out.pt", verify=True)
    state, wrapped = load(tmp_path / "out.pt"), nn.DataParallel(mlp())
    wrapped.load_state_dict(state, strict=True)
    assert state._metadata == wrapped.state_dict()._metadata
    ckptool.strip_module(tmp_path / "out.pt", tmp_path / "back.pt", verify=True)
    assert_same_objects(load(file), load(tmp_path / "back.pt"))


def test_all_roots_and_the_optimizer(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    done = ckptool.add_module(file, tmp_path / "out.pt", verify=True)
    before, after = load(file), load(tmp_path / "out.pt")
    for root in ("model_state_dict", "ema_state_dict"):
        assert list(after[root]) == [f"module.{key}" for key in before[root]]
    names = [f"module.{name}" for name in before["optimizer_state_dict"]["param_groups"][0]["param_names"]]
    assert after["optimizer_state_dict"]["param_groups"][0]["param_names"] == names
    assert done.facts["changed"] == 18
    ckptool.strip_module(tmp_path / "out.pt", tmp_path / "back.pt", verify=True)
    assert_same_objects(before, load(tmp_path / "back.pt"))


def test_another_prefix(tmp_path: Path) -> None:
    file = saved(weights("a.w"), tmp_path / "in.pt")
    ckptool.add_module(file, tmp_path / "out.pt", prefix="net.")
    assert list(load(tmp_path / "out.pt")) == ["net.a.w"]
    with pytest.raises(UsageError, match="the prefix is empty"):
        ckptool.add_module(file, tmp_path / "none.pt", prefix="")


def test_averaged_models_keep_their_counter(tmp_path: Path) -> None:
    ckptool.add_module(make("averaged.pt", tmp_path), tmp_path / "out.pt", verify=True)
    keys = list(load(tmp_path / "out.pt"))
    assert keys[0] == "n_averaged" and all(key.startswith("module.module.") for key in keys[1:])
