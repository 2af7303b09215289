"""`lora extract`, `resize`, `convert` against PEFT and diffusers (`make engines`): they load what was written with no
missing or unexpected key, and the models give the same outputs."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptool

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]


def llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4)).eval()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.conv2 = nn.Conv2d(8, 6, 1)
        self.square = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(self.depthwise(self.bn(self.conv1(x)))).mean((2, 3))
        return self.square(x)


def changed(model: Any, skip: str = "-") -> Any:
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if skip not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return tuned


def loaded(model: Any, folder: Path) -> Any:
    """The model with an adapter that PEFT loads without a warning on its keys."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected|Unexpected keyword|tied|tying).*")
        adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(folder))
    again = load_file(folder / "adapter_model.safetensors")
    from peft import get_peft_model_state_dict

    kept = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    assert again.keys() <= kept.keys() | adapted.state_dict().keys(), sorted(again.keys() - kept.keys())
    assert not [name for name in kept if "lora_" in name and name not in again]
    return adapted.eval()


def largest(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


MODELS = {
    "llama": (lambda: llama(False), torch.arange(10)[None]),
    "tied llama": (lambda: llama(True), torch.arange(10)[None]),
    "gpt2": (gpt2, torch.arange(10)[None]),
    "convolutions": (lambda: Convolutions().eval(), torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)),
}


def output(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(x)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["everything", "matrices"])
def test_a_full_rank_gives_the_tuned_model(name: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, x = MODELS[name]
    base = make()
    tuned = changed(base)
    if way == "matrices":
        matrices = {k for k, v in base.state_dict().items() if v.ndim > 1 and "depthwise" not in k}
        keep = {
            k: v for k, v in base.state_dict().items() if k not in matrices or "embed" in k or "wte" in k or "wpe" in k
        }
        tuned.load_state_dict(keep, strict=False)
    save(base, tmp_path / "base"), save(tuned, tmp_path / "tuned")
    report = ckptool.lora_extract(
        tmp_path / "tuned", tmp_path / "base", tmp_path / "adapter", rank=32 if x.ndim == 2 else 8
    )
    adapted = loaded(base, tmp_path / "adapter")
    assert largest(output(adapted, x), output(tuned, x)) <= 1e-5, report
    merged = adapted.merge_and_unload()
    assert largest(output(merged, x), output(tuned, x)) <= 1e-5
    ckptool.lora_merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged.safetensors")
    ours = load_file(tmp_path / "merged.safetensors")
    theirs = {k: v for k, v in merged.state_dict().items() if k in ours}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[k], v) or largest(theirs[k].float(), v.float()) <= 1e-6 for k, v in ours.items())


def save(model: Any, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        folder.mkdir()
        save_file(model.state_dict(), folder / "model.safetensors")


def test_energy_and_clamped_ranks_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = llama(False)
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(tuned.named_parameters()):
            if "_proj.weight" in name:
                rank = 1 + number % 5
                parameter.add_(torch.randn(parameter.shape[0], rank) @ torch.randn(rank, parameter.shape[1]) * 0.02)
    save(base, tmp_path / "base"), save(tuned, tmp_path / "tuned")
    report = ckptool.lora_extract(tmp_path / "tuned", tmp_path / "base", tmp_path / "a", rank=16, energy=0.999999)
    assert set(report.facts["ranks"].values()) == {1, 2, 3, 4, 5}
    x = torch.arange(10)[None]
    assert largest(output(loaded(base, tmp_path / "a"), x), output(tuned, x)) <= 1e-4


def adapter(base: Any, folder: Path, **config: Any) -> Any:
    """An adapter of PEFT with random factors, saved; the model with it."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 8},
        {"r": 4, "lora_alpha": 7, "use_rslora": True},
        {"r": 4, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 3}},
        {"r": 4, "use_dora": True},
        {"r": 4, "modules_to_save": ["lm_head"], "bias": "lora_only"},
    ],
)
def test_resized_adapters_are_loaded(config: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = llama(False)
    adapter(base, tmp_path / "old", target_modules=["q_proj", "v_proj", "down_proj"], **config)
    report = ckptool.lora_resize(tmp_path / "old", tmp_path / "smaller", rank=2)
    loaded(base, tmp_path / "smaller")
    assert all(0 < error < 1 for error in report.facts["errors"].values())


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 8}
    return UNet2DConditionModel(**blocks, **sizes, attention_head_dim=4, sample_size=8).eval()


def noise(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x, text = (torch.randn(shape, generator=generator) for shape in ((1, 4, 8, 8), (1, 3, 8)))
    with torch.no_grad():
        return model(x, torch.tensor([3]), text).sample


TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "ff.net.0.proj"]


@pytest.mark.parametrize(
    "config", [{"lora_alpha": 4}, {"lora_alpha": 6}, {"lora_alpha": 6, "rank_pattern": {"to_k": 2}}]
)
def test_a_unets_adapter_through_all_schemes(config: dict[str, Any], tmp_path: Path) -> None:
    base = unet()
    adapted = adapter(base, tmp_path / "peft", r=4, target_modules=TARGETS, **config)
    expected = noise(adapted)
    ckptool.lora_convert(tmp_path / "peft", tmp_path / "d.safetensors", to="diffusers")
    ckptool.lora_convert(tmp_path / "peft", tmp_path / "k.safetensors", to="kohya")
    ckptool.lora_convert(tmp_path / "k.safetensors", tmp_path / "kd.safetensors", to="diffusers")
    ckptool.lora_convert(tmp_path / "k.safetensors", tmp_path / "kp", to="peft")
    ckptool.lora_convert(tmp_path / "kp", tmp_path / "kpk.safetensors", to="kohya")
    ckptool.lora_convert(tmp_path / "d.safetensors", tmp_path / "f.safetensors", to="diffusers", fold=True)
    for file in ("d.safetensors", "kd.safetensors", "f.safetensors"):
        assert largest(noise(by_diffusers(tmp_path / file)), expected) <= 1e-5, file
    assert largest(noise(loaded(base, tmp_path / "kp")), expected) <= 1e-6
    first, second = load_file(tmp_path / "k.safetensors"), load_file(tmp_path / "kpk.safetensors")
    assert list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)
    assert largest(noise(by_diffusers(tmp_path / "k.safetensors", kohya=True)), expected) <= 1e-5


def by_diffusers(file: Path, kohya: bool = False) -> Any:
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Mixin

    state, alphas, metadata = Mixin.lora_state_dict(str(file), return_lora_metadata=True)
    assert bool(alphas) == kohya
    model = unet()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Mixin.load_lora_into_unet(state, network_alphas=alphas, unet=model, metadata=metadata)
    return model.eval()


def test_diffusers_own_conversions_give_the_same_keys(tmp_path: Path) -> None:
    from diffusers.utils import convert_state_dict_to_kohya

    from ckptool.conventions.adapter_keys import split_words

    base = unet()
    adapter(base, tmp_path / "peft", r=4, lora_alpha=4, target_modules=TARGETS)
    ckptool.lora_convert(tmp_path / "peft", tmp_path / "k.safetensors", to="kohya")
    peft = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    theirs = convert_state_dict_to_kohya({k.replace("base_model.model.", "unet."): v for k, v in peft.items()})
    ours = load_file(tmp_path / "k.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[k].to(v.dtype), v) for k, v in ours.items())
    names = [name for name, module in base.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    assert [split_words(name.replace(".", "_")) for name in names] == names


def test_names_of_clip_are_told_apart() -> None:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    from ckptool.conventions.adapter_keys import split_words

    sizes = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = CLIPTextModelWithProjection(CLIPTextConfig(**sizes))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert names and [split_words(name.replace(".", "_")) for name in names] == names


def test_the_configuration_is_one_that_peft_writes(tmp_path: Path) -> None:
    """Every field of ours is one of `LoraConfig`."""
    from peft import LoraConfig

    torch.manual_seed(0)
    base = llama(False)
    save(base, tmp_path / "base"), save(changed(base), tmp_path / "tuned")
    ckptool.lora_extract(tmp_path / "tuned", tmp_path / "base", tmp_path / "adapter", rank=4)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config.keys() <= LoraConfig().to_dict().keys()
