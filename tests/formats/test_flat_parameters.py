"""FSDP1's flat parameters: said for what they are, and taken apart by the shapes of a spec or a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.ranks import save_on_two_ranks

# Two wrapped modules, padded and not, as their parameters were kept and as those of the user.
SAVE = """
    import torch.nn as nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

    def save(rank, folder, mesh):
        for original in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 1)))
            torch.save(model.state_dict(), f"{folder}/weights.pt")
            model[2] = FSDP(model[2], device_id=torch.device("cpu"), use_orig_params=original)
            model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=original)
            os.makedirs(f"{folder}/{original}", exist_ok=True)
            with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                torch.save(model.state_dict(), f"{folder}/{original}/pytorch_model_fsdp_rank{rank}.bin")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat")
    save_on_two_ranks(SAVE, folder, folder)
    ckptool.spec(folder / "weights.pt", folder / "model.json")
    weights = torch.load(folder / "weights.pt", weights_only=True)
    save_file(weights, folder / "weights.safetensors")
    ckptool.spec(folder / "weights.safetensors", folder / "sorted.json")
    return folder


@pytest.mark.parametrize("original", ["False", "True"])
def test_flat_parameters_are_said_to_be_what_they_are(original: str, saved: Path, run: Run) -> None:
    error = refused("unsupported", saved, lambda: ckptool.open(saved / original))
    assert "LOCAL_STATE_DICT" in error.what and "--against" in str(error.fix)
    assert run("scan", str(saved / original)).code == 1


@pytest.mark.parametrize("against", ["weights.safetensors", "sorted.json"])
def test_names_that_safetensors_sorted_are_refused_where_the_files_have_none(
    against: str, saved: Path, tmp_path: Path
) -> None:
    """They add up, and every value would be another's."""

    def convert(original: str) -> None:
        ckptool.convert(saved / original, tmp_path / "out.pt", against=saved / against)

    assert "order of their names" in refused("conflict", tmp_path, lambda: convert("False")).what
    convert("True")  # the files have the names, in the model's order
    found = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    weights = torch.load(saved / "weights.pt", weights_only=True)
    assert all(found[name].equal(value) for name, value in weights.items())


def test_shapes_that_do_not_add_up_are_refused(saved: Path, tmp_path: Path) -> None:
    weights = torch.load(saved / "weights.pt", weights_only=True)
    wrong = {
        "too large": {**weights, "0.weight": torch.empty(7, 6)},
        "too small": {**weights, "0.weight": torch.empty(3, 6)},
        "one too many": {**weights, "3.weight": torch.empty(2)},
        "one missing": {name: value for name, value in weights.items() if name != "1.bias"},
        "another module": {name.replace("2.", "3."): value for name, value in weights.items()},
    }
    for tree in wrong.values():
        torch.save(tree, tmp_path / "wrong.pt")
        for original in ("False", "True"):
            refused("conflict", tmp_path, lambda folder=saved / original: ckptool.convert(
                folder, tmp_path / "out.pt", against=tmp_path / "wrong.pt"))  # fmt: skip


def test_against_is_about_flat_parameters_alone(saved: Path, tmp_path: Path, run: Run) -> None:
    model = tmp_path / "ranks"
    model.mkdir()
    for rank in range(2):
        torch.save({"a.weight": torch.ones(3)}, model / f"model_world_size_2_rank_{rank}.pt")
    for file in (model, saved / "weights.pt"):
        done = run("convert", str(file), "--against", str(saved / "model.json"), "-o", str(tmp_path / "out.pt"))
        assert done.code == 2 and "--against" in done.err
