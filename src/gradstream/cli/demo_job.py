"""The job of `gradstream demo`: a small CNN on the embedded subset of Fashion-MNIST."""

from __future__ import annotations

import torch
from torch import nn

import gradstream as gs

__all__ = ["job"]


def build() -> nn.Module:
    """Two convolutions and two dense layers: images (n, 1, 28, 28) to scores (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(outputs, targets)


def job() -> gs.Job:
    """Downpour SGD with Adagrad at the server: 2 workers, 1 parameter server."""
    return gs.Job(
        model=gs.from_torch(build, loss),
        data=gs.data.fashion_mnist(),
        strategy="downpour",
        workers=2,
        servers=1,
        batch_size=32,
        epochs=16,
        name="demo",
    )
