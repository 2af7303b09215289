"""A small GPT on random walks of tokens, in the style of nanoGPT: a loop of one's own, data drawn by hand.

python examples/loops/nanogpt.py runs/gpt

Killed at any moment and started again, it goes on, and ends with the same bytes.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional

import ckptool

STEPS, WARMUP, RATE, BATCH, LENGTH, VOCABULARY = int(sys.argv[2]) if len(sys.argv) > 2 else 60, 10, 3e-3, 4, 16, 17


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.before(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])))


def batch(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.randint(len(data) - LENGTH - 1, (BATCH,))
    rows = torch.stack([data[i : i + LENGTH + 1] for i in at])
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return RATE * step / WARMUP
    return 0.1 * RATE + 0.45 * RATE * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


torch.manual_seed(1337)
torch.set_num_threads(1)
data = (torch.randint(-1, 2, (4000,)).cumsum(0)) % VOCABULARY
model = GPT()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
run = ckptool.Run(sys.argv[1], model=model, optimizer=optimizer, keep_last=2, keep_best=("val_loss", "min"))


def validation_loss() -> float:
    inputs, targets = batch(data[3600:])
    loss = float(functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
    run["best"] = min(run.get("best", math.inf), loss)
    return loss


for step in run.steps(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    optimizer.zero_grad(set_to_none=True)
    for _ in range(2):  # gradient accumulation
        inputs, targets = batch(data[:3600])
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    run.log(step, loss=loss * 2, lr=learning_rate(step))
    run.save(every=7, val_loss=validation_loss)
