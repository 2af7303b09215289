"""The layouts that ship, between the real libraries (`make engines`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.engines.layout_cases import Side, close, pretrained_side, prove, randomised, torch_side
from tests.support.layouts import GPT, configure_optimizers

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


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps of the optimizer with gradients that the parameters themselves give, the same under any names."""
    for step in range(steps):
        optimizer.zero_grad()
        logits = model(TOKENS)
        logits = getattr(logits, "logits", logits)
        (logits.log_softmax(-1)[..., step].mean() + logits.square().mean()).backward()
        optimizer.step()


def trained_nanogpt(path: Path, bias: bool = True) -> tuple[GPT, torch.optim.Optimizer]:
    """A run's `ckpt.pt`, as nanoGPT's train.py writes it, and what is in it."""
    model = randomised(GPT(**ARGS, bias=bias)).train()
    optimizer = configure_optimizers(model)
    trained(model, optimizer, 3)
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": {**ARGS, "bias": bias, "dropout": 0.0},
        "iter_num": 3,
        "best_val_loss": torch.tensor(1.5),
        "config": {"learning_rate": 0.01},
    }
    torch.save(checkpoint, path)
    return model, optimizer


@pytest.mark.parametrize("bias", [True, False])
def test_the_next_step_of_nanogpt_and_transformers_is_the_same(bias: bool, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    model, optimizer = trained_nanogpt(tmp_path / "ckpt.pt", bias)
    ckptool.translate(tmp_path / "ckpt.pt", out=tmp_path / "hf.pt", rules_file="gpt2-nanogpt")
    found = torch.load(tmp_path / "hf.pt", weights_only=True)
    assert found["iter_num"] == 3 and found["model_args"]["bias"] == bias
    other = GPT2LMHeadModel(gpt2_config()).train()
    for module in other.modules():
        module.p = 0.0 if isinstance(module, torch.nn.Dropout) else getattr(module, "p", None)
    other.load_state_dict({**found["model"], "lm_head.weight": found["model"]["transformer.wte.weight"]})
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(bias or not name.endswith(".bias"))  # nanoGPT has none then
    theirs = configure_optimizers(other)
    theirs.load_state_dict(found["optimizer"])
    close([model(TOKENS)], [other(TOKENS).logits])
    trained(model, optimizer, 2), trained(other, theirs, 2)
    close([model(TOKENS)], [other(TOKENS).logits])

    # The way back: what transformers went on with.
    state = {name: value for name, value in other.state_dict().items() if name != "lm_head.weight"}
    torch.save({**found, "model": state, "optimizer": theirs.state_dict()}, tmp_path / "hf2.pt")
    ckptool.translate(tmp_path / "hf2.pt", out=tmp_path / "back.pt", rules_file="gpt2-nanogpt", reverse=True)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    again = GPT(**ARGS, bias=bias)
    again.load_state_dict(back["model"])
    assert back["model"]["lm_head.weight"].data_ptr() == back["model"]["transformer.wte.weight"].data_ptr()
    resumed = configure_optimizers(again)
    resumed.load_state_dict(back["optimizer"])
    trained(other, theirs, 2), trained(again, resumed, 2)
    close([other(TOKENS).logits], [again(TOKENS)])


def test_a_file_of_the_hub(tmp_path: Path) -> None:
    """The names of `gpt2` on the Hub begin without `transformer.`, and its masks are in the file."""
    from safetensors.torch import load_file, save_file

    hf_gpt2().write(tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in state.items()}
    masks = {f"h.{n}.attn.bias": torch.ones(8, 8).tril().view(1, 1, 8, 8) for n in range(2)}
    save_file({**bare, **masks}, tmp_path / "hub.safetensors")
    ckptool.translate(tmp_path / "hub.safetensors", out=tmp_path / "old.pt", rules_file="gpt2-nanogpt")
    close(hf_gpt2().run(tmp_path / "model.safetensors"), nanogpt().run(tmp_path / "old.pt"))
