"""`lora extract`, `resize`, `convert` against PEFT and diffusers (`make engines`): they load what was written with no
missing or unexpected key, and the models give the same outputs. Models of transformers are in `test_lora_names`."""

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
from ckptool.conventions.adapter_keys import split_words

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.conv2 = nn.Conv2d(8, 6, 1)
        self.square = nn.Linear(6, 6, bias=False)
        self.q_proj = nn.Linear(6, 6)
        self.v_proj = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(self.depthwise(self.bn(self.conv1(x)))).mean((2, 3))
        x = self.square(x)
        out: torch.Tensor = self.head(self.v_proj(self.q_proj(x)))
        return out


X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(X)
    return found


def largest(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def loaded(model: Any, folder: Path) -> Any:
    """The model with an adapter that PEFT loads without a warning on its keys, and whose fields are all PEFT's."""
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected|Unexpected keyword|tied|tying).*")
        adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(folder))
    again = load_file(folder / "adapter_model.safetensors")
    kept = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    assert again.keys() <= kept.keys() | adapted.state_dict().keys(), sorted(again.keys() - kept.keys())
    assert not [name for name in kept if "lora_" in name and name not in again]
    assert json.loads((folder / "adapter_config.json").read_text()).keys() <= LoraConfig().to_dict().keys()
    return adapted.eval()


@pytest.mark.parametrize(("chosen", "rank"), [("", 8), ("q_proj v_proj", 2)])
def test_a_full_rank_gives_the_tuned_model(chosen: str, rank: int, tmp_path: Path) -> None:
    """Of everything; and of matrices of a low rank."""
    base, tuned = net(), net()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if not chosen:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            elif name.removesuffix(".weight") in chosen.split():
                own = 1 + ("q" in name[:1])
                parameter.add_(torch.randn(6, own) @ torch.randn(own, 6) * 0.05)
    files = [tmp_path / "tuned.safetensors", tmp_path / "base.safetensors"]
    for model, file in zip((tuned, base), files, strict=True):
        save_file(model.state_dict(), file)
    report = ckptool.lora_extract(*files, tmp_path / "adapter", rank=rank)
    adapted = loaded(base, tmp_path / "adapter")
    assert largest(output(adapted), output(tuned)) <= 1e-5, report
    merged = adapted.merge_and_unload()
    ckptool.lora_merge(files[1], tmp_path / "adapter", tmp_path / "merged.safetensors")
    ours, theirs = load_file(tmp_path / "merged.safetensors"), merged.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[k], v) or largest(theirs[k].float(), v.float()) <= 1e-6 for k, v in ours.items())


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
        {"lora_alpha": 8},
        {"lora_alpha": 7, "use_rslora": True},
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 3}},
        {"use_dora": True},
        {"modules_to_save": ["head"], "bias": "lora_only"},
    ],
)
def test_resized_adapters_are_loaded(config: dict[str, Any], tmp_path: Path) -> None:
    adapter(net(), tmp_path / "old", r=4, target_modules=["q_proj", "v_proj", "conv1"], **config)
    report = ckptool.lora_resize(tmp_path / "old", tmp_path / "smaller", rank=2)
    loaded(net(), tmp_path / "smaller")
    assert all(0 < error < 1 for error in report.facts["errors"].values())


# diffusers -----------------------------------------------------------------------------------------------------------

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "ff.net.0.proj"]


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes: Any = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 8}
    blocks: Any = {"down_block_types": down, "up_block_types": up}
    return UNet2DConditionModel(**blocks, **sizes, attention_head_dim=4, sample_size=8).eval()


def noise(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x, text = (torch.randn(shape, generator=generator) for shape in ((1, 4, 8, 8), (1, 3, 8)))
    with torch.no_grad():
        found: torch.Tensor = model(x, torch.tensor([3]), text).sample
    return found


def by_diffusers(file: Path, kohya: bool = False) -> Any:
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Mixin

    state, alphas, metadata = Mixin.lora_state_dict(str(file), return_lora_metadata=True)
    assert bool(alphas) == kohya
    model = unet()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Mixin.load_lora_into_unet(state, network_alphas=alphas, unet=model, metadata=metadata)
    return model.eval()


@pytest.mark.parametrize("config", [{"lora_alpha": 4}, {"lora_alpha": 6, "rank_pattern": {"to_k": 2}}])
def test_a_unets_adapter_through_all_schemes(config: dict[str, Any], tmp_path: Path) -> None:
    from diffusers.utils import convert_state_dict_to_kohya

    base = unet()
    expected = noise(adapter(base, tmp_path / "peft", r=4, target_modules=TARGETS, **config))
    for old, new, scheme in (
        ("peft", "d.safetensors", "diffusers"),
        ("peft", "k.safetensors", "kohya"),
        ("k.safetensors", "kd.safetensors", "diffusers"),
        ("k.safetensors", "kp", "peft"),
        ("kp", "kpk.safetensors", "kohya"),
    ):
        ckptool.lora_convert(tmp_path / old, tmp_path / new, to=scheme)
    for file in ("d.safetensors", "kd.safetensors"):
        assert largest(noise(by_diffusers(tmp_path / file)), expected) <= 1e-5, file
    assert largest(noise(loaded(base, tmp_path / "kp")), expected) <= 1e-6
    assert largest(noise(by_diffusers(tmp_path / "k.safetensors", kohya=True)), expected) <= 1e-5
    first, second = load_file(tmp_path / "k.safetensors"), load_file(tmp_path / "kpk.safetensors")
    assert list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)
    if config == {"lora_alpha": 4}:
        peft = load_file(tmp_path / "peft" / "adapter_model.safetensors")
        theirs = convert_state_dict_to_kohya({k.replace("base_model.model.", "unet."): v for k, v in peft.items()})
        assert theirs.keys() == first.keys()
        assert all(torch.equal(theirs[k].to(v.dtype), v) for k, v in first.items())


def test_names_of_unets_and_of_clip_are_told_apart() -> None:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    sizes: Any = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    for model in (unet(), CLIPTextModelWithProjection(CLIPTextConfig(**sizes, num_hidden_layers=1))):
        names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        assert names and [split_words(name.replace(".", "_")) for name in names] == names
