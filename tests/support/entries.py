"""Entries of checkpoints without a file: a tensor of torch's as ckptool has it."""

from __future__ import annotations

import torch

from ckptool.checkpoint import Flags, InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import BY_TORCH


def entry_of(tensor: torch.Tensor) -> TensorEntry:
    dtype = BY_TORCH[str(tensor.dtype).removeprefix("torch.")]
    storage = Storage(InlineBytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()))
    flags = Flags(conj=tensor.is_conj(), neg=tensor.is_neg())
    return TensorEntry(storage, dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), flags)
