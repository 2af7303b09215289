"""`warm-start`: what is written, what is refused, what others load of it; the plan as facts, text, JSON and HTML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import ckptool
from ckptool.analysis.targets import of_checkpoint
from ckptool.analysis.warm_start import LoadReport
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import CkptoolError, Conflict, NoMatch, OutputExists, PlanRefused, UsageError
from ckptool.render.lines import Style
from ckptool.render.lines import text as text_of
from ckptool.transforms.optimizers import Slots
from ckptool.transforms.warm_start import match_options, plan_warm_start
from fixtures.make import TiedLanguageModel, mlp
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import load, saved
from tests.support.processes import soon
from tests.support.small_models import warm_started


def test_a_factory_fills_up(tmp_path: Path, code: Path) -> None:
    state = {"0.weight": torch.ones(16, 8), "0.bias": torch.ones(16)}
    file = saved(state, tmp_path / "part.pt")
    report, done = warm_started(file, f"{code}:build", tmp_path / "out.pt")
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model.load_state_dict(done, strict=True)
    assert (done["0.weight"] == 1).all() and report.taken == tuple(key for key in model.state_dict() if key[0] != "0")
    assert [fact.kind for fact in report.missing if "running" in fact.name] == ["buffer", "buffer"]
    warm_started(file, f"{code}:build", tmp_path / "again.pt")
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "again.pt").read_bytes()  # same in, same out
    assert list(warm_started(file, f"{code}:state", tmp_path / "state.pt")[1]) == list(done)
    report = ckptool.warm_start(file, f"{code}:on_meta")
    assert report.share == pytest.approx(144 / (144 + 65 + 51))
    with pytest.raises(Conflict, match="has no values"):
        ckptool.warm_start(file, f"{code}:on_meta", tmp_path / "meta.pt")


def test_ties_are_the_targets(tmp_path: Path) -> None:
    state, out = TiedLanguageModel().state_dict(), tmp_path / "out.pt"
    tied = saved(state, tmp_path / "tied.pt")
    loose = saved({key: value.clone() for key, value in state.items()}, tmp_path / "loose.pt")
    report, done = warm_started(tied, loose, out)
    assert done["head.weight"].data_ptr() != done["embed.weight"].data_ptr() and not report.tied
    one = saved({key: value for key, value in load(loose).items() if "head" not in key}, tmp_path / "one.pt")
    report, done = warm_started(one, tied, tmp_path / "tied_out.pt", strict=True)
    assert done["head.weight"].data_ptr() == done["embed.weight"].data_ptr()
    assert report.tied == (("head.weight", "embed.weight"),)
    ckptool.convert(tied, tmp_path / "tied.npz")  # two copies
    for copies in (loose, tmp_path / "tied.npz"):
        _, done = warm_started(copies, tied, tmp_path / f"of_{copies.name}.pt", strict=True)
        assert done["head.weight"].data_ptr() == done["embed.weight"].data_ptr()
    loose = saved({key: value + ("head" in key) for key, value in state.items()}, tmp_path / "loose2.pt")
    assert [cause.code for cause in ckptool.warm_start(loose, tied).refused] == ["ties-differ"]


def test_what_is_one_parameter_in_the_target_stays_one(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    one = saved({"a": weight, "b": weight, "data": weight.data}, tmp_path / "one.pt")
    _, done = warm_started(one, one, tmp_path / "out.pt")
    assert done["a"] is done["b"] and done["a"].data_ptr() == done["data"].data_ptr()


def test_views_do_not_drag_their_storage_along(tmp_path: Path) -> None:
    """Whether those of the target lie apart, or in one storage in another way."""
    big, base = torch.arange(1_000_000.0), torch.zeros(12)
    state = {"a.weight": big[10:16].view(2, 3), "b.weight": big[100:106].view(3, 2).t()}
    file = saved(state, tmp_path / "views.pt")
    for n, other in enumerate((torch.zeros(2, 3), base[6:].view(2, 3))):
        target = saved({"a.weight": base[:6].view(2, 3), "b.weight": other}, tmp_path / f"target{n}.pt")
        _, done = warm_started(file, target, tmp_path / f"out{n}.pt", verify=True)
        assert all(torch.equal(done[key], value) for key, value in state.items())
        assert (tmp_path / f"out{n}.pt").stat().st_size < 10_000


def test_an_expanded_tensor_of_4_tb_is_planned_and_not_written_out(tmp_path: Path) -> None:
    """A few bytes that stand for 4 TB are planned at once, written as they are, and never written out."""
    huge = torch.zeros(1).expand(1_000_000, 1_000_000)
    two = {"a.weight": huge, "b.weight": torch.ones(1).expand(1_000_000, 1_000_000)}
    file = saved({"a.weight": huge, "x.weight": torch.ones(1)}, tmp_path / "huge.pt")
    _, done = warm_started(file, file, tmp_path / "out.pt")
    assert done["a.weight"].stride() == (0, 0) and (tmp_path / "out.pt").stat().st_size < 10_000
    tied = saved({"a.weight": huge, "b.weight": huge}, tmp_path / "tied.pt")
    assert not ckptool.warm_start(saved(two, tmp_path / "two.pt"), tied).accepted
    half = {"a.weight": torch.zeros(1).half().expand(1_000_000, 1_000_000), "x.weight": torch.ones(1)}
    half = saved(half, tmp_path / "half.pt")
    warm_start_refused(tmp_path, file, half, Conflict, "expanded view")


def test_a_numpy_checkpoint(tmp_path: Path) -> None:
    file = saved({"fc.weight": numpy.ones((2, 3), "f4"), "fc.bias": numpy.zeros(2, "f4")}, tmp_path / "arrays.pt")
    target = saved(nn.Linear(3, 2).state_dict(), tmp_path / "t.pt")
    report, done = warm_started(file, target, tmp_path / "out.pt", rename="fc.* => *")
    assert (done["weight"] == 1).all() and report.share == 1


def warm_start_refused(
    tmp_path: Path, file: Path, target: Path | str, kind: type[CkptoolError], words: str, **options: Any
) -> CkptoolError:
    (folder := tmp_path / "empty").mkdir(exist_ok=True)  # what the code of a target leaves beside it is its own
    return refused(kind, folder, lambda: ckptool.warm_start(file, target, folder / "never.pt", **options), words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{code}:nothing", "has no nothing"),
        ("{code}:number", "made int, not a torch.nn.Module"),
        ("{code}", "name what builds the model in it"),
        ("{folder}/none.py:build", "there is no file"),
        ("no_such_module_1:build", "there is no module no_such_module_1"),
        ("model:1", "neither a file nor code"),
    ],
)
def test_targets_that_are_none(tmp_path: Path, code: Path, name: str, words: str) -> None:
    file, target = saved(mlp().state_dict(), tmp_path / "m.pt"), name.format(code=code, folder=tmp_path)
    warm_start_refused(tmp_path, file, target, UsageError, words)


def test_a_module_and_a_class_are_targets(tmp_path: Path, code: Path) -> None:
    file = saved(nn.Linear(2, 2).state_dict(), tmp_path / "m.pt")
    assert ckptool.warm_start(file, f"{code}:module").share == 1
    assert list(ckptool.spec(f"{code}:Model").target.tensors) == ["fc.weight", "fc.bias"]


def test_suggestions_are_rules_that_can_be_passed_back(tmp_path: Path) -> None:
    """A Lightning prefix and a renamed block: nothing fits, the rules are written, and with them everything does."""
    names = [(f"blocks.{n}.attn.{end}.weight", n + 2) for n in range(3) for end in ("qkv", "proj")]
    theirs = {name: torch.randn(4, width) for name, width in names}
    ours = {f"model.{key.replace('blocks', 'layers')}": value + 1 for key, value in theirs.items()}
    file, target = saved({"state_dict": ours}, tmp_path / "lightning.ckpt"), saved(theirs, tmp_path / "target.pt")
    rules, out = tmp_path / "rules.yaml", tmp_path / "out.pt"
    report = ckptool.warm_start(file, target, out, suggest=rules)
    assert not report.accepted and report.refused[0].code == "nothing-loaded" and not out.exists()
    assert report.rules_file == str(rules) and "--rename" in report.refused[0].fix
    assert report.suggestions[0].agree == report.suggestions[0].total == 6
    report, done = warm_started(file, target, out, rules_file=str(rules), strict=True)
    assert all(torch.equal(done[key], value + 1) for key, value in theirs.items()) and not report.suggestions
    first = ckptool.warm_start(file, target).suggestions[0]
    assert ckptool.warm_start(file, target, rename=first.rules).share == 1
    refused(OutputExists, tmp_path, lambda: ckptool.warm_start(file, target, suggest=rules))


def test_suggestions_hold_for_wrapped_names_and_beside_other_rules(tmp_path: Path) -> None:
    state = {f"layers.{n}.{end}": torch.rand(n + 2, 3) for n in range(3) for end in ("fc1.weight", "fc2.weight")}
    state["fc.weight"] = torch.rand(9, 3)
    file = saved({f"module._orig_mod.{key}": value for key, value in state.items()}, tmp_path / "a.pt")
    new_names = {key: f"net.{key.replace('layers', 'h')}" if key[0] == "l" else "net.head.weight" for key in state}
    target = saved({name: torch.zeros_like(state[key]) for key, name in new_names.items()}, tmp_path / "b.pt")
    twice = saved({f"module.module.{key}": value for key, value in state.items()}, tmp_path / "twice.pt")  # averaged
    (hint,) = ckptool.warm_start(saved(state, tmp_path / "plain.pt"), twice).suggestions
    assert ckptool.warm_start(tmp_path / "plain.pt", twice, rename=hint.rules).share == 1
    for given in ([], ["layers.* => net.h.*"], ["* => net.*"]):
        hints = ckptool.warm_start(file, target, rename=given, on_mismatch="skip").suggestions
        assert all(hint.why.endswith("before the other rules") for hint in hints) == bool(given)
        rules = [*(rule for hint in hints for rule in hint.rules), *given]
        report, done = warm_started(file, target, tmp_path / f"{len(given)}{len(rules)}.pt", rename=rules)
        assert report.share == 1 and all(done[name].equal(state[key]) for key, name in new_names.items())


def test_fused_attention_is_loaded_by_rules_with_operations(tmp_path: Path) -> None:
    three = {name: numpy.full((4, 4), number, "f4") for number, name in enumerate(("query", "key", "value"))}
    apart = {f"layer.{n}.attention.{name}.weight": value.copy() for n in (0, 1) for name, value in three.items()}
    fused = {f"blocks.{n}.attn.qkv.weight": numpy.concatenate(list(three.values())) for n in (0, 1)}
    for name, weights in (("fused", fused), ("apart", apart)):
        ckptool.save(weights, tmp_path / f"{name}.safetensors")
    file, target = tmp_path / "fused.safetensors", tmp_path / "apart.safetensors"
    assert not ckptool.warm_start(file, target).suggestions  # heads in turns would fit as well
    rule = "blocks.{n}.attn.qkv.* => layer.{n}.attention.{query,key,value}.* : split 0"
    (tmp_path / "rules.yaml").write_text(f"- '{rule}'\n")
    for options in ({"rename": rule}, {"rules_file": str(tmp_path / "rules.yaml")}):
        out = tmp_path / f"{next(iter(options))}.safetensors"
        assert ckptool.warm_start(file, target, out, strict=True, **options).accepted
        assert ckptool.diff(out, target).same


WAYS = ["pos_embed=bicubic(cls=1)", "embed.*=rows(mean)", "conv.weight=channels"]


def old_and_new(tmp_path: Path) -> tuple[dict[str, Any], Path, Path]:
    torch.manual_seed(0)
    names = ("pos_embed", "embed.weight", "conv.weight")
    old = dict(zip(names, map(torch.randn, ((1, 17, 6), (10, 4), (2, 3, 2, 2))), strict=True))
    new = dict(zip(names, map(torch.zeros, ((1, 26, 6), (13, 4), (2, 1, 2, 2))), strict=True))
    for each in (old, new):
        each["lm_head.weight"] = each["embed.weight"]
    return old, saved(old, tmp_path / "old.pt"), saved(new, tmp_path / "new.pt")


def test_every_kind_with_a_tied_head(tmp_path: Path) -> None:
    old, file, target = old_and_new(tmp_path)
    report, done = warm_started(file, target, tmp_path / "out.pt", resize=WAYS, verify=True)
    image = old["pos_embed"][:, 1:].reshape(1, 4, 4, 6).permute(0, 3, 1, 2)
    wanted = functional.interpolate(image, (5, 5), mode="bicubic").permute(0, 2, 3, 1).reshape(1, 25, 6)
    assert torch.equal(done["pos_embed"][:, :1], old["pos_embed"][:, :1])
    assert torch.allclose(done["pos_embed"][:, 1:], wanted, atol=1e-6)
    assert torch.equal(done["embed.weight"][10:], old["embed.weight"].double().mean(0).float().expand(3, 4))
    assert done["lm_head.weight"].data_ptr() == done["embed.weight"].data_ptr()
    assert torch.equal(done["conv.weight"], old["conv.weight"].double().sum(1, keepdim=True).float())
    assert report.share == 1 and {fact.how for fact in report.loaded} == {"resized"}
    ways = {fact.target: fact.how for fact in report.mismatched}
    assert ways == {"pos_embed": "bicubic(cls=1)", "embed.weight": "rows(mean)", "conv.weight": "channels"}
    assert "pos_embed: f32 [1, 17, 6] against f32 [1, 26, 6], resized by bicubic(cls=1)" in str(report)


def test_a_folder_has_the_configuration_of_the_model(tmp_path: Path, run: Run) -> None:
    for name, rows in (("old", 10), ("new", 13)):
        (tmp_path / name).mkdir()
        save_file({"embed.weight": torch.randn(rows, 4)}, tmp_path / name / "model.safetensors", {"format": "pt"})
        config = {"model_type": "llama", "vocab_size": rows}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    args = ("warm-start", tmp_path / "old", "--against", tmp_path / "new", "--resize", "embed.*=rows(mean)")
    done = run(*args, "-o", f"{out}/")
    assert done.code == 0 and "carried along: config.json" in done.out, done
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 13


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"resize": ["nothing*=rows"]}, NoMatch, "nothing"),
        ({"resize": ["pos_embed"]}, UsageError, "not of the form PATTERN=HOW"),
        ({"resize": ["pos_embed=lanczos"]}, UsageError, "unknown way"),
        ({"resize": ["pos_embed=rows"]}, UsageError, "pos_embed .*Only the first dimension"),
        ({"resize": ["pos_embed=bicubic"]}, UsageError, "pos_embed .*17 tokens are not a square.*cls=1"),
    ],
)
def test_ways_that_lead_nowhere_are_errors(tmp_path: Path, options: Any, error: Any, words: str) -> None:
    _, file, target = old_and_new(tmp_path)
    with pytest.raises(error, match=f"(?s){words}"):
        ckptool.warm_start(file, target, tmp_path / "out.pt", **options)
    assert not (tmp_path / "out.pt").exists()


def test_live_models(tmp_path: Path) -> None:
    torch.manual_seed(1)
    small, large = nn.Embedding(7, 3), nn.Embedding(9, 3)
    ckptool.load_into(large, saved(small.state_dict(), tmp_path / "old.pt"), resize="weight=rows(mean)")
    assert torch.equal(large.weight[:7], small.weight)
    assert torch.allclose(large.weight[7:], small.weight.mean(0))


def test_a_grid_that_keeps_its_number_of_tokens_is_resized_all_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = saved({"p": torch.randn(1, 280, 4), "w": torch.ones(4)}, tmp_path / "a.pt")
    target = saved({"p": torch.zeros(1, 280, 4), "w": torch.zeros(4)}, tmp_path / "b.pt")
    image = torch.load(file)["p"].reshape(1, 14, 20, 4).permute(0, 3, 1, 2)
    for mode in ("bicubic", "bilinear"):
        turned = functional.interpolate(image, (20, 14), mode=mode)
        for sides, wanted in (("from=14x20, to=20x14", turned), ("from=14x20, to=14x20", image)):
            out = tmp_path / f"{mode}{sides}.pt"
            report, done = warm_started(file, target, out, resize=f"p={mode}({sides})")
            assert torch.allclose(done["p"], wanted.permute(0, 2, 3, 1).reshape(1, 280, 4), atol=1e-5)
            assert [fact.how for fact in report.loaded if fact.target == "p"] == ["resized"]
    with pytest.raises(UsageError, match="cannot become"):
        warm_started(file, target, tmp_path / "c.pt", resize="p=bicubic(from=14x20, to=10x14)")


@pytest.mark.parametrize(("tokens", "is_grid"), [(50, True), (51, False)])
def test_another_grid_is_advised_only_where_there_is_one(tokens: int, is_grid: bool, tmp_path: Path) -> None:
    file = saved({"pos_embed": torch.ones(1, 17, 4), "w": torch.ones(4)}, tmp_path / "a.pt")
    target = saved({"pos_embed": torch.zeros(1, tokens, 4), "w": torch.zeros(4)}, tmp_path / "b.pt")
    refusal = ckptool.warm_start(file, target).refused[0]
    assert ("For another grid: --resize" in refusal.fix) is is_grid


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
    assert "ours.pt into theirs.pt: 76.19% of 63 values, 24 of 28 names" in text
    assert "layer.{0..11}.{weight, bias}  (24)" in text and "block.{0, 2, 4}.weight  (3)" in text
    assert "\x1b" not in text
    coloured = text_of(report, style=Style(colour=True, width=30))
    assert "\x1b[1;32m76.19% of 63 values" in coloured
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
    parameters = {"d": (2, 3), "b": (4,), "c": (4,), "a": (5,)}
    shapes, weights = list(parameters.values()), checkpoint(**parameters)
    assert Slots(optimizer(shapes), "o").names(weights, None) == dict(enumerate("dbca"))
    named = optimizer(shapes, param_names=["module.d", "c", "gone", "a"])
    assert Slots(named, "o").names(weights, None) == dict(enumerate(["module.d", "c", "gone", "a"]))
    for wrong in (
        optimizer(shapes, groups=2),  # b and c have one shape: which is which?
        optimizer(shapes[::-1]),
        optimizer([(5,), (2, 3)]),
        optimizer([(4,)]),
        optimizer([(5,), (5,)]),
        optimizer([(9,)]),
        {"state": {}, "param_groups": [{"params": [0, 1]}]},
    ):
        with pytest.raises(Conflict, match="it is unclear"):
            Slots(wrong, "o").names(weights, None)
    with pytest.raises(Conflict, match="in two groups"):
        Slots({"state": {}, "param_groups": [{"params": [0, 0]}]}, "o").names(weights, None)


def test_many_names_are_quick(tmp_path: Path) -> None:
    """20,000 tensors are planned in a moment."""
    shapes = {f"layers_{n}_{end}": (2,) for n in range(10_000) for end in ("weight", "bias")}
    ours = Checkpoint({f"module.{key}": value for key, value in checkpoint(**shapes).tree.items()}, "test")
    with soon(5):
        report = planned(ours, checkpoint(**shapes))
    assert report.share == 1


@pytest.mark.parametrize("tied", [False, True])
def test_plain_files_stay_plain(tied: bool, tmp_path: Path) -> None:
    """A file of safetensors for one of safetensors has no pickle of ckptool in its metadata."""
    state = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(2, 3)}
    known = {"format": "pt"} | ({"c.weight": "a.weight"} if tied else {})
    for name in ("model", "target"):
        safetensors.torch.save_file(state, tmp_path / f"{name}.safetensors", metadata=known)
    out = tmp_path / "out.safetensors"
    ckptool.warm_start(tmp_path / "model.safetensors", tmp_path / "target.safetensors", out)
    with safetensors.safe_open(out, "pt") as made:
        assert made.metadata() == known and {*made.keys()} == {*state}
