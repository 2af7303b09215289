"""The small vectors of layouts in `fixtures/surgery/layouts`: weights of one library, and what the other has."""

import hashlib
import json
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

LAYOUT_CASES = Path(__file__).parents[2] / "fixtures" / "surgery" / "layouts"
State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


def digests(state: State) -> dict[str, Any]:
    """The shape and the beginning of the sha256 of the bytes of each tensor."""
    return {
        name: [*value.shape, hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()[:8]]
        for name, value in state.items()
    }


def counting(shapes: dict[str, list[int]]) -> State:
    """Tensors of these shapes with numbers of their own, that need not be stored."""
    return {
        name: (torch.arange(torch.Size(shape).numel()) + crc32(name.encode()) % 9973).reshape(shape).float()
        for name, shape in shapes.items()
    }


def case_of(name: str) -> dict[str, Any]:
    case: dict[str, Any] = json.loads((LAYOUT_CASES / name / "case.json").read_text())
    return case


def both_sides(name: str) -> tuple[Shapes, Shapes, dict[str, str]]:
    """The shapes of both sides of a layout, and which name is which, of tensors that are only renamed."""
    case = case_of(name)
    old = counting(case["shapes"]) if "shapes" in case else load_file(LAYOUT_CASES / name / "model.safetensors")
    named: dict[tuple[Any, ...], list[str]] = {}
    for key, value in case["expected"].items():
        named.setdefault(tuple(value), []).append(key)
    found = {key: named.get(tuple(value), []) for key, value in digests(old).items()}
    new = {key: tuple(value[:-1]) for key, value in case["expected"].items()}
    shapes = {key: tuple(value.shape) for key, value in old.items()}
    return shapes, new, {key: names[0] for key, names in found.items() if len(names) == 1}


# nanoGPT --------------------------------------------------------------------------------------------------------------
# nanoGPT's model and the groups of its optimizer: the names, shapes and numbers of its `ckpt.pt`.
# Transcribed from karpathy/nanoGPT, model.py (MIT License, Copyright (c) 2022 Andrej Karpathy), without what only
# trains.


class LayerNorm(nn.Module):
    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, bias: bool, mask: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.n_head, self.n_embd = n_head, n_embd
        if mask:  # as it does where torch has no flash attention
            self.register_buffer("bias", torch.tril(torch.ones(mask, mask)).view(1, 1, mask, mask))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class MLP(nn.Module):
    def __init__(self, n_embd: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, bias: bool, mask: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(n_embd, bias=bias)
        self.attn = CausalSelfAttention(n_embd, n_head, bias, mask)
        self.ln_2 = LayerNorm(n_embd, bias=bias)
        self.mlp = MLP(n_embd, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The model, with `model_args` as arguments. mask: it keeps the masks of attention, as in a torch without flash."""

    def __init__(
        self,
        *,
        block_size: int,
        vocab_size: int,
        n_layer: int,
        n_head: int,
        n_embd: int,
        bias: bool,
        dropout: float = 0.0,
        mask: bool = False,
    ) -> None:
        super().__init__()
        blocks = [Block(n_embd, n_head, bias, block_size * mask) for _ in range(n_layer)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(blocks),
                "ln_f": LayerNorm(n_embd, bias=bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        """The logits at every place."""
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def configure_optimizers(model: nn.Module) -> torch.optim.AdamW:
    """Its `GPT.configure_optimizers`: matrices decay, vectors do not."""
    parameters: dict[str, Any] = {name: one for name, one in model.named_parameters() if one.requires_grad}
    groups = [
        {"params": [one for one in parameters.values() if one.dim() >= 2], "weight_decay": 0.1},
        {"params": [one for one in parameters.values() if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


# Llama ----------------------------------------------------------------------------------------------------------------
# Meta's Llama as its own `model.py` computes it, with complex numbers for the rotary embedding, and its files.
# Source: meta-llama/llama, llama/model.py (`precompute_freqs_cis`, `apply_rotary_emb`) and llama/generation.py.


META: dict[str, Any] = {"dim": 32, "hidden": 48, "vocab_size": 40, "norm_eps": 1e-5, "rope_theta": 500.0}


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
