"""Tar archives that nobody should send: none crashes, none takes long, nothing is extracted."""

from __future__ import annotations

from typing import Any

from tests.support.budget import meets_budget
from tests.support.hostile_tars import INPUTS
from tests.support.looped import looped


@looped("name", INPUTS, here=25)
def test_hostile_archives_cost_little(name: str) -> None:
    contents: Any = INPUTS[name]
    outcome = meets_budget(contents() if callable(contents) else contents, ".tar")
    assert outcome.code or "torch-tar" in outcome.text
