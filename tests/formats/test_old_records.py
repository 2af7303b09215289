"""Files of 0.1.0: what `convert --all` wrote is read as it was; a damaged record is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import ckptool
from ckptool.errors import CkptoolError
from ckptool.formats import read
from tests.support.files import written
from tests.support.same import assert_same_tree

FILES = Path(__file__).parents[2] / "fixtures" / "0.1.0"
WHOLE = FILES / "whole.safetensors"


@pytest.mark.parametrize("name", ["whole", "twins"])
def test_whole_trees_of_0_1_0(name: str, tmp_path: Path) -> None:
    old = FILES / f"{name}.safetensors"
    assert_same_tree(read(FILES / f"{name}.pt"), read(old))
    ckptool.convert(old, tmp_path / "new.safetensors", all=True, verify=True)
    assert "ckptool.tree/1" not in (tmp_path / "new.safetensors").read_bytes().decode("latin-1")
    assert_same_tree(read(old), read(tmp_path / "new.safetensors"))


# The record under attack ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [400, pytest.param(1500, marks=pytest.mark.soak)])
def test_any_damage_to_the_record_gives_an_error_of_ours_or_a_tree(many: int, tmp_path: Path) -> None:
    raw = WHOLE.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    record = json.loads(header["__metadata__"]["ckptool"])
    chosen = random.Random(3)
    odd: list[Any] = [None, -1, 10**6, "x", [], {}, {"n": 0}, {"n": 10**6}, {"n": -1}, {"t": 0}, {"s": [0, None]}]
    odd += [{"f": "zz"}, {"b": 5}, {"g": []}, True, 2.5, [0]]
    refused = 0
    for _ in range(many):
        changed = json.loads(json.dumps(record))
        node: Any = changed
        while isinstance(node, (dict, list)) and node:
            key = chosen.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], (dict, list)) or not node[key] or chosen.random() < 0.2:
                node[key] = chosen.choice(odd)
                break
            node = node[key]
        about = {**header["__metadata__"], "ckptool": json.dumps(changed)}
        raw = json.dumps({**header, "__metadata__": about}).encode()
        try:
            read(written(len(raw).to_bytes(8, "little") + raw + data, tmp_path / "b.safetensors"))
        except CkptoolError:
            refused += 1
    assert refused > many * 0.45
