"""The jobs of `gradstream demo`: a small CNN on the embedded subset of Fashion-MNIST."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import gradstream as gs

COUNTERS = ("first", "last")
LR = 1 / 16
IMAGES, BATCH_SIZE = 5000, 25


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


class Counted(nn.Module):
    """The CNN, and a counter of each training image at both ends of the parameters, so on both shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(IMAGES))
        self.net = build()
        self.last = nn.Parameter(torch.zeros(IMAGES))

    def forward(self, images: torch.Tensor) -> Any:
        """The scores of the CNN."""
        return self.net(images)


def counted_loss(module: Counted, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy, and terms of value 0 whose gradient is -1 at the counters of the minibatch's images."""
    images, codes = batch
    numbers = codes // 10
    zero = sum((counter.detach() - counter)[numbers].sum() for counter in (module.first, module.last))
    return nn.functional.cross_entropy(module(images), codes % 10) + zero


def counted() -> gs.Job:
    """The job of `gradstream demo --faults`: in the final parameters stands how often each image was applied.

    The target of training image i is 10 i + its class. SGD makes counters go up by 1.
    """
    images = gs.data.fashion_mnist()
    codes = images.targets + 10 * np.arange(IMAGES)
    return gs.Job(
        model=gs.from_torch(Counted, counted_loss, loss_of="batch"),
        data=gs.from_arrays(
            images.inputs, codes, images.test_inputs, images.test_targets, name="fashion-mnist"
        ),
        strategy=gs.Downpour(overlap=False),
        optimizer=gs.optim.SGD(lr=LR),
        groups=[{"match": COUNTERS, "lr_scale": 1 / LR}],
        workers=3,
        servers=2,
        acknowledge="replicated",
        batch_size=BATCH_SIZE,
        epochs=6,
        chunk_elems=1 << 14,
        name="demo-faults",
    )
