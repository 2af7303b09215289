"""Adapters of PEFT, and bases for them, made by hand."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "some/model"}


def halves(module: str, out: int = 5, inputs: int = 6, rank: int = 2, seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {f"{module}.lora_A.weight": torch.randn(rank, inputs), f"{module}.lora_B.weight": torch.randn(out, rank)}


def peft(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    named = {f"base_model.model.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def model_folder(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stored(tensors: Any, path: Path, **metadata: str) -> Path:
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path, metadata=metadata or None)
    return path
