"""Folders of files that each rank saved for itself are one checkpoint."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptool
from ckptool.errors import CkptoolError, Unsupported
from tests.support.cli import Run
from tests.support.engine_folders import FULL, divided, model, optimizer, save_ranks
from tests.support.errors import refused
from tests.support.looped import looped
from tests.support.ranks import save_on_two_ranks

FULL_GRID = torch.arange(8 * 6 * 3).reshape(8, 6, 3)


def loaded(folder: Path, out: Path, **options: Any) -> Any:
    ckptool.convert(folder, out, **options)
    return torch.load(out, weights_only=True)


def test_ranks_are_one_checkpoint_of_their_sets(tmp_path: Path, run: Run) -> None:
    def late(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return model(rank, mesh) | ({"late": torch.ones(2)} if rank else {})

    folder = save_ranks(tmp_path / "actor", late, (3,))
    save_ranks(folder, optimizer, (3,), name="optim")
    save_ranks(folder, lambda rank, mesh: {"rng": torch.full((8,), rank, dtype=torch.uint8), "epoch": 2, "seed": rank},
        (3,), name="extra_state")  # fmt: skip
    found = ckptool.open(folder)
    assert list(found.tree) == ["model", "extra_state", "optim"] and found.part is None
    assert found.metadata["ranks"] == 3
    assert {note.code for note in found.notes} == {"ranks-differ", "not-joined"}
    other = " ".join(note.message for note in found.notes if note.code == "not-joined")
    assert found.tree["model"]["late"].shape == (2,)
    assert "extra_state is not joined: extra_state/rng, extra_state/seed are not the same on all ranks" in other
    tree = loaded(folder, tmp_path / "out.pt")
    for name, value in FULL.items():
        assert tree["model"][name].equal(value)
    assert tree["optim"]["state"][0]["exp_avg"].equal(FULL["fc.weight"])
    for rank in range(3):  # random states are each rank's own
        extra = tree["extra_state"][f"rank {rank}"]
        assert extra["epoch"] == 2 and extra["seed"] == rank and extra["rng"].tolist() == [rank] * 8
    assert run("verify", str(folder)).code == 0
    assert [file.path for file in ckptool.scan(tmp_path).files if file.path.endswith("actor")] == [str(folder)]


def test_a_mesh_that_was_cut_from_another(tmp_path: Path) -> None:
    """Tensor parallelism alone: the ranks of the other axis have replicas, and do not say so."""
    rows = torch.arange(10)
    folder = save_ranks(tmp_path / "in", lambda rank, mesh: {"w": divided(rows, mesh["axis1"], [Shard(0)])}, (2, 3))
    assert loaded(folder, tmp_path / "out.pt")["model"]["w"].equal(rows)


def test_replicas_that_differ_are_never_written(tmp_path: Path, run: Run) -> None:
    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"w": divided(FULL_GRID + (rank == 3), mesh, [Replicate(), Shard(0)])}

    folder = save_ranks(tmp_path / "in", make, (2, 2))
    done = run("convert", str(folder), "-o", str(tmp_path / "out.pt"))
    assert done.code == 2 and "rank 1 and rank 3" in done.err and not (tmp_path / "out.pt").exists()


def test_an_optimizer_that_does_not_say_how_it_is_divided_stays_with_its_ranks(tmp_path: Path) -> None:
    def flat(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"state": {0: {"exp_avg": torch.full((11,), float(rank))}}, "param_groups": []}

    folder = save_ranks(tmp_path / "in", model)
    save_ranks(folder, flat, name="optim")
    found = ckptool.open(folder)
    assert [note.code for note in found.notes] == ["not-joined"]
    assert list(found.tree["optim"]) == ["rank 0", "rank 1"]
    assert loaded(folder, tmp_path / "out.pt")["optim"]["rank 1"]["state"][0]["exp_avg"].tolist() == [1.0] * 11
    assert len(loaded(folder, tmp_path / "model.pt", at="model")) == 4


@pytest.mark.filterwarnings("ignore")
def test_files_of_older_torch_say_it_in_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.5 has other modules, and before 2.9 the table of a mesh has its shape."""
    old = "torch.distributed._tensor"
    importlib.import_module(f"{old}.placement_types")
    importlib.import_module(f"{old}.device_mesh")
    monkeypatch.setattr(DTensor, "__module__", f"{old}.api")
    monkeypatch.setattr(Shard, "__module__", f"{old}.placement_types")
    monkeypatch.setattr(DeviceMesh, "__module__", f"{old}.device_mesh")

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        tensor = divided(FULL["fc.weight"], mesh, [Shard(0)])
        mesh.__dict__["mesh"] = torch.arange(2, dtype=torch.int32)
        for name in ("_layout", "_rank_map", "_flatten_rank_map", "_rank"):
            mesh.__dict__.pop(name)
        return {"fc.weight": tensor}

    folder = save_ranks(tmp_path / "in", make)
    with zipfile.ZipFile(next(folder.iterdir())) as file:
        data = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    assert f"{old}.api".encode() in data and f"{old}.placement_types".encode() in data
    assert loaded(folder, tmp_path / "out.pt")["model"]["fc.weight"].equal(FULL["fc.weight"])


@pytest.mark.filterwarnings("ignore")
@looped("seed", range(16))
def test_any_model_on_any_mesh(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sizes = rng.choice([(2,), (5,), (2, 2), (2, 3), (2, 2, 2)])
    tensors = {f"layer{i}.weight": torch.randn([rng.randint(0, 7) for _ in range(rng.randint(1, 3))]) for i in range(6)}
    kinds: list[Callable[[int], Any]] = [
        lambda n: Shard(rng.randrange(n)),
        lambda n: Replicate(),
        lambda n: _StridedShard(rng.randrange(n), split_factor=rng.choice((2, 3))),
    ]
    placements = {name: [rng.choice(kinds)(value.ndim) for _ in sizes] for name, value in tensors.items()}

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {name: divided(value, mesh, placements[name]) for name, value in tensors.items()}

    tree = loaded(save_ranks(tmp_path / "in", make, sizes), tmp_path / "out.pt")["model"]
    assert all(tree[name].equal(value) for name, value in tensors.items())


# Folders that are damaged, mixed or lie -------------------------------------------------------------------------------


NAME = "model_world_size_2_rank_{}.pt"


class Calls:
    """An object that would write a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def with_(change: Callable[[dict[str, Any]], object], on: int = 1) -> Callable[[int, DeviceMesh], Any]:
    """The model, changed on one rank."""

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        tree = model(rank, mesh)
        if rank == on:
            change(tree)
        return tree

    return make


def set_mesh(**fields: Any) -> Callable[[int, DeviceMesh], Any]:
    """The model of which the second rank's mesh says something else."""

    def change(tree: dict[str, Any]) -> None:
        for name, value in fields.items():
            setattr(tree["fc.weight"].device_mesh, name, value)

    return with_(change)


def put(name: str, make: Callable[[DeviceMesh], Any], on: int = 1) -> Callable[[int, DeviceMesh], Any]:
    return with_(lambda tree: tree.update({name: make(tree["gain"].device_mesh)}), on)


def local(values: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...], *placements: Any) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def strided(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    return {"fc.weight": local(torch.ones(1, 3), mesh, (2**40, 3), _StridedShard(0, split_factor=2**30))}


def plain(*names: str) -> Callable[[int, DeviceMesh], Any]:
    """Names of tensors of each rank's own, beside tensors that say how they are divided."""
    return lambda rank, mesh: model(rank, mesh) | {name: torch.full((3,), float(rank)) for name in names}


def sharded(*rows: int, table: bool = True, add: float = 0, whose: int = 0) -> Callable[[int, DeviceMesh], Any]:
    """A ShardedTensor of 6 rows, of which each rank says that its 3 begin at one of `rows`; with table, the metadata of
    all says so, too."""

    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        true = [ShardMetadata([begin, 0], [3, 4], f"rank:{each}/cpu") for each, begin in enumerate((0, 3))]
        whole = ShardedTensorMetadata(list(true), torch.Size((6, 4)), TensorProperties(torch.float32))
        shard = LocalShard(torch.ones(3, 4) + rank * add, true[rank])
        tensor = ShardedTensor._init_from_local_shards_and_global_metadata([shard], whole)
        said = [ShardMetadata([begin, 0], [3, 4], f"rank:{each ^ whose}/cpu") for each, begin in enumerate(rows)]
        tensor.local_shards()[0].metadata = said[rank]
        if table:
            tensor._metadata.shards_metadata[:] = said
        return {"fc.weight": tensor}

    return make


Change = Callable[[Path], object]


def nothing(folder: Path) -> None:
    """Leaves the folder as it is."""


def another_world(folder: Path) -> None:
    save_ranks(folder, model, (3,))


def another_step(folder: Path) -> None:
    later = with_optimizer(lambda slots: slots.update(step=torch.tensor(4.0)))
    save_ranks(folder, later, name="optim")


def with_optimizer(change: Callable[[dict[str, Any]], object]) -> Callable[[int, DeviceMesh], Any]:
    def make(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        tree = optimizer(rank, mesh)
        if rank:
            change(tree["state"][0])
        return tree

    return make


def epochs(folder: Path) -> None:
    save_ranks(folder, lambda rank, mesh: {"lr_scheduler": {"last_epoch": rank}}, name="extra_state")


# For each what the ranks save, what is done to the folder, the code of the error, and what it names.
HOSTILE: dict[str, tuple[Callable[[int, DeviceMesh], Any], Change, str, str]] = {
    "ranks of two worlds": (model, another_world, "conflict", "model_world_size_3_rank_0.pt"),
    "a rank of another step": (model, another_step, "conflict", "step"),
    "schedulers of two epochs": (model, epochs, "conflict", "last_epoch"),
    "another shape": (put("fc.bias", lambda m: divided(torch.ones(9), m, [Shard(0)])), nothing, "conflict", "fc.bias"),
    "another type": (
        put("fc.bias", lambda m: divided(FULL["fc.bias"].half(), m, [Shard(0)])), nothing, "conflict", "fc.bias"),
    "another placement": (
        put("fc.weight", lambda m: divided(FULL["fc.weight"], m, [Shard(1)])), nothing, "conflict", "two ways"),
    "a plain tensor on one rank": (put("gain", lambda m: torch.ones(1)), nothing, "conflict", "gain"),
    "a number on one rank": (put("gain", lambda m: 3), nothing, "conflict", "gain"),
    "a sum": (put("gain", lambda m: local(torch.ones(1), m, (1,), Partial())), nothing, "unsupported", "Partial"),
    "a local tensor of another shape": (
        put("fc.bias", lambda m: local(torch.ones(5), m, (7,), Shard(0))), nothing, "conflict", "fc.bias"),
    "a mesh without this rank": (set_mesh(_rank_map=torch.tensor([0, 0], dtype=torch.int32)), nothing, "conflict", ""),
    "a mesh in another order": (
        set_mesh(_rank_map=torch.tensor([1, 0], dtype=torch.int32)), nothing, "conflict", "of its mesh"),
    "a coordinate outside": (set_mesh(_coordinate_on_dim=(7,)), nothing, "conflict", "of its mesh"),
    "a million ranks": (
        set_mesh(_rank_map=torch.arange(10**6, dtype=torch.int32)), nothing, "conflict", "999,999"),
    "two million ranks": (
        set_mesh(_rank_map=torch.arange(2 * 10**6, dtype=torch.int32)), nothing, "limit-exceeded", "mesh"),
    "no table of ranks": (set_mesh(_rank_map=None, _flatten_rank_map=None), nothing, "corrupt", "table of ranks"),
    "a mesh without axes": (set_mesh(_layout=None), nothing, "corrupt", "axes"),
    "a billion pieces": (strided, nothing, "limit-exceeded", "split factor"),
    "shards of one place that agree": (sharded(0, 0), nothing, "corrupt", "12 of its 24 elements are in no file"),
    "shards of one place that differ": (sharded(0, 0, add=1), nothing, "corrupt", "12 of its 24 elements"),
    "shards of another rank": (sharded(0, 3, whose=1), nothing, "conflict", "was saved by rank 1"),
    "shards that overlap": (sharded(0, 2), nothing, "corrupt", "overlap at [2, 0]"),
    "a shard outside": (sharded(0, 5), nothing, "corrupt", "outside"),
    "a shard that its metadata has not": (
        sharded(0, 2, table=False), nothing, "conflict", "[3, 4] at [2, 0], where its metadata has no shard"),
    "weights that differ": (plain("fc2.weight"), nothing, "conflict", "fc2.weight"),
    "nothing says how it is divided": (
        lambda rank, mesh: {"fc.weight": torch.full((3, 2), float(rank))}, nothing, "unsupported", "plain tensors"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@looped("kind", HOSTILE)
def test_a_folder_of_ranks_that_is_not_one_checkpoint_is_refused(kind: str, tmp_path: Path, run: Run) -> None:
    make, change, code, words = HOSTILE[kind]
    folder = save_ranks(tmp_path / "in", make)
    change(folder)
    error = refused(code, tmp_path, lambda: ckptool.convert(folder, tmp_path / "out.pt"))
    assert words in error.what
    assert run("scan", str(tmp_path), "--latest-good").code == 1
    assert run("inspect", str(folder)).code == 2


@pytest.mark.parametrize("hidden", [False, True])
def test_what_a_rank_would_call_is_said_and_not_called(hidden: bool, tmp_path: Path, run: Run) -> None:
    """In the tree of a rank whose value is not taken, or in what a tensor of torch.distributed is made of."""
    path = tmp_path / "called"

    def change(tree: dict[str, Any]) -> None:
        if hidden:
            tree["fc.weight"]._spec.other = Calls(path)
        else:
            tree["counts"] = Calls(path)

    folder = save_ranks(tmp_path / "in", with_(change))
    found = run("scan", str(folder))
    assert found.code == 1 and "mkdir" in found.out, found
    assert not path.exists()
    refused(CkptoolError, tmp_path, lambda: ckptool.convert(folder, tmp_path / "out.pt"), "mkdir")
    assert not path.exists() and not (tmp_path / "out.pt").exists()


def test_a_deep_tree_is_refused(tmp_path: Path) -> None:
    tree: Any = 1
    for _ in range(400):
        tree = [tree, [2]]
    folder = save_ranks(tmp_path / "in", lambda rank, mesh: {"deep": tree})
    assert refused("limit-exceeded", tmp_path, lambda: ckptool.inspect(folder))


# Flat parameters ------------------------------------------------------------------------------------------------------


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


def test_a_model_takes_nothing_apart_in_a_folder_without_ranks(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, model := tmp_path / "m.pt")
    for name in ("", "b.pt", "model.safetensors", "x.txt"):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        if name:
            shutil.copy(model, folder / name)
        with pytest.raises(Unsupported, match="has no flat parameters"):
            ckptool.convert(folder, tmp_path / "out.pt", against=model)
