"""torch's streams inside of pickles: calls of `torch.storage._load_from_bytes`, by which plain pickles hold tensors.

`BUILDERS` is what the readers of files decode their pickles with.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from ckptool.checkpoint.nodes import Global
from ckptool.checkpoint.numpy_arrays import LongValue
from ckptool.pickles.torch_objects import BUILDERS as TORCH_BUILDERS
from ckptool.pickles.torch_objects import PerPickle, Spend

LOAD_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
MAX_NESTING = 2  # streams within streams
_SMALLEST = 512  # bytes that each stream counts at least towards the total of all


def _load_from_bytes(depth: int, spend: Spend, args: tuple[Any, ...]) -> Any:
    content = args[0] if len(args) == 1 else None
    if type(content) is not bytes and not (type(content) is LongValue and content.kind == "bytes"):
        return NotImplemented
    spend(max(_SMALLEST, len(content)))
    from ckptool.formats.torch_legacy import load_from_bytes  # which few pickles need

    return load_from_bytes(content, depth)


@cache
def builders_at(depth: int) -> dict[Global, Any]:
    """The builders for a pickle that is `depth` levels of bytes deep."""
    return {**TORCH_BUILDERS, LOAD_FROM_BYTES: PerPickle(partial(_load_from_bytes, depth + 1))}


BUILDERS = builders_at(0)
