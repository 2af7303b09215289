"""Two convolutional networks in the shape of PyTorch-GAN's dcgan: two optimizers, noise from numpy, samples as files.

    python examples/loops/dcgan.py runs/dcgan [EPOCHS]

Count by `step`, which goes on after a resume, and never by `enumerate`, which begins again with the process.
"""

import sys
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ckptool

EPOCHS, LATENT = int(sys.argv[2]) if len(sys.argv) > 2 else 3, 16
SAMPLES = Path(f"{sys.argv[1]}-samples")


def begun(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def noise(rows: int) -> torch.Tensor:
    return torch.tensor(numpy.random.normal(0, 1, (rows, LATENT)), dtype=torch.float32)


torch.manual_seed(0)
numpy.random.seed(0)
torch.set_num_threads(1)
generator = nn.Sequential(
    nn.Linear(LATENT, 128), nn.Unflatten(1, (8, 4, 4)), nn.BatchNorm2d(8), nn.Upsample(scale_factor=2),
    nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8, 0.8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, 1, 1), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.25),
    nn.Conv2d(8, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.25), nn.BatchNorm2d(16, 0.8),
    nn.Flatten(), nn.Linear(64, 1), nn.Sigmoid(),
)  # fmt: skip
generator.apply(begun)
discriminator.apply(begun)
places = torch.linspace(-3, 3, 8)
images = torch.exp(-((places[:, None] - torch.randn(160, 1, 1, 1)) ** 2) - places**2)
loader = DataLoader(TensorDataset(2 * images - 1), batch_size=8, shuffle=True)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
run = ckptool.Run(
    sys.argv[1], generator=generator, discriminator=discriminator, optimizer_g=optimizer_g, optimizer_d=optimizer_d,
    save_async=True, keep_last=2,
)  # fmt: skip
SAMPLES.mkdir(exist_ok=True)

for _ in run.epochs(EPOCHS):
    for step, (real,) in run.batches(loader):
        valid, fake = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        optimizer_g.zero_grad()
        made = generator(noise(len(real)))
        g_loss = functional.binary_cross_entropy(discriminator(made), valid)
        g_loss.backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        real_loss = functional.binary_cross_entropy(discriminator(real), valid)
        fake_loss = functional.binary_cross_entropy(discriminator(made.detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        d_loss.backward()
        optimizer_d.step()

        run.log(g_loss=g_loss, d_loss=d_loss)
        if step % 15 == 0:
            torch.save(made.detach(), SAMPLES / f"{step}.pt")
        run.save(every=5)
