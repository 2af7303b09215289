"""A small ResNet on made-up images, with workers that crop and flip: the loader is resumed in the middle of an epoch.

python examples/loops/resnet.py runs/resnet
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ckptool

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 40
WORKERS = int(sys.argv[3]) if len(sys.argv) > 3 else 2


class Images(Dataset):
    """Stripes of four directions in noise; each is cropped and flipped anew every time that it is taken."""

    def __init__(self, count: int = 96, size: int = 12) -> None:
        g = torch.Generator().manual_seed(0)
        self.labels = torch.randint(4, (count,), generator=g)
        wave = torch.arange(size + 4).float()
        across, down = torch.sin(wave)[None, :].expand(size + 4, -1), torch.sin(wave)[:, None].expand(-1, size + 4)
        kinds = torch.stack([across, down, across + down, across - down])
        self.images = kinds[self.labels][:, None] + 0.3 * torch.randn(count, 3, size + 4, size + 4, generator=g)
        self.size = size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        top, left = torch.randint(0, 5, (2,)).tolist()
        image = self.images[index][:, top : top + self.size, left : left + self.size]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), self.labels[index]


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, 1, 1),
    Residual(8, 8, 1),
    Residual(8, 16, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
loader = DataLoader(Images(), batch_size=16, shuffle=True, num_workers=WORKERS)
run = ckptool.Run(sys.argv[1], model=model, optimizer=optimizer, scheduler=scheduler, keep_last=2)

for step, (images, labels) in run.batches(loader, steps=STEPS):
    loss = functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.log(step, loss=loss, lr=scheduler.get_last_lr()[0])
    run.save(every=4)
