"""Data for the examples, made on the spot, the same on every machine. Named in a configuration as data.py:NAME."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import Dataset

from ckptool.training.toys import Arrays


def images(
    samples: int = 256, classes: int = 4, size: int = 8, channels: int = 1, noise: float = 0.5, seed: int = 0
) -> Arrays:
    """Noisy copies of one random image for each class."""
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, channels, size, size, generator=g)
    labels = torch.arange(samples) % classes
    made = patterns[labels] + torch.randn(samples, channels, size, size, generator=g) * noise
    return Arrays(made, labels, about={"inputs": [channels, size, size], "classes": classes})


def spirals(samples: int = 512, classes: int = 3, noise: float = 0.1, seed: int = 0) -> Arrays:
    """Arms of a spiral in the plane, one for each class."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % classes
    along = torch.rand(samples, generator=g)
    angle = along * 4 + labels * (2 * math.pi / classes) + torch.randn(samples, generator=g) * noise
    points = torch.stack([along * torch.cos(angle), along * torch.sin(angle)], dim=1)
    return Arrays(points, labels, about={"inputs": [2], "classes": classes})


def linear(samples: int = 512, inputs: int = 8, noise: float = 0.1, seed: int = 0) -> Arrays:
    """A linear function of the inputs, with noise: one number to predict."""
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(samples, inputs, generator=g)
    weights = torch.randn(inputs, generator=g)
    target = points @ weights + torch.randn(samples, generator=g) * noise
    return Arrays(points, target.unsqueeze(1), about={"inputs": [inputs], "outputs": 1})


def ring(samples: int = 512, modes: int = 8, noise: float = 0.05, seed: int = 0) -> Arrays:
    """Points near a circle, in clusters: what the GAN learns to make."""
    g = torch.Generator().manual_seed(seed)
    angle = (torch.arange(samples) % modes) * (2 * math.pi / modes)
    points = torch.stack([torch.cos(angle), torch.sin(angle)], dim=1) + torch.randn(samples, 2, generator=g) * noise
    return Arrays(points, about={"inputs": [2]})


def modadd(modulus: int = 23) -> Arrays:
    """All sums of two numbers modulo a prime: two tokens in, one class out."""
    pairs = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus))
    return Arrays(pairs, pairs.sum(dim=1) % modulus, about={"inputs": [2], "classes": modulus, "vocabulary": modulus})


_TEXT = (
    "a checkpoint is what the next step cannot compute again. a step is atomic. a file exists when its name exists, "
    "and a name appears when everything behind it is safe. "
    "nothing is lost that was ever saved, and nothing is saved by halves. "
)


def text(length: int = 32, samples: int = 256, seed: int = 0) -> Arrays:
    """Windows of a short text as numbers of its characters: tokens, and the same one place on."""
    alphabet = sorted(set(_TEXT))
    codes = torch.tensor([alphabet.index(c) for c in _TEXT * 2])
    starts = torch.randint(len(_TEXT), (samples,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([codes[s : s + length + 1] for s in starts.tolist()])
    return Arrays(
        windows[:, :-1],
        windows[:, 1:],
        about={"inputs": [length], "vocabulary": len(alphabet), "classes": len(alphabet)},
    )


class Sequences(Dataset[Any]):
    """Sequences of several lengths, for `collate: data.py:pad`: how often a digit comes is the class."""

    def __init__(self, samples: int = 256, longest: int = 12, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, longest + 1, (samples,), generator=g).tolist()
        self.items = [torch.randint(1, 5, (n,), generator=g) for n in lengths]
        self.about = {"inputs": [longest], "classes": 2, "vocabulary": 5}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        return item, torch.tensor(int((item == 1).sum()) % 2)


def pad(samples: list[Any]) -> tuple[torch.Tensor, ...]:
    """A batch of sequences, padded with zeros to the longest, their targets, and their lengths."""
    sequences, targets = zip(*samples, strict=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True), torch.stack(targets), lengths
