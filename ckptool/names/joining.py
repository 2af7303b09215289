"""The ways in which tensor-parallel ranks divide a tensor, as rules of `join` name them.

Source: megatron/core/tensor_parallel/layers.py (rows and columns), transformer/mlp.py (halves of gated linear units),
transformer/attention.py (groups of heads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Numbers = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class JoinWay:
    """A way. numbers: the names of those that a rule gives; `like` is the name of a tensor instead.

    axis: that is divided; None where each rank has all of it.  parts: the sizes, in proportion, of the blocks of a
    rank's share that lie apart in the whole.  rows: of the whole, if the numbers say it.  rows_are: what those are;
    empty where a share may have more, which is padding.
    """

    numbers: tuple[str, ...] = ()
    axis: int | None = 0
    parts: Callable[[Numbers], tuple[int, ...]] = lambda numbers: (1,)
    rows: Callable[[Numbers], int] | None = None
    rows_are: str = ""


JOIN_WAYS: dict[str, JoinWay] = {
    "column": JoinWay(),
    "row": JoinWay(axis=1),
    "vocab": JoinWay(("rows",), rows=lambda of: of["rows"]),
    "glu": JoinWay(parts=lambda of: (1, 1)),
    "qkv": JoinWay(
        ("heads", "kv_heads", "head_dim"),
        rows=lambda of: (of["heads"] + 2 * of["kv_heads"]) * of["head_dim"],
        rows_are="queries, keys and values",
    ),
    "qkv_blocks": JoinWay(("heads", "kv_heads"), parts=lambda of: (of["heads"] // of["kv_heads"], 1, 1)),
    "heads": JoinWay(("heads",)),
    "width": JoinWay(("like",)),
    "replicated": JoinWay(axis=None),
    "first": JoinWay(axis=None),
    "skip": JoinWay(axis=None),
}
