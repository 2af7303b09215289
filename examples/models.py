"""Models for the examples, named in a configuration as models.py:NAME. They take sizes from the data's `about`."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class Conv(nn.Module):
    """Convolutions with BatchNorm and dropout, then a linear head."""

    def __init__(
        self, inputs: list[int], classes: int, channels: list[int] | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = [inputs[0], *(channels or [16, 32])]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(dropout))
            for a, b in pairwise(sizes)
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean(dim=(2, 3)))


class Block(nn.Module):
    """One layer of a transformer, normalised before its parts."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """A small causal transformer over characters. The embedding and the output layer are one tensor: tied weights."""

    def __init__(
        self, inputs: list[int], vocabulary: int, width: int = 32, layers: int = 2, heads: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(inputs[0], width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.tokens(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tagger(nn.Module):
    """A recurrent classifier of padded sequences: takes tokens and their lengths."""

    def __init__(self, vocabulary: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, codes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states, _ = self.body(self.tokens(codes))
        last = states[torch.arange(len(codes), device=codes.device), lengths - 1]
        return self.head(last)


class Generator(nn.Sequential):
    """The half of a GAN that makes samples of noise; `noise` is how many numbers it takes."""

    def __init__(self, inputs: list[int], noise: int = 4, hidden: int = 32) -> None:
        super().__init__(
            nn.Linear(noise, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, math.prod(inputs)),
        )
        self.noise = noise


class Discriminator(nn.Sequential):
    """The half of a GAN that tells samples from made ones."""

    def __init__(self, inputs: list[int], hidden: int = 32, dropout: float = 0.1) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(math.prod(inputs), hidden),
            nn.LeakyReLU(0.2),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, 1),
        )
