"""Meta's Llama as its own `model.py` computes it, with complex numbers for the rotary embedding, and its files.

Source: meta-llama/llama, llama/model.py (`precompute_freqs_cis`, `apply_rotary_emb`) and llama/generation.py.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

META: dict[str, Any] = {"dim": 32, "hidden": 48, "vocab_size": 40, "norm_eps": 1e-5, "rope_theta": 500.0}
State = dict[str, torch.Tensor]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(META["dim"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + META["norm_eps"]) * self.weight


def without_bias(inside: int, outside: int) -> nn.Linear:
    return nn.Linear(inside, outside, bias=False)


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, META["dim"] // heads
        self.wq = without_bias(META["dim"], META["dim"])
        self.wk, self.wv = (without_bias(META["dim"], kv_heads * self.size) for _ in range(2))
        self.wo = without_bias(META["dim"], META["dim"])

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Neighbouring pairs as complex numbers, turned by the place."""
        steps = 1.0 / META["rope_theta"] ** (torch.arange(0, self.size, 2).float() / self.size)
        angles = torch.outer(torch.arange(x.shape[1]).float(), steps)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turns = torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], heads, self.size)
            for layer, heads in ((self.wq, self.heads), (self.wk, self.kv_heads), (self.wv, self.kv_heads))
        )
        q, k = self.turned(q), self.turned(k)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 2) for each in (k, v))
        out = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        result: torch.Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (without_bias(META["dim"], META["hidden"]) for _ in range(2))
        self.w2 = without_bias(META["hidden"], META["dim"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return result


class Layer(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(heads, kv_heads), FeedForward()
        self.attention_norm, self.ffn_norm = Norm(), Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class MetaLlama(nn.Module):
    """tied: the embeddings are also the output, and not in its state dict, as in Llama 3.2."""

    def __init__(self, kv_heads: int = 2, tied: bool = False, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(META["vocab_size"], META["dim"])
        self.layers = nn.ModuleList(Layer(heads, kv_heads) for _ in range(layers))
        self.norm = Norm()
        self.output = None if tied else without_bias(META["dim"], META["vocab_size"])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(words)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        result: torch.Tensor = (
            functional.linear(x, self.tok_embeddings.weight) if self.output is None else self.output(x)
        )
        return result


def of_rank(state: State, ranks: int, rank: int, kv_heads: int, by_width: bool) -> State:
    """What fairscale's parallel layers of one rank hold. by_width: embeddings are divided along their second axis."""
    found: State = {"rope.freqs": torch.zeros(4)}
    for name, value in state.items():
        row = name.endswith((".wo.weight", ".w2.weight")) or (by_width and name.startswith("tok_"))
        if name.endswith("norm.weight"):
            found[name] = value.clone()
        elif name.endswith((".wk.weight", ".wv.weight")) and ranks > kv_heads:
            found[name] = value.chunk(kv_heads)[rank * kv_heads // ranks].clone()
        else:
            found[name] = value.chunk(ranks, int(row))[rank].clone()
    return found


def write_ranks(state: State, folder: Path, ranks: int, kv_heads: int, by_width: bool) -> None:
    """The folder `consolidated.00.pth`, … with its `params.json`."""
    about = {"dim": META["dim"], "n_heads": 4, "n_layers": 2, "vocab_size": -1}
    (folder / "params.json").write_text(json.dumps(about | ({} if kv_heads == 4 else {"n_kv_heads": kv_heads})))
    for rank in range(ranks):
        torch.save(of_rank(state, ranks, rank, kv_heads, by_width), folder / f"consolidated.{rank:02d}.pth")
