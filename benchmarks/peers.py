"""What people run today for the same work, as they write it: `python -m benchmarks.peers NAME FILE [OUT]`.

Each is a whole process, imports included, as the command that it is compared with is one.
"""

from __future__ import annotations

import os
import sys

import torch


def rename(file: str, out: str) -> None:
    """The usual ten lines: load, rename, save."""
    checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    checkpoint["state_dict"] = {
        name.removeprefix("module."): tensor for name, tensor in checkpoint["state_dict"].items()
    }
    torch.save(checkpoint, out)
    sync(out)


def rename_many(file: str, out: str) -> None:
    """The same for a bare state dict."""
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    torch.save({name.removeprefix("module."): tensor for name, tensor in tensors.items()}, out)
    sync(out)


def to_safetensors(file: str, out: str) -> None:
    from safetensors.torch import save_file

    checkpoint = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
    save_file(checkpoint["state_dict"], out)
    sync(out)


def average(*files: str) -> None:
    """As fairseq and others do: one file after the other, added up in the type they have, then divided. The last name
    is the output."""
    *inputs, out = files
    total = torch.load(inputs[0], map_location="cpu", weights_only=True)
    weights = total["state_dict"]
    for file in inputs[1:]:
        for name, tensor in torch.load(file, map_location="cpu", weights_only=True)["state_dict"].items():
            weights[name] += tensor
    for tensor in weights.values():
        tensor /= len(inputs)
    torch.save(total, out)
    sync(out)


def translate(file: str, out: str) -> None:
    """Queries, keys and values apart, matrices as [out, in]: a loop over the keys of the whole file in memory."""
    import torch

    new = {}
    for key, value in torch.load(file, weights_only=True).items():
        turned = value.t() if value.dim() == 2 else value
        if ".attn.c_attn." in key:
            for name, part in zip("qkv", turned.chunk(3), strict=True):
                new[key.replace("c_attn", name)] = part.contiguous()
        else:
            new[key] = turned.contiguous()
    torch.save(new, out)
    sync(out)


def lora_merge(base: str, adapter: str, out: str) -> None:
    """As PEFT's merge_and_unload computes it, without the model: the product in f32, added, rounded once."""
    from safetensors.torch import load_file, save_file

    weights, factors = load_file(base), load_file(f"{adapter}/adapter_model.safetensors")
    for name, weight in weights.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        change = factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"] * 2.0
        weights[name] = (weight.float() + change).to(weight.dtype)
    save_file(weights, out)
    sync(out)


def inspect(file: str) -> None:
    tensors = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
    for name, tensor in tensors.items():
        print(name, tensor.dtype, tuple(tensor.shape))


def diff(left: str, right: str) -> None:
    """Largest and mean relative difference, cosine and share of changed elements of every tensor."""
    a = torch.load(left, mmap=True, map_location="cpu", weights_only=True)["state_dict"]
    b = torch.load(right, mmap=True, map_location="cpu", weights_only=True)["state_dict"]
    for name, x in a.items():
        y = b[name]
        distance = (x - y).abs()
        relative = (distance / torch.maximum(x.abs(), y.abs()).clamp_min(1e-12)).mean()
        cosine = torch.nn.functional.cosine_similarity(x.flatten().double(), y.flatten().double(), dim=0)
        print(name, distance.max().item(), relative.item(), cosine.item(), (x != y).sum().item())


def from_dcp(folder: str, out: str) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, out)
    sync(out)


def dcp_to_safetensors(folder: str, out: str) -> None:
    """As `dcp_to_torch_save` does it, with another writer at its end."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, object] = {}
    _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    save_file(state["model"], out)
    sync(out)


def to_dcp(file: str, out: str) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch_save_to_dcp(file, out)


def sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
