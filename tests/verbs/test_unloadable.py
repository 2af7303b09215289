"""`doctor` names a problem just where stock torch does not load a file: values of every kind, in both formats."""

import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptool
from tests.support.looped import looped


def of_every_kind() -> dict[str, Any]:
    """Tensors of every type and layout, and other values of state dicts."""
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    tensors = {str(dtype): torch.zeros(64, dtype=torch.uint8).view(dtype) for dtype in dtypes if dtype.itemsize}
    ones = torch.ones(2, 2)
    layouts = [ones.to_sparse(), ones.to_sparse_csr(), ones.t(), ones.cfloat().conj(), ones.storage(), ones.to("meta")]
    layouts += [torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8), torch.nested.nested_tensor([ones, ones[:1]])]
    layouts += [nn.Parameter(ones), ones.untyped_storage()]
    values = [torch.float8_e5m2, torch.Size([2]), torch.device("cpu"), np.float64(1), np.ones(2), {1}, 1j, b"x"]
    values += [range(2), nn.Linear(1, 1), types.SimpleNamespace(a=1), Path("x"), OrderedDict(a=1), None]
    return tensors | {f"{number} {type(value)}": value for number, value in enumerate(layouts + values)}


@pytest.mark.filterwarnings("ignore")
@looped("zipped", [True, False])
@looped("protocol", [2, 3], here=1)
def test_it_says_what_stock_torch_does_not_load(zipped: bool, protocol: int, tmp_path: Path) -> None:
    file, seen = tmp_path / "a.pt", set()
    for kind, value in of_every_kind().items():
        tree, options = {"fc.weight": torch.ones(3, 2), "other": value}, {"_use_new_zipfile_serialization": zipped}
        try:
            torch.save(tree, file, pickle_protocol=protocol, **options)
        except (KeyError, NotImplementedError, RuntimeError):  # not in this format
            continue
        try:
            loads = list(torch.load(file, weights_only=True)) == list(tree)
        except Exception:  # noqa: BLE001 -- whatever torch says
            loads = False
        loads = loads and (zipped or not getattr(value, "is_nested", False))  # its sizes are what was in memory: chance
        of_models = {"not-a-tensor", "nested-weights"}  # these are loaded, but by no model
        stands = {finding.code for finding in ckptool.doctor(file).findings if finding.blocks} - of_models
        assert loads != bool(stands), (kind, stands)
        seen.add(loads)
    assert seen == {True, False}
