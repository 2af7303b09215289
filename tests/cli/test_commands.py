"""Commands as a user types them. What they print, write and end with is in the record (tests/golden)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

from tests.support.cli import Ran, done
from tests.support.files import load

Run = Callable[..., Ran]


def test_version_and_no_command(run: Run) -> None:
    import ckptool

    assert done(run("--version")) == f"ckptool {ckptool.__version__}\n"
    assert done(run("-h")) == done(run("--help")) and done(run("cast", "-h")) == done(run("cast", "--help"))
    ran = run()
    assert ran.code == 2 and "ckptool --help" in ran.err and ran.out == ""


def test_cast_edit_convert(files: Path, run: Run) -> None:
    done(run("cast", "dp.pt", "--dtype", "bf16", "--exclude", "*bn*", "-o", "small.pt"))
    small = load("small.pt")
    assert small["module.fc1.weight"].dtype is torch.bfloat16 and small["module.bn.weight"].dtype is torch.float32
    numpy.save("bias.npy", numpy.arange(16, dtype="f4"))
    words = ("--drop", "optimizer*", "--set", "epoch:=7", "--tensor", "model_state_dict/fc1.bias=bias.npy")
    done(run("edit", "training.pt", *words, "-o", "edited.pt"))
    edited = load("edited.pt")
    assert edited["epoch"] == 7 and "optimizer_state_dict" not in edited
    assert edited["model_state_dict"]["fc1.bias"].tolist() == list(range(16))
    done(run("convert", "training.pt", "--all", "-o", "all.safetensors"))
    done(run("convert", "all.safetensors", "-o", "back.pt"))
    done(run("diff", "training.pt", "back.pt"))
    plain = json.loads(done(run("convert", "training.pt", "-o", "w.safetensors", "--ties", "copy", "--json")))
    assert "epoch" in plain["facts"]["left_behind"] and plain["container"] == "safetensors"
