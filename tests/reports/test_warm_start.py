"""The plan of a warm start as facts, text, JSON and HTML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies

from ckptool.analysis.targets import of_checkpoint
from ckptool.analysis.warm_start import LoadReport
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import DTYPES, by_name
from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import Conflict, PlanRefused
from ckptool.pickles.reduce import array_entry
from ckptool.render.lines import Style
from ckptool.render.lines import text as text_of
from ckptool.transforms import casting
from ckptool.transforms.casting import compact, first_part, laid_over, losses
from ckptool.transforms.optimizers import Slots
from ckptool.transforms.warm_start import match_options, plan_warm_start
from tests.support.looped import examples
from tests.support.processes import soon


def checkpoint(**shapes: Any) -> Checkpoint:
    """Names (`_` for the dot) to shapes, in f32; each tensor with a storage of its own."""
    tree = {}
    for name, shape in shapes.items():
        storage = Storage(InlineBytes(bytes(4 * max(1, torch.Size(shape).numel()))))
        tree[name.replace("_", ".")] = TensorEntry(
            storage, by_name("f32"), tuple(shape), row_major_strides(tuple(shape))
        )
    return Checkpoint(tree, "test")


def planned(ours: Checkpoint, theirs: Checkpoint, **options: Any) -> LoadReport:
    root, remark = one_state_dict(ours)
    return plan_warm_start(root, "ours.pt", of_checkpoint(theirs, "theirs.pt"), match_options(**options), remark).report


def test_every_name_of_both_sides_is_in_the_report() -> None:
    ours = checkpoint(a_weight=(2, 3), b_weight=(4,), c_weight=(5,), only_ours=(1,), x_weight=(1,))
    theirs = checkpoint(
        a_weight=(2, 3), b_weight=(3,), only_theirs=(7,), c_weight=(5,), bn_running_mean=(2,), x_weight=(1,)
    )
    report = planned(ours, theirs, exclude=["c.*"])
    assert [(f.source, f.target, f.elements) for f in report.loaded] == [
        ("a.weight", "a.weight", 6),
        ("x.weight", "x.weight", 1),
    ]
    assert [f.name for f in report.missing] == ["only.theirs", "bn.running.mean"]
    assert [f.source for f in report.unexpected] == ["only.ours"] and report.excluded == ("c.weight",)
    assert [(f.target, f.have[1], f.want[1], f.done) for f in report.mismatched] == [
        ("b.weight", (4,), (3,), "refused")
    ]
    assert (report.elements, report.total) == (7, 6 + 3 + 7 + 5 + 2 + 1) and not report.accepted
    facts = json.loads(json.dumps(report.to_dict()))
    theirs_told = (
        [f["target"] for f in facts["loaded"] + facts["mismatched"]]
        + [f["name"] for f in facts["missing"]]
        + facts["excluded"]
    )
    assert sorted(theirs_told) == sorted(theirs.tree)
    ours_told = [f["source"] for f in facts["loaded"] + facts["mismatched"] + facts["unexpected"]]
    assert sorted([*ours_told, "c.weight"]) == sorted(ours.tree)
    with pytest.raises(PlanRefused):
        report.require(min_loaded=0.9)
    assert report.require(min_loaded=0.2, missing=["only.*", "bn.*", "b.*", "c.*"]) is report


def test_the_text() -> None:
    layers = {f"layer_{n}_{end}": (2,) for n in range(12) for end in ("weight", "bias")}
    gaps = {f"block_{n}_weight": (2,) for n in (0, 2, 4)}
    report = planned(checkpoint(**layers), checkpoint(**layers, **gaps, head_weight=(9,)))
    text = str(report)
    assert "ours.pt into theirs.pt: 76.19 % of 63 values, 24 of 28 names" in text
    assert "layer.{0..11}.{weight, bias}  (24)" in text and "block.{0, 2, 4}.weight  (3)" in text
    assert "\x1b" not in text
    coloured = text_of(report, style=Style(colour=True, width=30))
    assert "\x1b[1;32m76.19 % of 63 values" in coloured
    html = report._repr_html_()
    assert "<table>" in html and "layer.{0..11}.{weight, bias}" in html


def test_prefixes_on_either_side() -> None:
    bare = checkpoint(a_weight=(2,), b_weight=(3,))
    wrapped = Checkpoint(
        {f"module.{key}": value for key, value in bare.tree.items()} | {"n_averaged": bare["a.weight"]}, "test"
    )
    report = planned(wrapped, bare, strict=True)
    assert report.share == 1 and [note.code for note in report.normalised] == ["counter-left-out", "prefix"]
    report = planned(bare, Checkpoint({f"_orig_mod.{key}": value for key, value in bare.tree.items()}, "test"))
    assert report.share == 1 and "names of the target" in report.normalised[0].message
    for prefix in ("", "_orig_mod."):  # patterns are for names with the target's prefix, or without
        compiled = Checkpoint({f"_orig_mod.{key}": bare["a.weight"] for key in ("a.weight", "c.weight")}, "test")
        report = planned(checkpoint(a_weight=(2,), a_bias=(2,), c_weight=(2,)), compiled, exclude=[f"{prefix}a.*"])
        assert [fact.target for fact in report.loaded] == ["_orig_mod.c.weight"]
    own = Checkpoint({"module.a.weight": bare["a.weight"], "a.weight": bare["a.weight"]}, "test")
    assert [fact.source for fact in planned(own, bare).loaded] == ["a.weight"]  # equal names first
    both = Checkpoint({"module.b.weight": bare["b.weight"], "_orig_mod.b.weight": bare["b.weight"]}, "test")
    with pytest.raises(Conflict, match="would both be"):
        planned(both, bare)


@pytest.mark.parametrize("old", [dtype for dtype in DTYPES if dtype.is_float and dtype.itemsize <= 2], ids=str)
def test_exact_is_what_torch_keeps(old: Any) -> None:
    """Every value of the small types, to each floating type and back."""
    patterns = torch.arange(1 << (8 * old.itemsize)).to(torch.uint8 if old.itemsize == 1 else torch.int16)
    values = patterns.view(getattr(torch, old.torch))
    for new in DTYPES:
        if new.is_float and new is not old:
            back = values.to(getattr(torch, new.torch)).double()
            kept = bool(((back == values.double()) | (back.isnan() & values.isnan())).all())
            assert casting.conversion(old, new) == ("exact" if kept else "lossy"), (old, new)


def test_whole_numbers_fit() -> None:
    word = {
        (old, new): casting.conversion(by_name(old), by_name(new))
        for old, new in [("i8", "i16"), ("i16", "i8"), ("u8", "i8"), ("u8", "i16"), ("i8", "u16"), ("bool", "u8"),
                         ("u8", "bool"),
                         ("i32", "f32"), ("i32", "f64"), ("u16", "f32"), ("i64", "f64"), ("f32", "i64"), ("i8", "f16"),
                         ("c64", "f32"),
                         ("c64", "c128")]
    }  # fmt: skip
    assert list(word.values()) == [
        "exact", "lossy", "lossy", "exact", "lossy", "exact", "lossy", "lossy", "exact", "exact", "lossy", None, None,
        None, "exact",
    ]  # fmt: skip


@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=examples(80))
def test_laid_over(data: strategies.DataObject) -> None:
    import numpy

    whole = data.draw(strategies.lists(strategies.integers(1, 5), max_size=4))
    part = [data.draw(strategies.integers(0, size)) for size in whole]
    base, corner = numpy.random.rand(*whole), numpy.random.rand(*part)
    base, corner = numpy.asarray(base, "f4"), numpy.asarray(corner, "f4")
    want = base.copy()
    want[tuple(map(slice, part))] = corner
    made = laid_over(array_entry(base), array_entry(corner)).storage.data
    start, length = data.draw(strategies.integers(0, made.length)), data.draw(strategies.integers(0, made.length))
    assert (
        made.read(0, made.length) == want.tobytes()
        and made.read(start, length) == want.tobytes()[start : start + length]
    )
    cut = compact(first_part(array_entry(base), part))
    assert cut.bytes() == base[tuple(map(slice, part))].tobytes()


def test_losses_are_counted_once() -> None:
    import numpy

    tally = losses(array_entry(numpy.array([1, 1e6, 0.1], "f4")), by_name("f16"))
    assert (tally.elements, tally.changed, tally.overflowed) == (3, 2, 1)


# Which slot is whose -------------------------------------------------------------------------------------------------


def optimizer(shapes: list[tuple[int, ...]], groups: int = 1, **more: Any) -> dict[str, Any]:
    def slot(shape: tuple[int, ...]) -> dict[str, TensorEntry]:
        return {"exp_avg": checkpoint(x=shape)["x"], "step": checkpoint(x=())["x"]}

    ids = list(range(len(shapes)))
    cut = len(ids) // groups
    params = [ids] if groups == 1 else [ids[:cut], ids[cut:]]
    return {
        "state": {n: slot(shape) for n, shape in enumerate(shapes)},
        "param_groups": [{"params": p, **more} for p in params],
    }


def test_slots() -> None:
    parameters = {"a": (2, 3), "b": (4,), "c": (4,), "d": (5,)}
    shapes = list(parameters.values())
    assert Slots(optimizer(shapes), "o").among(parameters) == (dict(enumerate("abcd")), "order")
    named = optimizer(shapes, param_names=["module.d", "c", "gone", "a"])
    assert Slots(named, "o").among(parameters) == ({0: "d", 1: "c", 3: "a"}, "names")
    for wrong in (
        optimizer(shapes, groups=2),  # b and c have one shape: which is which?
        optimizer(shapes[::-1]),
        optimizer([(5,), (2, 3)]),
        optimizer([(4,)]),
        optimizer([(5,), (5,)]),
        optimizer([(9,)]),
        {"state": {}, "param_groups": [{"params": [0, 1]}]},
    ):
        with pytest.raises(Conflict, match="cannot be known"):
            Slots(wrong, "o").among(parameters)
    with pytest.raises(Conflict, match="in two groups"):
        Slots({"state": {}, "param_groups": [{"params": [0, 0]}]}, "o").among(parameters)


def test_many_names_are_quick(tmp_path: Path) -> None:
    """20,000 tensors are planned in a moment."""
    shapes = {f"layers_{n}_{end}": (2,) for n in range(10_000) for end in ("weight", "bias")}
    ours = Checkpoint({f"module.{key}": value for key, value in checkpoint(**shapes).tree.items()}, "test")
    with soon(5):
        report = planned(ours, checkpoint(**shapes))
    assert report.share == 1
