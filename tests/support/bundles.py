"""Members of bundles."""

from __future__ import annotations

import torch
from torch import nn


def small_net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


GAN = {"generator": "G.pt", "discriminator": "D.pt#state_dict", "optimizerA": "optimizer.pt", "ema": "ema.pt"}


SHARED = torch.arange(1024.0).reshape(32, 32)


def net_state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2)).state_dict()
