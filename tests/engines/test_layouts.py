"""The layouts that ship, between the real libraries (`make engines`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Conflict
from tests.engines.layout_cases import Side, close, pretrained_side, prove, torch_side
from tests.support.nanogpt import GPT

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


def test_vit_without_a_head(tmp_path: Path) -> None:
    """The names of `ViTModel` begin without `vit.`; the way back gives those with it, which loads as well."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, layer_norm_eps=1e-6)

    def features(model: Any) -> list[torch.Tensor]:
        return [model(IMAGE).last_hidden_state[:, 0]]

    new = pretrained_side(ViTModel, config, features, add_pooling_layer=False)
    prove("vit-timm", timm_vit(classes=0), new, tmp_path, base="vit.")


# ResNet --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "depths"), [("resnet18", "basic", (2, 2, 2, 2)), ("resnet50", "bottleneck", (3, 4, 6, 3))]
)
def test_resnet(name: str, kind: str, depths: tuple[int, ...], tmp_path: Path) -> None:
    import torchvision
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    config = ResNetConfig(
        depths=list(depths), hidden_sizes=widths, layer_type=kind, num_labels=5, downsample_in_bottleneck=False
    )
    old = torch_side(lambda: getattr(torchvision.models, name)(num_classes=5), lambda model: [model(IMAGE)])
    new = pretrained_side(ResNetForImageClassification, config, lambda model: [model(pixel_values=IMAGE).logits])
    prove("resnet-torchvision", old, new, tmp_path)


@pytest.mark.parametrize(("name", "why"), [("resnext50_32x4d", "ResNeXt"), ("wide_resnet50_2", "Wide ResNet")])
def test_resnets_that_transformers_does_not_have_are_refused(name: str, why: str, tmp_path: Path) -> None:
    import torchvision

    torch.save(getattr(torchvision.models, name)(num_classes=5).state_dict(), tmp_path / "m.pt")
    with pytest.raises(Conflict, match=why):
        ckptool.translate(tmp_path / "m.pt", out=tmp_path / "out.pt", rules_file="resnet-torchvision")
    assert not (tmp_path / "out.pt").exists()


# CLIP ----------------------------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[1, 5, 7, 9, 2, 0, 0, 0], [1, 8, 3, 4, 6, 5, 7, 9]])  # the largest is the end of the text


def open_clip(**more: Any) -> Side:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    def make() -> Any:
        vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=16, mlp_ratio=3.0)
        text = CLIPTextCfg(context_length=8, vocab_size=10, width=24, heads=3, layers=1)
        return CLIP(embed_dim=20, vision_cfg=vision, text_cfg=text, **more)

    def forward(model: Any) -> list[torch.Tensor]:
        image, text = model.encode_image(IMAGE[..., :16, :16]), model.encode_text(TOKENS)
        return [image, text, model.logit_scale[None]]

    return torch_side(make, forward)


def hf_clip(act: str = "gelu") -> Side:
    from transformers import CLIPConfig, CLIPModel

    common = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_act": act}
    vision = {**common, "hidden_size": 32, "intermediate_size": 96, "image_size": 16, "patch_size": 8}
    text = {
        **common, "hidden_size": 24, "intermediate_size": 96, "vocab_size": 10, "max_position_embeddings": 8,
        "num_hidden_layers": 1, "num_attention_heads": 3, "eos_token_id": 2,
    }  # fmt: skip
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=20)

    def forward(model: Any) -> list[torch.Tensor]:
        found = (model.get_image_features(pixel_values=IMAGE[..., :16, :16]), model.get_text_features(TOKENS))
        return [*(getattr(each, "pooler_output", each) for each in found), model.logit_scale[None]]

    return pretrained_side(CLIPModel, config, forward)


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_clip(act: str, tmp_path: Path) -> None:
    prove("clip-openclip", open_clip(quick_gelu=act == "quick_gelu"), hf_clip(act), tmp_path)


# BERT ----------------------------------------------------------------------------------------------------------------


def test_bert(tmp_path: Path) -> None:
    """transformers loads both, so each file is loaded by it; the old names are made of its own file, one by one."""
    from safetensors.torch import load_file, save_file
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(**sizes, vocab_size=11, max_position_embeddings=8)
    new = pretrained_side(BertForMaskedLM, config, lambda model: [model(TOKENS).logits])

    def write(path: Path) -> None:
        new.write(path)
        names = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
        state = load_file(path)
        for name in list(state):
            for ending, old in names.items():
                if name.endswith(ending):
                    state[name.removesuffix(ending) + old] = state.pop(name)
        save_file(state, path, {"format": "pt"})

    prove("bert-gamma", replace(new, write=write), new, tmp_path)


# GPT-2 ---------------------------------------------------------------------------------------------------------------

ARGS = {"block_size": 8, "vocab_size": 10, "n_layer": 2, "n_head": 4, "n_embd": 16}


def gpt2_config() -> Any:
    from transformers import GPT2Config

    names = {"n_positions": "block_size"}
    sizes = {name: ARGS[names.get(name, name)] for name in ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")}
    return GPT2Config(**sizes, activation_function="gelu", bos_token_id=1, eos_token_id=2)


def hf_gpt2() -> Side:
    from transformers import GPT2LMHeadModel

    return pretrained_side(GPT2LMHeadModel, gpt2_config(), lambda model: [model(TOKENS).logits])


def nanogpt(**more: Any) -> Side:
    return torch_side(lambda: GPT(**ARGS, bias=True, **more), lambda model: [model(TOKENS)])


def test_gpt2(tmp_path: Path) -> None:
    prove("gpt2-nanogpt", nanogpt(), hf_gpt2(), tmp_path)


def test_the_masks_of_attention_are_left_out(tmp_path: Path) -> None:
    nanogpt(mask=True).write(tmp_path / "old.pt")
    (tmp_path / "hf").mkdir()
    ckptool.translate(tmp_path / "old.pt", out=tmp_path / "hf/model.safetensors", rules_file="gpt2-nanogpt")
    hf_gpt2().prepare(tmp_path / "hf/model.safetensors")
    state = {key: value for key, value in ckptool.load(tmp_path / "old.pt").items() if not key.endswith(".attn.bias")}
    torch.save(state, tmp_path / "without.pt")
    close(nanogpt().run(tmp_path / "without.pt"), hf_gpt2().run(tmp_path / "hf/model.safetensors"))
