"""The layouts that ship, between the real libraries (`make engines`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.layout_cases import Side, pretrained_side, prove, torch_side

pytestmark = pytest.mark.engines

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def timm_vit(classes: int = 5, bias: bool = True, **more: Any) -> Side:
    from timm.models import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 3}
    return torch_side(
        lambda: VisionTransformer(**sizes, num_classes=classes, qkv_bias=bias, **more), lambda model: [model(IMAGE)]
    )


def hf_vit(bias: bool = True) -> Side:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = ViTConfig(
        **sizes, image_size=32, patch_size=8, layer_norm_eps=1e-6, num_labels=5, qkv_bias=bias, hidden_dropout_prob=0.0
    )
    return pretrained_side(ViTForImageClassification, config, lambda model: [model(pixel_values=IMAGE).logits])


@pytest.mark.parametrize("bias", [True, False])
def test_vit(bias: bool, tmp_path: Path) -> None:
    prove("vit-timm", timm_vit(bias=bias), hf_vit(bias), tmp_path)
