"""`lora extract` of models with tied heads: PEFT loads it without a warning and computes what the tuned model does."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "d_model": 32,
    "dim": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "d_ff": 48,
    "d_kv": 8,
    "dff": 48,
    "hidden_dim": 48,
    "d_inner": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
SIZES |= dict.fromkeys(
    (
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "n_layers",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
    ),
    1,
)
SIZES |= dict.fromkeys(("num_heads", "n_head", "n_heads"), 4)
WORDS = torch.arange(3, 11)[None]
NAMES = """BertForMaskedLM BertLMHeadModel BertForPreTraining RobertaForMaskedLM CamembertForMaskedLM ElectraForMaskedLM
AlbertForMaskedLM DistilBertForMaskedLM DebertaV2ForMaskedLM MPNetForMaskedLM
XLMWithLMHeadModel T5ForConditionalGeneration MT5ForConditionalGeneration T5EncoderModel
BartForConditionalGeneration BartForCausalLM MBartForConditionalGeneration PegasusForConditionalGeneration
BloomForCausalLM FalconForCausalLM GPTNeoXForCausalLM GPT2LMHeadModel OpenAIGPTLMHeadModel CTRLLMHeadModel
BioGptForCausalLM OPTForCausalLM LlamaForCausalLM Qwen2ForCausalLM GemmaForCausalLM
ModernBertForMaskedLM BertModel BertForSequenceClassification GPT2Model BloomModel BartModel BertGenerationDecoder
EsmForMaskedLM ConvBertForMaskedLM""".split()


def output(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": torch.arange(1, 5)[None]} if getattr(model.config, "is_encoder_decoder", False) else {}
    with torch.no_grad():
        found = model.eval()(input_ids=WORDS, **more)
    return next(found[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_tuned_model_with_a_tied_head(name: str, tmp_path: Path) -> None:
    import peft
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    config = cls.config_class(**{key: each for key, each in SIZES.items() if "Falcon" not in name or key != "head_dim"})
    config.tie_word_embeddings = True
    base = cls(config)
    inner = {key.rpartition(".")[0] for key, _ in base.named_modules()}  # PEFT saves modules without others in them
    ties = {source for _, source in base.get_expanded_tied_weights_keys(all_submodels=True).items()}
    tuned = copy.deepcopy(base)
    for key, parameter in tuned.named_parameters():
        if key.rpartition(".")[0] not in inner or key in ties:
            parameter.data += torch.randn_like(parameter) * 0.05
    for kind, way in (("safetensors", "save_pretrained"), ("bin", "torch.save")):
        for model, folder in ((base, tmp_path / f"base-{kind}"), (tuned, tmp_path / f"tuned-{kind}")):
            model.save_pretrained(folder)
            if way == "torch.save":
                (folder / "model.safetensors").unlink()
                torch.save(model.state_dict(), folder / "pytorch_model.bin")
        ckptool.lora_extract(tmp_path / f"tuned-{kind}", tmp_path / f"base-{kind}", tmp_path / kind, rank=32)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(missing|unexpected|Unexpected keyword|no tied).*")
            loaded = cls.from_pretrained(tmp_path / "base-safetensors")
            adapted = peft.PeftModel.from_pretrained(loaded, str(tmp_path / kind))
        expected = output(tuned)
        assert (output(adapted.base_model.model) - expected).abs().max() < 2e-4 * expected.abs().max().clamp(1)
        assert (output(base) - expected).abs().max() > 1e-3
        ckptool.lora_merge(tmp_path / "base-safetensors", tmp_path / kind, f"{tmp_path / ('merged-' + kind)}/")
        model, info = cls.from_pretrained(tmp_path / f"merged-{kind}", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert (output(model) - expected).abs().max() < 2e-4 * expected.abs().max().clamp(1), "merged"
