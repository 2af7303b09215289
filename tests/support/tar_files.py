"""Tar files of torch's first format, written by hand, and what is wrong with some of them."""

import io
import struct
import tarfile
from typing import Any

from fixtures.torch_tar import SYS_INFO, tar_bytes
from tests.support.legacy_streams import Pid, block, pickle_bytes


def by_hand(**changes: bytes) -> bytes:
    """An archive with one float storage 7 of four elements and a tensor 8 on it."""
    parts = {
        "sys_info": pickle_bytes(SYS_INFO),
        "pickle": pickle_bytes({"w": Pid("8")}),
        "tensors": count(1) + triple(8, 7, "FloatTensor") + place((4,), (1,), 0),
        "storages": count(1) + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes([]),
    }
    return tar_bytes(parts | changes)


def count(number: Any) -> bytes:
    return pickle_bytes(number)


def triple(*parts: Any) -> bytes:
    """The pickle of a tuple, its last part being the name of a class of torch."""
    head = b"\x80\x02(" + b"".join(pickle_bytes(part)[2:-1].replace(b"q\x00", b"") for part in parts[:-1])
    module, _, name = f"torch.{parts[-1]}".rpartition(".")
    return head + f"c{module}\n{name}\nt.".encode()


def four() -> bytes:
    return block(struct.pack("<4f", 0, 1, 2, 3), 4)


def place(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, rank: int | None = None) -> bytes:
    dimensions = len(shape) if rank is None else rank
    return struct.pack(f"<i4x{len(shape) + len(stride) + 1}q", dimensions, *shape, *stride, offset)


def with_member(members: dict[str, bytes], **fields: Any) -> bytes:
    """The archive with one more entry in it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=fields.pop("format", tarfile.PAX_FORMAT)) as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
        header = tarfile.TarInfo("evil")
        for name, value in fields.items():
            setattr(header, name, value)
        tar.addfile(header, io.BytesIO(b"x" * header.size))
    return out.getvalue()


EVIL: dict[str, dict[str, Any]] = {
    "up": {"name": "../../evil"},
    "absolute": {"name": "/tmp/evil"},
    "up to a member": {"name": "../pickle"},
    "hard link": {"type": tarfile.LNKTYPE, "linkname": "pickle"},
    "symbolic link": {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "link called pickle": {"name": "pickle", "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "device": {"type": tarfile.CHRTYPE},
    "block device": {"type": tarfile.BLKTYPE},
    "pipe": {"type": tarfile.FIFOTYPE},
    "folder": {"type": tarfile.DIRTYPE},
    "sparse": {"type": tarfile.GNUTYPE_SPARSE},
    "another file": {"size": 10},
    "a member twice": {"name": "pickle", "size": 3},
    "a long name": {"name": "x" * 300, "format": tarfile.GNU_FORMAT},
    "a long name in attributes": {"name": "é" * 300},
    "attributes that name": {"pax_headers": {"path": "storages"}},
    "attributes of a sparse file": {"pax_headers": {"GNU.sparse.major": "1"}},
    "a bomb of attributes": {"pax_headers": {"comment": "x" * 1_000_000}},
}


WRONG: dict[str, dict[str, Any]] = {
    "rank beyond the file": {"tensors": count(1) + triple(8, 7, "FloatTensor") + place((4,), (1,), 0, rank=60)},
    "beyond the storage": {"tensors": count(1) + triple(8, 7, "FloatTensor") + place((5,), (1,), 0)},
    "negative offset": {"tensors": count(1) + triple(8, 7, "FloatTensor") + place((1,), (1,), -1)},
    "negative size": {"tensors": count(1) + triple(8, 7, "FloatTensor") + place((-4,), (1,), 0)},
    "negative stride": {"tensors": count(1) + triple(8, 7, "FloatTensor") + place((4,), (-1,), 0)},
    "no such storage": {"tensors": count(1) + triple(8, 9, "FloatTensor") + place((4,), (1,), 0)},
    "no storage, no type": {"tensors": count(1) + triple(8, None, "Linear") + place((), (), 0)},
    "no place": {"tensors": count(1) + triple(8, 7, "FloatTensor")},
    "too many tensors": {"tensors": count(2) + triple(8, 7, "FloatTensor") + place((4,), (1,), 0)},
    "as many as atoms": {"tensors": count(1 << 80)},
    "minus one": {"tensors": count(-1)},
    "a count that is text": {"storages": count("1")},
    "not a triple": {"tensors": count(1) + pickle_bytes([8, 7]) + place((4,), (1,), 0)},
    "a key twice": {"tensors": count(2) + 2 * (triple(8, 7, "FloatTensor") + place((4,), (1,), 0))},
    "a tensor with a storage's key": {"tensors": count(1) + triple(7, 7, "FloatTensor") + place((4,), (1,), 0)},
    "elements beyond the file": {"storages": count(1) + triple(7, "cpu", "FloatStorage") + block(b"", 1 << 40)},
    "negative elements": {"storages": count(1) + triple(7, "cpu", "FloatStorage") + block(b"", -1)},
    "a storage of floats": {"storages": count(1) + triple(7, "cpu", "FloatTensor") + four() + pickle_bytes([])},
    "a place that is a number": {"storages": count(1) + triple(7, 3, "FloatStorage") + four() + pickle_bytes([])},
    "no views": {"storages": count(1) + triple(7, "cpu", "FloatStorage") + four()},
    "views are a number": {"storages": count(1) + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes(3)},
    "view outside": {"storages": count(1) + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes([(5, 7, 2, 3)])},
    "view before": {"storages": count(1) + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes([(5, 7, -1, 3)])},
    "view of nothing":
        {"storages": count(1) + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes([(5, 6, 0, 3)])},
    "view of itself": {"storages": count(1) + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes([(7, 7, 0, 3)])},
    "view of a view": {
        "storages": count(1) + triple(7, "cpu", "FloatStorage") + four() + pickle_bytes([(5, 7, 0, 3), (6, 5, 0, 1)])
    },
    "no such tensor": {"pickle": pickle_bytes({"w": Pid("11")})},
    "an id that is no number": {"pickle": pickle_bytes({"w": Pid("../../x")})},
    "an id that is a list": {"pickle": pickle_bytes({"w": Pid([8])})},
    "an id of a million digits": {"pickle": pickle_bytes({"w": Pid("8" * 1_000_000)})},
    "a module that is none": {"pickle": pickle_bytes({"w": Pid(("Net", None, None))})},
    "a second value": {"pickle": pickle_bytes({"w": Pid("8")}) + pickle_bytes(1)},
    "no value": {"pickle": b""},
    "no sys_info": {"sys_info": b""},
    "sys_info is a list": {"sys_info": pickle_bytes([])},
    "another version": {"sys_info": pickle_bytes({**SYS_INFO, "protocol_version": 1001})},
}  # fmt: skip
