"""Every test of the harness: one thread, since two spin on a loaded machine, and torch's switches given back."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _harness(harness: None) -> None:
    """The same for every test in this folder."""
