"""What the tests of the decoder share: a pickle decoded alone, and values compared."""

from __future__ import annotations

from typing import Any

from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import Decoded, decode
from tests.support.same import assert_same_tree


def decode_pickle(data: bytes, **options: Any) -> Decoded:
    return decode(data, lambda pid: ("persistent", pid), BUILDERS, **options)


def decodes_to(data: bytes, expected: Any) -> None:
    decoded = decode_pickle(data)
    assert decoded.end == len(data)
    assert_same_tree(decoded.root, expected)


F = b"ca\nf\n"


HOOKS = b"ccollections\nOrderedDict\n)R"
