"""Checkpoints of every container, each larger than what is read of both ends, to be served."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file

from fixtures.torch_tar import tar_bytes, tar_members
from tests.support.cli import command_lines
from tests.support.engine_folders import hub, save_dcp, write_zero

SHARDS, TENSORS = 20, 24
FILES = ("model.pt", "legacy.pt", "old.tar", "script.pt", "m.safetensors", "a.npz")
FOLDERS = ("hub", "hub/model.safetensors.index.json", "dcp", "zero")

# Every command that takes a file, where it takes one.
READS = command_lines("""
inspect {0}|show {0}|diff {0} dp.pt|verify {0}|verify dp.pt --against {0}|doctor {0}|doctor dp.pt --against {0}
scan {0}|scan --latest-good -q {0}|strip-module {0} -o out.pt|rename {0} 'a => b' -o out.pt
rename dp.pt --rules {0} -o out.pt|convert {0} -o out.safetensors
recover {0} -o out.pt|average {0} dp.pt -o out.pt|bundle a={0} b=dp.pt -o out.pt|unbundle {0} -d out
warm-start {0} --against dp.pt|warm-start dp.pt --against {0}|spec {0}
""")


def layered(tensors: int = TENSORS, size: int = 128) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(size, size), (size,)]
    return {f"layers.{n // 2}.{n % 2}": torch.randn(*shapes[n % 2]) for n in range(tensors)}


def make_elsewhere(folder: Path) -> Path:
    model = layered()
    whole = {"state_dict": model, "epoch": 3}
    torch.save(whole, folder / "model.pt")
    torch.save(whole, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    (folder / "old.tar").write_bytes(tar_bytes(tar_members(whole)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)))
        script.save(str(folder / "script.pt"))  # type: ignore[no-untyped-call]
    save_file(model, folder / "m.safetensors")
    numpy.savez(folder / "a.npz", **{name: tensor.numpy() for name, tensor in model.items()})
    hub(folder / "hub", {f"{n}.{name}": each for n in range(SHARDS) for name, each in layered(10, 100).items()}, SHARDS)
    save_dcp({"model": model}, folder / "dcp")
    write_zero(folder / "zero" / "global_step5", 2, 2)
    (folder / "zero" / "latest").write_text("global_step5")
    return folder


def plain(out: str, place: str) -> Any:
    """What was printed as JSON, whatever the place of the file."""
    return json.loads(out.replace(place, "@/"))
