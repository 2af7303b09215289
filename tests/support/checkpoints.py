"""Checkpoints for tests: saved by torch, and opened by ckptool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptoolError, in_python
from ckptool.formats import read
from tests.support.helpers import torch_bytes, written


def saved(value: Any, path: Path) -> Path:
    """The path, at which torch has saved `value`."""
    return written(torch_bytes(value), path)


def opened(value: Any, folder: Path) -> Checkpoint:
    """What ckptool reads of a file in `folder` that torch has saved `value` to."""
    return read(saved(value, folder / "opened.pt"))


def weights(*names: str) -> dict[str, torch.Tensor]:
    """A dictionary of tensors, each with values of its own."""
    return {name: torch.arange(6, dtype=torch.float32).reshape(2, 3) + 10 * number for number, name in enumerate(names)}


def three_parts(error: CkptoolError) -> tuple[str, str]:
    """An error's code and what happened; fails where it does not also say what that means or what to do."""
    assert error.what and (error.why or error.fix), error
    assert str(error) == "\n".join(in_python(part) for part in (error.what, error.why, error.fix) if part)
    return error.code, error.what
