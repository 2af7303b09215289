"""`load_into` all or nothing: what is refused, and that nothing has changed then."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn

import ckptool
from ckptool.errors import CkptoolError, Conflict, Corrupt, NoMatch, PlanRefused, Unsupported, UsageError
from fixtures.make import TiedLanguageModel, mlp
from tests.support.errors import three_parts
from tests.support.files import saved
from tests.support.live_models import Classifier, bits, load_refused, snapshot
from tests.support.looped import examples


def test_a_demand_that_comes_after_loading_says_that_it_is_done(tmp_path: Path) -> None:
    state = mlp().state_dict()
    del state["fc1.bias"]
    model = mlp()
    report = ckptool.load_into(model, saved(state, tmp_path / "model.pt"))
    with pytest.raises(PlanRefused, match=r"was loaded into .*, but 94\.22 %") as found:
        report.require(min_loaded=0.95)
    assert "done already" in found.value.why and torch.equal(model.fc2.weight, state["fc2.weight"])
    three_parts(found.value)
    dry = ckptool.load_into(model, tmp_path / "model.pt", dry_run=True)
    with pytest.raises(PlanRefused, match="was not loaded into") as found:
        dry.require(min_loaded=0.95)
    assert "Nothing was changed" in found.value.why


def test_what_is_no_model(tmp_path: Path) -> None:
    file = saved(mlp().state_dict(), tmp_path / "model.pt")
    for thing in ({}, mlp().state_dict(), mlp, None):
        with pytest.raises(UsageError, match=r"not a torch\.nn\.Module") as found:
            ckptool.load_into(thing, file)  # type: ignore[arg-type]
        three_parts(found.value)


def test_demands(tmp_path: Path) -> None:
    state = mlp().state_dict()
    state["more"] = torch.zeros(2)
    del state["fc1.bias"]
    file = saved(state, tmp_path / "model.pt")
    load_refused(file, mlp(), PlanRefused, "1 name is missing: fc1.bias", strict=True)
    load_refused(file, mlp(), PlanRefused, "94.22 % of the target's values", min_loaded=0.95)
    load_refused(file, mlp(), PlanRefused, "not loaded: fc1.bias", missing="fc2.*")
    load_refused(file, mlp(), UsageError, "not a share", min_loaded=95)
    load_refused(file, mlp(), UsageError, "unknown on_mismatch .guess", on_mismatch="guess")
    load_refused(file, mlp(), NoMatch, "matches no key", rename="encoder.* => backbone.*")
    load_refused(file, mlp(), NoMatch, "matches no key", only="encoder.*")
    load_refused(file, mlp(), UsageError, "is not a rule", rename="encoder")
    load_refused(file, mlp(), Conflict, "would collide", rename="fc*.weight => fc1.weight")
    model = mlp()
    report = ckptool.load_into(model, file, min_loaded=0.9, missing=["fc1.bias"])
    assert [fact.source for fact in report.unexpected] == ["more"]


def test_tensors_that_are_no_plain_ones(tmp_path: Path) -> None:
    state = mlp().state_dict()
    state["fc1.weight"] = state["fc1.weight"].to_sparse()
    load_refused(saved(state, tmp_path / "sparse.pt"), mlp(), PlanRefused, "fc1.weight .sparse")
    with torch.device("meta"), pytest.raises(Unsupported, match="not plain: weight"):
        ckptool.load_into(nn.LazyLinear(3), saved(state, tmp_path / "any.pt"))


def test_a_tensor_that_cannot_be_written_to(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(1, 3).expand(2, 3))
    file = saved({"weight": torch.ones(2, 3)}, tmp_path / "model.pt")
    load_refused(file, model, PlanRefused, "cannot be copied into: weight")
    ckptool.load_into(model, file, assign=True)
    assert torch.equal(model.weight, torch.ones(2, 3))


def test_damaged_bytes_are_found_before_anything_changes(tmp_path: Path) -> None:
    trained = mlp()
    file = saved(trained.state_dict(), tmp_path / "model.pt")
    raw = bytearray(file.read_bytes())
    last = raw.rfind(bits(trained.fc2.weight))
    raw[last] ^= 1
    file.write_bytes(raw)
    load_refused(file, mlp(), Corrupt, "checksum")


@hypothesis.settings(max_examples=examples(60), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=strategies.data())
def test_all_or_nothing(tmp_path: Path, data: strategies.DataObject) -> None:
    """Random checkpoints and options: either exactly what the report says has changed, or nothing has."""
    draw = data.draw
    model: Any = draw(strategies.sampled_from([mlp, Classifier, TiedLanguageModel]))()
    state = {}
    for name, tensor in copy.deepcopy(model).state_dict().items():
        change = draw(
            strategies.sampled_from(["same", "same", "same", "gone", "renamed", "grown", "cut", "half", "complex"])
        )
        new = torch.randn(tensor.shape) if tensor.is_floating_point() else tensor + 3
        if change == "gone":
            continue
        if change == "renamed":
            name = f"other.{name}"
        elif change in ("grown", "cut") and tensor.dim():
            shape = [max(1, size + (1 if change == "grown" else -1)) for size in tensor.shape]
            new = torch.ones(shape, dtype=tensor.dtype)
        elif change in ("half", "complex"):
            new = new.to(torch.float16 if change == "half" else torch.complex64)
        state[name] = new
    if not state:
        return
    options: dict[str, Any] = {
        "on_mismatch": draw(strategies.sampled_from(["error", "skip", "slice", "pad"])),
        "strict": draw(strategies.sampled_from([False, False, True])),
        "min_loaded": draw(strategies.sampled_from([None, 0.5, 1.0])),
        "assign": draw(strategies.sampled_from([None, True])),
    }
    file = saved(state, tmp_path / "random.pt")
    before = snapshot(model)
    try:
        report = ckptool.load_into(model, file, **options)
    except CkptoolError:
        assert snapshot(model) == before
        return
    assert report.accepted and report.loaded
    whole = {fact.target: fact for fact in report.loaded}
    alias = dict(report.tied)
    for name, tensor in model.state_dict().items():
        fact = whole.get(alias.get(name, name))
        if fact is None:
            assert bits(tensor) == before[name][1]
        elif fact.how == "as it is":
            assert bits(tensor) == bits(state[fact.source].to(tensor.dtype))
        else:
            corner = tuple(slice(0, min(pair)) for pair in zip(tensor.shape, state[fact.source].shape, strict=True))
            assert torch.equal(tensor[corner], state[fact.source][corner].to(tensor.dtype))
