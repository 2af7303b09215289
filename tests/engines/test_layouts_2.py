"""Layouts of language models and of diffusers that ship, between the real libraries (`make engines`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import CkptoolError
from tests.engines.layout_cases import Side, close, pretrained_side, prove, randomised, same_weights, torch_side
from tests.support.layouts import META, MetaLlama, write_ranks

pytestmark = pytest.mark.engines

WORDS = torch.randint(0, META["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(2))


def logits(model: Any) -> list[torch.Tensor]:
    return [model(WORDS).logits]


# Meta's Llama --------------------------------------------------------------------------------------------------------


def hf_llama(kv_heads: int = 2, tied: bool = False, **more: Any) -> Side:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=META["vocab_size"], hidden_size=META["dim"], num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, intermediate_size=META["hidden"], rms_norm_eps=META["norm_eps"],
        rope_theta=META["rope_theta"], tie_word_embeddings=tied, **more,
    )  # fmt: skip
    return pretrained_side(LlamaForCausalLM, config, logits)


def meta_llama(kv_heads: int = 2, tied: bool = False) -> Side:
    side = torch_side(lambda: MetaLlama(kv_heads, tied), lambda model: [model(WORDS)], "meta/consolidated.00.pth")

    def prepare(path: Path) -> None:
        about = {"dim": META["dim"], "n_heads": 4, "n_layers": 2, "vocab_size": -1}
        about |= {} if kv_heads == 4 else {"n_kv_heads": kv_heads}
        (path.parent / "params.json").write_text(json.dumps(about))

    def write(path: Path) -> None:
        side.write(path)
        prepare(path)

    return Side(write, side.run, prepare, side.name)


@pytest.mark.parametrize(("kv_heads", "tied"), [(2, False), (4, False), (1, True)])
def test_llama(kv_heads: int, tied: bool, tmp_path: Path) -> None:
    prove("llama-meta", meta_llama(kv_heads, tied), hf_llama(kv_heads, tied), tmp_path)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("by_width", [True, False])  # of the embeddings: Llama 1 and 2, or 3
def test_ranks_of_llama(ranks: int, kv_heads: int, by_width: bool, tmp_path: Path) -> None:
    meta, hf = meta_llama(kv_heads), hf_llama(kv_heads)
    whole = tmp_path / "whole.pth"
    (tmp_path / "ranks").mkdir()
    meta.write(whole)
    write_ranks(torch.load(whole), tmp_path / "ranks", ranks, kv_heads, by_width)
    ckptool.translate(tmp_path / "ranks", out=f"{tmp_path}/hf/", rules_file="llama-meta")
    hf.prepare(tmp_path / "hf" / "model.safetensors")
    close(meta.run(whole), hf.run(tmp_path / "hf" / "model.safetensors"))
    ckptool.translate(f"{tmp_path}/hf", out=tmp_path / "consolidated.00.pth", rules_file="llama-meta", reverse=True)
    assert same_weights(whole, tmp_path / "consolidated.00.pth")


# Experts, apart and stacked ------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": META["vocab_size"], "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "num_experts_per_tok": 2,
}  # fmt: skip


def stacked(side: Side, kind: Any, config: Any) -> Side:
    """The same as transformers writes it when it is not told to keep to the original format."""

    def write(path: Path) -> None:
        randomised(kind(config)).save_pretrained(path.parent, save_original_format=False)

    return Side(write, side.run, side.prepare, side.name)


@pytest.mark.parametrize("experts", [3, 11])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
def test_experts(family: str, experts: int, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **SIZES, moe_intermediate_size=8, shared_expert_intermediate_size=12, num_experts=experts,
        num_local_experts=experts, mlp_only_layers=[0] if family.startswith("Qwen") else None,
    )  # fmt: skip
    kind = getattr(transformers, f"{family}ForCausalLM")
    apart = pretrained_side(kind, config, logits)
    layout = "mixtral-stacked" if family == "Mixtral" else "qwen-moe-stacked"
    prove(layout, apart, stacked(apart, kind, config), tmp_path)


# Megatron-core -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a Llama by Megatron-core's own GPTModel, and its logits."""
    out = tmp_path_factory.mktemp("megatron")
    subprocess.run([sys.executable, "-m", "fixtures.surgery.make_megatron_llama", str(out)], check=True, timeout=300)
    return out


@pytest.mark.parametrize(("saved", "layout"), [("torch_dist", "llama-megatron-stacked"), ("ranks", "llama-megatron")])
@pytest.mark.parametrize("vocab", [37, 40])
def test_llama_of_megatron(megatron: Path, saved: str, layout: str, vocab: int, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, rms_norm_eps=1e-5, rope_theta=500.0,
    )  # fmt: skip
    expected = load_file(megatron / "logits.safetensors")
    side = pretrained_side(LlamaForCausalLM, config, lambda model: [model(expected["words"]).logits[..., :37]])
    out = tmp_path / "hf" / "model.safetensors"
    out.parent.mkdir()
    given = [f"vocab={vocab}"] * (vocab != 40)
    ckptool.translate(megatron / saved, out=out, rules_file=layout, set=given)
    side.prepare(out)
    close([expected["logits"]], side.run(out))
    back, again = tmp_path / "back.safetensors", tmp_path / "again.safetensors"
    given = [f"padded={vocab + 3}"]
    ckptool.translate(out, out=back, rules_file=layout, set=given, reverse=True)
    assert load_file(back)["embedding.word_embeddings.weight"].shape == (vocab + 3, 32)
    ckptool.translate(back, out=again, rules_file=layout, set=["heads=4", f"vocab={vocab}"])
    assert same_weights(out, again)
    if vocab == 40:
        ckptool.translate(out, out=back, rules_file=layout, reverse=True, overwrite=True)
        whole = ckptool.load(megatron / "torch_dist")["model"] if saved == "torch_dist" else load_file(back)
        assert all(torch.equal(load_file(back)[name], value) for name, value in whole.items())


# diffusers -----------------------------------------------------------------------------------------------------------

VAE, UNET = "vae-ldm", "unet-ldm"
CROSS, PLAIN = "CrossAttn{}Block2D", "{}Block2D"


def diffusers_model(layout: str, layers: int = 1, blocks: tuple[str, ...] = (CROSS, PLAIN), xl: bool = False) -> Any:
    import diffusers

    sizes = {"layers_per_block": layers, "norm_num_groups": 4, "block_out_channels": (8, 16, 16)[: len(blocks)]}
    if layout == VAE:
        down, up = (tuple(f"{way}coderBlock2D" for _ in blocks) for way in ("DownEn", "UpDe"))
        return randomised(diffusers.AutoencoderKL(down_block_types=down, up_block_types=up, **sizes))
    more: dict[str, Any] = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
    more |= {"projection_class_embeddings_input_dim": 32, "use_linear_projection": True}
    more |= {"transformer_layers_per_block": 2}
    return randomised(
        diffusers.UNet2DConditionModel(
            down_block_types=tuple(each.format("Down") for each in blocks),
            up_block_types=tuple(each.format("Up") for each in blocks[::-1]),
            cross_attention_dim=8, attention_head_dim=4, sample_size=8, **sizes, **(more if xl else {}),
        )
    )  # fmt: skip


def as_diffusers_converts(layout: str, ldm: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    from diffusers.loaders import single_file_utils

    name = "convert_ldm_vae_checkpoint" if layout == VAE else "convert_ldm_unet_checkpoint"
    found: dict[str, torch.Tensor] = getattr(single_file_utils, name)(dict(ldm), dict(model.config))
    return found


def outputs(layout: str, folder: Path) -> list[torch.Tensor]:
    """What the model in a folder makes of noise."""
    import diffusers

    kind = diffusers.AutoencoderKL if layout == VAE else diffusers.UNet2DConditionModel
    model, said = kind.from_pretrained(folder, output_loading_info=True, low_cpu_mem_usage=False)
    assert not any(said.values()), said
    noise = torch.randn(1, 3 if layout == VAE else 4, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if layout == VAE:
            return [model(noise).sample]
        more = {"text_embeds": torch.ones(1, 8), "time_ids": torch.ones(1, 6)}
        return [model(noise, 3, torch.ones(1, 5, 8), added_cond_kwargs=more).sample]


DOWN_CASES = [(CROSS, PLAIN), (PLAIN, CROSS), (CROSS, CROSS, PLAIN), (PLAIN,)]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("layout", "blocks", "xl"), [
    (VAE, DOWN_CASES[0], False), (VAE, DOWN_CASES[2], False), (VAE, DOWN_CASES[3], False),
    *((UNET, blocks, xl) for blocks in DOWN_CASES for xl in (False, True)),
])  # fmt: skip
def test_diffusers(layout: str, blocks: tuple[str, ...], xl: bool, layers: int, tmp_path: Path) -> None:
    model = diffusers_model(layout, layers, blocks, xl)
    model.save_pretrained(tmp_path / "a")
    first = tmp_path / "a" / "diffusion_pytorch_model.safetensors"
    ckptool.translate(first, out=tmp_path / "ldm.safetensors", rules_file=layout)
    ldm = load_file(tmp_path / "ldm.safetensors")
    expected = model.state_dict()
    converted = as_diffusers_converts(layout, ldm, model)
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], expected[name]) for name in expected)
    whole = {**ldm, "cond_stage_model.transformer.x": torch.ones(2), "model_ema.decay": torch.ones(())}
    save_file(whole, tmp_path / "whole.safetensors")
    save_file({name.split("model.", 1)[1].removeprefix("diffusion_model."): value for name, value in ldm.items()},
              tmp_path / "bare.safetensors")  # fmt: skip
    for number, (name, rest) in enumerate([("ldm", "refuse"), ("whole", "drop"), ("bare", "refuse")]):
        again = tmp_path / str(number) / first.name
        again.parent.mkdir()
        report = ckptool.translate(tmp_path / f"{name}.safetensors", out=again, rules_file=layout, rest=rest)
        assert ("model_ema.decay" in str(report.details)) == (name == "whole")
        assert same_weights(again, first)
    (again.parent / "config.json").write_bytes((first.parent / "config.json").read_bytes())
    close(outputs(layout, first.parent), outputs(layout, again.parent))  # of equal weights


def test_old_folders_of_a_vae(tmp_path: Path) -> None:
    """Those of diffusers before 0.18, which loads them still."""
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = diffusers_model(VAE).state_dict()
    for name in [name for name in state if ".attentions." in name]:
        word = next((word for word in old if f".{word}." in name), None)
        if word:
            state[name.replace(f".{word}.", f".{old[word]}.")] = state.pop(name)
    save_file(state, tmp_path / "old.safetensors")
    save_file(diffusers_model(VAE).state_dict(), tmp_path / "new.safetensors")
    for name in ("old", "new"):
        ckptool.translate(tmp_path / f"{name}.safetensors", out=tmp_path / f"{name}.pt", rules_file=VAE)
    assert same_weights(tmp_path / "old.pt", tmp_path / "new.pt")


# Models that have the names of another and compute something else with them -----------------------------------------


@pytest.mark.parametrize("family", ["Gemma", "Granite", "SmolLM3", "Helium", "Ernie4_5", "GPTBigCode"])
def test_models_with_the_names_of_another_are_refused(family: str, tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    layouts = ["llama-meta", "llama-megatron"]
    if family == "GPTBigCode":  # [out, in], as nanoGPT, and the rows of q, k and v head by head
        sizes, layouts = {"n_embd": 32, "n_layer": 1, "n_head": 4, "multi_query": False}, ["gpt2-nanogpt"]
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=64, pad_token_id=0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / "model")
    for layout in layouts:
        with pytest.raises(CkptoolError, match=f"config.json says '{config.model_type}'"):
            ckptool.translate(tmp_path / "model", rules_file=layout, out=tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
