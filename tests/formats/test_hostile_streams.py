"""Legacy streams and tar archives that nobody should send: none crashes, none takes long, none runs or is extracted."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.budget import meets_budget
from tests.support.hostile_streams import INPUTS
from tests.support.looped import looped


@looped(("name", "contents"), INPUTS.items(), here=45)
def test_what_is_hostile_costs_little(name: str, contents: bytes | Callable[[], bytes]) -> None:
    outcome = meets_budget(contents() if callable(contents) else contents, ".tar" if name.startswith("tar") else ".pt")
    assert outcome.code or ("torch-tar" if name.startswith("tar") else "torch-legacy") in outcome.text
