"""Legacy streams made by hand: each of the five pickles and each number can be another than torch would write."""

import io
import pickle
import struct
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptool.checkpoint import Checkpoint, TensorEntry
from ckptool.errors import CkptoolError
from ckptool.formats import read
from fixtures.torch_tar import SYS_INFO, tar_bytes
from tests.support.errors import three_parts, unreadable
from tests.support.files import written

MAGIC = 0x1950A86A20F9469CFC6C
INFO = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


@dataclass(frozen=True, eq=False)
class Pid:
    """Stands in a value for what a persistent id stands for."""

    pid: Any


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """A tensor as torch pickles it, of a storage given by its persistent id."""

    pid: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    offset: int = 0

    def __reduce__(self) -> Any:
        args = (Pid(self.pid), self.offset, self.shape, self.stride, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, args


@dataclass(frozen=True, eq=False)
class Made:
    """A call in a pickle: `fn(*args)`, and the state that its result is given."""

    fn: Any
    args: tuple[Any, ...]
    state: Any = None

    def __reduce__(self) -> Any:
        return (self.fn, self.args) if self.state is None else (self.fn, self.args, self.state)


class Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Pid) else None


def pickle_bytes(value: Any, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    Writer(out, protocol).dump(value)
    return out.getvalue()


def storage_id(key: str = "1", numel: int = 4, view: Any = None, **changes: Any) -> tuple[Any, ...]:
    """A persistent id as torch writes it."""
    parts = {"tag": "storage", "kind": torch.FloatStorage, "key": key, "location": "cpu", "numel": numel, "view": view}
    return tuple((parts | changes).values())


def block(values: bytes, numel: int, order: str = "<") -> bytes:
    """A storage's data behind its number of elements."""
    return struct.pack(f"{order}q", numel) + values


def floats(*values: float, order: str = "<") -> bytes:
    return block(struct.pack(f"{order}{len(values)}f", *values), len(values), order)


def stream(
    value: Any,
    blocks: dict[Any, bytes] | None = None,
    *,
    magic: Any = MAGIC,
    version: Any = 1001,
    info: Any = INFO,
    keys: Any = None,
    protocol: int = 2,
) -> bytes:
    """A stream of a value and its storages. What is given as bytes is taken as a pickle."""
    blocks = {"1": floats(0, 1, 2, 3)} if blocks is None else blocks
    keys = list(blocks) if keys is None else keys
    parts = [
        part if type(part) is bytes else pickle_bytes(part, protocol) for part in (magic, version, info, value, keys)
    ]
    return b"".join((*parts, *blocks.values()))


# Old files opened -----------------------------------------------------------------------------------------------------


LEGACY: dict[str, Any] = {"_use_new_zipfile_serialization": False}


def opened_legacy(data: bytes, folder: Path, name: str = "legacy.pt", container: str = "torch-legacy") -> Checkpoint:
    checkpoint = read(written(data, folder / name))
    assert checkpoint.container == container
    return checkpoint


def opened_tar(data: bytes, folder: Path) -> Checkpoint:
    return opened_legacy(data, folder, "old.pth.tar", "torch-tar")


def legacy_refused(data: bytes, folder: Path, name: str = "legacy.pt") -> CkptoolError:
    three_parts(error := unreadable(written(data, folder / name)))
    return error


def tar_refused(data: bytes, folder: Path) -> CkptoolError:
    return legacy_refused(data, folder, "old.pth.tar")


def elements(entry: Any) -> list[Any]:
    assert isinstance(entry, TensorEntry)
    return list(entry.numpy().reshape(-1).tolist())


SMALL = {"weight": torch.tensor([1.5, -2.0, 3.25]), "n": torch.tensor([7, 9]), "epoch": 3}


# Tar files ------------------------------------------------------------------------------------------------------------
# Tar files of torch's first format, written by hand, and what is wrong with some of them.


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


# Hostile ones ---------------------------------------------------------------------------------------------------------
# Legacy streams and tar archives that cost their reader more than they are.


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


SMALL_NUMBERS = stream(ONE)


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


LEGACY_INPUTS: dict[str, bytes | Callable[[], bytes]] = {
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
    "streams in streams": lambda: of_bytes(SMALL_NUMBERS, b"20"),
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
    "bytes after the end": SMALL_NUMBERS + b"\x80\x02cos\nsystem\n.",
    "a stream of another machine": stream(ONE, info={**INFO, "little_endian": False}),
}  # fmt: skip
INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    **{f"legacy: {name}.pt": data for name, data in LEGACY_INPUTS.items()},
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
