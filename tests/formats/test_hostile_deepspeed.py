"""DeepSpeed's folders that are of two checkpoints, incomplete, or made to mislead: a named error, nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Conflict, Corrupt, Truncated, Unsupported
from tests.support.deepspeed_folders import optimizer_file, write_zero, zero_weights
from tests.support.engine_cases import ROOT
from tests.support.looped import looped

Change = Callable[[int, dict[str, Any], dict[str, Any]], None]


def _refused(folder: Path, kind: type[CkptoolError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        ckptool.convert(folder, folder.parent / "out.safetensors")
    assert caught.type is kind and all(word in str(caught.value) for word in words), caught.value
    assert caught.value.why
    assert not [path for path in folder.parent.iterdir() if "out" in path.name]


def _of_rank(rank: int, do: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Change:
    return lambda number, states, share: do(states, share) if number == rank else None


def _base(share: dict[str, Any]) -> dict[str, Any]:
    return share.get("base_optimizer_state") or share["optimizer_state_dict"]


def _flat(share: dict[str, Any]) -> list[torch.Tensor]:
    return share.get("single_partition_of_fp32_groups") or share["fp32_flat_groups"]


def _cut(share: dict[str, Any]) -> None:
    flat = _flat(share)
    flat[0] = flat[0][:-1].clone()


def _slice_elsewhere(states: dict[str, Any], share: dict[str, Any]) -> None:
    share["param_slice_mappings"] = [{"embed.weight": FragmentAddress(20, 1)}, {}]


class FragmentAddress:
    """As `deepspeed.utils.tensor_fragment.fragment_address`."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


MIXED: dict[str, tuple[int, Change, type[CkptoolError], str]] = {
    "another step of the optimizer": (
        2,
        _of_rank(1, lambda _, share: _base(share)["state"][0].update(step=torch.tensor(7.0))),
        Conflict,
        "step of group 0 of the optimizer differs",
    ),
    "a step as a number": (
        3,
        _of_rank(1, lambda _, share: _base(share)["state"][0].update(step=7)),
        Conflict,
        "optimizer differs",
    ),
    "another learning rate": (
        3,
        _of_rank(1, lambda _, share: _base(share)["param_groups"][0].update(lr=0.3)),
        Conflict,
        "learning rate or another setting differs",
    ),
    "another step of the model": (
        3,
        _of_rank(1, lambda states, _: states.update(global_steps=4)),
        Conflict,
        "step differs: 2 and 4",
    ),
    "another world": (2, _of_rank(1, lambda _, share: share.update(partition_count=[4, 4])), Conflict, "division over"),
    "a larger world": (3, lambda _r, _s, share: share.update(partition_count=4), Corrupt, "lacks the files of 2 ranks"),
    "a smaller world": (2, lambda _r, _s, share: share.update(partition_count=[1, 1]), Conflict, "beyond the 1"),
    "a huge world": (3, lambda _r, _s, share: share.update(partition_count=1 << 31), Corrupt, "lacks the files"),
    "no world": (2, lambda _r, _s, share: share.update(partition_count=-1), Corrupt, "over how many ranks"),
    "another stage": (
        2,
        _of_rank(1, lambda _, share: share.update(zero_stage=1)),
        Conflict,
        "ZeRO stage differs: 2 and 1",
    ),
    "other shapes": (
        3,
        _of_rank(1, lambda states, _: states["param_shapes"][0].update({"scale": torch.Size([2])})),
        Conflict,
        "list of parameters differs",
    ),
    "fewer elements than the shapes have": (3, lambda _r, _s, share: _cut(share), Corrupt, "of the ranks' vectors"),
    "fewer elements in one rank": (3, _of_rank(1, lambda _, share: _cut(share)), Conflict, "length of vectors differs"),
    "more elements than the shapes have": (
        2,
        lambda _r, _s, share: _flat(share).__setitem__(0, torch.zeros(99)),
        Corrupt,
        "group 0",
    ),
    "a huge shape": (
        2,
        _of_rank(0, lambda states, _: states["param_shapes"][0].update({"scale": (1 << 40, 1 << 40)})),
        Corrupt,
        "",
    ),
    "a shape that is none": (
        2,
        _of_rank(0, lambda states, _: states["param_shapes"][0].update({"scale": (-1,)})),
        Corrupt,
        "no names and shapes",
    ),
    "one name in two groups": (
        2,
        _of_rank(0, lambda states, _: states["param_shapes"][1].update({"wide.bias": (4,), "scale": (1,)})),
        Corrupt,
        "in two groups",
    ),
    "groups that are not there": (2, _of_rank(0, lambda states, _: states["param_shapes"].pop()), Conflict, "1 group"),
    "no vectors": (2, _of_rank(1, lambda _, share: share.pop("single_partition_of_fp32_groups")), Corrupt, "no f32"),
    "moments of another length": (
        2,
        _of_rank(1, lambda _, share: _base(share)["state"][0].update(exp_avg=torch.zeros(3))),
        Corrupt,
        "has no exp_avg for all of group 0",
    ),
    "a moment that one rank lacks": (
        3,
        _of_rank(1, lambda _, share: _base(share)["state"][0].pop("exp_avg")),
        Corrupt,
        "has no exp_avg",
    ),
    "pieces that lie elsewhere": (2, _of_rank(0, _slice_elsewhere), Conflict, "embed.weight lies elsewhere"),
    "a weight without values": (
        3,
        _of_rank(0, lambda states, _: states["module"].update({"lost.weight": torch.empty(0)})),
        Corrupt,
        "no values of 1 weight: lost.weight",
    ),
    "a frozen piece that one rank lacks": (
        3,
        lambda rank, states, _: states.update(
            frozen_param_shapes={"still": (5,)}, frozen_param_fragments={"still": torch.zeros(3)} if rank else {}
        ),
        Corrupt,
        "still",
    ),
    "no module": (2, _of_rank(0, lambda states, _: states.pop("module")), Corrupt, "has no `module`"),
    "AutoEP": (2, _of_rank(0, lambda states, _: states.update(ds_autoep_layers=[{}])), Unsupported, "AutoEP"),
    "experts under other names": (
        2,
        lambda _r, _s, share: (
            share.update(partition_count=[2, 1]),
            _flat(share).__setitem__(1, torch.zeros(8)),
            _base(share)["state"].pop(1),
        ),
        Unsupported,
        "is no expert of deepspeed.moe",
    ),
}


@looped("kind", MIXED)
def test_what_is_not_one_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    stage, change, error, words = MIXED[kind]
    _refused(write_zero(tmp_path / "global_step2", stage, 2, change=change), error, words)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank_is_named(stage: int, rank: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "global_step2", stage, 3)
    (folder / optimizer_file(rank)).unlink()
    _refused(folder, Corrupt, f"lacks the files of 1 rank of 3: rank {rank}")


def test_a_missing_rank_of_the_model_is_named(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "global_step2", 3, 3)
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    _refused(folder, Corrupt, "rank 1")


def test_stage_3_without_its_optimizer_has_no_weights(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "global_step2", 3, 2)
    for rank in range(2):
        (folder / optimizer_file(rank)).unlink()
    _refused(folder, Corrupt, "has no values of 5 weights", "*_optim_states.pt")


def test_the_model_states_are_needed(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "global_step2", 2, 2)
    (folder / "mp_rank_00_model_states.pt").unlink()
    _refused(folder, Corrupt, "lacks mp_rank_00_model_states.pt")


def test_ranks_left_from_a_larger_world_are_named(tmp_path: Path) -> None:
    write_zero(tmp_path / "global_step2", 3, 4)
    folder = write_zero(tmp_path / "global_step2", 3, 2)
    _refused(folder, Conflict, "two checkpoints")
    for rank in (2, 3):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
        torch.save(torch.load(folder / optimizer_file(1), weights_only=False), folder / optimizer_file(rank))
    _refused(folder, Conflict, "files of 2 ranks beyond the 2 that saved it: rank 2, rank 3")


def test_files_of_ranks_that_were_exchanged_or_copied_are_named(tmp_path: Path) -> None:
    """Nothing in a share of ZeRO says whose it is, but the name that torch gave its zip."""
    folder = write_zero(tmp_path / "global_step2", 3, 2)
    one, other = folder / optimizer_file(0), folder / optimizer_file(1)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    _refused(folder, Conflict, f"was saved as {other.name}")
    other.write_bytes(kept)
    _refused(folder, Conflict, f"was saved as {other.name}")


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "global_step2", 3, 2)
    (folder / f"bf16_{optimizer_file(1)}").write_bytes((folder / optimizer_file(1)).read_bytes())
    _refused(folder, Conflict, "both are of one rank")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("left", [0, 100, -60])
def test_a_file_that_was_cut_off_is_named(stage: int, left: int, tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "global_step2", stage, 2)
    path = folder / optimizer_file(1)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CkptoolError) as caught:
        ckptool.open(folder)
    assert path.name in str(caught.value)
    if not left:
        assert caught.type is Truncated


@pytest.mark.parametrize(
    "tag", ["../other", "/etc", ".", "..", "", "a/b", "global_step9", "global_step2\0", "x" * 5_000]
)
def test_latest_leads_only_to_a_folder_inside(tag: str, tmp_path: Path) -> None:
    write_zero(tmp_path / "other", 2, 1)
    folder = tmp_path / "run"
    write_zero(folder / "global_step2", 2, 1)
    (folder / "latest").write_text(tag)
    with pytest.raises(CkptoolError, match="latest"):
        ckptool.open(folder)


def test_tensor_parallelism_is_refused_with_the_way_to_read_it(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "two" / "global_step2", 2, 2)
    states = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    torch.save(states, folder / "mp_rank_01_model_states.pt")
    _refused(folder, Unsupported, "mp_rank_00_model_states.pt", "ds_to_universal")
    folder = write_zero(tmp_path / "layers" / "global_step2", 2, 2)
    torch.save({}, folder / "layer_03-model_01-model_states.pt")
    _refused(folder, Unsupported, "layer_03-model_01", "ds_to_universal")


def test_a_pipeline_lacks_no_stage_and_no_layer(tmp_path: Path) -> None:
    whole = ROOT / "deepspeed-pipeline" / "checkpoint" / "global_step2"
    for number, (name, words) in enumerate(
        {
            "mp_rank_01_model_states.pt": "lacks mp_rank_01_model_states.pt",
            "*_mp_rank_01_*": "rank 1",
            "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt": "lacks the files of 1 rank of 2",
            "layer_00-model_states.pt": "lacks tied_modules.embed.weight",
            "layer_03-model_states.pt": "lacks 3.weight",
            "layer_04-model_states.pt": "lacks 4.places",
        }.items()
    ):
        folder = Path(shutil.copytree(whole, tmp_path / f"{number}" / "global_step2"))
        for path in [*folder.glob(name), *([folder / "mp_rank_01_model_states.pt"] if "*" in name else [])]:
            path.unlink(missing_ok=True)
        _refused(folder, Corrupt, words)


def test_experts_that_other_files_lack_are_refused(tmp_path: Path) -> None:
    folder = write_zero(tmp_path / "global_step2", 2, 2)
    torch.save([1], folder / "layer_0_expert_0_mp_rank_00_model_states.pt")
    _refused(folder, Corrupt, "layer_0_expert_0")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    def experts(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
        states["num_experts"] = [2]

    folder = write_zero(tmp_path / "global_step2", 2, 2, change=experts)
    _refused(folder, Corrupt, "0 of 2 experts in layer 0")
    torch.save({}, folder / "layer_0_expert_1_mp_rank_00_model_states.pt")
    _refused(folder, Corrupt, "1 of 2 experts in layer 0")


def test_names_of_a_universal_folder_never_lead_outside(tmp_path: Path) -> None:
    def outside(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
        states["param_shapes"][0]["../../secret"] = torch.Size([1])

    folder = write_zero(tmp_path / "global_step2_universal", 2, 1, change=outside)
    (folder / optimizer_file(0)).unlink()
    for name, value in zero_weights().items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": value}, folder / "zero" / name / "fp32.pt")
    (tmp_path / "secret").mkdir()
    torch.save({"param": torch.zeros(1)}, tmp_path / "secret" / "fp32.pt")
    _refused(folder, Corrupt, "lacks 1 parameter: ../../secret")
