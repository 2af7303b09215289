"""A small loop, its checkpoints written by hand; each fault is a habit by which it does not resume as it was.

python habits.py FOLDER [FAULT]
"""

import os
import random
import sys

import torch
from torch import nn

out, fault = sys.argv[1], (*sys.argv, "")[2]
path = os.path.join(out, "last.pt")
torch.manual_seed(0)
torch.set_num_threads(1)
random.seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
start, noise, memory, left = 0, 1.0, [], 32
if os.path.exists(path):
    saved = torch.load(path, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
    noise = noise if fault == "number" else saved["noise"]
    memory = memory if fault == "memory" else saved["memory"]
    left = left if fault == "stop" else saved["left"]
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
model.train()
for step in range(start, 99):
    if not left:
        break
    left -= 1
    if fault == "frozen" and step == 14:
        model[0].requires_grad_(False)
    memory.append(torch.randn(4) * noise)
    batch = torch.stack(random.choices(memory, k=8))
    (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean().backward()
    if fault != "window" or step % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
    noise *= 0.95
    if step % 4 == 3:
        model.eval()
        model(batch).sum()
        model.train(fault != "mode")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "noise": noise}
        state["left"] = left
        state |= {"memory": memory, "torch": torch.get_rng_state(), "python": random.getstate()}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
