"""`open`: a checkpoint, not loaded."""

from __future__ import annotations

from dataclasses import replace

from ckptool.checkpoint import Checkpoint
from ckptool.tree import find
from ckptool.verbs.opening import PathLike, open_file


def open(file: PathLike) -> Checkpoint:
    """Opens `FILE` or `FILE#address`, whose part then is the tree. Reads tables, no tensor data; imports and runs nothing of the file.

        >>> ckptool.open("model.pt")["state_dict"]["fc.weight"].numpy()

    Raises a `CkptoolError` for what is missing, damaged, ambiguous or no checkpoint.
    """
    opened = open_file(file)
    if opened.at is None:
        return opened.checkpoint
    return replace(opened.checkpoint, tree=find(opened.checkpoint.tree, opened.at)[1])
