"""`warm-start` from files to files: what is written, what is refused, and what others load of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CkptoolError, Conflict, OutputExists, UsageError
from fixtures.make import TiedLanguageModel, mlp
from tests.support.errors import three_parts
from tests.support.files import load, saved
from tests.support.warm_starts import warm_started

# What is written -----------------------------------------------------------------------------------------------------


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
    tied, out = saved(TiedLanguageModel().state_dict(), tmp_path / "tied.pt"), tmp_path / "out.pt"
    loose = saved(
        {key: value.clone() for key, value in TiedLanguageModel().state_dict().items()}, tmp_path / "loose.pt"
    )
    report, done = warm_started(tied, loose, out)
    assert done["head.weight"].data_ptr() != done["embed.weight"].data_ptr() and not report.tied
    one = saved({key: value for key, value in load(loose).items() if "head" not in key}, tmp_path / "one.pt")
    report, done = warm_started(one, tied, tmp_path / "tied_out.pt", strict=True)
    assert done["head.weight"].data_ptr() == done["embed.weight"].data_ptr() and report.tied == (
        ("head.weight", "embed.weight"),
    )


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
    half = saved(
        {"a.weight": torch.zeros(1).half().expand(1_000_000, 1_000_000), "x.weight": torch.ones(1)},
        tmp_path / "half.pt",
    )
    warm_start_refused(tmp_path, file, half, Conflict, "expanded view")


def test_a_numpy_checkpoint(tmp_path: Path) -> None:
    file = saved({"fc.weight": numpy.ones((2, 3), "f4"), "fc.bias": numpy.zeros(2, "f4")}, tmp_path / "arrays.pt")
    report, done = warm_started(
        file, saved(nn.Linear(3, 2).state_dict(), tmp_path / "t.pt"), tmp_path / "out.pt", rename="fc.* => *"
    )
    assert (done["weight"] == 1).all() and report.share == 1


# Refused: nothing is written -----------------------------------------------------------------------------------------


def warm_start_refused(
    tmp_path: Path, file: Path, target: Path | str, kind: type[CkptoolError], words: str, **options: Any
) -> CkptoolError:
    before = sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")
    with pytest.raises(kind, match=words) as found:
        ckptool.warm_start(file, target, tmp_path / "never.pt", **options)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before
    three_parts(found.value)
    return found.value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{code}:nothing", "has no nothing"),
        ("{code}:number", "made int, not a torch.nn.Module"),
        ("{code}", "name what in it builds the model"),
        ("{folder}/none.py:build", "there is no file"),
        ("no_such_module_1:build", "there is no module no_such_module_1"),
        ("model:1", "neither a file nor a name"),
    ],
)
def test_targets_that_are_none(tmp_path: Path, code: Path, name: str, words: str) -> None:
    warm_start_refused(
        tmp_path,
        saved(mlp().state_dict(), tmp_path / "m.pt"),
        name.format(code=code, folder=tmp_path),
        UsageError,
        words,
    )


def test_a_module_and_a_class_are_targets(tmp_path: Path, code: Path) -> None:
    file = saved(nn.Linear(2, 2).state_dict(), tmp_path / "m.pt")
    assert ckptool.warm_start(file, f"{code}:module").share == 1
    assert list(ckptool.spec(f"{code}:Model").target.tensors) == ["fc.weight", "fc.bias"]


# Suggestions ---------------------------------------------------------------------------------------------------------


def test_suggestions_are_rules_that_can_be_passed_back(tmp_path: Path) -> None:
    """A Lightning prefix and a renamed block: nothing fits, the rules are written, and with them everything does."""
    theirs = {
        f"blocks.{n}.attn.{end}": torch.randn(4, n + 2) for n in range(3) for end in ("qkv.weight", "proj.weight")
    }
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
    with pytest.raises(OutputExists):
        ckptool.warm_start(file, target, suggest=rules)


# The command ---------------------------------------------------------------------------------------------------------


# Rules that change tensors -------------------------------------------------------------------------------------------


def test_fused_attention_is_suggested_and_loaded_by_rules_with_operations(tmp_path: Path) -> None:
    three = {name: numpy.full((4, 4), number, "f4") for number, name in enumerate(("query", "key", "value"))}
    apart = {f"layer.{n}.attention.{name}.weight": value.copy() for n in (0, 1) for name, value in three.items()}
    fused = {f"blocks.{n}.attn.qkv.weight": numpy.concatenate(list(three.values())) for n in (0, 1)}
    for name, weights in (("fused", fused), ("apart", apart)):
        ckptool.save(weights, tmp_path / f"{name}.safetensors")
    file, target = tmp_path / "fused.safetensors", tmp_path / "apart.safetensors"
    report = ckptool.warm_start(file, target)
    (suggestion,) = [one for one in report.suggestions if one.rules]
    (rule,) = suggestion.rules
    assert rule == "blocks.{n}.attn.qkv.* => layer.{n}.attention.{query,key,value}.* : split 0"
    (tmp_path / "rules.yaml").write_text(f"- '{rule}'\n")
    for options in ({"rename": rule}, {"rules_file": str(tmp_path / "rules.yaml")}):
        out = tmp_path / f"{next(iter(options))}.safetensors"
        assert ckptool.warm_start(file, target, out, strict=True, **options).accepted
        assert ckptool.diff(out, target).same
    with pytest.raises(UsageError, match="rules that change tensors"):
        ckptool.warm_start(file, target, rename=rule, optimizer=True)
