"""What is a plain value in a bundle, and what a name may be: whatever they are.

What members share, what is refused and what comes back is tested by the tests of the two verbs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.checkpoint.nodes import OrderedDict
from ckptool.errors import Conflict
from ckptool.transforms.bundles import MAX_PLAIN, check_names, is_plain
from tests.support.looped import looped

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=20,
)


@given(JSON)
def test_json_is_plain(value: Any) -> None:
    assert is_plain(value)
    assert repr(json.loads(json.dumps(value))) == repr(value)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
PART = [1]
DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]


@looped(
    "value",
    [
        (1,),
        b"a",
        float("nan"),
        float("inf"),
        1j,
        "\ud800",
        {1: 2},
        {"a": {"\ud800": 1}},
        OrderedDict(),
        [object()],
        CYCLE,
        [PART, PART],
        DEEP,
        "x" * (MAX_PLAIN + 1),
        ["x" * 1000] * 70,
        [0] * 20_000,
        {"state": {}, "param_groups": []},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain(value: Any) -> None:
    assert not is_plain(value)


@given(st.text(max_size=30))
def test_names_that_pass_are_names_of_files(name: str) -> None:
    try:
        check_names([name])
    except Conflict as error:
        assert all(c.isprintable() or c == "\n" for c in str(error))
        return
    assert name and name not in (".", "..") and not set(name) & set('/\\:\0*?"<>|') and name.isprintable()
    assert len(f"{name}.safetensors".encode()) <= 255
    for other in (name.upper(), name.lower()):
        with pytest.raises(Conflict):
            check_names([name, other])


def test_good_names() -> None:
    check_names(["generator", "modelA_state_dict", "a.b", "na\u00efve", "\u6a21\u578b", "control", "com", 0, 1, "x y"])
