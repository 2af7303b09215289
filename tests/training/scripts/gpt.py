"""A loop in nanoGPT's shape, its checkpoints written by hand; each fault leaves out one thing on the way.

python gpt.py FOLDER [FAULT]
"""

import copy
import math
import os
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional

out, fault = sys.argv[1], (*sys.argv, "")[2]
length, batch_size, vocabulary, max_iters, accumulate = 8, 4, 11, 24, 2
torch.manual_seed(1337)
torch.set_num_threads(1)
offsets = torch.Generator().manual_seed(5)
masks = np.random.default_rng(None if fault == "unseeded" else 7)
data = torch.randint(-1, 2, (500,)).cumsum(0) % vocabulary


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.drop = nn.Embedding(vocabulary, 16), nn.Dropout(0.1)
        self.mlp, self.head = nn.Linear(16, 16), nn.Linear(16, vocabulary)

    def forward(self, idx, targets):
        logits = self.head(functional.gelu(self.mlp(self.drop(self.wte(idx)))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class EMA:
    """The weights, averaged over the steps."""

    def __init__(self, model):
        self.module = copy.deepcopy(model).requires_grad_(False)

    def update(self, model):
        for average, weight in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(weight, 0.1)


def get_batch():
    """Windows at random places, in which one token in ten is another."""
    ix = torch.randint(len(data) - length - 1, (batch_size,), generator=offsets)
    x = torch.stack([data[i : i + length] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + length] for i in ix])
    x[torch.from_numpy(masks.random(x.shape) < 0.1)] = 0
    return x, y


def warmup_cosine(step):
    return (step + 1) / 5 if step < 5 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 5) / (max_iters - 5)))


model = GPT()
ema = EMA(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
iter_num, path = 0, os.path.join(out, "ckpt.pt")

checkpoint = torch.load(path, weights_only=True) if os.path.exists(path) else None
if checkpoint:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    if fault != "scheduler":
        scheduler.load_state_dict(checkpoint["scheduler"])
    if fault not in ("ema", "ema in no file"):
        ema.module.load_state_dict(checkpoint["ema"])
    if fault != "generator":
        offsets.set_state(checkpoint["offsets"])
    if fault != "augmentation":
        masks.bit_generator.state = checkpoint["masks"]

X, Y = get_batch()
if checkpoint and fault != "prefetch":
    X, Y = checkpoint["batch"]
    if fault != "generator":
        offsets.set_state(checkpoint["offsets"])
    if fault != "augmentation":
        masks.bit_generator.state = checkpoint["masks"]
if checkpoint and fault != "rng":
    torch.set_rng_state(checkpoint["rng"])
while True:
    if iter_num % 5 == 0 or iter_num == max_iters:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        state |= {"scheduler": scheduler.state_dict(), "ema": ema.module.state_dict(), "rng": torch.get_rng_state()}
        state |= {"offsets": offsets.get_state(), "masks": masks.bit_generator.state, "batch": [X, Y]}
        if fault == "ema in no file":
            del state["ema"]
        torch.save(state, path if fault == "torn" else path + ".tmp")
        if fault != "torn":
            os.replace(path + ".tmp", path)
    if iter_num == max_iters:
        break
    for _ in range(accumulate):
        loss = model(X, Y) / accumulate
        X, Y = get_batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step()
    ema.update(model)
    iter_num += 1
