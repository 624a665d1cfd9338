"""A PyTorch network on pictures of clothes, by Downpour SGD: 2 workers, 1 parameter server.

    python examples/fashion_cnn.py
    gradstream train examples/fashion_cnn.py --strategy synchronous --workers 2

The data comes with the package: 5,000 training and 1,000 test images of Fashion-MNIST.
"""

from __future__ import annotations

import torch
from torch import nn

import gradstream as gs


def build() -> nn.Module:
    """Two convolutions and two dense layers: images (n, 1, 28, 28) to scores (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(scores, targets)


def job() -> gs.Job:
    """Well over 80 % of the test images right after 8 passes over the data."""
    return gs.Job(
        model=gs.from_torch(build, loss),
        data=gs.data.fashion_mnist(),
        strategy="downpour",
        workers=2,
        batch_size=32,
        epochs=8,
    )


if __name__ == "__main__":
    run = gs.train(job())
    print(f"test accuracy {run.evaluate().accuracy:.1%}")
