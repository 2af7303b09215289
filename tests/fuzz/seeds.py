"""Small real files of each kind, made by torch, safetensors and numpy, and every hostile input: what a fuzzer starts
from."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.all_hostile import everything
from tests.support.hostile_inputs import ORDINARY, pickle_zip

LARGEST = 1 << 16
# Slow where code is instrumented, and tested by themselves.
BOMBS = tuple(f"row {number}-" for number in (70, 71, 72, 74, 75))
TARGETS = ("pickle", "zip", "legacy", "tar", "safetensors")


def seeds(target: str) -> Iterator[tuple[str, bytes]]:
    """The seeds of a target: name, bytes."""
    for name, data in _REAL[target]():
        yield name, data
    for name, data in everything():
        if name.startswith(BOMBS):
            continue
        if len(data) <= LARGEST and kind(data) == target:
            yield name, data
        if target == "pickle" and kind(data) == "zip" and (found := _pickle_in(data)) is not None:
            yield f"{name} (data.pkl)", found


def kind(data: bytes) -> str:
    """The target whose reader a file is for."""
    if data[:2] == b"PK":
        return "zip"
    if len(data) > 265 and (
        data[257:262] == b"ustar" or data[:8].rstrip(b"\0") in (b"sys_info", b"pickle", b"storage")
    ):
        return "tar"
    if data[8:9] == b"{":
        return "safetensors"
    return "legacy" if bytes.fromhex("6cfc9c46f9206aa85019") in data[:32] else "pickle"


def _pickle_in(data: bytes) -> bytes | None:
    import zipfile

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            info = archive.getinfo("archive/data.pkl")
            return archive.read(info) if info.file_size <= LARGEST else None
    except Exception:  # noqa: BLE001 (a hostile archive may be broken in any way)
        return None


def _values() -> dict[str, object]:
    import torch

    w = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    net = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    return {
        "ties": {"a.weight": w, "b.weight": w, "t": w.t(), "s": w[1:], "z": torch.zeros(()), "e": torch.empty(0, 4)},
        "dtypes": {str(d): torch.ones(2).to(d) for d in (torch.float16, torch.bfloat16, torch.int64, torch.bool,
                                                         torch.uint16, torch.float8_e4m3fn, torch.complex64)},
        "training": {"model": net.state_dict(), "optimizer": adam.state_dict(), "epoch": 3, "module": net},
        "odd": {"p": torch.nn.Parameter(w), "sparse": w.to_sparse(), "csr": w.to_sparse_csr(),
            "conj": torch.ones(2) * 1j,
                "q": torch.quantize_per_tensor(w, 0.1, 1, torch.qint8), "set": {1, 2}, "bytes": b"\xff",
                    "k": {1: (2, None)}},
        "numpy": {"array": w.numpy(), "scalar": w.numpy()[0, 0], "path": Path("a")},
    }  # fmt: skip


def _saved(**options: object) -> Iterator[tuple[str, bytes]]:
    import torch

    warnings.simplefilter("ignore")
    for name, value in _values().items():
        buffer = io.BytesIO()
        torch.save(value, buffer, **options)  # type: ignore[arg-type]
        yield name, buffer.getvalue()


def _zips() -> Iterator[tuple[str, bytes]]:
    import torch

    yield from _saved()
    yield "deflated", pickle_zip(*ORDINARY, compression=8)
    script = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), script)
    yield "torchscript", script.getvalue()
    yield "torch-export", (Path(__file__).parents[2] / "fixtures" / "versions" / "torch-2.13-export.pt2").read_bytes()
    package = io.BytesIO()
    with torch.package.PackageExporter(package) as exporter:
        exporter.extern("torch.**")
        exporter.save_pickle("models", "model", torch.nn.Linear(2, 2))
        exporter.save_source_string("code", "x = 1")
    yield "torch-package", package.getvalue()
    import numpy

    arrays = io.BytesIO()
    numpy.savez(arrays, a=numpy.arange(4.0), b=numpy.ones((2, 2), "f2"))
    yield "npz", arrays.getvalue()


def _pickles() -> Iterator[tuple[str, bytes]]:
    import numpy

    yield "ordinary", ORDINARY[0]
    for name, data in _saved():
        found = _pickle_in(data)
        if found is not None:
            yield name, found
    plain = {
        "a": [1, 2.5, None, True, (1,), {1, 2}, frozenset([3]), b"\xff", bytearray(2), "é", 1 << 70],
        "w": numpy.ones(3),
    }
    for protocol in range(6):
        yield f"bare {protocol}", pickle.dumps(plain, protocol)


def _legacy() -> Iterator[tuple[str, bytes]]:
    yield from _saved(_use_new_zipfile_serialization=False)


def _tars() -> Iterator[tuple[str, bytes]]:
    """The layout that torch's own `legacy_load` reads."""
    import tarfile

    storages = pickle.dumps(1, 2) + _global_tuple() + (4).to_bytes(8, "little") + bytes(16) + pickle.dumps([], 2)
    numbers = (2).to_bytes(4, "little") + bytes(4) + b"".join(n.to_bytes(8, "little") for n in (2, 2, 2, 1, 0))
    tensors = pickle.dumps(1, 2) + b"\x80\x02K\x01K\x01ctorch\nFloatTensor\n\x87." + numbers
    members = {
        "sys_info": pickle.dumps({"protocol_version": 1000, "little_endian": True, "type_sizes": {}}, 2),
        "pickle": b"\x80\x02}X\1\0\0\0aK\x01Qs.",
        "storages": storages,
        "tensors": tensors,
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    yield "tar", buffer.getvalue()


def _global_tuple() -> bytes:
    return b"\x80\x02K\x01X\3\0\0\0cpuctorch\nFloatStorage\n\x87."


def _safetensors() -> Iterator[tuple[str, bytes]]:
    import torch
    from safetensors.torch import save

    w = torch.ones(2, 3)
    yield "plain", save({"a": w, "b": w.half(), "c": w.to(torch.float8_e4m3fn), "e": torch.empty(0)}, {"format": "pt"})
    yield "bare", save({"a": w})
    header = b'{"t":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}'
    yield "scalar", len(header).to_bytes(8, "little") + header + bytes(8)


_REAL: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    "pickle": _pickles,
    "zip": _zips,
    "legacy": _legacy,
    "tar": _tars,
    "safetensors": _safetensors,
}
