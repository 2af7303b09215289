"""One tensor out of rectangular chunks: any division that covers it gives its bytes, at any place; no other is
believed."""

from __future__ import annotations

import pytest

from ckptool.errors import Unsupported
from ckptool.formats.pieces import covers


def test_boxes_that_only_have_the_right_volume() -> None:
    assert not covers((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))])
    assert not covers((4, 4), [((0, 0), (4, 2)), ((2, 0), (2, 4))])
    assert not covers((2, 2), [((0, 0), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1)), ((1, 1), (1, 1))])
    assert not covers((4,), [((0,), (2,)), ((3,), (2,))])
    assert covers((4,), [((2,), (2,)), ((0,), (2,)), ((4,), (0,))])
    assert covers((), [((), ())]) and not covers((), [((), ()), ((), ())])
    with pytest.raises(Unsupported, match="divided along 9 axes"):
        covers((2,) * 9, [((0,) * 9, (1,) * 9)])
