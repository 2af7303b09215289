"""The groups of `diff`: exactly the rows of the table, in lines that nothing cuts, with the numbers of all together."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.analysis.diff import Diff, diff
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
    tables = [each for each in found.differences(("A", "B"), room=0, **options) if isinstance(each, Table)]
    return {
        each.title.split(" (")[0]: [row[0] for row in each.rows]
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
    for other, word in (([1.0, float("nan")], "NaN, inf"), ([1.0, 3.0], "16.7%")):
        assert f" {word}  " in told(differences({"w": BEFORE}, {"w": entry(other)}))
    assert "\n  bits only  " in told(differences({"w": entry([0.0])}, {"w": entry([-0.0])}))


def training(epoch: int) -> dict[str, Any]:
    """What a ResNet with an EMA and momentum saves."""
    convolutions = [
        f"layer{layer}.{block}.{kind}" for layer in range(1, 5) for block in range(2) for kind in ("1", "2")
    ]
    norms = ("weight", "bias", "running_mean", "running_var")
    names = [f"{each[:-1]}conv{each[-1]}.weight" for each in convolutions] + ["fc.weight", "fc.bias", "conv1.weight"]
    names += [f"{each[:-1]}bn{each[-1]}.{kind}" for each in convolutions for kind in norms]
    weights = {name: entry([1.0 + epoch / (7 + place), 2.0]) for place, name in enumerate(names)}
    steps = {f"{each[:-1]}bn{each[-1]}.num_batches_tracked": entry([epoch * 1000.0]) for each in convolutions}
    state = {place: {"momentum_buffer": entry([1.0, epoch + place]), "step": entry([epoch])} for place in range(80)}
    groups = [{"lr": 0.1 / epoch, "weight_decay": decay, "params": [0]} for decay in (0, 1e-4)]
    average = {f"module.{name}": value for name, value in weights.items()}
    scheduler = {"last_epoch": epoch, "_step_count": epoch + 1, "_last_lr": [0.1 / epoch] * 2}
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "scheduler": scheduler,
        "args": {"seed": epoch},
        "state_dict": {**weights, **steps},
        "state_dict_ema": average,
        "epoch": epoch,
        "best_acc1": 70.123 + epoch,
        "losses": [epoch / (3 + place) for place in range(50)],
    }


def test_two_epochs_of_a_usual_training_fit_a_screen() -> None:
    style = Style(width=80)
    text = style.page(told(differences(training(3), training(4)), style=style))
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    words = ("epoch  ", "/lr  ", "num_batches_tracked", "parts", "state_dict  ", "fc.")
    order = [text.index(word) for word in words]
    assert order == sorted(order) and "3000 → 4000" in text
