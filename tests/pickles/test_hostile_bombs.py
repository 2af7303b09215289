"""Pickles that would exhaust their reader; each stays within the limits, in every verb."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.hostile_inputs import pickle_zip
from tests.support.hostile_pickles import BOMBS
from tests.support.looped import looped
from tests.support.watched import Seen

# Rows 70 to 75: bombs. Each of them within the limits, in every verb.


# Those that take a second each; `make soak` has all.
SLOW = {"70-million-lists", "71-empty-dicts", "71-empty-sets", "71-small-tuples", "71-calls", "71-known-calls",
        "71-names",
        "71-weights", "71-models-that-differ", "71-few-objects", "71-few-tuples", "72-tensors", "72-states",
        "72-namespaces",
        "72-modules", "72-objects", "75-colliding-floats", "75-a-little-colliding", "size-of-many", "72-texts",
        "72-integers",
        "71-memo"}  # fmt: skip


@looped("title", [title for title in BOMBS if title not in SLOW], here=6, at_once=2)
def test_bombs_stay_within_the_limits(title: str, see: Callable[..., Seen]) -> None:
    bomb(title, see, "inspect", "show", "diff itself", "convert --all")


@pytest.mark.soak
@pytest.mark.parametrize("title", BOMBS)
def test_bombs_stay_within_the_limits_in_every_verb(title: str, see: Callable[..., Seen]) -> None:
    bomb(title, see)


def bomb(title: str, see: Callable[..., Seen], *commands: str) -> None:
    pickle = BOMBS[title]()
    assert len(pickle) <= 1_010_000, "the promise is for 1 MB"
    found = see(pickle_zip(pickle), *commands)
    assert {"violation", "bug"}.isdisjoint(found.codes().values())
    assert max(step.printed for step in found.steps) < 60_000_000
