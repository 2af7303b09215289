"""`sharded-bin`: shards as torch's own files, for loaders that know only those; `sharded` reads them."""

from __future__ import annotations

from dataclasses import replace

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Input
from ckptool.checkpoint.plan import Plan
from ckptool.formats.sharded import read as read
from ckptool.formats.sharded import writing

NAME = "sharded-bin"


def detect(head: bytes, source: Input) -> bool:
    """False: an index looks the same whatever its shards are."""
    return False


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of `pytorch_model-00001-of-0000n.bin` and their index; of one shard, `pytorch_model.bin` alone."""
    origin = checkpoint.origin
    division = writing.Division(writing.DEFAULT_SIZE)
    if isinstance(origin, writing.DivisionOrigin):
        division = origin.renamed or writing.Division(writing.DEFAULT_SIZE, origin.stem)
    elif isinstance(origin, writing.Division):
        division = origin
    stem = "pytorch_model" if division.stem == "model" else division.stem
    bins = replace(division, stem=stem, pickled=True)
    renamed = replace(origin, renamed=bins) if isinstance(origin, writing.DivisionOrigin) else bins
    return writing.write(replace(checkpoint, origin=renamed), keep_unknown=keep_unknown)
