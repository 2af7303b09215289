"""LoRA for models of transformers, whose tensors have other names in memory than in their files (`make engines`)."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE |= {"image_size": 16, "patch_size": 8}
MOE = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE |= {"shared_expert_intermediate_size": 24, "num_key_value_heads": 2, "decoder_sparse_step": 1}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48}
BART |= {
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 32,
}
WORDS, PIXELS = (
    {"input_ids": torch.arange(3, 11)[None]},
    {"pixel_values": torch.linspace(-1, 1, 768).reshape(1, 3, 16, 16)},
)
BOTH = {"text_config": TEXT | {"max_position_embeddings": 16}, "vision_config": IMAGE, "projection_dim": 16}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "ViTForImageClassification": (IMAGE, PIXELS),
    "ViTModel": (IMAGE, PIXELS),
    "DeiTForImageClassification": (IMAGE, PIXELS),
    "BeitForImageClassification": (IMAGE, PIXELS),
    "ASTForAudioClassification": (
        IMAGE | {"max_length": 32, "num_mel_bins": 32, "patch_size": 16},
        {"input_values": torch.linspace(-1, 1, 1024).reshape(1, 32, 32)},
    ),
    "Dinov2ForImageClassification": (IMAGE, PIXELS),
    "ViTMAEModel": (IMAGE | {"mask_ratio": 0.0}, PIXELS),
    "GPTNeoXForCausalLM": (TEXT, WORDS),
    "GPT2LMHeadModel": ({"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}, WORDS),
    "BertForSequenceClassification": (TEXT, WORDS),
    "RobertaForTokenClassification": (TEXT, WORDS),
    "MixtralForCausalLM": (TEXT | MOE, WORDS),
    "Qwen2MoeForCausalLM": (TEXT | MOE, WORDS),
    "Qwen3MoeForCausalLM": (TEXT | MOE | {"head_dim": 8}, WORDS),
    "OlmoeForCausalLM": (TEXT | MOE, WORDS),
    "LlamaForCausalLM": (TEXT, WORDS),
    "MistralForCausalLM": (TEXT | {"num_key_value_heads": 2}, WORDS),
    "Gemma2ForCausalLM": (TEXT | {"head_dim": 8, "num_key_value_heads": 2}, WORDS),
    "Qwen2ForCausalLM": (TEXT | {"num_key_value_heads": 2}, WORDS),
    "CLIPModel": (BOTH, WORDS | PIXELS),
    "CLIPVisionModelWithProjection": (IMAGE | {"projection_dim": 16}, PIXELS),
    "SiglipModel": (BOTH, WORDS | PIXELS),
    "T5ForConditionalGeneration": (T5, WORDS | {"decoder_input_ids": torch.arange(4)[None]}),
    "BartForConditionalGeneration": (BART, WORDS),
    "WhisperForConditionalGeneration": (
        BART
        | {
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {"input_features": torch.linspace(-1, 1, 128).reshape(1, 8, 16), "decoder_input_ids": torch.arange(3)[None]},
    ),
    "LlavaForConditionalGeneration": (
        {
            "image_token_index": 5,
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": IMAGE | {"model_type": "clip_vision_model"},
        },
        WORDS,
    ),
    "DetrForObjectDetection": (
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_queries": 5,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "out_features": ["stage2"],
            },
        },
        {"pixel_values": torch.linspace(-1, 1, 3072).reshape(1, 3, 32, 32)},
    ),
}


def made(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**FAMILIES[name][0])).eval()


def output(model: Any, name: str) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        found = model(**FAMILIES[name][1])
    return next(
        found[key] for key in ("logits", "logits_per_image", "last_hidden_state", "image_embeds") if key in found
    )


def reloaded(name: str, folder: Path) -> Any:
    import transformers

    found, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return found.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_merge_as_peft_merges_them(name: str, tmp_path: Path) -> None:
    import peft

    made(name).save_pretrained(tmp_path / "base")
    base = reloaded(name, tmp_path / "base")
    experts = sorted({key.rsplit("experts.", 1)[1] for key, _ in base.named_parameters() if ".experts." in key})
    more = {"target_parameters": [f"experts.{each}" for each in experts]} if experts else {}
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", **more))
    for key, parameter in adapted.named_parameters():
        if "lora_" in key:
            parameter.data = torch.randn_like(parameter) / 8
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload().eval()  # LoRA of the out_proj of a MultiheadAttention acts once it is merged
    merged.save_pretrained(tmp_path / "theirs")
    ckptool.lora_merge(tmp_path / "base", tmp_path / "adapter", f"{tmp_path / 'out'}/")
    assert (output(reloaded(name, tmp_path / "out"), name) - output(merged, name)).abs().max() < 1e-4
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-6) for key in ours)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_extracted_gives_the_tuned_model(name: str, tmp_path: Path) -> None:
    import peft

    made(name).save_pretrained(tmp_path / "base")
    tuned = made(name)
    inner = {name.rpartition(".")[0] for name, _ in tuned.named_modules()}  # PEFT saves modules without others in them
    tied = getattr(tuned.config, "tie_word_embeddings", False)
    for key, parameter in tuned.named_parameters():
        if key.rpartition(".")[0] not in inner and not (tied and re.search("embed|shared|wte|wpe|proj_out|conv", key)):
            parameter.data += torch.randn_like(parameter) * 0.05
    tuned.save_pretrained(tmp_path / "tuned")
    expected = output(reloaded(name, tmp_path / "tuned"), name)
    ckptool.lora_extract(tmp_path / "tuned", tmp_path / "base", tmp_path / "adapter", rank=32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected|Unexpected keyword|tied|tying).*")
        adapted = peft.PeftModel.from_pretrained(reloaded(name, tmp_path / "base"), str(tmp_path / "adapter")).eval()
    assert (output(adapted, name) - expected).abs().max() < 2e-4 * expected.abs().max().clamp(1)


@pytest.mark.parametrize("experts", [["up", "down", "by"], ["by", "down", "up"], ["down", "up"]])
def test_parameters_are_those_of_peft_in_every_order(experts: list[str], tmp_path: Path) -> None:
    """Two of one shape, in the order of the module, whatever that of the list is."""
    from itertools import permutations

    import peft

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in experts:
                shape = (3, 6, 4) if name != "down" else (3, 4, 6)
                self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))

    torch.manual_seed(0)
    for number, names in enumerate(permutations(experts)):
        net = torch.nn.ModuleDict({"experts": Experts()})
        torch.save(net.state_dict(), tmp_path / f"{number}.pt")
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=[f"experts.{name}" for name in names])
        adapted = peft.get_peft_model(net, config)
        for key, parameter in adapted.named_parameters():
            parameter.data = torch.randn_like(parameter) if "lora_" in key else parameter.data
        adapted.save_pretrained(tmp_path / f"a{number}")
        ckptool.lora_merge(tmp_path / f"{number}.pt", tmp_path / f"a{number}", tmp_path / f"out{number}.pt")
        ours, theirs = torch.load(tmp_path / f"out{number}.pt"), adapted.merge_and_unload().state_dict()
        assert all(torch.allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-5) for key in theirs), names


def test_tables_of_embeddings_are_read_by_peft(tmp_path: Path) -> None:
    import peft

    for number, name in enumerate(("emb", "tok", "tok_emb", "chars", "E")):
        torch.manual_seed(number)
        nets = [torch.nn.Sequential() for _ in range(2)]
        for net in nets:
            net.add_module(name, torch.nn.Embedding(11, 6))
            net.add_module("up_proj", torch.nn.Linear(6, 5, bias=False))
            net.add_module("head", torch.nn.Linear(5, 11))
        torch.save(nets[0].state_dict(), tmp_path / f"base{number}.pt")
        torch.save(nets[1].state_dict(), tmp_path / f"tuned{number}.pt")
        ckptool.lora_extract(
            tmp_path / f"tuned{number}.pt", tmp_path / f"base{number}.pt", tmp_path / f"{number}", rank=5
        )
        adapted = peft.PeftModel.from_pretrained(nets[0], str(tmp_path / f"{number}")).eval()
        x = torch.arange(11)
        assert (adapted(x) - nets[1](x)).abs().max() < 1e-5, name


@pytest.mark.parametrize("name", ["ViTForImageClassification", "MixtralForCausalLM", "LlavaForConditionalGeneration"])
def test_a_model_is_loaded_from_its_files(name: str, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path / "base")
    base, blank = reloaded(name, tmp_path / "base"), made(name)
    for parameter in blank.parameters():
        parameter.data.zero_()
    ckptool.load_into(blank, tmp_path / "base", strict=True)
    assert all(torch.equal(blank.state_dict()[key], value) for key, value in base.state_dict().items())
