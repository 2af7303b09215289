"""`convert --all` of folders that weights stand for: every member of the folder is in the output, as torch reads it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from fixtures.engines import cases

ENGINES = Path(cases.__file__).parent


def tensors_in(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, (dict, list, tuple)):
        for part in node.values() if isinstance(node, dict) else node:
            yield from tensors_in(part)


def stored(folder: Path) -> list[torch.Tensor]:
    """Every tensor of every file with weights or state in a folder, as stock readers give it."""
    found: list[torch.Tensor] = []
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".safetensors":
            found += load_file(file).values()
        elif file.suffix in (".pt", ".bin", ".pth", ".pkl"):
            found += tensors_in(torch.load(file, weights_only=False))
    return found


def layouts(folder: Path, at: Path) -> Iterator[Path]:
    """The folder as it is, with its weights in shards, and as torch's file."""
    yield shutil.copytree(folder, at / "one")
    sharded = shutil.copytree(folder, at / "sharded")
    (sharded / "model.safetensors").unlink()
    ckptool.convert(folder / "model.safetensors", at / "shards", shard_size="1MB")
    for file in (at / "shards").glob("model*"):
        shutil.copy(file, sharded)
    pickled = shutil.copytree(folder, at / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    yield from (sharded, pickled)


@pytest.mark.parametrize("name", ["trainer", "accelerate-plain", "sentence-transformers"])
def test_all_of_a_folder_is_all_of_its_files(name: str, tmp_path: Path) -> None:
    for folder in layouts(ENGINES / name / "checkpoint", tmp_path):
        (folder / "training_args.bin").unlink(missing_ok=True)  # of a class that is not installed here
        if name == "accelerate-plain":
            torch.save({"mine": torch.arange(5)}, folder / "custom_checkpoint_0.pkl")
            save_file({"second.weight": torch.ones(3)}, folder / "model_1.safetensors")
        expected = stored(folder)
        out = tmp_path / f"{folder.name}.pt"
        done = ckptool.convert(folder, out, all=True, verify=True)
        assert not done.facts["left_behind"] and not [n for n in done.notes if "left out" in n.message], done.notes
        found = list(tensors_in(torch.load(out, weights_only=False)))
        assert len(found) >= len(expected) and all(any(map(each.equal, found)) for each in expected)
        ckptool.convert(folder, tmp_path / f"{folder.name}.safetensors", all=True)
        assert ckptool.diff(tmp_path / f"{folder.name}.safetensors", out).same
        plain = ckptool.convert(folder, tmp_path / f"{folder.name}-plain.safetensors")
        assert any("left out" in note.message for note in plain.notes)


def test_a_member_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(ENGINES / "accelerate-plain" / "checkpoint", tmp_path / "f")
    file = folder / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-200])
    for part in (False, True):
        with pytest.raises(ckptool.CkptoolError, match=r"optimizer\.bin"):
            ckptool.convert(folder, tmp_path / "out.pt", all=True, part=part)


def test_what_the_container_cannot_hold_of_a_member_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ckptool.CkptoolError, match=r"training_args\.bin"):
        ckptool.convert(ENGINES / "trainer" / "checkpoint", tmp_path / "out.safetensors", all=True)
