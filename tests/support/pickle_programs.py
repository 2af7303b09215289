"""Random pickle programs: walks over the opcodes that keep to the rules of the stack, and real pickles with bytes
changed."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.support.hostile_inputs import HOOKS, integer, name, storage, tensor, text

KNOWN = (
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_sparse_tensor"),
    ("torch", "FloatStorage"),
    ("torch", "float32"),
    ("torch", "Size"),
    ("builtins", "set"),
    ("builtins", "bytearray"),
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("argparse", "Namespace"),
    ("fractions", "Fraction"),
    ("datetime", "datetime"),
    ("pathlib", "PosixPath"),
    ("copyreg", "_reconstructor"),
    ("collections", "defaultdict"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.storage", "_load_from_bytes"),
)
FOREIGN = (
    ("ckptool_marker", "run"),
    ("os", "system"),
    ("builtins", "eval"),
    ("models", "Net"),
    ("a.b", "c.__d__"),
    ("torch", "hub.load"),
)


@dataclass
class Walk:
    """A program so far: its bytes, how many values are on each level of the stack, and which memo slots are filled."""

    out: bytearray = field(default_factory=bytearray)
    levels: list[int] = field(default_factory=lambda: [0])
    slots: list[int] = field(default_factory=list)

    def push(self, code: bytes, takes: int = 0) -> None:
        self.out += code
        self.levels[-1] += 1 - takes

    @property
    def depth(self) -> int:
        return self.levels[-1]


def _scalar(draw: st.DrawFn) -> bytes:
    value = draw(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-300, 70_000),
            st.integers(-(1 << 80), 1 << 80),
            st.floats(allow_nan=False),
            st.text(max_size=5),
            st.binary(max_size=5),
        )
    )
    return _spelled(value, draw(st.integers(0, 5)))


def _spelled(value: Any, how: int) -> bytes:
    """A scalar as one of the protocols writes it."""
    if value is None or isinstance(value, bool):
        return b"N" if value is None else ((b"\x88" if value else b"\x89") if how else b"I%02d\n" % value)
    if isinstance(value, int):
        return integer(value) if how else b"L%dL\n" % value
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value) if how else b"F%s\n" % repr(value).encode()
    if isinstance(value, str):
        raw = value.encode()
        return text(value) if how < 3 else b"\x8c" + bytes([len(raw)]) + raw
    return b"C" + bytes([len(value)]) + value if how else b"B" + struct.pack("<I", len(value)) + value


def _memoize(draw: st.DrawFn, walk: Walk) -> None:
    slot = draw(st.integers(0, 300))
    walk.slots.append(slot)
    if slot < 256 and draw(st.booleans()):
        walk.out += b"q" + bytes([slot])
    else:
        walk.out += b"r" + struct.pack("<I", slot) if draw(st.booleans()) else b"p%d\n" % slot


def _recall(draw: st.DrawFn, walk: Walk) -> None:
    slot = draw(st.sampled_from(walk.slots)) if walk.slots else draw(st.integers(0, 3))
    walk.push(b"j" + struct.pack("<I", slot) if slot > 255 or draw(st.booleans()) else b"h" + bytes([slot]))


def _group(draw: st.DrawFn, walk: Walk, plain: bool) -> None:
    """Closes the innermost mark in one of the ways that there are."""
    inside = walk.levels.pop()
    closers: list[tuple[bytes, int]] = [(b"t", 0), (b"l", 0)]
    if inside % 2 == 0:
        closers += [(b"d", 0)]
    if walk.depth:
        closers += [(b"e", 1), (b"1", -1), *([(b"u", 1)] if inside % 2 == 0 else [])]
        closers += [(b"\x90", 1)] * (not plain)
    if not plain:
        closers += [(b"\x91", 0), (b"ickptool_marker\nrun\n", 0), *([(b"o", 0)] if inside else [])]
    code, takes = draw(st.sampled_from(closers))
    if takes == -1:
        walk.out += code
    else:
        walk.push(code, takes)


_FIXED: tuple[tuple[bytes, int], ...] = (
    (b"]", 0), (b"}", 0), (b")", 0), (b"\x85", 1), (b"\x86", 2), (b"\x87", 3), (b"2", 1), (b"a", 2), (b"s", 3),
)  # fmt: skip
_LIVELY: tuple[tuple[bytes, int], ...] = (
    (b"\x8f", 0), (b"R", 2), (b"R", 2), (b"b", 2), (b"\x81", 2), (b"\x92", 3), (b"Q", 1), (b"\x93", 2), (HOOKS, 0),
    (tensor((2, 2), (2, 1)), 0), (storage(), 0), (storage(key="7"), 0), (b"Pkey\n", 0),
)  # fmt: skip


@st.composite
def walks(draw: st.DrawFn, plain: bool = False) -> bytes:
    """A program with one value on the stack at its end. plain: of Python's own values only, nothing named or called."""
    walk = Walk()
    walk.out += b"\x80" + bytes([draw(st.integers(2, 5))]) if draw(st.booleans()) else b""
    for _ in range(draw(st.integers(1, 40))):
        kind = draw(st.integers(0, 19))
        if kind < 6:
            walk.push(_scalar(draw))
        elif kind < 8:
            walk.out += b"("
            walk.levels.append(0)
        elif kind < 10 and len(walk.levels) > 1:
            _group(draw, walk, plain)
        elif kind == 10 and walk.depth:
            _memoize(draw, walk)
        elif kind == 11 and (walk.slots or not plain):
            _recall(draw, walk)
        elif kind < 14 and not plain:
            walk.push(name(*draw(st.sampled_from(KNOWN + FOREIGN))))
        else:
            code, takes = draw(st.sampled_from(_FIXED if plain else _FIXED + _LIVELY))
            if takes <= walk.depth:
                if code == b"2":
                    takes = 0
                walk.push(code, takes)
    while len(walk.levels) > 1:
        _group(draw, walk, plain)
    if walk.depth != 1:
        walk.out = bytearray(_framed(bytes(walk.out), walk.depth))
    return bytes(walk.out) + b"."


def _framed(body: bytes, depth: int) -> bytes:
    """The body with all that it leaves on the stack in one tuple."""
    begin = 2 if body[:1] == b"\x80" else 0
    return body[:begin] + b"(" + body[begin:] + b"t" if depth else body + b"N"


_REAL = tuple(
    pickle.dumps(value, protocol)
    for protocol in range(6)
    for value in (
        {"a": [1, 2.5, None, True, (1, 2), "é", b"\xff", 1 << 70], "b": {1: "x"}, 3: ()},
        [[], {}, "long" * 30, -1, [1] * 5],
    )
)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A real pickle with some bytes changed, cut out or doubled."""
    data = bytearray(draw(st.sampled_from((*_REAL, TENSORS))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1)) if data else 0
        match draw(st.integers(0, 3)) if data else 3:
            case 0:
                data[at] = draw(st.integers(0, 255))
            case 1:
                del data[at : at + draw(st.integers(1, 8))]
            case 2:
                data[at:at] = data[at : at + draw(st.integers(1, 12))]
            case _:
                data[at:at] = draw(st.binary(max_size=4))
    return bytes(data)


TENSORS = (
    b"\x80\x02}(" + text("w") + tensor((2, 2), (2, 1)) + text("t") + tensor((2, 2), (1, 2)) + text("e") + b"K\x03u."
)
