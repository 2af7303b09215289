"""DeepSpeed's folders beyond those that it wrote for `fixtures/engines`: padding, options; and in one folder files of
two steps, which what they hold twice tells, in those of torch.distributed.checkpoint too."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Conflict
from tests.support.cli import Run
from tests.support.deepspeed_folders import MOMENTS, SHAPES, states_of, write_zero, zero_weights
from tests.support.engine_cases import ROOT
from tests.support.ranks import save_on_two_ranks


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


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_masters_of_stage_0_are_written(dtype: torch.dtype, is_flat: bool, tmp_path: Path) -> None:
    weights = zero_weights()
    still = torch.randn(5, 3)
    masters: list[Any] = [[torch.nn.Parameter(weights[name]) for name in group] for group in SHAPES]
    if is_flat:  # as the fused optimizer for fp16 has them
        masters = [torch.cat([each.detach().flatten() for each in group]).requires_grad_() for group in masters]
    module = {"still.weight": still} | weights  # frozen, and of the shape of another
    key = "fp32_groups_flat" if is_flat else "fp32_groups"
    states = states_of(0, 4, weights, optimizer={key: masters, "optimizer_state_dict": {}})
    states["module"] = {name: value.to(dtype) for name, value in module.items()} | {"places": torch.arange(4)}
    states |= {"param_shapes": None, "frozen_param_shapes": None}
    (folder := tmp_path / "global_step2").mkdir()
    file = folder / "mp_rank_00_model_states.pt"
    torch.save(states, file)
    ckptool.convert(f"{folder}#module", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert torch.equal(found["still.weight"], still.to(dtype)) and ckptool.open(folder).metadata["ranks"] == 4
    assert "copies-not-shown" in {note.code for note in ckptool.verify(folder).notes}
    (masters[0].data if is_flat else masters[0][0].data)[-1] += 1
    torch.save(states, file)
    assert ("weights" if is_flat else "different values") in verdict(folder, tmp_path / "out.safetensors")


def test_the_optimizer_of_a_trainers_folder_is_in_the_folder_of_the_tag(tmp_path: Path, run: Run) -> None:
    folder = ROOT / "deepspeed-trainer" / "checkpoint"
    done = run("convert", folder, "--optimizer-as", "names", "-o", tmp_path / "out.pt")
    assert done.code == 1
    again = shlex.quote(str(folder / "global_step2"))
    assert f"It is beside them: ckptool convert {again} --optimizer-as names" in done.err


# Files of two steps --------------------------------------------------------------------------------------------------


def verdict(folder: Path, out: Path) -> str:
    """Why a folder is refused, by `verify` and by `convert`; empty where it is fine."""
    try:
        ckptool.convert(folder, out, overwrite=True)
        said = ""
    except CkptoolError as error:
        said = str(error)
    try:
        assert ckptool.verify(folder).fine == (not said), said
    except Conflict:
        assert said
    return said


def test_more_steps_than_the_model_has_taken(tmp_path: Path) -> None:
    for stage in (2, 3):
        for total, word in ((2, ""), (9, "steps-differ"), (0, "two checkpoints")):

            def change(rank: int, states: dict[str, Any], _: Any, total: int = total) -> None:
                states["global_steps"] = total

            folder = write_zero(tmp_path / f"{stage}-{total}", stage, 2, change=change)
            if word == "two checkpoints":
                assert word in verdict(folder, tmp_path / "out.pt")
                continue
            assert not verdict(folder, tmp_path / "out.pt")
            assert [n.code for n in ckptool.verify(folder).notes if n.code == "steps-differ"] == [word] * bool(word)


@pytest.mark.parametrize("step", [float("inf"), float("nan"), 10**400])
def test_steps_that_are_no_numbers_or_many(step: float, tmp_path: Path) -> None:
    def change(rank: int, states: dict[str, Any], optimizer: dict[str, Any]) -> None:
        for state in optimizer["base_optimizer_state"]["state"].values():
            state["step"] = torch.tensor(step) if isinstance(step, float) else step

    said = verdict(write_zero(tmp_path / "in", 2, 2, change=change), tmp_path / "out.pt")
    assert ("two checkpoints" in said) == isinstance(step, int) and "bug" not in said


def test_a_parameter_of_another_step_in_a_universal_folder(tmp_path: Path) -> None:
    folder = Path(
        shutil.copytree(Path(__file__).parents[2] / "fixtures/engines/deepspeed-universal2/checkpoint", tmp_path / "u")
    )
    assert not verdict(folder, tmp_path / "out.pt")
    for step in folder.rglob("step.pt"):
        kept = step.read_bytes()
        found = torch.load(step)
        torch.save(found | {"param": found["param"] + 1} if isinstance(found, dict) else found + 1, step)
        assert "the step differs" in verdict(folder, tmp_path / "out.pt"), step
        step.write_bytes(kept)


SAVE = """
    def save(rank, folder, mesh):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.fsdp import fully_shard

        def make():
            model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(16)))
            fully_shard(model, mesh=mesh)
            return model, torch.optim.Adam(model.parameters())

        for name in ("all", "late"):
            model, optimizer = make()
            for step in range(1, 4):
                loss = model(torch.randn(2, 4)).sum()
                loss.backward()
                for p in list(model[0].parameters()) if name == "late" and step < 3 else []:
                    p.grad = None  # not trained at first
                optimizer.step()
                optimizer.zero_grad()
                weights, state = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/{name}-{step}")
                moments = {f"{rank}.{i}": {"step": p["step"], "exp_avg": p["exp_avg"].to_local()}
                    for i, p in enumerate(optimizer.state.values())}  # the stages of a pipeline
                dcp.save({"optim": {"state": moments}}, checkpoint_id=f"{folder}/stages-{name}-{step}")
"""


def test_a_rank_file_of_dcp_of_another_step(tmp_path: Path) -> None:
    (folder := tmp_path / "runs").mkdir()
    save_on_two_ranks(SAVE, folder, tmp_path)
    for name in ("all-1", "all-3", "late-2", "late-3", "stages-all-1", "stages-all-3"):
        assert not verdict(folder / name, tmp_path / "out.pt"), name
        files = {note.code: note.message for note in ckptool.verify(folder / name).notes}.get("not-provable", "")
        assert ("__0_0.distcp" in files) == (not name.startswith("stages")), files  # torch saves all steps on one rank
    for step, other in ((3, 1), (2, 3)):
        for file in sorted(path.name for path in (folder / "all-1").glob("*.distcp")):
            shutil.copytree(folder / f"stages-all-{step}", mixed := tmp_path / f"{step}-{file}")
            shutil.copy(folder / f"stages-all-{other}" / file, mixed)
            with pytest.raises(Conflict, match=r"\.distcp and .*\.distcp are of two checkpoints") as raised:
                ckptool.open(mixed)
            assert f"step {max(step, other)}, the other {min(step, other)}" in str(raised.value)
            assert verdict(mixed, tmp_path / "out.pt")
