"""One entry as a tensor of torch: it reads what it needs and no more."""

from __future__ import annotations

from pathlib import Path

import torch

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
