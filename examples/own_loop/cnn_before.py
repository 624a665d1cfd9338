"""A CNN with BatchNorm on pictures of clothes, loaded by two processes."""

from importlib.resources import files

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 4, 32

torch.manual_seed(0)
with np.load(str(files("gradstream.data") / "fashion_mnist.npz")) as kept:
    images, labels = (torch.from_numpy(kept[name]) for name in ("train_images", "train_labels"))
    test_images, test_labels = (torch.from_numpy(kept[name]) for name in ("test_images", "test_labels"))


def prepare(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.float().unsqueeze(1) / 255


def block(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


model = nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(32 * 49, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = TensorDataset(prepare(images), labels.long())
loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)

for _ in range(EPOCHS):
    model.train()
    for pictures, answers in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(pictures), answers)
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    right = (model(prepare(test_images)).argmax(1) == test_labels).float().mean()
    print(f"test accuracy {float(right):.3f}")
