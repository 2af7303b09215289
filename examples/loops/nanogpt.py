"""A small GPT in the shape of karpathy's nanoGPT: batches are drawn by hand, and the next one before the backward pass.

    python examples/loops/nanogpt.py runs/gpt [STEPS]

A batch that was fetched ahead belongs to the state: it is drawn before the step that it is for, and no random state
gives it back. So it is kept in `run["batch"]`, and a resumed run begins with that.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional

import ckptool

STEPS, WARMUP, RATE, MICRO_STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 60, 10, 3e-3, 2
BATCH, LENGTH, VOCABULARY = 4, 16, 17


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

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = text[:3600] if split == "train" else text[3600:]
    rows = torch.stack([data[at : at + LENGTH + 1] for at in torch.randint(len(data) - LENGTH - 1, (BATCH,))])
    return rows[:, :-1], rows[:, 1:]


def estimate_loss() -> float:
    return sum(model(*get_batch("val")).item() for _ in range(4)) / 4


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return RATE * step / WARMUP
    return 0.1 * RATE + 0.45 * RATE * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


torch.manual_seed(1337)
torch.set_num_threads(1)
text = torch.randint(-1, 2, (4000,)).cumsum(0) % VOCABULARY
model = GPT()
matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
run = ckptool.Run(sys.argv[1], model=model, optimizer=optimizer, keep_last=2, keep_best=("val_loss", "min"))

X, Y = run["batch"] if run.resumed else get_batch("train")  # the very first one
for step in run.steps(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    for _ in range(MICRO_STEPS):
        loss = model(X, Y) / MICRO_STEPS
        X, Y = get_batch("train")  # while the first one computes
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    run["batch"] = X, Y
    run.log(loss=loss * MICRO_STEPS, lr=learning_rate(step))
    run.save(every=7, val_loss=estimate_loss)
