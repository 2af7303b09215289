"""`lora merge` against the libraries that make adapters (`make engines`): PEFT's `merge_and_unload`, to the same bits
or at most four times as far from the f64 result; LyCORIS and diffusers by what models compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptool
from fixtures.surgery.make_lora import BF16, CASES, F16, F32, F64, LYCORIS, Net, Tensors, trained, with_lycoris

pytestmark = pytest.mark.engines
PAIRS = [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16), (F16, F16), (F16, F32), (F64, F32)]


def merged_by_us(folder: Path, base: Tensors) -> Tensors:
    torch.save(base, folder / "base.pt")  # in the order of the layers
    ckptool.lora_merge(folder / "base.pt", folder, folder / "out.safetensors", overwrite=True)
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " and ".join(str(each)[6:] for each in pair))
@pytest.mark.parametrize(("layers", "way"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_values_are_those_of_peft(layers: str, way: str, pair: tuple[Any, Any], tmp_path: Path) -> None:
    wrapped, base = trained(layers, way, *pair)
    wrapped.save_pretrained(tmp_path)
    ours = merged_by_us(tmp_path, base)
    # Elsewhere (on some processors, and for experts in bf16, whose products are added in pairs) it is as near as PEFT.
    wide, _ = trained(layers, way, *pair)
    exact = wide.double().merge_and_unload().state_dict()
    theirs = wrapped.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys() and any(not torch.equal(ours[key], base[key]) for key in base)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype, key
        if not torch.equal(ours[key], value):
            assert error(ours[key], exact[key]) <= 4 * error(value, exact[key]), key


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig"])
@pytest.mark.filterwarnings("ignore")
def test_products_of_peft(kind: str, tmp_path: Path) -> None:
    import peft

    torch.manual_seed(0)
    net = Net()
    base = {key: value.clone() for key, value in net.state_dict().items()}
    config = getattr(peft, kind)(r=2, alpha=3, target_modules=["conv", "point", "fc_in"], use_effective_conv2d=True)
    wrapped = peft.get_peft_model(net, config)
    for parameter in wrapped.parameters():
        parameter.data = torch.randn_like(parameter) if parameter.requires_grad else parameter.data
    wrapped.save_pretrained(tmp_path)
    ours, theirs = merged_by_us(tmp_path, base), wrapped.merge_and_unload().state_dict()
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-6) for key in ours)
    assert not torch.equal(ours["conv.weight"], base["conv.weight"])


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max())


@pytest.mark.filterwarnings("ignore")
def test_a_bf16_adapter_of_gpt2_as_peft_loads_it_and_as_it_was_saved(tmp_path: Path) -> None:
    """PEFT loads it as f32 unless told not to: the values of the adapter cast to f32."""
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).bfloat16().save_pretrained(tmp_path / "base")

    def base() -> Any:
        return transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base", dtype=BF16)

    targets = ["c_attn", "c_proj", "c_fc"]
    adapter = peft.get_peft_model(base(), peft.LoraConfig(target_modules=targets), autocast_adapter_dtype=False)
    for name, parameter in adapter.named_parameters():
        parameter.data = torch.randn_like(parameter) / 4 if "lora_" in name else parameter.data
    adapter.save_pretrained(tmp_path / "bf16")
    ckptool.cast(tmp_path / "bf16" / "adapter_model.safetensors", tmp_path / "f32.safetensors", dtype="f32")
    config = tmp_path / "bf16" / "adapter_config.json"
    for file, options in ((tmp_path / "bf16", {"autocast_adapter_dtype": False}), (tmp_path / "f32.safetensors", {})):
        loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "bf16", **options)
        theirs = loaded.merge_and_unload().state_dict()
        ckptool.lora_merge(tmp_path / "base", file, tmp_path / "out.safetensors", config=config, overwrite=True)
        ours = load_file(tmp_path / "out.safetensors")
        assert all(torch.allclose(ours[key], theirs[key], rtol=2**-7, atol=2**-14) for key in ours), options


@pytest.mark.parametrize("algorithm", LYCORIS)
@pytest.mark.filterwarnings("ignore")
def test_what_lycoris_computes(algorithm: str, tmp_path: Path) -> None:
    base, adapter, x, expected = with_lycoris(algorithm)
    save_file(adapter, tmp_path / "a.safetensors")
    save_file(base, tmp_path / "base.safetensors")
    ckptool.lora_merge(tmp_path / "base.safetensors", tmp_path / "a.safetensors", tmp_path / "out.safetensors")
    merged = reloaded(load_file(tmp_path / "out.safetensors"))
    assert (merged(x) - expected).abs().max() < 1e-5 and (merged(x) - reloaded(base)(x)).abs().max() > 1e-2


def reloaded(base: Tensors) -> nn.Module:
    net = Net()
    net.load_state_dict(base)
    return net.double().eval()


@pytest.mark.parametrize("alpha", [4, 9])
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_diffusers_is_fused_as_it_does(alpha: int, tmp_path: Path) -> None:
    import peft
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.utils import convert_state_dict_to_diffusers

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=4,
        attention_head_dim=4,
    )
    unet.save_pretrained(tmp_path / "unet")
    targets = ["to_q", "to_out.0", "conv1", "proj_in"]
    unet.add_adapter(peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=targets))
    for name, parameter in unet.named_parameters():
        parameter.data = torch.randn_like(parameter) / 4 if "lora_" in name else parameter.data
    layers = convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(unet))
    metadata = {"unet_lora_adapter_metadata": unet.peft_config["default"].to_dict()} if alpha != 4 else {}
    StableDiffusionPipeline.save_lora_weights(tmp_path / "lora", unet_lora_layers=layers, **metadata)
    ckptool.lora_merge(
        tmp_path / "unet", tmp_path / "lora" / "pytorch_lora_weights.safetensors", tmp_path / "out.safetensors"
    )
    unet.fuse_lora()
    theirs = {key.replace(".base_layer", ""): v for key, v in unet.state_dict().items() if "lora_" not in key}
    ours = load_file(tmp_path / "out.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-6, atol=1e-6) for key in ours)  # another order of sums
