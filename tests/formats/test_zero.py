"""Folders of ZeRO with groups of any shapes, and what only some of the files in them say."""

from __future__ import annotations

import enum
import shutil
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptool
from tests.support.cli import Run
from tests.support.deepspeed_folders import MOMENTS, piece_of, random_shapes, verdict, write_zero, zero_weights
from tests.support.engine_cases import ROOT


def add_frozen(still: torch.Tensor, world: int, rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
    of_rank, copy = still, still
    if share["zero_stage"] == 3:
        of_rank, copy = piece_of(still.flatten(), rank, world), still.new_empty(0)
    states |= {"frozen_param_shapes": {"still": still.shape}, "frozen_param_fragments": {"still": of_rank}}
    states["module"]["still"] = copy


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 500), marks=pytest.mark.soak)], ids=str)
def test_groups_of_any_shapes_on_any_number_of_ranks(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        random = Random(seed)
        stage, world, shapes = random.choice([1, 2, 3]), random.randint(1, 5), random_shapes(random)
        model, still = zero_weights(seed, shapes), torch.randn(random.choice([(3,), (2, 4), ()])).bfloat16()
        more = partial(add_frozen, still, world)
        folder = write_zero(tmp_path / f"{seed}" / "global_step2", stage, world, model, more, shapes)
        assert ckptool.verify(folder).fine, seed
        ckptool.convert(folder, out := tmp_path / f"{seed}.pt", all=True)
        tree = torch.load(out, weights_only=True)
        assert all(torch.equal(tree["module"][name], value) for name, value in (model | {"still": still}).items()), seed
        for key, factor in MOMENTS.items():
            kept = {name: slots[key] for name, slots in tree["optimizer"]["state"].items()}
            assert all(torch.equal(kept[name], value * factor) for name, value in model.items()), seed


class Stage(enum.Enum):
    weights = 3

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (Stage, self.name)


def by_name(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
    share["zero_stage"] = Stage.weights


def test_a_stage_that_is_saved_by_its_name(tmp_path: Path) -> None:
    """As Python 3.11.0 to 3.11.3 pickle members of an enum."""
    folder = write_zero(tmp_path / "global_step2", 3, 2, change=by_name)
    found = ckptool.open(folder)
    assert all(torch.equal(found["module"][name].torch(), value) for name, value in zero_weights().items())


def older(kind: str, rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
    if kind == "no shapes":
        del states["param_shapes"]
        share.pop("param_slice_mappings", None)
    if kind == "sub-partitions":
        vectors = share.pop("single_partition_of_fp32_groups")
        share["local_sub_partitions_of_fp32_groups"] = [[*vector.chunk(2)] for vector in vectors]


@pytest.mark.parametrize(("kind", "stage"), [("named", 2), ("no shapes", 2), ("no shapes", 3), ("sub-partitions", 1)])
def test_what_early_versions_saved_is_read_or_told(kind: str, stage: int, tmp_path: Path, run: Run) -> None:
    """Up to 0.3.13 there was no `_` before `optim_states`."""
    folder = write_zero(tmp_path / "global_step2", stage, 2, change=partial(older, kind))
    for path in folder.glob("*_optim_states.pt"):
        torch.save(torch.load(path), path.with_name(path.name.replace("_optim", "optim")))
        path.unlink()
    told = run("convert", str(folder), "-o", str(tmp_path / "out.pt"))
    if kind == "named":
        assert told.code == 0 and "no-optimizer-files" not in told.out + told.err, told
        return
    assert told.code == 2 and "error[unsupported]" in told.err and "Early versions" in told.err, told
    own = f"convert {folder}/mp_rank_00_model_states.pt"
    assert (own in told.err) == (stage < 3)
    assert stage == 3 or run(*own.split(), "-o", str(tmp_path / "out.pt")).code == 0


def test_a_trained_parameter_keeps_its_own_values_whatever_it_is_said_to_be_tied_to(tmp_path: Path) -> None:
    def tied(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
        states["shared_params"] = {"wide.weight": "scale", "head": "scale"}

    module = ckptool.open(write_zero(tmp_path / "global_step2", 2, 2, change=tied))["module"]
    assert torch.equal(module["wide.weight"].torch(), zero_weights()["wide.weight"])
    assert module["head"].view == module["scale"].view


def test_every_file_of_a_universal_folder_counts(tmp_path: Path) -> None:
    """Each is missed, and the model's own copies are compared."""
    folder = Path(shutil.copytree(ROOT / "deepspeed-universal2" / "checkpoint", tmp_path / "u"))
    for path in sorted(folder.glob("*/zero/**/*.pt")):
        if path.parent.name in ("head.weight", "places", "still"):
            continue  # which are in the model states
        kept = path.read_bytes()
        path.unlink()
        assert "lacks" in (said := verdict(folder, tmp_path / "out.pt")) or "has no tensor in" in said, path
        if path.name in ("fp32.pt", "exp_avg.pt", "step.pt"):
            torch.save(value := 2 if path.name == "step.pt" else "text", path)
            said = verdict(folder, tmp_path / "out.pt")
            assert (f"has no tensor in {path.name}" in said) == (value == "text"), (path, said)
        path.write_bytes(kept)
    assert ckptool.open(folder)["module"]["wide.bias"].flags.requires_grad
    (file,) = folder.glob("*/mp_rank_*.pt")
    module = (tree := torch.load(file))["module"]
    module["wide.bias"] += 1
    torch.save(tree, file)
    assert "wide.bias: " in verdict(folder, tmp_path / "out.pt")
