"""`ckptool.Run` with models of transformers, and with torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_scripts import Scripts

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    scripts = Scripts("own_loop.py", tmp_path_factory.mktemp("own"))
    yield scripts
    scripts.close()


@pytest.mark.parametrize("options", [{}, {"stateful": True}, {"stateful": True, "stream": True}], ids=str)
def test_a_loop_around_a_model_of_transformers_is_killed_and_ends_the_same(
    loop: Scripts, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Also where the data set draws in the workers of a StatefulDataLoader."""
    if options:
        pytest.importorskip("torchdata")
    seconds = loop.finish(tmp_path / "whole", options=options)["seconds"]
    assert loop.killed_at_random(5, seconds, 1, tmp_path / "killed", options=options)
    loop.finish(tmp_path / "killed", options=options)
    whole, killed = ((tmp_path / name / "checkpoints/step-00000040.pt").read_bytes() for name in ("whole", "killed"))
    assert killed == whole
