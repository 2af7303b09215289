"""`load_into`: a plan on a live module, all of it: the cases of the tutorials, ties, devices, wrappers, shapes."""

import copy
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn
from torch.optim import swa_utils

import ckptool
from ckptool.errors import CkptoolError, Conflict, Corrupt, NoMatch, PlanRefused, Unsupported, UsageError
from fixtures.make import TiedLanguageModel, mlp, train
from tests.support.errors import refused, three_parts
from tests.support.files import load, saved
from tests.support.looped import examples, looped
from tests.support.same import assert_same_objects
from tests.support.small_models import Classifier, assert_same_state, bits, compiled, load_refused, snapshot


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_renamed_backbone(tmp_path: Path, wrapper: str) -> None:
    """A rule is for keys without wrappers too."""
    trained, model = Classifier(), Classifier()
    state = {wrapper + name.replace("backbone", "encoder"): tensor for name, tensor in trained.state_dict().items()}
    report = ckptool.load_into(model, saved(state, tmp_path / "old.pt"), rename="encoder.* => backbone.*", strict=True)
    assert_same_state(model, trained.state_dict())
    assert report.share == 1


def test_a_float_checkpoint_into_a_half_model(tmp_path: Path) -> None:
    trained, model = mlp(), mlp().half()
    with torch.no_grad():
        trained.fc2.bias.fill_(1e6)
        trained.fc1.bias.fill_(0.5)
    report = ckptool.load_into(model, saved(trained.state_dict(), tmp_path / "float.pt"))
    assert_same_state(model, trained.half().state_dict())
    lossy = {fact.target: (fact.exact, fact.changed, fact.overflowed) for fact in report.dtype_changes}
    assert lossy["fc2.bias"] == (False, 4, 4) and lossy["fc1.bias"] == (True, 0, 0) and lossy["fc1.weight"][0] is False


def test_an_extra_optimizer_is_no_part_of_the_model(tmp_path: Path) -> None:
    trained = mlp()
    adam = torch.optim.Adam(trained.parameters())
    train(trained, adam)
    tree = {"model": trained.state_dict(), "opt1": adam.state_dict(), "opt2": adam.state_dict()}
    assert ckptool.load_into(mlp(), saved(tree, tmp_path / "two.pt"), strict=True).share == 1


def test_a_meta_model_that_would_stay_without_values(tmp_path: Path) -> None:
    state = Classifier().state_dict()
    file = saved({name: tensor for name, tensor in state.items() if "head" not in name}, tmp_path / "backbone.pt")
    with torch.device("meta"):
        model = Classifier().half()
    for says, options in (("without values after it: head", {}), ("have no memory", {"assign": False})):
        with pytest.raises(PlanRefused, match=says):
            ckptool.load_into(model, file, **options)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    ckptool.load_into(model, file, missing="head.*")
    assert model.backbone[0].weight.dtype is torch.float16 and model.head.weight.device.type == "meta"
    assert torch.equal(model.backbone[0].weight, state["backbone.0.weight"].half())


def test_buffers_that_are_not_saved(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    file = saved(Rotary().state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        model = Rotary()
    report = ckptool.load_into(model, file, strict=True)
    assert [note.code for note in report.normalised] == ["meta-buffers"] and "angles" in str(report)


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, compiled, lambda model: nn.DataParallel(compiled(model)), swa_utils.AveragedModel],
    ids=["dp", "compiled", "dp(compiled)", "averaged"],
)
def test_wrapped_models(tmp_path: Path, wrap: Any) -> None:
    trained, model = mlp(), mlp()
    wrapped = wrap(model)
    report = ckptool.load_into(wrapped, saved(trained.state_dict(), tmp_path / "model.pt"))
    inner = wrapped.module if isinstance(wrapped, swa_utils.AveragedModel) else model
    assert_same_state(inner, trained.state_dict())
    assert len(report.loaded) == 9


def test_memory_of_a_large_file(tmp_path: Path) -> None:
    """A file of 64 MB goes into a meta model without being read into memory of its own."""
    code = """
import sys, torch, ckptool
from torch import nn

def mine():
    with open("/proc/self/status") as status:
        return int([line.split()[1] for line in status if line.startswith("RssAnon")][0]) // 1024

with torch.device("meta"):
    model, small = nn.Linear(4096, 4096), nn.Linear(2, 2)
ckptool.load_into(small, sys.argv[2])
before = mine()
ckptool.load_into(model, sys.argv[1])
assert model.weight[0, 0] == 1 and model.bias[5] == 2
print(mine() - before)
"""
    large, small = tmp_path / "large.pt", saved(nn.Linear(2, 2).state_dict(), tmp_path / "small.pt")
    torch.save({"weight": torch.ones(4096, 4096), "bias": torch.full((4096,), 2.0)}, large)
    if not os.path.exists("/proc/self/status"):
        return
    done = subprocess.run(
        [sys.executable, "-c", code, str(large), str(small)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24


def test_a_demand_that_comes_after_loading_says_that_it_is_done(tmp_path: Path) -> None:
    state = mlp().state_dict()
    del state["fc1.bias"]
    model = mlp()
    report = ckptool.load_into(model, saved(state, tmp_path / "model.pt"))
    found = refused(PlanRefused, tmp_path, lambda: report.require(min_loaded=0.95), r"was loaded into .*, but 94\.22%")
    assert "loaded all the same" in found.why and torch.equal(model.fc2.weight, state["fc2.weight"])
    three_parts(found)
    dry = ckptool.load_into(model, tmp_path / "model.pt", dry_run=True)
    found = refused(PlanRefused, tmp_path, lambda: dry.require(min_loaded=0.95), "was not loaded into")
    assert "Nothing was changed" in found.why


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
    load_refused(file, mlp(), PlanRefused, "94.22% of the target's values", min_loaded=0.95)
    load_refused(file, mlp(), PlanRefused, "not loaded: fc1.bias", missing="fc2.*")
    load_refused(file, mlp(), UsageError, "not a share", min_loaded=95)
    load_refused(file, mlp(), UsageError, "guess. as on_mismatch", on_mismatch="guess")
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
    with torch.device("meta"), pytest.raises(Unsupported, match="not plain tensors: weight"):
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
    raw = file.read_bytes()
    at = raw.rfind(bits(trained.fc2.weight))
    file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    load_refused(file, mlp(), Corrupt, "checksum")


@hypothesis.settings(max_examples=examples(60), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=strategies.data())
def test_all_or_nothing(tmp_path: Path, data: strategies.DataObject) -> None:
    """Random checkpoints and options: either exactly what the report says has changed, or nothing has."""
    draw = data.draw
    model: Any = draw(strategies.sampled_from([mlp, Classifier, TiedLanguageModel]))()
    state = {}
    for name, tensor in copy.deepcopy(model).state_dict().items():
        change = draw(strategies.sampled_from("same same same gone renamed grown cut half complex".split()))
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
        "on_mismatch": draw(strategies.sampled_from(["error", "skip"])),
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
        else:
            assert fact.how == "as it is"
            assert bits(tensor) == bits(state[fact.source].to(tensor.dtype))


class Counting(nn.Linear):
    """A module with a state that is no tensor: a number, text, a tensor inside, or nothing yet."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


STATES: list[Any] = [
    3,
    "text",
    None,
    {"scale": 2.0, "steps": [1, 2]},
    {"amax": torch.tensor([1.0, 2.0])},
    torch.arange(3),
]


@looped("seed", range(20))
def test_extra_states_as_torch_loads_them(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)

    def model(states: list[Any]) -> nn.Module:
        layers = [
            Counting(state) if rng_layer else nn.Linear(2, 2) for rng_layer, state in zip(kinds, states, strict=True)
        ]
        return nn.Sequential(*layers)

    kinds = [True, *(rng.random() < 0.6 for _ in range(3))]
    trained, ours, theirs = (model(states) for states in (rng.choices(STATES, k=4), [0] * 4, [0] * 4))
    state = (nn.DataParallel(trained) if rng.random() < 0.5 else trained).state_dict()
    gone = [key for key in state if key.endswith("_extra_state") and rng.random() < 0.2]
    for key in gone:
        del state[key]
    result = theirs.load_state_dict({key.removeprefix("module."): value for key, value in state.items()}, strict=False)
    for source in (state, saved(state, tmp_path / "a.pt"), ckptool.open(tmp_path / "a.pt")):
        again = copy.deepcopy(ours)
        report = ckptool.load_into(again, source)
        assert_same_objects(dict(again.state_dict()), dict(theirs.state_dict()))
        assert [fact.name for fact in report.missing] == result.missing_keys
        started = ckptool.warm_start(source, ours)
        if isinstance(started, ckptool.LoadReport):
            ckptool.warm_start(source, ours, tmp_path / "out.pt", overwrite=True)
            started = load(tmp_path / "out.pt")
        started = started.tree if isinstance(started, ckptool.Checkpoint) else started
        assert_same_objects(dict(ckptool.load(started)), dict(theirs.state_dict()))
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    unexpected = plain.load_state_dict(state if "0.weight" in state else {}, strict=False).unexpected_keys
    named = [fact.name for fact in ckptool.load_into(plain, state).unexpected]
    assert sorted(named) == sorted(unexpected) or "0.weight" not in state
    with pytest.raises(PlanRefused) if named else nullcontext():
        ckptool.load_into(plain, state, strict=True)
    assert ckptool.load_into(ours, state, exclude="*_extra_state").missing == ()
    assert all(getattr(layer, "state", 0) == 0 for layer in ours.children())


def test_hooks_of_the_model_are_mentioned() -> None:
    class Halved(nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
            super()._load_from_state_dict(state, prefix, *arguments)

    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    for model in (Halved(2, 2), hooked, nn.Sequential(Halved(2, 2))):
        (note,) = ckptool.load_into(model, model.state_dict()).normalised
        assert note.code == "own-hooks"
    for model in (
        nn.BatchNorm1d(2),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.MultiheadAttention(2, 1),
    ):
        assert not ckptool.load_into(model, model.state_dict()).normalised
