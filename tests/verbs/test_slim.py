"""`slim`: what is left out, what it saved, and that the rest is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import UsageError
from ckptool.formats import read
from tests.support.deduplicated import deduplicated
from tests.support.files import load, saved
from tests.support.same import assert_same_objects


def training(folder: Path) -> Path:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    path = folder / "training.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path


def assert_same_values(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def test_optimizer_state_goes_and_the_rest_stays(tmp_path: Path) -> None:
    file, out = training(tmp_path), tmp_path / "out.pt"
    done = ckptool.slim(file, out)
    before, after = load(file), load(out)
    assert list(after) == ["model", "epoch"]
    assert_same_objects(before["model"], after["model"])
    assert done.facts["dropped"] == ["optimizer"]
    assert done.facts["saved_bytes"] == file.stat().st_size - out.stat().st_size
    # exp_avg and exp_avg_sq for each of the 64 * 64 + 64 + 64 * 8 + 8 parameters, and four f32 steps
    assert done.facts["optimizer_bytes"] == 2 * 4 * (64 * 64 + 64 + 64 * 8 + 8) + 4 * 4


def test_an_optimizer_in_a_list_leaves_the_list(tmp_path: Path) -> None:
    tree = load(training(tmp_path))
    file = saved({"optimizer_states": [tree["optimizer"]], "state_dict": tree["model"]}, tmp_path / "in.pt")
    ckptool.slim(file, tmp_path / "out.pt")
    after = load(tmp_path / "out.pt")
    assert after["optimizer_states"] == []
    assert_same_objects(after["state_dict"], tree["model"])


def test_a_slice_loses_the_rest_of_its_storage(tmp_path: Path) -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    file, out = saved({"a": big[10:12], "b": torch.ones(3)}, tmp_path / "in.pt"), tmp_path / "out.pt"
    done = ckptool.slim(file, out)
    assert out.stat().st_size < 4_000
    assert_same_values(load(file), load(out))
    assert done.facts["waste_bytes"] == 4_000_000 - 8
    assert done.facts["waste_storages"] == 1


def test_views_that_overlap_go_on_sharing(tmp_path: Path) -> None:
    big = torch.arange(10_000, dtype=torch.int32)
    tree = {"a": big[100:200], "b": big[150:260], "tied": big[100:200], "far": big[9_000:9_010]}
    file, out = saved(tree, tmp_path / "in.pt"), tmp_path / "out.pt"
    ckptool.slim(file, out)
    after = load(out)
    assert_same_values(tree, after)
    assert after["a"].untyped_storage().data_ptr() == after["b"].untyped_storage().data_ptr()
    assert after["a"].untyped_storage().nbytes() == 4 * (260 - 100 + 10)
    after["a"][60] = -1
    assert after["b"][10] == -1 and after["tied"][60] == -1


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(10_000.0).reshape(100, 100)[:, :2],
        torch.arange(10_000.0).reshape(100, 100).t()[:3],
        torch.arange(10_000.0)[::7],
        torch.arange(10_000.0)[5:6].expand(4, 3),
        torch.arange(10_000.0)[0:0],
        torch.view_as_complex(torch.arange(10_000.0).reshape(-1, 2))[3:5].conj(),
        torch._neg_view(torch.arange(10_000.0)[7:9]),
    ],
    ids=["columns", "transposed", "steps", "expanded", "empty", "conj", "neg"],
)
def test_a_view_of_any_shape_keeps_its_values(tmp_path: Path, view: torch.Tensor) -> None:
    file, out = saved({"view": view}, tmp_path / "in.pt"), tmp_path / "out.pt"
    ckptool.slim(file, out)
    after = load(out)["view"]
    assert torch.equal(after, view) and after.dtype == view.dtype and after.shape == view.shape
    assert after.untyped_storage().nbytes() <= max(view.nelement(), 1) * view.element_size()


def test_a_parameter_stays_a_parameter(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.arange(1000.0)[10:20])
    file, out = saved({"weight": weight}, tmp_path / "in.pt"), tmp_path / "out.pt"
    ckptool.slim(file, out)
    after = load(out)["weight"]
    assert isinstance(after, nn.Parameter) and torch.equal(after, weight)


def test_nothing_to_leave_out_is_a_copy(tmp_path: Path) -> None:
    file, out = saved({"a": torch.ones(4)}, tmp_path / "in.pt"), tmp_path / "out.pt"
    done = ckptool.slim(file, out)
    assert done.summary == "nothing to drop" and done.how == "copy"
    assert out.read_bytes() == file.read_bytes()


def test_keep_optimizer_drops_only_waste(tmp_path: Path) -> None:
    tree = load(training(tmp_path)) | {"slice": torch.arange(100_000)[:2]}
    file, out = saved(tree, tmp_path / "in.pt"), tmp_path / "out.pt"
    done = ckptool.slim(file, out, keep_optimizer=True)
    after = load(out)
    assert_same_objects(after["optimizer"], tree["optimizer"])
    assert torch.equal(after["slice"], tree["slice"])
    assert done.facts["dropped"] == [] and done.facts["waste_bytes"] == 8 * 99_998


def test_a_file_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    file = saved(load(training(tmp_path))["optimizer"], tmp_path / "in.pt")
    with pytest.raises(UsageError, match="whole file is the state of an optimizer"):
        ckptool.slim(file, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_in_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="slim writes a new file"):
        ckptool.slim(saved({"a": torch.ones(1)}, tmp_path / "in.pt"), in_place=True)


# --dedup -------------------------------------------------------------------------------------------------------------


def model_and_ema(folder: Path) -> tuple[Path, dict[str, Any]]:
    model = {f"layer{i}.weight": torch.randn(32, 32) for i in range(4)}
    ema = {name: tensor.clone() for name, tensor in model.items()}
    ema["layer3.weight"] += 1
    tree = {"model": model, "ema": ema, "step": torch.zeros(1), "steps": torch.zeros(1)}
    return saved(tree, folder / "in.pt"), tree


def test_equal_storages_of_one_set_of_weights_are_tied(tmp_path: Path) -> None:
    """What is equal today in two sets, a model and its average, stays two."""
    file, tree = model_and_ema(tmp_path)
    assert ckptool.slim(file, tmp_path / "none.pt", dedup=True).facts["twin_storages"] == 0
    one, other = torch.randn(32, 32), torch.randn(32, 32)
    model = {"a.weight": one, "b.weight": one.clone(), "c.weight": other, "small.weight": torch.ones(2)}
    file = saved({**tree, "model": model | {"same.weight": torch.ones(2)}}, tmp_path / "tied.pt")
    out = tmp_path / "out.pt"
    done = ckptool.slim(file, out, dedup=True, verify=True)
    assert done.facts["twin_storages"] == 1 and done.facts["twin_bytes"] == one.nbytes
    assert [note.code for note in done.notes] == ["new-ties"] and "training one trains the other" in str(done)
    assert out.stat().st_size < file.stat().st_size - one.nbytes
    for loaded in (ckptool.load(out), load(out)):
        assert_same_values(loaded["ema"], tree["ema"])
        loaded["model"]["a.weight"].zero_()
        assert not loaded["model"]["b.weight"].any() and torch.equal(loaded["model"]["c.weight"], other)
        loaded["model"]["small.weight"].zero_()
        assert loaded["model"]["same.weight"].all()
    assert ckptool.slim(out, tmp_path / "again.pt", dedup=True).facts["twin_storages"] == 0


def test_counters_are_left_alone(tmp_path: Path) -> None:
    file, _ = model_and_ema(tmp_path)
    ckptool.slim(file, tmp_path / "out.pt", dedup=True)
    theirs = load(tmp_path / "out.pt")
    theirs["step"] += 1
    assert theirs["steps"] == 0


def test_what_0_1_0_stored_once_is_stored_for_each_when_it_is_written_again(tmp_path: Path) -> None:
    file, tree = model_and_ema(tmp_path)
    first, second = tmp_path / "1.pt", tmp_path / "2.pt"
    assert deduplicated(file, first) == 3
    assert "new-ties" in [note.code for note in read(first).notes]
    ckptool.add_module(first, second)
    assert abs(second.stat().st_size - file.stat().st_size) < 2_000
    assert not read(second).notes
    for path, name in ((first, "layer0.weight"), (second, "module.layer0.weight")):
        ours = ckptool.load(path)
        ours["model"][name].zero_()
        assert torch.equal(ours["ema"][name], tree["ema"]["layer0.weight"])
    ckptool.add_module(first, in_place=True)
    assert first.read_bytes() == second.read_bytes()
    ckptool.strip_module(second, in_place=True)
    assert ckptool.diff(second, file).same


def test_a_record_of_twins_that_lies_is_refused(tmp_path: Path) -> None:
    import zipfile

    file = saved({"a.weight": torch.ones(8)}, tmp_path / "in.pt")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/.ckptool/twins", b'{"a": 1')
    with pytest.raises(ckptool.CkptoolError, match="record of deduplicated storages"):
        read(file)
