"""The groups of `diff`: exactly the rows of the table, in lines that nothing cuts, with the numbers of all together."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.analysis.diff import LAYERS, Diff, diff
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.facts import Table
from ckptool.render.lines import Style
from ckptool.render.lines import text as told
from tests.support.expanded_keys import expand


def entry(values: Any, dtype: str = "f32", location: str = "cpu") -> TensorEntry:
    data = numpy.asarray(values, "<f4" if dtype == "f32" else "<f2")
    return TensorEntry(Storage(InlineBytes(data.tobytes()), location), by_name(dtype), data.shape, (1,))


def differences(left: dict[str, Any], right: dict[str, Any]) -> Diff:
    return diff(Checkpoint(left, "torch-zip"), Checkpoint(right, "torch-zip"))


pieces = st.sampled_from(
    ["layer", "h", "0", "1", "2", "10", "attn", "weight", "bias", "a{b", "c,d", "x\\y", "conv1", "conv2"]
)
keys = st.lists(pieces, min_size=1, max_size=4).map(".".join)
BEFORE = entry([1.0, 2.0])
KINDS: dict[str, TensorEntry] = {
    "values": entry([1.0, 3.0]),
    "other values": entry([0.5, 3.0]),
    "shape": entry([1.0, 2.0, 3.0]),
    "dtype": entry([1.0, 2.0], "f16"),
    "device": entry([1.0, 2.0], location="cuda:0"),
    "same": entry([1.0, 2.0]),
}
kinds = st.sampled_from([*KINDS, "only left", "only right", "value"])


def blocks(found: Diff, **options: Any) -> dict[str, list[str]]:
    """The names in the rows of all tables, by the titles of their blocks."""
    tables = [each for each in found.differences(("A", "B"), room=None, **options) if isinstance(each, Table)]
    return {
        each.title.split(" (")[0]: [row[-1 if each.heads[-1:] == ("",) else 0] for row in each.rows]
        for each in tables
        if each.rows and each.title not in ("parts", "ties")
    }


@given(st.dictionaries(keys, kinds, max_size=40))
def test_groups_unfold_to_the_table(made: dict[str, str]) -> None:
    left: dict[str, Any] = {key: 1 if kind == "value" else BEFORE for key, kind in made.items() if kind != "only right"}
    right: dict[str, Any] = {
        key: 2 if kind == "value" else KINDS.get(kind, BEFORE) for key, kind in made.items() if kind != "only left"
    }
    found = differences(left, right)
    table, groups = blocks(found, all=True), blocks(found)
    assert table.keys() == groups.keys()
    for title, names in table.items():
        texts = [re.sub(r"  \([0-9]+\)$", "", row) for row in groups[title]]
        assert Counter(names) == Counter(name for text in texts for name in expand(text)), title


def model(layers: int, change: float) -> dict[str, Any]:
    names = ("attn.weight", "attn.bias", "mlp.weight")
    return {f"h.{i}.{name}": entry([1.0 + change * i, 2.0, 3.0]) for i, name in product(range(layers), names)}


def test_a_deep_model_has_a_short_strip() -> None:
    text = told(differences(model(200, 0), model(200, 0.01)))
    (row,) = [line for line in text.split("\n") if " of 600 changed" in line]
    strip, note = row.rsplit("  ", 1)[-1].split(" ", 1)
    assert note == "(9 each)" and len(strip) == math.ceil(200 / 9) <= LAYERS


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_word_is_cut_at_any_width(width: int) -> None:
    left = {**model(30, 0), **{f"gone.{'x' * 30}.{i}.weight": BEFORE for i in range(9)}, "epoch": 1, "same": BEFORE}
    right = {**model(30, 0.5), "h.3.attn.weight": entry([1.0]), "epoch": "a long text " * 9, "same": BEFORE}
    for every in (False, True):
        style = Style(width=width)
        text = style.page(told(differences(left, right), style=style, all=every))
        whole = told(differences(left, right), all=every)
        for line in text.split("\n"):
            assert len(line) <= width or " " not in line.strip(), line
        words = {word.rstrip(",") for word in whole.split()} - {"by"}
        assert words <= {word.rstrip(",") for word in text.split()}


def test_what_a_number_does_not_say_is_said() -> None:
    for other, word in (([1.0, float("nan")], "NaN, inf"), ([1.0, 3.0], "16.7 %")):
        assert f"\n  {word}  " in told(differences({"w": BEFORE}, {"w": entry(other)}))
    assert "\n  bits only  " in told(differences({"w": entry([0.0])}, {"w": entry([-0.0])}))


def test_equal_texts_have_their_kinds(tmp_path: Path) -> None:
    for name, loss in (("a.pt", numpy.float64(2.5)), ("b.pt", 2.5)):
        torch.save({"loss": loss}, tmp_path / name)
    assert re.search(r"2\.5 \(numpy\S+\) → 2\.5 \(float\)", str(ckptool.diff(tmp_path / "a.pt", tmp_path / "b.pt")))
