"""Plain safetensors straight to an accelerator, by ways of the stock library that ours has not.

On the CPU our own mapping takes less time than `safetensors.torch.load_file`, and makes as few copies: none. To a CUDA
device safetensors 0.9 reads with many threads (`safe_open.prefetch`), on Apple's GPUs 0.8 reads straight into their
memory (`backend="pread"`). Our reader has judged the header before, and the same open file is read.

Source: the documentation of `safe_open` in safetensors 0.9.0rc1.
"""

from __future__ import annotations

from typing import Any

import torch

from ckptool.bridge.storages import untyped
from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.files import Source


def load_plain(checkpoint: Checkpoint, device: torch.device | None) -> dict[str, Any] | None:
    """The tensors of a plain safetensors file on an accelerator; None where our own way is taken."""
    source, tree = checkpoint.source, checkpoint.tree
    if device is None or not _is_quicker(device) or not isinstance(source, Source) or not _is_plain(checkpoint):
        return None
    from safetensors import SafetensorError, safe_open

    try:
        fd = source.descriptor()
        with safe_open(f"/dev/fd/{fd}", "pt", _name(device), backend="pread") as file:
            found = _prefetched(file) if device.type == "cuda" else file.get_tensors()
    except (SafetensorError, RuntimeError, TypeError, OSError):  # whatever it is, our own way names it, or can do it
        return None
    source.check_unchanged()
    return {name: found[name] for name in tree} if found.keys() == tree.keys() else None


def _prefetched(file: Any) -> dict[str, Any]:
    with file.prefetch() as loader:
        return dict(loader)


def _is_quicker(device: torch.device) -> bool:
    """True for a device that is there, if the stock library has a way of its own to it."""
    if device.type not in ("cuda", "mps") or not untyped.get_device_module(device.type).is_available():
        return False
    from safetensors import safe_open

    there = device.type == "mps" or (device.index or 0) < torch.cuda.device_count()
    return there and hasattr(safe_open, "prefetch" if device.type == "cuda" else "get_tensors")


def _name(device: torch.device) -> str:
    """The device with its number: to torch `cuda` is the current one, to the stock library the first."""
    return f"cuda:{torch.cuda.current_device()}" if str(device) == "cuda" else str(device)


def _is_plain(checkpoint: Checkpoint) -> bool:
    """True for a whole file of names and tensors, none of which shares its bytes with another."""
    if checkpoint.container != "safetensors" or not checkpoint.tensors_only or checkpoint.base:
        return False
    return len({id(entry.storage.data) for entry in checkpoint.tree.values()}) == len(checkpoint.tree)
