"""One line for each container, with every fact about it; its code is imported when the first bytes ask for it."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy
import torch

import ckptool
from ckptool.formats import FORMATS, Format
from tests.support.looped import looped

OPEN = "import sys, ckptool; ckptool.open(sys.argv[1]); print(*sorted(sys.modules))"


@looped("container", FORMATS, ids=lambda container: container.name)
def test_a_line_agrees_with_its_module(container: Format) -> None:
    code = import_module(f"ckptool.formats.{container.module}")
    assert container.name == code.NAME
    is_asked = container.is_folder or container.endings or container.begins != Format("", "").begins
    assert callable(code.read) and hasattr(code, "detect") == bool(is_asked)
    assert container.writable == hasattr(code, "write") and container.appendable == hasattr(code, "append")
    assert bool(container.suffixes) <= container.writable


def imported(path: Path) -> set[str]:
    """The formats that opening a file imports, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=True)
    prefix = "ckptool.formats."
    found = {name.removeprefix(prefix).partition(".")[0] for name in done.stdout.split() if name.startswith(prefix)}
    return found & {container.module for container in FORMATS}


def test_other_formats_are_not_imported(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    torch.save(weights, tmp_path / "a.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    ckptool.save(weights, tmp_path / "a.safetensors")
    numpy.save(tmp_path / "a.npy", numpy.ones(2))
    numpy.savez(tmp_path / "a.npz", w=numpy.ones(2))
    assert imported(tmp_path / "a.pt") == {"torch_zip"}
    assert imported(tmp_path / "a.safetensors") == {"safetensors"}
    assert imported(tmp_path / "old.pt") == {"torch_legacy"}
    assert imported(tmp_path / "a.npy") == {"npy"}
    assert imported(tmp_path / "a.npz") == {"npy", "npz"}


def test_a_very_long_first_name_is_still_one_of_an_array(tmp_path: Path) -> None:
    name = "n" * 3000
    numpy.savez(tmp_path / "a.npz", **{name: numpy.ones(2)})
    assert list(ckptool.open(tmp_path / "a.npz")) == [name]
