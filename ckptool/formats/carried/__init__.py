"""A whole tree inside a safetensors file: what `convert --all` writes, and what gives it back bit for bit.

Tensors that cover their storage are stored as themselves under their address, so that every safetensors reader sees their
values; what the container cannot say is one JSON text in its metadata. A storage that no single tensor covers (overlaps,
slices, expanded views) is stored once, as bytes, under a reserved name. complex128 and complex32 are stored as pairs of floats,
quantized values as their integers.

    {"schema": "ckptool.tree/1", "root": value, "nodes": [[kind, …], …],
     "storages": [[name, location, how], …], "tensors": [[storage, …], …]}

A value is a JSON scalar, or an object with one key: n (a node's index), t (a tensor's), s (a storage by itself), b (bytes, base64), g (a
name), f (the bits of a nan or inf as hex), c (those of a complex number), p (Python 2 bytes), x (missing). Nodes that cannot be
changed once made (tuples, composites, what is called to make an object) come after what they are made of.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.checkpoint.commands import FILE, OUT, Advice, command
from ckptool.checkpoint.files import Source
from ckptool.checkpoint.nodes import Object, check_depth
from ckptool.checkpoint.tree import address, walk
from ckptool.errors import CkptoolError, Corrupt, Unsupported, is_text, listed, printable
from ckptool.formats import recovered
from ckptool.formats.carried.record import KEY as KEY
from ckptool.formats.carried.record import SCHEMA
from ckptool.pickles.calls import is_quiet


def pack(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a flat dictionary of tensors that safetensors can hold, and the record that leads back.

    Raises `Unsupported` for objects of unknown classes, and for names that are not Unicode text.
    """
    from ckptool.formats.carried.packing import Packer

    _refuse_unknown(checkpoint)
    packer = Packer(checkpoint.tree)
    record = packer.record()
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    if not is_text(text):
        text = json.dumps(record, separators=(",", ":"))
    metadata = {KEY: text} | {key: mark for key, mark in checkpoint.metadata.items() if key == recovered.KEY}
    return Checkpoint(packer.stored, checkpoint.container, metadata, checkpoint.source, tensors_only=True)


def _refuse_unknown(checkpoint: Checkpoint) -> None:
    unknown = [
        f"{printable(node.name)} at {printable(address(path)) or 'the top'}"
        for path, node in walk(checkpoint.tree)
        if isinstance(node, Object) and not is_quiet(node)
    ]
    if unknown or checkpoint.discarded:
        raise Unsupported(
            f"objects of classes that ckptool does not know cannot be carried: {listed(unknown)}",
            "Only a pickle can make them again, by running their code.",
            Advice(
                "Leave them out: ",
                command("edit", FILE, drop="ADDRESS", out=OUT),
                "; or convert only the weights: without --all",
            ),
        )


def unpack(source: Source, stored: dict[str, TensorEntry], metadata: dict[str, str]) -> Any:
    """The tree that `pack` was given. Raises `Corrupt` where the record is damaged, `Conflict` where the file no longer agrees with it."""
    from ckptool.formats.carried.unpacking import Unpacker

    try:
        record = json.loads(metadata[KEY])
        if record["schema"] != SCHEMA:
            raise Unsupported(
                f"{source} holds a tree of the version {printable(str(record['schema']))}",
                f"This version reads {SCHEMA}.",
            )
        unpacker = Unpacker(source, stored, record)
        tree = unpacker.tree()
        check_depth(tree)
    except CkptoolError as error:
        raise error.within(str(source)) from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise Corrupt(
            f"{source}: the record of its tree is damaged ({type(error).__name__})",
            "Its metadata was changed by another program.",
        ) from None
    return tree
