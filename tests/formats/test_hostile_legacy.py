"""Legacy streams that nobody should send: none crashes, none takes long, none runs."""

from __future__ import annotations

from typing import Any

from tests.support.budget import meets_budget
from tests.support.hostile_streams import INPUTS
from tests.support.looped import looped


@looped("name", INPUTS, here=20)
def test_hostile_streams_cost_little(name: str) -> None:
    contents: Any = INPUTS[name]
    data = contents() if callable(contents) else contents
    outcome = meets_budget(data, ".pt")
    assert outcome.code or "torch-legacy" in outcome.text
