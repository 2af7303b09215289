"""`torch-zip` files beyond 4 GiB, as sparse files: ZIP64 is read, kept and written, and torch opens it."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from tests.support.files import rewritten, torch_bytes, written
from tests.support.same import assert_same_objects
from tests.support.small_zips import tied_state


def test_stock_torch_loads_from_memory_what_is_written(tmp_path: Path) -> None:
    rewritten(written(torch_bytes(tied_state()), tmp_path / "a.pt"), tmp_path / "b.pt")
    assert_same_objects(torch.load(io.BytesIO((tmp_path / "b.pt").read_bytes()), weights_only=True), tied_state())
