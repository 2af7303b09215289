"""`torch-legacy`: what `torch.save` wrote from 0.1.10 to 1.5, and writes with `_use_new_zipfile_serialization=False`.

A stream of five pickles and the storages behind them; see `pickles/legacy.py`, which reads it. It is read, not written: zips are
what every torch since 1.4 opens, and can be mapped.
"""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint, FileRange
from ckptool.checkpoint.files import Input, Source
from ckptool.pickles.legacy import begins_stream, read_stream

NAME = "torch-legacy"


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Source) and begins_stream(head)


def read(source: Source) -> Checkpoint:
    """The checkpoint in a legacy file. Reads its pickles and a number for each storage, no tensor data.

    Raises what `read_stream` does.
    """
    stream = read_stream(FileRange(source, 0, source.size), name=f"{source}")
    return Checkpoint(stream.root, NAME, stream.metadata, source, notes=tuple(stream.notes), discarded=stream.discarded)
