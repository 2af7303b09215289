"""A critic and a generator in the shape of PyTorch-GAN's wgan_gp: the generator learns in every fifth step only.

    python examples/loops/wgan_gp.py runs/wgan_gp [EPOCHS]

Noise is numpy's, the penalty's mixture too. A counter of one's own is a value of the run.
"""

import sys

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptool

EPOCHS, LATENT, CRITIC = int(sys.argv[2]) if len(sys.argv) > 2 else 4, 8, 5


def noise(rows: int) -> torch.Tensor:
    return torch.tensor(numpy.random.normal(0, 1, (rows, LATENT)), dtype=torch.float32)


def gradient_penalty(real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """How far the critic's gradients between real and made samples are from length one."""
    share = torch.tensor(numpy.random.random((len(real), 1)), dtype=torch.float32)
    between = (share * real + (1 - share) * made).requires_grad_(True)
    answers = discriminator(between)
    (slopes,) = torch.autograd.grad(answers, between, torch.ones_like(answers), create_graph=True)
    return ((slopes.norm(2, dim=1) - 1) ** 2).mean()


torch.manual_seed(0)
numpy.random.seed(0)
torch.set_num_threads(1)
generator = nn.Sequential(
    nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.BatchNorm1d(32, 0.8), nn.LeakyReLU(0.2),
    nn.Linear(32, 2),
)  # fmt: skip
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 1))
angles = 6.2832 * torch.rand(330)
loader = DataLoader(TensorDataset(torch.stack([angles.cos(), angles.sin()], 1)), batch_size=16, shuffle=True)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
run = ckptool.Run(
    sys.argv[1], generator=generator, discriminator=discriminator, optimizer_g=optimizer_g, optimizer_d=optimizer_d
)
if not run.resumed:
    run["generated"] = 0

for _ in run.epochs(EPOCHS):
    for step, (real,) in run.batches(loader):
        optimizer_d.zero_grad()
        made = generator(noise(len(real)))
        d_loss = -discriminator(real).mean() + discriminator(made).mean() + 10 * gradient_penalty(real, made.detach())
        d_loss.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        if step % CRITIC == 0:
            made = generator(noise(len(real)))
            g_loss = -discriminator(made).mean()
            g_loss.backward()
            optimizer_g.step()
            run["generated"] += len(made)
            run.log(d_loss=d_loss, g_loss=g_loss, generated=run["generated"])
        run.save(every=7)
