"""DeepSpeed's folders that are of two checkpoints, incomplete, or made to mislead: a named error, nothing written.

What befalls a file as a whole (cut, empty, another rank's) is in tests/test_engine_folders.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Conflict, Corrupt, Unsupported
from tests.support.deepspeed_folders import optimizer_file, write_zero, zero_weights
from tests.support.engine_cases import ROOT
from tests.support.looped import looped

Change = Callable[[int, dict[str, Any], dict[str, Any]], Any]
STATES = "mp_rank_00_model_states.pt"


def _refused(folder: Path, kind: type[CkptoolError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        ckptool.convert(folder, folder.parent / "out.safetensors")
    assert caught.type is kind and all(word in str(caught.value) for word in words), caught.value
    assert caught.value.why
    assert not [path for path in folder.parent.iterdir() if "out" in path.name]


def states(do: Callable[[dict[str, Any]], Any], *ranks: int) -> Change:
    """A change of the model states that these ranks saved; of all without any."""
    return lambda rank, states, _: do(states) if rank in (ranks or (rank,)) else None


def share(do: Callable[[dict[str, Any]], Any], *ranks: int) -> Change:
    return lambda rank, _, share: do(share) if rank in (ranks or (rank,)) else None


def _base(share: dict[str, Any]) -> dict[str, Any]:
    return share.get("base_optimizer_state") or share["optimizer_state_dict"]


def _state(share: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _base(share)["state"][0]
    return found


def _flat(share: dict[str, Any]) -> list[torch.Tensor]:
    return share.get("single_partition_of_fp32_groups") or share["fp32_flat_groups"]


def _cut(share: dict[str, Any]) -> None:
    flat = _flat(share)
    flat[0] = flat[0][:-1].clone()


def _longer(share: dict[str, Any]) -> None:
    _flat(share)[0] = torch.zeros(99)
    _base(share)["state"] = {}


def _shapes(group: int, **shapes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda states: states["param_shapes"][group].update({k.replace("_", "."): v for k, v in shapes.items()})


def _frozen(rank: int, states: dict[str, Any], _: dict[str, Any]) -> None:
    pieces = {"still": torch.zeros(3)} if rank else {}
    states.update(frozen_param_shapes={"still": (5,)}, frozen_param_fragments=pieces)


def _experts(share: dict[str, Any]) -> None:
    """A group that is divided over some of the ranks."""
    share["partition_count"] = [2, 1]
    _flat(share)[1] = torch.zeros(8)
    _base(share)["state"].pop(1)


class FragmentAddress:
    """As `deepspeed.utils.tensor_fragment.fragment_address`."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


ELSEWHERE = {"param_slice_mappings": [{"embed.weight": FragmentAddress(20, 1)}, {}]}
# The stage, what the ranks save, the error and its words.
MIXED: dict[str, tuple[int, Change, type[CkptoolError], str]] = {
    "another step of the optimizer": (2, share(lambda s: _state(s).update(step=torch.tensor(7.0)), 1), Conflict,
        "step of group 0 of the optimizer differs"),
    "a step as a number": (3, share(lambda s: _state(s).update(step=7), 1), Conflict, "optimizer differs"),
    "another learning rate": (3, share(lambda s: _base(s)["param_groups"][0].update(lr=0.3), 1), Conflict,
        "learning rate or another setting differs"),
    "another step of the model": (3, states(lambda s: s.update(global_steps=4), 1), Conflict, "step differs: 2 and 4"),
    "another world": (2, share(lambda s: s.update(partition_count=[4, 4]), 1), Conflict, "division over"),
    "a larger world": (3, share(lambda s: s.update(partition_count=4)), Corrupt, "lacks the files of 2 ranks"),
    "a smaller world": (2, share(lambda s: s.update(partition_count=[1, 1])), Conflict, "1 rank beyond the 1"),
    "a huge world": (3, share(lambda s: s.update(partition_count=1 << 31)), Corrupt, "lacks the files"),
    "no world": (2, share(lambda s: s.update(partition_count=-1)), Corrupt, "over how many ranks"),
    "another stage": (2, share(lambda s: s.update(zero_stage=1), 1), Conflict, "ZeRO stage differs: 2 and 1"),
    "other shapes": (3, states(_shapes(0, scale=torch.Size([2])), 1), Conflict, "list of parameters differs"),
    "fewer elements than the shapes have": (3, share(_cut), Corrupt, "of the ranks' vectors"),
    "fewer elements in one rank": (3, share(_cut, 1), Conflict, "length of vectors differs"),
    "more elements than the shapes have": (2, share(_longer), Corrupt, "of the ranks' vectors"),
    "a huge shape": (2, states(_shapes(0, scale=(1 << 40, 1 << 40)), 0), Corrupt, ""),
    "a shape that is none": (2, states(_shapes(0, scale=(-1,)), 0), Corrupt, "no names and shapes"),
    "one name in two groups": (2, states(_shapes(1, wide_bias=(4,), scale=(1,)), 0), Corrupt, "in two groups"),
    "groups that are not there": (2, states(lambda s: s["param_shapes"].pop(), 0), Conflict, "1 group"),
    "no vectors": (2, share(lambda s: s.pop("single_partition_of_fp32_groups"), 1), Corrupt, "no f32"),
    "moments of another length": (2, share(lambda s: _state(s).update(exp_avg=torch.zeros(3)), 1), Corrupt,
        "has no exp_avg for all of group 0"),
    "a moment that one rank lacks": (3, share(lambda s: _state(s).pop("exp_avg"), 1), Corrupt, "has no exp_avg"),
    "pieces that lie elsewhere": (2, share(lambda s: s.update(ELSEWHERE), 0), Conflict, "embed.weight lies elsewhere"),
    "a weight without values": (3, states(lambda s: s["module"].update({"lost.weight": torch.empty(0)}), 0), Corrupt,
        "no values of 1 weight: lost.weight"),
    "a frozen piece that one rank lacks": (3, _frozen, Corrupt, "still"),
    "no module": (2, states(lambda s: s.pop("module"), 0), Corrupt, "has no `module`"),
    "AutoEP": (2, states(lambda s: s.update(ds_autoep_layers=[{}]), 0), Unsupported, "AutoEP"),
    "experts under other names": (2, share(_experts), Unsupported, "is no expert of deepspeed.moe"),
    "no expert of two": (2, states(lambda s: s.update(num_experts=[2])), Corrupt, "0 of 2 experts in layer 0"),
}  # fmt: skip


@looped("kind", MIXED)
def test_what_is_not_one_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    stage, change, error, words = MIXED[kind]
    _refused(write_zero(tmp_path / "global_step2", stage, 2, change=change), error, words)


def copied(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / old, folder / new)


def without(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def saved(name: str, tree: Any) -> Callable[[Path], object]:
    return lambda folder: torch.save(tree, folder / name)


def of_a_larger_world(folder: Path) -> None:
    write_zero(folder, 3, 4)
    write_zero(folder, 3, 2)


# The stage, what is done to the folder of two ranks, the error and its words.
FILES: dict[str, tuple[int, Callable[[Path], object], type[CkptoolError], tuple[str, ...]]] = {
    "no share of a rank": (2, without(optimizer_file(1)), Corrupt, ("lacks the files of 1 rank of 2: rank 1",)),
    "no model of a rank": (3, without(f"zero_pp_rank_1_{STATES}"), Corrupt, ("rank 1",)),
    "no shares": (3, without(*map(optimizer_file, range(2))), Corrupt,
        ("has no values of 5 weights", "*_optim_states.pt")),
    "no model states": (2, without(STATES), Corrupt, (f"lacks {STATES}",)),
    "of a larger world": (3, of_a_larger_world, Conflict, ("two checkpoints",)),
    "a rank's own under another's name": (3, copied(optimizer_file(0), optimizer_file(1)), Conflict, ("saved as",)),
    "two files of one rank": (3, copied(optimizer_file(1), f"bf16_{optimizer_file(1)}"), Conflict,
        ("both are of one rank",)),
    "tensor parallelism": (2, saved("mp_rank_01_model_states.pt", {"module": {}}), Unsupported,
        (STATES, "ds_to_universal")),
    "its layers": (2, saved("layer_03-model_01-model_states.pt", {}), Unsupported,
        ("layer_03-model_01", "ds_to_universal")),
    "an expert that is none": (2, saved("layer_0_expert_0_mp_rank_00_model_states.pt", [1]), Corrupt,
        ("layer_0_expert_0",)),
}  # fmt: skip


@looped("kind", FILES)
def test_files_that_are_missing_or_do_not_belong_there_are_named(kind: str, tmp_path: Path) -> None:
    stage, do, error, words = FILES[kind]
    do(folder := write_zero(tmp_path / "global_step2", stage, 2))
    _refused(folder, error, *words)


@looped("tag", ["../other", "/etc", ".", "..", "", "a/b", "global_step9", "global_step2\0", "x" * 5_000])
def test_latest_leads_only_to_a_folder_inside(tag: str, tmp_path: Path) -> None:
    write_zero(tmp_path / "other", 2, 1)
    folder = tmp_path / "run"
    write_zero(folder / "global_step2", 2, 1)
    (folder / "latest").write_text(tag)
    with pytest.raises(CkptoolError, match="latest"):
        ckptool.open(folder)


@looped(
    ("name", "words"),
    [
        ("mp_rank_01_model_states.pt", "lacks mp_rank_01_model_states.pt"),
        ("*mp_rank_01_*", "rank 1"),
        ("bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", "lacks the files of 1 rank of 2"),
        ("layer_00-model_states.pt", "lacks tied_modules.embed.weight"),
        ("layer_03-model_states.pt", "lacks 3.weight"),
        ("layer_04-model_states.pt", "lacks 4.places"),
    ],
)
def test_a_pipeline_lacks_no_stage_and_no_layer(name: str, words: str, tmp_path: Path) -> None:
    whole = ROOT / "deepspeed-pipeline" / "checkpoint" / "global_step2"
    folder = Path(shutil.copytree(whole, tmp_path / "global_step2"))
    for path in folder.glob(name):
        path.unlink()
    _refused(folder, Corrupt, words)


def test_names_of_a_universal_folder_never_lead_outside(tmp_path: Path) -> None:
    outside = states(lambda s: s["param_shapes"][0].update({"../../secret": torch.Size([1])}))
    folder = write_zero(tmp_path / "global_step2_universal", 2, 1, change=outside)
    (folder / optimizer_file(0)).unlink()
    for place, value in {**{f"zero/{n}": v for n, v in zero_weights().items()}, "../secret": torch.zeros(1)}.items():
        (folder / place).mkdir(parents=True)
        torch.save({"param": value}, folder / place / "fp32.pt")
    _refused(folder, Corrupt, "lacks 1 parameter: ../../secret")
