"""Legacy streams and tar archives that nobody should send: none crashes, none takes long, none runs or is extracted."""

from __future__ import annotations

from collections.abc import Callable

from tests.support import hostile_streams, hostile_tars
from tests.support.budget import meets_budget
from tests.support.looped import looped


@looped(("name", "contents"), [*hostile_streams.INPUTS.items(), *hostile_tars.INPUTS.items()], here=45)
def test_what_is_hostile_costs_little(name: str, contents: bytes | Callable[[], bytes]) -> None:
    is_tar = name in hostile_tars.INPUTS
    outcome = meets_budget(contents() if callable(contents) else contents, ".tar" if is_tar else ".pt")
    assert outcome.code or ("torch-tar" if is_tar else "torch-legacy") in outcome.text
