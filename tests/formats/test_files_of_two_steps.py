"""Engines' folders in which one file is of another step: what the files hold twice tells, by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Conflict
from tests.support.deepspeed_folders import SHAPES, states_of, write_zero, zero_weights
from tests.support.ranks import save_on_two_ranks

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
