"""A small GPT that learns to add, in the shape of karpathy's minGPT: a trainer with callbacks, samples drawn for ever.

    python examples/loops/mingpt.py runs/mingpt [STEPS]

The loader's sampler draws with replacement and never ends, two workers fetch ahead. The callback evaluates by itself,
in evaluation mode but not in `run.evaluating`, and saves what is better than before.
"""

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

import ckptool

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 80


class Sums(Dataset):
    """`a + b` for numbers below ten as six digits: a, b, the sum's two digits backwards."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = divmod(index, 10)
        digits = torch.tensor([a, b, (a + b) % 10, (a + b) // 10])
        return digits[:-1], torch.cat([torch.tensor([-1]), digits[2:]])  # only the sum is to be learnt


class GPT(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(10, width), nn.Embedding(3, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
        return self.head(self.block(self.tokens(x) + self.places.weight, src_mask=mask))


class Trainer:
    def __init__(self, folder: str, model: nn.Module, data: Dataset) -> None:
        self.model, self.on_batch_end = model, list[Callable[[Trainer], None]]()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        sampler = RandomSampler(data, replacement=True, num_samples=int(1e10))
        self.loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2)
        self.ckpt = ckptool.Run(folder, model=model, optimizer=self.optimizer, keep_best=("score", "max"))

    def run(self) -> None:
        self.model.train()
        for step, (x, y) in self.ckpt.batches(self.loader, steps=STEPS):
            self.step = step
            self.loss = functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            for callback in self.on_batch_end:
                callback(self)


def score(model: nn.Module, data: Dataset) -> float:
    model.eval()
    with torch.no_grad():
        right = [(model(x)[:, 1:].argmax(-1) == y[:, 1:]).all(1) for x, y in DataLoader(data, batch_size=25)]
    model.train()
    return float(torch.cat(right).float().mean())


def evaluate(trainer: Trainer) -> None:
    trainer.ckpt.log(loss=trainer.loss)
    if trainer.step % 8 == 0:
        now = score(trainer.model, val_data)
        if now >= trainer.ckpt.get("top", 0.0):
            trainer.ckpt["top"] = now
            trainer.ckpt.save(score=now)


torch.manual_seed(3407)
torch.set_num_threads(1)
train_data, val_data = (Subset(Sums(), part.tolist()) for part in torch.randperm(100).split([75, 25]))
trainer = Trainer(sys.argv[1], GPT(), train_data)
trainer.on_batch_end.append(evaluate)
trainer.run()
