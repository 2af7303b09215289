"""What the tests of legacy files share: files opened, refused, and the values in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.errors import CkptoolError
from ckptool.formats import read
from tests.support.helpers import written

LEGACY: dict[str, Any] = {"_use_new_zipfile_serialization": False}


def opened(data: bytes, folder: Path) -> Checkpoint:
    checkpoint = read(written(data, folder / "legacy.pt"))
    assert checkpoint.container == "torch-legacy"
    return checkpoint


def refused(data: bytes, folder: Path) -> CkptoolError:
    with pytest.raises(CkptoolError) as caught:
        opened(data, folder)
    assert "legacy.pt" in caught.value.what and (caught.value.why or caught.value.fix)
    return caught.value


def values(entry: Any) -> list[Any]:
    assert isinstance(entry, TensorEntry)
    return list(entry.numpy().reshape(-1).tolist())


SMALL = {"weight": torch.tensor([1.5, -2.0, 3.25]), "n": torch.tensor([7, 9]), "epoch": 3}
