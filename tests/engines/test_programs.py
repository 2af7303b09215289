"""Exported programs of real models: the state dict that ckptool takes out of a `.pt2` is the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
TOKENS = torch.ones(1, 4, dtype=torch.long)


def models() -> dict[str, tuple[Any, torch.Tensor]]:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    def made(kind: str, factory: Any, **settings: Any) -> Any:
        return factory.from_config(AutoConfig.for_model(kind, **settings)).eval()

    image = torch.ones(1, 3, 32, 32)
    words = {"vocab_size": 50, "use_cache": False}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    return {
        "bert": (made("bert", AutoModel, **SMALL, vocab_size=50), TOKENS),
        "vit": (made("vit", AutoModel, **SMALL, image_size=32, patch_size=16), image),
        "llama": (made("llama", AutoModelForCausalLM, **SMALL, **words, tie_word_embeddings=True), TOKENS),
        "gpt2": (made("gpt2", AutoModelForCausalLM, **gpt2, **words), TOKENS),
    }


@pytest.mark.parametrize("name", ["bert", "vit", "llama", "gpt2"])
def test_the_weights_of_an_exported_model_are_its_own(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, example = models()[name]
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (example,), strict=False), str(path))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert ckptool.diff(path, tmp_path / "model.pt").same
    assert not ckptool.scan(path).files[0].calls
    ckptool.convert(path, out=tmp_path / "model.safetensors", ties="copy")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
