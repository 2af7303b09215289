"""A GAN that learns a ring of points: two models, two optimizers, noise from a generator of its own.

python examples/loops/gan.py runs/gan
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ckptool

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 60


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, outputs))


torch.manual_seed(0)
torch.set_num_threads(1)
angle = torch.rand(256) * 6.2832
points = torch.stack([angle.cos(), angle.sin()], 1)
generator, discriminator = mlp(8, 2), mlp(2, 1)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
noise = torch.Generator().manual_seed(1)
loader = DataLoader(TensorDataset(points), batch_size=32, shuffle=True, drop_last=True)
run = ckptool.Run(
    sys.argv[1], generator=generator, discriminator=discriminator, opt_g=opt_g, opt_d=opt_d, noise=noise,
    save_async=True, keep_last=2,
)  # fmt: skip

for step, (real,) in run.batches(loader, steps=STEPS):
    fake = generator(torch.randn(len(real), 8, generator=noise))
    opt_d.zero_grad()
    answers = discriminator(torch.cat([real, fake.detach()]))
    truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
    loss_d = functional.binary_cross_entropy_with_logits(answers, truth)
    loss_d.backward()
    opt_d.step()
    opt_g.zero_grad()
    loss_g = functional.binary_cross_entropy_with_logits(discriminator(fake), torch.ones(len(fake), 1))
    loss_g.backward()
    opt_g.step()
    run.log(step, loss=loss_g, loss_d=loss_d)
    run.save(every=5)
