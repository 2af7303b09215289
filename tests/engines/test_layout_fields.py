"""One field of a configuration changed at a time: where the same weights give other outputs, the layout refuses the
field, or names it in its notes or variables. The libraries' own models say what a field changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError
from ckptool.names.layout import read_layout, shipped
from tests.engines.layout_cases import randomised

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

TOKENS = torch.arange(24).reshape(2, 12) % 32
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
LLAMA = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES: dict[str, tuple[str, str, dict[str, Any], Callable[[Any], torch.Tensor]]] = {
    "gpt2-nanogpt": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "activation_function": "gelu"},
        lambda model: model(TOKENS).logits,
    ),
    "llama-meta": ("LlamaForCausalLM", "LlamaConfig", LLAMA, lambda model: model(TOKENS).logits),
    "llama-megatron": (
        "MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": None}, lambda model: model(TOKENS).logits
    ),
    "llama-megatron-stacked": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA, lambda model: model(TOKENS).logits),
    "resnet-torchvision": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic", "num_labels": 3},
        lambda model: model(IMAGES).logits,
    ),
    "vit-timm": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
         "patch_size": 8, "layer_norm_eps": 1e-6, "num_labels": 3},
        lambda model: model(IMAGES).logits,
    ),
    "clip-openclip": (
        "CLIPModel", "CLIPConfig",
        {"projection_dim": 16, "vision_config": TOWER | {"image_size": 32, "patch_size": 8},
         "text_config": TOWER | {"vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 31}},
        lambda model: model(TOKENS[:, :12], IMAGES).logits_per_image,
    ),
    "unet-ldm": (
        "UNet2DConditionModel", "",
        {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 16, "attention_head_dim": 8,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "norm_num_groups": 8},
        lambda model: model(torch.linspace(-1, 1, 4 * 64).reshape(1, 4, 8, 8), 3, torch.ones(1, 4, 16) / 3).sample,
    ),
    "vae-ldm": (
        "AutoencoderKL", "",
        {"block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2, "norm_num_groups": 8,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "layers_per_block": 1},
        lambda model: model.decode(model.encode(IMAGES).latent_dist.mode()).sample,
    ),
}  # fmt: skip
# Not here: `bert-gamma`, `mixtral-stacked` and `qwen-moe-stacked`, whose two sides are one model with one
# configuration.
# What only says how a model is trained, or what is returned; and what the other side takes from its own configuration,
# which holds the same numbers (the rules read none of them).
OTHER_SIDES = {
    "rms_norm_eps", "rope_theta", "num_attention_heads", "num_key_value_heads", "head_dim", "n_head", "rope_parameters",
    "rope_scaling", "attention_head_dim", "tie_word_embeddings", "is_causal",
}  # fmt: skip


def changed(name: str, value: Any) -> Iterator[Any]:
    if "act" in name and isinstance(value, str):
        yield from ("relu", "gelu_new" if value != "gelu_new" else "gelu")
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, float):
        yield value * 3 + 0.01
    elif isinstance(value, int):
        yield from (value + 1, 2 * value)
    elif value is None:
        yield from (4, True)
    elif isinstance(value, str):
        yield "none"


def fields_of(config: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every field of a configuration and of those in it, with the way to it."""
    for name, value in (config if isinstance(config, dict) else config.to_dict()).items():
        if name in ("text_config", "vision_config") and isinstance(value, dict):
            yield from fields_of(value, (*before, name))
        else:
            yield (*before, name), value


def with_field(base: Any, place: tuple[str, ...], value: Any) -> Any:
    config = copy.deepcopy(base)
    if isinstance(base, dict):
        return config | {place[0]: value}
    node = config
    for name in place[:-1]:
        node = getattr(node, name)
    setattr(node, place[-1], value)
    return config


def outputs(case: str, config: Any, weights: Any = None) -> tuple[torch.Tensor, Any]:
    kind, configuration, _, run = CASES[case]
    if configuration:
        model = randomised(getattr(transformers, kind)._from_config(config, attn_implementation="eager"))
    else:
        model = randomised(getattr(diffusers, kind).from_config(config))
    if weights is not None:
        model.load_state_dict(weights, strict=True)
    with torch.no_grad():
        return run(model.eval()), model


@pytest.mark.parametrize("case", CASES)
def test_what_changes_outputs_is_refused_or_named(case: str, tmp_path: Path) -> None:
    _, kind, given, _ = CASES[case]
    if kind:
        base = getattr(transformers, kind)(**given)
    else:  # without the list of fields that are left at their defaults, which would be taken from the class again
        fields = getattr(diffusers, CASES[case][0])(**given).config
        base = {name: value for name, value in fields.items() if not name.startswith("_")}
    expected, model = outputs(case, copy.deepcopy(base))
    weights, layout = model.state_dict(), read_layout(shipped()[case])
    named = " ".join(layout.notes) + str(layout.translation)
    tried, silent = 0, []
    for place, value in fields_of(base):
        name = place[-1]
        for other in changed(name, value):
            try:
                config = with_field(base, place, other)
                found, broken = outputs(case, config, weights)
            except Exception:  # noqa: BLE001 (a value that the library refuses, or other shapes)
                continue
            if found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5):
                continue
            if broken.state_dict().keys() != weights.keys():
                continue  # its names tell
            tried += 1
            folder = tmp_path / f"{'.'.join(place)}-{other}"
            broken.save_pretrained(folder)
            try:
                ckptool.translate(folder, out=tmp_path / "o.pt", rules_file=case, reverse=True, overwrite=True)
            except CkptoolError:
                continue
            if name not in OTHER_SIDES and name not in named:
                silent.append((name, other))
    assert tried and not silent, (tried, silent)
