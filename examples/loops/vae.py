"""A variational autoencoder in the shape of pytorch/examples vae: random numbers are drawn everywhere.

    python examples/loops/vae.py runs/vae [EPOCHS]

Each forward pass draws noise, so does each test, the test's loader is shuffled, and after each epoch a sample is drawn
and written to a file. The test is not inside `run.evaluating`, so it is a part of training: its draws are in the saved
random states, and are made once.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import ckptool

EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 4
SAMPLES = Path(f"{sys.argv[1]}-samples")


class VAE(nn.Module):
    def __init__(self, pixels: int = 64, width: int = 32, latent: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Linear(pixels, width)
        self.mean, self.spread = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, pixels), nn.Sigmoid())

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.encoder(images).relu()
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def loss_of(images: torch.Tensor) -> torch.Tensor:
    again, mean, spread = model(images)
    likelihood = functional.binary_cross_entropy(again, images, reduction="sum")
    return likelihood - 0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum()


def train(epoch: int) -> None:
    model.train()
    total = 0.0
    for _, images in run.batches(train_loader):
        optimizer.zero_grad()
        loss = loss_of(images)
        loss.backward()
        total += loss.item()
        optimizer.step()
        run.log(loss=loss / len(images))
        run.save(every=10)
    print(f"epoch {epoch}: {total / len(train_data):.3f} (only of what this process has done of it)")


def test() -> float:
    model.eval()
    with torch.no_grad():
        return sum(loss_of(images).item() for images in test_loader) / len(test_data)


torch.manual_seed(1)
torch.set_num_threads(1)
waves = torch.linspace(0, 6.28, 64) * torch.rand(320, 1) + 6.28 * torch.rand(320, 1)
train_data, test_data = (waves.sin() / 2 + 0.5).split([256, 64])
train_loader = DataLoader(train_data, batch_size=8, shuffle=True)
test_loader = DataLoader(test_data, batch_size=16, shuffle=True)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
run = ckptool.Run(sys.argv[1], model=model, optimizer=optimizer, keep_last=2, keep_best=("test_loss", "min"))
SAMPLES.mkdir(exist_ok=True)

for epoch in run.epochs(EPOCHS):
    train(epoch)
    run.save(test_loss=test())
    with torch.no_grad():
        torch.save(model.decoder(torch.randn(16, 4)), SAMPLES / f"{epoch}.pt")
