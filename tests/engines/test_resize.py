"""Resized embeddings against those of timm and transformers (`make engines`), loaded by the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.support.files import load, saved

pytestmark = pytest.mark.engines


def resized(old: dict[str, Any], new: dict[str, Any], tmp_path: Path, *ways: str) -> dict[str, Any]:
    """The state dict `old` in the shapes of `new`."""
    file, target = saved(old, tmp_path / "old.pt"), saved(new, tmp_path / "new.pt")
    report = ckptool.warm_start(file, target, tmp_path / "out.pt", resize=ways, overwrite=True)
    assert report.accepted and report.share == 1, report
    return load(tmp_path / "out.pt")


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


@pytest.mark.parametrize(("old", "new"), [(112, 192), (128, 296), (112, 56)])  # 14 → 24, 16 → 37, 14 → 7
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_timms_position_embeddings(old: int, new: int, dtype: torch.dtype, tmp_path: Path) -> None:
    import timm
    from timm.layers import resample_abs_pos_embed

    torch.manual_seed(0)
    sizes = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
    one, other = (timm.models.VisionTransformer(img_size=size, **sizes).eval() for size in (old, new))
    torch.nn.init.normal_(one.pos_embed)
    one.to(dtype), other.to(dtype)
    state = resized(one.state_dict(), other.state_dict(), tmp_path, "pos_embed=bicubic(cls=1, antialias)")
    wanted = resample_abs_pos_embed(one.pos_embed.detach().float(), [new // 8] * 2, num_prefix_tokens=1)
    assert largest(state["pos_embed"].float() - wanted.to(dtype).float()) <= largest(wanted) * (
        2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    )
    other.load_state_dict(state)
    if dtype == torch.float32:
        dynamic = timm.models.VisionTransformer(img_size=old, dynamic_img_size=True, **sizes).eval()
        dynamic.load_state_dict(one.state_dict())
        image = torch.randn(2, 3, new, new)
        with torch.no_grad():
            assert torch.allclose(other(image), dynamic(image), atol=1e-5)


def test_transformers_position_embeddings(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    one, other = (
        transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=size, patch_size=8)).eval()
        for size in (112, 192)
    )
    torch.nn.init.normal_(one.embeddings.position_embeddings)
    state = resized(one.state_dict(), other.state_dict(), tmp_path, "embeddings.position_embeddings=bicubic(cls=1)")
    other.load_state_dict(state)
    image = torch.randn(2, 3, 192, 192)
    with torch.no_grad():
        wanted = one(image, interpolate_pos_encoding=True).last_hidden_state
        assert torch.allclose(other(image).last_hidden_state, wanted, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_vocabularies(tied: bool, tmp_path: Path) -> None:
    """transformers draws new rows around the mean, with 1e-9 of the covariance: ours is that mean."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, vocab_size=31, tie_word_embeddings=tied)
    model, plain = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    old = {key: value.clone() for key, value in model.state_dict().items()}
    old = old | ({"lm_head.weight": old["model.embed_tokens.weight"]} if tied else {})
    model.resize_token_embeddings(37, mean_resizing=True)
    ways = ["*embed_tokens.*=rows(mean)"] + ["lm_head.*=rows(mean)"] * (not tied)
    state = resized(old, model.state_dict(), tmp_path, *ways)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.allclose(state[key], model.state_dict()[key], atol=1e-4)
        assert torch.equal(state[key][31:], old[key].double().mean(0).float().expand(6, 8))
    model.load_state_dict(state)
    words = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.allclose(model(words).logits[..., :31], plain(words).logits, atol=1e-6)
    plain.resize_token_embeddings(23)
    fewer = resized(old, plain.state_dict(), tmp_path, *ways)
    assert all(torch.equal(fewer[key], value) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("channels", [1, 4, 6])
def test_timms_input_channels(channels: int, tmp_path: Path) -> None:
    from timm.models._manipulate import adapt_input_conv

    torch.manual_seed(0)
    weight = torch.randn(8, 3, 7, 7)
    state = resized({"conv.weight": weight}, {"conv.weight": torch.zeros(8, channels, 7, 7)}, tmp_path, "*=channels")
    assert torch.allclose(state["conv.weight"], adapt_input_conv(channels, weight.clone()), atol=1e-6)


def test_tables_of_relative_positions(tmp_path: Path) -> None:
    from timm.layers import resize_rel_pos_bias_table_simple

    torch.manual_seed(0)
    for extra in (0, 3):
        table = torch.randn(13 * 13 + extra, 4)
        sizes = {"table": torch.zeros(23 * 23 + extra, 4)}
        state = resized({"table": table}, sizes, tmp_path, f"table=table(extra={extra})")
        wanted = resize_rel_pos_bias_table_simple(table, (12, 12), (23 * 23 + extra, 4))
        assert largest(state["table"] - wanted) <= 2e-6 * largest(wanted)
