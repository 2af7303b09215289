"""DeepSpeed's folders beyond those that it wrote for `fixtures/engines`: padding, options; and in one folder files of
two steps, which what they hold twice tells, in those of torch.distributed.checkpoint too."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, Conflict, Corrupt, Unsupported
from tests.support.cli import Run
from tests.support.engine_cases import ROOT
from tests.support.engine_folders import MOMENTS, SHAPES, optimizer_file, states_of, verdict, write_zero, zero_weights
from tests.support.errors import refused
from tests.support.looped import looped
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
            behind = [torch.full((count,), 9e9) for count in paddings[group]]
            vectors.append(torch.cat([part for pair in zip(names, behind, strict=True)
                for part in (model[pair[0]].flatten(), pair[1])]))  # fmt: skip
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
    assert "mean (rank 0's value is used; rank 1's differs)" in note.message


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
    write_zero(tmp_path / "own" / "my tag", 2, 1)
    (tmp_path / "own" / "zero_to_fp32.py").touch()  # tells a tag of any name where there is no `latest`
    assert ckptool.open(tmp_path / "own").container == "deepspeed"
    refused(ckptool.CkptoolError, tmp_path, lambda: ckptool.open(tmp_path / "run"), "holds 2 checkpoints of DeepSpeed")


def test_of_stage_0_there_are_the_models_own_weights_and_its_optimizer_as_it_is(tmp_path: Path) -> None:
    weights = {name: value.to(torch.bfloat16) for name, value in zero_weights().items()}
    masters = [[torch.nn.Parameter(zero_weights()[name]) for name in group] for group in SHAPES]
    states = states_of(0, 4, weights, optimizer={"fp32_groups": masters, "optimizer_state_dict": {}})
    states |= {"module": weights, "param_shapes": None, "frozen_param_shapes": None}
    (folder := tmp_path / "global_step2").mkdir()
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    found = ckptool.open(folder)
    assert found.metadata["ranks"] == 4 and len(found["optimizer"]["fp32_groups"]) == len(SHAPES)
    ckptool.convert(f"{folder}#module", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_the_optimizer_of_a_trainers_folder_is_in_the_folder_of_the_tag(tmp_path: Path, run: Run) -> None:
    folder = ROOT / "deepspeed-trainer" / "checkpoint"
    done = run("convert", folder, "--optimizer-as", "names", "-o", tmp_path / "out.pt")
    assert done.code == 1
    again = shlex.quote(str(folder / "global_step2"))
    assert f"It lies beside the weights: ckptool convert {again} --optimizer-as names" in done.err


# Files of two steps --------------------------------------------------------------------------------------------------


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
    folder = Path(shutil.copytree(ROOT / "deepspeed-universal2" / "checkpoint", tmp_path / "u"))
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
            with pytest.raises(Conflict, match=r"\.distcp and .*\.distcp come from two checkpoints") as raised:
                ckptool.open(mixed)
            assert f"step {max(step, other)}, the other {min(step, other)}" in str(raised.value)
            assert verdict(mixed, tmp_path / "out.pt")


# Folders of two checkpoints, incomplete, or made to mislead -----------------------------------------------------------


Change = Callable[[int, dict[str, Any], dict[str, Any]], Any]
STATES = "mp_rank_00_model_states.pt"


def _refused(folder: Path, kind: type[CkptoolError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        ckptool.convert(folder, folder.parent / "out.safetensors")
    assert caught.type is kind and all(word in str(caught.value) for word in words), caught.value
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


def _frozen(*ranks: int) -> Change:
    """A parameter of which these ranks have their pieces."""

    def change(rank: int, states: dict[str, Any], _: dict[str, Any]) -> None:
        pieces = {"still": torch.zeros(3)} if rank in ranks else {}
        states.update(frozen_param_shapes={"still": (5,)}, frozen_param_fragments=pieces)
        states["module"]["still"] = torch.empty(0)

    return change


def _reversed(states: dict[str, Any]) -> None:
    states["param_shapes"][0] = dict(reversed(states["param_shapes"][0].items()))


def _twice(states: dict[str, Any]) -> None:
    states["param_shapes"][1] = {"wide.bias": (5,), "scale": (1,)}


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
    "a smaller world": (2, share(lambda s: s.update(partition_count=[1, 1])), Conflict, "1 rank in excess of the 1"),
    "a huge world": (3, share(lambda s: s.update(partition_count=1 << 31)), Corrupt, "lacks the files"),
    "no world": (2, share(lambda s: s.update(partition_count=-1)), Corrupt, "over how many ranks"),
    "another stage": (2, share(lambda s: s.update(zero_stage=1), 1), Conflict, "ZeRO stage differs: 2 and 1"),
    "other shapes": (3, states(_shapes(0, scale=torch.Size([2])), 1), Conflict, "list of parameters differs"),
    "fewer elements than the shapes have": (3, share(_cut), Corrupt, "of the ranks' vectors"),
    "fewer elements in one rank": (3, share(_cut, 1), Conflict, "length of vectors differs"),
    "more elements than the shapes have": (2, share(_longer), Corrupt, "of the ranks' vectors"),
    "a huge shape": (2, states(_shapes(0, scale=(1 << 40, 1 << 40)), 0), Corrupt, ""),
    "a shape that is none": (2, states(_shapes(0, scale=(-1,)), 0), Corrupt, "not names and shapes"),
    "one name in two groups": (2, states(_twice, 0), Corrupt, "in two groups"),
    "groups that are not there": (2, states(lambda s: s["param_shapes"].pop(), 0), Conflict, "1 group"),
    "no vectors": (2, share(lambda s: s.pop("single_partition_of_fp32_groups"), 1), Corrupt, "no f32"),
    "moments of another length": (2, share(lambda s: _state(s).update(exp_avg=torch.zeros(3)), 1), Corrupt,
        "has no exp_avg for all of group 0"),
    "a moment that one rank lacks": (3, share(lambda s: _state(s).pop("exp_avg"), 1), Corrupt, "has no exp_avg"),
    "pieces that lie elsewhere": (2, share(lambda s: s.update(ELSEWHERE), 0), Conflict, "embed.weight is elsewhere"),
    "a weight without values": (3, states(lambda s: s["module"].update({"lost.weight": torch.empty(0)}), 0), Corrupt,
        "lacks the values of 1 weight"),
    "a frozen piece that one rank lacks": (3, _frozen(1), Corrupt, "still in the model states of 1 rank"),
    "a frozen parameter of which there is nothing": (3, _frozen(), Corrupt, "lacks the values of 1 weight"),
    "frozen parameters of another shape": (3, states(lambda s: s.update(frozen_param_shapes={"still": (5,)}), 1),
        Conflict, "list of frozen parameters differs"),
    "parameters in another order": (3, states(_reversed, 1), Conflict, "list of parameters differs"),
    "a shape that is not the model's own": (2, states(_shapes(0, wide_weight=(3, 5))), Corrupt,
        "has wide.weight as [5, 3], and says that it is [3, 5]"),
    "moments that the first rank lacks": (2, share(lambda s: _base(s)["state"].pop(0), 0), Corrupt,
        "has no exp_avg for all of group 0"),
    "no module": (2, states(lambda s: s.pop("module"), 0), Corrupt, "has no `module`"),
    "a rank's module that is none": (3, states(lambda s: s.update(module=torch.ones(3)), 1), Corrupt,
        "rank_1_mp_rank_00_model_states.pt has no `module`"),
    "AutoEP": (2, states(lambda s: s.update(ds_autoep_layers=[{}]), 0), Unsupported, "AutoEP"),
    "experts under other names": (2, share(_experts), Unsupported, "is not an expert of deepspeed.moe"),
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
        ("lacks the values of 5 weights", "*_optim_states.pt")),
    "no model states": (2, without(STATES), Corrupt, (f"lacks {STATES}",)),
    "of a larger world": (3, of_a_larger_world, Conflict, ("two checkpoints",)),
    "a rank's own under another's name": (3, copied(optimizer_file(0), optimizer_file(1)), Conflict, ("saved as",)),
    "two files of one rank": (3, copied(optimizer_file(1), f"bf16_{optimizer_file(1)}"), Conflict,
        ("both belong to one rank",)),
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
    refused(CkptoolError, tmp_path, lambda: ckptool.open(folder), "latest")


@pytest.mark.parametrize("case", ["deepspeed-zero1", "deepspeed-zero2-groups", "deepspeed-round-robin"])
def test_without_shapes_the_order_of_the_pieces_is_taken_where_it_is_that_of_the_vectors(
    case: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / case / "checkpoint", folder := tmp_path / "run")
    whole = ckptool.open(ROOT / case / "checkpoint")["module"]
    for file in folder.glob("*/mp_rank_*_model_states.pt"):
        torch.save(torch.load(file, weights_only=False) | {"param_shapes": None}, file)
    if case == "deepspeed-round-robin":
        _refused(folder, Unsupported, "param_shapes")
    else:
        found = ckptool.open(folder)["module"]
        assert all((found[name].numpy() == entry.numpy()).all() for name, entry in whole.items())


def test_a_pipeline_without_zero_keeps_the_optimizer_of_each_stage(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deepspeed-pipeline" / "checkpoint" / "global_step2", folder := tmp_path / "tag")
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()
    for number, file in enumerate(sorted(folder.glob("mp_rank_*_model_states.pt"))):
        states = torch.load(file, weights_only=False)
        slots = {0: {"exp_avg": torch.full((2,), float(number))}}
        torch.save(states | {"param_shapes": None, "optimizer": {"state": slots, "param_groups": []}}, file)
    found = ckptool.open(folder)
    averages = [found["optimizer"][f"stage {n}"]["state"][0]["exp_avg"].numpy().tolist() for n in range(2)]
    assert averages == [[0, 0], [1, 1]] and found.metadata["ranks"] == 4
    assert "layer_00-model_states.pt" in found.untied  # without masters to compare it with


def test_settings_of_a_stage_that_are_its_own_stay_so(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "deepspeed-pipeline" / "checkpoint" / "global_step2", tmp_path / "tag")
    before = [dict(group) for group in ckptool.open(folder)["optimizer"]["param_groups"]]
    for file in folder.glob("*_mp_rank_01_optim_states.pt"):
        place = "optimizer_state_dict/base_optimizer_state/param_groups"
        for number in range(len(ckptool.open(file)[place])):
            ckptool.edit(file, set={f"{place}/{number}/weight_decay": 0.75}, in_place=True, keep_unknown=True)
        counts = {"optimizer_state_dict/partition_count": [2] * 3}  # as of more groups than the other stage has
        ckptool.edit(file, set=counts, in_place=True, keep_unknown=True)
    groups = [dict(group) for group in ckptool.open(folder)["optimizer"]["param_groups"]]
    assert {group["weight_decay"] for group in groups} == {0.75, *(group["weight_decay"] for group in before)}
    names = sorted(name for group in groups for name in group["params"])
    assert names == sorted(name for group in before for name in group["params"])


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
    _refused(folder, Corrupt, "lacks 2 entries: ../../secret")
