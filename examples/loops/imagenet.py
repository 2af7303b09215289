"""A small ResNet in the shape of pytorch/examples imagenet: workers that crop and flip, a validation after each epoch.

    python examples/loops/imagenet.py runs/imagenet [EPOCHS [WORKERS]]

A run resumed inside an epoch has its workers draw the same crops again. The best accuracy so far is a value of the run.
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ckptool

EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 4
WORKERS = int(sys.argv[3]) if len(sys.argv) > 3 else 2


class Images(Dataset):
    """Stripes of four directions in noise; to train on, each is cropped and flipped anew every time it is taken."""

    def __init__(self, count: int, seed: int, train: bool, size: int = 12) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.randint(4, (count,), generator=generator)
        wave = torch.arange(size + 4).sin()
        across, down = wave[None, :].expand(size + 4, -1), wave[:, None].expand(-1, size + 4)
        kinds = torch.stack([across, down, across + down, across - down])
        noise = torch.randn(count, 3, size + 4, size + 4, generator=generator)
        self.images = kinds[self.classes][:, None] + 0.3 * noise
        self.size, self.train = size, train

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        top, left = torch.randint(0, 5, (2,)).tolist() if self.train else (2, 2)
        image = self.images[index][:, top : top + self.size, left : left + self.size]
        return (image.flip(-1) if self.train and torch.rand(()) < 0.5 else image), self.classes[index]


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def validate() -> float:
    model.eval()
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == classes).sum()) for images, classes in val_loader)
    return 100 * right / len(val_data)


torch.manual_seed(0)
torch.set_num_threads(1)
body = [Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
model = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), *body)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
train_data, val_data = Images(96, seed=0, train=True), Images(32, seed=1, train=False)
loader = DataLoader(train_data, batch_size=16, shuffle=True, num_workers=WORKERS)
val_loader = DataLoader(val_data, batch_size=16, num_workers=WORKERS)
run = ckptool.Run(
    sys.argv[1], model=model, optimizer=optimizer, scheduler=scheduler, keep_last=2, keep_best=("acc", "max")
)

for _ in run.epochs(EPOCHS):
    model.train()
    for _, (images, classes) in run.batches(loader):
        loss = functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
        run.save(every=4)
    accuracy = validate()
    scheduler.step()
    run["best"] = max(accuracy, run.get("best", 0.0))
    run.save(acc=accuracy)
