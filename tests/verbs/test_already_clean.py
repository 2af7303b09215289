"""A file with nothing to change, written under a name: what that name promises, as the stock reader of it says."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool.errors import CkptoolError
from fixtures.torch_tar import save_tar

HERE = Path(__file__).parent.parent.parent / "fixtures" / "engines"
STATE = {"fc.weight": torch.arange(12.0).reshape(3, 4), "fc.bias": torch.zeros(3)}


def legacy(path: Path) -> None:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)


MAKERS: dict[str, Callable[[Path], object]] = {
    "zip": lambda path: torch.save(STATE, path),
    "legacy": legacy,
    "tar": lambda path: save_tar(STATE, path),
    "pickle": lambda path: path.write_bytes(pickle.dumps({k: v.numpy() for k, v in STATE.items()}, 2)),
    "tensors": lambda path: path.write_bytes(pickle.dumps(STATE, 2)),
    "stable-baselines3": lambda path: path.write_bytes((HERE / "stable-baselines3" / "checkpoint").read_bytes()),
    "npy": lambda path: numpy.save(path.open("wb"), numpy.ones(3, "f4")),
    "npz": lambda path: numpy.savez(path.open("wb"), **{k: v.numpy() for k, v in STATE.items()}),
    "safetensors": lambda path: save_file(STATE, path),
    "script": lambda path: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path),
}
VERBS: dict[str, Callable[..., Any]] = {
    "remap": lambda file, out: ckptool.remap(file, out, to="cpu"),
    "cast": lambda file, out: ckptool.cast(file, out, dtype="f32"),
    "strip-module": ckptool.strip_module,
    "slim": ckptool.slim,
}


@pytest.mark.filterwarnings("ignore")
def test_every_container_under_every_suffix(tmp_path: Path) -> None:
    written = set()
    for made, make in MAKERS.items():
        make(file := tmp_path / f"in-{made}")
        for verb, run in VERBS.items():
            for suffix in (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".safetensors", ".npz", ".zip", ".tar", ""):
                out = tmp_path / f"{made}-{verb}{suffix}"
                try:
                    done = run(file, out)
                except CkptoolError:
                    assert not out.exists()
                    continue
                written.add((made, verb))
                if done.container == "safetensors":
                    with safetensors.safe_open(out, "pt") as opened:
                        assert len(list(opened.keys())) > 0
                elif done.container == "npz":
                    assert numpy.load(out).files
                elif made == "script":
                    torch.jit.load(out)
                else:
                    torch.load(out, weights_only=made not in ("pickle", "npy", "stable-baselines3"))
    assert {made for made, _ in written} == {*MAKERS}, written
