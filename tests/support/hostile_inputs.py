"""Pieces of which hostile inputs are made by code; nothing in them would do anything but leave a trace if it ran."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptool.formats import read

# Pieces of pickles ----------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def integer(value: int) -> bytes:
    """BININT1, BININT or LONG1."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def integers(values: tuple[int, ...] | list[int]) -> bytes:
    """A tuple of integers."""
    return b"(" + b"".join(map(integer, values)) + b"t"


def name(module: str, attribute: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{attribute}\n".encode()


ORDERED, REBUILD = name("collections", "OrderedDict"), name("torch._utils", "_rebuild_tensor_v2")
HOOKS = ORDERED + b")R"


def storage(kind: str = "FloatStorage", key: str = "0", location: str = "cpu", numel: int = 4) -> bytes:
    """The persistent id of a storage, and BINPERSID."""
    return b"(" + text("storage") + name("torch", kind) + text(key) + text(location) + integer(numel) + b"tQ"


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, of: bytes | None = None) -> bytes:
    """A call of `_rebuild_tensor_v2` on a storage."""
    of = storage() if of is None else of
    call = b"(" + of + integer(offset) + integers(shape) + integers(stride) + b"\x89" + HOOKS + b"tR"
    return REBUILD + call


W = tensor((4,), (1,))


def program(body: bytes, protocol: int = 2) -> bytes:
    """A pickle that gives what `body` puts on the stack."""
    return b"\x80" + bytes([protocol]) + body + b"."


def state_pickle(items: Mapping[str, bytes]) -> bytes:
    """A pickle of a dictionary."""
    return program(b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u")


def x(value: bytes) -> bytes:
    return state_pickle({"x": value})


def w(value: bytes) -> bytes:
    return state_pickle({"w": value})


# Pickles that call a decoy: a module beside the file, which leaves a trace.
MARKER = name("ckptool_marker", "run")
CALL = MARKER + text("trace") + b"\x85R"


class Decoy:
    """A folder in which every name that a file here mentions is a module that leaves a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trace = folder, folder / "trace"
        body = f"import pathlib\npathlib.Path({str(self.trace)!r}).touch()\n"
        body += f"def run(*a, **k):\n    pathlib.Path({str(self.trace)!r}).touch()\n"
        for module in ("ckptool_marker", "torch", "numpy", "models"):
            (folder / f"{module}.py").write_text(body)


# Files ----------------------------------------------------------------------------------------------------------------

ONE = {"data/0": bytes(range(16))}


def pickle_zip(pickle: bytes, records: Mapping[str, bytes] = ONE, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A torch zip with this pickle and these records."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for record, data in {"data.pkl": pickle, "version": b"3\n", **records}.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{record}"), data, compression)
    return buffer.getvalue()


def opened_pickle(pickle: bytes, folder: Path) -> Any:
    file = folder / "input.pt"
    file.write_bytes(pickle_zip(pickle))
    return read(file)


_NUMPY = (
    name("numpy._core.multiarray", "scalar") + name("numpy", "dtype") + text("f8") + b"\x89\x88\x87R(K\x03" + text("<")
    + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb" + b"C\x08\0\0\0\0\0\0\xf0\x3f\x86R"
)  # fmt: skip
_ENTRIES = {
    "state_dict": b"}(" + text("a.weight") + tensor((2, 2), (2, 1)) + text("a.bias") + tensor((4,), (1,)) + b"u",
    "epoch": integer(3),
    "lr": b"G\x3f\xf0\0\0\0\0\0\0",
    "more": b"](N\x88e",
    "long": b"(" + integer(1 << 80) + b"N\x88t",
    "config": name("argparse", "Namespace") + b")\x81}" + text("a") + integer(1) + b"sb",
    "path": name("pathlib", "PosixPath") + text("a") + b"\x85R",
    "scalar": _NUMPY,
}
KNOWN = (state_pickle(_ENTRIES), ONE)
ORDINARY = (state_pickle(_ENTRIES | {"unknown": name("models", "Net") + b")R"}), ONE)
