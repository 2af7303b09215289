"""A folder of members is one checkpoint: whole, with each member under its name; or what is wrong is named."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.analysis.verify import verified
from ckptool.checkpoint import Checkpoint, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import BY_TORCH
from ckptool.checkpoint.files import Folder
from ckptool.formats.pieces import Joiner, Piece
from tests.support.cli import Run
from tests.support.engine_cases import ROOT
from tests.support.engine_folders import save_dcp
from tests.support.errors import refused
from tests.support.files import contents
from tests.support.part_files import (
    accelerate_folder,
    pipeline_folder,
    random_weights,
    saved_below,
    sentence_folder,
    trainer_folder,
)


@pytest.fixture
def accelerate(tmp_path: Path) -> Path:
    """What accelerate's save_state wrote on two ranks, FSDP2, SHARDED_STATE_DICT."""
    return Path(shutil.copytree(ROOT / "accelerate-fsdp-sharded" / "checkpoint", tmp_path / "checkpoint_0"))


def test_every_member_is_written(accelerate: Path, tmp_path: Path, run: Run) -> None:
    assert run("convert", str(accelerate), "-o", str(tmp_path / "all.pt")).code == 0
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    names = {"pytorch_model_fsdp_0", "optimizer_0", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"}
    assert found.keys() == names
    for name in names:
        if name.endswith((".bin", ".pkl")):  # each rank's own
            expected = torch.load(accelerate / name, weights_only=False)
            assert str(found[name]) == str(expected) and found[name].keys() == expected.keys()
    weights = load_file(ROOT / "accelerate-fsdp-sharded" / "weights.safetensors")
    model = found["pytorch_model_fsdp_0"]["model"]
    assert model.keys() == weights.keys() and all(model[name].equal(value) for name, value in weights.items())
    assert set(found["optimizer_0"]["optimizer"]["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_who_wrote_a_folder_is_said_and_not_written(accelerate: Path, tmp_path: Path, run: Run) -> None:
    saved_below({"note": 1}, accelerate / "custom_checkpoint_0.pkl")
    (accelerate / "trainer_state.json").write_text('{"global_step": 2}')
    assert "\nengine: transformers, saved by 2 ranks, step 2\n" in run("inspect", str(accelerate)).out
    assert "(transformers, saved by 2 ranks, step 2)" in run("doctor", str(accelerate)).out
    said = json.loads(run("inspect", str(accelerate), "--json").out)["metadata"]
    assert said == {"engine": "transformers", "ranks": 2, "step": 2}
    for folder, at in ((accelerate, ""), (accelerate / "pytorch_model_fsdp_0", "")):
        out = tmp_path / f"{folder.name}.safetensors"
        assert run("convert", f"{folder}{at}", "-o", str(out)).code == 0
        with safe_open(out, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert run("convert", str(accelerate), "-o", str(tmp_path / "hf/"), "--shard-size", "1MB").code == 0
    assert "accelerate" not in "".join(path.read_text() for path in (tmp_path / "hf").glob("*.json"))


def test_how_far_a_trainer_got_is_said(tmp_path: Path, run: Run) -> None:
    save_file({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1200, "epoch": 1.5}')
    for verb in ("inspect", "verify"):
        assert "3 of 3 members are whole, saved at step 1,200: the weights," in run(verb, str(tmp_path)).out


@pytest.mark.parametrize("models", [1, 2, 3])
@pytest.mark.parametrize("safe", [True, False])
def test_the_weights_of_several_models_are_not_taken_for_one(safe: bool, models: int, tmp_path: Path, run: Run) -> None:
    """As accelerate's `save_state` numbers them; the first of them is the smallest."""
    folder, out = tmp_path / "checkpoint_0", str(tmp_path / "out")
    folder.mkdir()
    base, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    names = [f"{base}{f'_{number}' if number else ''}{suffix}" for number in range(models)]
    for number, name in enumerate(names):
        weights = {"a.weight": torch.full((2 + 9 * number, 2), float(number))}
        save_file(weights, folder / name) if safe else torch.save(weights, folder / name)
    torch.save({"step": 3}, folder / "random_states_0.pkl")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    verbs = "convert", "cast --dtype f64", "add-module", "slim", "rename 'a.* => b.*'", f"average {folder}"
    for verb in verbs:
        for end in (".pt", ".safetensors", "/"):
            ran = run(verb.split()[0], folder, *shlex.split(verb)[1:], "-o", out + end)
            assert ran.code == (2 if models > 1 else 0), (verb, end, ran)
            if models > 1:
                assert f"weights of {models} models" in ran.err and not Path(out + end).exists()
            else:
                shutil.rmtree(out) if end == "/" else Path(out + end).unlink(missing_ok=True)
    if models > 1:  # nor in place
        assert run("cast", folder, "--dtype", "f64", "--in-place").err.count(f": {folder / names[1]};") == 1
    for number, name in enumerate(names):
        assert run("convert", folder / name, "-o", out + ".pt", "-f").code == 0
        assert torch.load(out + ".pt")["a.weight"].eq(number).all()
    assert run("convert", folder, "--all", "-o", out + ".pt", "-f").code == 0
    assert all(name in torch.load(out + ".pt", weights_only=False) for name in names)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("random_states_1.pkl", "random_states_1.pkl is missing"),
        ("pytorch_model_fsdp_0", "pytorch_model_fsdp_0 is missing"),
        ("optimizer_0/.metadata", "optimizer_0"),
        ("optimizer_0/__1_0.distcp", "__1_0.distcp"),
    ],
)
def test_what_is_missing_is_named(name: str, problem: str, accelerate: Path, tmp_path: Path, run: Run) -> None:
    path = accelerate / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(tmp_path)
    done = run("convert", str(accelerate), "-o", str(tmp_path / "all.pt"))
    assert done.code == 2 and "error[part]" in done.err and problem in done.err, done.err
    assert run("rename", str(accelerate), "* => a.*", "-o", str(tmp_path / "all.pt")).code == 2
    found = run("doctor", str(accelerate))
    assert found.code == 1 and problem in found.out and "--part -o" in found.out, found.out
    assert run("scan", str(tmp_path), "--latest-good", "-q").code == 1
    assert contents(tmp_path) == before
    if name != "pytorch_model_fsdp_0":
        assert run("convert", str(accelerate), "--part", "-o", str(tmp_path / "some.pt")).code == 0


def test_folders_of_bytecheckpoint(tmp_path: Path, run: Run) -> None:
    weights = random_weights("fc.weight")
    for name, state in (
        ("model", {"model": weights}),
        ("optimizer", {"state": {"fc.weight": {"exp_avg": torch.ones(3, 4)}}}),
        ("extra_state", {"rng": torch.ones(2)}),
    ):
        save_dcp(state, tmp_path / "step_4" / name)
    found = ckptool.open(tmp_path / "step_4")
    assert (found.container, list(found.tree), found.part) == ("folder", ["model", "optimizer", "extra_state"], None)
    assert run("convert", str(tmp_path / "step_4"), "-o", str(tmp_path / "w.safetensors")).code == 0
    assert load_file(tmp_path / "w.safetensors")["fc.weight"].equal(weights["fc.weight"])
    (tmp_path / "step_4" / "extra_state" / ".metadata").unlink()
    assert "extra_state" in ckptool.open(tmp_path / "step_4").part.meaning


def test_models_in_folders_of_their_own(tmp_path: Path, run: Run) -> None:
    """As the training scripts of diffusers save them, by hooks of accelerate's `save_state`."""
    folder = accelerate_folder(tmp_path / "checkpoint-500")
    for name in ("unet", "unet_ema"):
        (folder / name).mkdir()
        shutil.copy(folder / "model.safetensors", folder / name / "diffusion_pytorch_model.safetensors")
        (folder / name / "config.json").write_text('{"_class_name": "UNet", "_diffusers_version": "0.3"}')
    (folder / "model.safetensors").unlink()
    found = run("convert", str(folder), "-o", str(tmp_path / "w.safetensors"))
    assert found.code == 0 and "took unet, not its average unet_ema" in found.out
    assert run("verify", str(folder)).code == 0
    (folder / "l.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["fc"]}')
    rows = load_file(tmp_path / "w.safetensors")["fc.weight"].shape
    save_file(
        {"fc.lora_A.weight": torch.ones(1, rows[1]), "fc.lora_B.weight": torch.ones(rows[0], 1)}, tmp_path / "l.sft"
    )
    for number, words in enumerate(
        ("average {0} {0}#unet", f"lora merge {{0}}#unet {tmp_path / 'l.sft'} --config {{0}}/l.json")
    ):
        assert run(*words.format(folder).split(), "-o", f"{tmp_path / str(number)}/").code == 0
        assert sorted(os.listdir(tmp_path / str(number))) == ["config.json", "diffusion_pytorch_model.safetensors"]
    (folder / "unet_ema" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    assert "unet_ema" in ckptool.open(folder).part.meaning
    (tmp_path / "run" / "mine").mkdir(parents=True)  # an adapter with a name, as a Trainer saves it
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    shutil.copy(weights, tmp_path / "run" / "mine" / "adapter_model.safetensors")
    (tmp_path / "run" / "mine" / "adapter_config.json").write_text("{}")
    (tmp_path / "run" / "trainer_state.json").write_text('{"global_step": 5}')
    trainer_folder(tmp_path / "run" / "checkpoint-5")  # one of its own
    assert [*ckptool.open(tmp_path / "run").tree] == ["mine", "trainer_state.json"]
    router = tmp_path / "router"  # of sentence-transformers, which chooses among modules
    shutil.move(folder / "unet", router / "query_0_Static")
    (router / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "Router"}]')
    (router / "router_config.json").write_text('{"types": {"query_0_Static": "Static", "document_0_Static": "Static"}}')
    assert ckptool.open(router).part.meaning.endswith("sentence-transformers; document_0_Static is missing")
    shutil.copytree(router / "query_0_Static", router / "document_0_Static")
    assert ckptool.open(router).part is None and len(ckptool.open(router).tree) == 2


def test_other_models_beside_the_weights_are_said_and_kept(tmp_path: Path, run: Run) -> None:
    """Adapters with names (PEFT's `save_pretrained`), an average, as a folder or a file: those of callbacks."""
    folder = trainer_folder(tmp_path / "run" / "checkpoint-500")
    for name, file in (("second", "adapter_model"), ("ema", "model")):
        (folder / name).mkdir()
        shutil.copy(folder / "model.safetensors", folder / name / f"{file}.safetensors")
        (folder / name / f"{'adapter_' * (name == 'second')}config.json").write_text("{}")
    torch.save({"fc.weight": torch.ones(2)}, folder / "ema.pt")
    (folder / "notes.pt.txt").write_text("none")
    left = run("convert", folder, "-o", tmp_path / "w.safetensors").out.partition("weights are written: ")[2]
    assert left.startswith("ema, ema.pt, second, optimizer.pt") and left.rstrip().endswith("and 2 more")
    assert "not ema, ema.pt, second, optimizer.pt" in run("diff", folder, folder).out
    assert run("convert", folder, "--all", "-o", tmp_path / "all.pt").code == 0
    assert {"model.safetensors", "ema", "second", "optimizer.pt", "ema.pt"} <= ckptool.open(tmp_path / "all.pt").keys()
    rows = sorted(row.path for row in ckptool.scan(tmp_path / "run").files)
    assert rows == [str(folder / name) for name in ("", "ema", "ema.pt", "second")]
    trainer_folder(tmp_path / "run")  # what is saved at the end, beside the checkpoints
    shutil.copytree(folder / "ema", tmp_path / "run" / "best")
    left = run("convert", tmp_path / "run", "-o", tmp_path / "w2.safetensors").out.partition("weights are written: ")[2]
    assert left.startswith("best, optimizer.pt") and "checkpoint-500" not in left


# Do they belong together? ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "state", "wrong"),
    [
        (500, 500, 500, ""),
        (498, 498, 500, ""),  # a gradient scaler skipped two
        (400, 500, 500, "optimizer.pt is of step 400, and scheduler.pt of step 500"),
        (500, 400, 500, "scheduler.pt is of step 400, and optimizer.pt of step 500"),
        (500, 500, 400, "trainer_state.json is of step 400, and optimizer.pt of step 500"),
    ],
)
def test_members_of_other_steps_are_named(
    optimizer: int, scheduler: int, state: int, wrong: str, tmp_path: Path, run: Run
) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-500", step=state)
    steps = {number: {"step": torch.tensor(float(optimizer)), "exp_avg": torch.ones(2)} for number in range(2)}
    saved_below({"state": steps, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, folder / "optimizer.pt")
    saved_below({"last_epoch": scheduler, "base_lrs": [0.1]}, folder / "scheduler.pt")
    done = run("convert", str(folder), "-o", str(tmp_path / "out.safetensors"))
    assert (done.code, wrong in done.err) == (2 if wrong else 0, True), done.err
    assert wrong in run("doctor", str(folder)).out
    assert (run("scan", str(tmp_path), "--latest-good", "-q").code == 0) == (not wrong)


# verify ---------------------------------------------------------------------------------------------------------------


def piece(path: Path, value: torch.Tensor, offset: int) -> None:
    places = json.dumps({"fc.weight": {"saved_offsets": [offset, 0]}})
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": places}
    save_file({"fc.weight": value}, path, metadata=metadata)


def test_replicas_without_checksums_are_compared(tmp_path: Path, run: Run) -> None:
    """Pieces in safetensors, as HSDP writes them: two ranks each have the same half."""
    for rank in range(4):
        half = torch.full((2, 3), float(rank % 2))
        piece(tmp_path / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", half, 2 * (rank % 2))
    assert run("verify", str(tmp_path)).code == 0
    piece(tmp_path / "shard-00004-model-00001-of-00001.safetensors", torch.full((2, 3), 7.0), 2)
    done = run("verify", str(tmp_path))
    assert done.code == 1 and "conflict" in done.out and "fc.weight" in done.out, done
    assert run("convert", str(tmp_path), "-o", str(tmp_path / "out.safetensors")).code == 2
    assert not (tmp_path / "out.safetensors").exists()


def test_each_tensor_whose_replicas_differ_is_a_problem() -> None:
    def block(value: int) -> TensorEntry:
        return TensorEntry(Storage(InlineBytes(bytes([value] * 4))), BY_TORCH["uint8"], (4,), (1,))

    joiner = Joiner(Folder("."), "x")
    tree = {
        "same": joiner.tensor("same", (4,), BY_TORCH["uint8"], [Piece(block(1), (0,)), Piece(block(1), (0,))]),
        "not": joiner.tensor("not", (4,), BY_TORCH["uint8"], [Piece(block(1), (0,)), Piece(block(2), (0,))]),
    }
    (problem,) = verified(Checkpoint(tree, "folder"))[0].problems
    assert (problem.code, problem.tensors) == ("conflict", ("not",))


@pytest.mark.parametrize("name", ["..", ".", "../other", "/etc", "unet/../../other"])
def test_tables_that_lead_elsewhere_are_not_followed(name: str, tmp_path: Path) -> None:
    pipeline_folder(tmp_path / "other")
    save_file(random_weights("secret.weight"), tmp_path / "model.safetensors")
    folder = pipeline_folder(tmp_path / "pipeline")
    for file, table in (
        ("model_index.json", {"_class_name": "P", "unet": ["diffusers", "UNet"], name: ["diffusers", "UNet"]}),
        ("modules.json", [{"idx": 0, "name": "0", "path": name, "type": "m"}]),
    ):
        (folder / file).write_text(json.dumps(table))
        assert set(ckptool.open(folder).tree) == {"unet"}
    (folder / "model_index.json").unlink()
    refused(ckptool.CkptoolError, tmp_path, lambda: ckptool.open(folder))


# Training state beside weights ----------------------------------------------------------------------------------------


BESIDE = ["optimizer", "train_state", "lr_scheduler", "dataloader"]


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"tok.weight": torch.arange(6.0).view(3, 2), "norm.weight": torch.ones(2)}


@pytest.fixture
def folder(weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    slots = {f"state.{name}.exp_avg": torch.zeros_like(value) for name, value in weights.items()}
    slots |= {f"state.{name}.exp_avg_sq": torch.zeros_like(value) for name, value in weights.items()}
    groups = {f"param_groups.{name}.lr": 0.1 for name in weights}
    training: dict[str, Any] = {
        "optimizer": {**slots, **groups},
        "train_state": {"step": torch.tensor(2), "ntokens_seen": 7},
        "lr_scheduler": {"last_epoch": 2},
        "dataloader": {"dp_rank_0": b"bytes", "world_size": 1},
    }
    save_dcp({**weights, **training}, tmp_path / "step-2")
    return tmp_path / "step-2"


def test_each_part_is_shown_with_its_own_tensors(folder: Path, run: Run) -> None:
    shown = run("inspect", str(folder), "--depth", "0").out
    assert "model weights: 2 tensors" in shown
    assert "Adam state for 2 parameters (lr 0.1): 4 tensors" in shown
    assert all(name in shown for name in BESIDE)


def test_the_mean_is_of_the_weights_alone(folder: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    done = ckptool.average([folder, folder], tmp_path / "mean.safetensors")
    assert done.facts["left_behind"] == BESIDE and done.facts["kept"] == {}
    found = load_file(tmp_path / "mean.safetensors")
    assert found.keys() == weights.keys() and all(found[name].equal(weights[name]) for name in weights)


def test_what_keeps_a_folder_from_being_its_model_is_named(tmp_path: Path) -> None:
    """Without modules.json, sentence-transformers pools as it likes: other embeddings, and no error."""
    folder = sentence_folder(tmp_path / "st")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    text = str(ckptool.cast(folder, f"{tmp_path / 'half'}/", dtype="bf16"))
    assert "left out: modules.json (other modules" in text and "2_Dense" in text
    copied = shutil.copytree(folder, tmp_path / "copy")
    ckptool.cast(copied / "model.safetensors", in_place=True, dtype="bf16")
    assert load_file(copied / "model.safetensors")["embeddings.weight"].dtype is torch.bfloat16
    assert ckptool.verify(copied).fine


def test_a_module_that_saves_no_file_is_not_missed(tmp_path: Path) -> None:
    """As in all-MiniLM-L6-v2 and nearly every such model on the hub, where git keeps no empty folder."""
    folder = sentence_folder(tmp_path / "st")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    assert ckptool.verify(folder).fine and ckptool.open(folder).part is None
    shutil.rmtree(folder / "1_Pooling")
    assert "1_Pooling is missing" in ckptool.open(folder).part.meaning


def test_a_module_of_sentence_transformers_without_its_weights_is_missed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "sentence-transformers" / "checkpoint", tmp_path / "st"))
    for file in sorted(folder.rglob("*.safetensors")):
        kept = file.read_bytes()
        file.unlink()
        found = ckptool.verify(folder)
        assert not found.fine and str(file.relative_to(folder)) in str(found), file
        file.write_bytes(kept)
    assert ckptool.verify(folder).fine


def test_links_that_lead_out_of_a_folder_are_named(tmp_path: Path) -> None:
    """Those into a hub's cache, where all files are links, are not."""
    hub = tmp_path / "models--a--b"
    for folder in ("blobs", "snapshots/123/encoder", "mine"):
        (hub / folder).mkdir(parents=True)
    weights = {"encoder.weight": torch.ones(3)}
    save_file(weights, hub / "blobs" / "456")
    index = json.dumps({"weight_map": dict.fromkeys(weights, "model-1-of-1.safetensors")})
    for folder in (hub / "snapshots" / "123", hub / "mine"):
        (folder / "model.safetensors.index.json").write_text(index)
        (folder / "model-1-of-1.safetensors").symlink_to(hub / "blobs" / "456")
    found = {place: ckptool.verify(hub / place).notes for place in ("snapshots/123", "mine")}
    assert [note.code for note in found["snapshots/123"]] == []
    (note,) = found["mine"]
    assert note.code == "link-elsewhere" and note.message.endswith(f"→ {hub / 'blobs' / '456'}")
    shutil.copytree(hub / "mine", tmp_path / "copy")
    (tmp_path / "copy" / "model-2.safetensors").symlink_to("model-1-of-1.safetensors")
    assert not ckptool.verify(tmp_path / "copy").notes


@pytest.mark.parametrize("form", ["names", "ids", "flat"])
def test_an_optimizer_beside_the_weights_is_told_with_what_names_it(form: str, tmp_path: Path, run: Run) -> None:
    folder, out = ROOT / "accelerate-plain" / "checkpoint", tmp_path / "out.pt"
    told = run("convert", folder, "--optimizer-as", form, "-o", out).err.rpartition(": ckptool ")[2]
    assert f"--optimizer-as {form}" in told and ("--against MODEL" in told) == (form != "ids")
    placeholders = {"OUT": str(out), "MODEL": str(folder.parent / "model.spec.json")}
    assert run(*(placeholders.get(word, word) for word in shlex.split(told))).code == 0 and out.exists()
