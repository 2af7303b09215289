"""`diff`: what differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from ckptool.analysis.diff import IGNORABLE, Diff, diff_files
from ckptool.commands import argument, option, repeated, verb
from ckptool.formats import CheckpointLike
from ckptool.verbs._options import Texts

_KINDS = f"{', '.join(IGNORABLE)}; separate several by commas."


def _words(quiet: bool = False, as_json: bool = False) -> dict[str, Any]:
    return {"stat": as_json or not quiet}


@verb(("ckptool diff model.pt other.pt --ignore prefix,device", "what else differs"), from_words=_words)
def diff(
    left: Annotated[CheckpointLike, argument("A", "A checkpoint, or FILE#ADDRESS for a part of it.")],
    right: Annotated[CheckpointLike, argument("B", "Another checkpoint.")],
    *,
    atol: Annotated[float, option("--atol X", "Absolute tolerance: values this close count as equal.", least=0)] = 0.0,
    rtol: Annotated[float, option("--rtol X", "Relative tolerance: a multiple of the value in B.", least=0)] = 0.0,
    ignore: Annotated[str | Collection[str], repeated("--ignore KIND", _KINDS)] = (),
    stat: bool = True,
    only: Annotated[Texts, repeated("--only PATTERN", "Compare only what matches; read nothing else.")] = (),
    strict: Annotated[bool, option("--strict", "Key order and _metadata must be the same, too.")] = False,
) -> Diff:
    """Compares two checkpoints of any containers: whole files with the same parts, else one set of model weights each.

    Values within `atol + rtol * |right|` count as equal.  stat=False: tensor data is compared for equality only.
    Patterns of `only` are for addresses, or for their ends (`fc.*`); `same` is about that part.
    Raises `UsageError` where a file has several sets of weights and none was named, `NoMatch` for a pattern that
    matches nothing.
    """
    options = {"atol": atol, "rtol": rtol, "statistics": stat}
    return diff_files(left, right, ignore=ignore, only=only, strict=strict, **options)
