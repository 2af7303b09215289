"""`doctor FILE --error`: what a message about devices says of a file with other tags."""

from __future__ import annotations

from pathlib import Path

import torch

import ckptool
from tests.support.files import saved


def test_an_error_about_devices_is_compared_with_the_tags_of_the_file(tmp_path: Path) -> None:
    saved({"w": torch.ones(3)}, tmp_path / "cpu.pt")
    ckptool.remap(tmp_path / "cpu.pt", tmp_path / "gpu.pt", to="cuda:1")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "gpu.pt").read_bytes()[:200])
    other = ckptool.doctor(tmp_path / "gpu.pt", error="don't know how to restore data location (tagged with mps)")
    assert "of another file" in other.findings[0].what and not other.findings[0].certain
    messages = {
        "cuda-location": "RuntimeError: Attempting to deserialize object on a CUDA device but …",
        "device-location": "RuntimeError: don't know how to restore data location of a storage (tagged with cuda:1)",
        "gpu-memory": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    }
    for code, message in messages.items():
        (alone,) = ckptool.doctor(error=message).findings
        found = {name: ckptool.doctor(tmp_path / name, error=message).findings[0] for name in ("cpu.pt", "gpu.pt")}
        assert {each.code for each in found.values()} == {code}
        assert "gpu.pt is tagged cuda:1" in found["gpu.pt"].what and found["gpu.pt"].what.startswith(alone.what)
        assert found["gpu.pt"].certain == alone.certain and len(found["gpu.pt"].fixes) == len(alone.fixes)
        assert "cpu.pt is tagged with no device but the CPU" in found["cpu.pt"].what and not found["cpu.pt"].certain
        assert "remap" not in str(found["cpu.pt"].fixes)
        assert ckptool.doctor(tmp_path / "cut.pt", error=message).findings[0].what == alone.what
