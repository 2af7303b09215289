"""The keys of adapters, taken apart, and their changes in one representation."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.conventions.adapter_keys import adapter_key
from ckptool.errors import CkptoolError
from ckptool.transforms.lora.adapters import read_adapter
from tests.support.looped import looped

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def entry(*shape: int, fill: float = 0.0) -> TensorEntry:
    data = InlineBytes(numpy.full(shape, fill, numpy.float32).tobytes())
    return TensorEntry(Storage(data), by_name("f32"), shape, row_major_strides(shape))


def pair(module: str, rank: int = 2) -> dict[str, TensorEntry]:
    return {f"{module}.lora_A.weight": entry(rank, 6), f"{module}.lora_B.weight": entry(4, rank)}


@looped(
    ("key", "scheme", "component", "module", "role"),
    [
        ("base_model.model.m.0.q_proj.lora_A.weight", "PEFT", "base_model.model.", "m.0.q_proj", "A"),
        ("base_model.model.q.lora_B.default.weight", "PEFT", "base_model.model.", "q", "B"),
        ("base_model.model.q.lora_B.bias", "PEFT", "base_model.model.", "q", "B.bias"),
        ("base_model.model.emb.lora_embedding_A", "PEFT", "base_model.model.", "emb", "A"),
        ("base_model.model.q.lora_magnitude_vector", "PEFT", "base_model.model.", "q", "magnitude"),
        ("base_model.model.mha.base_layer.out_proj.lora_A.weight", "PEFT", "base_model.model.", "mha.out_proj", "A"),
        ("base_model.model.q.base_layer.bias", "PEFT", "base_model.model.", "q.bias", ""),
        ("base_model.model.head.modules_to_save.weight", "PEFT", "base_model.model.", "head.weight", ""),
        ("lora_unet_down_blocks_0_to_q.lora_down.weight", "kohya", "lora_unet_", "down_blocks_0_to_q", "A"),
        ("lora_te1_text_model_fc1.alpha", "kohya", "lora_te1_", "text_model_fc1", "alpha"),
        ("lycoris_layers_0_fc.hada_w1_a", "kohya", "lycoris_", "layers_0_fc", "hada_w1_a"),
        ("unet.down.0.to_q.lora_A.weight", "diffusers", "unet.", "down.0.to_q", "A"),
        ("unet.d.attn1.processor.to_out_lora.up.weight", "diffusers", "unet.", "d.attn1.to_out.0", "B"),
        ("text_encoder.a.q_proj.lora_linear_layer.down.weight", "diffusers", "text_encoder.", "a.q_proj", "A"),
        ("diffusion_model.blocks.0.q.lora_A.weight", "ai-toolkit", "diffusion_model.", "blocks.0.q", "A"),
    ],
)  # fmt: skip
def test_a_key_is_taken_apart(key: str, scheme: str, component: str, module: str, role: str) -> None:
    assert adapter_key(key)[:4] == (scheme, component, module, role)


@looped(
    ("node", "config", "message"),
    [
        (pair("base_model.model.q"), None, "does not say its alpha"),
        ({"base_model.model.q.lora_A.weight": entry(2, 6)}, CONFIG, "alone"),
        (pair("base_model.model.q") | {"base_model.model.q.lora_A.bias": entry(2)}, CONFIG, "alone"),
        (pair("base_model.model.q", 0), CONFIG, "rank 0"),
        (pair("base_model.model.q", 4), CONFIG, "has rank 4, and 2 by its configuration"),
        (pair("base_model.model.q"), CONFIG | {"lora_alpha": None}, "not a number"),
        (pair("base_model.model.q"), CONFIG | {"r": 10**400}, "not a number"),
        (pair("base_model.model.q"), CONFIG | {"lora_alpha": math.nan}, "is nan, not a number"),
        (pair("base_model.model.q"), CONFIG | {"layer_replication": [[0, 1]]}, "layer replication"),
        (pair("base_model.model.q"), CONFIG | {"use_bdlora": {"a": 1}}, "BD-LoRA"),
        (pair("base_model.model.q"), CONFIG | {"peft_type": ["VERA"]}, "VERA"),
        (pair("base_model.model.q"), CONFIG | {"alpha_pattern": {"(": 1}}, "is not a regular expression"),
        (pair("unet.q") | {"unet.q.alpha": entry(fill=math.nan)}, None, "is nan, not a number"),
        (pair("unet.q") | pair("base_model.model.q"), None, "mixes the names"),
        ({"weight": entry(2)}, None, "has no LoRA"),
    ],
)
def test_what_is_no_whole_adapter_is_named(node: Any, config: Any, message: str) -> None:
    with pytest.raises(CkptoolError, match=message):
        read_adapter(node, "x.safetensors", config)
