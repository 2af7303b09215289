"""The names of element types, and whatever else stands for one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

from ckptool.checkpoint.dtypes import DTYPES, by_name, dtype_of
from ckptool.errors import UsageError
from tests.support.looped import looped


@looped("dtype", DTYPES, ids=str)
def test_a_type_is_known_by_every_name_and_object_that_stands_for_it(dtype: Any) -> None:
    assert dtype_of(dtype) is dtype_of(dtype.name) is dtype_of(dtype.torch) is dtype_of(f"torch.{dtype.torch}") is dtype
    if hasattr(torch, dtype.torch):
        assert dtype_of(getattr(torch, dtype.torch)) is dtype
    if dtype.numpy and dtype.kind != "quantized":
        assert dtype_of(dtype.to_numpy()) is dtype_of(dtype.to_numpy().type) is dtype


def test_what_people_have_in_their_hands() -> None:
    assert dtype_of(torch.zeros(1).dtype) is dtype_of(numpy.zeros(1, "f4").dtype) is dtype_of("FP32") is by_name("f32")
    assert dtype_of(ml_dtypes.bfloat16) is dtype_of(torch.bfloat16) is by_name("bf16")


@pytest.mark.parametrize("given", [float, int, None, 3, "f33", "", [], {}, object, torch.zeros(1), torch.device("cpu")])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="is not a dtype"):
        dtype_of(given)


def test_pythons_float_is_told_both_types_that_it_may_mean() -> None:
    with pytest.raises(UsageError, match=r"torch\.float32 or torch\.float64"):
        dtype_of(float)


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = """
import sys
from ckptool.checkpoint.dtypes import dtype_of
dtype_of("torch.bfloat16")
try:
    dtype_of(3)
except Exception:
    print([name for name in ("torch", "numpy") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
