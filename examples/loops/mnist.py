"""An image classifier in the shape of pytorch/examples mnist: after each epoch a test, and a step of the schedule.

    python examples/loops/mnist.py runs/mnist [EPOCHS]

What stands after the inner loop belongs to the epoch: killed there, the run goes back to the last save inside the
epoch, and the effect of the schedule's step is there once, whatever happens. The end of the loop saves.
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ckptool

EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 4


def digits(count: int, seed: int) -> TensorDataset:
    """Images of 12 by 12 with one bright row or column: which one is the class."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (count,), generator=generator)
    images = 0.3 * torch.randn(count, 1, 12, 12, generator=generator)
    for image, kind in zip(images, classes.tolist(), strict=True):
        image[0, kind, :] += 1 if kind < 5 else 0
        image[0, :, kind] += 1 if kind >= 5 else 0
    return TensorDataset(images, classes)


def train() -> None:
    model.train()
    for step, (images, classes) in run.batches(train_loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images), classes)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            run.log(loss=loss)
        run.save(every=6)


def test() -> float:
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, classes in test_loader:
            correct += int((model(images).argmax(1) == classes).sum())
    return correct / len(test_data)


torch.manual_seed(1)
torch.set_num_threads(1)
test_data = digits(64, seed=1)
train_loader = DataLoader(digits(256, seed=0), batch_size=16, shuffle=True)
test_loader = DataLoader(test_data, batch_size=32)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
    nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10), nn.LogSoftmax(1),
)  # fmt: skip
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
run = ckptool.Run(sys.argv[1], model=model, optimizer=optimizer, scheduler=scheduler)

for epoch in run.epochs(EPOCHS):
    train()
    accuracy = test()
    print(f"epoch {epoch}: {accuracy:.1%}")
    run.log(accuracy=accuracy)
    scheduler.step()
