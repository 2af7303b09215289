"""Quantized weights, packed and dequantized by the libraries themselves (`make engines`): the same bits, and folders
that transformers loads as the model that it makes of the quantized ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from fixtures.surgery.make_quantized import Tensors, cases
from tests.support.quantized_cases import assert_same_bits, write_case

pytestmark = pytest.mark.engines


def test_the_bits_of_the_libraries(tmp_path: Path) -> None:
    count = 0
    for count, case in enumerate(cases(), 1):
        file = write_case(tmp_path / str(count), case)
        ckptool.cast(file, tmp_path / "out.safetensors", dtype="bf16", dequantize=True, overwrite=True)
        assert_same_bits(load_file(tmp_path / "out.safetensors"), case.expected)
    assert count > 50


def nf4(name: str, weight: torch.Tensor) -> Tensors:
    import bitsandbytes.functional as library

    packed, state = library.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    return {name: packed, **{f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}}


def fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = torch.rand(weight.shape[0] // 32, weight.shape[1] // 64) / 64 + 0.001
    codes = weight.float() / scale.repeat_interleave(32, 0).repeat_interleave(64, 1)
    return {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def int4(name: str, weight: torch.Tensor) -> Tensors:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(CONFIGS["int4"]["config_groups"]["group_0"])
    scale = (torch.rand(weight.shape[0], weight.shape[1] // 32) / 64 + 0.001).bfloat16()
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": torch.randint(-8, 8, scale.shape).char()}
    packed = BaseCompressor.get_value_from_registry("pack-quantized").compress(state, scheme)
    return {f"{name.removesuffix('weight')}{key}": value for key, value in packed.items()}


def mxfp4(name: str, weight: torch.Tensor) -> Tensors:
    experts, columns, rows = weight.shape  # as gpt-oss has them in memory
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)}


def tiny(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 192}
    if kind == "mxfp4":
        config = transformers.GptOssConfig(**sizes, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
        return transformers.GptOssForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))


CONFIGS: dict[str, Any] = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    | {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 64], "modules_to_not_convert": ["lm_head"]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
            }
        },
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("kind", ["nf4", "fp8", "int4", "mxfp4"])
def test_transformers_loads_the_weights_that_it_would_compute(kind: str, tmp_path: Path) -> None:
    import transformers

    model = tiny(kind).bfloat16()
    model.save_pretrained(tmp_path / "in")
    pack = {"nf4": nf4, "fp8": fp8, "int4": int4, "mxfp4": mxfp4}[kind]
    chosen = ("experts.gate_up_proj", "experts.down_proj") if kind == "mxfp4" else ("_proj.weight",)
    state = load_file(tmp_path / "in/model.safetensors")
    quantized: Tensors = {}
    for name, value in state.items():
        quantized |= pack(name, value) if name.endswith(chosen) else {name: value}
    save_file(quantized, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "in/config.json").read_text())
    config["quantization_config"] = CONFIGS[kind]
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    ckptool.cast(tmp_path / "in", f"{tmp_path / 'out'}/", dtype="bf16", dequantize=True)
    found, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.bfloat16)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    options: dict[str, Any] = {}
    if kind != "nf4":
        fp8_config, int4_config = transformers.FineGrainedFP8Config, transformers.CompressedTensorsConfig
        config_of = {"fp8": fp8_config, "int4": int4_config, "mxfp4": transformers.Mxfp4Config}[kind]
        options["quantization_config"] = config_of(dequantize=True)
    judge = type(model).from_pretrained(tmp_path / "in", dtype=torch.bfloat16, **options)
    if kind == "nf4":
        judge = judge.dequantize() or judge
    assert_same_bits(dict(found.state_dict()), dict(judge.state_dict()))
    words = torch.arange(12).reshape(2, 6)
    assert torch.equal(found.eval()(words).logits, judge.eval()(words).logits)
