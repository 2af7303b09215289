"""What the tests of the decoder share: a pickle decoded alone, and values compared."""

from __future__ import annotations

from typing import Any

from ckptool.pickles.decode import Decoded, decode
from ckptool.pickles.torch_objects import BUILDERS
from tests.support.helpers import assert_same_tree


def run(data: bytes, **options: Any) -> Decoded:
    return decode(data, lambda pid: ("persistent", pid), BUILDERS, **options)


def same(data: bytes, expected: Any) -> None:
    decoded = run(data)
    assert decoded.end == len(data)
    assert_same_tree(decoded.root, expected)


F = b"ca\nf\n"


HOOKS = b"ccollections\nOrderedDict\n)R"
