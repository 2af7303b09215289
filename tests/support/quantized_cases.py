"""Quantized weights on disk: the libraries' vectors, and GPTQ and AWQ packed by hand, as their formats are."""

import json
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file

from fixtures.surgery.make_quantized import Case, Tensors

VECTORS = Path(__file__).parents[2] / "fixtures/surgery/quantized"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each nibble of a word, the lowest first


def vectors() -> list[Case]:
    """The cases of the libraries that are kept in the repository."""
    configs = json.loads((VECTORS / "configs.json").read_text())
    inputs, expected = (_apart(load_file(VECTORS / f"{name}.safetensors")) for name in ("inputs", "expected"))
    return [Case(name, inputs[name], config, expected[name]) for name, config in configs.items()]


def _apart(tensors: Tensors) -> dict[str, Tensors]:
    found: dict[str, Tensors] = {}
    for key, value in tensors.items():
        case, _, name = key.partition("/")
        found.setdefault(case, {})[name] = value
    return found


def write_case(folder: Path, case: Case) -> Path:
    """The file of a case, with the configuration beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in case.tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", "torch_dtype": "float16", "quantization_config": case.config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is value.dtype and found[key].shape == value.shape, key
        raw = found[key].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)
        assert torch.equal(*raw), key


# By hand -------------------------------------------------------------------------------------------------------------


def _words_down(values: Any, bits: int) -> torch.Tensor:
    """Numbers as one long integer down each column, cut into words of 32 bits."""
    rows, columns = values.shape
    words = numpy.zeros((rows * bits // 32, columns), numpy.uint32)
    for column in range(columns):
        stream = sum(int(value) << row * bits for row, value in enumerate(values[:, column]))
        words[:, column] = [stream >> 32 * word & 0xFFFFFFFF for word in range(len(words))]
    return torch.from_numpy(words.view(numpy.int32))


def gptq(bits: int, *, symmetric: bool = False, version: int = 1, reorder: bool = False, field: str = "") -> Case:
    """A weight [64, 128] in groups of 32. field: `checkpoint_format`, if not that of the version."""
    rng = numpy.random.default_rng(bits)
    columns, rows, group = 128, 64, 32
    codes = rng.integers(0, 1 << bits, (columns, rows))
    points = rng.integers(1, 1 << bits, (columns // group, rows))
    points = numpy.full_like(points, 1 << bits - 1) if symmetric else points
    scales = rng.random(points.shape).astype(numpy.float16)
    index = numpy.arange(columns) // group
    index = rng.permutation(index) if reorder else index
    tensors = {
        "a.qweight": _words_down(codes, bits),
        "a.qzeros": _words_down((points - (version == 1)).T, bits).T.contiguous(),
        "a.scales": torch.from_numpy(scales),
    } | ({"a.g_idx": torch.from_numpy(index.astype(numpy.int32))} if reorder else {})
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    config["desc_act"] = reorder
    config["checkpoint_format"] = field or ("gptq" if version == 1 else "gptq_v2")
    weight = (codes - points[index]).astype(numpy.float32) * scales[index].astype(numpy.float32)
    return Case(f"gptq {bits}", tensors, config, {"a.weight": torch.from_numpy(weight.T.copy()).bfloat16()})


def awq(columns: int = 64, rows: int = 40, group: int = 32) -> Case:
    rng = numpy.random.default_rng(0)
    codes, points = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (columns // group, rows))
    scales = rng.random(points.shape).astype(numpy.float16)

    def words(values: Any) -> torch.Tensor:
        packed = numpy.zeros((values.shape[0], rows // 8), numpy.uint32)
        for word in range(rows // 8):
            for nibble, column in enumerate(AWQ_ORDER):
                packed[:, word] |= values[:, 8 * word + column].astype(numpy.uint32) << 4 * nibble
        return torch.from_numpy(packed.view(numpy.int32))

    tensors = {"a.qweight": words(codes), "a.qzeros": words(points), "a.scales": torch.from_numpy(scales)}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    index = numpy.arange(columns) // group
    weight = (codes - points[index]).astype(numpy.float32) * scales[index].astype(numpy.float32)
    return Case("awq", tensors, config, {"a.weight": torch.from_numpy(weight.T.copy()).bfloat16()})
