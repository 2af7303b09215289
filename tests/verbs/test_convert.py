"""`convert` both ways: what stock safetensors reads, what is left behind, what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import ckptool
from ckptool.errors import CkptoolError, NoMatch, Unsupported, UsageError
from ckptool.formats import read
from fixtures.make import PRODUCERS, TiedLanguageModel, make, mlp
from fixtures.traps import TRAPS
from tests.formats.contract import same_for_torch
from tests.support.files import load, saved, weights
from tests.support.looped import looped
from tests.support.same import assert_same_objects, assert_same_tree

KINDS = [name for name in PRODUCERS if "legacy" not in name and name not in ("whole_module.pt",)]
# What a plain safetensors file can hold.
DTYPES = [name for name in safetensors.torch._TYPES.values() if f"09-{str(name).removeprefix('torch.')}" in TRAPS]


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as opened:
        return dict(opened.metadata())


# To safetensors ------------------------------------------------------------------------------------------------------


def test_one_root(tmp_path: Path) -> None:
    file, out = make("training.pt", tmp_path), tmp_path / "out.safetensors"
    done = ckptool.convert(file, out, verify=True)
    state = load(file)["model_state_dict"]
    assert_same_objects(
        {key: state[key] for key in sorted(state)}, dict(sorted(safetensors.torch.load_file(out).items()))
    )
    assert done.summary == "9 tensors of model_state_dict (took model_state_dict, not its average ema_state_dict)"
    assert (
        done.facts["left_behind"]
        == ["model_state_dict/_metadata", *(key for key in load(file) if key != "model_state_dict")]
        and done.facts["tensors"] == 9
    )
    assert any("left out" in line and " optimizer_state_dict (" in line for line in done.details)
    assert metadata(out)["format"] == "pt"
    safetensors.torch.load_model(mlp(), str(out))


def test_the_other_root_by_name_and_several_refused(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    ckptool.convert(f"{file}#ema_state_dict", tmp_path / "ema.safetensors")
    assert torch.equal(
        safetensors.torch.load_file(tmp_path / "ema.safetensors")["fc1.weight"],
        load(file)["ema_state_dict"]["fc1.weight"],
    )
    with pytest.raises(UsageError, match=r"2 sets of model weights: generator .*, discriminator") as caught:
        ckptool.convert(make("gan.pt", tmp_path), tmp_path / "gan.safetensors")
    assert caught.value.fix.endswith("gan.pt#generator'")


@looped("dtype", DTYPES, ids=str)
def test_every_dtype_goes_to_safetensors_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    name = str(dtype).removeprefix("torch.")
    if name == "float4_e2m1fn_x2":  # packed: a scalar of it has no shape there
        with pytest.raises(Unsupported, match="scalar"):
            ckptool.convert(saved(TRAPS[f"09-{name}"](), tmp_path / "in.pt"), tmp_path / "out.safetensors")
        return
    file = saved(TRAPS[f"09-{name}"](), tmp_path / "in.pt")
    ckptool.convert(file, tmp_path / "out.safetensors", verify=True)
    before, after = load(file), safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert after.keys() == before.keys()
    assert_same_objects([before[key].contiguous() for key in before], [after[key] for key in before])


@looped(
    "name",
    [
        name
        for name in TRAPS
        if name[:2] in ("06", "07", "10", "16") and name not in ("06-expanded", "06-sliding-windows")
    ],
)
def test_strided_and_empty_tensors_are_written_in_row_major_order(name: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    done = ckptool.convert(file, tmp_path / "out.safetensors", verify=True)
    before, after = load(file), safetensors.torch.load_file(tmp_path / "out.safetensors")
    for key, tensor in before.items():
        assert after[key].shape == tensor.shape and after[key].contiguous().view(-1).tolist() == pytest.approx(
            tensor.reshape(-1).tolist(), nan_ok=True
        )
        assert after[key].numpy().tobytes() == tensor.contiguous().numpy().tobytes()
    assert list(read(tmp_path / "out.safetensors").tree) == list(before), "the order of keys is kept"
    assert done.file_bytes < 100_000


@pytest.mark.parametrize("name", ["08-conj", "08-neg", "08-neg-of-conj-imag"])
def test_lazy_views_are_resolved_and_noted(name: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    done = ckptool.convert(file, tmp_path / "out.safetensors", verify=True)
    before, after = load(file), safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert all(
        after[key].numpy().tobytes() == tensor.resolve_conj().resolve_neg().contiguous().numpy().tobytes()
        for key, tensor in before.items()
    )
    assert "resolved-views" in [note.code for note in done.notes]


@pytest.mark.parametrize("name", ["06-expanded", "06-sliding-windows"])
def test_expanded_views_are_written_out_and_noted(name: str, tmp_path: Path) -> None:
    file, out = saved(TRAPS[name](), tmp_path / "in.pt"), tmp_path / "out.safetensors"
    done = ckptool.convert(file, out, verify=True)
    assert "resolved-views" in [note.code for note in done.notes]
    before, after = load(file), safetensors.torch.load_file(out)
    assert all(after[key].numpy().tobytes() == tensor.contiguous().numpy().tobytes() for key, tensor in before.items())


# Ties ----------------------------------------------------------------------------------------------------------------


def test_ties_are_recorded_as_safetensors_save_model_does(tmp_path: Path) -> None:
    file, out = make("ties.pt", tmp_path), tmp_path / "out.safetensors"
    ckptool.convert(file, out, verify=True)
    stock = make("ties.safetensors", tmp_path)
    ours, theirs = safetensors.torch.load_file(out), safetensors.torch.load_file(stock)
    assert len(ours) == len(theirs) == len(load(file)) - 1
    recorded = {key: value for key, value in metadata(out).items() if key in load(file)}
    assert (
        len(recorded) == 1 and set(recorded.items()) <= set(recorded.items()) and next(iter(recorded.values())) in ours
    )
    model = TiedLanguageModel()
    assert safetensors.torch.load_model(model, str(out)) == (set(), [])
    assert model.head.weight is model.embed.weight
    assert_same_objects(dict(load(file)), dict(model.state_dict()))


def test_one_tensor_under_two_names_comes_back_as_two_views(tmp_path: Path) -> None:
    ckptool.convert(make("01-full-tie", tmp_path), tmp_path / "out.safetensors", verify=True)
    ckptool.convert(tmp_path / "out.safetensors", tmp_path / "back.pt", verify=True)
    after = load(tmp_path / "back.pt")
    assert after["a"].data_ptr() == after["b"].data_ptr() and list(after) == ["a", "b"]


@pytest.mark.parametrize("name", ["01-full-tie-by-view", "01-full-tie-of-parameters", "ties.pt"])
def test_ties_are_there_again_after_converting_back(name: str, tmp_path: Path) -> None:
    file, out = make(name, tmp_path), tmp_path / "out.safetensors"
    ckptool.convert(file, out, verify=True)
    ckptool.convert(out, tmp_path / "back.pt", verify=True)
    before, after = load(file), load(tmp_path / "back.pt")
    assert_same_objects(dict(before), after)  # the same storages behind the same names


def test_ties_are_copied_when_asked_for(tmp_path: Path) -> None:
    file, out = make("ties.pt", tmp_path), tmp_path / "out.safetensors"
    ckptool.convert(file, out, ties="copy", verify=True)
    assert safetensors.torch.load_file(out).keys() == load(file).keys()
    loaded = safetensors.torch.load_file(out)
    assert loaded["head.weight"].data_ptr() != loaded["embed.weight"].data_ptr()
    with pytest.raises(UsageError, match="unknown ties 'both'"):
        ckptool.convert(file, tmp_path / "b.safetensors", ties="both")


@pytest.mark.parametrize(
    "name", ["02-partial-overlap", "02-overlap-of-two-parts", "04-two-shapes", "05-transposed-tie"]
)
def test_lost_sharing_is_noted(name: str, tmp_path: Path) -> None:
    file, out = saved(TRAPS[name](), tmp_path / "in.pt"), tmp_path / "out.safetensors"
    done = ckptool.convert(file, out, verify=True)
    assert [note.code for note in done.notes] == ["sharing-lost"]
    before, after = load(file), safetensors.torch.load_file(out)
    assert all(after[key].numpy().tobytes() == tensor.contiguous().numpy().tobytes() for key, tensor in before.items())


def test_views_that_do_not_overlap_are_not_noted(tmp_path: Path) -> None:
    done = ckptool.convert(
        saved(TRAPS["03-disjoint-views"](), tmp_path / "in.pt"), tmp_path / "out.safetensors", verify=True
    )
    assert done.notes == ()


# Back, and the whole tree --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "bf16.safetensors", "ties.safetensors"])
def test_from_safetensors(name: str, tmp_path: Path) -> None:
    file, out = make(name, tmp_path), tmp_path / "out.pt"
    done = ckptool.convert(file, out, verify=True)
    assert done.container == "torch-zip" and done.facts["left_behind"] == []
    stock, ours = safetensors.torch.load_file(file), torch.load(out, weights_only=True)
    assert ours.keys() >= stock.keys() and all(
        torch.equal(ours[key], value) and ours[key].dtype is value.dtype for key, value in stock.items()
    )
    ckptool.convert(out, tmp_path / "again.safetensors", verify=True)
    again = safetensors.torch.load_file(tmp_path / "again.safetensors")
    assert again.keys() == stock.keys() and all(torch.equal(again[key], value) for key, value in stock.items())


@looped("name", KINDS, here=1 / 3)
def test_all_of_every_fixture_and_back(name: str, tmp_path: Path) -> None:
    file, there = make(name, tmp_path), tmp_path / "all.safetensors"
    done = ckptool.convert(file, there, all=True, verify=True)
    assert done.facts["left_behind"] == [] and done.facts["tensors"] > 0
    safetensors.torch.load_file(there)  # stock reads its tensors
    ckptool.convert(there, tmp_path / "back.pt", verify=True)
    assert_same_tree(read(file), read(tmp_path / "back.pt"))
    if file.suffix != ".safetensors":
        same_for_torch(file, tmp_path / "back.pt", mmap=name != "rezipped_deflated.pt")


def test_a_part_with_all_that_it_holds(tmp_path: Path) -> None:
    file, there = make("training.pt", tmp_path), tmp_path / "optimizer.safetensors"
    ckptool.convert(f"{file}#optimizer_state_dict", there, all=True, verify=True)
    ckptool.convert(there, tmp_path / "back.pt", verify=True)
    assert_same_objects(load(file)["optimizer_state_dict"], load(tmp_path / "back.pt"))


def test_all_leaves_nothing_out(tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    for options in ({"only": ["*"]}, {"exclude": ["*.bias"]}):
        with pytest.raises(UsageError, match="all=True keeps everything"):
            ckptool.convert(file, tmp_path / "out.safetensors", all=True, **options)


# Torch to torch ------------------------------------------------------------------------------------------------------


def test_what_in_place_edits_left_is_gone(tmp_path: Path) -> None:
    file = make("training_sgd.pt", tmp_path)
    before, size = load(file), file.stat().st_size
    for _ in range(3):
        ckptool.add_module(file, in_place=True)
        ckptool.strip_module(file, in_place=True, prefix="module.")
    assert file.stat().st_size > size + 5000
    ckptool.convert(file, tmp_path / "out.pt", verify=True)
    assert abs((tmp_path / "out.pt").stat().st_size - size) < 600
    assert_same_objects(before, load(tmp_path / "out.pt"))


def test_a_part(tmp_path: Path) -> None:
    file = make("training.pt", tmp_path)
    done = ckptool.convert(f"{file}#model_state_dict", tmp_path / "out.pt", verify=True)
    assert_same_objects(load(file)["model_state_dict"], load(tmp_path / "out.pt"))
    assert done.facts["tensors"] == 9 and done.file_bytes < file.stat().st_size / 2


def test_only_some_keys(tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    done = ckptool.convert(file, tmp_path / "out.pt", only=["*.weight"], exclude=["*bn*"], verify=True)
    assert list(load(tmp_path / "out.pt")) == ["module.fc1.weight", "module.fc2.weight"]
    assert (
        "module.bn.weight" in done.facts["left_behind"] and load(tmp_path / "out.pt")._metadata == load(file)._metadata
    )
    with pytest.raises(NoMatch):
        ckptool.convert(file, tmp_path / "none.pt", only=["z*"])


@pytest.mark.parametrize(
    "name", ["rezipped_deflated.pt", "old_zip.pt", "crc_off.pt", "rezipped_zip64.pt", "big_endian.pt"]
)
def test_odd_archives_become_usual_ones(name: str, tmp_path: Path) -> None:
    file, out = make(name, tmp_path), tmp_path / "out.pt"
    ckptool.convert(file, out, verify=True)
    for mmap in (False, True):
        assert_same_objects(load(file), load(out, mmap=mmap))


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("09-complex128", "w"),
        ("09-complex32", "w"),
        ("09-bits8", "w"),
        ("09-qint8-per-tensor", "quantized"),
        ("11-sparse-coo", "sparse coo"),
        ("11-nested", "nested"),
        ("11-subclass", "Tagged"),
        ("11-meta", "meta"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(name: str, what: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    with pytest.raises(Unsupported, match=f"cannot hold .*{what}"):
        ckptool.convert(file, tmp_path / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt"]


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    file = saved({"__metadata__": torch.ones(1), "a.w": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(CkptoolError) as caught:
        ckptool.convert(file, tmp_path / "out.safetensors")
    assert "__metadata__" in caught.value.what


def test_usage(tmp_path: Path) -> None:
    file = make("dp.pt", tmp_path)
    with pytest.raises(UsageError, match="convert needs an output"):
        ckptool.convert(file)
    with pytest.raises(UsageError, match="unknown container"):
        ckptool.convert(file, tmp_path / "x.onnx", container="onnx")
    value: dict[str, Any] = {"epoch": 1}
    with pytest.raises(UsageError, match="no dictionary that looks like model weights"):
        ckptool.convert(saved(value, tmp_path / "plain.pt"), tmp_path / "x.safetensors")
    ckptool.convert(
        saved({"G": weights("a.w"), "epoch": 1}, tmp_path / "g.pt"), tmp_path / "g.bin", container="safetensors"
    )
    assert list(safetensors.torch.load_file(tmp_path / "g.bin")) == ["a.w"]
