"""`ckptool.open`, and which part of which file `FILE#address` names."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch

import ckptool
from tests.support.files import saved


def test_copies_of_what_is_in_a_checkpoint_can_be_changed_and_saved(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    opened = ckptool.open(saved({"a": {"x": 0, "list": [1, {"y": 2}]}, "state_dict": state}, tmp_path / "x.pt"))
    changed = copy.deepcopy(opened["a"])
    changed["list"][1]["y"] = dict(opened["a"])["x"]
    assert (
        type(changed) is dict
        and opened["a"]["list"][1]["y"] == 2
        and json.loads(json.dumps(opened["a"])) == opened["a"]
    )
    ckptool.save({"a": changed, "state_dict": opened["state_dict"]}, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["a"] == {"x": 0, "list": [1, {"y": 0}]} and found["state_dict"]._metadata == state._metadata
