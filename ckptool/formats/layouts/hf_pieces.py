"""`hf-pieces`: safetensors files of pieces of tensors, as torch's `HuggingFaceStorageWriter(save_distributed=True)`
writes them.

Source: torch/distributed/checkpoint/hf_storage.py and _hf_utils.py, torch 2.13. A file for each rank and shard,
`shard-00001-model-00001-of-00001.safetensors`, with `DCP_SHARDING_INFO` in its metadata: the offsets of each piece in
the whole. The sizes of the whole are written nowhere; a tensor reaches as far as its pieces.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Checkpoint, Note, TensorEntry
from ckptool.checkpoint.files import Folder, Input
from ckptool.errors import counted, listed
from ckptool.formats.distributed import sizes_of
from ckptool.formats.folder import PIECES, damaged, lacks, missing_ranks, names_in, renamed
from ckptool.formats.pieces import Joiner, Piece

NAME = "hf-pieces"
INFO = "DCP_SHARDING_INFO"
SIZES = "sizes-from-pieces"  # of the note
BELOW = "sharded"


def detect(head: bytes, source: Input) -> bool:
    return isinstance(source, Folder) and any(map(PIECES.fullmatch, source.names))


def below(folder: Folder) -> str:
    """The folder of pieces beside the files that were consolidated from them; empty where there is none."""
    path = os.path.join(folder.path, BELOW)
    return path if BELOW in folder and any(map(PIECES.fullmatch, names_in(path))) else ""


def read(source: Folder) -> Checkpoint:
    """The tensors that the pieces of all ranks make up. Reads the headers, no tensor data.

    Raises `Corrupt` where a file of a rank is missing, or pieces leave gaps or overlap.
    """
    matches = {name: match for name in source.names if (match := PIECES.fullmatch(name))}
    ranks = sorted({int(match["rank"]) for match in matches.values()})
    if missing := missing_ranks({0, *ranks}, ranks[-1]):
        rest = next(iter(matches.values()))["rest"]
        files = [f"shard-{rank:05}-{rest}.safetensors" for rank in missing]
        raise lacks(source, f"the pieces of {counted(len(missing), 'rank')}", files)
    if absent := renamed(source.names, PIECES):
        raise lacks(source, f"{counted(len(absent), 'file')} that a copy is named after", absent)
    pieces: dict[str, list[Piece]] = {}
    joiner = Joiner(source, untied=[*matches] if len(matches) > 1 else [])
    for name, match in matches.items():
        shard = joiner.open(name)
        if not shard.tensors_only:
            raise damaged(source, f"{name} is not a safetensors file")
        offsets = saved_offsets(shard)
        for tensor, entry in shard.tree.items():
            begin = sizes_of(offsets.get(tensor))
            if begin is None or len(begin) != len(entry.shape):
                raise damaged(source, f"{name} does not say where its piece of {tensor} belongs")
            pieces.setdefault(tensor, []).append(Piece(entry, begin, f"rank {int(match['rank']) - 1}"))
    tree: dict[str, TensorEntry] = {}
    for name, chunks in pieces.items():  # each reaches as far as its pieces do
        ends = [[lo + n for lo, n in zip(*chunk.box, strict=True)] for chunk in chunks]
        shape = tuple(map(max, zip(*ends, strict=False)))
        tree[name] = joiner.tensor(name, shape, chunks[0].entry.dtype, chunks)
    # With one rank alone, nothing tells whether others had parts of the same tensors.
    divided = [name for name, chunks in pieces.items() if len(chunks) > 1 or len(ranks) == 1]
    if divided:
        what = f"the sizes of {counted(len(divided), 'tensor')} are those of the pieces that are here"
        joiner.notes.append(Note(SIZES, f"{what}, as no file has them or the number of ranks: {listed(divided, 2)}"))
    return replace(joiner.checkpoint(NAME, tree, "torch, HuggingFaceStorageWriter", ranks[-1]), tensors_only=True)


def saved_offsets(shard: Checkpoint) -> dict[str, Any]:
    """The offsets of each tensor of a file in the whole one, as its metadata has them; empty where it has none."""
    try:
        return {name: fields["saved_offsets"] for name, fields in json.loads(shard.metadata[INFO]).items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
