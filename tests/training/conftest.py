"""Every test of the harness: torch's switches are given back."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _harness(harness: None) -> None:
    """The same for every test in this folder."""
