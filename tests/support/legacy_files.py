"""What the tests of legacy files share: files opened, refused, and the values in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.errors import CkptoolError
from ckptool.formats import read
from tests.support.errors import three_parts, unreadable
from tests.support.files import written

LEGACY: dict[str, Any] = {"_use_new_zipfile_serialization": False}


def opened_legacy(data: bytes, folder: Path) -> Checkpoint:
    checkpoint = read(written(data, folder / "legacy.pt"))
    assert checkpoint.container == "torch-legacy"
    return checkpoint


def legacy_refused(data: bytes, folder: Path) -> CkptoolError:
    error = unreadable(written(data, folder / "legacy.pt"))
    three_parts(error)
    return error


def elements(entry: Any) -> list[Any]:
    assert isinstance(entry, TensorEntry)
    return list(entry.numpy().reshape(-1).tolist())


SMALL = {"weight": torch.tensor([1.5, -2.0, 3.25]), "n": torch.tensor([7, 9]), "epoch": 3}
