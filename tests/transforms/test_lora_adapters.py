"""Adapters: their keys, taken apart, and their changes in one representation; low-rank products against numpy's SVD."""

import math
from itertools import product
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import InlineBytes, Storage, TensorEntry, row_major_strides
from ckptool.checkpoint.dtypes import by_name
from ckptool.conventions.adapter_keys import adapter_key
from ckptool.errors import CkptoolError
from ckptool.transforms.lora import low_rank
from ckptool.transforms.lora.adapters import read_adapter
from ckptool.transforms.lora.low_rank import Truncation, low_rank_change
from tests.support.looped import examples, looped, sliced

Array = numpy.ndarray[Any, Any]
F32 = by_name("f32")


def entry(values: Array) -> TensorEntry:
    data = values.astype(numpy.float32)
    return TensorEntry(Storage(InlineBytes(data.tobytes())), F32, data.shape, row_major_strides(data.shape))


def matrix(height: int, width: int, decay: float, seed: int = 0) -> Array:
    """A matrix whose singular values fall as a power."""
    rng = numpy.random.default_rng(seed)
    least = min(height, width)
    sides = [numpy.linalg.qr(rng.standard_normal((size, least)))[0] for size in (height, width)]
    return (sides[0] * numpy.arange(1.0, least + 1) ** -decay) @ sides[1].T


def error_of(values: Array, rank: int) -> float:
    """The error of an approximation as a multiple of the best one's."""
    base = numpy.random.default_rng(9).standard_normal(values.shape).astype(numpy.float32)
    tuned = (base + values).astype(numpy.float32)
    exact = (tuned - base).astype(numpy.float64)
    factors = low_rank_change("x", "", entry(tuned), entry(base), rank, F32).factors
    made = factors["B"].numpy().astype(numpy.float64) @ factors["A"].numpy()
    best = math.sqrt((numpy.linalg.svd(exact, compute_uv=False)[rank:] ** 2).sum())
    return float((numpy.linalg.norm(exact - made) - 1e-6 * numpy.linalg.norm(exact)) / max(best, 1e-30))


@settings(max_examples=examples(40))
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.floats(0, 3), st.integers(0, 99))
def test_a_small_difference_is_taken_apart_exactly(height: int, width: int, rank: int, decay: float, seed: int) -> None:
    rank = min(rank, height, width)
    assert error_of(matrix(height, width, decay, seed), rank) <= 1 + 1e-4


@pytest.mark.parametrize(
    ("decay", "shape", "rank", "wide"), sliced(product([0.5, 1], [(200, 400), (400, 200)], [4, 32], [1 << 20, 0]), 6)
)
def test_a_large_one_within_two_percent_of_the_best(
    shape: tuple[int, int], rank: int, decay: float, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "EXACT", 100)
    monkeypatch.setattr(low_rank, "_WIDE", wide)
    assert error_of(matrix(*shape, decay), rank) <= 1.02


def test_the_same_matrix_gives_the_same_bytes_and_another_name_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "EXACT", 10)
    values = matrix(80, 70, 0.3)
    zero = entry(numpy.zeros_like(values))
    made = [low_rank_change(name, "", entry(values), zero, 5, F32).factors["A"].bytes() for name in ("a", "a", "b")]
    assert made[0] == made[1] != made[2]


@settings(max_examples=examples(40))
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_a_product_is_truncated_as_by_the_exact_svd(height: int, width: int, old: int, rank: int, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    b, a = rng.standard_normal((height, old)), rng.standard_normal((old, width))
    if seed % 3 == 0:
        b[:, 0] = 0  # a dead row
    rank = min(rank, old)
    truncation = Truncation("x", entry(b), entry(a), rank)
    factors = truncation.factors()
    made = factors["B"].numpy().astype(numpy.float64) @ factors["A"].numpy()
    values = numpy.linalg.svd(b.astype("f4").astype("f8") @ a.astype("f4"), compute_uv=False)
    best, norm = math.sqrt((values[rank:] ** 2).sum()), numpy.linalg.norm(values)
    assert numpy.linalg.norm(b.astype("f4").astype("f8") @ a.astype("f4") - made) <= best + 1e-5 * norm
    assert truncation.error == pytest.approx(best / norm if norm else 0, abs=1e-6)


# Keys ----------------------------------------------------------------------------------------------------------------

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def zeros(*shape: int, fill: float = 0.0) -> TensorEntry:
    return entry(numpy.full(shape, fill))


INTEGERS = TensorEntry(Storage(InlineBytes(bytes(64))), by_name("i64"), (4, 2), (2, 1))


def pair(module: str, rank: int = 2) -> dict[str, TensorEntry]:
    return {f"{module}.lora_A.weight": zeros(rank, 6), f"{module}.lora_B.weight": zeros(4, rank)}


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
        ({"base_model.model.q.lora_A.weight": zeros(2, 6)}, CONFIG, "has only"),
        (pair("base_model.model.q") | {"base_model.model.q.lora_A.bias": zeros(2)}, CONFIG, "has only"),
        (pair("base_model.model.q", 0), CONFIG, "rank 0"),
        (pair("base_model.model.q", 4), CONFIG, "has rank 4, and 2 by its configuration"),
        (pair("base_model.model.q"), CONFIG | {"lora_alpha": None}, "not a number"),
        (pair("base_model.model.q"), CONFIG | {"r": 10**400}, "not a number"),
        (pair("base_model.model.q"), CONFIG | {"lora_alpha": math.nan}, "is nan, not a number"),
        (pair("base_model.model.q"), CONFIG | {"layer_replication": [[0, 1]]}, "layer replication"),
        (pair("base_model.model.q"), CONFIG | {"use_bdlora": {"a": 1}}, "BD-LoRA"),
        (pair("base_model.model.q"), CONFIG | {"peft_type": ["VERA"]}, "VERA"),
        (pair("base_model.model.q"), CONFIG | {"alpha_pattern": {"(": 1}}, "is not a regular expression"),
        (pair("unet.q") | {"unet.q.alpha": zeros(fill=math.nan)}, None, "is nan, not a number"),
        (pair("unet.q") | pair("base_model.model.q"), None, "mixes the names"),
        ({"weight": zeros(2)}, None, "has no LoRA"),
        (pair("base_model.model.q") | {"base_model.model.q.lora_A.weight": zeros(2)}, CONFIG, "A is not a matrix"),
        (pair("base_model.model.q") | {"base_model.model.q.lora_B.weight": INTEGERS}, CONFIG, "B is not a matrix"),
    ],
)
def test_what_is_no_whole_adapter_is_named(node: Any, config: Any, message: str) -> None:
    with pytest.raises(CkptoolError, match=message):
        read_adapter(node, "x.safetensors", config)
