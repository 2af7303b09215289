"""A whole tree inside a safetensors file: what `convert --all` writes, and what gives it back bit for bit.

Tensors that cover their storage are stored as themselves under their address, so that every safetensors reader sees
their values; what the container cannot say is one JSON text in its metadata. A storage that no single tensor covers
(overlaps, slices, expanded views) is stored once, as bytes, under a reserved name. complex128 and complex32 are stored
as pairs of floats, quantized values as their integers.

    {"schema": "ckptool.tree/1", "root": value, "nodes": [[kind, …], …],
     "storages": [[name, location, how], …], "tensors": [[storage, …], …]}

A value is a JSON scalar, or an object with one key: n (a node's index), t (a tensor's), s (a storage by itself), b
(bytes, base64), g (a name), f (the bits of a nan or inf as hex), c (those of a complex number), p (Python 2 bytes), x
(missing). Nodes that cannot be changed once made (tuples, composites, what is called to make an object) come after what
they are made of.
"""

from __future__ import annotations

KEY = "ckptool"  # of the metadata
SCHEMA = "ckptool.tree/1"
RESERVED = "~storage/"

# How a type that safetensors lacks is stored: another type with the same bits, and how many of it make one element.
STAND_INS = {
    "c128": ("f64", 2),
    "c32": ("f16", 2),
    "qi8": ("i8", 1),
    "qu8": ("u8", 1),
    "qi32": ("i32", 1),
    "bits16": ("u16", 1),
}
