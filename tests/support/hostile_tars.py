"""Tar archives that cost their reader more than they are."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tests.support.legacy_streams import Pid, block, pickle_bytes
from tests.support.tar_files import EVIL, WRONG, by_hand, count, four, place, triple, with_member

FILES = {"sys_info": b"N.", "pickle": b"N.", "tensors": b"K\0.", "storages": b"K\0.]."}


def many_tensors(number: int) -> bytes:
    tensor = place((4,), (1,), 0)
    parts = [b"\x80\x02(J" + struct.pack("<i", 100 + i) + b"K\x07Nt." + tensor for i in range(number)]
    return by_hand(tensors=count(number) + b"".join(parts), pickle=pickle_bytes(Pid("100")))


def tar_of_storages(number: int) -> bytes:
    parts = [triple(100 + i, "cpu", "ByteStorage") + block(b"x", 1) for i in range(number)]
    return by_hand(storages=count(number) + b"".join(parts) + pickle_bytes([]))


def tar_of_views(number: int) -> bytes:
    views = pickle_bytes([(100 + i, 7, 0, 4) for i in range(number)])
    return by_hand(storages=count(1) + triple(7, "cpu", "FloatStorage") + four() + views)


INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    **{f"tar: {name}.pth.tar": by_hand(**changes) for name, changes in WRONG.items()},
    **{
        f"tar: with {name}.pth.tar": with_member(FILES, **dict(fields))
        for name, fields in EVIL.items()
        if name != "a bomb of attributes"
    },
    "tar: many tensors.pth.tar": lambda: many_tensors(11_000),
    "tar: many storages.pth.tar": lambda: tar_of_storages(13_000),
    "tar: many views.pth.tar": lambda: tar_of_views(60_000),
    "tar: only headers.pth.tar": lambda: by_hand()[:512] * 2000,
    "tar: an escape in a name.pth.tar": with_member({"sys_info": b"N."}, name="\x1b[31mpickle\r\n"),
}
