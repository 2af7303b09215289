"""Archives at a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.files import written
from tests.support.zips import Layout, Put


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Writes an archive, `a.pt` unless another name is given."""

    def place(data: bytes | Layout, name: str = "a.pt") -> Path:
        return written(data if isinstance(data, bytes) else data.build(), tmp_path / name)

    return place
