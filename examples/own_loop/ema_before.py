"""A classifier whose weights are averaged over time: the average is what is evaluated."""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--decay", type=float, default=0.9)
args = parser.parse_args()


def spirals(count: int, seed: int) -> TensorDataset:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=rng)
    way = torch.rand(count, generator=rng)
    angle = 4 * way + 2.1 * labels + 0.1 * torch.randn(count, generator=rng)
    return TensorDataset(torch.stack([way * angle.sin(), way * angle.cos()], 1), labels)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    points, labels = data.tensors
    return (model(points).argmax(1) == labels).sum().item() / len(data)


torch.manual_seed(0)
train, test = spirals(500, seed=1), spirals(300, seed=2)  # 500: the last minibatch is a short one
loader = DataLoader(train, args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(
    nn.Linear(2, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)
)
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.decay))
for epoch in range(args.epochs):
    model.train()
    for points, labels in loader:
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
    print(f"epoch {epoch} accuracy {accuracy(model, test):.3f}, of the average {accuracy(average, test):.3f}")
