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
from ckptool.analysis.diff import LAYERS, STRIP, Diff, diff
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
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


def blocks(text: str) -> dict[str, list[str]]:
    """The rows of a text, by the titles of their blocks."""
    found: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        title = re.match(r"(only in .* one|other than by value|values|entries) \(", block)
        if title:
            rows = [line for line in block.split("\n")[1:] if not re.search(r" changed \(|  max \|a-b\|", line)]
            found[title[1]] = [row for row in rows if not row.startswith("  change: ")]
    return found


def names(row: str, is_group: bool) -> list[str]:
    """The names of a row, which ends with two spaces."""
    text = row.strip().split("  ")[0]
    return expand(text) if is_group else [text]


@given(st.dictionaries(keys, kinds, max_size=40))
def test_groups_unfold_to_the_table(made: dict[str, str]) -> None:
    left: dict[str, Any] = {key: 1 if kind == "value" else BEFORE for key, kind in made.items() if kind != "only right"}
    right: dict[str, Any] = {
        key: 2 if kind == "value" else KINDS.get(kind, BEFORE) for key, kind in made.items() if kind != "only left"
    }
    found = differences(left, right)
    table, groups = blocks(told(found, all=True)), blocks(told(found))
    assert table.keys() == groups.keys()
    for title, rows in table.items():
        # What `printable` does to a backslash of a name's own is undone, as the names here have no others.
        every = Counter(name.replace("\\\\", "\\") for row in rows for name in names(row, False))
        folded = title != "values" or len(groups[title]) < len(rows)
        assert every == Counter(
            name for row in groups[title] for name in names(row.replace("\\\\\\\\", "\\\\"), folded)
        ) or every == Counter(name for row in groups[title] for name in names(row, folded)), title
        assert len(groups[title]) <= len(rows)


def model(layers: int, change: float) -> dict[str, Any]:
    names = ("attn.weight", "attn.bias", "mlp.weight")
    return {f"h.{i}.{name}": entry([1.0 + change * i, 2.0, 3.0]) for i, name in product(range(layers), names)}


def test_the_numbers_of_a_group_are_those_of_its_tensors() -> None:
    found = differences(model(8, 0), {**model(8, 0.125), "new": entry([1.0])})
    text = told(found)
    (attn, mlp) = [line for line in text.split("\n") if "h.{1..7}" in line]
    assert attn.split()[2:7] == ["14", "14", "of", "42", "0.875"]
    assert mlp.split()[1:6] == ["7", "7", "of", "21", "0.875"]
    values = [change.values for change in found.changed]
    cosines = sorted(f"{each.cosine:.6f}" for each in values if each is not None and each.cosine is not None)
    assert f"{cosines[0]} to {cosines[-1]}" in text
    rates = [1 - 1 / (1 + 0.125 * i) for i in range(1, 8)]
    strip = "".join(STRIP[min(int(8 * rate / max(rates)), 7)] for rate in rates)
    assert attn.endswith(strip) and mlp.endswith(strip)
    assert found.changed_elements == 21 and found.elements == 72
    assert "21 of 72 elements changed (29.2 %)\n" in text


def test_a_deep_model_has_a_short_strip() -> None:
    text = told(differences(model(200, 0), model(200, 0.01)))
    (row,) = [line for line in text.split("\n") if "attn" in line]
    strip, note = row.rsplit("  ", 1)[-1].split(" ", 1)
    assert note == "(5 each)" and len(strip) == math.ceil(199 / 5) <= LAYERS


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


def test_changed_elements_count_each_storage_once() -> None:
    a, b = entry([1.0] * 100), entry([2.0] + [1.0] * 99)
    assert differences({"w": a, "tied": a}, {"w": b, "tied": b}).changed_elements == 1
    assert differences({"w": a, "v": a}, {"w": b, "v": entry([3.0] * 100)}).changed_elements == 101
    assert differences({"w": a}, {"w": a}).changed_elements == 0
    blind = diff(Checkpoint({"w": a}, "torch-zip"), Checkpoint({"w": b}, "torch-zip"), statistics=False)
    assert blind.changed_elements is None


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=6))
def test_a_group_gives_the_least_and_the_greatest_cosine(cosines: list[float]) -> None:
    left = {f"h.{number}.w": entry([1.0, 0.0]) for number in range(len(cosines))}
    right = {f"h.{number}.w": entry([2 * cos, 2 * math.sqrt(1 - cos * cos)]) for number, cos in enumerate(cosines)}
    found = differences(left, right)
    known = [change.values.cosine for change in found.changed if change.values and change.values.cosine is not None]
    ends = dict.fromkeys(f"{end:.6f}" for end in (min(known), max(known)))
    assert f" {' to '.join(ends)} " in told(found)


def test_what_a_number_does_not_say_is_said() -> None:
    nan, zero = entry([1.0, float("nan")]), entry([0.0, 0.0])
    assert "inf: NaN or infinite on one side only" in told(differences({"w": BEFORE}, {"w": nan}))
    layers = {f"h.{i}.w": zero if i < 2 else BEFORE for i in range(5)}
    tuned = dict.fromkeys(layers, KINDS["values"])
    assert "0.989949 (2 without)" in told(differences(layers, tuned))


def test_equal_texts_have_their_kinds(tmp_path: Path) -> None:
    for name, loss in (("a.pt", numpy.float64(2.5)), ("b.pt", 2.5)):
        torch.save({"loss": loss}, tmp_path / name)
    assert re.search(r"2\.5 \(numpy\S+\) → 2\.5 \(float\)", str(ckptool.diff(tmp_path / "a.pt", tmp_path / "b.pt")))
