"""The names of element types, and whatever else stands for one."""

from __future__ import annotations

from typing import Any

import torch

from ckptool.checkpoint.dtypes import DTYPES, dtype_of
from tests.support.looped import looped


@looped("dtype", DTYPES, ids=str)
def test_a_type_is_known_by_every_name_and_object_that_stands_for_it(dtype: Any) -> None:
    assert dtype_of(dtype) is dtype_of(dtype.name) is dtype_of(dtype.torch) is dtype_of(f"torch.{dtype.torch}") is dtype
    if hasattr(torch, dtype.torch):
        assert dtype_of(getattr(torch, dtype.torch)) is dtype
    if dtype.numpy and dtype.kind != "quantized":
        assert dtype_of(dtype.to_numpy()) is dtype_of(dtype.to_numpy().type) is dtype
