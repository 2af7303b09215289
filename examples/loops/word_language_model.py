"""An LSTM in the shape of pytorch/examples word_language_model: no optimizer, and a hidden state from batch to batch.

    python examples/loops/word_language_model.py runs/words [EPOCHS]

The step is taken by hand, the rate is quartered when validation is no better, Ctrl-C ends training early. What the
next step needs is in `run[…]`: the hidden state, the rate, the best loss. `run.batches` takes any iterable of an epoch.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional

import ckptool

EPOCHS, LENGTH, ROWS, WORDS, WIDTH = int(sys.argv[2]) if len(sys.argv) > 2 else 5, 12, 8, 30, 24
NOTHING = torch.zeros(2, ROWS, WIDTH), torch.zeros(2, ROWS, WIDTH)  # the hidden state at the beginning of the text


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: torch.Tensor, hidden: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple]:
        output, hidden = self.lstm(self.drop(self.embedding(words)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden


def batch(rows: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = min(LENGTH, len(rows) - 1 - at)
    return rows[at : at + length], rows[at + 1 : at + 1 + length].flatten()


def evaluate(rows: torch.Tensor) -> float:
    model.eval()
    total, hidden = 0.0, NOTHING
    with torch.no_grad():
        for at in range(0, len(rows) - 1, LENGTH):
            words, targets = batch(rows, at)
            answers, hidden = model(words, hidden)
            total += len(words) * functional.cross_entropy(answers, targets).item()
    return total / (len(rows) - 1)


def train() -> None:
    model.train()
    for _, at in run.batches(range(0, len(train_rows) - 1, LENGTH)):
        words, targets = batch(train_rows, at)
        hidden = NOTHING if at == 0 else tuple(each.detach() for each in run["hidden"])
        model.zero_grad()
        answers, run["hidden"] = model(words, hidden)
        loss = functional.cross_entropy(answers, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-run["lr"])
        run.log(loss=loss, lr=run["lr"])
        run.save(every=8)


torch.manual_seed(1111)
torch.set_num_threads(1)
text = torch.randint(-2, 3, (4000,)).cumsum(0) % WORDS
train_rows, val_rows = (part.view(ROWS, -1).t().contiguous() for part in text.split([3200, 800]))
model = Words()
run = ckptool.Run(sys.argv[1], model=model, keep_last=2, keep_best=("val_loss", "min"))
if not run.resumed:
    run["lr"], run["best"] = 20.0, math.inf

try:
    for epoch in run.epochs(EPOCHS):
        train()
        val_loss = evaluate(val_rows)
        print(f"end of epoch {epoch}: {val_loss:.3f}")
        run.save(val_loss=val_loss)
        if val_loss < run["best"]:
            run["best"] = val_loss
        else:
            run["lr"] /= 4
except KeyboardInterrupt:
    print("training ends early")
print(f"in the end: {evaluate(val_rows):.3f}")
