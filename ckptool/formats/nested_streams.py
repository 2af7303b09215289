"""torch's streams inside of pickles: calls of `torch.storage._load_from_bytes`, by which plain pickles hold tensors.

`BUILDERS` is what the readers of files decode their pickles with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ckptool.checkpoint.nodes import Global
from ckptool.pickles.builders import PerPickle
from ckptool.pickles.strings import StubbedValue
from ckptool.pickles.torch_objects import BUILDERS as TORCH_BUILDERS

LOAD_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
MAX_NESTING = 2  # streams within streams
_SMALLEST = 512  # bytes that a stream in bytes counts at least, when it is counted what all of them take


def nested_streams(depth: int, spend: Callable[[int], None]) -> Callable[[tuple[Any, ...]], Any]:
    """The builder of `_load_from_bytes` calls for one pickle."""

    def build(args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or not (
            type(args[0]) is bytes or (type(args[0]) is StubbedValue and args[0].kind == "bytes")
        ):
            return NotImplemented
        spend(max(_SMALLEST, args[0].data.length if isinstance(args[0], StubbedValue) else len(args[0])))
        from ckptool.formats.torch_legacy import load_from_bytes  # which few pickles need

        return load_from_bytes(args[0], depth)

    return build


@cache
def builders_at(depth: int) -> dict[Global, Any]:
    """The builders for a pickle that is `depth` levels of bytes deep."""
    return {**TORCH_BUILDERS, LOAD_FROM_BYTES: PerPickle(lambda spend: nested_streams(depth + 1, spend))}


BUILDERS = builders_at(0)
