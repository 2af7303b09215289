"""A small model of a loop of one's own, whose training draws from every global generator."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)


def parts() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    return {"model": model, "optimizer": optimizer, "scheduler": schedule}


def train(batch: torch.Tensor, model: nn.Module, optimizer: Any, scheduler: Any = None) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch.reshape(-1, 4) + torch.randn(1) + random.random()).pow(2).mean()
    loss.backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss
