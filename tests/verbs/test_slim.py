"""`slim`: what is left out, what it saved, and that the rest is what it was."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.formats import read
from fixtures.make import make
from tests.support.errors import refused
from tests.support.files import load, saved
from tests.support.same import assert_same_objects
from tests.support.small_models import deduplicated


class Holder:
    """Somebody's own class."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_an_optimizer_in_a_list_leaves_the_list(tmp_path: Path) -> None:
    tree = load(make("training.pt", tmp_path))
    state, optimizer = tree["model_state_dict"], tree["optimizer_state_dict"]
    ckptool.slim(saved({"optimizer_states": [optimizer], "state_dict": state}, tmp_path / "in.pt"), tmp_path / "out.pt")
    assert_same_objects(load(tmp_path / "out.pt"), {"optimizer_states": [], "state_dict": state})
    for holder in (Holder(net=state, optimizer=optimizer), (state, [optimizer])):  # of an object, in a list of a tuple
        ckptool.slim(saved({"agent": holder}, tmp_path / "in.pt"), tmp_path / "out.pt", overwrite=True)
        left = load(tmp_path / "out.pt", weights_only=False)["agent"]
        assert_same_objects(
            left if type(left) is tuple else vars(left), ({"net": state}, (state, []))[type(left) is tuple]
        )
    alone = saved(optimizer, tmp_path / "alone.pt")
    says = "whole file holds only optimizer state"
    refused("usage", tmp_path, lambda: ckptool.slim(alone, tmp_path / "no.pt"), says)
    with pytest.raises(TypeError, match="in_place"):
        ckptool.slim(alone, in_place=True)


def test_every_form_of_optimizer_state_goes(tmp_path: Path) -> None:
    """The same under two names, one pickled as it is, and what Lookahead and Distributed Shampoo write."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state, weights = optimizer.state_dict(), dict(model.state_dict())
    slots, groups = state["state"], state["param_groups"]
    for parts in (
        {"optimizer_states": [state, state]},
        {"optimizer": optimizer, "optim": state},
        {"optimizer": {"fast_state": slots, "slow_state": {0: {"slow": torch.ones(3)}}, "param_groups": groups}},
        {"optim": {"state": {"weight": slots[0]}, "param_groups": {"weight": {"lr": 0.1}}}},
    ):
        file, out = saved({"model": weights, **parts}, tmp_path / "in.pt"), tmp_path / "out.pt"
        done = ckptool.slim(file, out, overwrite=True)
        left = load(out)
        assert_same_objects(left.pop("model"), weights, storages=False)
        assert left in ({}, {"optimizer_states": []}) and done.facts["optimizer_bytes"]
    alone = saved({"optimizer": state, "epoch": 1}, tmp_path / "alone.pt")
    refused("usage", tmp_path, lambda: ckptool.slim(alone, tmp_path / "no.pt"))


def test_a_slice_loses_the_rest_of_its_storage(tmp_path: Path) -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    file, out = saved({"a": big[10:12], "b": torch.ones(3)}, tmp_path / "in.pt"), tmp_path / "out.pt"
    done = ckptool.slim(file, out)
    assert out.stat().st_size < 4_000
    assert_same_objects(load(file), load(out), storages=False)
    assert (done.facts["waste_bytes"], done.facts["waste_storages"]) == (4_000_000 - 8, 1)


def test_views_that_overlap_go_on_sharing(tmp_path: Path) -> None:
    big = torch.arange(10_000, dtype=torch.int32)
    tree = {"a": big[100:200], "b": big[150:260], "tied": big[100:200], "far": big[9_000:9_010]}
    file, out = saved(tree, tmp_path / "in.pt"), tmp_path / "out.pt"
    ckptool.slim(file, out)
    after = load(out)
    assert_same_objects(tree, after, storages=False)
    assert after["a"].untyped_storage().data_ptr() == after["b"].untyped_storage().data_ptr()
    assert [after[key].untyped_storage().nbytes() for key in ("a", "far")] == [4 * (260 - 100), 4 * 10]
    after["a"][60] = -1
    assert after["b"][10] == -1 and after["tied"][60] == -1


def test_views_of_two_widths_stay_aligned(tmp_path: Path) -> None:
    codes = torch.arange(64).to(torch.uint16)
    tree = {"narrow": codes.view(torch.float8_e5m2)[3:6], "wide": codes[40:43], "more": codes[50:]}
    file, out = saved(tree, tmp_path / "in.pt"), tmp_path / "out.pt"
    assert ckptool.slim(file, out).facts["waste_bytes"] == 128 - 4 - 6 - 28
    after = load(out)
    assert all(bytes(after[name].view(torch.uint8)) == bytes(tree[name].view(torch.uint8)) for name in tree)


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
        assert_same_objects(dict(loaded["ema"]), tree["ema"], storages=False)
        loaded["model"]["a.weight"].zero_()
        assert not loaded["model"]["b.weight"].any() and torch.equal(loaded["model"]["c.weight"], other)
        loaded["model"]["small.weight"].zero_()
        assert loaded["model"]["same.weight"].all()
        loaded["step"] += 1  # a counter
        assert loaded["steps"] == 0
    assert ckptool.slim(out, tmp_path / "again.pt", dedup=True).facts["twin_storages"] == 0


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
    file = saved({"a.weight": torch.ones(8)}, tmp_path / "in.pt")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/.ckptool/twins", b'{"a": 1')
    refused(ckptool.CkptoolError, tmp_path, lambda: read(file), "record of deduplicated storages")
