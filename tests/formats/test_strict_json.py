"""JSON of files that nobody vouches for."""

from __future__ import annotations

import pytest

from ckptool.errors import Ambiguous
from ckptool.formats.strict_json import parse_object


def test_the_name_that_stands_twice_is_said() -> None:
    assert parse_object(b'{"a": 1, "w": {"b": 2}}', "it") == {"a": 1, "w": {"b": 2}}
    for text in (b'{"a": 1, "w": 2, "w": 3}', b'{"x": {"a": 1, "w": 2, "w": 3}}'):
        with pytest.raises(Ambiguous, match="names w twice"):
            parse_object(text, "it")
