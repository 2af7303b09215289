"""`load_into`: a plan on a live module, all of it: the cases of the tutorials, ties, devices, wrappers, shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import ckptool
from ckptool.errors import PlanRefused, UsageError
from fixtures.make import TiedLanguageModel, make, mlp, train
from tests.support.errors import three_parts
from tests.support.files import saved
from tests.support.live_models import Classifier, assert_same_state, bits, compiled, snapshot

# The cases of the tutorials ------------------------------------------------------------------------------------------


def test_a_prefix_on_all_keys(tmp_path: Path) -> None:
    trained, model = nn.DataParallel(mlp()), mlp()
    report = ckptool.load_into(model, saved(trained.state_dict(), tmp_path / "dp.pt"))
    assert_same_state(model, trained.module.state_dict())
    assert report.applied and report.share == 1 and not report.missing and not report.unexpected
    assert [note.code for note in report.normalised] == ["prefix"]


def test_a_new_head(tmp_path: Path) -> None:
    trained, model = Classifier(10), Classifier(4)
    file = saved(trained.state_dict(), tmp_path / "pretrained.pt")
    before = snapshot(model)
    with pytest.raises(PlanRefused) as refused:
        ckptool.load_into(model, file)
    assert three_parts(refused.value)[0] == "plan-refused" and refused.value.exit_code == 1
    assert snapshot(model) == before
    assert [fact.target for fact in refused.value.report.mismatched] == ["head.weight", "head.bias"]
    report = ckptool.load_into(model, file, on_mismatch="skip")
    report.require(missing="head.*")
    assert torch.equal(model.backbone[0].weight, trained.backbone[0].weight)
    assert bits(model.head.weight) == before["head.weight"][1]
    with pytest.raises(PlanRefused, match="not loaded: head"):
        report.require(missing="head.weight")


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_renamed_backbone(tmp_path: Path, wrapper: str) -> None:
    """A rule is for keys without wrappers too."""
    trained, model = Classifier(), Classifier()
    state = {wrapper + name.replace("backbone", "encoder"): tensor for name, tensor in trained.state_dict().items()}
    report = ckptool.load_into(model, saved(state, tmp_path / "old.pt"), rename="encoder.* => backbone.*", strict=True)
    assert_same_state(model, trained.state_dict())
    assert report.share == 1


def test_a_checkpoint_of_a_whole_training_state(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    model = mlp()
    report = ckptool.load_into(model, file)
    assert_same_state(model, torch.load(file)["model_state_dict"])
    assert report.root == "model_state_dict" and "not its average ema_state_dict" in str(report)
    ckptool.load_into(model, f"{file}#ema_state_dict")
    with pytest.raises(UsageError, match="2 sets of model weights"):
        ckptool.load_into(model, make("gan.pt", tmp_path))


def test_a_cpu_model_from_a_cuda_checkpoint(tmp_path: Path) -> None:
    file = make("cuda.pt", tmp_path)
    checkpoint = ckptool.open(file)
    assert {tensor.location for tensor in checkpoint.tree.values()} == {"cuda:0"}
    model = mlp()
    assert ckptool.load_into(model, checkpoint).share == 1
    assert_same_state(model, torch.load(file, map_location="cpu"))


def in_dtype(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_half_checkpoint_into_a_float_model(tmp_path: Path, half: torch.dtype) -> None:
    model, state = mlp(), in_dtype(mlp().state_dict(), half)
    report = ckptool.load_into(model, saved(state, tmp_path / "half.pt"))
    assert_same_state(model, in_dtype(state, torch.float32))
    assert all(fact.exact for fact in report.dtype_changes) and len(report.dtype_changes) == 8


def test_a_float_checkpoint_into_a_half_model(tmp_path: Path) -> None:
    trained, model = mlp(), mlp().half()
    with torch.no_grad():
        trained.fc2.bias.fill_(1e6)
        trained.fc1.bias.fill_(0.5)
    report = ckptool.load_into(model, saved(trained.state_dict(), tmp_path / "float.pt"))
    assert_same_state(model, in_dtype(trained.state_dict(), torch.float16))
    lossy = {fact.target: (fact.exact, fact.changed, fact.overflowed) for fact in report.dtype_changes}
    assert lossy["fc2.bias"] == (False, 4, 4) and lossy["fc1.bias"] == (True, 0, 0) and lossy["fc1.weight"][0] is False


def test_an_extra_optimizer_is_no_part_of_the_model(tmp_path: Path) -> None:
    trained = mlp()
    adam = torch.optim.Adam(trained.parameters())
    train(trained, adam)
    file = saved(
        {"model": trained.state_dict(), "opt1": adam.state_dict(), "opt2": adam.state_dict()}, tmp_path / "two.pt"
    )
    model = mlp()
    assert ckptool.load_into(model, file, strict=True).share == 1
    with pytest.raises(UsageError, match="has 2 optimizers: opt1, opt2"):
        ckptool.load_into(model, file, optimizer=torch.optim.Adam(model.parameters()))


# Ties ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight"])
def test_tied_weights_satisfied_through_their_alias(tmp_path: Path, left_out: str) -> None:
    trained, model = TiedLanguageModel(), TiedLanguageModel()
    state = {name: tensor for name, tensor in trained.state_dict().items() if name != left_out}
    report = ckptool.load_into(model, saved(state, tmp_path / "hf.pt"), strict=True)
    assert_same_state(model, trained.state_dict())
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in report.tied] == [left_out] and report.share == 1


def test_two_tensors_for_one_tied_tensor(tmp_path: Path) -> None:
    """Whether their values are equal is not read: what is loaded is said by leaving one out."""
    state = {name: tensor.clone() for name, tensor in TiedLanguageModel().state_dict().items()}
    model = TiedLanguageModel()
    before, equal = snapshot(model), saved(state, tmp_path / "equal.pt")
    state["head.weight"] += 1
    file = saved(state, tmp_path / "untied.pt")
    for each in (equal, file):
        with pytest.raises(PlanRefused, match=r"one tensor in the target, and .* are two") as caught:
            ckptool.load_into(model, each)
        assert "exclude='head.weight'" in str(caught.value) and snapshot(model) == before
    ckptool.load_into(model, file, exclude="embed.weight")
    assert torch.equal(model.embed.weight, state["head.weight"]) and model.head.weight is model.embed.weight


def test_a_tied_checkpoint_into_an_untied_model(tmp_path: Path) -> None:
    file = saved(TiedLanguageModel().state_dict(), tmp_path / "tied.pt")
    for assign in (False, True):
        model = TiedLanguageModel()
        model.head.weight = nn.Parameter(torch.zeros(12, 8))
        ckptool.load_into(model, file, strict=True, assign=assign)
        assert torch.equal(model.head.weight, model.embed.weight)
        with torch.no_grad():
            model.head.weight += 1
        assert not torch.equal(model.head.weight, model.embed.weight)


# Devices, wrappers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_meta_model(tmp_path: Path, tied: bool) -> None:
    build: Any = TiedLanguageModel if tied else mlp
    trained = build()
    file = saved(trained.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        model = build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    ckptool.load_into(model, file, strict=True)
    assert_same_state(model, trained.state_dict())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    if tied:
        assert model.head.weight is model.embed.weight
    with torch.no_grad():
        next(model.parameters()).fill_(7)  # the mapping is private
    assert torch.load(file, weights_only=True).keys() == trained.state_dict().keys()
    assert not any((tensor == 7).all() for name, tensor in torch.load(file).items() if name == "fc1.weight")


def test_a_meta_model_that_would_stay_without_values(tmp_path: Path) -> None:
    state = Classifier().state_dict()
    file = saved({name: tensor for name, tensor in state.items() if "head" not in name}, tmp_path / "backbone.pt")
    with torch.device("meta"):
        model = Classifier().half()
    with pytest.raises(PlanRefused, match="without values after it: head"):
        ckptool.load_into(model, file)
    with pytest.raises(PlanRefused, match="have no memory"):
        ckptool.load_into(model, file, assign=False)
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


def test_distributed_data_parallel(tmp_path: Path) -> None:
    import torch.distributed

    trained, model = mlp(), mlp()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        ckptool.load_into(wrapped, saved(trained.state_dict(), tmp_path / "model.pt"), strict=True)
        ckptool.save_for_cpu(wrapped, tmp_path / "cpu.pt")
    finally:
        torch.distributed.destroy_process_group()
    assert_same_state(model, trained.state_dict())
    assert list(torch.load(tmp_path / "cpu.pt", weights_only=True)) == list(model.state_dict())


def test_a_wrapped_submodule(tmp_path: Path) -> None:
    trained = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = nn.Sequential(compiled(nn.Linear(4, 4)), nn.Linear(4, 2))
    ckptool.load_into(model, saved(trained.state_dict(), tmp_path / "model.pt"), strict=True)
    assert torch.equal(model.state_dict()["0._orig_mod.weight"], trained[0].weight)


def test_assigned_tensors_take_the_models_type_and_flags(tmp_path: Path) -> None:
    trained, model = mlp(), mlp().double()
    model.fc1.weight.requires_grad_(False)
    model.fc1.weight.note = "kept"
    held = model.fc1.weight
    ckptool.load_into(model, saved(trained.state_dict(), tmp_path / "model.pt"), assign=True)
    assert_same_state(model, in_dtype(trained.state_dict(), torch.float64))
    assert model.fc1.weight is not held and not model.fc1.weight.requires_grad and model.fc1.weight.note == "kept"
    assert isinstance(model.fc1.weight, nn.Parameter) and not isinstance(model.bn.running_mean, nn.Parameter)


def test_the_layout_of_the_model_stays(tmp_path: Path) -> None:
    trained, model = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    stride = model.weight.stride()
    ckptool.load_into(model, saved(trained.state_dict(), tmp_path / "conv.pt"))
    assert model.weight.stride() == stride and torch.equal(model.weight, trained.weight)


# Shapes --------------------------------------------------------------------------------------------------------------


def test_pad_and_slice(tmp_path: Path) -> None:
    small, large = nn.Embedding(5, 4), nn.Embedding(8, 4)
    old = large.weight.detach().clone()
    report = ckptool.load_into(large, saved(small.state_dict(), tmp_path / "small.pt"), on_mismatch="pad")
    assert torch.equal(large.weight[:5], small.weight) and torch.equal(large.weight[5:], old[5:])
    assert report.share == 5 / 8 and report.mismatched[0].done == "padded"
    target = nn.Embedding(3, 4)
    report = ckptool.load_into(target, saved(large.state_dict(), tmp_path / "large.pt"), on_mismatch="slice")
    assert torch.equal(target.weight, large.weight[:3]) and report.share == 1
    with pytest.raises(PlanRefused, match="of another shape"):
        ckptool.load_into(nn.Embedding(9, 4), tmp_path / "large.pt", on_mismatch="slice")
    with pytest.raises(PlanRefused, match="of another shape"):
        ckptool.load_into(nn.Embedding(9, 3), tmp_path / "large.pt", on_mismatch="pad")


def test_a_number_that_an_old_torch_saved_as_a_list_of_one(tmp_path: Path) -> None:
    state = {**mlp().state_dict(), "bn.num_batches_tracked": torch.tensor([7])}
    model = mlp()
    ckptool.load_into(model, saved(state, tmp_path / "old.pt"), strict=True)
    assert model.bn.num_batches_tracked.item() == 7 and model.bn.num_batches_tracked.shape == ()


def test_the_harness_starts_from_a_checkpoint(tmp_path: Path) -> None:
    from ckptool.training.models import start_from

    trained, model = mlp(), mlp()
    start_from(model, str(saved(trained.state_dict(), tmp_path / "model.pt")), strict=True)
    assert_same_state(model, trained.state_dict())


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
