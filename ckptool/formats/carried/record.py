"""What the record of a carried tree is called, and how it stores the types that safetensors lacks."""

from __future__ import annotations

KEY = "ckptool"
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
