"""Folders of ZeRO with groups of any shapes, and what only some of the files in them say."""

from __future__ import annotations

import enum
import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter

import ckptool
from ckptool.errors import Conflict, Corrupt, LimitExceeded, Truncated, Unsupported
from tests.support.cli import Run
from tests.support.engine_cases import ROOT
from tests.support.engine_folders import MOMENTS, piece_of, random_shapes, verdict, write_zero, zero_weights
from tests.support.errors import refused, unreadable
from tests.support.looped import looped
from tests.support.part_files import megatron_folder
from tests.support.processes import soon


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


# Megatron -------------------------------------------------------------------------------------------------------------
# Folders of Megatron-Core's `torch_dist`, written by it: its run, its iterations, what is missing or mixed in them.


ITERATION = ROOT / "megatron-torch-dist" / "checkpoint"


def run_folder(path: Path, tracker: str = "100\n") -> Path:
    """The folder of a run whose one iteration is 100."""
    shutil.copytree(ITERATION, path / "iter_0000100")
    (path / "latest_checkpointed_iteration.txt").write_text(tracker)
    return path


def test_a_run_is_its_last_iteration_and_scan_lists_each(tmp_path: Path, run: Run) -> None:
    folder = run_folder(tmp_path / "run")
    shutil.copytree(ITERATION, folder / "release")
    found = ckptool.open(folder)
    assert found.metadata["step"] == 100 and found.source is not None and found.source.path == str(folder)
    done = run("convert", str(folder), "-o", str(tmp_path / "a.safetensors"))
    assert done.code == 0, done
    assert run("diff", str(tmp_path / "a.safetensors"), str(ROOT / "megatron-torch-dist/weights.safetensors")).code == 0
    rows = json.loads(run("scan", str(folder), "--json").out)["files"]
    assert [Path(row["path"]).name for row in rows] == ["iter_0000100", "release"]
    assert [row["step"] for row in rows] == [100, 100]
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert ckptool.open(folder).metadata["step"] == 100
    shutil.rmtree(folder / "release")
    megatron_folder(folder / "release")
    done = run("convert", str(folder), "-o", str(tmp_path / "b.safetensors"))
    assert done.code == 2 and f"ame one of its files: {folder / 'release' / 'mp_rank_00'};" in done.err


@looped("tracker", ["../iter_0000100", "/etc", "iter_0000100", "-1", "", "1" * 30, "200", "release", "7" * 100])
def test_a_tracker_that_leads_elsewhere_is_named(tracker: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", tracker)
    (folder / "iter_0000007").symlink_to(".")
    if len(tracker) == 100:
        unreadable(folder, LimitExceeded)
        return
    unreadable(
        folder, Corrupt, f"says {tracker!r}, an iteration that is not there", "latest_checkpointed_iteration.txt"
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    unreadable(folder, Corrupt, "says '7'")  # the folder of the run again


def test_the_zarr_backend_is_said(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (tmp_path / "embedding.weight").mkdir()
    unreadable(tmp_path, Unsupported, "zarr")


def test_what_does_not_belong_to_the_iteration_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run") / "iter_0000100"
    (folder / "common.pt").unlink()
    unreadable(folder, Truncated, "no common.pt")
    torch.save([1], folder / "common.pt")
    unreadable(folder, Corrupt, "not a dictionary")
    torch.save({"iteration": 200}, folder / "common.pt")
    unreadable(folder, Conflict, "iteration 200", "100")


def test_an_entry_that_both_have_is_noted(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run") / "iter_0000100"
    torch.save({"model": {"output_layer.weight": torch.ones(1), "x": 1}, "iteration": 100}, folder / "common.pt")
    found = ckptool.open(folder)
    assert found["model"]["output_layer.weight"].shape == (20, 8) and found["model"]["x"] == 1
    assert [note.code for note in found.notes] == ["common-collides"]
    assert "model/output_layer.weight" in found.notes[0].message


def test_settings_of_the_optimizer_may_be_nested(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run") / "iter_0000100"
    groups = [{"lr": 1.0}, {"lr": 2.0}]
    inner = {"optimizer": {"param_groups": groups}, "grad_scaler": {"scale": 2.0}}
    torch.save({"optimizer": inner, "args": Namespace(a=1), "iteration": 100}, folder / "common.pt")
    found = ckptool.open(folder)["optimizer"]
    assert set(found) == {"optimizer", "grad_scaler"}
    assert len(found["optimizer"]["state"]) == 4 and list(found["optimizer"]["param_groups"]) == groups


def test_another_programs_metadata_is_not_taken_for_it(tmp_path: Path) -> None:
    for text in ("[1]", "{", '{"sharded_backend": 1}', "[" * 5000):
        (tmp_path / "metadata.json").write_text(text)
        unreadable(tmp_path, ckptool.CkptoolError, "is a folder, not a checkpoint")


# Pieces in safetensors ------------------------------------------------------------------------------------------------
# Pieces of tensors in safetensors: put together here, and by torch, whose own way is wrong for some.


Piece = tuple[torch.Tensor, tuple[int, ...]]  # of a tensor, and its offsets in the whole


def write_pieces(folder: Path, *ranks: dict[str, Piece]) -> Path:
    """The folder with a file for each rank, as torch writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, pieces in enumerate(ranks, 1):
        info = {name: {"saved_offsets": list(offsets)} for name, (_, offsets) in pieces.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
        tensors = {name: tensor for name, (tensor, _) in pieces.items()}
        save_file(tensors, folder / f"shard-{rank:05}-model-00001-of-00001.safetensors", metadata=metadata)
    return folder


ROWS = torch.arange(15.0).reshape(5, 3)
HALVES = {"w": (ROWS[:3], (0, 0))}, {"w": (ROWS[3:].clone(), (3, 0))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "state", [lambda w: {"emb.weight": w, "head.weight": w}, lambda w: {"w": w.t()}], ids=["tied", "not contiguous"]
)
def test_what_torchs_writer_refuses_is_written_here(state: Any, tmp_path: Path) -> None:
    tensors = state(ROWS.clone())
    with pytest.raises(CheckpointException, match=r"share memory|contiguous"):
        dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(tmp_path / "torch")), no_dist=True)
    torch.save(tensors, tmp_path / "in.pt")
    ckptool.convert(tmp_path / "in.pt", tmp_path / "out", shard_size="1MB")
    found = ckptool.load(tmp_path / "out")
    assert all(found[name].equal(value) for name, value in tensors.items())


def test_whole_files_stand_for_their_pieces(tmp_path: Path, run: Run) -> None:
    shutil.copytree(ROOT / "hf-consolidated" / "checkpoint", tmp_path / "in")
    found = ckptool.open(tmp_path / "in")
    assert found.container == "sharded" and "pieces-not-read" in [note.code for note in found.notes]
    assert [file.path for file in ckptool.scan(tmp_path).files] == [str(tmp_path / "in")]
    assert run("diff", str(tmp_path / "in"), str(tmp_path / "in" / "sharded")).code == 0
    for path in (tmp_path / "in").glob("model*"):  # as torch leaves it where it fails
        path.write_bytes(b"") if path.suffix == ".safetensors" else path.unlink()
    assert "sharded" in refused("part", tmp_path, lambda: ckptool.open(tmp_path / "in")).fix


HOSTILE: dict[str, tuple[tuple[dict[str, Piece], ...], str]] = {
    "a gap": (({"w": (ROWS[:2], (0, 0))}, {"w": (ROWS[3:].clone(), (3, 0))}), "in no file"),
    "an overlap": (({"w": (ROWS[:4], (0, 0))}, {"w": (ROWS[3:].clone(), (3, 0))}), "overlap"),
    "another type": ((HALVES[0], {"w": (ROWS[3:].half(), (3, 0))}), "f16"),
    "other dimensions": ((HALVES[0], {"w": (ROWS[3], (3,))}), "block"),
    "an offset below 0": ((HALVES[0], {"w": (ROWS[3:].clone(), (-2, 0))}), "does not say"),
    "offsets without end": ((HALVES[0], {"w": (ROWS[3:].clone(), (1 << 70, 0))}), "does not say"),
    "too few offsets": ((HALVES[0], {"w": (ROWS[3:].clone(), (3,))}), "does not say"),
}


@looped("kind", HOSTILE)
def test_pieces_that_are_no_tensors_are_refused(kind: str, tmp_path: Path) -> None:
    ranks, words = HOSTILE[kind]
    folder = write_pieces(tmp_path / "in", *ranks)
    assert words in refused("corrupt", tmp_path, lambda: ckptool.convert(folder, tmp_path / "out.pt")).what


def test_a_table_of_pieces_that_is_none_and_a_missing_rank_are_named(tmp_path: Path) -> None:
    folder = write_pieces(tmp_path / "in", HALVES[0], {}, HALVES[1])
    first, second = sorted(folder.iterdir())[:2]
    for text in ("", "[]", "{", '{"w": 3}', '{"w": {"saved_offsets": "00"}}', "[" * 5_000):
        save_file({"w": ROWS}, first, metadata={"DCP_SHARDING_INFO": text})
        refused("corrupt", tmp_path, lambda: ckptool.open(folder))
    second.unlink()
    assert second.name in refused("corrupt", tmp_path, lambda: ckptool.open(folder)).what


# torch_checkpointing --------------------------------------------------------------------------------------------------
# Folders of torch_checkpointing, with its table and without, and tables that lie.


CASE, BARE = ROOT / "torch-checkpointing", ROOT / "torch-checkpointing-bare"


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the case of which the table says something else."""
    shutil.copytree(CASE / "checkpoint", folder)
    table = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(table)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(table, 4))
    return folder


def test_places_that_are_listed_are_refused(tmp_path: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        ((group,),) = [table["metadata"]["model"]["nested_path_to_metadata"]['["emb.weight"]']]
        group["sharding_metadata"]["type"] = "default_tensor_v1"

    folder = changed(tmp_path / "in", change)
    assert "default_tensor_v1" in str(refused("unsupported", tmp_path, lambda: ckptool.open(folder)))


class Calls:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("called",)


def layout(table: dict[str, Any]) -> Any:
    return table["metadata"]["model"]["rank_to_layout_info"]


def sharding(table: dict[str, Any]) -> Any:
    ((group,),) = [table["metadata"]["model"]["nested_path_to_metadata"]['["emb.weight"]']]
    return group["sharding_metadata"]["data"]


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path outside": lambda t: layout(t)[1].update(file_path="../model_1.safetensors"),
    "an absolute path": lambda t: layout(t)[1].update(file_path="/etc/passwd"),
    "a file that is not there": lambda t: layout(t)[1].update(file_path="x/model.safetensors"),
    "a path that is none": lambda t: layout(t)[1].update(file_path=3),
    "an unknown way of writing": lambda t: layout(t)[1].update(serialization_format={"type": "Pickle"}),
    "one file for two items": lambda t: t["metadata"].update(other={"rank_to_layout_info": layout(t)}),
    "a missing rank": lambda t: layout(t).pop(1),
    "a third rank": lambda t: t.update(world_size=3),
    "a billion ranks of many items": lambda t: t.update(
        world_size=10**9, metadata={f"{n}": {"rank_to_layout_info": {0: None}} for n in range(50_000)}),
    "an item that is none": lambda t: t["metadata"].update(other=3),
    "a call": lambda t: t.update(other=Calls()),
    "no placements": lambda t: sharding(t).pop("placements"),
    "an unknown placement": lambda t: sharding(t)["placements"][0].update(type="Partial"),
    "a dimension outside": lambda t: sharding(t)["placements"][0].update(dim=5),
    "a mesh that does not fit": lambda t: sharding(t)["mesh_spec"].update(mesh_shape=(7,)),
    "a rank that is not in the mesh": lambda t: sharding(t)["mesh_spec"].update(mesh_data=(0, 9)),
    "another shape": lambda t: sharding(t).update(global_shape=[9, 3]),
    "another type": lambda t: sharding(t).update(dtype="torch.float16"),
    "an unknown type": lambda t: sharding(t).update(dtype="float"),
    "paths that are no paths": lambda t: t["metadata"]["model"]["nested_path_to_metadata"].update(x=3),
}  # fmt: skip


@looped("kind", LIES)
def test_a_table_that_lies_is_refused(kind: str, tmp_path: Path) -> None:
    folder = changed(tmp_path / "in", LIES[kind])
    code = "conflict" if kind == "another shape" else "corrupt"
    with soon(2):
        refused(code, tmp_path, lambda: ckptool.convert(folder, tmp_path / "out.pt"))
    assert [file.state for file in ckptool.scan(tmp_path).files] == [code]
    assert not Path("called").exists()


def test_a_second_pickle_behind_the_table_is_ambiguous(tmp_path: Path) -> None:
    folder = changed(tmp_path / "in", lambda table: None)
    with (folder / "metadata.pkl").open("ab") as file:
        file.write(pickle.dumps(Calls()))
    refused("ambiguous", tmp_path, lambda: ckptool.open(folder))


def test_a_file_that_ranks_share_is_read_once(tmp_path: Path) -> None:
    told = {"file_path": "shared.pt", "serialization_format": {"type": "TorchSerialization"}}
    item = {"rank_to_layout_info": dict.fromkeys(range(2), told)}
    folder = changed(tmp_path / "in", lambda table: table["metadata"].update(shared=item))
    torch.save({"w": torch.ones(2), "n": 3}, folder / "shared.pt")
    found = ckptool.open(folder)
    assert found["shared"]["n"] == 3 and not found.notes and found.metadata["ranks"] == 2


def test_a_rank_of_another_run_is_named(tmp_path: Path) -> None:
    shutil.copytree(BARE / "checkpoint", tmp_path / "in")
    (tmp_path / "in" / "model_1.pt").unlink()
    assert "in no file" in refused("corrupt", tmp_path, lambda: ckptool.open(tmp_path / "in")).what
    torch.save(7, tmp_path / "in" / "epoch_1.pt")
    shutil.copy(BARE / "checkpoint" / "model_1.pt", tmp_path / "in" / "model_1.pt")
    assert "epoch" in refused("conflict", tmp_path, lambda: ckptool.open(tmp_path / "in")).what


@pytest.mark.parametrize("name", ["mine_rank{}.pt", "step5-rank-{}.pth", "rank{}.bin", "a.rank_{}.pt", "w_{}.pt"])
def test_files_of_ranks_by_any_name_are_joined_where_their_tensors_say_how(name: str, tmp_path: Path) -> None:
    engines = ROOT / "verl-2"
    (folder := tmp_path / "run").mkdir()
    for rank in range(2):
        shutil.copy(engines / "checkpoint" / f"model_world_size_2_rank_{rank}.pt", folder / name.format(rank))
    (item,) = ckptool.open(folder).tree
    ckptool.convert(f"{folder}#{item}", tmp_path / "out.safetensors")
    found, expected = load_file(tmp_path / "out.safetensors"), load_file(engines / "weights.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    if "rank" in name:
        (fix,) = [each.fixes for each in ckptool.doctor(folder / name.format(1)).findings if each.code == "part"]
        assert fix == (f"ckptool inspect {folder}",)
    if name.endswith(".pt"):
        other = shutil.copy(folder / name.format(1), folder / name.format(1).replace(".pt", ".bin"))
        assert "both belong to one rank" in str(refused("conflict", tmp_path, lambda: ckptool.open(folder)))
        other.unlink()
    shutil.copy(folder / name.format(1), folder / name.format(3))
    if "rank" in name:
        assert name.format(2) in str(refused("corrupt", tmp_path, lambda: ckptool.open(folder)))
    (folder / name.format(3)).unlink()
    (folder / name.format(1)).unlink()
    assert "A file is missing" in str(refused("conflict", folder, lambda: ckptool.open(folder)))
