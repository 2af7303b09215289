"""Quantized weights, packed and dequantized by the libraries themselves (`make engines`): the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import ckptool
from fixtures.surgery.make_quantized import cases
from tests.support.quantized_cases import assert_same_bits, write_case

pytestmark = pytest.mark.engines


def test_the_bits_of_the_libraries(tmp_path: Path) -> None:
    count = 0
    for count, case in enumerate(cases(), 1):
        file = write_case(tmp_path / str(count), case)
        ckptool.cast(file, tmp_path / "out.safetensors", dtype="bf16", dequantize=True, overwrite=True)
        assert_same_bits(load_file(tmp_path / "out.safetensors"), case.expected)
    assert count > 50
