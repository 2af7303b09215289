"""Pickled arrays as weights: which dictionaries of them are a model, and what the verbs do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Unsupported
from ckptool.formats import read
from tests.support.pickle_files import arrays_model, pickle_to, same_array


def weight_arrays() -> dict[str, np.ndarray[Any, Any]]:
    return {name: given for name, given in arrays_model().items() if name.endswith("weight")}


def test_arrays_are_weights_where_there_are_no_others(tmp_path: Path) -> None:
    given = {"model": weight_arrays(), "__author__": "me", "matching_heuristics": True}
    file = pickle_to(given, tmp_path / "a.pkl")
    found = ckptool.inspect(file)
    assert found.tensors == ()
    (note,) = found.notes
    assert note.code == "numpy-weights" and "7 numpy arrays at model" in note.message
    assert note.fix == ("ckptool", "convert", str(file), "-o", str(tmp_path / "a.fixed.safetensors"))
    for out in ("a.safetensors", "a.npz"):
        done = ckptool.convert(file, tmp_path / out, verify=True)
        behind = {
            "left_behind": ["__author__", "matching_heuristics"],
            "left_behind_tensors": 0,
            "left_behind_bytes": 0,
        }
        assert done.facts == {"tensors": 7} | behind
        tree = read(tmp_path / out).tree
        assert all(same_array(tree[name].numpy(), expected) for name, expected in given["model"].items())
        for left in (file, f"{file}#model"):
            assert ckptool.diff(left, tmp_path / out).same
            assert ckptool.diff(tmp_path / out, left).tensors == 7
    other = pickle_to({"model": weight_arrays() | {"small.weight": np.ones((3, 4), "f4")}}, tmp_path / "b.pkl", 2)
    changed = ckptool.diff(other, tmp_path / "a.npz")
    assert [change.address for change in changed.changed] == ["model/small.weight"[6:]] and changed.equal == 6


def test_ties_of_arrays_are_ties_of_tensors(tmp_path: Path) -> None:
    file = pickle_to({"model": weight_arrays()}, tmp_path / "a.pkl")
    ckptool.convert(file, tmp_path / "a.safetensors")
    tree = read(tmp_path / "a.safetensors").tree
    assert tree["tied.weight"].storage is tree["bytes.weight"].storage


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


def test_tensors_win_over_arrays(tmp_path: Path) -> None:
    file = pickle_to({"state": {"a.weight": torch.ones(2)}, "stats": {"mean": np.ones(3)}}, tmp_path / "a.pkl")
    assert list(ckptool.convert(file, tmp_path / "a.npz").facts["left_behind"]) == ["stats"]


def test_verbs_on_keys_ask_for_tensors_first(tmp_path: Path) -> None:
    file = pickle_to({"model": {"module.w": np.ones(2)}}, tmp_path / "a.pkl")
    with pytest.raises(CkptoolError) as caught:
        ckptool.strip_module(file, tmp_path / "b.pt")
    assert caught.value.fix == f"Make tensors of its 1 numpy array: ckptool convert {file} -o OUT.safetensors"


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


def test_the_whole_tree_goes_into_safetensors_and_back(tmp_path: Path) -> None:
    file = pickle_to({"model": arrays_model(), "step": 3}, tmp_path / "a.pkl", 5)
    ckptool.convert(file, tmp_path / "a.safetensors", all=True, verify=True)
    ckptool.convert(tmp_path / "a.safetensors", tmp_path / "b.pt", verify=True)
    assert ckptool.diff(file, tmp_path / "b.pt").same
