"""One entry as a tensor of torch: it reads what it needs and no more."""

from __future__ import annotations

from pathlib import Path

import torch

from ckptool import bridge
from ckptool.formats import read
from fixtures.traps import TRAPS
from tests.support.files import load, saved, torch_bytes
from tests.support.looped import looped


@looped("name", [name for name in sorted(TRAPS) if name[:2] in ("06", "07", "08", "09", "10")])
def test_one_entry_as_a_tensor(name: str, tmp_path: Path) -> None:
    path = saved(TRAPS[name](), tmp_path / "x.pt")
    expected, tree = load(path), read(path).tree
    for key, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            made = tree[key].torch()
            assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            assert (made.is_conj(), made.is_neg(), made.requires_grad) == (
                tensor.is_conj(),
                tensor.is_neg(),
                tensor.requires_grad,
            )
            if not tensor.is_quantized:  # their bytes beyond the span were not read: compared are values
                made, tensor = made.clone(), tensor.clone()
            assert torch_bytes(made) == torch_bytes(tensor)


def test_one_entry_reads_only_its_span(tmp_path: Path) -> None:
    entry = read(saved({"w": torch.arange(1_000_000)[10:12]}, tmp_path / "x.pt")).tree["w"]
    made = entry.torch()
    assert made.tolist() == [10, 11]
    assert made.untyped_storage().nbytes() == 16


def test_one_composite_and_one_parameter(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "kept"  # type: ignore[attr-defined]
    tree = read(saved({"s": torch.eye(3).to_sparse(), "p": parameter}, tmp_path / "x.pt")).tree
    assert tree["s"].torch().to_dense().tolist() == torch.eye(3).tolist()
    made = bridge.to_torch(tree["p"], device="meta")
    assert (type(made), made.note, made.device.type) == (torch.nn.Parameter, "kept", "meta")  # type: ignore[attr-defined]
