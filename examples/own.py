"""What a run can be given of your own: named in a configuration as own.py:NAME."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from ckptool.training.tasks import Task, supervised


class Waves(torch.utils.data.Dataset):
    """Noisy points of a sine. What is drawn here follows from the seed of the run, the epoch and the index."""

    def __init__(self, samples: int = 100) -> None:
        self.samples = samples
        self.about = {"inputs": [1], "outputs": 1}  # what the model is given, where it takes arguments of these names

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / self.samples * 6.28])
        return x, torch.sin(x) + 0.1 * torch.randn(1)


class WaveStream(torch.utils.data.IterableDataset):
    """The same points one after the other, without an end. The state says where a resumed run reads on."""

    def __init__(self) -> None:
        self.about, self.read = {"inputs": [1], "outputs": 1}, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            self.read += 1
            x = torch.tensor([self.read % 100 / 100 * 6.28])
            yield x, torch.sin(x) + 0.1 * torch.randn(1)

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def together(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of samples."""
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


class Net(nn.Module):
    """Layers in a row, and a head."""

    def __init__(self, inputs: list[int], outputs: int = 0, classes: int = 0, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        first = [nn.Linear(inputs[0], width), nn.Tanh()]
        self.body = nn.Sequential(*first, *(nn.Linear(width, width) for _ in range(layers)))
        self.head = nn.Linear(width, outputs or classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def small(model: nn.Module) -> None:
    """First values near zero."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)


def warmup(step: int, length: int = 50) -> float:
    """A schedule: what the learning rate is multiplied with."""
    return min(1.0, (step + 1) / length)


def robust() -> Task:
    """Numbers, by a loss that does not mind outliers."""
    return supervised(functional.smooth_l1_loss, None)


class WeightNorm:
    """A hook: the norm of all weights, in every logged line."""

    def after_backward(self, trainer, model: str) -> dict[str, float]:
        norms = torch._foreach_norm(list(trainer.models[model].parameters()))
        return {"weight_norm": torch.stack(norms).norm().item()}
