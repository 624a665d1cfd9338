"""A ResNet with BatchNorm on pictures of clothes, compiled."""

import argparse
from importlib.resources import files

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstream

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=960)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--backend", default="inductor", help="of torch.compile; needs a C++ compiler")
parser.add_argument("--no-compile", action="store_true")
args = parser.parse_args()
session = gradstream.join()


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.short = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(hidden)) + self.short(x))


def resnet(width: int = 8) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    stages = [Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)]
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


torch.manual_seed(0)
with np.load(str(files("gradstream.data") / "fashion_mnist.npz")) as kept:
    images, labels = (
        torch.from_numpy(kept[name][: args.samples]) for name in ("train_images", "train_labels")
    )
data = TensorDataset(images.unsqueeze(1) / 255, labels.long())
loader = DataLoader(data, args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))
loader = session.shard(loader)
model = resnet()
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
model, optimizer = session.wrap(model, optimizer)
compiled = torch.compile(model, backend=args.backend, disable=args.no_compile)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))

for epoch in range(args.epochs):
    compiled.train()
    for pictures, answers in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(pictures), answers, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
session.close()

model.eval()
with torch.no_grad():
    right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).sum().item()
    print(f"accuracy {right / len(data):.3f}")
