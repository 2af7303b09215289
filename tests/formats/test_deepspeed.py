"""DeepSpeed's folders beyond those that it wrote for `fixtures/engines`: other worlds, padding, options, large ones."""

from __future__ import annotations

import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.support.cli import Run
from tests.support.deepspeed_folders import MOMENTS, optimizer_file, write_zero, zero_weights
from tests.support.engine_cases import ROOT


def _tree(folder: Path) -> dict[str, Any]:
    tree = ckptool.open(folder).tree
    assert isinstance(tree, dict)
    return tree


def test_every_parameter_has_a_step_of_its_own(tmp_path: Path) -> None:
    """Torch's optimizers add to it in place."""
    write_zero(tmp_path / "global_step2", 2, 2)
    ckptool.convert(tmp_path / "global_step2", tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"]
    assert len({slots["step"].data_ptr() for slots in state.values()}) == len(state)


def test_a_parameter_of_stage_3_may_lie_in_two_vectors(tmp_path: Path) -> None:
    def cut(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
        one, other = share["fp32_flat_groups"]
        share["fp32_flat_groups"] = [one[:4].clone(), torch.cat([one[4:], other])]
        state = share["optimizer_state_dict"]["state"]
        for key in MOMENTS:
            one, other = state[0][key], state[1][key]
            state[0][key], state[1][key] = one[:4].clone(), torch.cat([one[4:], other])

    tree = _tree(write_zero(tmp_path / "global_step2", 3, 2, change=cut))
    for name, value in zero_weights().items():
        assert torch.equal(tree["module"][name].torch(), value)
        assert torch.equal(tree["optimizer"]["state"][name]["exp_avg"].torch(), value * 2)


def test_parameters_that_are_aligned_are_cut_without_their_padding(tmp_path: Path) -> None:
    """`zero_optimization.parameter_alignment`: unused elements lie behind each parameter but the last."""
    model = zero_weights()
    paddings = [[3, 1, 0], [3, 0]]

    def align(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
        vectors = []
        for group, names in enumerate(states["param_shapes"]):
            rows = [
                torch.cat([model[name].flatten(), torch.full((behind,), 9e9)])
                for name, behind in zip(names, paddings[group], strict=True)
            ]
            vectors.append(torch.cat(rows))
        share |= {"single_partition_of_fp32_groups": vectors, "param_alignment_paddings": paddings}
        share["base_optimizer_state"] = {"state": {}, "param_groups": []}

    tree = _tree(write_zero(tmp_path / "global_step2", 2, 1, change=align))
    assert all(torch.equal(tree["module"][name].torch(), value) for name, value in model.items())


def test_frozen_parameters_buffers_and_ties_are_as_they_were_saved(tmp_path: Path) -> None:
    frozen = torch.arange(5).bfloat16()

    def more(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
        states["module"] |= {"still": torch.empty(0, dtype=torch.bfloat16), "head.weight": torch.empty(0)}
        states["frozen_param_shapes"] = {"still": torch.Size([5])}
        states["frozen_param_fragments"] = {"still": torch.cat([frozen, frozen[:1]])[rank * 3 : rank * 3 + 3].clone()}
        states["shared_params"] = {"head.weight": "embed.weight"} if rank == 0 else {}
        states["module"]["mean"] = torch.full((2,), float(rank))
        states["buffer_names"] = ["places", "mean"]

    checkpoint = ckptool.open(write_zero(tmp_path / "global_step2", 3, 2, change=more))
    module = checkpoint.tree["module"]
    assert torch.equal(module["still"].torch(), frozen) and module["still"].dtype.name == "bf16"
    assert module["head.weight"].view == module["embed.weight"].view
    assert module["mean"].torch().tolist() == [0, 0] and module["places"].dtype.name == "i64"
    (note,) = [note for note in checkpoint.notes if note.code == "replicas-differ"]
    assert "mean (rank 0's value is taken, rank 1's is another)" in note.message


def test_the_copies_in_bf16_are_told_of_and_their_checksums_are_verified(tmp_path: Path, run: Run) -> None:
    folder = write_zero(tmp_path / "global_step2", 2, 2)
    (note,) = [note for note in ckptool.open(folder).notes if note.code == "copies-not-shown"]
    assert "5 weights" in note.message and "(bf16) are compared with them" in note.message
    done = run("verify", str(folder))
    assert done.code == 0 and "copies-not-shown" in done.out
    path = folder / "mp_rank_00_model_states.pt"
    data = bytearray(path.read_bytes())
    at = data.index(zero_weights()["wide.weight"].bfloat16().view(torch.uint8).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    done = run("verify", str(folder))
    assert done.code == 1 and "damaged, 2 problems" in done.out  # its checksum, and the values that differ


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_byte_in_a_share_is_found_by_verify(rank: int, tmp_path: Path, run: Run) -> None:
    folder = write_zero(tmp_path / "global_step2", 3, 2)
    path = folder / optimizer_file(rank)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2") - 400
    while not data[at]:
        at -= 1
    data[at] ^= 1
    path.write_bytes(data)
    assert run("verify", str(folder)).code != 0


def test_latest_chooses_among_tags_and_the_others_are_scanned_too(tmp_path: Path) -> None:
    write_zero(tmp_path / "run" / "global_step2", 2, 2)
    write_zero(tmp_path / "run" / "global_step4", 2, 2, zero_weights(1))
    (tmp_path / "run" / "latest").write_text("global_step4\n")
    found = ckptool.open(tmp_path / "run")
    assert torch.equal(found.tree["module"]["scale"].torch(), zero_weights(1)["scale"])
    assert "global_step2" not in found.tree and "other-tags" in [note.code for note in found.notes]
    ckptool.convert(tmp_path / "run", tmp_path / "out.safetensors")
    rows = [Path(row.path).name for row in ckptool.scan(tmp_path / "run").files]
    assert rows == ["run", "global_step2"]
    (tmp_path / "run" / "latest").unlink()
    with pytest.raises(ckptool.CkptoolError, match="holds 2 checkpoints of DeepSpeed"):
        ckptool.open(tmp_path / "run")


def test_a_folder_and_its_conversion_by_hand_are_the_same(tmp_path: Path, run: Run) -> None:
    folder = write_zero(tmp_path / "global_step2", 3, 3)
    module = zero_weights() | {"places": torch.arange(4)}
    torch.save(module, tmp_path / "whole.pt")
    done = run("diff", str(folder), str(tmp_path / "whole.pt"))
    assert done.code == 0, done


def test_many_ranks_open_in_bounded_time(tmp_path: Path) -> None:
    """Two files a rank; each of most ranks is a link to one of the first, as their contents do not matter here."""
    folder = write_zero(tmp_path / "global_step2", 3, 400)
    began = time.monotonic()
    tree = _tree(folder)
    assert time.monotonic() - began < 60
    assert torch.equal(tree["module"]["wide.bias"].torch(), zero_weights()["wide.bias"])
    shutil.rmtree(folder)


def test_the_optimizer_of_a_trainers_folder_is_in_the_folder_of_the_tag(tmp_path: Path, run: Run) -> None:
    folder = ROOT / "deepspeed-trainer" / "checkpoint"
    done = run("convert", folder, "--optimizer-as", "names", "-o", tmp_path / "out.pt")
    assert done.code == 1
    again = shlex.quote(str(folder / "global_step2"))
    assert f"It is beside them: ckptool convert {again} --optimizer-as names" in done.err
