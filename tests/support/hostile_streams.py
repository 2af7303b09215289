"""Legacy streams and tar archives that cost their reader more than they are."""

import struct
from collections.abc import Callable

import torch

from tests.support.legacy_streams import INFO, Made, Pid, Rebuilt, block, floats, pickle_bytes, storage_id, stream
from tests.support.tar_files import EVIL, WRONG, by_hand, count, four, place, triple, with_member

LOAD = torch.storage._load_from_bytes


CALL = b"\x80\x02cos\nmkdir\n(X\x09\0\0\0/tmp/evilt R".replace(b" ", b"")


def of_bytes(*levels: bytes) -> bytes:
    """A stream in bytes in a stream in bytes, …"""
    value = levels[0]
    for _ in range(int(levels[1])):
        value = stream(Made(LOAD, (value,)), {}, protocol=4)
    return value


def again_and_again(content: bytes, times: int) -> bytes:
    """One pickle that opens the same bytes many times."""
    head = b"\x80\x04" + pickle_bytes(LOAD)[2:-1] + b"B" + struct.pack("<I", len(content)) + content + b"\x9400("
    return stream(head + b"h\x00h\x01\x85R" * times + b"t.", {})


def nested_again(fn: bytes, value: bytes) -> bytes:
    """One pickle that calls a function with the same value many times."""
    head = b"\x80\x04" + fn + b"r\xff\xff\0\0" + value + b"r\xfe\xff\0\x000"
    return head + b"0(" + b"j\xff\xff\0\0j\xfe\xff\0\0\x85R" * 30_000 + b"t."


def many_storages(count: int) -> bytes:
    """Tensors of one element, each with a storage of its own."""
    value = [Rebuilt(storage_id(str(i), 1), (1,)) for i in range(count)]
    return stream(value, {str(i): floats(i) for i in range(count)})


def many_views(count: int) -> bytes:
    value = [Rebuilt(storage_id("1", 4, (str(i + 2), 0, 1)), (1,)) for i in range(count)]
    return stream(value)


def views_alone(count: int) -> bytes:
    return stream([Pid(storage_id("1", 4, (str(i + 2), 0, 1))) for i in range(count)])


ONE = Rebuilt(storage_id(), (4,))


SMALL = stream(ONE)


TAR = {"sys_info": b"N.", "pickle": b"N.", "tensors": b"K\0.", "storages": b"K\0.]."}


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


LEGACY: dict[str, bytes | Callable[[], bytes]] = {
    "another magic number": stream({}, {}, magic=1),
    "a magic number that is a list within lists": stream({}, {}, magic=b"(" * 400 + b"l" * 400 + b"."),
    "a computed magic number": stream({}, {}, magic=CALL + b"."),
    "a call before the magic number": stream({}, {}, magic=CALL + b"0" + pickle_bytes(0x1950A86A20F9469CFC6C)[2:]),
    "a computed version": stream({}, {}, version=CALL + b"."),
    "computed words about the machine": stream({}, {}, info=CALL + b"."),
    "computed keys": stream({}, {}, keys=CALL + b"."),
    "an escape in the words about the machine": stream({}, {}, info={**INFO, "little_endian": "\x1b[31m\u202e"}),
    "an escape in a key": stream(ONE, keys=["\x1b[2J\n"]),
    "an escape in a class": stream(Made(LOAD, (b"",))).replace(b"_load_from_bytes", b"_load\x1b[31m_bytes"),
    "a key that leads elsewhere":
        stream(Rebuilt(storage_id("../../etc/passwd"), (4,)), {"../../etc/passwd": floats(0, 1, 2, 3)}),
    "a key of a megabyte": lambda: stream(Rebuilt(storage_id("k" * 500_000), (4,)), {"k" * 400_000: floats(0)}),
    "a place of a megabyte": lambda: stream(Rebuilt(storage_id(location="x" * 1_000_000), (4,))),
    "elements beyond all files": stream(Rebuilt(storage_id(numel=1 << 62), (1,)), {"1": block(b"", 1 << 62)}),
    "elements of a negative number": stream(Rebuilt(storage_id(numel=-1), (0,)), {"1": block(b"", -1)}),
    "a number that disagrees": stream(ONE, {"1": block(bytes(16), 5)}),
    "the largest number": stream(ONE, {"1": b"\xff" * 24}),
    "a view of itself": stream(Rebuilt(storage_id(view=("1", 0, 4)), (1,))),
    "a view of a view":
        stream([Rebuilt(storage_id(view=("2", 0, 4)), (1,)), Rebuilt(storage_id("2", view=("1", 0, 4)), (1,))]),
    "a view beyond its root": stream(Rebuilt(storage_id(view=("2", 3, 1 << 62)), (1,))),
    "an expanded tensor": stream(Rebuilt(storage_id(), (1 << 40,), (0,))),
    "source text with escapes":
        stream({"m": Pid(("module", torch.nn.Linear, "\x1b]0;x\x07", "import os\n\x1b[2J"))}, {}),
    "streams in streams": lambda: of_bytes(SMALL, b"20"),
    "the same stream again and again": lambda: again_and_again(stream([None] * 1000, {}), 80_000),
    "an empty stream again and again": lambda: again_and_again(stream(None, {}), 150_000),
    "no stream again and again": lambda: again_and_again(b"\x80\x02." * 100, 150_000),
    "a call hidden in bytes": stream(Made(LOAD, (stream(CALL + b"0N.", {}),)), {}),
    "many storages": lambda: many_storages(7_000),
    "many views": lambda: many_views(10_000),
    "many views that stand alone": lambda: views_alone(10_000),
    "a million frames": lambda: stream(b"\x80\x04](" + (b"\x95" + bytes(8)) * 100_000 + b"e.", {}),
    "a key list of a megabyte": lambda: stream(ONE, keys=[str(i) for i in range(60_000)]),
    "keys that are equal": lambda: stream(ONE, keys=["1"] * 100_000),
    "nested a thousand times": stream(b"]" * 5_000 + b"a" * 4_999 + b".", {}),
    "long texts": lambda: stream(b"\x80\x02](" + (b"X" + struct.pack("<I", 65_536) + b"t" * 65_536) * 15 + b"e.", {}),
    "bytes spelled as text again and again": lambda: stream(
            b"\x80\x02c_codecs\nencode\nq\x00X"
            + struct.pack("<I", 70_000)
            + b"t" * 70_000
            + b"q\x01X\6\0\0\0latin1q\x0200"
            + b"0("
            + b"h\x00h\x01h\x02\x86R" * 100_000
            + b"t.",
            {},
        ),
    "one set again and again":
        lambda: stream(nested_again(b"cbuiltins\nset\n", pickle_bytes(list(range(50_000)))[2:-1]), {}),
    "pairs again and again": lambda: stream(
        nested_again(b"ccollections\nOrderedDict\n", pickle_bytes([(f"k{i}", 0) for i in range(20_000)], 3)[2:-1]), {}
    ),
    "a bytearray again and again":
        lambda: stream(nested_again(b"cbuiltins\nbytearray\n", b"B" + struct.pack("<I", 60_000) + bytes(60_000)), {}),
    "bytes after the end": SMALL + b"\x80\x02cos\nsystem\n.",
    "a stream of another machine": stream(ONE, info={**INFO, "little_endian": False}),
}  # fmt: skip
INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    **{f"legacy: {name}.pt": data for name, data in LEGACY.items()},
    **{f"tar: {name}.pth.tar": by_hand(**changes) for name, changes in WRONG.items()},
    **{
        f"tar: with {name}.pth.tar": with_member(TAR, **dict(fields))
        for name, fields in EVIL.items()
        if name != "a bomb of attributes"
    },
    "tar: many tensors.pth.tar": lambda: many_tensors(11_000),
    "tar: many storages.pth.tar": lambda: tar_of_storages(13_000),
    "tar: many views.pth.tar": lambda: tar_of_views(60_000),
    "tar: only headers.pth.tar": lambda: by_hand()[:512] * 2000,
    "tar: an escape in a name.pth.tar": with_member({"sys_info": b"N."}, name="\x1b[31mpickle\r\n"),
}
