"""Values saved by torch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import torch_bytes, written


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    return lambda value: written(torch_bytes(value), tmp_path / "x.pt")
