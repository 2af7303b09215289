"""Folders as clusters leave them: files of other steps, copies beside them, what file systems and programs add.

A table of layouts, each saved at two steps, and of what happens to a file; the judge is what was saved: whatever a verb
writes with exit 0 is that, or it says that nothing shows whether it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard

import ckptool
from tests.support.cli import Run
from tests.support.engine_folders import FULL, bins, divided, hub, save_dcp, save_ranks, write_zero, zero_weights
from tests.support.looped import looped
from tests.support.part_files import accelerate_folder, saved_below, trainer_folder
from tests.support.range_server import RangeServer
from tests.support.ranks import save_on_two_ranks

NEWER, OLDER = 20, 10  # steps
HALVES = FULL["fc.weight"].half()
RESOURCE_FORK = b"\0\5\26\7\0\2\0\0Mac OS X        " + bytes(60)  # how `._NAME` begins

# The layouts -------------------------------------------------------------------------------------------------------


def weights(step: int) -> dict[str, torch.Tensor]:
    return {name: value + step for name, value in FULL.items()}


def adam(step: int) -> dict[str, Any]:
    state = {
        number: {"step": torch.tensor(float(step)), "exp_avg": value, "exp_avg_sq": value + 1}
        for number, value in enumerate(weights(step).values())
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [*state]}]}


def zero(stage: int) -> Callable[[Path, int], object]:
    def make(folder: Path, step: int) -> None:
        def at_step(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
            states |= {"global_steps": step, "lr_scheduler": {"last_epoch": step}}
            base = share.get("base_optimizer_state") or share["optimizer_state_dict"]
            for slots in base["state"].values():
                slots["step"] = torch.tensor(float(step))

        write_zero(folder, stage, 2, zero_weights(step), at_step)

    return make


def rank_files(folder: Path, step: int) -> None:
    def split(value: torch.Tensor, mesh: Any) -> Any:
        return divided(value, mesh, [Shard(0)])

    save_ranks(folder, lambda rank, mesh: {name: split(value, mesh) for name, value in weights(step).items()})
    slots = {"step": torch.tensor(float(step))}
    save_ranks(folder, lambda rank, mesh: {"state": {0: {"exp_avg": split(FULL["fc.weight"] + step, mesh)} | slots},
        "param_groups": [{"lr": 0.1, "params": [0]}]}, name="optim")  # fmt: skip
    save_ranks(folder, lambda rank, mesh: {"rng": torch.tensor([rank, step], dtype=torch.uint8),
        "scheduler": {"last_epoch": step}}, name="extra_state")  # fmt: skip


def megatron(folder: Path, step: int) -> None:
    for rank in range(2):
        tree = {"iteration": step, "model": {"language_model": weights(step + rank)}, "optimizer": adam(step)}
        saved_below(tree, folder / f"mp_rank_{rank:02}" / "model_optim_rng.pt")


def trainer(folder: Path, step: int) -> None:
    trainer_folder(folder, 2, step)
    save_file(weights(step), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(adam(step), folder / "optimizer.pt")
    torch.save({"base_lrs": [0.1], "last_epoch": step}, folder / "scheduler.pt")
    for rank in range(2):
        torch.save({"cpu": torch.tensor([step, rank])}, folder / f"rng_state_{rank}.pth")


def accelerate(folder: Path, step: int) -> None:
    accelerate_folder(folder)
    save_file(weights(step), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(adam(step), folder / "optimizer.bin")
    for rank in range(2):
        torch.save(
            {"step": step, "torch_manual_seed": torch.tensor([step, rank])}, folder / f"random_states_{rank}.pkl"
        )


def universal(folder: Path, step: int) -> None:
    shapes = {name: value.shape for name, value in weights(step).items()}
    states = {"module": {name: value.bfloat16() for name, value in weights(step).items()}, "global_steps": step}
    saved_below(states | {"param_shapes": [shapes], "dp_world_size": 2}, folder / "mp_rank_00_model_states.pt")
    saved_below({"param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "zero" / "optimizer_state.pt")
    for name, value in weights(step).items():
        for key, values in {"fp32": value, "exp_avg": value * 2, "exp_avg_sq": value * value}.items():
            saved_below({"param": values}, folder / "zero" / name / f"{key}.pt")
        saved_below(torch.tensor(float(step)), folder / "zero" / name / "step.pt")


TABLES = """
    def save(rank, folder, mesh):
        from torch.distributed.tensor import Shard, distribute_tensor
        for step in (20, 10):
            model = {name: distribute_tensor(torch.arange(12.0).reshape(6, 2) + step, mesh, [Shard(axis)])
                for axis, name in enumerate(("a.weight", "b.weight"))}
            state = {"model": model, "optim": {"a.weight": {"step": torch.tensor(float(step))}}, "epoch": step}
            writer = dcp.FileSystemWriter(f"{folder}/dcp-tables/{step}")
            dcp.save(state, storage_writer=writer, use_collectives=False)
            dcp.save({"model": model, "epoch": step}, checkpoint_id=f"{folder}/dcp/{step}")
            pieces = dcp.HuggingFaceStorageWriter(f"{folder}/hf-pieces/{step}", save_distributed=True)
            dcp.save(model, storage_writer=pieces)
"""
BY_TORCH = ("dcp-tables", "dcp", "hf-pieces")
MADE: dict[str, Callable[[Path, int], object]] = {
    **{f"zero-{stage}": zero(stage) for stage in (1, 2, 3)},
    "universal": universal,
    "rank-files": rank_files,
    "megatron": megatron,
    "trainer": trainer,
    "accelerate": accelerate,
    "sharded": lambda folder, step: hub(folder, weights(step)),
    "sharded-bin": lambda folder, step: bins(folder, [{name: value} for name, value in weights(step).items()]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout at both steps: `LAYOUT/STEP`."""
    root = tmp_path_factory.mktemp("saved")
    for name in BY_TORCH:
        (root / name).mkdir()
    save_on_two_ranks(TABLES, root, root)
    for name, make in MADE.items():
        (root / name).mkdir()
        for step in (NEWER, OLDER):
            make(root / name / str(step), step)
    return root


# What happens to them ----------------------------------------------------------------------------------------------

COPIES = (
    "{stem} (1){suffix}", "{stem}(2){suffix}", "{stem} copy{suffix}", "{stem} copy 2{suffix}", "Copy of {name}",
    "{stem} - Copy{suffix}", "{stem} - Copy (2){suffix}", "{stem}.sync-conflict-20261129-1-ABC{suffix}",
    "{stem} (anna's conflicted copy 2026-11-29){suffix}",
)  # fmt: skip
LEFTOVERS = ("{name}.tmp", "{name}~", "{name}.bak", ".{name}.crc", "{name}.incomplete", ".{name}.AbC123", ".{name}.swp")


def beside(file: Path, pattern: str) -> Path:
    return file.with_name(pattern.format(name=file.name, stem=file.stem, suffix=file.suffix))


def disasters() -> Iterator[tuple[str, int, str]]:
    """A layout, the number of one of its files (of as many as there are), and what happens to that."""
    for name in (*MADE, *BY_TORCH):
        for number in range(12):
            yield from ((name, number, how) for how in ("older", "fork", "renamed", *COPIES, *LEFTOVERS))


def done_to(folder: Path, older: Path, file: Path, how: str) -> None:
    before = older / file.relative_to(folder)
    if how == "older":
        shutil.copy(before, file)
    elif how == "fork":
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            path.with_name(f"._{path.name}").write_bytes(RESOURCE_FORK)
    elif how == "renamed":
        file.rename(beside(file, COPIES[0]))
    else:
        shutil.copy(before, beside(file, how))


def leaves(tree: Any, place: tuple[Any, ...] = ()) -> dict[Any, Any]:
    """The values of a tree by their places; of tensors the type, shape and bytes."""
    if isinstance(tree, torch.Tensor):
        return {place: (tree.dtype, tree.shape, tree.contiguous().flatten().view(torch.uint8).tolist())}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else None
    if pairs is None:
        return {place: tree}
    return {path: leaf for key, value in pairs for path, leaf in leaves(value, (*place, key)).items()}


def everything(folder: Path, out: Path, run: Run) -> Any:
    """All that `convert` writes of a folder; None where it refuses it. Megatron's ranks, which need rules, as they
    are."""
    part = ("--part",) if (folder / "mp_rank_00").exists() else ()
    done = run("convert", folder, "--all", *part, "-o", out)
    assert done.code in (0, 2) and out.exists() == (done.code == 0), done
    return leaves(torch.load(out, weights_only=False)) if out.exists() else None


@looped("name, number, how", disasters(), here=0.04, at_once=20)
def test_what_a_verb_takes_for_whole_is_what_was_saved(
    name: str, number: int, how: str, saved: Path, tmp_path: Path, run: Run
) -> None:
    newer, folder = saved / name / str(NEWER), tmp_path / "checkpoint"
    shutil.copytree(newer, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
    done_to(folder, saved / name / str(OLDER), files[number % len(files)], how)
    if not (known := saved / f"{name}.expected.pt").exists():
        assert everything(newer, known, run) is not None
    written, expected = everything(folder, tmp_path / "out.pt", run), leaves(torch.load(known, weights_only=False))
    verified, best = run("verify", folder), run("scan", folder, "--latest-good", "-q")
    if how in COPIES or how in LEFTOVERS or how == "fork":  # which no program reads
        assert written == expected and verified.code == 0, verified
        assert best.out.strip() in (str(folder), str(folder / "model.safetensors")), best
    elif verified.code == 0 and written != expected:
        ties = "nothing shows whether all files come from the same step" in verified.out
        is_alone = name in ("trainer", "accelerate")  # whose files, but for those with a step, say nothing of others
        is_all = written is not None and sorted(map(str, written.values())) == sorted(map(str, expected.values()))
        assert (how == "older" and (ties or is_alone)) or (how == "renamed" and is_all), verified
    elif verified.code and best.code == 0:  # no scan reads values; a model is whole without its optimizer
        assert how == "older" or Path(best.out).name.startswith(("mp_rank_00_model_states", "model")), best


# One by one --------------------------------------------------------------------------------------------------------


@pytest.fixture
def iteration(tmp_path: Path) -> Path:
    """An iteration of Megatron-Core, whose optimizer has names beside those of the model."""
    folder = tmp_path / "iter_0000020"
    state = {"decoder.weight": torch.ones(2, 2), "optimizer.state.exp_avg.decoder.weight": torch.ones(2, 2)}
    save_dcp(state, folder)
    torch.save({"iteration": 20, "optimizer": {"param_groups": [{"step": 20}]}}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


@pytest.mark.parametrize("content", [None, "", '{"sharded_ba', "{}"])
def test_an_iteration_without_its_last_file_is_not_read_as_weights_alone(
    content: str | None, iteration: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out.safetensors"
    for named in (iteration, iteration / ".metadata"):  # the table stands for the folder
        assert run("convert", named, "-o", out, "-f").code == 0
        assert list(load_file(out)) == ["decoder.weight"]
    (iteration / "metadata.json").unlink()
    if content is not None:
        (iteration / "metadata.json").write_text(content)
    for named in (iteration, iteration / ".metadata"):
        done = run("convert", named, "-o", tmp_path / "other.safetensors")
        assert done.code == 2 and done.err.startswith("error[truncated]") and "metadata.json" in done.err
    assert run("scan", tmp_path, "--latest-good", "-q").out.strip() == str(out)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("gathered", [True, False])
def test_a_trainers_tag_of_another_step(stage: int, gathered: bool, tmp_path: Path, run: Run) -> None:
    """Of DeepSpeed, beside weights that were gathered or alone."""
    trainer(tmp_path / "checkpoint-20", NEWER)
    zero(stage)(tmp_path / "checkpoint-20" / "global_step20", NEWER)
    (tmp_path / "checkpoint-20" / "latest").write_text("global_step20")
    (tmp_path / "checkpoint-20" / "optimizer.pt").unlink()
    if not gathered:
        (tmp_path / "checkpoint-20" / "model.safetensors").unlink()
    assert run("verify", tmp_path / "checkpoint-20").code == 0
    shutil.rmtree(tmp_path / "checkpoint-20" / "global_step20")
    zero(stage)(tmp_path / "checkpoint-20" / "global_step20", OLDER)
    done = run("verify", tmp_path / "checkpoint-20")
    assert done.code == 1 and " is of step 10, and trainer_state.json of step 20" in done.out


def test_which_of_several_iterations_was_read_is_said(iteration: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(iteration, tmp_path / "iter_0000030")
    torch.save({"iteration": 30}, tmp_path / "iter_0000030" / "common.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    done = run("convert", tmp_path, "-o", tmp_path / "out.pt")
    assert "other-tags: 1 other checkpoint is beside iter_0000020, which was read: iter_0000030" in done.out


@pytest.mark.parametrize(
    ("name", "file"),
    [("rank-files", "extra_state_world_size_2_rank_0.pt"), ("zero-2", "latest"), ("sharded", "model.safetensors")],
)
def test_a_link_that_leads_nowhere_does_not_end_a_scan(
    name: str, file: str, saved: Path, tmp_path: Path, run: Run
) -> None:
    shutil.copytree(saved / name / str(NEWER), tmp_path / "run" / "global_step20")
    place = tmp_path / "run" / ("" if file == "latest" else "global_step20") / file
    place.unlink(missing_ok=True)
    place.symlink_to("/nowhere/to/be/found")
    shutil.copytree(saved / "trainer" / str(OLDER), tmp_path / "run" / "checkpoint-10")
    done = run("scan", tmp_path / "run", "--json")
    states = {Path(row["path"]).name: row["state"] for row in done.json["files"]}
    assert states["checkpoint-10"] == "good" and len(states) > 1, done


def test_a_universal_folder_without_its_model_states_is_one_that_lacks_them(
    saved: Path, tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "global_step20_universal"
    shutil.copytree(saved / "universal" / str(NEWER), folder)
    (folder / "mp_rank_00_model_states.pt").unlink()
    assert "lacks mp_rank_00_model_states.pt" in run("verify", folder).out
    assert run("scan", tmp_path, "--latest-good").code == 1  # no file of a parameter is a checkpoint


@pytest.mark.parametrize("other", [1, 2])
def test_what_is_not_trained_is_taken_from_a_universal_folder_only_where_its_ranks_agree(
    other: int, saved: Path, tmp_path: Path, run: Run
) -> None:
    """`ds_to_universal` joins what is trained; a buffer or frozen weight that differs may be a rank's part of it."""
    folder = tmp_path / "global_step20_universal"
    shutil.copytree(saved / "universal" / str(NEWER), folder)
    first = torch.load(folder / "mp_rank_00_model_states.pt")
    for rank, value in enumerate((1, other)):
        states = first | {"module": first["module"] | {"frozen": torch.full((4,), value)}}
        torch.save(states, folder / f"mp_rank_{rank:02}_model_states.pt")
    done = run("convert", folder, "-o", tmp_path / "out.safetensors")
    assert done.code == (0 if other == 1 else 2) and ("frozen differs in mp_rank_01" in done.err) == (other == 2), done


@pytest.mark.parametrize("there", [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_one_rank_of_llama_is_never_the_model(there: tuple[int, ...], tmp_path: Path, run: Run) -> None:
    for rank in there:
        torch.save(weights(rank), tmp_path / f"consolidated.{rank:02}.pth")
    done = run("convert", tmp_path, "-o", tmp_path / "out.safetensors")
    assert done.code == 2 and f"{len(there)} of {max(there) + 1} members" in done.err, done
    assert run("verify", tmp_path).code == (len(there) <= max(there))


@pytest.mark.parametrize("name", ["tmp-checkpoint-30", "checkpoint-30.tmp", ".ipynb_checkpoints", ".cache/x"])
def test_what_is_hidden_or_not_finished_is_not_the_latest(name: str, tmp_path: Path, run: Run) -> None:
    trainer(tmp_path / "checkpoint-10", OLDER)
    trainer(tmp_path / name, NEWER)
    assert run("scan", tmp_path, "--latest-good", "-q").out.strip() == str(tmp_path / "checkpoint-10")


def test_keys_that_are_no_strings_are_the_same_behind_a_url(tmp_path: Path) -> None:
    state = {"model": weights(0), "optimizer": adam(3), 3: "three", "empty": {}}
    torch.save(state, tmp_path / "in.pt")
    ckptool.convert(tmp_path / "in.pt", tmp_path / "ours.dcp", ranks=2)
    with RangeServer(tmp_path) as server:
        ckptool.convert(f"{server.url}ours.dcp/", tmp_path / "out.pt")
    assert leaves(torch.load(tmp_path / "out.pt", weights_only=True)) == leaves(state)


def test_what_was_chosen_among_ranks_is_said_where_it_is_written(tmp_path: Path, run: Run) -> None:
    save_ranks(tmp_path / "in", lambda rank, mesh: {"w": divided(FULL["fc.weight"], mesh, [Shard(0)]),
        "running_mean": torch.full((2,), float(rank))})  # fmt: skip
    for verb in (["convert"], ["cast", "--dtype", "f64"]):
        done = run(*verb, tmp_path / "in", "-o", tmp_path / f"{verb[0]}.pt")
        assert done.code == 0 and "replicas-differ: 1 tensor differs between ranks" in done.out + done.err


def test_what_the_ranks_of_zero_hold_twice_is_compared(tmp_path: Path, run: Run) -> None:
    def own(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
        states |= {"random": torch.tensor([rank], dtype=torch.uint8), "epoch": 2}
        share["loss_scaler"] = {"cur_scale": 2.0, "cur_iter": 7}

    def older(rank: int, states: dict[str, Any], share: dict[str, Any]) -> None:
        share["loss_scaler"] = {"cur_scale": 2.0, "cur_iter": 7 - rank}

    done = run("convert", write_zero(tmp_path / "own", 3, 2, change=own), "-o", tmp_path / "own.pt")
    assert "ranks-differ: 1 value differs between ranks, and the first rank's is used: random" in done.out
    for stage in (1, 2, 3):
        done = run("convert", write_zero(tmp_path / f"{stage}", stage, 2, change=older), "-o", tmp_path / "out.pt")
        assert done.code == 2 and "the loss_scaler differs" in done.err


@pytest.mark.parametrize(
    ("content", "words"),
    [({}, "has no tensor in exp_avg.pt"), ({"param": None}, "has no tensor"), ({"param": HALVES}, "the type differs")],
)
def test_every_moment_of_a_universal_folder_is_there_and_of_one_type(
    content: dict[str, Any], words: str, saved: Path, tmp_path: Path, run: Run
) -> None:
    folder = Path(shutil.copytree(saved / "universal" / str(NEWER), tmp_path / "global_step20_universal"))
    torch.save(content, folder / "zero" / "fc.weight" / "exp_avg.pt")
    done = run("convert", folder, "-o", tmp_path / "out.pt")
    assert done.code == 2 and words in done.err, done
