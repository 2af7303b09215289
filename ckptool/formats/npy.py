"""`npy`: one array of numpy, read as one tensor. `npy_array` says where the format is documented."""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint, FileRange, Note, TensorEntry
from ckptool.checkpoint.files import Input, Source
from ckptool.formats.npy_array import MAGIC, Budget, read_array
from ckptool.pickles.plain import summary

NAME = "npy"


def detect(head: bytes, source: Input) -> bool:
    return head.startswith(MAGIC)


def read(source: Source) -> Checkpoint:
    """The tensor in a file of `numpy.save`. Reads the header only.

    An array of texts, dates or objects is an inert object, as in a pickle. Raises `Truncated`, `Corrupt`, `Unsupported` or `Ambiguous`.
    """
    tree, discarded = read_array(FileRange(source, 0, source.size), str(source), Budget(source.size))
    other = not isinstance(tree, TensorEntry)
    notes = (Note("other-arrays", f"it is no tensor: {summary(tree)}"),) if other else ()
    return Checkpoint(tree, NAME, {}, source, notes=notes, discarded=discarded, tensors_only=True)
