"""A checkpoint is opened, changed and written without listing its folder, where there may be ten thousand others. (Bare
weights may be one of several shards: the index is looked for, once.)"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool

WORK: dict[str, Callable[[Path, Path], Any]] = {
    "inspect": lambda file, out: ckptool.inspect(file),
    "verify": lambda file, out: ckptool.verify(file),
    "doctor": lambda file, out: ckptool.doctor(file),
    "diff": lambda file, out: ckptool.diff(file, file),
    "spec": lambda file, out: ckptool.spec(file),
    "strip-module": lambda file, out: ckptool.strip_module(file, out),
    "cast": lambda file, out: ckptool.cast(file, out, dtype="bf16"),
    "convert": lambda file, out: ckptool.convert(file, out.with_suffix(".safetensors")),
    "average": lambda file, out: ckptool.average([file, file], out),
}


@pytest.mark.parametrize("verb", WORK)
def test_the_folder_of_a_file_is_not_listed(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "many").mkdir()
    torch.save({"state_dict": {"module.fc.weight": torch.ones(2, 2)}, "epoch": 3}, folder / "step_7.pt")
    listed, scan, list_names = list[str](), os.scandir, os.listdir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(str(path)) or scan(path))
    monkeypatch.setattr(os, "listdir", lambda path=".": listed.append(str(path)) or list_names(path))
    WORK[verb](folder / "step_7.pt", tmp_path / "out.pt")
    assert str(folder) not in listed
