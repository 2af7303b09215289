"""Pickled arrays as weights: which dictionaries of them are a model, and what the verbs do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptool
from ckptool.errors import CkptoolError, Unsupported
from ckptool.formats import read
from tests.support.pickle_files import arrays_model, pickle_to


def weight_arrays() -> dict[str, np.ndarray[Any, Any]]:
    return {name: given for name, given in arrays_model().items() if name.endswith("weight")}


@pytest.mark.parametrize(
    ("tree", "addresses"),
    [
        ({"stubs": {"conv1_w": np.ones(2), "conv1_b": np.ones(1)}, "cfg": "…"}, ["stubs"]),
        ({"w": np.ones(2), "b": np.ones(1)}, [""]),
        ({"model": {"a.w": np.ones(2)}, "ema": {"a.w": np.ones(2)}}, ["model", "ema"]),
        ({"mean": np.ones(3), "std": np.ones(3), "net": {f"l{n}.w": np.ones(2) for n in range(3)}}, ["net"]),
        ({"deep": [{"x": {"w.w": np.ones(2)}}]}, ["deep/0/x"]),
        ({"optimizer": {"a": np.ones(2)}}, []),
        ({"history": [np.ones(2)]}, []),
        ({1: np.ones(2), 2: np.ones(2)}, []),
        ({"a": np.ones(1), "b": 1, "c": 2, "d": 3}, []),
        ({"labels": np.array(["a"]), "rows": np.zeros(1, [("a", "f4")])}, []),
    ],
)
def test_which_dictionaries_of_arrays_are_weights(tree: Any, addresses: list[str], tmp_path: Path) -> None:
    from ckptool.conventions.state_dicts import array_state_dicts

    file = pickle_to(tree, tmp_path / "a.pkl")
    assert [root.address for root in array_state_dicts(read(file).tree)] == addresses
    if not addresses:
        with pytest.raises(CkptoolError, match="no dictionary that looks like model weights"):
            ckptool.convert(file, tmp_path / "a.npz")


def test_large_arrays_are_shown_in_part(tmp_path: Path) -> None:
    file = pickle_to({"model": weight_arrays()}, tmp_path / "a.pkl")
    shown = ckptool.show(file, at="model/large.weight")
    assert shown.truncated and shown.entry.shape == (200, 300)
    cut = ckptool.show(file, at="model/large.weight", slice=":1,:2")
    assert cut.values.tolist() == weight_arrays()["large.weight"][:1, :2].tolist()


@pytest.mark.parametrize("verb", ["pickle", "header"])
def test_arrays_that_are_too_large_to_be_pickled_again(verb: str, tmp_path: Path) -> None:
    file = pickle_to({"model": {"a.w": np.zeros(40 << 20, "u1")}}, tmp_path / "a.pkl")
    with pytest.raises(Unsupported, match="41,943,040 bytes cannot be pickled again") as caught:
        if verb == "pickle":
            ckptool.convert(file, tmp_path / "a.pt")
        else:
            ckptool.convert(file, tmp_path / "a.safetensors", all=True)
    assert "-o OUT.safetensors" in caught.value.fix
    ckptool.convert(file, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size > 40 << 20
