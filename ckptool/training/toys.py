"""The toys that `train --init` and README name: a model and two data sets. More are in `examples/` of the source."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ckptool.commands import arg
from ckptool.errors import UsageError


class Arrays(TensorDataset):
    """Tensors whose first dimension counts the samples. about: sizes for models (`inputs`, `classes`)."""

    def __init__(self, *columns: torch.Tensor, about: dict[str, Any]) -> None:
        super().__init__(*columns)
        self.about = about


def digits() -> Arrays:
    """scikit-learn's 1,797 handwritten digits: f32 [1, 8, 8] from 0 to 1, 10 classes. Needs the extra `examples`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        fix = f"Take other data, {arg(set='data.name=blobs')}, or install it: pip install 'ckptool[examples]'"
        raise UsageError("data: digits come with scikit-learn, which is not installed", "", fix) from None
    dataset = load_digits()
    images = torch.tensor(dataset.images, dtype=torch.float32).unsqueeze(1) / 16
    return Arrays(images, torch.tensor(dataset.target, dtype=torch.int64), about={"inputs": [1, 8, 8], "classes": 10})


def blobs(samples: int = 512, classes: int = 4, inputs: int = 8, spread: float = 1.0, seed: int = 0) -> Arrays:
    """Points around as many centres as there are classes."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, inputs, generator=g) * 3
    labels = torch.arange(samples) % classes
    points = centres[labels] + torch.randn(samples, inputs, generator=g) * spread
    return Arrays(points, labels, about={"inputs": [inputs], "classes": classes})


class MLP(nn.Sequential):
    """Linear layers with ReLU and dropout between them, for inputs of any shape."""

    def __init__(
        self,
        inputs: list[int],
        outputs: int = 0,
        classes: int = 0,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
    ) -> None:
        sizes = [math.prod(inputs), *([64] if hidden is None else hidden), outputs or classes]
        layers: list[nn.Module] = [nn.Flatten()]
        for number, (before, after) in enumerate(pairwise(sizes)):
            layers.append(nn.Linear(before, after))
            if number < len(sizes) - 2:
                layers += [nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*layers)
