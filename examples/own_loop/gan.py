"""A GAN that draws crosses: two networks with BatchNorm, two optimizers, two losses."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstream

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=192)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()
session = gradstream.join()

LATENT = 8
torch.manual_seed(0)


def crosses(count: int) -> torch.Tensor:
    """Pictures (count, 1, 8, 8) of a row and a column, in [-1, 1]."""
    places = torch.randint(0, 8, (count, 2), generator=torch.Generator().manual_seed(1))
    pictures = -torch.ones(count, 1, 8, 8)
    every = torch.arange(count)
    pictures[every, 0, places[:, 0], :] = 1
    pictures[every, 0, :, places[:, 1]] = 1
    return pictures


generator = nn.Sequential(
    nn.ConvTranspose2d(LATENT, 32, 4, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 1, 4, 2, 1),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1, bias=False),
    nn.BatchNorm2d(16),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 1, 4),
    nn.Flatten(),
)


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, std=0.02, generator=noise)


noise = torch.Generator().manual_seed(session.rank)
generator.apply(initialize)
critic.apply(initialize)
opt_g = torch.optim.Adam(generator.parameters(), args.lr, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), args.lr, betas=(0.5, 0.999))
(generator, critic), (opt_g, opt_d) = session.wrap((generator, critic), (opt_g, opt_d))
data = TensorDataset(crosses(args.samples))
loader = DataLoader(data, args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
loader = session.shard(loader)
criterion = nn.BCEWithLogitsLoss()

for epoch in range(args.epochs):
    for (real,) in loader:
        opt_d.zero_grad()
        scores = critic(real)
        criterion(scores, torch.ones_like(scores)).backward()
        fake = generator(torch.randn(len(real), LATENT, 1, 1, generator=noise))
        scores = critic(fake.detach())
        loss_d = criterion(scores, torch.zeros_like(scores))
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        scores = critic(fake)
        loss_g = criterion(scores, torch.ones_like(scores))
        loss_g.backward()
        opt_g.step()
    print(
        f"epoch {epoch} loss of the critic on fakes {loss_d.item():.3f}, of the generator {loss_g.item():.3f}"
    )
