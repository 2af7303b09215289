"""What the tests of hostile systems share: a checkpoint, the program, commands that write."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


PROGRAM = [sys.executable, "-c", "from ckptool.cli import main; main()"]


def ran(words: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def wrapped_state(rows: int = 300) -> dict[str, Any]:
    w = torch.arange(rows * 200, dtype=torch.float32).reshape(rows, 200)
    return {"module.fc.weight": w, "module.fc.bias": torch.ones(200).half(), "module.more": torch.ones(9_000)}


def clean(rows: int = 300) -> dict[str, Any]:
    return {key.removeprefix("module."): value for key, value in wrapped_state(rows).items()}


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".ckptool-*")]


# What finds no room: to another file, over the file itself, into it.
FULL = [
    ["strip-module", "in.pt", "-o", "out.pt", "-f"],
    ["strip-module", "in.pt", "-o", "in.pt", "-f"],
    ["strip-module", "in.pt", "--in-place"],
    ["cast", "in.pt", "--dtype", "bf16", "-o", "out.pt", "-f"],
    ["convert", "in.pt", "-o", "new.safetensors"],
]
