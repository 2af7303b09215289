"""`convert` both ways: what stock safetensors reads, what is left behind, what comes back. `convert -o DIR/`: the names
that a library looks for, the files that go along. `--ties`: tied, deduplicated and overlapping tensors in every
container, as we and other loaders see them."""

import base64
import json
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool
from ckptool.errors import CkptoolError
from ckptool.formats import WRITERS, read
from ckptool.formats.model_folder import with_dtype
from fixtures.engines import cases
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.formats.contract import same_for_torch
from tests.support.cli import Run
from tests.support.errors import refused
from tests.support.files import contents, load, saved, weights
from tests.support.looped import looped
from tests.support.part_files import random_weights, saved_below, trainer_folder
from tests.support.same import assert_same_objects, assert_same_tree
from tests.support.small_models import bits, deduplicated, model_folder

KINDS = [name for name in PRODUCERS if "legacy" not in name and name not in ("whole_module.pt",)]
# What a plain safetensors file can hold.


# Tensors that it can hold: of its own types, of any strides, without elements, sharing bytes in part.
DTYPES = [f"09-{str(dtype).removeprefix('torch.')}" for dtype in safetensors.torch._TYPES.values()]
PLAIN = [name for name in TRAPS if name in DTYPES or name[:2] in ("02", "05", "06", "07", "10", "16")]


@looped("name", PLAIN)
def test_stock_safetensors_reads_every_value_in_row_major_order(name: str, tmp_path: Path) -> None:
    file, out = saved(TRAPS[name](), tmp_path / "in.pt"), tmp_path / "out.safetensors"
    if name == "09-float4_e2m1fn_x2":  # packed: a scalar of it has no shape there
        refused("unsupported", tmp_path, lambda: ckptool.convert(file, out), "scalar")
        return
    ckptool.convert(file, out, verify=True)
    before, after = load(file), safetensors.torch.load_file(out)
    for key, tensor in before.items():
        assert (
            after[key].shape == tensor.shape and after[key].dtype == tensor.dtype and bits(after[key]) == bits(tensor)
        )
    assert list(read(out).tree) == list(before), "the order of keys is kept"
    assert out.stat().st_size < 100_000


@looped("name", KINDS, here=1 / 3)
def test_all_of_every_fixture_and_back(name: str, tmp_path: Path) -> None:
    file, there = make(name, tmp_path), tmp_path / "all.safetensors"
    done = ckptool.convert(file, there, all=True, verify=True)
    assert done.facts["left_behind"] == [] and done.facts["tensors"] > 0
    safetensors.torch.load_file(there)  # stock reads its tensors
    ckptool.convert(there, tmp_path / "back.pt", verify=True)
    assert_same_tree(read(file), read(tmp_path / "back.pt"))
    if file.suffix != ".safetensors":
        same_for_torch(file, tmp_path / "back.pt", mmap=name != "rezipped_deflated.pt")


def test_what_in_place_edits_left_is_gone(tmp_path: Path) -> None:
    file = make("training_sgd.pt", tmp_path)
    before, size = load(file), file.stat().st_size
    for _ in range(3):
        ckptool.add_module(file, in_place=True)
        ckptool.strip_module(file, in_place=True, prefix="module.")
    assert file.stat().st_size > size + 5000
    ckptool.convert(file, tmp_path / "out.pt", verify=True)
    assert abs((tmp_path / "out.pt").stat().st_size - size) < 600
    assert_same_objects(before, load(tmp_path / "out.pt"))


# `-o DIR/`.
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
    kept = "added_tokens.json config.json merges.txt model.safetensors spiece.model tokenizer.json"
    assert sorted(contents(tmp_path / "out")) == kept.split()
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
    file, like = saved(state(), tmp_path / "a.pt"), tmp_path / "like"
    like.mkdir()
    convert = partial(ckptool.convert, file, f"{tmp_path / 'out'}/", like=like)
    refused("usage", tmp_path, convert, r"has no config\.json or")
    (like / "config.json").write_text("{")
    refused("usage", tmp_path, convert, "of a library that ckptool knows")
    refused("usage", tmp_path, lambda: ckptool.convert(file, tmp_path / "o.pt", like=like), "like writes a folder")


def test_the_dtype_of_a_configuration_changes_and_nothing_else() -> None:
    for key in ("dtype", "torch_dtype"):
        config = {"model_type": 'a "dtype": "float16" b', key: "float32", "eps": 1e-05, "n": None}
        config["text_config"] = {key: "torch.float16", "rope": None, "é": "float16"}
        config["quantization_config"] = {"dtype": "float16"}  # in which it is computed
        found = with_dtype(config, "bfloat16")
        assert list(found) == list(config)
        assert found == config | {key: "bfloat16", "text_config": {**config["text_config"], key: "bfloat16"}}
        assert with_dtype(found, "bfloat16") == found


def test_a_configuration_beside_weights_that_were_cast_in_place_is_said_to_name_another_dtype(tmp_path: Path) -> None:
    for named, stale in (("float32", True), ("bfloat16", False)):
        weights = model_folder(tmp_path / named, state(), torch_dtype=named) / "model.safetensors"
        before = ckptool.cast(weights, dtype="bf16", in_place=True, dry_run=True).details
        done = ckptool.cast(weights.parent, dtype="bf16", in_place=True)
        assert [any("config.json beside it" in line for line in each) for each in (before, done.details)] == [stale] * 2


def test_a_configuration_of_something_else_stays_where_it_is(tmp_path: Path, run: Run) -> None:
    file = model_in(tmp_path / "in", {"learning_rate": 0.1}, **{"tokenizer.json": "{}"})
    for text in (None, "{ // comment", "[" * 100_000, '{"model_type": ' + '{"a": ' * 99_999 + "1" + "}" * 100_000):
        if text is not None:
            (tmp_path / "in/config.json").write_text(text)
        done = run("convert", file, "-o", f"{tmp_path / 'out'}/", "-f")
        assert done.code == 0 and "left out: config.json (" in done.out, text
        assert sorted(contents(tmp_path / "out")) == ["model.safetensors"]


def test_a_wrappers_prefix_is_said_and_kept(tmp_path: Path, run: Run) -> None:
    like = model_in(tmp_path / "like").parent
    wrapped, lightning = ({f"{prefix}.{k}": v for k, v in state().items()} for prefix in ("module", "model"))
    trees = {"out": wrapped, "l": {"state_dict": lightning, "pytorch-lightning_version": "2.6.6"}}
    for name, tree in trees.items():
        file = saved(tree, tmp_path / f"{name}.ckpt")
        done = run("convert", file, "-o", f"{tmp_path / name}/", "--like", like, "--json")
        (note,) = [note for note in done.json["notes"] if note["code"] == "prefix-module"]
        assert load_file(tmp_path / name / "model.safetensors").keys() == (tree.get("state_dict") or tree).keys()
        assert run(*note["fix"][1:]).code == 0
        assert load_file(tmp_path / f"{name}-bare/model.safetensors").keys() == state().keys()
        assert (tmp_path / f"{name}-bare/config.json").exists()


def test_what_is_changed_in_place_leaves_nothing(tmp_path: Path, run: Run) -> None:
    found = run("add-module", str(trainer_folder(tmp_path / "step-500")), "--in-place")
    assert found.code == 0 and "left out" not in found.out, found


def test_a_folder_of_two_formats_is_not_damaged(tmp_path: Path, run: Run) -> None:
    saved_below(random_weights("a.weight"), tmp_path / "pytorch_model.bin")
    ckptool.convert(tmp_path / "pytorch_model.bin", tmp_path / "model.safetensors")
    found = run("verify", str(tmp_path))
    assert found.code == 0 and "not-read: pytorch_model.bin was not read" in found.out + found.err, found
    ckptool.convert(tmp_path / "pytorch_model.bin", tmp_path / "adapter_model.safetensors")
    found = run("verify", str(tmp_path))
    assert found.code == 2 and "error[ambiguous]" in found.err and "damaged" not in found.out, found
    refused(CkptoolError, tmp_path, lambda: ckptool.verify(tmp_path), "2 checkpoints")
    assert "OSError" not in run("doctor", str(tmp_path)).out


SIZE = 1024
Tensors = dict[str, torch.Tensor]


# `--ties`.
def stored_once(folder: Path) -> Path:
    """Two names of equal bytes that are stored once, and are two tensors."""
    state = {"a": torch.arange(float(SIZE)), "b": torch.arange(float(SIZE)), "c": torch.ones(3)}
    assert deduplicated(saved(state, folder / "plain.pt"), folder / "in.pt") == 1
    return folder / "in.pt"


def stored_once_in_safetensors(folder: Path) -> Path:
    metadata = {"format": "pt", "b": "a", "ckptool.twins": '["b"]'}
    save_file({"a": torch.arange(float(SIZE)), "c": torch.ones(3)}, folder / "in.safetensors", metadata)
    return folder / "in.safetensors"


def tied(folder: Path) -> Path:
    weight = torch.arange(float(SIZE))
    return saved({"a": weight, "b": weight, "c": torch.ones(3)}, folder / "in.pt")


def overlapping(folder: Path) -> Path:
    whole = torch.arange(1.5 * SIZE)
    return saved({"a": whole[:SIZE], "b": whole[SIZE // 2 :], "c": torch.ones(3)}, folder / "in.pt")


def by_torch_dcp(out: Path) -> Tensors:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: one process loads
        dcp_to_torch_save(out, out.with_suffix(".pt"))
    return dict(load(out.with_suffix(".pt")))


CARRIED = ("ckptool.pickle", "ckptool.pickle.0")  # what DCP has no word for
# Container -> the name of its output, and the loader of another project that reads it.
CONTAINERS: dict[str, tuple[str, Callable[[Path], Tensors]]] = {
    "safetensors": ("out.safetensors", load_file),
    "sharded": ("out", lambda out: {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}),
    "npz": ("out.npz", lambda out: {name: torch.from_numpy(array) for name, array in numpy.load(out).items()}),
    "dcp": ("out.dcp", by_torch_dcp),
    "torch-zip": ("out.pt", load),
}


def test_every_container_that_is_written_is_here() -> None:
    assert {container.name for container in WRITERS} == CONTAINERS.keys()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("make", [stored_once, stored_once_in_safetensors, tied, overlapping])
@pytest.mark.parametrize("ties", ["record", "copy"])
def test_every_name_has_its_values(make: Callable[[Path], Path], container: str, ties: str, tmp_path: Path) -> None:
    """For others all of them, where they are copied; in torch's own file they share memory as they did."""
    file, (name, loaded) = make(tmp_path), CONTAINERS[container]
    if ties == "copy" and container in ("dcp", "torch-zip"):
        refused("usage", tmp_path, lambda: ckptool.convert(file, tmp_path / name, container=container, ties=ties))
        return
    ckptool.convert(file, tmp_path / name, container=container, ties=ties)
    expected = ckptool.load(file)
    for found in (ckptool.load(tmp_path / name), loaded(tmp_path / name) if ties == "copy" else expected):
        assert set(found) - {*CARRIED} == set(expected) and all(
            torch.equal(found[name], expected[name]) for name in expected
        )
    if container == "torch-zip" and ties == "record" and make in (tied, overlapping):
        places = {value.untyped_storage().data_ptr() for key, value in load(tmp_path / name).items() if key != "c"}
        assert len(places) == 1


def test_another_way_is_refused(tmp_path: Path, run: Run) -> None:
    file, out = tied(tmp_path), tmp_path / "out.safetensors"
    refused("usage", tmp_path, lambda: ckptool.convert(file, out, ties="error"), "'error'")
    done = run("convert", file, "-o", out, "--ties", "error")
    assert done.code == 2 and "record" in done.err and not out.exists()


def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    named = saved({"__metadata__": torch.ones(1), "a.w": torch.ones(1)}, tmp_path / "in.pt")
    folder = Path(cases.__file__).parent / "trainer" / "checkpoint"
    for source, whole, says in ((named, False, "__metadata__"), (folder, True, r"training_args\.bin")):
        convert = partial(ckptool.convert, source, tmp_path / "out.safetensors", all=whole)
        refused(CkptoolError, tmp_path, convert, says)


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_weights_of_which_nothing_is_left_are_not_written(name: str, tmp_path: Path) -> None:
    file = saved({"state_dict": weights("a.weight", "a.bias"), "epoch": 3}, tmp_path / "in.pt")
    refused("no-match", tmp_path, lambda: ckptool.convert(file, tmp_path / name, exclude="a.*"), "nothing is left")
