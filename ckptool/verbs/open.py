"""`open`: a checkpoint, not loaded."""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint
from ckptool.formats import CheckpointLike, open_file


def open(file: CheckpointLike) -> Checkpoint:
    """Opens `FILE`, or `FILE#address`, whose part is the tree. Reads tables, no tensor data; runs nothing of the file.

    Of a dictionary or a module in memory, its tensors as entries, none of them copied.

        >>> ckptool.open("model.pt")["state_dict"]["fc.weight"].numpy()

    Raises a `CkptoolError` for what is missing, damaged, ambiguous or no checkpoint.
    """
    return open_file(file).taken
