"""`trainable_token_indices`: what `lora merge` writes is loaded by transformers with the bits of PEFT's merge."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SIZES |= {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16, "pad_token_id": 0, "num_key_value_heads": 2}
SIZES |= {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, str]] = {  # an input embedding, and a matrix of a layer
    "LlamaForCausalLM": ("embed_tokens", "q_proj"),
    "GPT2LMHeadModel": ("wte", "c_attn"),
    "BertForMaskedLM": ("word_embeddings", "query"),
    "T5ForConditionalGeneration": ("shared", "q"),
    "BloomForCausalLM": ("word_embeddings", "dense_h_to_4h"),
    "GPTNeoXForCausalLM": ("embed_in", "dense_h_to_4h"),
    "BartForConditionalGeneration": ("shared", "q_proj"),
}
ROWS = [[3], [7, 49, 0], list(range(50))]


@pytest.mark.parametrize("name", MODELS)
def test_trained_tokens_are_merged_as_peft_merges_them(name: str, tmp_path: Path) -> None:
    import peft
    import transformers

    cls, (table, layer) = getattr(transformers, name), MODELS[name]
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    cases = list(
        product((True, False), ROWS, ((f32, f32), (bf16, f32), (f16, f16)), ("list", "table", "head", "alone"))
    )
    for number, (tied, rows, dtypes, way) in enumerate(cases[::5]):  # of 72, which share no factor with it
        folder = tmp_path / str(number)
        torch.manual_seed(number)
        base = cls(cls.config_class(**SIZES, tie_word_embeddings=tied)).to(dtypes[0])
        head = next(key for key, module in base.named_modules() if module is base.get_output_embeddings())
        base.save_pretrained(folder / "base")
        config: Any = peft.LoraConfig(r=2, target_modules=[layer], trainable_token_indices={table: rows})
        if way == "list":
            config.trainable_token_indices = rows
        elif way == "head" and base.get_output_embeddings().weight is not base.get_input_embeddings().weight:
            config.trainable_token_indices = {table: rows, head: [5, 4]}
        elif way == "alone":
            config = peft.TrainableTokensConfig(target_modules=[table], token_indices=rows)
        adapted = peft.get_peft_model(cls.from_pretrained(folder / "base", dtype="auto"), config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter, dtype=dtypes[1])
        adapted.save_pretrained(folder / "adapter")
        theirs = adapted.merge_and_unload().state_dict()
        ckptool.lora_merge(folder / "base", folder / "adapter", f"{folder / 'out'}/")
        model, info = cls.from_pretrained(folder / "out", dtype="auto", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        ours = model.state_dict()
        case = (tied, rows, dtypes, way)
        assert ours.keys() == theirs.keys(), case
        assert not [key for key in ours if ours[key].dtype != theirs[key].dtype], case
        assert not [key for key in ours if not torch.equal(ours[key], theirs[key])], case
