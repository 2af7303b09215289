"""`convert -o DIR/`: the names that a library looks for, the files that go along, and what does not."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptool
from ckptool.errors import CkptoolError, UsageError
from ckptool.formats.model_folder import with_dtype
from fixtures.engines import cases
from tests.support.cli import Run
from tests.support.files import contents, saved
from tests.support.looped import looped
from tests.support.part_files import random_weights, saved_below, trainer_folder

CONFIGS = {
    "transformers": ("model", "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
    "diffusers": ("diffusion_pytorch_model", "config.json", {"_class_name": "UNet", "_diffusers_version": "0.42.1"}),
    "peft": ("adapter_model", "adapter_config.json", {"peft_type": "LORA"}),
    "timm": ("model", "config.json", {"architecture": "vit"}),
}


WITHOUT = pickle.dumps(OrderedDict())


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).state_dict()


def model_in(folder: Path, config: Any = None, name: str = "config.json", **files: str) -> Path:
    """The path of a checkpoint in a folder with a configuration, and with other files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(CONFIGS["transformers"][2] if config is None else config, indent=2))
    for file, text in files.items():
        (folder / file).write_text(text)
    return saved(state(), folder / "weights.pt")


@pytest.mark.parametrize("library", CONFIGS)
def test_every_verb_writes_the_names_of_the_library(library: str, tmp_path: Path) -> None:
    stem, config, content = CONFIGS[library]
    file = model_in(tmp_path / "in", content, config)
    ckptool.convert(file, f"{tmp_path / 'folder'}/")
    ckptool.cast(tmp_path / "folder", f"{tmp_path / 'cast'}/", "f16")
    ckptool.average([tmp_path / "folder"] * 2, f"{tmp_path / 'mean'}/")
    ckptool.rename(tmp_path / "folder", "0.* => first.*", f"{tmp_path / 'renamed'}/")
    for out in ("cast", "mean", "renamed"):
        assert sorted(contents(tmp_path / out)) == sorted([config, f"{stem}.safetensors"])


@looped("content", [*(pickle.dumps(each) for each in ({}, [], OrderedDict())), b"", b"\x80", WITHOUT + b"."])
def test_a_pickle_in_an_index_that_is_no_state_dict_is_refused(content: bytes, tmp_path: Path, run: Run) -> None:
    ckptool.convert(saved(state(), tmp_path / "a.pt"), tmp_path / "out", shard_size="64B")
    path = tmp_path / "out/model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["ckptool.pickle"] = base64.b64encode(content).decode()
    path.write_text(json.dumps(index))
    assert run("inspect", tmp_path / "out").code == 2


def test_what_goes_along_and_what_does_not(tmp_path: Path, run: Run) -> None:
    file = model_in(
        tmp_path / "in",
        **{"tokenizer.json": "{}", "merges.txt": "a b", "modeling_x.py": "1/0", "notes.txt": "-", "spiece.model": "\n"},
    )
    saved(state(), tmp_path / "in/gensim.model")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "in/vocab.json").symlink_to(tmp_path / "secret")
    (tmp_path / "in/added_tokens.json").symlink_to("tokenizer.json")
    (tmp_path / "in/tokenizer_config.json").mkdir()
    done = run("convert", file, "-o", tmp_path / "out", "--shard-size", "1MB")
    assert done.code == 0
    assert sorted(contents(tmp_path / "out")) == [
        "added_tokens.json", "config.json", "merges.txt", "model.safetensors", "spiece.model",
        "tokenizer.json",
    ]  # fmt: skip
    for name, why in (
        ("modeling_x.py", "code is never copied"),
        ("gensim.model", "a checkpoint"),
        ("vocab.json", "a link that leads outside"),
        ("tokenizer_config.json", "not a file"),
    ):
        assert f" {name} ({why}" in done.out.partition("left out:")[2], name


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots/abc"
    blobs.mkdir(parents=True)
    file = model_in(snapshot)
    for name in ("config.json", "weights.pt"):
        os.rename(snapshot / name, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    ckptool.convert(file, f"{tmp_path / 'out'}/")
    assert not (tmp_path / "out/config.json").is_symlink() and (tmp_path / "out/config.json").exists()


def test_a_folder_of_the_same_model_has_to_have_a_configuration(tmp_path: Path) -> None:
    file = saved(state(), tmp_path / "a.pt")
    (tmp_path / "like").mkdir()
    with pytest.raises(UsageError, match=r"has no config\.json or"):
        ckptool.convert(file, f"{tmp_path / 'out'}/", like=tmp_path / "like")
    (tmp_path / "like/config.json").write_text("{")
    with pytest.raises(UsageError, match="of a library that is known"):
        ckptool.convert(file, f"{tmp_path / 'out'}/", like=tmp_path / "like")
    with pytest.raises(UsageError, match="like writes a folder"):
        ckptool.convert(file, tmp_path / "out.pt", like=tmp_path / "like")
    assert not (tmp_path / "out").exists()


def test_the_dtype_of_a_configuration_changes_and_nothing_else() -> None:
    for key in ("dtype", "torch_dtype"):
        config = {"model_type": 'a "dtype": "float16" b', key: "float32", "eps": 1e-05, "n": None}
        config["text_config"] = {key: "torch.float16", "rope": None, "é": "float16"}
        config["quantization_config"] = {"dtype": "float16"}  # in which it is computed
        found = with_dtype(config, "bfloat16")
        assert list(found) == list(config)
        assert found == config | {key: "bfloat16", "text_config": {**config["text_config"], key: "bfloat16"}}
        assert with_dtype(found, "bfloat16") == found


def test_a_configuration_of_something_else_stays_where_it_is(tmp_path: Path, run: Run) -> None:
    file = model_in(tmp_path / "in", {"learning_rate": 0.1}, **{"tokenizer.json": "{}"})
    for text in (None, "{ // comment", "[" * 100_000, '{"model_type": ' + '{"a": ' * 3_000 + "1" + "}" * 3_001):
        if text is not None:
            (tmp_path / "in/config.json").write_text(text)
        done = run("convert", file, "-o", f"{tmp_path / 'out'}/", "-f")
        assert done.code == 0 and "left out: config.json (" in done.out, text
        assert sorted(contents(tmp_path / "out")) == ["model.safetensors"]


def test_a_wrappers_prefix_is_said_and_kept(tmp_path: Path, run: Run) -> None:
    wrapped = {f"module.{name}": value for name, value in state().items()}
    like = model_in(tmp_path / "like").parent
    done = run("convert", saved(wrapped, tmp_path / "a.pt"), "-o", f"{tmp_path / 'out'}/", "--like", like, "--json")
    found = json.loads(done.out)
    assert load_file(tmp_path / "out/model.safetensors").keys() == wrapped.keys()
    (note,) = [note for note in found["notes"] if note["code"] == "prefix-module"]
    assert run(*note["fix"][1:]).code == 0
    assert load_file(tmp_path / "out-bare/model.safetensors").keys() == state().keys()
    assert (tmp_path / "out-bare/config.json").exists()
    lightning = {"state_dict": {f"model.{name}": value for name, value in state().items()}}
    file = saved({**lightning, "pytorch-lightning_version": "2.6.6"}, tmp_path / "l.ckpt")
    done = run("convert", file, "-o", f"{tmp_path / 'l'}/", "--like", like, "--json")
    (note,) = [note for note in json.loads(done.out)["notes"] if note["code"] == "prefix-module"]
    assert run(*note["fix"][1:]).code == 0
    assert load_file(tmp_path / "l-bare/model.safetensors").keys() == state().keys()


def test_what_the_container_cannot_hold_of_a_member_is_refused(tmp_path: Path) -> None:
    folder = Path(cases.__file__).parent / "trainer" / "checkpoint"
    with pytest.raises(CkptoolError, match=r"training_args\.bin"):
        ckptool.convert(folder, tmp_path / "out.safetensors", all=True)


# Weights that stand for a folder of several files ---------------------------------------------------------------------


def test_what_is_changed_in_place_leaves_nothing(tmp_path: Path, run: Run) -> None:
    found = run("add-module", str(trainer_folder(tmp_path / "step-500")), "--in-place")
    assert found.code == 0 and "left out" not in found.out, found


def test_a_folder_of_two_formats_is_not_damaged(tmp_path: Path, run: Run) -> None:
    saved_below(random_weights("a.weight"), tmp_path / "pytorch_model.bin")
    ckptool.convert(tmp_path / "pytorch_model.bin", tmp_path / "model.safetensors")
    found = run("verify", str(tmp_path))
    assert found.code == 2 and "error[ambiguous]" in found.err and "damaged" not in found.out, found
    with pytest.raises(CkptoolError, match="2 checkpoints"):
        ckptool.verify(tmp_path)
    assert "OSError" not in run("doctor", str(tmp_path)).out
